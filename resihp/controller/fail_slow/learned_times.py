"""Compute the times of the job's layers and transfers on healthy devices, as learned by the detector.

Once all kinds of chunks have been measured, plans are priced with these times; until then, in layer units. The times
are taken once, at the mean workload of the iterations so far, and then kept, so that all predictions within a job are
comparable. A job that tunes itself takes them again at each tuning. Times that contradict the operation counts are
reported once, and used all the same. Called by `expectation`; queried by `planning` and `retuning`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from resihp.controller.state.job import Job
from resihp.detector.online.predictor import Key
from resihp.parallelism.model import ModelSpec
from resihp.scheduler.cost.profile import Profile, Times, layer_units

MAX_TIME_RATIO = 3.0
"""Largest ratio between a measured time and the time expected from operation counts, in either direction, that is not
reported as a contradiction."""
NEGLIGIBLE_LAYER_SHARE = 0.1
"""Share of a layer's time below which a time does not matter to a plan and is not compared."""


def learn(job: Job) -> None:
    """Take the job's times from the detector, once the detector knows them. Does nothing if they were taken before."""
    if job.profile is None and job.workloads and job.monitor.settled:
        job.profile = _profile(job)
        if job.profile is not None and (text := contradiction(job.profile, job.declaration.model)):
            job.say("warning", f"measured times contradict the model: {text}; plans use the measured times")


def now(job: Job) -> Profile | None:
    """Return the times as presently known; None before they were taken for the first time."""
    return _profile(job) if job.profile is not None and job.workloads and job.monitor.settled else None


def moved(before: Profile, after: Profile, by: float) -> bool:
    """Return whether the time of any kind of work has changed by more than `by`, as a share of a layer's time."""
    layer = before.layers[0].total
    kinds = ((before.layers[0], after.layers[0]), (before.embedding, after.embedding), (before.head, after.head))
    return any(abs(latter.total - former.total) > by * layer for former, latter in kinds)


def contradiction(measured: Profile, model: ModelSpec) -> str:
    """Describe a measured time that differs from its operation count by more than a factor of `MAX_TIME_RATIO`; empty
    if there is none."""
    expected = layer_units(model)
    head, head_due = _head(measured), _head(expected)
    if _contradicts(head, head_due):
        return f"the head takes {head:.2f} layers, by its operations {head_due:.2f}"
    back, back_due = _back(measured), _back(expected)
    if _contradicts(back, back_due):
        return f"a layer's gradients take {back:.2f} of its forward, by their operations {back_due:.2f}"
    return ""


def _contradicts(measured: float, expected: float) -> bool:
    measured, expected = max(measured, NEGLIGIBLE_LAYER_SHARE), max(expected, NEGLIGIBLE_LAYER_SHARE)
    return max(measured, expected) > MAX_TIME_RATIO * min(measured, expected)


def _head(times: Profile) -> float:
    return times.head.total / times.layers[0].total


def _back(times: Profile) -> float:
    return (times.layers[0].b + times.layers[0].w) / times.layers[0].f if times.layers[0].f else math.inf


def links(job: Job) -> dict[tuple[str, str], float]:
    """Return the speed of the slowest known link between each two nodes. Links within a node are left out, because the
    planner does not consider them."""
    speeds: dict[tuple[str, str], float] = {}
    for (a, b), slow in job.record.slow_links.items():
        pair = tuple(sorted((job.members[a].node, job.members[b].node)))
        if pair[0] != pair[1]:
            speeds[pair[0], pair[1]] = min(slow.speed, speeds.get((pair[0], pair[1]), 1.0))
    return speeds


def _profile(job: Job) -> Profile | None:
    """Return the times of a mean micro-batch, or None if the time of some kind of chunk is not known yet.

    A tensor-parallel group of k ranks is assumed to need one k-th of the time of a single rank, which is the planner's
    definition of speed.
    """
    *totals, micro_batches = (sum(column) for column in zip(*job.workloads, strict=True))
    tokens, squares = (total / micro_batches for total in totals)
    tp, monitor = job.settings.tp, job.monitor

    def seconds(key: Key, kind: str) -> float | None:
        predicted = monitor.predictor.predict(key, kind, [tokens], [squares])
        return None if predicted is None else float(predicted[0]) * tp

    layer = _times(seconds, (1, tp, False, False))
    first, last = (_times(seconds, (1, tp, *ends)) for ends in ((True, False), (False, True)))
    if layer is None or first is None or last is None:
        return None
    between_s, within_s = monitor.healthy_transfers()
    return Profile(
        layers=(layer,) * job.declaration.model.layers,
        embedding=_beyond(first, layer),
        head=_beyond(last, layer),
        transfer_s=between_s or within_s or 0.0,
        inside_s=within_s or between_s or 0.0,
        step_s=monitor.beside_s,
    )


def _times(seconds: Callable[[Key, str], float | None], key: Key) -> Times | None:
    """Return the times of a chunk; None if they are not known. If a chunk's backward (B) also computes weight
    gradients, half of its time is attributed to these."""
    f, b, w, both = (seconds(key, kind) for kind in ("F", "B", "W", "BW"))
    if f is None:
        return None
    if b is not None and w is not None:
        return Times(f, b, w)
    return None if both is None else Times(f, both / 2, both / 2)


def _beyond(whole: Times, layer: Times) -> Times:
    """Return the time of a chunk beyond that of the layer it contains."""
    return Times(max(whole.f - layer.f, 0.0), max(whole.b - layer.b, 0.0), max(whole.w - layer.w, 0.0))
