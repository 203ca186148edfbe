"""Show each iteration to the detector, before it runs and after it is committed, and keep the predicted iteration
times. Makes no decision.

Before an iteration runs, only its workload is known. The workload determines how long the iteration may take without
progress (`watchdog`), so that an iteration with an enormous document is not given up after ten times the usual time.
After the commit `slowness` acts on the detector's findings. Once transfer times are known, plans take slow links into
account. Called by `controller` and `iterations`.
"""

from __future__ import annotations

from collections.abc import Iterator

from resihp.controller.fail_slow import learned_times, slow_parts, standings
from resihp.controller.state.iterations import Forecast, IterationReports
from resihp.controller.state.job import Job
from resihp.detector.observation import Observation, RankTimes, unpack
from resihp.errors import ProtocolError
from resihp.parallelism.plan import Plan
from resihp.pipeline.schedules import orders_of
from resihp.protocol.messages import Stepped, Workload


def iteration_begins(job: Job, workload: Workload) -> None:
    """Predict the time of an iteration that begins, if the detector knows enough."""
    plan = job.record.plan
    if not job.settings.detect or plan is None or workload.epoch != plan.epoch:
        return
    _adopt(job, plan)
    seconds = job.monitor.forecast(workload.tokens, workload.squares)
    if seconds is not None:
        job.forecast = Forecast(epoch=plan.epoch, iteration=workload.iteration, seconds=seconds)


def _adopt(job: Job, plan: Plan) -> None:
    """Give the detector the plan in effect, if it does not have it yet."""
    if job.expected_epoch != plan.epoch:
        job.monitor.adopt(plan, job.declaration.model, orders_of(plan), job.node_of)
        job.expected_epoch = plan.epoch
        job.inquiry.judged.clear()
        slow_parts.adopted(job)


def iteration_done(job: Job, iteration: int, reports: IterationReports) -> float | None:
    """Show a committed iteration to the detector; return the predicted seconds of the iteration, None if there is no
    prediction."""
    plan = job.record.plan
    if not job.settings.detect or plan is None:
        return None
    ours = reports.of_epoch(plan.epoch)
    if not ours:
        return None
    _adopt(job, plan)
    seconds = max(report.seconds for report in ours.values())
    times = dict(_times(job, ours))
    assessment = job.monitor.observe(Observation(iteration=iteration, epoch=plan.epoch, seconds=seconds, times=times))
    job.findings += assessment.findings
    if assessment.predicted_s:
        job.inquiry.judged.append((iteration, seconds, assessment.predicted_s))
    job.inquiry.healthy_s = assessment.predicted_s or job.inquiry.healthy_s
    job.workloads.append((reports.outcome.tokens, reports.outcome.sum_squared_lengths, plan.micro_batches))
    learned_times.learn(job)
    standings.note(job, iteration, assessment.known)
    return assessment.predicted_s


def _times(job: Job, reports: dict[int, Stepped]) -> Iterator[tuple[int, RankTimes]]:
    for rank, report in reports.items():
        if not report.chunks or rank not in job.record.working:
            continue
        try:
            chunks = unpack(report.chunks, f"rank {rank}")
        except ProtocolError as error:
            job.say("warning", f"{error}; the iteration is judged without it")
            continue
        yield rank, RankTimes(rank=rank, seconds=report.seconds, chunks=chunks, reduced=report.reduced_s)
