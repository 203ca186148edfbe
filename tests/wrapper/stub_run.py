"""`resihp run` for tests: `stub_run.py guard FILE` and `stub_run.py supervise FILE PARENT [how the first one died]`.

Everything is real but the store (nobody rendezvous), the ledger (a list) and the view (lines on stderr).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resihp.controller import Controller
from resihp.controller.interface import AgentJoined, AnyAction, AnyEvent, CutConnection, WorkerSaid
from resihp.process import die_with_parent
from wrapper.guardian import guard
from wrapper.request import load
from wrapper.supervisor import hold_lock, recover, supervise_with


class Nothing:
    """A ledger and view without a word."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None

    def say(self, level: str, text: str) -> None:
        print(f"{level}: {text}", file=sys.stderr, flush=True)


class PretendedStore:
    async def run(self, ready: Callable[[str, int], None]) -> None:
        ready("127.0.0.1", 1)
        await asyncio.Event().wait()


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


CONTROLLERS = {"": Controller, "broken": BrokenController, "cutting": CuttingController}


def command(run_file: Path, died: str | None) -> list[str]:
    base = [sys.executable, "-P", __file__, "supervise", str(run_file), str(os.getpid())]
    return base if died is None else [*base, died]


def supervise(run_file: str, parent: str, *died: str) -> int:
    request = load(Path(run_file))
    if died:
        return recover(request, died[0])
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    die_with_parent(int(parent), signal.SIGHUP)
    logging.basicConfig(filename=request.of_job.logs / "supervisor.log")
    hold_lock(request.of_job)
    nothing: Any = Nothing()
    controller = CONTROLLERS[os.environ.get("STUB_CONTROLLER", "")](request.settings)
    return asyncio.run(supervise_with(request, controller, nothing, nothing, PretendedStore()))


if __name__ == "__main__":
    mode, *rest = sys.argv[1:]
    sys.exit(guard(Path(rest[0]), command) if mode == "guard" else supervise(*rest))
