"""The display of `resihp run` while training runs, on stderr: a panel on a terminal, plain lines elsewhere.

Each line begins with its time (UTC, as in the ledger). A message follows the iterations that were committed before it.
If the script does not train with resihp, the output of its rank 0 goes to stdout unchanged, or above the panel. A
script counts as such once its ranks have formed a process group of their own, or have declared no model for a long
time. The supervisor passes in everything that it journals and receives. This module only displays: an error in it, such
as odd input or a closed terminal, is counted and never reaches the supervisor.
"""

from __future__ import annotations

import functools
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Concatenate, Literal, ParamSpec

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from resihp.record import journal
from resihp.record.describe import explain, size
from resihp.words import count_of
from resihp.wrapper.output.idle_gpus import IdleGpus
from resihp.wrapper.output.job_history import JobHistory
from resihp.wrapper.output.rank_health import rank_health
from resihp.wrapper.output.render import count, duration, layout_grid, legend, literal

if TYPE_CHECKING:
    from resihp.protocol.messages import Beat, Stepped
    from resihp.settings import Settings

Level = Literal["progress", "notice", "warning", "error"]
MIN_TEXT_COLUMNS = 20
"""Smallest width, in columns, of a message's text, even on a narrow terminal."""
LINE_EVERY_S = 1.0
FRAME_EVERY_S = 0.2
ECHO_MARGIN_COLUMNS = 6
"""Columns that stay free beside the panel. A terminal echoes ^C into these columns instead of beginning a new line;
otherwise Rich, which counts lines, could not erase the whole panel."""
START_REPORT_EVERY_S = 15.0
"""Seconds between two reports on the progress of the start."""
HOLD_OUTPUT_S = 30.0
"""How long, in seconds, output of rank 0 is held back while it is unknown whether the script trains with resihp."""
MAX_HELD_LINES = 10_000
"""Most lines of output that are held back; of more lines, the first are dropped and their number is reported."""
ITERATIONS_AFTER_FAILURE = 3
"""Number of iterations after a failure that are shown one by one, however fast they are."""
_STYLES: Mapping[Level, str] = {"progress": "", "notice": "cyan", "warning": "yellow", "error": "bold red"}

P = ParamSpec("P")


def _quiet(
    method: Callable[Concatenate[LiveView, P], None],
) -> Callable[Concatenate[LiveView, P], None]:
    """Wrap a method so that an error in the display never stops the job. Rich raises SystemExit if a pipe is closed."""

    @functools.wraps(method)
    def guarded(self: LiveView, /, *arguments: P.args, **named: P.kwargs) -> None:
        try:
            method(self, *arguments, **named)
        except (Exception, SystemExit):  # noqa: BLE001 - see above
            self.errors += 1

    return guarded


