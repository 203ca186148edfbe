"""`resihp status --watch`: show a job until it ends, redrawn once a second and when the window is resized.

`resihp.wrapper.commands.watch.picture` draws the screen. Without a terminal, each event is printed as a line. Called by
`resihp.wrapper.commands.status.command`.
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
from resihp.wrapper.commands.status.tables import progress_line
from resihp.wrapper.commands.watch.picture import Watched, headline, picture
from resihp.wrapper.output.render import one_line, percent

if TYPE_CHECKING:
    from rich.console import Console

READ_INTERVAL_S = 1.0
"""Seconds between two readings of the ledger."""
MAX_READING_SHARE = 0.2
"""Largest share of the time that is spent reading. A ledger that is slow to read is read less often."""
LINE_INTERVAL_S = 10.0
"""Seconds between two lines about progress, without a terminal."""
MAX_RECENT_ITERATIONS = 400
"""Most iterations that are read for the line of iteration times."""
# --- following a job ------------------------------------------------------------------------------------------------


def watch(job: str | None, ledger: str | None, as_json: bool) -> str:
    """Show a job until it ends, or until Ctrl-C; return its last state.

    Raises LedgerError if the first reading of the ledger fails.
    """
    from resihp.wrapper.commands.status.job_status import job_status
    from resihp.wrapper.output.answers import console
    from resihp.wrapper.output.ledgers import folder_of, opened, pinned

    name = pinned(job, ledger)

    def read() -> Watched:
        nonlocal name
        with opened(name, ledger) as (reader, row):
            name = name or row["uuid"]  # the newest job may be another one a moment later
            columns = ("iteration", "seconds", "predicted_seconds")
            rows = reader.rows("iterations", row["id"], last=MAX_RECENT_ITERATIONS)
            state = job_status(reader, row, folder=folder_of(name, ledger))
            return Watched(state, [tuple(iteration_row[column] for column in columns) for iteration_row in rows])

    return follow(read, console(), as_json=as_json)


def follow(
    read: Callable[[], Watched],
    console: Console,
    *,
    as_json: bool = False,
    wait: Callable[[float], bool] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Show the job until it ends, and return its last state.

    `wait` pauses for a number of seconds, and returns True if the window was resized meanwhile.
    """
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
    """Redraw the job on the alternate screen until it ends; the last picture stays on the normal screen."""
    from rich.live import Live

    unicode = not console.options.ascii_only
    live = Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop")
    try:
        with live:
            while True:
                live.update(picture(state, console.width, console.height, unicode=unicode), refresh=True)
                if state.status["state"] != "running":
                    break
                until = clock() + max(READ_INTERVAL_S, took_s / MAX_READING_SHARE)
                while (left_s := until - clock()) > 0 and pause(left_s):
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
    from resihp.wrapper.output.answers import to_json

    former: Watched | None = None
    printed_s = float("-inf")
    while True:
        if as_json:
            print(to_json(state.status), flush=True)
        else:
            due = clock() - printed_s >= LINE_INTERVAL_S
            new_lines = changes(former, state, progress=due)
            for line in new_lines:
                console.print(line, soft_wrap=True, markup=False, highlight=False)
            printed_s = clock() if due and new_lines else printed_s
        if state.status["state"] != "running":
            return state
        former = state
        pause(READ_INTERVAL_S)
        try:
            state = read()
        except LedgerError as error:
            state = msgspec.structs.replace(state, trouble=str(error))


def _timed(read: Callable[[], Watched], clock: Callable[[], float]) -> tuple[Watched, float]:
    began = clock()
    return read(), clock() - began


@contextmanager
def _resizes() -> Iterator[Callable[[float], bool]]:
    """Yield a function that sleeps, and returns early with True when the terminal's window is resized."""
    changed = threading.Event()

    def pause(seconds: float) -> bool:
        woken = changed.wait(seconds)
        changed.clear()
        return woken

    if threading.current_thread() is not threading.main_thread():  # only the main thread can catch signals
        yield pause
        return
    before = signal.signal(signal.SIGWINCH, lambda *_: changed.set())
    try:
        yield pause
    finally:
        signal.signal(signal.SIGWINCH, before)


# --- lines ----------------------------------------------------------------------------------------------------------


def changes(former: Watched | None, now: Watched, *, progress: bool = True) -> list[str]:
    """Return the events since `former`, one line for each.

    With `progress`, a line names the iteration if it has advanced. When the job begins to look stuck, a line says so
    once.
    """
    status = now.status
    last_seq = -1 if former is None else max((event["seq"] for event in former.status["events"]), default=-1)
    events = [event for event in status["events"] if event["seq"] > last_seq]
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
