"""What one more spare node would have saved a job: its decisions put to the planner again, with a node more. Reads
nothing itself. Called by `db.reading.queries` for `history spares`.

Assumed is that the spare was healthy, idle and at hand at each change of plan after the first, and that nothing else
would have gone otherwise: the same losses, and changes that take as long. Each plan is decided anew, from the layout
that was in effect before it and all that is on record of its decision. Its time of an iteration and that of the plan
that was taken, as the planner prices both, give a share, and that share of the *measured* seconds under the plan is
saved. A spare makes up for what is lost and no more: no plan counts as faster than the first one when all is well. What
a job lost that ended for want of nodes is not counted, nor what the spare costs (`spare_gpu_hours` is told beside it).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from db.reading.plans.explanations import plan_of, situation_at
from resihp.errors import ResihpError
from resihp.parallelism.layout import Layout
from resihp.protocol.messages import Declare

if TYPE_CHECKING:
    from resihp.parallelism.plan import Plan
    from resihp.scheduler.situation import Situation

Row = dict[str, Any]

COLUMNS = (
    *("job", "job_uuid", "started_at", "decisions", "untold", "iterations", "measured_seconds", "saved_seconds"),
    *("saved_gpu_hours", "spare_gpu_hours"),
)
HOUR_S = 3600.0
SPARE = "one more spare"


def saved(job: Row, plans: Sequence[Row], nodes: Mapping[int, str], iterations: Sequence[Row], held_s: float) -> Row:
    """A row of `COLUMNS` of one job. `job`: as `Reader.job`; `plans` in order, their JSON decoded; `nodes` of ranks;
    `iterations` in order with `iteration`, `epoch` and `seconds`, of which one stands for all since the one before, as
    where rows were thinned; `held_s`: for how long the job held its devices.

    `decisions`: changes of plan that were put to the planner again, `untold` those of which the ledger does not tell
    what they were decided from; `iterations` and `measured_seconds` under the former; `saved_seconds` of these, and in
    GPU-hours of all devices that the job was given; `spare_gpu_hours`: what the spare node would have been held.
    """
    seconds: dict[int, list[tuple[int, float]]] = {}
    former = None
    for row in iterations:
        count = 1 if former is None else max(row["iteration"] - former, 1)
        former = row["iteration"]
        if row["seconds"] is not None:
            seconds.setdefault(row["epoch"], []).append((count, row["seconds"]))
    found = dict.fromkeys(("decisions", "untold", "iterations"), 0)
    measured_s = saved_s = 0.0
    took_effect = [row for row in plans if row["in_effect_at"] is not None or row["epoch"] in seconds]
    for before, row in itertools.pairwise(took_effect):
        times = seconds.get(row["epoch"], [])
        if not times:
            continue
        took_s = sum(count * each for count, each in times)
        share = _share(job, took_effect[0], before, row, nodes)
        if share is None:
            found["untold"] += 1
            continue
        found["decisions"] += 1
        found["iterations"] += sum(count for count, _ in times)
        measured_s += took_s
        saved_s += share * took_s
    return {
        "job": job["name"],
        "job_uuid": job["uuid"],
        "started_at": job["started_at"],
        **found,
        "measured_seconds": measured_s,
        "saved_seconds": saved_s,
        "saved_gpu_hours": saved_s * job["nodes"] * job["gpus_per_node"] / HOUR_S,
        "spare_gpu_hours": max(held_s, 0.0) * job["gpus_per_node"] / HOUR_S,
    }


def _share(job: Row, first: Row, before: Row, row: Row, nodes: Mapping[int, str]) -> float | None:
    """Of the time under a plan that one node more would have saved; None where nobody can tell."""
    if job["model"] is None or row["basis"] is None:
        return None
    with suppress(ResihpError, msgspec.MsgspecError, ValueError, TypeError, KeyError):
        from resihp.scheduler.cost.prices import iteration_seconds

        declared = msgspec.json.decode(job["model"], type=Declare)
        configuration = json.loads(job["configuration"])
        healthy = plan_of(first, configuration)
        plan, now, _ = situation_at(job, row, declared, configuration, nodes)
        present = iteration_seconds(plan, now)
        at_best = iteration_seconds(_dealt(healthy, plan.micro_batches), _all_well(now, healthy, nodes))
        then = _with_one_more(now, plan_of(before, configuration).layout, job["gpus_per_node"])
        if math.isfinite(present) and present > 0.0:
            return 0.0 if at_best >= present else max(0.0, 1.0 - max(_decided(then, at_best), at_best) / present)
    return None


def _dealt(plan: Plan, micro_batches: int) -> Plan:
    return plan if plan.micro_batches == micro_batches else plan.dealing(micro_batches)


def _all_well(now: Situation, plan: Plan, nodes: Mapping[int, str]) -> Situation:
    """The situation of a plan whose devices are all there, and as fast as they should be."""
    return msgspec.structs.replace(
        now, base=plan.layout, available=plan.layout.ranks, nodes={**nodes, **now.nodes}, speeds={}, links={}
    )


def _with_one_more(now: Situation, base: Layout, devices: int) -> Situation:
    """With a node of healthy devices that stands by, from the layout that was in effect before."""
    begin = max([*now.nodes, *base.ranks], default=-1) + 1
    more = tuple(range(begin, begin + devices))
    return msgspec.structs.replace(
        now, base=base, available=(*now.available, *more), nodes={**now.nodes, **dict.fromkeys(more, SPARE)}
    )


def _decided(situation: Situation, enough: float) -> float:
    """Seconds of an iteration, or layer times, of what the planner would have decided, without a search; or of what it
    thinks of first, if that is `enough`."""
    from resihp.scheduler.planner import decide

    return decide(situation, search=False, enough=enough).seconds
