"""What a terminal shows: grids that fit it and need no colour, durations, the live view's lines, literal text."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import pytest
from rich.console import Console

from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.plan import Plan, spread
from resihp.protocol.messages import Beat, StepOutcome, Stepped, WorkerBeat
from resihp.record import journal
from resihp.settings import Settings
from resihp.wrapper.output.answers import tell
from resihp.wrapper.output.render import Health, count, duration, layout_grid, legend, literal
from resihp.wrapper.sinks.terminal import MAX_HELD_LINES, LiveView
from tests.resihp.controller.direct import DECLARE

SETTINGS = Settings(job="local-1 [red]", nodes=2, gpus_per_node=4, tp=2, pp=2)
DP2 = Layout.uniform(tp=2, pp=2, dp=2, layers=8)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0.00 s"),
        (1.2e-15, "0.00 s"),
        (0.00000312, "3.12 µs"),
        (0.00042, "420 µs"),
        (0.0031, "3.1 ms"),
        (0.00996, "0.01 s"),
        (0.617, "0.62 s"),
        (9.999, "10.0 s"),
        (12.34, "12.3 s"),
        (59.97, "1 min 00 s"),
        (245, "4 min 05 s"),
        (3599.7, "1 h 00 min"),
        (7380, "2 h 03 min"),
        (86399, "1 d 00 h"),
        (3 * 86400 + 4 * 3600, "3 d 04 h"),
        (-2, "-2.00 s"),
        (None, "-"),
        (float("nan"), "-"),
    ],
)
def test_duration(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("number", "words"), [(812, "812"), (18234, "18.2k"), (999_960, "1.0M"), (3.4e6, "3.4M"), (1.2e9, "1.2G")]
)
def test_count(number: float, words: str) -> None:
    assert count(number) == words


def test_literal_disarms_control_characters() -> None:
    assert literal("a\x1b[31mb\tc\nd é") == "a\\x1b[31mb\\tc\nd é"


def test_grid_tells_places_and_health_without_colour() -> None:
    layout = DP2.without(frozenset({5}))
    health: dict[int, Health] = {rank: "active" for rank in range(8)} | {5: "dead", 2: "suspected", 6: "standby"}
    assert layout_grid(layout, health).plain.splitlines() == [
        "           stage 0     stage 1",
        "           layers 0-3  layers 4-7",
        "replica 0  0-1         2? 3",
        "standby    4 6s 7",
        "dead       5x",
    ]


def test_grid_of_a_layout_with_unequal_stages() -> None:
    layout = Layout(
        replicas=(
            Replica((Stage((0, 1), ((0, 5),)), Stage((2, 3), ((6, 7),)))),
            Replica((Stage((4,), ((0, 3),)), Stage((6, 7), ((4, 7),)))),
        )
    )
    assert layout_grid(layout).plain.splitlines() == [
        "           stage 0   stage 1",
        "replica 0  0-1 L0-5  2-3 L6-7",
        "replica 1  4 L0-3    6-7 L4-7",
    ]


def test_grid_of_a_stage_without_ranks() -> None:
    first, second = Layout.uniform(tp=1, pp=2, dp=2, layers=4).replicas
    layout = Layout((Replica((first.stages[0], Stage((), first.stages[1].chunks))), second))
    assert layout_grid(layout).plain.splitlines() == [
        "           stage 0     stage 1",
        "           layers 0-1  layers 2-3",
        "replica 0  0           none",
        "replica 1  2           3",
    ]


def test_grid_names_layers_where_a_replica_has_others_than_most() -> None:
    uniform = Layout.uniform(tp=2, pp=2, dp=3, layers=8)
    odd = Replica((Stage((4, 7), ((0, 4),)), Stage((6,), ((5, 7),))))
    layout = Layout(replicas=(uniform.replicas[0], odd, uniform.replicas[2]), standby=(13,))
    health: dict[int, Health] = {rank: "active" for rank in range(12)}
    health |= {5: "dead", 13: "standby", 14: "starting", 15: "starting", 9: "suspected"}
    assert layout_grid(layout, health).plain.splitlines() == [
        "           stage 0     stage 1",
        "           layers 0-3  layers 4-7",
        "replica 0  0-1         2-3",
        "replica 1  4 7 L0-4    6 L5-7",
        "replica 2  8 9?        10-11",
        "standby    13s",
        "starting   14-15+",
        "dead       5x",
    ]
    assert legend(health.values()) == "s standby, + starting, ? suspected, x dead"
    assert legend(["active"]) == ""


def test_grid_of_virtual_stages_and_unequal_depths() -> None:
    first = Layout.uniform(tp=1, pp=2, dp=1, layers=8, chunks=2).replicas[0]
    layout = Layout(replicas=(first, Replica((Stage((2, 3), ((0, 7),)),))))
    assert layout_grid(layout).plain.splitlines() == [
        "           stage 0     stage 1",
        "replica 0  0 L0-1,4-5  1 L2-3,6-7",
        "replica 1  2-3 L0-7",
    ]
    whole = Replica((Stage((4,), ((0, 7),)),))
    assert layout_grid(Layout(replicas=(*layout.replicas, whole))).plain.splitlines() == [
        "           stage 0     stage 1",
        "           layers 0-7",
        "replica 0  0 L0-1,4-5  1 L2-3,6-7",
        "replica 1  2-3",
        "replica 2  4",
    ]


def test_of_many_replicas_the_odd_ones_are_shown() -> None:
    layout = Layout.uniform(tp=2, pp=2, dp=40, layers=8)
    replicas = list(layout.replicas)
    replicas[20] = Replica((Stage(replicas[20].ranks[:3], ((0, 7),)),))
    replicas[30] = Replica((Stage(replicas[30].ranks[:2], ((0, 2),)), Stage(replicas[30].ranks[2:], ((3, 7),))))
    lines = layout_grid(Layout(replicas=tuple(replicas))).plain.splitlines()
    assert "replica 20  80-82 L0-7" in lines
    assert "replica 30  120-121 L0-2  122-123 L3-7" in lines
    assert [line for line in lines if "more" in line] == [
        *("... 6 more, all active", "... 9 more, all active", "... 9 more, all active")
    ]
    health: dict[int, Health] = {4 * d: "suspected" for d in range(20)}
    lines = layout_grid(Layout(replicas=tuple(replicas)), health).plain.splitlines()
    assert [line for line in lines if "more" in line] == ["... 26 more, not all active"]


def test_grid_without_replica() -> None:
    assert layout_grid(Layout(replicas=(), standby=(3,))).plain == "no replica\nstandby    3s"


@pytest.mark.parametrize("width", [60, 80, 200])
def test_large_grids_fit(width: int) -> None:
    layout = Layout.uniform(tp=8, pp=16, dp=64, layers=126)
    health: dict[int, Health] = {rank: "dead" for rank in range(6400, 6500, 2)} | {
        9000 + 2 * i: "dead" for i in range(90)
    }
    lines = layout_grid(layout, health, width).plain.splitlines()
    assert max(map(len, lines)) <= width
    assert any(line.startswith("replica 50 ") and "6400x 6401 6402x" in line for line in lines)
    assert any("more, all active" in line for line in lines)
    assert sum("stage 15" in line for line in lines) == 1
    assert len(lines) < 300


# --- live view --------------------------------------------------------------------------------------------------------


def outcome(iteration: int) -> StepOutcome:
    return StepOutcome(
        iteration=iteration,
        clip=1.0,
        skip=False,
        learning_rate=1e-3,
        gradient_norm=2.0,
        loss=4.0312,
        tokens=8192,
        sum_squared_lengths=1,
        samples=1,
        samples_digest="00ff00ff00ff00ff",
    )


def committed(iteration: int, epoch: int = 1) -> journal.IterationCommitted:
    return journal.IterationCommitted(epoch=epoch, outcome=outcome(iteration), seconds=0.45, predicted_seconds=None)


def failed(cause: str = "rank 5 killed by signal 9") -> journal.FailureFound:
    return journal.FailureFound(
        failure=1,
        kind="fail-stop",
        component="process",
        cause=cause,
        ranks=(5,),
        node="n2",
        device=1,
        iteration=31,
        epoch=2,
        evidence="",
        detect_s=None,
    )


def entries() -> Iterator[journal.AnyEntry]:
    for rank in range(8):
        yield journal.WorkerStarted(rank=rank, node=f"n{1 + rank // 4}", device=rank % 4, pid=1, epoch=0)
    plan = Plan(epoch=1, layout=DP2, assignment=spread(4, 2))
    yield journal.PlanDecided(plan=plan, next_iteration=1, action="start", finish=None, reason="start")
    for i in range(1, 31):
        yield committed(i)
    yield journal.WorkerEnded(rank=5, exit=-9, epoch=1)
    yield failed()
    plan = Plan(epoch=2, layout=DP2.without(frozenset({5})), assignment=spread(4, 1))
    yield journal.PlanDecided(plan=plan, next_iteration=31, action="redo", finish=None, reason="rank 5 killed")
    yield committed(31, epoch=2)
    yield journal.Reconfigured(
        epoch=2,
        failures=(1,),
        attempts=1,
        action="redo",
        park_s=0.1,
        plan_s=0.1,
        groups_s=0.1,
        state_s=0.1,
        first_iteration_s=0.2,
        seconds=0.62,
    )
    for i in range(32, 61):
        yield committed(i, epoch=2)


BEGAN = 1e9


CONTROL = r"\x1b\[[0-9;?]*[A-Za-z]"
"""What moves a cursor or changes a colour."""


class Shown:
    """A live view on a console of 80 columns and a clock of its own, 0.1 s for each entry."""

    def __init__(self, terminal: bool, past: Sequence[journal.Record] = ()) -> None:
        self.file = io.StringIO()
        self.now = 0.0
        console = Console(file=self.file, force_terminal=terminal, width=80, _environ={"TERM": "xterm"})
        self.view = LiveView(console, SETTINGS, clock=lambda: self.now, wall_clock=lambda: BEGAN + self.now, past=past)

    def play(self) -> None:
        for seq, entry in enumerate(entries(), 1):
            self.now += 0.1
            self.view.entry(journal.Record(seq, 1e9 + self.now, entry))
            self.view.tick()

    @property
    def text(self) -> str:
        return self.file.getvalue()


def test_plain_lines() -> None:
    shown = Shown(terminal=False)
    shown.play()
    shown.view.close()
    stamped = shown.text.splitlines()
    assert stamped[0].startswith("09-09 01:46:41 iteration 1 ")
    assert sorted(line[:14] for line in stamped) == [line[:14] for line in stamped]
    lines = [line[len("09-09 01:46:41 ") :] for line in stamped]
    assert lines[0] == "iteration 1  loss 4.0312  18.2k tokens/s  0.45 s"
    failure = lines.index("failure 1: rank 5 (n2 device 1) killed by signal 9, noticed in iteration 31")
    assert failure <= 6  # 30 iterations in 3 s: one line a second
    assert lines[failure + 1].startswith("iteration 31 ")
    # As the ledger has it, from the moments of the records: three are 0.1 s apart each here, whatever the phases say.
    assert lines[failure + 2] == (
        "recovered: DP1 x PP2 x TP2 + 3 standby, iteration 31 redone, 0.30 s after the failure was noticed "
        "(decided in 0.20 s, moved in 0.20 s, first iteration 0.20 s)"
    )
    assert [line.split("  ")[0] for line in lines[failure + 3 :][:2]] == ["iteration 32", "iteration 33"]
    assert len(lines) - failure <= 10
    assert lines[-1].startswith("iteration 60 ")
    assert "\x1b" not in shown.text
    assert shown.view.errors == 0


def test_a_message_comes_after_the_iterations_before_it() -> None:
    shown = Shown(terminal=False)
    shown.view.entry(journal.Record(1, BEGAN, committed(1)))
    shown.view.entry(journal.Record(2, BEGAN, committed(2)))
    shown.view.say("progress", "done: 2 iterations")
    shown.view.close()
    assert [line.split("  ")[0] for line in shown.text.splitlines()] == [
        "09-09 01:46:40 iteration 1",
        "09-09 01:46:40 iteration 2",
        "09-09 01:46:40 done: 2 iterations",
    ]


def test_an_iteration_that_is_told_late_has_the_time_when_it_was_through() -> None:
    shown = Shown(terminal=False)
    for number in (1, 2):
        shown.view.entry(journal.Record(number, BEGAN + 0.1 * number, committed(number)))
    shown.now = 45.0
    shown.view.say("warning", "rank 5: no progress")
    assert [line.split("  ")[0] for line in shown.text.splitlines()] == [
        "09-09 01:46:40 iteration 1",
        "09-09 01:46:40 iteration 2",
        "09-09 01:47:25 rank 5: no progress",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_supervisor_that_takes_over_knows_what_the_one_before_knew(terminal: bool) -> None:
    """It took over while the layout changed; an iteration takes long."""
    told = [journal.Record(seq, BEGAN, entry) for seq, entry in enumerate(entries(), 1)]
    changed = next(n for n, record in enumerate(told) if isinstance(record.entry, journal.Reconfigured))
    shown = Shown(terminal=terminal, past=told[: changed - 1])
    for _ in range(40):
        shown.now += 1.0
        shown.view.tick()
    assert "waiting" not in shown.text
    assert terminal or not shown.text, "all that was before has been told"
    assert not terminal or "5x" in shown.text
    for record in told[changed - 1 : changed + 1]:
        shown.view.entry(record)
    assert "recovered: DP1 x PP2 x TP2 + 3 standby, iteration 31 redone" in shown.text
    assert shown.view.errors == 0


def test_a_start_that_takes_long_is_not_silent() -> None:
    shown = Shown(terminal=False)
    shown.view.entry(journal.Record(1, BEGAN, journal.NodeJoined(node="n1", host="h", devices=4)))
    for rank in range(3):
        started = journal.WorkerStarted(rank=rank, node="n1", device=rank, pid=1, epoch=0)
        shown.view.entry(journal.Record(rank + 2, BEGAN, started))
    for _ in range(40):
        shown.now += 1.0
        shown.view.tick()
    shown.view.entry(journal.Record(9, BEGAN, committed(1)))
    for _ in range(40):
        shown.now += 1.0
        shown.view.tick()
    words = "waiting for the first iteration: 1 of 2 nodes have joined, 3 of 8 workers have started"
    assert [line[len("09-09 01:46:41 ") :] for line in shown.text.splitlines()[:-1]] == [words, words]
    assert shown.text.startswith("09-09 01:46:55 ")


def test_panel() -> None:
    shown = Shown(terminal=True)
    shown.play()
    stepped = Stepped(epoch=2, outcome=outcome(61), seconds=0.4, compute_s=0.3)
    shown.view.report(0, stepped)
    shown.now += 1.0
    shown.view.tick()
    last = shown.text[shown.text.rindex("╭") :]
    assert "job local-1 [red], DP1 x PP2 x TP2 + 3 standby" in last
    assert "1 of 4 ranks have stepped" in last
    assert "5x" in last
    assert "failure 1: rank 5 (n2 device 1)" in shown.text
    shown.view.close()
    assert shown.text.rstrip().endswith("\x1b[2K")  # nothing of the panel stays
    assert "\x1b[?25h" in shown.text  # the cursor is back
    assert shown.view.errors == 0


def test_words_of_a_message_stay_whole_on_a_terminal() -> None:
    """A path longer than a line is left to the terminal, which knows that it is one."""
    shown = Shown(terminal=True)
    path = "/shared/" + "checkpoints/" * 8 + "iteration-000140"
    shown.view.say(
        "progress", f"rank 6 (n2 device 2): suspected to be slow, +43% since iteration 43; saved in {path} now"
    )
    shown.view.close()
    lines = [re.sub(CONTROL, "", line).strip("\r") for line in shown.text.splitlines()]
    first = lines.index("09-09 01:46:40 rank 6 (n2 device 2): suspected to be slow, +43% since iteration")
    assert [line.rstrip() for line in lines[first + 1 :][:3]] == [
        " " * 15 + "43; saved in",
        " " * 15 + path,
        " " * 15 + "now",
    ]


class Screen:
    """A terminal of 80 columns: what is left on it after carriage returns, cursor movements and erased lines."""

    def __init__(self) -> None:
        self.lines: list[list[str]] = [[]]
        self.row = self.column = 0

    def write(self, text: str) -> None:
        for part in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|.", text, re.DOTALL):
            if part == "\n":
                self.row, self.column = self.row + 1, 0
            elif part == "\r":
                self.column = 0
            elif part.startswith("\x1b") and part[-1] == "A":
                self.row = max(self.row - int(part[2:-1] or 1), 0)
            elif part.startswith("\x1b") and part[-1] == "K":
                self.lines[self.row] = []
            elif not part.startswith("\x1b"):
                if self.column == 80:
                    self.row, self.column = self.row + 1, 0
                while len(self.lines) <= self.row:
                    self.lines.append([])
                line = self.lines[self.row]
                line += " " * (self.column + 1 - len(line))
                line[self.column] = part
                self.column += 1
            while len(self.lines) <= self.row:
                self.lines.append([])

    @property
    def text(self) -> str:
        return "\n".join("".join(line) for line in self.lines)


def test_nothing_of_the_panel_stays_after_interrupts_that_the_terminal_echoes() -> None:
    shown, screen = Shown(terminal=True), Screen()
    seen = 0
    for seq, entry in enumerate(entries(), 1):
        shown.now += 1.0
        shown.view.entry(journal.Record(seq, 1e9, entry))
        screen.write(shown.text[seen:])
        seen = len(shown.text)
        assert screen.text.count("╭") == 1
        if seq % 10 == 0:
            screen.write("^C^C")
    shown.view.close()
    screen.write(shown.text[seen:])
    assert "failure 1: rank 5" in screen.text
    assert not set(screen.text) & set("╭│╰^")


def newcomer_entries() -> Iterator[journal.AnyEntry]:
    """Rank 5 is lost, rank 8 comes in its place; a first plan for it is refused."""
    for rank in range(8):
        yield journal.WorkerStarted(rank=rank, node=f"n{1 + rank // 4}", device=rank % 4, pid=1, epoch=0)
    less = DP2.without(frozenset({5}))
    whole = Layout(replicas=(DP2.replicas[0], Replica((Stage((4, 8), ((0, 3),)), Stage((6, 7), ((4, 7),))))))
    yield decided(1, DP2, "start")
    yield journal.PlanInEffect(epoch=1)
    yield committed(1)
    yield journal.WorkerEnded(rank=5, exit=-9, epoch=1)
    yield decided(2, less, "redo")
    yield journal.PlanInEffect(epoch=2)
    yield committed(2)
    yield journal.WorkerStarted(rank=8, node="n2", device=1, pid=1, epoch=2)
    yield decided(3, whole, "between")
    yield journal.PlanRefused(epoch=3, rank=8, reason="no room")
    yield decided(4, whole, "between")
    yield journal.PlanInEffect(epoch=4)
    yield committed(3)
    yield journal.Reconfigured(
        epoch=4,
        failures=(),
        attempts=1,
        action="between",
        park_s=0.1,
        plan_s=0.1,
        groups_s=0.1,
        state_s=0.1,
        first_iteration_s=0.2,
        seconds=0.62,
        bytes_moved=3_400_000,
    )


def decided(epoch: int, layout: Layout, action: Literal["start", "redo", "between"]) -> journal.PlanDecided:
    plan = Plan(epoch=epoch, layout=layout, assignment=spread(4, len(layout.replicas)))
    return journal.PlanDecided(
        plan=plan, next_iteration={1: 1, 2: 2}.get(epoch, 3), action=action, finish=None, reason="a reason"
    )


def test_panel_follows_newcomers_and_plans_that_are_refused() -> None:
    shown = Shown(terminal=True)
    panels: dict[str, str] = {}
    for seq, entry in enumerate(newcomer_entries(), 1):
        shown.now += 1.0
        shown.view.entry(journal.Record(seq, 1e9, entry))
        kind = type(entry).__name__
        panels[f"{kind} {entry.epoch}" if hasattr(entry, "epoch") else f"{kind} {seq}"] = shown.text[
            shown.text.rindex("╭") :
        ]
    before = panels["WorkerStarted 2"]
    assert "DP1 x PP2 x TP2 + 3 standby" in before
    assert re.search(r"starting .*8\+", before)
    assert "s standby, + starting, x dead" in before
    refused = panels["PlanRefused 3"]
    assert "DP1 x PP2 x TP2 + 3 standby" in refused, "the plan in effect is shown again"
    assert re.search(r"starting .*8\+", refused)
    after = panels["PlanInEffect 4"]
    assert "DP2 x PP2 x TP2" in after
    assert "starting" not in after
    assert "standby" not in after, "ranks that were idle have work again"
    words = "layout changed: DP2 x PP2 x TP2, iteration 3 next, in 0.62 s, 3.4 MB moved"
    assert words in re.sub(rf"(\s|{CONTROL})+", " ", shown.text)
    assert shown.view.errors == 0


def suspected(rank: int, *, cleared: bool) -> journal.Suspected:
    return journal.Suspected(
        rank=rank, node="n1", evidence="", kind="slow", ranks=(rank,), suspicion=rank, cleared=cleared
    )


def test_panel_shows_a_verdict_in_place_of_the_suspicion_until_it_ends() -> None:
    shown = Shown(terminal=True)
    slow = msgspec.structs.replace(failed(), kind="fail-slow", component="device", ranks=(3,), speed=0.4)
    story = [
        *(journal.WorkerStarted(rank=r, node=f"n{1 + r // 4}", device=r % 4, pid=1, epoch=0) for r in range(8)),
        decided(1, DP2, "start"),
        *(suspected(rank, cleared=False) for rank in (2, 3)),
        suspected(2, cleared=True),
        slow,
        decided(2, DP2, "between"),
        journal.FailureEnded(failure=1, node="n1", device=3, iteration=9, evidence=""),
    ]
    panels = []
    for seq, entry in enumerate(story, 1):
        shown.now += 1.0
        shown.view.entry(journal.Record(seq, 1e9, entry))
        panels.append(shown.text[shown.text.rindex("╭") :])
    shown_as = [re.findall(r"\d(?:-\d)?[~?]", panel) for panel in panels[9:]]
    assert shown_as == [["2?"], ["2-3?"], ["3?"], ["3~"], ["3~"], []]
    assert shown.view.errors == 0


def test_panel_counts_workers_before_there_is_a_layout() -> None:
    shown = Shown(terminal=True)
    for rank in range(3):
        shown.now += 1.0
        started = journal.WorkerStarted(rank=rank, node="n1", device=rank, pid=1, epoch=0)
        shown.view.entry(journal.Record(rank + 1, 1e9, started))
    assert "waiting for the first iteration, 3 of 8 workers have started" in shown.text


@pytest.mark.parametrize("terminal", [False, True])
def test_names_and_reasons_are_shown_literally(terminal: bool) -> None:
    shown = Shown(terminal)
    shown.view.say("warning", "node [red]n1[/red]: 'gone' \"away\" :smile: \x1b[2J")
    shown.view.entry(journal.Record(1, 0.0, failed("rank 5 [/nonsense] it's [bold]odd[/bold]")))
    shown.view.close()
    assert "node [red]n1[/red]: 'gone' \"away\" :smile: \\x1b[2J" in shown.text
    assert "rank 5 (n2 device 1) [/nonsense] it's [bold]odd[/bold]" in shown.text
    assert shown.view.errors == 0


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("terminal", [False, True])
def test_odd_input_and_a_lost_terminal_never_reach_the_supervisor(terminal: bool) -> None:
    shown = Shown(terminal)
    shown.view.entry(None)  # type: ignore[arg-type]
    shown.view.say("loud", None)  # type: ignore[arg-type]
    shown.view.report(1, None)  # type: ignore[arg-type]
    shown.view.beats("n1", None)  # type: ignore[arg-type]
    assert shown.view.errors == 4
    shown.view.beats("n1", Beat(workers=(WorkerBeat(rank=99, age_s=0.0, state="T", progress=None),)))
    shown.view.entry(journal.Record(1, 0.0, journal.WorkerEnded(rank=99, exit=None, epoch=0)))
    shown.view.close()
    assert shown.view.errors == 4
    console = Console(file=Broken(), force_terminal=terminal, width=80, stderr=True)
    view = LiveView(console, SETTINGS)
    for seq, entry in enumerate(entries(), 1):
        view.entry(journal.Record(seq, 0.0, entry))
    view.close()
    assert view.errors > 0


# --- what rank 0 prints ---------------------------------------------------------------------------------------------


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_what_rank_0_prints_is_shown_once_its_script_is_known_not_to_train_with_us(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = Shown(terminal=False)
    shown.view.output(["loading", " 10%\r 50%\r100%"])
    assert printed(capsys) == []
    shown.view.beats("n1", Beat(workers=(), met=True))
    assert printed(capsys) == ["loading", "100%"]
    shown.view.output(["step 1"])
    assert printed(capsys) == ["step 1"]
    shown.view.output([str(number) for number in range(MAX_HELD_LINES + 3)], left_out=4)
    told, first, *_ = printed(capsys)
    assert told == f"resihp: 7 lines of rank 0 are left out here; resihp logs {SETTINGS.job} --rank 0 shows them"
    assert first == "3"
    for _ in range(60):
        shown.now += 1.0
        shown.view.tick()
    assert shown.text == "", "nobody waits for an iteration"
    assert shown.view.errors == 0


def test_what_rank_0_prints_of_a_script_that_trains_with_us_stays_in_its_log(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = Shown(terminal=False)
    shown.view.output(["loading"])
    shown.view.entry(journal.Record(1, BEGAN, journal.ModelDeclared(declare=DECLARE)))
    shown.view.output(["step 1"])
    shown.now += 100.0
    shown.view.tick()
    shown.view.close()
    assert printed(capsys) == []


@pytest.mark.parametrize("end", ["time", "an exit", "the end"])
def test_what_rank_0_prints_is_not_held_back_for_ever(capsys: pytest.CaptureFixture[str], end: str) -> None:
    shown = Shown(terminal=False)
    shown.view.output(["hello"])
    if end == "time":
        shown.now += 31.0
        shown.view.tick()
    elif end == "an exit":
        shown.view.entry(journal.Record(1, BEGAN, journal.WorkerEnded(rank=0, exit=0, epoch=0)))
    else:
        shown.view.close()
    assert printed(capsys) == ["hello"]


@pytest.mark.parametrize("live", [True, False])
def test_a_sentence_is_broken_between_words_in_a_terminal_alone(live: bool) -> None:
    printed = io.StringIO()
    screen = Console(file=printed, width=40, force_terminal=live, markup=False, highlight=False, color_system=None)
    sentence = "memory: not known before the script has said what it \x1btrains; no earlier job here ran this command"
    tell(screen, sentence)
    lines = printed.getvalue().splitlines()
    assert " ".join(line.strip() for line in lines) == sentence.replace("\x1b", "\\x1b")
    assert max(map(len, lines)) <= 40 if live else len(lines) == 1


@pytest.mark.parametrize(
    ("rank", "lines"), [(0, []), (3, ["iteration 10  loss 2.5000  0.50 s", "iteration 40  0.50 s"])]
)
def test_iterations_that_a_script_prints_are_shown_unless_its_output_is(rank: int, lines: list[str]) -> None:
    shown = Shown(terminal=False)
    told: list[journal.AnyEntry] = [journal.CounterSeen(rank=rank, iteration=10, goal=40)]
    told += [
        journal.IterationCommitted(
            epoch=0,
            outcome=StepOutcome.printed(i, 2.5 if i == 10 else None),
            seconds=0.5,
            predicted_seconds=None,
        )
        for i in (10, 20, 30, 40)
    ]
    for seq, entry in enumerate(told, 1):
        shown.now += 0.1
        shown.view.entry(journal.Record(seq, BEGAN + shown.now, entry))
    shown.view.close()
    assert [line.split(" ", 2)[2] for line in shown.file.getvalue().splitlines()] == lines
