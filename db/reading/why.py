"""Why an iteration took as long as it did: what the ledger holds that touches it, in sentences. Pure; reads nothing.

Called by `resihp why`. An iteration is slow when it took more than `TOLERANCE` longer than the detector predicted for
its plan and workload where all is well, or, without a prediction, than iterations of its plan usually do. Whatever
can explain that is told, the surest first; what came between it and the iteration before is told apart, since an
interruption is no part of an iteration's seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from db.reading.costs.goodput import Interruption, course, interruptions

Row = dict[str, Any]

TOLERANCE = 0.10
LARGER = 1.05
"""From here on a workload is larger than usual."""
NEAR = 100
"""Iterations before it that tell what is usual; callers need give no more."""
TOGETHER = {
    "collective": "tensor-parallel collectives",
    "reduction": "the sums of gradients",
    "data": "the wait for data",
}
"""What ranks do together, or wait for."""


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration's story. Rows as the ledger has them, but for `slow` and `interruption`."""

    iteration: int
    epoch: int
    seconds: float | None
    predicted_seconds: float | None
    usual_seconds: float | None
    """Median of the plan's iterations before it that nothing slow touched."""
    slow: bool | None
    """Whether it took longer than it should have; None where nobody can tell."""
    verdict: list[str]
    """Sentences: how long it took, and why."""
    failures: list[Row]
    """That touched it: it was slow because of them, or training was interrupted before it."""
    plan: Row | None
    reconfiguration: Row | None
    """That ended with it."""
    lost_s: dict[str, float]
    """Between the iteration before and this one: detect, redo, reconfigure."""
    checkpoints: list[Row]
    """Events: written while it ran, or just before."""
    injected: list[Row]
    """Events: faults injected in it."""


def why(
    iteration: int,
    job: Row,
    iterations: Sequence[Row],
    failures: Sequence[Row],
    reconfigurations: Sequence[Row],
    plans: Sequence[Row],
    events: Sequence[Row],
) -> Why:
    """Of a committed iteration; `iterations` in order, with it and up to `NEAR` before it.

    Raises KeyError if it is not among them.
    """
    number = next((n for n, row in enumerate(iterations) if row["iteration"] == iteration), None)
    if number is None:
        raise KeyError(iteration)
    row = iterations[number]
    plan = next((one for one in plans if one["epoch"] == row["epoch"]), None)
    active = [one for one in failures if _slows(one, iteration)]
    healthy = [
        one
        for one in iterations[:number]
        if one["epoch"] == row["epoch"] and one["seconds"] and not any(_slows(f, one["iteration"]) for f in failures)
    ]
    usual = statistics.median(one["seconds"] for one in healthy) if healthy else None
    first = number > 0 and iterations[number - 1]["epoch"] != row["epoch"]
    transition = next((one for one in reconfigurations if first and one["epoch"] == row["epoch"]), None)
    interruption = _interruption(job, iterations[: number + 1], failures, transition)
    stopped = [one for one in failures if interruption and one["failure"] in interruption.failures]
    begun = iterations[number - 1]["finished_at"] if number else None
    checkpoints = [
        one
        for one in events
        if one["kind"] == "CheckpointCommitted"
        and (one["iteration"] == iteration - 1 or (begun is not None and begun <= one["at"] <= row["finished_at"]))
    ]
    injected = [one for one in events if one["kind"] == "FaultInjected" and one["iteration"] == iteration]
    slow = _is_slow(row, usual)
    sentences = [_how_long(row, usual, len(healthy), slow)]
    causes = [_slow_device(one) for one in active]
    causes += _workload(row, healthy)
    if checkpoints:
        causes.append(f"a checkpoint of iteration {checkpoints[-1]['iteration']} was written meanwhile, or just before")
    if slow and first and not active:
        causes.append(f"it was the first under the plan of epoch {row['epoch']}, and built what the others find")
    if slow and not causes:
        causes.append("no failure, workload or checkpoint in the ledger explains it")
    sentences += causes
    sentences += [f"fault injected on purpose: {one['text']}" for one in injected]
    if interruption is not None:
        sentences.append(_interrupted(interruption, stopped, plan))
    sentences += _layout(plan, plans)
    return Why(
        iteration=iteration,
        epoch=row["epoch"],
        seconds=row["seconds"],
        predicted_seconds=row["predicted_seconds"],
        usual_seconds=usual,
        slow=slow,
        verdict=sentences,
        failures=[*active, *stopped],
        plan=plan,
        reconfiguration=transition,
        lost_s={}
        if interruption is None
        else {
            "detect": interruption.detect_s,
            "redo": interruption.redo_s,
            "reconfigure": interruption.reconfigure_s,
        },
        checkpoints=checkpoints,
        injected=injected,
    )


