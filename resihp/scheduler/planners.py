"""The rules by which a job may be planned: ours, and for comparison the paper's, its first steps, giving replicas up.

Pure. Called by the controller, with the name in the job's settings, and by `resihp plan`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import get_args

from resihp.parallelism.plan import Plan
from resihp.scheduler import planner
from resihp.scheduler.layouts.paper_planner import STEP_NAMES, progressive
from resihp.scheduler.situation import Decision, Situation
from resihp.settings import PlannerName

PLANNER_NAMES: tuple[PlannerName, ...] = get_args(PlannerName)


@dataclass(frozen=True, kw_only=True)
class NamedPlanner:
    """Functions of a planner. Jobs start the same way, and have the same cautious plan to fall back on, under all
    planners."""

    decide: Callable[[Situation], Decision]
    first_plan: Callable[..., Plan] = planner.first_plan
    without_lost_replicas: Callable[[Situation], Decision] = planner.without_lost_replicas


def named(name: PlannerName) -> NamedPlanner:
    """Return the planner of this name. Raises ValueError for an unknown name.

    `resihp-paper`: all steps of the paper's rule. `paper-tp`, `paper-tp-pp`: its first step, its first two steps.
    `drop-replica`: a replica that loses a rank, or has a slow one, is left as it is or given up, and nothing moves: new
    ranks stand by, and tuned orders of the job are not kept.
    """
    if name not in PLANNER_NAMES:
        raise ValueError(f"planner {name}: unknown; choose {', '.join(PLANNER_NAMES)}")
    decide: dict[PlannerName, Callable[[Situation], Decision]] = {
        "resihp": planner.decide,
        "resihp-paper": progressive,
        "paper-tp": partial(progressive, steps=STEP_NAMES[:1]),
        "paper-tp-pp": partial(progressive, steps=STEP_NAMES[:2]),
        "drop-replica": planner.without_lost_replicas,
    }
    return NamedPlanner(decide=decide[name])
