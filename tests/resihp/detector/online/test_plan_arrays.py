"""Plans as arrays: stages without ranks have no row, no lane, and do not disturb the others."""

from __future__ import annotations

import numpy as np
import pytest

from resihp.detector.observation import Observation, RankTimes
from resihp.detector.online.monitor import Monitor
from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.plan import Plan
from resihp.pipeline.schedules import orders_of
from tests.resihp.scheduler.cases import MODEL


@pytest.mark.parametrize("stage", [0, 1])
def test_iterations_under_a_plan_with_a_stage_without_ranks_are_judged(stage: int) -> None:
    """With rank 5 of half its speed from the 60th iteration on; the monitor has to see it, and nobody else."""
    grid = Layout.uniform(tp=1, pp=2, dp=3, layers=6)
    stages = list(grid.replicas[0].stages)
    (idle,) = stages[1 - stage].ranks
    stages[stage] = Stage((), stages[stage].chunks)
    plan = Plan(epoch=1, layout=Layout((Replica(tuple(stages)), *grid.replicas[1:])), assignment=()).dealing(9)
    orders = orders_of(plan)
    monitor = Monitor()
    monitor.adopt(plan, MODEL, orders)
    assert monitor.stacked is not None
    assert monitor.stacked.places == tuple((d, s) for d in range(3) for s in range(2) if (d, s) != (0, stage))
    rng = np.random.default_rng(0)
    found = []
    for iteration in range(1, 100):
        times = {}
        for rank, place in plan.layout.places():
            order = orders[place.replica][place.stage]
            slow = 2.0 if rank == 5 and iteration >= 60 else 1.0
            spans = slow * 0.01 * rng.lognormal(0.0, 0.01, len(order)) * [1 + (p.kind == "B") for p in order]
            starts = np.cumsum(spans) - spans + 0.001
            rows = np.stack([starts, spans, spans, np.full(len(order), 64.0), np.full(len(order), 4096.0)])
            times[rank] = RankTimes(rank=rank, seconds=0.5, chunks=rows, reduced=0.4)
        assert idle in times
        seconds = max(float(own.starts[-1] + own.spans[-1]) for own in times.values())
        assessment = monitor.observe(Observation(iteration=iteration, epoch=1, seconds=seconds, times=times))
        found += [one.ranks for one in assessment.findings if (one.kind, one.component) == ("fail-slow", "device")]
    assert {ranks[0] for ranks in found if ranks} == {5}
