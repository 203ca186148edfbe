"""Find the slow devices, links and parts that do not slow iterations down under a layout, such as a standby device or a
link that no pipeline uses. Pure. Called with each new plan."""

from __future__ import annotations

from collections.abc import Iterable

from resihp.parallelism.layout import Layout
from resihp.record.state import Device, JobRecord


def unaffecting(record: JobRecord, layout: Layout) -> tuple[int, ...]:
    """Return the numbers of the lasting failures with a device, link or ranks that have no work under a layout,
    ascending."""
    if not (record.slow or record.slow_links or record.slow_parts):
        return ()
    working = _devices(record, layout.active)
    idle = [slow.failure for device, slow in record.slow.items() if device not in working]
    idle += [
        slow.failure for (_, ranks), slow in record.slow_parts.items() if working.isdisjoint(_devices(record, ranks))
    ]
    if record.slow_links:
        pipelines = [[_devices(record, stage.ranks) for stage in replica.stages] for replica in layout.replicas]
        for link, slow in record.slow_links.items():
            ends = _devices(record, link)
            crossed = ends <= working if layout.vacant else any(_crosses(stages, ends) for stages in pipelines)
            if not crossed:
                idle.append(slow.failure)
    return tuple(sorted(idle))


def _crosses(stages: list[set[Device]], ends: set[Device]) -> bool:
    """Return whether both ends of a link are in the same stage of a pipeline, or in two successive stages. The first
    stage counts as the successor of the last one, because their weights may be tied."""
    return any(ends <= stage | following for stage, following in zip(stages, [*stages[1:], *stages[:1]], strict=True))


def _devices(record: JobRecord, ranks: Iterable[int]) -> set[Device]:
    placements = record.placements
    placed = (placements[rank] for rank in ranks if rank < len(placements))
    return {(place.node, place.device) for place in placed}
