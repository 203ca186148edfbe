"""`resihp logs`, as it is typed, of a job's folder."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from resihp.db.writing.catch_up import catch_up
from resihp.record.journal import AnyEntry, LeaderChosen
from resihp.settings import Settings
from resihp.wrapper.cli import app
from resihp.wrapper.commands.logs import command
from resihp.wrapper.exit_codes import exit_code_of
from resihp.wrapper.job_folder import Job, create_local_job
from resihp.wrapper.output.answers import write_csv
from tests.db.conftest import BEGAN, started, write_journal


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Of two nodes with two workers each; nothing runs."""
    monkeypatch.setenv("RESIHP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RESIHP_LOCAL", str(tmp_path / "local"))
    made = create_local_job()
    (made.logs / "supervisor.log").write_text("")
    for rank in range(4):
        node = f"n{1 + rank // 2}"
        (made.logs / f"{node}.agent.log").write_text("fork server ready\n")
        path = made.logs / f"{node}.rank{rank}.log"
        path.write_text("".join(f"rank {rank} line {i}\n" for i in range(100)))
        os.utime(path, (1e9 + rank, 1e9 + rank))
    return made


def run(*argv: str) -> Result:
    return CliRunner().invoke(app, ["logs", *argv])


def refused(*argv: str) -> str:
    result = run(*argv)
    assert result.exception is not None
    assert exit_code_of(result.exception) == 2
    return str(result.exception)


def test_the_end_of_a_rank(job: Job) -> None:
    lines = run("--rank", "3").stdout.splitlines()
    assert (len(lines), lines[0], lines[-1]) == (50, "rank 3 line 50", "rank 3 line 99")
    assert run(job.name, "--rank", "3", "-n", "2").stdout == "rank 3 line 98\nrank 3 line 99\n"


def test_of_the_supervisors_logs_those_are_shown_whose_nodes_have_led(job: Job) -> None:
    """A successor runs as a child of its node's agent, and writes where that writes."""

    def succeeded() -> Iterator[tuple[AnyEntry, float]]:
        yield started(), BEGAN
        yield LeaderChosen(term=2, node="n2", host="h", how="elected", after=1), BEGAN + 1

    assert run("--supervisor").stdout == "", "of a job without a ledger the first supervisor's alone"
    write_journal(job.journal_file, succeeded())
    catch_up("sqlite", job.folder, job.journal_file)
    assert run("--supervisor").stdout.splitlines()[-1] == "fork server ready"
    assert {path.name for path in command.files_of(job, command.LogSelection(supervisor=True))} == {
        *("supervisor.log", "n2.agent.log")
    }


class Screen(io.StringIO):
    """A terminal's stdout, or a pipe's."""

    def __init__(self, tty: bool) -> None:
        super().__init__()
        self.isatty = lambda: tty  # type: ignore[method-assign]


@pytest.mark.parametrize("tty", [True, False])
def test_what_a_process_printed_does_not_steer_a_terminal(job: Job, monkeypatch: pytest.MonkeyPatch, tty: bool) -> None:
    """Colours, a title, a cleared screen: shown as text; a pipe gets what was written."""
    screen = Screen(tty)
    monkeypatch.setattr("sys.stdout", screen)
    line = "loss\t1.0 \x1b]0;title\x07\x1b[2J\x9b31m"
    (job.logs / "n1.rank0.log").write_text(line + "\n")
    app(["logs", "--rank", "0"], standalone_mode=False)
    if tty:
        assert not set("\x1b\x07\x9b\t") & set(screen.getvalue())
        assert screen.getvalue().startswith("loss    1.0 ")
    else:
        assert screen.getvalue() == line + "\n"


def test_of_a_node_and_of_all_each_has_its_name(job: Job) -> None:
    found = run("--node", "n2", "-n", "1").stdout
    assert found.splitlines() == [
        *("==> n2.rank2.log <==", "rank 2 line 99", "==> n2.rank3.log <==", "rank 3 line 99"),
        *("==> n2.agent.log <==", "fork server ready"),
    ]
    every = run().stdout
    assert every.count("==> ") == 6, "nothing was printed by the supervisor"
    assert every.count("rank 0 line") == 10


def test_of_many_those_that_wrote_last(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MAX_FILES", 2)
    result = run("-n", "1")
    assert [line for line in result.stdout.splitlines() if "==>" in line] == [
        "==> n1.agent.log <==",
        "==> n2.agent.log <==",
    ]
    assert "job local-1: 4 more logs in" in result.stderr


def test_as_json(job: Job) -> None:
    told = json.loads(run("--rank", "0", "-n", "1", "--json").stdout)
    assert (told["schema"], told["job"], told["logs"][0]["lines"]) == (1, "local-1", ["rank 0 line 99"])
    assert Path(told["logs"][0]["path"]).exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--rank", "9"), "job local-1: no log of rank 9 in .*; there are ranks 0 to 3, nodes n1, n2"),
        (("--node", "n9"), "no log of node n9 in"),
        (("--rank", "0", "--node", "n2"), "no log of rank 0 on node n2 in"),
        (("--supervisor", "--rank", "0"), "use --supervisor alone"),
        (("-f", "--json"), "leave -f out"),
    ],
)
def test_what_there_is_not(job: Job, argv: tuple[str, ...], words: str) -> None:
    assert re.search(words, refused(*argv))


def test_nothing_has_begun(job: Job) -> None:
    for path in job.logs.iterdir():
        path.unlink()
    assert "as its workers have not begun; see resihp status local-1" in refused()


