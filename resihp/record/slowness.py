"""What of all that is slow slows iterations: a device that stands by does not, nor a link that no pipeline crosses."""

from __future__ import annotations

from collections.abc import Iterable

from resihp.parallelism.layout import Layout
from resihp.record.state import Device, JobRecord


def unaffecting(record: JobRecord, layout: Layout) -> tuple[int, ...]:
    """Failures that last and whose device, link or ranks have no work under this layout, ascending."""
    if not (record.slow or record.slow_links or record.slow_parts):
        return ()
    working = _devices(record, layout.active)
    idle = [slow.failure for device, slow in record.slow.items() if device not in working]
    idle += [slow.failure for (_, of), slow in record.slow_parts.items() if working.isdisjoint(_devices(record, of))]
    if record.slow_links:
        pipelines = [[_devices(record, stage.ranks) for stage in one.stages] for one in layout.replicas]
        for link, slow in record.slow_links.items():
            ends = _devices(record, link)
            crossed = ends <= working if layout.vacant else any(_crosses(stages, ends) for stages in pipelines)
            if not crossed:
                idle.append(slow.failure)
    return tuple(sorted(idle))


def _crosses(stages: list[set[Device]], ends: set[Device]) -> bool:
    """Whether a pipeline has the ends of a link in one stage, or in two that follow one another, as the first does the
    last: the weights of both may be tied."""
    return any(ends <= stage | following for stage, following in zip(stages, [*stages[1:], *stages[:1]], strict=True))


def _devices(record: JobRecord, ranks: Iterable[int]) -> set[Device]:
    placements = record.placements
    known = (placements[rank] for rank in ranks if rank < len(placements))
    return {(placed.node, placed.device) for placed in known}
