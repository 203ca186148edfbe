"""Builds the question of `resihp plan JOB` from a job's ledger: its layout, model, times and slow devices. Reads only.

Called by `resihp.wrapper.commands.plan.command`. Times are the job's own: an iteration of the plan in effect takes as
long as it does now, and the times of other plans are scaled in proportion. The proportion comes from the job's learnt
times if the plan was decided by them; otherwise from arithmetic for its devices; if the devices are unknown, from the
numbers of layers and micro-batches alone, because a small model on the wrong devices would seem to do nothing but
communicate. Remarks name data that the ledger lacks: a plan's own orders of work, and the kind of devices if no probe
of the job reported it.
"""

from __future__ import annotations

import json
import math
import statistics
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from resihp.errors import UsageError
from resihp.wrapper.output.render import duration

if TYPE_CHECKING:
    from resihp.db.reading.queries import Reader
    from resihp.parallelism.plan import Plan
    from resihp.protocol.messages import Declare
    from resihp.scheduler.cost.profile import Profile
    from resihp.scheduler.what_if.catalogue import Hardware
    from resihp.scheduler.what_if.question import Question

DEFAULT_HARDWARE = "a100"
MIN_ITERATIONS, MAX_ITERATIONS_READ = 3, 100
"""Numbers of iterations. Fewest of the first plan from which the iteration time is taken; of a later plan one is
enough, because everything is warm by then. And most that are read: the last ones."""


class JobQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """The question about a job, the job's plan in effect, and remarks on the answer."""

    question: Any
    """A `resihp.scheduler.what_if.question.Question`. The type is Any, because this module imports it only when
    needed."""
    base: Any
    model: str
    hardware: str
    remarks: tuple[str, ...]


def of_job(
    job: str | None,
    ledger: str | None,
    hardware: str | None,
    failed: tuple[int, ...],
    failed_nodes: tuple[str, ...],
    slow: dict[int, float],
    slow_links: dict[tuple[str, str], float],
) -> JobQuestion:
    """Return the question about a job. `slow` and `slow_links` are added to the slow devices and links that the job has
    found itself.

    Raises UsageError if the job has no plan yet, or if its ledger lacks its model.
    """
    from resihp.scheduler.what_if import question
    from resihp.wrapper.output.ledgers import opened

    with opened(job, ledger) as (reader, row):
        query, base, name, remarks = _read(reader, row, hardware)
    query = msgspec.structs.replace(
        query, failed=failed, failed_nodes=failed_nodes, slow_links=query.slow_links | slow_links
    )
    # A rank that the job found slow may be lost now; options that name a rank as both are refused.
    lost_ranks = question.gone(query)
    still_slow = {rank: speed for rank, speed in query.slow.items() if rank not in lost_ranks}
    query = msgspec.structs.replace(query, slow=still_slow | slow)
    question.check_failures(query)
    return JobQuestion(question=query, base=base, model=f"job {row['name']}", hardware=name, remarks=tuple(remarks))


