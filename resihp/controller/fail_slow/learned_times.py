"""The job's own times: what its layers and transfers take on healthy devices, as the detector has learnt them.

Plans are priced in them once all kinds of chunks are learnt, and in layer times until then. They are taken once, at the
workload of the iterations before, and kept: predictions of one job can then be compared. Called by `expectation`, asked
by `planning`.
"""

from __future__ import annotations

from collections.abc import Callable

from resihp.controller.state import Job
from resihp.detector.online.predictor import Key
from resihp.scheduler.cost.profile import Profile, Times


def learn(job: Job) -> None:
    """Take the times, if they are known by now and were not before."""
    if job.profile is None and job.workloads and job.monitor.settled:
        job.profile = _profile(job)


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
