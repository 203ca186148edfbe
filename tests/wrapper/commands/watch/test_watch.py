"""`resihp status --watch`: what is shown fits the window, needs no colour, and ends with the job."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.console import Console

from resihp.db.layouts import to_plain
from resihp.errors import LedgerError
from resihp.parallelism.layout import Layout
from resihp.wrapper.commands.watch.command import changes, follow
from resihp.wrapper.commands.watch.picture import Watched, _top, picture, signs

BEGAN = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)
SMALL = Layout.uniform(tp=2, pp=2, dp=2, layers=8)
LARGE = Layout.uniform(tp=8, pp=16, dp=128, layers=126)
EVENT = "failure 1: rank 5 (n2[red] device 1) killed by signal 9 (SIGKILL), noticed in iteration 31 \x1b[2J"


def event(seq: int, text: str = EVENT) -> dict[str, Any]:
    return {"seq": seq, "at": BEGAN + timedelta(seconds=seq), "kind": "FailureFound", "text": text}


def state(
    layout: Layout = SMALL,
    health: dict[int, str] | None = None,
    *,
    iteration: int = 60,
    how: str = "running",
    events: Iterable[dict[str, Any]] = (),
    times: Iterable[tuple[int, float | None, float | None]] | None = None,
    age_s: float | None = None,
    stuck: bool = False,
) -> Watched:
    ranks = {rank: "active" for rank in layout.active} | {rank: "standby" for rank in layout.standby}
    status = {
        "job": "local-1",
        "state": how,
        "reason": "told [so]" if how == "failed" else None,
        "iteration": iteration,
        "loss": 2.5,
        "iteration_seconds": 0.62,
        "seconds_since_iteration": age_s,
        "stuck": stuck,
        "eta_seconds": None if age_s is None or stuck else 75.0,
        "tokens_per_second": None if age_s is None else 18_200.0,
        "goodput": 0.914,
        "ettr": 0.88,
        "lost_seconds": {"fail-stop": 3.25, "other": 0.001},
        "epoch": 3,
        "description": layout.describe(),
        "layout": to_plain(layout),
        "health": {str(rank): value for rank, value in (ranks | (health or {})).items()},
        "events": list(events),
        "idle_line": "",
    }
    known = [(n, 0.6 + (n == 55), 0.5) for n in range(1, iteration + 1)]
    return Watched(status, known if times is None else list(times))


def shown(watched: Watched, width: int, height: int | None, *, colour: bool = False, unicode: bool = True) -> str:
    console = Console(
        file=io.StringIO(),
        width=width,
        height=height or 200,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
        highlight=False,
        _environ={"TERM": "xterm"},
    )
    with console.capture() as capture:
        console.print(picture(watched, width, height, unicode=unicode))
    return capture.get()


# --- the picture ------------------------------------------------------------------------------------------------------


def test_a_small_job_in_80_columns() -> None:
    lines = shown(state(health={5: "dead", 2: "suspected", 6: "slow"}, events=[event(1)]), 80, 24).splitlines()
    assert lines[0] == "job local-1  running  iteration 60  loss 2.5000  0.62 s an iteration"
    assert lines[1] == "goodput 91.4 %, ETTR 88.0 %; lost: fail-stop 3.25 s"
    assert lines[2] == "observed/predicted 1.20, median 1.20, 1.20 to 3.20, iterations 1 to 60"
    assert len(lines[3]) == 60
    assert lines[3].index("█") == 54, "iteration 55 stands out"
    assert lines[5:11] == [
        "epoch 3: DP2 x PP2 x TP2",
        "           stage 0     stage 1",
        "           layers 0-3  layers 4-7",
        "replica 0  0-1         2? 3",
        "replica 1  4 5x        6~ 7",
        "~ slow, ? suspected, x dead",
    ]
    assert lines[12].startswith("12:00:01  failure 1: rank 5 (n2[red] device 1) killed by signal 9 (SIGKILL),")
    assert lines[13] == "          noticed in iteration 31 \\x1b[2J"


def test_the_age_of_the_last_iteration_and_that_it_may_be_stuck() -> None:
    """As `resihp status` says it."""
    lines = shown(state(age_s=3.2), 80, 24).splitlines()
    assert lines[1] == "last iteration 3 s ago, done in about 1 min 15 s, 18.2k tokens/s"
    assert lines[2].startswith("goodput 91.4 %")
    lines = shown(state(age_s=7200.0, stuck=True), 40, 24).splitlines()
    assert lines[1].startswith("last iteration 2 h 00 min ago (stuck?),")
    assert "\x1b[1;33mlast iteration" in shown(state(age_s=7200.0, stuck=True), 80, 24, colour=True)


def test_in_160_columns_events_stand_beside_the_layout() -> None:
    lines = shown(state(events=[event(n) for n in range(1, 9)]), 160, 40).splitlines()
    [line] = [line for line in lines if line.startswith("epoch 3")]
    assert line[44:].startswith("12:00:01  failure 1")
    assert max(map(len, lines)) <= 160


@pytest.mark.parametrize("width", [40, 80, 160])
@pytest.mark.parametrize("height", [10, 24, 50])
@pytest.mark.parametrize("layout", [SMALL, LARGE, LARGE.without(frozenset({5000})), Layout(replicas=())])
def test_whatever_is_shown_fits_the_window(width: int, height: int, layout: Layout) -> None:
    health = {rank: "suspected" for rank in layout.active[::97]} | {9000 + n: "dead" for n in range(0, 900, 7)}
    watched = state(layout, health, events=[event(n, "x" * 50 + " y" * n) for n in range(50)])
    lines = shown(watched, width, height).splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("width", [80, 160])
def test_colour_adds_nothing_but_colour(width: int) -> None:
    import re

    watched = state(LARGE, {4711: "dead", 700: "slow", 12000: "suspected"}, events=[event(1)])
    coloured = shown(watched, width, 40, colour=True)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == shown(watched, width, 40)


def test_of_16384_ranks_only_what_is_amiss_is_shown() -> None:
    lines = shown(state(LARGE, {4711: "dead", 700: "slow"}), 160, 50).splitlines()
    assert len(lines) < 20
    assert "replicas 0 to 4: all 640 ranks active" in " ".join(lines)
    assert "replicas 37 to 127: all 11,648 ranks active" in " ".join(lines)
    row = next(line for line in lines if line.startswith("replica 36 "))
    rest = lines[lines.index(row) + 1]
    place = (row[: len("replica 36 ")], (row + rest).count("x"))
    assert place[1] == 1
    assert any("1 dead: rank 4711" in line for line in lines)
    assert any("1 slow: rank 700" in line for line in lines)


def test_a_sign_for_each_rank() -> None:
    layout = Layout.uniform(tp=4, pp=2, dp=20, layers=8)
    rows = [line.plain.rstrip() for line in signs(layout, {9: "dead", 14: "suspected", 17: "slow"}, 80, None)]
    assert rows == [
        "replica 0: all 8 ranks active",
        "replica 1 ■x■■ ■■?■",
        "replica 2 ■~■■ ■■■■",
        "replicas 3 to 19: all 136 ranks active",
        "1 dead: rank 9",
        "1 suspected: rank 14",
        "1 slow: rank 17",
        "■ active, ~ slow, ? suspected, x dead",
    ]
    plain = signs(layout, {9: "dead"}, 80, None, unicode=False)
    assert plain[1].plain.rstrip() == "replica 1 oxoo oooo"
    assert all(line.plain.isascii() for line in plain)


def test_more_amiss_than_there_is_room_for() -> None:
    rows = [line.plain for line in signs(LARGE, {rank: "suspected" for rank in range(0, 16384, 128)}, 80, 12)]
    assert len(rows) <= 12
    assert any("more replicas" in row and "of them not fully active" in row for row in rows)


def test_times_without_predictions_and_without_anything() -> None:
    text = shown(state(times=[(1, None, None), (2, 0.5, None), (3, 0.7, None)]), 80, 24)
    assert "iteration times 0.70 s, median 0.60 s, 0.50 s to 0.70 s, iterations 2 to 3" in text
    assert "iteration times" not in shown(state(times=[]), 80, 24)


def test_a_terminal_without_unicode() -> None:
    assert shown(state(LARGE, {1: "dead"}), 80, 24, unicode=False).isascii()


def test_a_job_without_a_plan_and_one_that_failed() -> None:
    watched = state(how="failed")
    watched.status["layout"] = None  # type: ignore[index]
    text = shown(watched, 80, 24)
    assert "no plan yet" in text
    assert "told [so]" in text


# --- lines ------------------------------------------------------------------------------------------------------------


def test_a_line_for_each_thing_that_happened() -> None:
    before = state(events=[event(1), event(2)])
    assert len(changes(None, before)) == 2, "the last event, and where training is"
    after = state(iteration=61, events=[event(1), event(2), event(3, "epoch 4: in\neffect")])
    assert changes(before, after) == [
        "12:00:03  epoch 4: in effect",
        "job local-1  running  iteration 61  loss 2.5000  0.62 s an iteration  goodput 91.4 %",
    ]
    assert changes(before, after, progress=False) == ["12:00:03  epoch 4: in effect"]
    assert changes(after, after) == []


def test_without_a_terminal_it_is_said_once_that_a_job_may_be_stuck() -> None:
    assert changes(None, state(age_s=3.2))[-1] == "last iteration 3 s ago, done in about 1 min 15 s, 18.2k tokens/s"
    before, stuck = state(age_s=59.0), state(age_s=61.0, stuck=True)
    assert changes(before, stuck, progress=False) == ["last iteration 1 min 01 s ago (stuck?), 18.2k tokens/s"]
    assert changes(stuck, state(age_s=62.0, stuck=True)) == []


# --- following --------------------------------------------------------------------------------------------------------


class Story:
    """States one after the other, each read after so many seconds of a clock of its own."""

    def __init__(self, *states: Watched | Exception) -> None:
        self.states = list(states)
        self.now = 0.0
        self.resized = 0

    def read(self) -> Watched:
        found = self.states.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        if self.resized:
            self.now -= seconds
            self.resized -= 1
            return True
        return False

    def follow(self, *, terminal: bool, as_json: bool = False) -> str:
        file = io.StringIO()
        console = Console(
            file=file, force_terminal=terminal, width=80, height=24, highlight=False, _environ={"TERM": "xterm"}
        )
        follow(self.read, console, as_json=as_json, wait=self.wait, clock=lambda: self.now)
        return file.getvalue()


def test_without_a_terminal_lines_are_printed_when_something_changed() -> None:
    last = state(iteration=63, how="completed", events=[event(1), event(2, "job: completed")])
    text = Story(state(events=[event(1)]), *[state(iteration=61, events=[event(1)])] * 5, last).follow(terminal=False)
    lines = text.splitlines()
    assert "\x1b" not in text
    assert len(lines) == 4
    assert lines[2] == "12:00:02  job: completed"
    assert lines[3].startswith("job local-1  completed  iteration 63")


def test_on_a_terminal_the_screen_is_its_own_and_the_last_picture_stays() -> None:
    text = Story(state(), state(iteration=61), state(iteration=62, how="completed")).follow(terminal=True)
    assert text.count("\x1b[?1049h") == 1
    assert "\x1b[2J" not in text, "nothing is cleared: it would flicker"
    after = text[text.index("\x1b[?1049l") :]
    assert "iteration 62" in after
    assert "\x1b[?25h" in text, "the cursor is back"


def test_a_window_that_changes_is_drawn_again_at_once() -> None:
    story = Story(state(), state(how="completed"))
    story.resized = 3
    assert story.follow(terminal=True).count("iteration 60") == 1 + 3 + 1 + 1


def test_a_ledger_that_cannot_be_read_for_a_while_is_said_and_read_again() -> None:
    story = Story(state(), LedgerError("ledger x: database is locked"), state(iteration=99, how="completed"))
    text = story.follow(terminal=True)
    assert "ledger x: database is locked" in text
    assert "iteration 99" in text
    lines = Story(state(), LedgerError("ledger x: locked"), state(how="completed")).follow(terminal=False).splitlines()
    assert "ledger x: locked" in lines
    with pytest.raises(LedgerError):
        Story(LedgerError("ledger x: no such file")).follow(terminal=True)


def test_an_interrupt_ends_it_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(state())

    def interrupted(seconds: float) -> bool:
        raise KeyboardInterrupt

    story.wait = interrupted  # type: ignore[method-assign]
    assert "iteration 60" in story.follow(terminal=True).split("\x1b[?1049l")[1]


def test_json_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    Story(state(), state(iteration=61, how="completed")).follow(terminal=True, as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["iteration"] for line in lines] == [60, 61]


def test_gpus_without_work_are_told_above_the_layout() -> None:
    watched = state()
    watched.status["idle_line"] = "2 of 8 GPUs idle since the start: rank 7 on n2 (spare)"  # type: ignore[index]
    assert "2 of 8 GPUs idle since the start: rank 7 on n2 (spare)" in shown(watched, 80, None)


def test_a_large_ledger_is_read_less_often() -> None:
    story = Story(*[state()] * 3, state(how="completed"))
    read: Callable[[], Watched] = story.read

    def slow() -> Watched:
        story.now += 2.0
        return read()

    story.read = slow  # type: ignore[method-assign]
    story.follow(terminal=True)
    assert story.now >= 3 * (2.0 / 0.2)


@pytest.mark.parametrize(
    ("how", "reason", "shown"),
    [("running", "a word", False), ("completed", "a word", False), ("failed", "a word", True), ("failed", None, False)],
)
def test_why_a_job_ended_is_shown_of_one_that_failed(how: str, reason: str | None, shown: bool) -> None:
    watched = state(how=how)
    watched.status["reason"] = reason
    lines = [line.plain for line in _top(watched, 80, unicode=True)]
    assert ("a word" in lines) == shown
    assert all(line.strip() for line in lines[:2])