def test_what_comes_is_followed_until_the_job_ends(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(command, "SEARCH_INTERVAL_S", 0.0)
    looks = 0

    def trains(of: Job) -> bool:
        """What happens between two looks."""
        nonlocal looks
        looks += 1
        if looks == 2:
            with (of.logs / "n2.rank3.log").open("a") as file:
                file.write("more\nand an end")
        if looks == 4:
            (of.logs / "n2.rank4.log").write_text("a new process\n")
        return looks == 6

    monkeypatch.setattr(Job, "is_over", property(trains))
    result = run("--node", "n2", "-f", "-n", "0")
    assert [line for line in result.stdout.splitlines() if "==>" not in line] == [
        "n2.rank3| more",
        "n2.rank4| a new process",
        "n2.rank3| and an end",
    ]
    assert "job local-1: has ended; see resihp status local-1" in result.stderr


def begins(monkeypatch: pytest.MonkeyPatch, does: Callable[[Job, int], bool]) -> None:
    """What a job does until it is over, look by look."""
    monkeypatch.setattr(command, "POLL_INTERVAL_S", 0.0)
    looks = itertools.count(1)
    monkeypatch.setattr(Job, "is_over", property(lambda of: does(of, next(looks))))


def test_a_rank_that_has_not_started_is_waited_for(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def does(of: Job, look: int) -> bool:
        if look == 4:
            (of.logs / "n3.rank5.log").write_text("hello\n")
        return look == 7

    begins(monkeypatch, does)
    result = run("--rank", "5", "-f", "-n", "0")
    assert result.stdout == "hello\n"
    assert "job local-1: waiting for rank 5 to start; there are ranks 0 to 3, nodes n1, n2" in result.stderr
    assert "job local-1: has ended; see resihp status local-1" in result.stderr


def test_a_job_that_has_just_been_made_is_waited_for(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in job.logs.iterdir():
        path.unlink()

    def does(of: Job, look: int) -> bool:
        if look == 3:
            (of.logs / "n1.rank0.log").write_text("hello\n")
        if look == 5:
            (of.logs / "n1.rank1.log").write_text("hello too\n")
        return look == 7

    begins(monkeypatch, does)
    result = run("-f")
    assert result.stdout == "hello\nn1.rank1| hello too\n"
    assert "job local-1: waiting for its processes to start\n" in result.stderr


def test_a_rank_that_never_comes_is_an_error(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    begins(monkeypatch, lambda of, look: look >= 4)
    words = "job local-1: has ended: no log of rank 5 in .*; there are ranks 0 to 3"
    assert re.search(words, refused("--rank", "5", "-f"))
    assert re.search("job local-1: no log of rank 5 in", refused("--rank", "5", "-f")), "it has ended before"


@pytest.mark.parametrize(
    ("argv", "comes"),
    [
        (("--rank", "11"), True),
        (("--rank", "12"), False),
        (("--rank", "11", "--node", "n3"), True),
        (("--node", "n2"), True),
        (("--node", "n3"), False),
    ],
)
def test_a_rank_or_node_that_the_job_cannot_have_is_an_error_at_once(
    job: Job, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], comes: bool
) -> None:
    """Two nodes of a device, on which four processes may be in turn; where a rank is named, one more node may come."""
    of_job: dict[str, Any] = {"node_names": ("n1", "n2"), "come_backs": 3, "replacements": int("--rank" in argv)}
    settings = Settings(job=job.name, nodes=2, gpus_per_node=1, tp=1, pp=1, **of_job)
    job.run_file.write_bytes(msgspec.json.encode({"folder": str(job.folder), "settings": settings}))
    for path in job.logs.iterdir():
        path.unlink()
    begins(monkeypatch, lambda of, look: look >= 4)
    assert ("has ended: " if comes else f"there will be no {argv[0][2:]} {argv[1]}; ") in refused(*argv, "-f")


def test_a_job_without_a_supervisor_is_not_followed_for_ever(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(command, "NO_SUPERVISOR_TIMEOUT_S", 0.02)
    assert "has had no supervisor for" in run("--rank", "0", "-f").stderr


ESCAPE = "\x1b]0;owned\x07"


@pytest.mark.parametrize("live", [True, False])
def test_a_terminal_is_not_steered_by_the_name_of_a_log(job: Job, monkeypatch: pytest.MonkeyPatch, live: bool) -> None:
    (job.logs / f"n3{ESCAPE}.rank4.log").write_text("line\n")
    monkeypatch.setattr("resihp.wrapper.output.answers.sys.stdout", Terminal() if live else io.StringIO())
    command.logs(job.name, rank=None, node=None, supervisor=False, follow=False, lines=1)
    command._print(job.logs / f"n3{ESCAPE}.rank4.log", "line", many=True)
    found = sys.stdout.getvalue()  # type: ignore[attr-defined]
    name = "n3\\x1b]0;owned\\x07.rank4" if live else f"n3{ESCAPE}.rank4"
    assert f"==> {name}.log <==\n" in found
    assert f"{name}| line\n" in found


@pytest.mark.parametrize("live", [True, False])
def test_a_terminal_is_not_steered_by_a_cell_of_a_ledger(monkeypatch: pytest.MonkeyPatch, live: bool) -> None:
    monkeypatch.setattr("resihp.wrapper.output.answers.sys.stdout", Terminal() if live else io.StringIO())
    write_csv(["a", "b"], [{"a": ESCAPE, "b": [ESCAPE]}])
    text = "\\x1b]0;owned\\x07" if live else ESCAPE
    cells = [["a", "b"], [text, '["\\u001b]0;owned\\u0007"]']]
    assert list(csv.reader(sys.stdout.getvalue().splitlines())) == cells  # type: ignore[attr-defined]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True
