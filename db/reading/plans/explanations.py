"""Plans of a job, explained: worked out when somebody asks, from what the ledger kept of each. Reads nothing itself.

Called by `Reader.explanations`. A plan has none where its journal does not tell what it was decided from, where nothing
was predicted, or where a row that was imported makes no plan.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from db.layouts import from_json
from resihp.errors import ResihpError
from resihp.parallelism.plan import Plan
from resihp.protocol.messages import Declare
from resihp.record.journal import PlanBasis

if TYPE_CHECKING:
    from resihp.scheduler.explained.explanation import Explanation
    from resihp.scheduler.situation import Situation

Row = dict[str, Any]


def explanations(job: Row, plans: Sequence[Row], nodes: Mapping[int, str]) -> dict[int, Explanation]:
    """By epoch. `job` with `model`, `configuration`, `tp` and `pp`; `plans` in order, with their JSON decoded; `nodes`
    of ranks. What the job's first layout would do if it were tuned is told with the last plan, if the first is given.
    """
    if job["model"] is None:
        return {}
    found: dict[int, Explanation] = {}
    with suppress(ResihpError, msgspec.MsgspecError, ValueError, TypeError):
        declared = msgspec.json.decode(job["model"], type=Declare)
        configuration = json.loads(job["configuration"])
        first = next((row for row in plans if row["action"] == "start"), None)
        for row in plans:
            with suppress(ResihpError, msgspec.MsgspecError, ValueError, TypeError, KeyError):
                if row["basis"] is not None and row["predicted"] is not None:
                    start = first if row is plans[-1] else None
                    found[row["epoch"]] = _explanation(job, row, start, declared, configuration, nodes)
    return found


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
    """A plan, the situation that it was decided in, as if its own layout had been there before, and what is on record
    of that. Raises what its row gives reason to: it may be imported."""
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
    """A plan from its row, without the orders and migrations that the ledger does not have; where stages have no ranks,
    dealt out evenly."""
    layout = from_json(json.dumps(row["layout"]))
    plan = Plan(
        epoch=row["epoch"],
        layout=layout,
        assignment=tuple(tuple(share) for share in row["assignment"]),
        schedule=row["schedule"],
        sequence_parallel=bool(configuration.get("layout", {}).get("sequence_parallel", False)),
    )
    return plan.dealing(plan.micro_batches) if layout.vacant else plan