def _slows(failure: Row, iteration: int) -> bool:
    return (
        failure["kind"] == "fail-slow"
        and failure["iteration"] <= iteration
        and (failure["ended_iteration"] is None or iteration < failure["ended_iteration"])
    )


def _is_slow(row: Row, usual: float | None) -> bool | None:
    expected = row["predicted_seconds"] or usual
    if row["seconds"] is None or not expected:
        return None
    return bool(row["seconds"] > (1.0 + TOLERANCE) * expected)


def _interruption(
    job: Row, iterations: Sequence[Row], failures: Sequence[Row], transition: Row | None
) -> Interruption | None:
    if transition is None:
        return None
    clock = course({**job, "state": "completed"}, iterations, [], iterations[-1]["finished_at"])
    return next(iter(interruptions(job, clock, failures, [transition])), None)


def _how_long(row: Row, usual: float | None, of: int, slow: bool | None) -> str:
    if row["seconds"] is None:
        return f"iteration {row['iteration']}: nobody lived to tell how long it took"
    told = f"iteration {row['iteration']} took {row['seconds']:.2f} s"
    if row["predicted_seconds"]:
        expected, measure = row["predicted_seconds"], "predicted where all is well"
    elif usual is not None:
        expected, measure = usual, f"usual under this plan (median of {of})"
    else:
        return f"{told}; nothing was predicted, and there is nothing to compare it with"
    change = f"{row['seconds'] / expected:.2f} times the {expected:.2f} s {measure}"
    return f"{told}, {change}" if slow else f"{told}: not slow, {change}"


def _slow_device(failure: Row) -> str:
    where = failure["node"] or "something"
    if failure["device"] is not None:
        where = f"{where} device {failure['device']}"
    if failure["component"] == "link":
        where = f"a link of {where}"
    elif failure["component"] == "job":
        where = "the whole job"
    elif failure["component"] in TOGETHER:
        where = TOGETHER[failure["component"]] + (f" of {failure['node']}" if failure["node"] else "")
    many = failure["component"] in ("collective", "reduction")
    speed = "" if failure["speed"] is None else f" at {failure['speed']:.0%} of {'their' if many else 'its'} speed"
    until = "" if failure["ended_iteration"] is None else f" until {failure['ended_iteration'] - 1}"
    since = f"from iteration {failure['iteration']}{until}" if until else f"since iteration {failure['iteration']}"
    return (
        f"{where} {'were' if many else 'was'} slow,{speed} {since} (failure {failure['failure']}: {failure['cause']})"
    )


def _workload(row: Row, healthy: Sequence[Row]) -> list[str]:
    """Whether it had more to do than those before it: by what was predicted, else by its tokens."""
    former = [one["predicted_seconds"] for one in healthy if one["predicted_seconds"]]
    if row["predicted_seconds"] and former:
        larger = row["predicted_seconds"] / statistics.median(former)
        if larger >= LARGER:
            return [f"its sequences were longer: {larger:.2f} times the usual work, which the prediction knows"]
        return []
    tokens = [one["tokens"] for one in healthy if one["tokens"]]
    squares = [one["sum_squared_lengths"] for one in healthy if one["sum_squared_lengths"]]
    if tokens and row["tokens"] >= LARGER * statistics.median(tokens):
        return [f"it had {row['tokens'] / statistics.median(tokens):.2f} times the usual tokens"]
    if squares and row["sum_squared_lengths"] >= LARGER * statistics.median(squares):
        longer = row["sum_squared_lengths"] / statistics.median(squares)
        return [f"its sequences were longer: {longer:.2f} times the usual sum of squared lengths"]
    return []


def _interrupted(one: Interruption, failures: Sequence[Row], plan: Row | None) -> str:
    causes = "; ".join(f"failure {row['failure']}: {row['cause']}" for row in failures)
    causes = causes or ("" if plan is None else plan["reason"]) or "a change of plan"
    parts = [
        f"{seconds:.2f} s {what}"
        for what, seconds in (
            ("until it was noticed", one.detect_s),
            ("of work redone", one.redo_s),
            ("to reconfigure", one.reconfigure_s),
        )
        if seconds >= 0.005
    ]
    lost = f", {one.lost_s:.2f} s lost" if parts else ""
    return f"before it training was interrupted{lost} ({', '.join(parts) or 'nothing lost'}): {causes}"


def _layout(plan: Row | None, plans: Sequence[Row]) -> list[str]:
    taken = [one for one in plans if one["in_effect_at"] is not None]
    if plan is None or not taken:
        return []
    full = min(taken, key=lambda one: one["epoch"])
    if plan["active"] >= full["active"]:
        return []
    return [
        f"{plan['active']} of {full['active']} devices worked, under the plan of epoch {plan['epoch']} "
        f"({plan['description']}): {plan['reason']}"
    ]
