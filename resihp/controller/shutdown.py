"""Handle requests to stop the job: signals from Slurm or an operator, the time limit, a lost quorum. Never attributes
a fault to a node.

Decides on the meaning of a signal, and ends the job without losing progress: training pauses after the iteration in
progress, one whole replica writes a checkpoint, and the job ends. Steps that take too long are skipped: first the
iteration in progress, then ranks that do not park although others have, and finally the checkpoint, so that the
previous checkpoint counts. Meanwhile no new work is started, and every death is attributed to the stop and to no node.

==========================  ==========================  =======================================================
received                    is interpreted as           consequence
==========================  ==========================  =======================================================
TERM under Slurm            a stop: Slurm knows why     checkpoint, exit 143; 75 for the time limit, preemption
TERM to agents of several   a stop: Slurm knows why     checkpoint, exit 143; 75 for the time limit, preemption
nodes, or of the only one
USR1 or USR2, also to       a warning: time runs out    checkpoint, exit 75 (requeue) or 143, as configured
agents of several nodes
a signal to one agent       a matter of that node       a notice; the node's end is not a failure of the node
TERM, USR1 or USR2 to the   the end of that Slurm job   the node leaves the job in order (`nodes.upkeep`)
agent of a replacement
INT, TERM without Slurm,    an operator's request       checkpoint, exit 130 for INT, else 143; a second request
`resihp stop`                                           ends the job at once
no quorum follows           another may lead            end at once, exit 75: the guardian decides
==========================  ==========================  =======================================================

`proceed` is called by the controller at the end of each event, `resume` by `takeover`.
"""

from __future__ import annotations

import math
import signal as signals
from collections.abc import Iterable
from typing import assert_never

from resihp.controller import agent_signals, iterations, transition
from resihp.controller import interface as api
from resihp.controller.fail_stop import endings
from resihp.controller.planning import situations
from resihp.controller.state.job import Job
from resihp.controller.state.requests import Meaning, StopRequest
from resihp.protocol import messages as m
from resihp.record.journal import JobSignalled, PlanWithdrawn
from resihp.words import natural

MEANING_PATIENCE_S = 2.0
"""Seconds that Slurm has to answer why the job is to stop. Training pauses during this time."""
WARNING_BUDGET_S = 120.0
"""Seconds for a checkpoint after a warning signal, if the job's time limit is not known."""
OPERATOR_BUDGET_S = 300.0
"""Seconds for a checkpoint after an operator's request; a second request ends the job at once. This does not apply
after TERM, because the sender of a TERM may kill the job sooner."""
LIMIT_MARGIN_S = 30.0
"""Seconds before Slurm's time limit by which the job must have ended."""
HURRY_S = 60.0
"""Seconds before the end at which the iteration in progress is given up, but at most half of the time available."""
WARNED_AT_ONCE_S = 60.0
"""Seconds after the start of a run within which a warning counts as given at once."""
LATE_S = 30.0
"""Seconds before the end from which the job no longer waits for the remaining ranks to park, but at most a quarter of
the time available."""


# --- requests -------------------------------------------------------------------------------------------------------


def hear(
    job: Job,
    event: api.Signalled | api.AgentSignalled | api.TimeLeft | api.StopMeaning | api.QuorumLost,
) -> None:
    """Handle an event that requests the end of the job, or that gives its reason or its time."""
    match event:
        case api.Signalled():
            _signalled(job, event)
        case api.AgentSignalled():
            job_signal = agent_signals.interpret(job, event)
            if job_signal is not None:
                _begin(job, job_signal.signal, job_signal.meaning, job_signal.cause)
        case api.TimeLeft():
            job.deadline = None if event.seconds is None else job.now + event.seconds
        case api.StopMeaning():
            _meaning_told(job, event)
        case api.QuorumLost():
            _quorum_lost(job, event)
        case _:
            assert_never(event)


