"""Time that one more spare node would have saved a job: the job's decisions are repeated with one more node. Reads
nothing itself. Called by `resihp.db.reading.queries` for `history spares`.

Assumptions: the spare was healthy, idle and available at each change of plan after the first plan, and everything else
would have happened in the same way, with the same losses, and with changes that take as long. Each plan is decided
again, from the layout in effect before it and all recorded inputs of its decision. The iteration time of the repeated
plan and that of the actual plan, both as the planner estimates them, give the share of time saved; this share of the
*measured* seconds under the plan counts as saved. A spare only makes up for losses: no plan counts as faster than the
first plan with healthy devices. The losses of a job that ended for lack of nodes are not counted, nor is the cost of
the spare (`spare_gpu_hours` is reported in addition).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from resihp.db.reading.plans.explanations import plan_of, situation_at
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
SPARE_NODE = "one more spare"


def saved(job: Row, plans: Sequence[Row], nodes: Mapping[int, str], iterations: Sequence[Row], held_s: float) -> Row:
    """Return a row of `COLUMNS` for one job. `job`: as from `Reader.job`. `plans`: in order, with JSON decoded.
    `nodes`: the node of each rank. `iterations`: in order, with `iteration`, `epoch` and `seconds`; where rows were
    thinned, a row represents all iterations since the previous row. `held_s`: seconds for which the job held its
    devices.

    Columns: `decisions`: number of changes of plan that were repeated; `untold`: number of changes with inputs that the
    ledger lacks; `iterations` and `measured_seconds`: iterations, and their time, under the plans of the repeated
    changes; `saved_seconds`: the saved part of `measured_seconds`; `saved_gpu_hours`: `saved_seconds` on all devices of
    the job; `spare_gpu_hours`: GPU-hours of the spare node over `held_s`.
    """
    seconds: dict[int, list[tuple[int, float]]] = {}
    former = None
    for row in iterations:
        count = 1 if former is None else max(row["iteration"] - former, 1)
        former = row["iteration"]
        if row["seconds"] is not None:
            seconds.setdefault(row["epoch"], []).append((count, row["seconds"]))
    counts = dict.fromkeys(("decisions", "untold", "iterations"), 0)
    measured_s = saved_s = 0.0
    took_effect = [row for row in plans if row["in_effect_at"] is not None or row["epoch"] in seconds]
    for before, row in itertools.pairwise(took_effect):
        times = seconds.get(row["epoch"], [])
        if not times:
            continue
        took_s = sum(count * took_one_s for count, took_one_s in times)
        share = _share(job, took_effect[0], before, row, nodes)
        if share is None:
            counts["untold"] += 1
            continue
        counts["decisions"] += 1
        counts["iterations"] += sum(count for count, _ in times)
        measured_s += took_s
        saved_s += share * took_s
    return {
        "job": job["name"],
        "job_uuid": job["uuid"],
        "started_at": job["started_at"],
        **counts,
        "measured_seconds": measured_s,
        "saved_seconds": saved_s,
        "saved_gpu_hours": saved_s * job["nodes"] * job["gpus_per_node"] / HOUR_S,
        "spare_gpu_hours": max(held_s, 0.0) * job["gpus_per_node"] / HOUR_S,
    }


def _share(job: Row, first: Row, before: Row, row: Row, nodes: Mapping[int, str]) -> float | None:
    """Return the share of the time under a plan that one more node would have saved; None if unknown."""
    if job["model"] is None or row["basis"] is None:
        return None
    with suppress(ResihpError, msgspec.MsgspecError, ValueError, TypeError, KeyError, RecursionError):
        from resihp.scheduler.cost.prices import iteration_seconds

        declared = msgspec.json.decode(job["model"], type=Declare)
        configuration = json.loads(job["configuration"])
        healthy = plan_of(first, configuration)
        plan, now, _ = situation_at(job, row, declared, configuration, nodes)
        present = iteration_seconds(plan, now)
        at_best = iteration_seconds(_with_micro_batches(healthy, plan.micro_batches), _all_healthy(now, healthy, nodes))
        then = _with_one_more(now, plan_of(before, configuration).layout, job["gpus_per_node"])
        if math.isfinite(present) and present > 0.0:
            return (
                0.0 if at_best >= present else max(0.0, 1.0 - max(_replanned_seconds(then, at_best), at_best) / present)
            )
    return None


def _with_micro_batches(plan: Plan, micro_batches: int) -> Plan:
    return plan if plan.micro_batches == micro_batches else plan.dealing(micro_batches)


def _all_healthy(now: Situation, plan: Plan, nodes: Mapping[int, str]) -> Situation:
    """Return the situation of a plan with all its devices present and healthy."""
    return msgspec.structs.replace(
        now, base=plan.layout, available=plan.layout.ranks, nodes={**nodes, **now.nodes}, speeds={}, links={}
    )


def _with_one_more(now: Situation, base: Layout, devices: int) -> Situation:
    """Return the situation with one more node of healthy devices on standby, starting from the layout that was in
    effect before."""
    begin = max([*now.nodes, *base.ranks], default=-1) + 1
    more = tuple(range(begin, begin + devices))
    return msgspec.structs.replace(
        now, base=base, available=(*now.available, *more), nodes={**now.nodes, **dict.fromkeys(more, SPARE_NODE)}
    )


def _replanned_seconds(situation: Situation, enough: float) -> float:
    """Return the iteration time, in seconds or layer times, of the plan that the planner would have decided without a
    search; or of the planner's first candidate, if that time is at most `enough`."""
    from resihp.scheduler.planner import decide

    return decide(situation, search=False, enough=enough).seconds