class LiveView:
    """The live display of a job. The supervisor calls `entry`, `say`, `report` and `beats` as events occur, `tick` a
    few times a second, and `close` at the end."""

    def __init__(
        self,
        console: Console,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        past: Iterable[journal.Record] = (),
    ) -> None:
        """Prepare the display. `console` writes to stderr; `clock` returns monotonic seconds, `wall_clock` seconds
        since 1970; `past`: the records written under earlier leaders."""
        self.errors = 0
        """Number of calls of this class that failed."""
        self._console = console
        self._settings = settings
        self._clock = clock
        self._wall_clock = wall_clock
        self._history = JobHistory()
        self._stopped: dict[str, set[int]] = {}
        """Ranks whose processes are stopped (SIGSTOP), by node, from the last heartbeat of each node."""
        self._last: journal.IterationCommitted | None = None
        self._last_at = 0.0
        self._counter: journal.CounterSeen | None = None
        self._next, self._goal = 1, 0
        self._event = ""
        self._printed_at = float("-inf")
        self._waited_since = clock()
        self._trains = False
        for record in past:
            self._follow(record)
        self._printed = 0 if self._last is None else self._last.outcome.iteration
        self._plain = not settings.declares
        """Whether the script is known not to train with resihp."""
        self._held: deque[str] = deque(maxlen=MAX_HELD_LINES)
        self._left_out = 0
        self._held_since: float | None = None
        self._always = 1
        self._reports: dict[int, int] = {}
        self._drawn_at = float("-inf")
        self._dirty = True
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._start_panel()

    @_quiet
    def _start_panel(self) -> None:
        live = Live(self._panel(), console=self._console, auto_refresh=False, transient=True, redirect_stdout=False)
        live.start(refresh=True)
        self._live = live

    @_quiet
    def say(self, level: Level, text: str) -> None:
        """Show a message of the controller or the supervisor."""
        self._line(text, _STYLES.get(level, ""))

    @_quiet
    def entry(self, record: journal.Record) -> None:
        """Show a journal record that has just been written."""
        entry = record.entry
        self._dirty = True
        self._follow(record)
        match entry:
            case journal.ModelDeclared():
                self._held.clear()
            case journal.WorkerEnded(exit=0) if not self._trains and not self._plain:
                self._plain = True
                self._show_output()
            case journal.PlanInEffect() if len(self._history.plans) == 1:
                self._show_idle_gpus()
            case journal.IterationCommitted():
                self._committed()
            case journal.FailureFound():
                self._always = ITERATIONS_AFTER_FAILURE
                self._line(explain(entry), _STYLES["warning"])
            case journal.Reconfigured():
                self._line(self._recovered(entry, record.at), _STYLES["notice"])
            case journal.FaultInjected() | journal.CheckpointCommitted() | journal.EvaluationDone():
                self._line(explain(entry), "")
            case journal.JobEnded():
                self._show_last()
                self._show_output()
                self._show_idle_gpus(f"; for the cost: resihp history cost {self._settings.job}")
        self._draw()

    def _follow(self, record: journal.Record) -> None:
        """Update the state with one record, and show nothing."""
        entry = record.entry
        self._history.follow(record)
        match entry:
            case journal.ModelDeclared():
                self._trains = True
                self._goal = entry.declare.iterations
                self._counter = self._last = None
            case journal.PlanDecided():
                self._next = entry.next_iteration
            case journal.IterationCommitted():
                self._last, self._last_at = entry, record.at
            case journal.CounterSeen():
                self._counter = entry
            case _:
                pass

    @_quiet
    def report(self, rank: int, stepped: Stepped) -> None:
        """Count the step of one rank. Between commits, the panel shows the number of ranks that have stepped."""
        iteration = stepped.outcome.iteration
        self._reports[iteration] = self._reports.get(iteration, 0) + 1
        while len(self._reports) > 4:
            del self._reports[min(self._reports)]
        self._dirty = True

    @_quiet
    def beats(self, node: str, beat: Beat) -> None:
        """Update the state from a node's heartbeat: a rank whose process is stopped is shown as suspected."""
        if beat.met and not self._plain:
            self._plain = True
            self._show_output()
        stopped = {worker.rank for worker in beat.workers if worker.state == "T"}
        if stopped != self._stopped.get(node, set()):
            self._stopped[node] = stopped
            self._dirty = True

    @_quiet
    def output(self, lines: Sequence[str], left_out: int = 0) -> None:
        """Show output of rank 0. `left_out`: number of lines before it that were dropped."""
        if self._trains:
            return
        if self._held_since is None:
            self._held_since = self._clock()
        self._left_out += left_out + max(0, len(self._held) + len(lines) - MAX_HELD_LINES)
        self._held.extend(lines)
        if self._plain or self._clock() - self._held_since > HOLD_OUTPUT_S:
            self._show_output()

    @_quiet
    def tick(self) -> None:
        """Refresh the display. The supervisor calls this a few times a second."""
        if self._held_since is not None and self._clock() - self._held_since > HOLD_OUTPUT_S:
            self._show_output()
        self._show_start()
        self._draw()

    @_quiet
    def close(self) -> None:
        """Show the last iteration, and restore the terminal."""
        self._show_last()
        self._show_output()
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _show_output(self) -> None:
        """Write the output that was held back. Of a line that was overwritten, such as a progress bar, only the last
        state is written."""
        lines = [line.rpartition("\r")[2] for line in self._held]
        self._held.clear()
        if not lines:
            return
        if self._left_out:
            where = f"resihp logs {self._settings.job} --rank 0 shows them"
            are = "is" if self._left_out == 1 else "are"
            lines.insert(0, f"resihp: {count_of(self._left_out, 'line')} of rank 0 {are} left out here; {where}")
            self._left_out = 0
        self._waited_since = self._clock()
        if self._live is not None and sys.stdout.isatty():
            for line in lines:
                self._console.print(Text(literal(line)), soft_wrap=True)
        else:
            sys.stdout.write("".join(f"{line}\n" for line in lines))
            sys.stdout.flush()

    # --- display -----------------------------------------------------------------------------------------------

    def _line(self, text: str, style: str) -> None:
        """Show one message: above the panel, or as a plain line."""
        self._show_last()
        line = literal(text)
        self._event = line.splitlines()[0] if line else ""
        self._print(line, style)

    def _print(self, text: str, style: str = "", at: float | None = None) -> None:
        when = datetime.fromtimestamp(self._wall_clock() if at is None else at, UTC)
        stamp = f"{when:%m-%d %H:%M:%S} "
        lines = text.splitlines()
        if self._console.is_terminal:  # no word is broken, not even a path that is longer than a line
            width = max(self._console.width - len(stamp), MIN_TEXT_COLUMNS)
            whole = functools.partial(textwrap.wrap, width=width, break_long_words=False, break_on_hyphens=False)
            lines = [part for line in lines for part in whole(line)]
        message = Text(("\n" + " " * len(stamp)).join(lines), style=style)
        self._console.print(Text(stamp).append_text(message), soft_wrap=True)

    def _show_start(self) -> None:
        """Report at intervals which nodes and workers have joined, until the first iteration, because the start may
        take minutes."""
        now = self._clock()
        if self._live is not None or self._last is not None or now - self._waited_since < START_REPORT_EVERY_S:
            return
        if self._plain:  # no iteration is expected
            return
        self._waited_since = now
        joined = sum(node.joined_at is not None for node in self._history.nodes.values())
        nodes = f"{joined} of {self._settings.nodes} nodes have joined"
        self._line(f"waiting for the first iteration: {nodes}, {self._started()}", "")

    def _show_idle_gpus(self, further: str = "") -> None:
        """Report idle GPUs, when the first plan takes effect and at the end of the job."""
        if line := IdleGpus(self._history).line():
            self._line(f"{line}{further}", _STYLES["warning"])

    def _started(self) -> str:
        total = self._settings.nodes * self._settings.gpus_per_node
        started = sum(not worker.ended for worker in self._history.workers.values())
        return f"{started} of {total} workers have started"

    def _recovered(self, entry: journal.Reconfigured, at: float) -> str:
        """Describe a recovery: the total time since the failure, as in `JobHistory.recovery`, and the time of each
        phase."""
        plan = self._history.shown_plan
        layout = plan.description if plan is not None else f"restart {entry.epoch}"
        after_last_iteration = 0 < self._goal < self._next
        iteration = {
            "redo": "the last evaluation redone" if after_last_iteration else f"iteration {self._next} redone",
            "commit": f"iteration {self._next - 1} counts",
            "between": f"iteration {self._next} next",
        }[entry.action]
        moved = f", {size(entry.bytes_moved)} moved" if entry.bytes_moved else ""
        if entry.action == "between" and not entry.failures:
            return f"layout changed: {layout}, {iteration}, in {duration(entry.seconds)}{moved}"
        since = "the failure" if len(entry.failures) == 1 else "the first sign of trouble"
        mended = self._history.recovery(entry, at)
        decided_s, without_s = entry.park_s + entry.plan_s, entry.seconds
        if mended is not None:
            without_s = mended.seconds_without_noticing
            decided_s += max(without_s - entry.seconds, 0.0)  # deciding before training was interrupted
        phases = [
            ("decided in", decided_s),
            ("moved in", entry.groups_s + entry.state_s),
            ("first iteration", entry.first_iteration_s),
        ]
        whole = f"{duration(without_s)} after {since}{' was noticed' if len(entry.failures) == 1 else ''}"
        alone = ""
        if plan is None:  # of a script that does not report to resihp
            phases, iteration = (
                [("ended in", entry.park_s), ("first iteration", entry.first_iteration_s)],
                "trains again",
            )
        if mended is not None and mended.noticed_after is not None:
            whole = f"{duration(mended.seconds_to_recover)} after {since}"
            phases.insert(0, ("noticed after", mended.noticed_after))
            alone = f"; {duration(without_s)} without noticing"
        phase_times = ", ".join(f"{phase} {duration(seconds)}" for phase, seconds in phases)
        return f"recovered: {layout}, {iteration}, {whole} ({phase_times}{alone}){moved}"

    def _committed(self) -> None:
        if self._live is not None:
            return
        if self._always > 0 or self._clock() - self._printed_at >= LINE_EVERY_S:
            self._always = max(self._always - 1, 0)
            self._show_last()

    def _show_last(self) -> None:
        """Show the last iteration unless it was shown already, with the time of its commit, which may be long ago. What
        rank 0 has printed itself is not shown again."""
        if self._counter is not None and self._counter.rank == 0:
            return
        if self._last is not None and self._printed != self._last.outcome.iteration:
            self._printed = self._last.outcome.iteration
            self._printed_at = self._clock()
            self._print(iteration_line(self._last), at=self._last_at)

    def _draw(self) -> None:
        now = self._clock()
        if self._live is None or not self._dirty or now - self._drawn_at < FRAME_EVERY_S:
            return
        self._dirty = False
        self._drawn_at = now
        self._live.update(self._panel(), refresh=True)

    def _panel(self) -> Panel:
        width = max(self._console.width - ECHO_MARGIN_COLUMNS, 24)
        parts: list[Text] = []
        plan = self._history.shown_plan
        layout = None if plan is None else plan.layout
        if self._last is None and self._plain:
            parts.append(Text(f"{self._started()}; the output of rank 0 is above", style="dim"))
        elif self._last is None:
            started = f", {self._started()}" if layout is None else ""
            parts.append(Text(f"waiting for the first iteration{started}", style="dim"))
        else:
            parts.append(Text(iteration_line(self._last), style="bold"))
            under_way = self._last.outcome.iteration + 1
            if layout is not None and under_way in self._reports:
                done, total = self._reports[under_way], len(layout.active)
                parts.append(Text(f"iteration {under_way}  {done} of {total} ranks have stepped", style="dim"))
        if layout is not None:
            health = rank_health(self._history, layout, set().union(*self._stopped.values()))
            parts.append(layout_grid(layout, health, max(width - 4, 20)))
            if meaning := legend(health.values()):
                parts.append(Text(meaning, style="dim"))
        if self._event:
            parts.append(Text(self._event, style="dim", no_wrap=True, overflow="ellipsis"))
        described = "" if plan is None else f", {plan.description}"
        title = Text(f"job {literal(self._settings.job)}{described}", no_wrap=True, overflow="ellipsis")
        return Panel(Group(*parts), title=title, title_align="left", width=width)


def iteration_line(entry: journal.IterationCommitted) -> str:
    """Format a committed iteration: `iteration 12  loss 4.0312  18.2k tokens/s  0.45 s`."""
    outcome = entry.outcome
    parts = [f"iteration {outcome.iteration}"]
    if not outcome.loss_is_unknown:
        parts.append(f"loss {outcome.loss:.4f}")
    if entry.seconds and outcome.tokens:
        parts.append(f"{count(outcome.tokens / entry.seconds)} tokens/s")
    if entry.seconds:
        parts.append(duration(entry.seconds))
    if outcome.skip:
        parts.append("step skipped, gradients not finite")
    return "  ".join(parts)