def _read(reader: Reader, row: dict[str, Any], hardware: str | None) -> tuple[Question, Plan, str, list[str]]:
    """Return the question, the plan in effect, the hardware's name, and remarks."""
    from sqlalchemy import select

    from resihp.db.models import JobRow
    from resihp.db.reading.plans.explanations import plan_of
    from resihp.protocol.messages import Declare
    from resihp.scheduler.cost.device_memory import overhead
    from resihp.scheduler.what_if.question import Question

    columns = JobRow.__table__.columns
    [job_columns] = reader.fetch(select(columns["model"], columns["configuration"]).where(columns["id"] == row["id"]))
    plans = reader.shown_plan(row["id"])
    if not plans or job_columns["model"] is None:
        raise UsageError(
            f"job {row['name']}: has no plan yet, or an older resihp wrote its ledger; use --model and --layout"
        )
    declared = msgspec.json.decode(job_columns["model"], type=Declare)
    configuration = json.loads(job_columns["configuration"])
    plan = plans[0]
    base = plan_of(plan, configuration)
    workers = {worker["rank"]: worker for worker in reader.rows("workers", row["id"])}
    places = {rank: workers[rank]["node"] for rank in sorted(base.layout.ranks)}
    slow, links = _slow(reader, row["id"], places)
    name, device, remark = _hardware(reader, row["id"], hardware)
    remarks = [remark] if remark else []
    memory_bytes = configuration.get("job", {}).get("memory_per_device") or declared.memory_bytes
    if memory_bytes:
        device = msgspec.structs.replace(device, memory_bytes=int(memory_bytes))
    replicas = base.layout.replicas
    query = Question(
        model=declared.model,
        hardware=device,
        tp=row["tp"],
        pp=row["pp"],
        dp=len(replicas),
        micro_batches=max(1, base.micro_batches // len(replicas)),
        gpus_per_node=row["gpus_per_node"],
        chunks=max(len(stage.chunks) for replica in replicas for stage in replica.stages),
        schedule=plan["schedule"],
        sequence_parallel=base.sequence_parallel,
        slow=slow,
        slow_links=links,
        places=places,
        devices={rank: workers[rank]["device"] for rank in places},
        overhead=overhead(declared.device, declared.back_end),
    )
    measured = _measured(reader, row["id"], base.epoch) if hardware is None else None
    times, by = _times(plan, declared, "" if remark else name)
    paced = None if measured is None else _at_pace(query, base, times, measured[0])
    if measured is not None and paced is not None:
        query, name = paced, "devices" if remark else name
        remarks = [_pace_remark(*measured, by)]
    if base.digest != plan["digest"]:
        remarks.append(
            f"job {row['name']}: the orders of work and migrations of plan {plan['epoch']} are not in the ledger; "
            f"times before are those of schedule {plan['schedule']}"
        )
    return query, base, name, remarks


def _measured(reader: Reader, job_id: int, epoch: int) -> tuple[float, int] | None:
    """Return the median seconds of an iteration of the plan in effect, and the number of iterations that were used.

    Only iterations since the last change of slow devices and links count. None while there are too few iterations.
    """
    from sqlalchemy import select

    from resihp.db.models import IterationRow

    columns = IterationRow.__table__.columns
    query = select(columns["iteration"], columns["seconds"])
    query = query.where(columns["job_id"] == job_id, columns["epoch"] == epoch, columns["seconds"] > 0.0)
    iteration_rows = reader.fetch(query.order_by(columns["iteration"].desc()).limit(MAX_ITERATIONS_READ))
    if len(iteration_rows) < (MIN_ITERATIONS if epoch == 1 else 1):
        return None
    slow = [row for row in reader.narrow("failures", job_id) if row["kind"] == "fail-slow"]
    slow_since = max((row["ended_iteration"] or row["iteration"] for row in slow), default=0)
    seconds = [row["seconds"] for row in iteration_rows if row["iteration"] >= slow_since] or [
        iteration_rows[0]["seconds"]
    ]
    return statistics.median(seconds), len(seconds)


def _pace_remark(seconds: float, count: int, by: str) -> str:
    return (
        f"an iteration now takes {duration(seconds)}, the median of the last {count} under the plan in effect; "
        f"other times are scaled from it by {by}"
    )


def _times(plan: dict[str, Any], declared: Declare, hardware: str) -> tuple[Profile | None, str]:
    """Return the times for comparing plans, and their description.

    None instead of times means that they are computed for `hardware`, from operations and bytes. `hardware` is empty if
    unknown.
    """
    from resihp.record.journal import PlanBasis
    from resihp.scheduler.cost.profile import layer_units
    from resihp.scheduler.explained.recorded import profile_of

    with suppress(msgspec.MsgspecError):  # an imported ledger may hold anything
        basis = None if plan["basis"] is None else msgspec.convert(plan["basis"], PlanBasis)
        if basis is not None and basis.times is not None:
            return profile_of(basis.times, declared.model.layers), "the measured times of its layers"
    if hardware:
        return None, f"operations and bytes of {hardware}"
    return layer_units(declared.model), "layers and micro-batches alone, as its devices are unknown (--hardware)"


def _at_pace(query: Question, base: Plan, times: Profile | None, measured_s: float) -> Question | None:
    """Return the question with times scaled so that an iteration of the plan in effect takes as long as measured, with
    the slow devices and links.

    None if the plan in effect has no price.
    """
    from resihp.scheduler.cost.prices import iteration_seconds
    from resihp.scheduler.cost.profile import scaled
    from resihp.scheduler.what_if.question import pose

    query = msgspec.structs.replace(query, profile=times)
    situation = pose(query, base)
    priced = iteration_seconds(base, situation)
    if not 0.0 < priced < math.inf:
        return None
    return msgspec.structs.replace(query, profile=scaled(situation.times, measured_s / priced))


def _slow(reader: Reader, job_id: int, places: dict[int, str]) -> tuple[dict[int, float], dict[tuple[str, str], float]]:
    """Return the speeds of ranks and of links between nodes that were declared slow and have not recovered."""
    ranks: dict[int, float] = {}
    links: dict[tuple[str, str], float] = {}
    for failure in reader.rows("failures", job_id):
        if failure["kind"] != "fail-slow" or failure["ended_at"] is not None or failure["speed"] is None:
            continue
        ranks_in_layout = [rank for rank in failure["ranks"] if rank in places]
        if failure["component"] == "link":
            ends = sorted({places[rank] for rank in ranks_in_layout})
            if len(ends) == 2:
                links[ends[0], ends[1]] = min(failure["speed"], links.get((ends[0], ends[1]), 1.0))
        elif failure["component"] == "device":
            ranks |= dict.fromkeys(ranks_in_layout, failure["speed"])
    return ranks, links


def _hardware(reader: Reader, job_id: int, requested: str | None) -> tuple[str, Hardware, str]:
    """Return the name of the devices, their hardware, and a remark if the hardware is guessed.

    The name comes from the option, or else from the job's probes.
    """
    from resihp.scheduler.what_if import catalogue

    if requested is not None:
        return requested, catalogue.hardware(requested), ""
    probed = next((row["hardware"] for row in reader.rows("probes", job_id) if row["hardware"]), None)
    name = next((name for name in catalogue.KNOWN_HARDWARE if name in (probed or "").lower()), None)
    if name is not None:
        return name, catalogue.hardware(name), ""
    problem = f"{probed} is not in the catalogue" if probed else "its devices are unknown"
    remark = f"{problem}: times are for {DEFAULT_HARDWARE}, only their ratios count; name the devices with --hardware"
    return DEFAULT_HARDWARE, catalogue.hardware(DEFAULT_HARDWARE), remark
