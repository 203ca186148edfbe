"""Every decision of a job: its reason, the action, the alternatives and the outcome. Pure; reads nothing. Called by
`resihp.db.reading.queries` for `history decisions`.

A decision is about a plan that was decided, or considered and declined, or about a node that was requested or declined.
The outcome of a plan that took effect is whether it kept its promise (`resihp.db.reading.plans.promises`), with the
times of iterations under it. The outcome of a declined change is how long the current plan stayed in effect.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from resihp.db.reading.plans.promises import MAX_ITERATIONS

Row = dict[str, Any]

COLUMNS = (
    *("at", "kind", "advice", "failures", "action", "epoch", "iteration", "predicted", "present", "unit", "refused"),
    *("outcome", "promised", "kept", "measured"),
)


def decisions(
    *,
    plans: Sequence[Row],
    declined: Sequence[Row],
    replacements: Sequence[Row],
    promised: Sequence[Row],
    failures: Sequence[Row],
    iterations: Sequence[Row],
) -> list[Row]:
    """Return one row per decision, in order of time, from the rows of one job.

    `kind`: `plan`, `plan stays`, `node`, `no node`. `advice`: the reason, with the numbers of the `failures`.
    `predicted`: of the plan that was chosen or considered; `present`: of the plan in effect; both in `unit`, as in
    `plans`. `refused`: candidates that were not chosen, each with `name`, `predicted` (in `unit`) and `why`. `outcome`:
    a text. For a plan that took effect also the ratios `promised` and `kept`, and `measured`, the median seconds of its
    iterations without the first.
    """
    by_epoch = {row["epoch"]: row for row in promised}
    answered: dict[int, list[int]] = {}
    for row in failures:
        if row["recovered_epoch"] is not None:
            answered.setdefault(row["recovered_epoch"], []).append(row["failure"])
    seconds: dict[int, list[float]] = {}
    for row in iterations:
        if row["seconds"] is not None:
            seconds.setdefault(row["epoch"], []).append(row["seconds"])
    in_effect = sorted((row for row in plans if row["in_effect_at"] is not None), key=lambda row: row["epoch"])
    rows = [
        *(_plan(row, by_epoch, answered, seconds) for row in plans),
        *(_declined(row, in_effect) for row in declined),
        *(_replacement(row) for row in replacements),
    ]
    return sorted(rows, key=lambda row: row["at"])


def _plan(
    row: Row,
    promised: Mapping[int, Row],
    answered: Mapping[int, list[int]],
    seconds: Mapping[int, list[float]],
) -> Row:
    promise = promised.get(row["epoch"])
    took = seconds.get(row["epoch"], [])[1 : MAX_ITERATIONS + 1]
    return _row(
        at=row["decided_at"],
        kind="plan",
        advice=row["reason"],
        failures=answered.get(row["epoch"], []),
        action=row["description"],
        epoch=row["epoch"],
        iteration=row["next_iteration"],
        predicted=row["predicted"],
        present=row["present"],
        unit=row["unit"],
        refused=_slower(row["considered"], row["predicted"]),
        outcome=_outcome(row, promise),
        promised=None if promise is None else promise["promised"],
        kept=None if promise is None else promise["kept"],
        measured=statistics.median(took) if took else None,
    )


def _outcome(row: Row, promise: Row | None) -> str:
    """Describe the outcome of a plan."""
    if promise is not None:
        return str(promise["verdict"]).replace("kept", "kept its promise").replace("broken", "broke its promise")
    if row["withdrawn_reason"] is not None:
        return f"rolled back: {row['withdrawn_reason'].replace('the job is to stop', 'the job was to stop')}"
    if row["refused_reason"] is not None:
        refuser = "our own check" if row["refused_by"] is None else f"rank {row['refused_by']}"
        return f"refused by {refuser}: {row['refused_reason']}"
    return str(row["outcome"])


def _slower(considered: Sequence[Row] | None, predicted: float | None) -> list[Row]:
    """Return the candidates that were not chosen, and by how much they are predicted to be slower or faster than the
    chosen plan (a faster one may need more transfers). Imported rows may be malformed; malformed candidates are
    omitted."""
    candidates = []
    for candidate in considered if isinstance(considered, list) else ():
        if isinstance(candidate, dict) and isinstance(candidate.get("predicted"), int | float):
            change = candidate["predicted"] / predicted - 1.0 if predicted else None
            why = f"{abs(change):.1%} {'faster' if change < 0.0 else 'slower'}" if change is not None else "not taken"
            candidates.append({"name": str(candidate.get("name")), "predicted": candidate["predicted"], "why": why})
    return candidates


def _declined(row: Row, in_effect: Sequence[Row]) -> Row:
    refused = _slower(row["considered"], row["predicted"])
    if row["description"] is not None:
        refused.insert(0, {"name": row["description"], "predicted": row["predicted"], "why": row["why"]})
    now = row["iteration"], row["declined_at"]  # a clock may have been set back between two iterations
    until = next((plan["epoch"] for plan in in_effect if (plan["next_iteration"], plan["in_effect_at"]) > now), None)
    is_plan = row["about"] == "plan"
    stayed = "in effect to the end, or still" if until is None else f"in effect until epoch {until}"
    return _row(
        at=row["declined_at"],
        kind="plan stays" if is_plan else "no node",
        advice=row["reason"],
        failures=row["failures"],
        action=f"{'the plan stays' if is_plan else 'no other node is requested'}: {row['why']}",
        iteration=row["iteration"],
        predicted=row["predicted"],
        present=row["present"],
        unit=row["unit"],
        refused=refused,
        outcome=stayed if is_plan else "no node joined",
    )


def _replacement(row: Row) -> Row:
    took_s = (row["joined_at"] - row["asked_at"]).total_seconds() if row["joined_at"] else -1.0
    came = f" after {took_s:.0f} s" if took_s >= 0.0 else ""  # negative if a clock was set back
    node = f", node {row['node']}" if row["node"] else ""
    return _row(
        at=row["asked_at"],
        kind="node",
        advice=row["reason"],
        action=f"a node is requested in place of {row['instead']}",
        outcome=f"{row['outcome']}{node}{came}{f': {text}' if (text := row['text']) else ''}",
    )


def _row(**values: Any) -> Row:
    return {name: values.get(name, [] if name in ("failures", "refused") else None) for name in COLUMNS}