def _signalled(job: Job, event: api.Signalled) -> None:
    """Interpret a signal to the supervisor itself."""
    if event.signal in agent_signals.WARNING_SIGNALS:
        _begin(job, event.signal, "warning", f"received {agent_signals.name_of(event.signal)}")
    elif event.signal == signals.SIGTERM and job.settings.slurm:
        _begin(job, event.signal, None, "received SIGTERM")
    elif event.signal in (signals.SIGTERM, signals.SIGINT):
        _operator(job, event.signal, f"received {agent_signals.name_of(event.signal)}")


def stop_asked(job: Job, event: api.StopAsked) -> None:
    """Handle a request of `resihp stop`."""
    stop_request = job.stop_request
    if event.at_once:
        job.do(api.Reply(request=event.request, ok=True, text="the job ends at once"))
        if stop_request is None or not stop_request.journaled:
            job.log(JobSignalled(signal=0, nodes=(), meaning="operator"))
        endings.end(job, 128 + signals.SIGTERM, f"stopped by an operator, at once; {_unsaved(job)}")
    elif stop_request is not None and stop_request.meaning != "warning":
        job.do(api.Reply(request=event.request, ok=True, text="the job is already stopping"))
    else:
        job.do(api.Reply(request=event.request, ok=True, text=_follows(job)))
        _operator(job, 0, "requested by an operator")


def _operator(job: Job, signal: int, cause: str) -> None:
    """Save the progress on an operator's first request; end the job at once on the second."""
    if job.stop_request is None or job.stop_request.meaning != "operator":
        _begin(job, signal, "operator", cause)
    else:
        endings.end(job, 128 + signal, f"{cause} again: ended at once; {_unsaved(job)}")


def _meaning_told(job: Job, event: api.StopMeaning) -> None:
    stop_request = job.stop_request
    if stop_request is not None and not stop_request.journaled:
        stop_request.meaning = event.meaning


def _quorum_lost(job: Job, event: api.QuorumLost) -> None:
    """End this supervisor at once, because its decisions may not count. Workers are ended, and Slurm gets no
    requests."""
    endings.end(job, 75, f"lost the quorum: {event.reason}")


def resume(job: Job) -> None:
    """Continue stopping the job after a take-over, if the previous supervisor had begun to stop it."""
    signalled = job.record.signalled
    if signalled is not None:
        job.stop_request = StopRequest(
            signal=signalled.signal,
            first_at=-math.inf,
            asked_at=-math.inf,
            nodes=set(signalled.nodes),
            meaning=signalled.meaning,
            journaled=True,
        )


def _begin(job: Job, signal: int, meaning: Meaning | None, cause: str) -> None:
    """Begin to stop the job, unless it is stopping already. A stop may replace a warning, and Slurm's stop may replace
    an operator's; the new stop leaves less time."""
    before = job.stop_request
    if before is not None and not _is_more(job, before.meaning, meaning):
        return
    if meaning is None and not job.settings.slurm:
        meaning = "unknown"
    recent = agent_signals.recent(job)
    job.stop_request = StopRequest(
        signal=signal,
        first_at=before.first_at if before else min([job.now, *(received.at for received in recent.values())]),
        asked_at=job.now,
        nodes=set(recent),
        meaning=meaning,
        writers=before.writers if before else (),
    )
    purpose = "time is running out" if meaning == "warning" else "the job is to stop"
    hint = " (once more to end at once)" if signal == signals.SIGINT else ""
    job.say("notice", f"{cause}: {purpose}; {'already stopping' if before else _follows(job)}{hint}")
    if meaning is None:
        job.do(api.AskWhy())
    elif job.settings.slurm:
        job.do(api.AskTimeLeft())


def _is_more(job: Job, before: Meaning | None, meaning: Meaning | None) -> bool:
    """Return whether a request with `meaning` is more urgent than the request `before` and replaces it."""
    if before == "operator":
        return meaning is None and job.settings.slurm
    return before == "warning" and meaning != "warning"


def _follows(job: Job) -> str:
    if job.stage == "halting":
        return "training is done"
    if job.needs_all:
        return "its processes are ended"
    if job.stage in ("gathering", "restarting"):
        return "training has not begun"
    if job.closing is not None:
        return job.closing.reason
    return "stopping after the iteration under way, with a checkpoint"


