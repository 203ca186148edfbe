"""Why an iteration took as long as it did: sentences from the ledger's rows about the iteration. Pure; reads nothing.

Called by `resihp why`. An iteration is slow if it took over a tenth longer than expected. The expected time is the
detector's prediction for the plan and workload on healthy devices. Without a prediction, or in a job with iterations
that deviate from predictions (on a busy machine), it is the job's usual time (`excess`). Each cause is given with the
largest part of the excess that it can explain. If all known causes explain less than half, none is named as the cause,
and "unexplained" comes first. An interruption before the iteration is reported separately, because it is not part of
the iteration's seconds.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from resihp.db.reading.costs.goodput import Interruption, course, interruptions
from resihp.db.reading.costs.iteration_shares import asked_devices
from resihp.db.reading.iterations.excess import (
    LARGER_WORK_RATIO,
    NEAR_ITERATIONS,
    Cause,
    Comparison,
    Measure,
    Usual,
    affects,
    cause,
    compare,
    explained,
    seconds,
)
from resihp.db.reading.plans.idle_epochs import with_idle_epochs

Row = dict[str, Any]

SHARED_WORK = {
    "collective": "tensor-parallel collectives",
    "reduction": "the sums of gradients",
    "data": "the wait for data",
}
"""Descriptions of work that ranks share or wait for, by component."""


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """Explanation of one iteration. Rows are as in the ledger."""

    iteration: int
    epoch: int
    seconds: float | None
    predicted_seconds: float | None
    usual_seconds: float | None
    """Usual seconds of iterations of this shape in the job (`excess.Usual`)."""
    measure: Measure | None
    """Whether the iteration is compared with its prediction or with the usual time; None if there is nothing to compare
    with."""
    slow: bool | None
    """Whether the iteration took longer than expected; None if unknown."""
    excess_seconds: float | None
    """Seconds beyond the expected time; None if the iteration was not slow."""
    unexplained_seconds: float | None
    """Seconds of the excess that causes of known size cannot explain, even at their limits; None without an excess."""
    causes: list[Row]
    """One row for each cause: `what` (description), `failure` (its number, or null), and `explains_seconds`, the
    largest part of the excess that it explains (null if unknown)."""
    verdict: list[str]
    """Sentences: how long the iteration took, and why."""
    failures: list[Row]
    """Failures that slowed the iteration, or interrupted training before it."""
    plan: Row | None
    reconfiguration: Row | None
    """The reconfiguration that ended with this iteration; None if there was none."""
    lost_s: dict[str, float]
    """Seconds lost between the previous iteration and this one, by phase: detect, redo, reconfigure; empty without an
    interruption."""
    checkpoints: list[Row]
    """Events of checkpoints that were written during the iteration, or just before it."""
    injected: list[Row]
    """Events of faults that were injected in this iteration, and of earlier injected faults that still slow
    something."""


def why(
    iteration: int,
    job: Row,
    iterations: Sequence[Row],
    failures: Sequence[Row],
    reconfigurations: Sequence[Row],
    plans: Sequence[Row],
    events: Sequence[Row],
) -> Why:
    """Explain a committed iteration. `iterations`, in order, include it, up to `excess.NEAR_ITERATIONS` before and
    after it, and as many from before it became slow.

    Raises KeyError if the iteration is not among them.
    """
    number = next((n for n, row in enumerate(iterations) if row["iteration"] == iteration), None)
    if number is None:
        raise KeyError(iteration)
    row = iterations[number]
    failures = with_idle_epochs(failures, plans)
    plan = next((candidate for candidate in plans if candidate["epoch"] == row["epoch"]), None)
    active = [failure for failure in failures if affects(failure, row)]
    comparison = compare(number, iterations, failures, plans)
    former = iterations[number - 1] if number else None
    is_first = former is not None and former["epoch"] != row["epoch"]
    transition = next((change for change in reconfigurations if is_first and change["epoch"] == row["epoch"]), None)
    interruption = _interruption(job, iterations[max(number - NEAR_ITERATIONS, 0) : number + 1], failures, transition)
    stopped = [failure for failure in failures if interruption and failure["failure"] in interruption.failures]
    checkpoints = _checkpoints_meanwhile(events, row, former)
    injected = _injected_faults(events, iteration)
    possible_causes = _possible_causes(row, active, comparison, checkpoints, is_first=is_first)
    causes, unexplained_s, explained_by = explained(possible_causes, comparison)
    sentences = [*_duration(row, comparison), *explained_by]
    sentences += [f"fault injected on purpose: {event['text']}" for event in injected]
    if interruption is not None:
        sentences.append(_interrupted(interruption, stopped, plan))
    sentences += _layout(job, plan, plans)
    return Why(
        iteration=iteration,
        epoch=row["epoch"],
        seconds=row["seconds"],
        predicted_seconds=row["predicted_seconds"],
        usual_seconds=None if comparison.usual is None else comparison.usual.seconds,
        measure=comparison.measure,
        slow=comparison.slow,
        excess_seconds=comparison.excess_s,
        unexplained_seconds=unexplained_s,
        causes=[{"what": item.what, "failure": item.failure, "explains_seconds": item.explains_s} for item in causes],
        verdict=sentences,
        failures=[*active, *stopped],
        plan=plan,
        reconfiguration=transition,
        lost_s=_lost_seconds(interruption),
        checkpoints=checkpoints,
        injected=injected,
    )


def _checkpoints_meanwhile(events: Sequence[Row], row: Row, former: Row | None) -> list[Row]:
    """Return the events of checkpoints that were written during an iteration, or just before it. `former`: the previous
    iteration, None if unknown."""
    checkpoints = [event for event in events if event["kind"] == "CheckpointCommitted"]
    return [
        event
        for event in checkpoints
        if event["iteration"] == row["iteration"] - 1
        or (former is not None and former["finished_at"] <= event["at"] <= row["finished_at"])
    ]


def _possible_causes(
    row: Row, active: Sequence[Row], comparison: Comparison, checkpoints: Sequence[Row], *, is_first: bool
) -> list[Cause]:
    """Return everything that may have lengthened an iteration. `active`: failures that slow it. `is_first`: whether it
    was the first iteration under its plan."""
    causes = [*(cause(failure, _slow_device(failure)) for failure in active), *_workload(row, comparison)]
    if checkpoints:
        written = f"a checkpoint of iteration {checkpoints[-1]['iteration']} was written during it or just before"
        causes.append(Cause(what=written, factor=None))
    if comparison.slow and is_first and not active:
        anew = f"it was the first under the plan of epoch {row['epoch']}, with one-time set-up"
        causes.append(Cause(what=anew, factor=None))
    return causes


def _lost_seconds(interruption: Interruption | None) -> dict[str, float]:
    if interruption is None:
        return {}
    return {
        "detect": interruption.detect_s,
        "redo": interruption.redo_s,
        "reconfigure": interruption.reconfigure_s,
    }


def _injected_faults(events: Sequence[Row], iteration: int) -> list[Row]:
    """Return the faults that were injected in an iteration, and earlier injected faults that still slow something."""
    faults = [event for event in events if event["kind"] == "FaultInjected"]
    slowed: dict[str, Row] = {}
    for event in faults:
        target = re.search(r"slow:([^,@ ]+)", event["text"])
        if target is not None and event["iteration"] < iteration:
            slowed[target[1]] = event
    lasting = []
    for event in slowed.values():
        until = re.search(r"until=(\d+)", event["text"])
        healed = re.search(r"speed=1(?![\d.])", event["text"])
        if healed is None and (until is None or iteration < int(until[1])):
            lasting.append(event)
    return [*lasting, *(event for event in faults if event["iteration"] == iteration)]


# --- sentences ------------------------------------------------------------------------------------------------------


def _interruption(
    job: Row, iterations: Sequence[Row], failures: Sequence[Row], transition: Row | None
) -> Interruption | None:
    if transition is None:
        return None
    clock = course({**job, "state": "completed"}, iterations, [], iterations[-1]["finished_at"])
    return next(iter(interruptions(job, clock, failures, [transition])), None)


def _duration(row: Row, comparison: Comparison) -> list[str]:
    if row["seconds"] is None:
        return [f"iteration {row['iteration']}: no rank survived to report its time"]
    took = f"iteration {row['iteration']} took {seconds(row['seconds'])}"
    if not comparison.expected_s:
        return [f"{took}; nothing was predicted, and there is nothing to compare it with"]
    usual = comparison.usual if comparison.measure == "usual" else None
    against = "predicted for healthy devices" if usual is None else f"usual for this job ({usual.description})"
    change = f"{row['seconds'] / comparison.expected_s:.2f} times the {seconds(comparison.expected_s)} {against}"
    return [f"{took}, {change}" if comparison.slow else f"{took}: not slow, {change}", *_unused_prediction(row, usual)]


def _unused_prediction(row: Row, usual: Usual | None) -> list[str]:
    """State the prediction and why it is not used, if there is an unused one."""
    if usual is None or usual.ratio is None or not row["predicted_seconds"]:
        return []
    return [
        f"predicted for healthy devices: {seconds(row['predicted_seconds'])}, not used: those iterations took "
        f"{usual.ratio:.2g} times their predictions"
    ]


def _slow_device(failure: Row) -> str:
    where = failure["node"] or "something"
    if failure["device"] is not None:
        where = f"{where} device {failure['device']}"
    if failure["component"] == "link":
        where = "a link"  # the failure's cause names both ends
    elif failure["component"] == "job":
        where = "the whole job"
    elif failure["component"] in SHARED_WORK:
        where = SHARED_WORK[failure["component"]] + (f" of {failure['node']}" if failure["node"] else "")
    many = failure["component"] in ("collective", "reduction")
    speed = "" if failure["speed"] is None else f" at {failure['speed']:.0%} of {'their' if many else 'its'} speed"
    until = "" if failure["ended_iteration"] is None else f" until {failure['ended_iteration'] - 1}"
    since = f"from iteration {failure['iteration']}{until}" if until else f"since iteration {failure['iteration']}"
    return (
        f"{where} {'were' if many else 'was'} slow,{speed} {since} (failure {failure['failure']}: {failure['cause']})"
    )


def _workload(row: Row, comparison: Comparison) -> list[Cause]:
    """Return the cause for a larger workload, by the predictions, else by the tokens. If the iteration is compared with
    its prediction, the prediction already includes the workload, which then explains nothing of the excess."""
    if comparison.usual is None or comparison.usual.alike or not comparison.usual.shape:
        return []
    rows = comparison.usual.rows
    former = [comparable["predicted_seconds"] for comparable in rows if comparable["predicted_seconds"]]
    if row["predicted_seconds"] and former:
        larger = row["predicted_seconds"] / statistics.median(former)
        if larger < LARGER_WORK_RATIO:
            return []
        longer = f"its sequences were longer: {larger:.2f} times the usual work"
        if comparison.measure == "predicted" or comparison.usual.scaled:
            return [Cause(what=f"{longer}, which the prediction includes", factor=1.0)]
        return [Cause(what=longer, factor=larger)]
    tokens = [comparable["tokens"] for comparable in rows if comparable["tokens"]]
    squares = [comparable["sum_squared_lengths"] for comparable in rows if comparable["sum_squared_lengths"]]
    if tokens and row["tokens"] >= LARGER_WORK_RATIO * statistics.median(tokens):
        larger = row["tokens"] / statistics.median(tokens)
        return [Cause(what=f"it had {larger:.2f} times the usual tokens", factor=larger)]
    if squares and row["sum_squared_lengths"] >= LARGER_WORK_RATIO * statistics.median(squares):
        larger = row["sum_squared_lengths"] / statistics.median(squares)
        words = f"its sequences were longer: {larger:.2f} times the usual sum of squared lengths"
        return [Cause(what=words, factor=larger)]
    return []


def _interrupted(interruption: Interruption, failures: Sequence[Row], plan: Row | None) -> str:
    causes = "; ".join(f"failure {row['failure']}: {row['cause']}" for row in failures)
    causes = causes or ("" if plan is None else plan["reason"]) or "a change of plan"
    parts = [
        f"{seconds:.2f} s {phase}"
        for phase, seconds in (
            ("until it was noticed", interruption.detect_s),
            ("of work redone", interruption.redo_s),
            ("to reconfigure", interruption.reconfigure_s),
        )
        if seconds >= 0.005
    ]
    loss = f", {interruption.lost_s:.2f} s lost" if parts else ""
    return f"training was interrupted before it{loss} ({', '.join(parts) or 'nothing lost'}): {causes}"


def _layout(job: Row, plan: Row | None, plans: Sequence[Row]) -> list[str]:
    taken = [row for row in plans if row["in_effect_at"] is not None]
    if plan is None or not taken:
        return []
    full = asked_devices(job)
    if plan["active"] >= full:
        return []
    return [
        f"{plan['active']} of {full} devices worked, under the plan of epoch {plan['epoch']} "
        f"({plan['description']}): {plan['reason']}"
    ]
