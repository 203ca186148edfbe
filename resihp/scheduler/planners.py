"""Which rules a job may be planned by: ours, and to compare the paper's, its first steps, giving replicas up. Pure.

Called by the controller, with the name that the job's settings have, and by `resihp plan`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import get_args

from resihp.parallelism.plan import Plan
from resihp.scheduler import planner
from resihp.scheduler.layouts.paper_planner import STEPS, progressive
from resihp.scheduler.situation import Decision, Situation
from resihp.settings import PlannerName

NAMES: tuple[PlannerName, ...] = get_args(PlannerName)


@dataclass(frozen=True, kw_only=True)
class NamedPlanner:
    """What a planner is asked. Jobs begin alike, and have the same cautious plan to fall back on, under all of them."""

    decide: Callable[[Situation], Decision]
    first_plan: Callable[..., Plan] = planner.first_plan
    without_lost_replicas: Callable[[Situation], Decision] = planner.without_lost_replicas


def named(name: PlannerName) -> NamedPlanner:
    """`resihp-paper`: all steps of the paper's rule; `paper-tp`, `paper-tp-pp`: the first one, the first two;
    `drop-replica`: a replica that loses a rank, or has one that became slow, is left as it is or given up, and nothing
    moves: newcomers stand by, and orders that the job was tuned to are not kept. Raises ValueError for another name."""
    if name not in NAMES:
        raise ValueError(f"planner {name}: unknown; choose {', '.join(NAMES)}")
    decide: dict[PlannerName, Callable[[Situation], Decision]] = {
        "resihp": planner.decide,
        "resihp-paper": progressive,
        "paper-tp": partial(progressive, steps=STEPS[:1]),
        "paper-tp-pp": partial(progressive, steps=STEPS[:2]),
        "drop-replica": planner.without_lost_replicas,
    }
    return NamedPlanner(decide=decide[name])