# --- consequences ---------------------------------------------------------------------------------------------------


def proceed(job: Job) -> None:
    """Take the next step towards the end of the job, if it has been requested."""
    if job.stage in ("recovering", "ended"):
        return
    agent_signals.report_lone(job)
    stop_request = job.stop_request
    if stop_request is None:
        return
    if stop_request.asked_at == -math.inf:
        stop_request.asked_at = job.now
    left_s = _ends_at(job, stop_request) - job.now
    _journal_meaning(job, stop_request, at_once=left_s <= 0)
    if job.stage == "halting":
        if stop_request.interrupted or (left_s <= 0 and stop_request.meaning != "warning"):
            _leave(job, stop_request.interrupted or "workers had not left")
    elif job.closing is not None:
        _leave(job, job.closing.reason)
    elif job.record.plan is None:
        _leave(job, "training had not begun")
    elif left_s <= 0:
        why = "not all parts were written in time" if stop_request.writers else "no rank parked in time"
        _leave(job, _no_checkpoint(job, why))
    else:
        budget_s = left_s + job.now - stop_request.asked_at
        _withdraw(job)
        if _is_still(job, late=left_s < min(LATE_S, budget_s / 4)):
            _save(job, stop_request)
        elif left_s < min(HURRY_S, budget_s / 2):
            _hurry(job, stop_request)
        elif job.stage == "running" and job.furthest < job.record.goal:
            transition.pause(job, "the job is to stop")


def _journal_meaning(job: Job, stop_request: StopRequest, at_once: bool) -> None:
    if stop_request.journaled:
        return
    if stop_request.meaning is None and (at_once or job.now - stop_request.asked_at > MEANING_PATIENCE_S):
        stop_request.meaning = "unknown"
    if stop_request.meaning is not None:
        stop_request.journaled = True
        nodes = _sorted(stop_request.nodes)
        job.log(JobSignalled(signal=stop_request.signal, nodes=nodes, meaning=stop_request.meaning))


def _ends_at(job: Job, stop_request: StopRequest) -> float:
    graced = stop_request.asked_at + job.settings.signal_grace_s
    limit = math.inf if job.deadline is None else max(job.deadline - LIMIT_MARGIN_S, graced)
    if stop_request.meaning == "operator" and stop_request.signal != signals.SIGTERM:
        return min(stop_request.asked_at + OPERATOR_BUDGET_S, limit)
    if stop_request.meaning != "warning":
        return graced
    return stop_request.asked_at + WARNING_BUDGET_S if job.deadline is None else limit


def _withdraw(job: Job) -> None:
    """Withdraw a proposed plan. No rank has acted on the plan, and all ranks have parked for it."""
    ongoing = job.transition
    if ongoing is not None and job.stage == "proposing":
        assert ongoing.plan is not None
        job.log(PlanWithdrawn(epoch=ongoing.plan.epoch, reason="the job is to stop"))
        job.move("parking")
        ongoing.plan = None
        ongoing.waiting.clear()


def _is_still(job: Job, late: bool) -> bool:
    """Return whether all ranks have parked. `late`: too little time is left to wait for the remaining ranks, so any
    parked state is enough."""
    return job.transition is not None and job.stage == "parking" and (late or not job.transition.waiting)


def _hurry(job: Job, stop_request: StopRequest) -> None:
    """Give up the iteration in progress because it takes too long. Only the progress of this iteration is lost."""
    if job.record.committed == job.begins_after and not job.reports:
        _leave(job, "there is nothing to save")
        return
    if job.transition is not None and job.stage == "parking":
        transition.urge(job, "the job is to stop now")
    else:
        awaited = f"iteration {job.furthest + 1}" if job.furthest < job.record.goal else "the last evaluation"
        job.say("notice", f"{awaited} takes too long and is given up")
        transition.park(job, "the job is to stop now")


