"""The state machine that runs a job: events in, actions out. It knows no clock, no socket and no torch."""

from resihp.controller.controller import Controller
from resihp.controller.interface import AnyAction, AnyEvent

__all__ = ["AnyAction", "AnyEvent", "Controller"]
