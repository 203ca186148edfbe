"""The controller: the state machine that runs a job. It takes events and returns actions, and uses no clock, no socket
and no torch."""

from resihp.controller.controller import Controller
from resihp.controller.interface import AnyAction, AnyEvent

__all__ = ["AnyAction", "AnyEvent", "Controller"]
