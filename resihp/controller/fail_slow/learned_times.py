"""The job's own times: what its layers and transfers take on healthy devices, as the detector has learnt them.

Plans are priced in them once all kinds of chunks are learnt, and in layer times until then. They are taken once, at the
workload of the iterations before, and kept: predictions of one job can then be compared; a job that is tuned by them
takes them again when it is tuned again. Times that contradict what operations say are told, once, and used. Called by
`expectation`, asked by `planning` and `retuning`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from resihp.controller.state.job import Job
from resihp.detector.online.predictor import Key
from resihp.parallelism.model import ModelSpec
from resihp.scheduler.cost.profile import Profile, Times, layer_units

CONTRADICTS = 3.0
NOTHING = 0.1
"""Of a layer: less makes no difference to a plan, whatever the ratio is."""


def learn(job: Job) -> None:
    """Take the times, if they are known by now and were not before."""
    if job.profile is None and job.workloads and job.monitor.settled:
        job.profile = _profile(job)
        if job.profile is not None and (told := contradiction(job.profile, job.declaration.model)):
            job.say("warning", f"measured times contradict the model: {told}; plans go by what was measured")


def now(job: Job) -> Profile | None:
    """The times as they are known by now; None before they were learnt for the first time."""
    return _profile(job) if job.profile is not None and job.workloads and job.monitor.settled else None


def moved(before: Profile, after: Profile, by: float) -> bool:
    """Whether a kind of work takes a different time than before, by more than this share of a layer's."""
    layer = before.layers[0].total
    kinds = ((before.layers[0], after.layers[0]), (before.embedding, after.embedding), (before.head, after.head))
    return any(abs(two.total - one.total) > by * layer for one, two in kinds)


def contradiction(measured: Profile, model: ModelSpec) -> str:
    """What is more than `CONTRADICTS` times off what operations say, in words; empty where nothing is."""
    expected = layer_units(model)
    head, head_due = _head(measured), _head(expected)
    if _contradicts(head, head_due):
        return f"the head takes {head:.2f} layers, by its operations {head_due:.2f}"
    back, back_due = _back(measured), _back(expected)
    if _contradicts(back, back_due):
        return f"a layer's gradients take {back:.2f} of its forward, by their operations {back_due:.2f}"
    return ""


def _contradicts(found: float, due: float) -> bool:
    found, due = max(found, NOTHING), max(due, NOTHING)
    return max(found, due) > CONTRADICTS * min(found, due)


def _head(times: Profile) -> float:
    return times.head.total / times.layers[0].total


def _back(times: Profile) -> float:
    return (times.layers[0].b + times.layers[0].w) / times.layers[0].f if times.layers[0].f else math.inf


def links(job: Job) -> dict[tuple[str, str], float]:
    """Speed of the slowest known link between two nodes; the planner knows of none within a node."""
    found: dict[tuple[str, str], float] = {}
    for (a, b), slow in job.record.slow_links.items():
        pair = tuple(sorted((job.members[a].node, job.members[b].node)))
        if pair[0] != pair[1]:
            found[pair[0], pair[1]] = min(slow.speed, found.get((pair[0], pair[1]), 1.0))
    return found


def _profile(job: Job) -> Profile | None:
    """Of a mean micro-batch. None where a kind of chunk is not known after all.

    What a group of k ranks takes is a k-th of what one takes alone: the planner's notion of speed.
    """
    *of_all, micro_batches = (sum(of) for of in zip(*job.workloads, strict=True))
    tokens, squares = (total / micro_batches for total in of_all)
    tp, monitor = job.settings.tp, job.monitor

    def seconds(key: Key, kind: str) -> float | None:
        found = monitor.predictor.predict(key, kind, [tokens], [squares])
        return None if found is None else float(found[0]) * tp

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
    """A B that computes the gradients of weights as well is taken to spend half of its time on them."""
    f, b, w, both = (seconds(key, kind) for kind in ("F", "B", "W", "BW"))
    if f is None:
        return None
    if b is not None and w is not None:
        return Times(f, b, w)
    return None if both is None else Times(f, both / 2, both / 2)


def _beyond(whole: Times, layer: Times) -> Times:
    """What a layer with something more takes longer than one alone."""
    return Times(max(whole.f - layer.f, 0.0), max(whole.b - layer.b, 0.0), max(whole.w - layer.w, 0.0))
