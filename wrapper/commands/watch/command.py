"""`resihp status --watch`: a job on the screen until it ends, redrawn once a second and when the window changes.

What is shown is `wrapper.commands.watch.picture`'s. Without a terminal, a line for each thing that happened. Called by
`wrapper.commands.status.command`.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC
from typing import TYPE_CHECKING

import msgspec

from resihp.errors import LedgerError
from wrapper.commands.status.tables import progress_line
from wrapper.commands.watch.picture import Watched, headline, picture
from wrapper.output.render import one_line, percent

if TYPE_CHECKING:
    from rich.console import Console

EVERY_S = 1.0
READING_SHARE = 0.2
"""Of the time; a ledger that takes long to read is read less often."""
LINE_S = 10.0
"""Between two lines about iterations, without a terminal."""
RECENT = 400
"""Iterations read for the line of times."""
# --- following a job ------------------------------------------------------------------------------------------------


def watch(job: str | None, ledger: str | None, as_json: bool) -> str:
    """Show a job until it has ended, or until ^C; the state in which it was seen last.

    Raises LedgerError if there is nothing to read at the beginning.
    """
    from wrapper.commands.status.job_status import job_status
    from wrapper.output.answers import console
    from wrapper.output.ledgers import folder_of, opened, pinned

    name = pinned(job, ledger)

    def read() -> Watched:
        nonlocal name
        with opened(name, ledger) as (reader, row):
            name = name or row["uuid"]  # the newest may be another one in a second
            columns = ("iteration", "seconds", "predicted_seconds")
            rows = reader.rows("iterations", row["id"], last=RECENT)
            state = job_status(reader, row, folder=folder_of(name, ledger))
            return Watched(state, [tuple(each[column] for column in columns) for each in rows])

    return follow(read, console(), as_json=as_json)


def follow(
    read: Callable[[], Watched],
    console: Console,
    *,
    as_json: bool = False,
    wait: Callable[[float], bool] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """The state at the end. `wait` pauses for so many seconds; True says that the window has changed meanwhile."""
    state, took_s = _timed(read, clock)
    try:
        with _resizes() as woken:
            pause = wait or woken
            if as_json or not console.is_terminal or console.is_dumb_terminal:
                state = _follow_in_lines(read, state, console, as_json, pause, clock)
            else:
                state = _follow_on_screen(read, state, took_s, console, pause, clock)
    except KeyboardInterrupt:
        pass
    return str(state.status["state"])


def _follow_on_screen(
    read: Callable[[], Watched],
    state: Watched,
    took_s: float,
    console: Console,
    pause: Callable[[float], bool],
    clock: Callable[[], float],
) -> Watched:
    """On a screen of its own, which is written over and never cleared; the last picture stays when it ends."""
    from rich.live import Live

    unicode = not console.options.ascii_only
    live = Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop")
    try:
        with live:
            while True:
                live.update(picture(state, console.width, console.height, unicode=unicode), refresh=True)
                if state.status["state"] != "running":
                    break
                until = clock() + max(EVERY_S, took_s / READING_SHARE)
                while (left := until - clock()) > 0 and pause(left):
                    live.update(picture(state, console.width, console.height, unicode=unicode), refresh=True)
                try:
                    state, took_s = _timed(read, clock)
                except LedgerError as error:
                    state = msgspec.structs.replace(state, trouble=str(error))
    finally:
        console.print(picture(state, console.width, None, unicode=unicode))
    return state


def _follow_in_lines(
    read: Callable[[], Watched],
    state: Watched,
    console: Console,
    as_json: bool,
    pause: Callable[[float], bool],
    clock: Callable[[], float],
) -> Watched:
    from wrapper.output.answers import to_json

    former: Watched | None = None
    told_s = float("-inf")
    while True:
        if as_json:
            print(to_json(state.status), flush=True)
        else:
            due = clock() - told_s >= LINE_S
            found = changes(former, state, progress=due)
            for line in found:
                console.print(line, soft_wrap=True, markup=False, highlight=False)
            told_s = clock() if due and found else told_s
        if state.status["state"] != "running":
            return state
        former = state
        pause(EVERY_S)
        try:
            state = read()
        except LedgerError as error:
            state = msgspec.structs.replace(state, trouble=str(error))


def _timed(read: Callable[[], Watched], clock: Callable[[], float]) -> tuple[Watched, float]:
    began = clock()
    return read(), clock() - began


@contextmanager
def _resizes() -> Iterator[Callable[[float], bool]]:
    """A pause that ends early, with True, when the terminal's window has changed."""
    changed = threading.Event()

    def pause(seconds: float) -> bool:
        woken = changed.wait(seconds)
        changed.clear()
        return woken

    if threading.current_thread() is not threading.main_thread():  # only there signals can be caught
        yield pause
        return
    before = signal.signal(signal.SIGWINCH, lambda *_: changed.set())
    try:
        yield pause
    finally:
        signal.signal(signal.SIGWINCH, before)


# --- lines ----------------------------------------------------------------------------------------------------------


def changes(former: Watched | None, now: Watched, *, progress: bool = True) -> list[str]:
    """What is new since `former`, one line for each event; with `progress`, where training is if it has moved; and once
    that it may be stuck, when it begins to look so."""
    status = now.status
    seen = -1 if former is None else max((event["seq"] for event in former.status["events"]), default=-1)
    events = [event for event in status["events"] if event["seq"] > seen]
    if former is None:
        events = events[-1:]
    lines = [f"{event['at'].astimezone(UTC):%H:%M:%S}  {one_line(event['text'])}" for event in events]
    if now.trouble and (former is None or former.trouble != now.trouble):
        lines.append(one_line(now.trouble))
    former_stuck = former is not None and former.status["stuck"]
    moved = former is None or former.status["iteration"] != status["iteration"]
    if (progress and moved) or status["state"] != "running":
        where = [*headline(status), f"goodput {percent(status['goodput'])}"]
        lines.append("  ".join(one_line(words) for words in where))
    if (former is None and status["state"] == "running") or (status["stuck"] and not former_stuck):
        lines += filter(None, [progress_line(status)])
    return lines
