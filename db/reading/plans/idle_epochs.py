"""Under which plans something slow had no work, so that no iteration of theirs is slow because of it. Reads only.

A device that is too slow stands by under the next plan, and is slow still; pipelines go round a slow link. Called by
`db.reading.queries` for `db.reading.why`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from sqlalchemy import Select, select

from db.layouts import from_json
from db.models import PlanRow, WorkerRow
from resihp.errors import LedgerError

Row = dict[str, Any]
Place = tuple[str, int]
"""Node and device."""
Pipeline = list[set[Place]]
"""Those of each stage."""


def mark(
    fetch: Callable[[Select[Any]], list[Row]], job_id: int, failures: Sequence[Row], epochs: Collection[int]
) -> None:
    """Rows of what is slow get `idle_epochs`, of these. What was imported may have layouts that are none."""
    slow = [row for row in failures if row["kind"] == "fail-slow" and row["component"] in ("device", "link")]
    if not slow:
        return
    plans, workers = PlanRow.__table__.c, WorkerRow.__table__.c
    known = fetch(select(workers.rank, workers.node, workers.device).where(workers.job_id == job_id))
    places = {row["rank"]: (row["node"], row["device"]) for row in known}
    pipelines: dict[int, list[Pipeline]] = {}
    for row in fetch(select(plans.epoch, plans.layout).where(plans.job_id == job_id, plans.epoch.in_(epochs))):
        with suppress(LedgerError):
            replicas = from_json(row["layout"]).replicas
            pipelines[row["epoch"]] = [[_places(stage.ranks, places) for stage in one.stages] for one in replicas]
    for row in slow:
        ends = _places(row["ranks"], places)
        row["idle_epochs"] = [epoch for epoch, under in pipelines.items() if not _works(ends, under)]


def _places(ranks: Iterable[int], places: Mapping[int, Place]) -> set[Place]:
    return {places[rank] for rank in ranks if rank in places}


def _works(ends: set[Place], pipelines: Sequence[Pipeline]) -> bool:
    """A device that has work; a link whose ends are in stages that follow one another, as the first does the last."""
    for stages in pipelines:
        if len(ends) == 1 and any(ends & stage for stage in stages):
            return True
        for stage, following in zip(stages, [*stages[1:], *stages[:1]], strict=True):
            if len(ends) > 1 and ends & stage and ends & following and ends <= stage | following:
                return True
    return not ends