def _save(job: Job, stop_request: StopRequest) -> None:
    """Order the ranks of one complete replica to write a checkpoint of the last committed iteration. End the job once
    it is written."""
    assert job.record.plan is not None
    assert job.transition is not None
    if not stop_request.writers:
        iterations.commit_up_to(job, max(job.reports, default=job.record.committed))
    if job.record.committed == job.begins_after:
        _leave(job, "there is nothing to save")
        return
    if job.checkpointed == job.record.committed:
        _leave(job, "its checkpoint is written")
        return
    if stop_request.writers and all(job.members[rank].ready for rank in stop_request.writers):
        return
    assert job.record.last_outcome is not None
    layout = job.record.plan.layout
    for index in range(len(layout.replicas)):
        writers = layout.model_copy(index).ranks
        if all(job.members[rank].ready and situations.can_go_on(job, rank) for rank in writers):
            stop_request.writers = writers
            job.say("progress", f"writing a checkpoint of iteration {job.record.committed}")
            order = m.Save(epoch=job.record.plan.epoch, replica=index, finish=job.record.last_outcome)
            job.order(writers, order)
            return
    stop_request.writers = ()
    if not job.transition.waiting:
        _leave(job, _no_checkpoint(job, "no replica is complete"))


def _no_checkpoint(job: Job, why: str) -> str:
    return f"no checkpoint of it: {why}; {_newest(job)}"


def _newest(job: Job) -> str:
    return f"the newest one is of iteration {job.checkpointed}" if job.checkpointed else "this run has written none"


def _unsaved(job: Job) -> str:
    return f"did not wait for a checkpoint of iteration {job.record.committed}; {_newest(job)}"


def _leave(job: Job, outcome: str) -> None:
    """End the job, once the reason to stop is in the journal. The caller calls this again at each event until then."""
    stop_request = job.stop_request
    assert stop_request is not None
    if not stop_request.journaled:
        return
    is_limit_awaited = job.deadline is None and job.now - stop_request.asked_at <= MEANING_PATIENCE_S
    if is_limit_awaited and _may_be_warned_at_once(job, stop_request):
        return
    runs_again = stop_request.meaning in ("warning", "time-limit", "preempted")
    requeue = runs_again and job.settings.on_warning == "requeue"
    cause = {
        "warning": "time is running out",
        "time-limit": "the time limit is reached",
        "cancelled": "the job is cancelled",
        "preempted": "the job is preempted",
    }.get(
        stop_request.meaning or "",
        f"received {agent_signals.name_of(stop_request.signal)}" if stop_request.signal else "asked to stop",
    )
    reason = f"{cause}: stopped after iteration {job.record.committed}; {outcome}"
    if requeue and _was_warned_at_once(job, stop_request):
        requeue = False
        reason += (
            f"; not run again: each run would be warned {stop_request.asked_at - (job.started_at or 0.0):.0f} s after "
            "its start; raise the time limit (--time), or be warned later (--signal=B:USR2@SECONDS)"
        )
    number = signals.SIGINT if stop_request.signal == signals.SIGINT else signals.SIGTERM
    endings.end(job, 75 if requeue else 128 + number, reason, requeue=requeue)


def _was_warned_at_once(job: Job, stop_request: StopRequest) -> bool:
    """Return whether Slurm warned this run right after its start, because its time limit is shorter than the time
    before the limit at which it warns. The next run would be warned in the same way. A warning for another reason, such
    as a preemption, is no such case."""
    if not _may_be_warned_at_once(job, stop_request) or job.started_at is None or job.deadline is None:
        return False
    return job.deadline - job.started_at < job.settings.warning_lead_s + WARNED_AT_ONCE_S


def _may_be_warned_at_once(job: Job, stop_request: StopRequest) -> bool:
    """Return whether a warning came right after the start of the run, and may be due to a time limit that is too
    short."""
    if stop_request.meaning != "warning" or job.lifecycle.is_taken_over or not job.settings.warning_lead_s:
        return False
    return stop_request.asked_at - (job.started_at or 0.0) < WARNED_AT_ONCE_S


def _sorted(nodes: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(nodes, key=natural))
