"""The supervisor of `stub_run.py`: `stub_supervisor.py supervise FILE`, with the supervisor's options.

Everything is real but the ledger (a list) and the view (lines on stderr).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from resihp.controller import Controller
from resihp.controller.interface import AgentJoined, AnyAction, AnyEvent, CutConnection, WorkerSaid
from resihp.errors import ProtocolError
from resihp.process import die_with_parent, inherited_socket
from resihp.wrapper import early_signals
from resihp.wrapper.config.run_spec import load
from resihp.wrapper.supervisor.aftermath import mark_dead
from resihp.wrapper.supervisor.process import supervise_with
from resihp.wrapper.supervisor.takeover import agents_are_started, takeover_source


class Nothing:
    """A ledger and view without a word."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None

    def say(self, level: str, text: str) -> None:
        print(f"{level}: {text}", file=sys.stderr, flush=True)


class BrokenController(Controller):
    def handle(self, event: AnyEvent, now: float) -> list[AnyAction]:
        if isinstance(event, AgentJoined):
            raise ZeroDivisionError("a bug")
        return super().handle(event, now)


class CuttingController(Controller):
    """Cuts n1's connection with every seventh answer to a worker, so that the answer is lost with it."""

    said = 0

    def handle(self, event: AnyEvent, now: float) -> list[AnyAction]:
        actions = super().handle(event, now)
        if isinstance(event, WorkerSaid):
            self.said += 1
            if self.said % 7 == 0:
                actions.append(CutConnection(node="n1"))
        return actions


class DyingController(Controller):
    """STUB_DIES `AgentBeat 2 5`: its process is killed at the second beat of a life, in the first five lives."""

    heard = 0

    def handle(self, event: AnyEvent, now: float) -> list[AnyAction]:
        kind, nth, lives = os.environ["STUB_DIES"].split()
        self.heard += type(event).__name__ == kind
        died = Path(os.environ["RESIHP_LOCAL"], "deaths")
        deaths = died.stat().st_size if died.exists() else 0
        if self.heard == int(nth) and deaths < int(lives):
            died.write_bytes(b"x" * (deaths + 1))
            time.sleep(0.3)  # the journal's own thread writes what came before
            os.kill(os.getpid(), signal.SIGKILL)
        return super().handle(event, now)


CONTROLLERS = {"": Controller, "broken": BrokenController, "cutting": CuttingController, "dying": DyingController}


def supervise(run_file: str, *arguments: str) -> int:
    early_signals.note()
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    request = load(Path(run_file))
    listener = socket.socket(fileno=int(options["--listen"]))
    if "--bury" in options:
        return mark_dead(request, options["--bury"], listener)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    die_with_parent(int(options["--parent"]), signal.SIGHUP)
    logging.basicConfig(filename=request.of_job.logs / "supervisor.log")
    nothing: Any = Nothing()
    kind = CONTROLLERS[os.environ.get("STUB_CONTROLLER", "")]
    settings = msgspec.structs.replace(request.settings, start_budget_s=float(os.environ.get("STUB_BUDGET", "600")))
    controller, takeover = kind(settings), None
    if "--take-over" in options:
        try:
            are_started = partial(agents_are_started, request)
            takeover = takeover_source(request.of_job.journal_file, "", "restarted", are_started=are_started)
        except (ProtocolError, OSError) as error:
            print(f"cannot be taken over: {error}", file=sys.stderr)
            return mark_dead(request, options["--take-over"], listener)
        controller = kind.recover(settings, (record.entry for record in takeover.records))
    forks = inherited_socket(int(options["--forks"])) if "--forks" in options else None
    running = supervise_with(request, controller, nothing, nothing, listener=listener, takeover=takeover, forks=forks)
    return asyncio.run(running)


if __name__ == "__main__":
    mode, *rest = sys.argv[1:]
    assert mode == "supervise"
    sys.exit(supervise(*rest))
