"""Why an iteration took as long as it did: what the ledger holds that touches it, in sentences. Pure; reads nothing.

Called by `resihp why`. An iteration is slow when it took more than a tenth longer than it should have: than the
detector predicted for its plan and workload where all is well; or, without a prediction, or in a job whose iterations
take something else than is predicted (a busy machine), than is usual for the job (`excess` beside it). What touched it
is told with how much of the excess it can explain at most. What cannot explain the size is not the cause: where all
that is known comes to less than half, "unexplained" comes first. What came between it and the iteration before is told
apart, since an interruption is no part of an iteration's seconds.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from db.reading.costs.cost_accounts import asked_devices
from db.reading.costs.goodput import Interruption, course, interruptions
from db.reading.iterations.excess import (
    LARGER,
    NEAR,
    Cause,
    Comparison,
    Measure,
    Usual,
    cause,
    compared,
    explained,
    seconds,
    slows,
)
from db.reading.plans.idle_epochs import with_idle_epochs

Row = dict[str, Any]

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
    """Of iterations of this shape in the job (`excess.Usual`)."""
    measure: Measure | None
    """What it is compared with; None where there is nothing."""
    slow: bool | None
    """Whether it took longer than it should have; None where nobody can tell."""
    excess_seconds: float | None
    """By how much, where it is slow."""
    unexplained_seconds: float | None
    """What is left of that when all has been taken off that the causes of known size explain at most."""
    causes: list[Row]
    """`what` touched it, the number of its `failure`, if it is one, and how much of the excess it explains at most
    (`explains_seconds`, null where nobody can tell)."""
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
    """Events: faults injected in it, and those that have slowed something before and do so still."""


def why(
    iteration: int,
    job: Row,
    iterations: Sequence[Row],
    failures: Sequence[Row],
    reconfigurations: Sequence[Row],
    plans: Sequence[Row],
    events: Sequence[Row],
) -> Why:
    """Of a committed iteration; `iterations` in order, with it and up to `excess.NEAR` before and after it, and as many
    from before it was slow.

    Raises KeyError if it is not among them.
    """
    number = next((n for n, row in enumerate(iterations) if row["iteration"] == iteration), None)
    if number is None:
        raise KeyError(iteration)
    row = iterations[number]
    failures = with_idle_epochs(failures, plans)
    plan = next((one for one in plans if one["epoch"] == row["epoch"]), None)
    active = [one for one in failures if slows(one, row)]
    comparison = compared(number, iterations, failures, plans)
    first = number > 0 and iterations[number - 1]["epoch"] != row["epoch"]
    transition = next((one for one in reconfigurations if first and one["epoch"] == row["epoch"]), None)
    interruption = _interruption(job, iterations[max(number - NEAR, 0) : number + 1], failures, transition)
    stopped = [one for one in failures if interruption and one["failure"] in interruption.failures]
    begun = iterations[number - 1]["finished_at"] if number else None
    checkpoints = [
        one
        for one in events
        if one["kind"] == "CheckpointCommitted"
        and (one["iteration"] == iteration - 1 or (begun is not None and begun <= one["at"] <= row["finished_at"]))
    ]
    injected = _on_purpose(events, iteration)
    causes = [*(cause(one, _slow_device(one)) for one in active), *_workload(row, comparison)]
    if checkpoints:
        written = f"a checkpoint of iteration {checkpoints[-1]['iteration']} was written meanwhile, or just before"
        causes.append(Cause(what=written, factor=None))
    if comparison.slow and first and not active:
        anew = f"it was the first under the plan of epoch {row['epoch']}, and built what the others find"
        causes.append(Cause(what=anew, factor=None))
    causes, unexplained_s, told = explained(causes, comparison)
    sentences = [*_how_long(row, comparison), *told]
    sentences += [f"fault injected on purpose: {one['text']}" for one in injected]
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
        causes=[{"what": one.what, "failure": one.failure, "explains_seconds": one.explains_s} for one in causes],
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


def _on_purpose(events: Sequence[Row], iteration: int) -> list[Row]:
    """Faults injected in an iteration, and what was slowed before, until a time that has not come or for good."""
    faults = [one for one in events if one["kind"] == "FaultInjected"]
    slowed: dict[str, Row] = {}
    for one in faults:
        target = re.search(r"slow:([^,@ ]+)", one["text"])
        if target is not None and one["iteration"] < iteration:
            slowed[target[1]] = one
    found = []
    for one in slowed.values():
        until = re.search(r"until=(\d+)", one["text"])
        healed = re.search(r"speed=1(?![\d.])", one["text"])
        if healed is None and (until is None or iteration < int(until[1])):
            found.append(one)
    return [*found, *(one for one in faults if one["iteration"] == iteration)]


# --- words ----------------------------------------------------------------------------------------------------------


def _interruption(
    job: Row, iterations: Sequence[Row], failures: Sequence[Row], transition: Row | None
) -> Interruption | None:
    if transition is None:
        return None
    clock = course({**job, "state": "completed"}, iterations, [], iterations[-1]["finished_at"])
    return next(iter(interruptions(job, clock, failures, [transition])), None)


def _how_long(row: Row, of: Comparison) -> list[str]:
    if row["seconds"] is None:
        return [f"iteration {row['iteration']}: nobody lived to tell how long it took"]
    told = f"iteration {row['iteration']} took {seconds(row['seconds'])}"
    if not of.expected_s:
        return [f"{told}; nothing was predicted, and there is nothing to compare it with"]
    usual = of.usual if of.measure == "usual" else None
    against = "predicted where all is well" if usual is None else f"usual for this job ({usual.of})"
    change = f"{row['seconds'] / of.expected_s:.2f} times the {seconds(of.expected_s)} {against}"
    return [f"{told}, {change}" if of.slow else f"{told}: not slow, {change}", *_no_measure(row, usual)]


def _no_measure(row: Row, usual: Usual | None) -> list[str]:
    """That there is a prediction, and why it is not used."""
    if usual is None or usual.ratio is None or not row["predicted_seconds"]:
        return []
    return [
        f"predicted where all is well: {seconds(row['predicted_seconds'])}, no measure here: those iterations took "
        f"{usual.ratio:.2g} times what was predicted for them"
    ]


def _slow_device(failure: Row) -> str:
    where = failure["node"] or "something"
    if failure["device"] is not None:
        where = f"{where} device {failure['device']}"
    if failure["component"] == "link":
        where = "a link"  # the failure's cause names both of its ends
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


def _workload(row: Row, of: Comparison) -> list[Cause]:
    """Whether it had more to do than others: by what was predicted, else by its tokens. A prediction that it is
    measured by knows that, so that it explains nothing of the excess."""
    if of.usual is None or of.usual.alike or not of.usual.shape:
        return []
    rows = of.usual.rows
    former = [one["predicted_seconds"] for one in rows if one["predicted_seconds"]]
    if row["predicted_seconds"] and former:
        larger = row["predicted_seconds"] / statistics.median(former)
        if larger < LARGER:
            return []
        longer = f"its sequences were longer: {larger:.2f} times the usual work"
        if of.measure == "predicted" or of.usual.scaled:
            return [Cause(what=f"{longer}, which the prediction knows", factor=1.0)]
        return [Cause(what=longer, factor=larger)]
    tokens = [one["tokens"] for one in rows if one["tokens"]]
    squares = [one["sum_squared_lengths"] for one in rows if one["sum_squared_lengths"]]
    if tokens and row["tokens"] >= LARGER * statistics.median(tokens):
        larger = row["tokens"] / statistics.median(tokens)
        return [Cause(what=f"it had {larger:.2f} times the usual tokens", factor=larger)]
    if squares and row["sum_squared_lengths"] >= LARGER * statistics.median(squares):
        larger = row["sum_squared_lengths"] / statistics.median(squares)
        words = f"its sequences were longer: {larger:.2f} times the usual sum of squared lengths"
        return [Cause(what=words, factor=larger)]
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


def _layout(job: Row, plan: Row | None, plans: Sequence[Row]) -> list[str]:
    taken = [one for one in plans if one["in_effect_at"] is not None]
    if plan is None or not taken:
        return []
    full = asked_devices(job)
    if plan["active"] >= full:
        return []
    return [
        f"{plan['active']} of {full} devices worked, under the plan of epoch {plan['epoch']} "
        f"({plan['description']}): {plan['reason']}"
    ]
