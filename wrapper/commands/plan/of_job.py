"""The question of `resihp plan JOB`: a job's own layout, model, times and slow devices, as its ledger tells them. Reads
only.

Called by `wrapper.commands.plan.command`. Times are the job's: an iteration of the plan in effect takes what it took,
as things are now, and other plans take more or less in proportion. In what proportion, the job's learnt times say where
the plan was decided by such; else arithmetic for its devices; where these are not known, layers and micro-batches
alone, for a small model on the wrong devices would seem to do nothing but communicate. What the ledger does not hold is
said: orders of work that a plan has of its own, and what the devices are, where no probe of the job could tell.
"""

from __future__ import annotations

import json
import math
import statistics
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from resihp.errors import UsageError
from wrapper.output.render import duration

if TYPE_CHECKING:
    from db.reading.queries import Reader
    from resihp.parallelism.plan import Plan
    from resihp.protocol.messages import Declare
    from resihp.scheduler.cost.profile import Profile
    from resihp.scheduler.what_if.catalogue import Hardware
    from resihp.scheduler.what_if.question import Question

DEFAULT_HARDWARE = "a100"
FEW, NEAR = 3, 100
"""So many iterations tell how long they take, of a plan after the first any, as all is warm by then; and no more of the
last ones are asked."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A job's question, its plan in effect, and what one should know of the answer."""

    question: Any
    """`resihp.scheduler.what_if.question.Question`, which this module does not import before it is needed."""
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
) -> Found:
    """What is asked of a job. `slow` and `slow_links` come on top of what the job found itself.

    Raises UsageError if the job has no plan yet, or the ledger does not know what it trains.
    """
    from resihp.scheduler.what_if import question
    from wrapper.output.ledgers import opened

    with opened(job, ledger) as (reader, row):
        asked, base, name, remarks = _read(reader, row, hardware)
    asked = msgspec.structs.replace(
        asked, failed=failed, failed_nodes=failed_nodes, slow_links=asked.slow_links | slow_links
    )
    lost = question.gone(asked)  # what the job found slow may be lost now; what is asked to be both is refused
    still_slow = {rank: speed for rank, speed in asked.slow.items() if rank not in lost}
    asked = msgspec.structs.replace(asked, slow=still_slow | slow)
    question.check_failures(asked)
    return Found(question=asked, base=base, model=f"job {row['name']}", hardware=name, remarks=tuple(remarks))


