"""The planners by name: ours and, for comparison, the paper's, its first steps alone, and giving up damaged replicas.

Pure. Called by the controller, with the name from the job's settings, and by `resihp plan`.
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
    """The functions of a planner. All planners have the same first plan and the same cautious plan."""

    decide: Callable[[Situation], Decision]
    first_plan: Callable[..., Plan] = planner.first_plan
    without_lost_replicas: Callable[[Situation], Decision] = planner.without_lost_replicas


def named(name: PlannerName) -> NamedPlanner:
    """Return the planner with this name. Raises ValueError for an unknown name.

    `resihp`: our planner. `resihp-paper`: all steps of the paper's rule. `paper-tp`, `paper-tp-pp`: its first step, its
    first two steps. `drop-replica`: a replica that loses a rank is given up, a replica with a slow rank is left as it
    is, and no state moves; new ranks are on standby, and tuned orders of the job are not kept.
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
