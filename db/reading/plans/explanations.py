"""Explanations of a job's plans, computed on request from the ledger's record of each plan. Reads nothing itself.

Called by `Reader.explanations`. A plan has no explanation if its journal lacks the inputs of the decision, if nothing
was predicted, or if an imported row is not a valid plan.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from resihp.db.layouts import from_json
from resihp.errors import ResihpError
from resihp.parallelism.plan import Plan
from resihp.protocol.messages import Declare
from resihp.record.journal import PlanBasis

if TYPE_CHECKING:
    from resihp.scheduler.explained.explanation import Explanation
    from resihp.scheduler.situation import Situation

Row = dict[str, Any]


def explanations(job: Row, plans: Sequence[Row], nodes: Mapping[int, str]) -> dict[int, Explanation]:
    """Return the explanations by epoch. `job` has `model`, `configuration`, `tp` and `pp`; `plans` are in order, with
    their JSON decoded; `nodes` is the node of each rank. If `plans` include the job's first plan, the last plan's
    explanation includes the effect of tuning the first layout."""
    if job["model"] is None:
        return {}
    by_epoch: dict[int, Explanation] = {}
    with suppress(ResihpError, msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        declared = msgspec.json.decode(job["model"], type=Declare)
        configuration = json.loads(job["configuration"])
        first = next((row for row in plans if row["action"] == "start"), None)
        for row in plans:
            with suppress(ResihpError, msgspec.MsgspecError, ValueError, TypeError, KeyError):
                if row["basis"] is not None and row["predicted"] is not None:
                    start = first if row is plans[-1] else None
                    by_epoch[row["epoch"]] = _explanation(job, row, start, declared, configuration, nodes)
    return by_epoch


def _explanation(
    job: Row,
    row: Row,
    first: Row | None,
    declared: Declare,
    configuration: Mapping[str, Any],
    nodes: Mapping[int, str],
) -> Explanation:
    from resihp.scheduler.explained.explanation import explain

    plan, situation, basis = situation_at(job, row, declared, configuration, nodes)
    untuned = first is not None and not configuration.get("layout", {}).get("tune", False)
    healthy = plan_of(first, configuration) if first is not None and untuned else None
    return explain(plan, row["predicted"], situation, unfit=basis.kept_out, healthy=healthy)


def situation_at(
    job: Row, row: Row, declared: Declare, configuration: Mapping[str, Any], nodes: Mapping[int, str]
) -> tuple[Plan, Situation, PlanBasis]:
    """Return a plan, the situation in which it was decided (as if its own layout had been in effect before), and the
    recorded inputs of the decision. Raises various errors for invalid rows, which may be imported."""
    from resihp.scheduler.explained.recorded import situation_of

    basis = msgspec.convert(row["basis"], PlanBasis)
    layout, plan = configuration.get("layout", {}), plan_of(row, configuration)
    situation = situation_of(
        basis,
        plan,
        declared,
        nodes=nodes,
        tp=job["tp"],
        pp=job["pp"],
        chunks=int(layout.get("virtual_stages", 1)),
        memory_bytes=configuration.get("job", {}).get("memory_per_device") or declared.memory_bytes,
    )
    return plan, situation, basis


def plan_of(row: Row, configuration: Mapping[str, Any]) -> Plan:
    """Build a plan from its row, without the orders and migrations, which the ledger does not have. If stages have no
    ranks, micro-batches are dealt evenly."""
    layout = from_json(json.dumps(row["layout"]))
    plan = Plan(
        epoch=row["epoch"],
        layout=layout,
        assignment=tuple(tuple(share) for share in row["assignment"]),
        schedule=row["schedule"],
        sequence_parallel=bool(configuration.get("layout", {}).get("sequence_parallel", False)),
    )
    return plan.dealing(plan.micro_batches) if layout.vacant else plan