def _read(reader: Reader, row: dict[str, Any], hardware: str | None) -> tuple[Question, Plan, str, list[str]]:
    """The question, the plan in effect, the hardware's name, and remarks."""
    from sqlalchemy import select

    from db.models import JobRow
    from db.reading.plans.explanations import plan_of
    from resihp.protocol.messages import Declare
    from resihp.scheduler.cost.device_memory import overhead
    from resihp.scheduler.what_if.question import Question

    columns = JobRow.__table__.columns
    [own] = reader.fetch(select(columns["model"], columns["configuration"]).where(columns["id"] == row["id"]))
    plans = reader.shown_plan(row["id"])
    if not plans or own["model"] is None:
        raise UsageError(
            f"job {row['name']}: has no plan yet, or its ledger is of an older resihp; give --model and --layout"
        )
    declared = msgspec.json.decode(own["model"], type=Declare)
    configuration = json.loads(own["configuration"])
    told = plans[0]
    base = plan_of(told, configuration)
    workers = {worker["rank"]: worker for worker in reader.rows("workers", row["id"])}
    places = {rank: workers[rank]["node"] for rank in sorted(base.layout.ranks)}
    slow, links = _slow(reader, row["id"], places)
    name, device, remark = _hardware(reader, row["id"], hardware)
    remarks = [remark] if remark else []
    memory_bytes = configuration.get("job", {}).get("memory_per_device") or declared.memory_bytes
    if memory_bytes:
        device = msgspec.structs.replace(device, memory_bytes=int(memory_bytes))
    replicas = base.layout.replicas
    asked = Question(
        model=declared.model,
        hardware=device,
        tp=row["tp"],
        pp=row["pp"],
        dp=len(replicas),
        micro_batches=max(1, base.micro_batches // len(replicas)),
        gpus_per_node=row["gpus_per_node"],
        chunks=max(len(stage.chunks) for replica in replicas for stage in replica.stages),
        schedule=told["schedule"],
        sequence_parallel=base.sequence_parallel,
        slow=slow,
        slow_links=links,
        places=places,
        devices={rank: workers[rank]["device"] for rank in places},
        overhead=overhead(declared.device, declared.back_end),
    )
    measured = _measured(reader, row["id"], base.epoch) if hardware is None else None
    times, by = _times(told, declared, "" if remark else name)
    paced = None if measured is None else _at_pace(asked, base, times, measured[0])
    if measured is not None and paced is not None:
        asked, name = paced, "devices" if remark else name
        remarks = [_said(*measured, by)]
    if base.digest != told["digest"]:
        remarks.append(
            f"job {row['name']}: the orders of work and migrations of plan {told['epoch']} are not in the ledger; "
            f"times before are those of schedule {told['schedule']}"
        )
    return asked, base, name, remarks


def _measured(reader: Reader, job_id: int, epoch: int) -> tuple[float, int] | None:
    """Median seconds of an iteration of the plan in effect, since the last change of what is slow, and of how many;
    None while there are too few."""
    from sqlalchemy import select

    from db.models import IterationRow

    columns = IterationRow.__table__.columns
    query = select(columns["iteration"], columns["seconds"])
    query = query.where(columns["job_id"] == job_id, columns["epoch"] == epoch, columns["seconds"] > 0.0)
    found = reader.fetch(query.order_by(columns["iteration"].desc()).limit(NEAR))
    if len(found) < (FEW if epoch == 1 else 1):
        return None
    slow = [row for row in reader.narrow("failures", job_id) if row["kind"] == "fail-slow"]
    since = max((row["ended_iteration"] or row["iteration"] for row in slow), default=0)
    now = [row["seconds"] for row in found if row["iteration"] >= since] or [found[0]["seconds"]]
    return statistics.median(now), len(now)


def _said(seconds: float, of: int, by: str) -> str:
    return (
        f"an iteration takes {duration(seconds)} as things are, the median of the last {of} under the plan in effect; "
        f"other times follow from that in proportion, by {by}"
    )


def _times(plan: dict[str, Any], declared: Declare, hardware: str) -> tuple[Profile | None, str]:
    """By what plans are told apart, and that in words: None is the arithmetic for `hardware`, empty if not known."""
    from resihp.record.journal import PlanBasis
    from resihp.scheduler.cost.profile import layer_units
    from resihp.scheduler.explained.recorded import profile_of

    with suppress(msgspec.MsgspecError):  # what was imported may hold anything
        basis = None if plan["basis"] is None else msgspec.convert(plan["basis"], PlanBasis)
        if basis is not None and basis.times is not None:
            return profile_of(basis.times, declared.model.layers), "what its layers were measured to take"
    if hardware:
        return None, f"operations and bytes of {hardware}"
    return layer_units(declared.model), "layers and micro-batches alone: what its devices are is not known (--hardware)"


def _at_pace(asked: Question, base: Plan, times: Profile | None, measured_s: float) -> Question | None:
    """With times by which the plan in effect takes what was measured, slow as things are now; None where it has no
    price."""
    from resihp.scheduler.cost.prices import iteration_seconds
    from resihp.scheduler.cost.profile import scaled
    from resihp.scheduler.what_if.question import pose

    asked = msgspec.structs.replace(asked, profile=times)
    now = pose(asked, base)
    priced = iteration_seconds(base, now)
    if not 0.0 < priced < math.inf:
        return None
    return msgspec.structs.replace(asked, profile=scaled(now.times, measured_s / priced))


def _slow(reader: Reader, job_id: int, places: dict[int, str]) -> tuple[dict[int, float], dict[tuple[str, str], float]]:
    """Speeds of ranks and of links between nodes that were found slow and have not recovered."""
    ranks: dict[int, float] = {}
    links: dict[tuple[str, str], float] = {}
    for failure in reader.rows("failures", job_id):
        if failure["kind"] != "fail-slow" or failure["ended_at"] is not None or failure["speed"] is None:
            continue
        known = [rank for rank in failure["ranks"] if rank in places]
        if failure["component"] == "link":
            ends = sorted({places[rank] for rank in known})
            if len(ends) == 2:
                links[ends[0], ends[1]] = min(failure["speed"], links.get((ends[0], ends[1]), 1.0))
        elif failure["component"] == "device":
            ranks |= dict.fromkeys(known, failure["speed"])
    return ranks, links


def _hardware(reader: Reader, job_id: int, named: str | None) -> tuple[str, Hardware, str]:
    """What the devices are: as asked, else as the job's probes tell; its name, and a remark where it is a guess."""
    from resihp.scheduler.what_if import catalogue

    if named is not None:
        return named, catalogue.hardware(named), ""
    told = next((row["hardware"] for row in reader.rows("probes", job_id) if row["hardware"]), None)
    known = next((name for name in catalogue.KNOWN_HARDWARE if name in (told or "").lower()), None)
    if known is not None:
        return known, catalogue.hardware(known), ""
    what = f"{told} is not in the catalogue" if told else "what its devices are is not known"
    remark = f"{what}: seconds are those of {DEFAULT_HARDWARE}, trust their ratios; name it with --hardware"
    return DEFAULT_HARDWARE, catalogue.hardware(DEFAULT_HARDWARE), remark
