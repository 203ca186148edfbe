"""Decides how a job goes on with the devices that it has left: `decide`. Pure: no torch, no clock, deterministic."""

from resihp.scheduler.planner import decide, first_plan, without_lost_replicas
from resihp.scheduler.situation import Decision, Situation

__all__ = ["Decision", "Situation", "decide", "first_plan", "without_lost_replicas"]
