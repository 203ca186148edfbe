"""The site's own health check as resihp runs it: what counts as an answer, and what a broken check cannot do."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from resihp.wrapper import site_check
from resihp.wrapper.site_check import Answer, ask_here


def script(folder: Path, *lines: str, mode: int = 0o755) -> tuple[str]:
    path = folder / "check"
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(mode)
    return (str(path),)


@pytest.mark.parametrize(
    ("lines", "outcome", "text"),
    [
        (("exit 0",), "passed", "exit status 0"),
        (("echo; echo '  GPU 3: 12 uncorrectable ECC errors'; echo more; exit 1",), "failed", None),
        (("echo ERROR: nhc: ib0 >&2; exit 2",), "failed", "exit status 2: ERROR: nhc: ib0"),
        (("exec no-such-program",), "not asked", None),
        (("kill -SEGV $$",), "silent", "ended by signal 11"),
        (("kill -KILL $$",), "silent", "ended by signal 9"),
        ((r"printf '\033[2J\007red\tline\r\n'; exit 1",), "failed", "exit status 1: [2J red line"),
    ],
)
def test_the_exit_status_is_the_answer(tmp_path: Path, lines: tuple[str, ...], outcome: str, text: str | None) -> None:
    answer = ask_here(script(tmp_path, *lines), 10.0)
    assert answer.outcome == outcome
    assert answer.text == text if text else answer.text
    assert answer.text.isprintable()


def test_a_check_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    began = time.monotonic()
    answer = ask_here(script(tmp_path, "echo before", "sleep 1234.5 &", "sleep 1234.5"), 0.5)
    assert answer == Answer(outcome="silent", text="not finished within 0.5 s, killed: before")
    assert time.monotonic() - began < 5
    left = [process for process in psutil.process_iter(["cmdline"]) if "1234.5" in (process.info["cmdline"] or [])]
    assert not [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_a_process_that_keeps_the_output_open_does_not_hold_up_the_answer(tmp_path: Path) -> None:
    began = time.monotonic()
    assert ask_here(script(tmp_path, "sleep 60 &", "echo fine"), 30.0).text == "exit status 0: fine"
    assert time.monotonic() - began < 10


def test_a_flood_of_output_is_neither_kept_nor_an_obstacle(tmp_path: Path) -> None:
    answer = ask_here(script(tmp_path, "head -c 300000000 /dev/zero | tr '\\0' x", "exit 1"), 60.0)
    assert answer.outcome == "failed"
    assert len(answer.text) < 200


@pytest.mark.parametrize("mode", [None, 0o644])
def test_a_command_that_cannot_be_started_is_not_asked(tmp_path: Path, mode: int | None) -> None:
    command = script(tmp_path, "exit 0", mode=mode) if mode else ("/usr/sbin/no-such-check",)
    answer = ask_here(command, 10.0)
    assert answer.outcome == "not asked"
    assert "no such command" in answer.text


def test_the_users_path_does_not_choose_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask_here(("check",), 10.0).outcome == "not asked"
    assert ask_here(("true",), 10.0).outcome == "passed"


def test_words_reach_the_command_as_they_are(tmp_path: Path) -> None:
    command = (*script(tmp_path, 'echo "$1"; exit 1'), "a $(id) ; b")
    assert ask_here(command, 10.0).text == "exit status 1: a $(id) ; b"


def test_the_answer_of_a_node_survives_its_login_messages(capfd: pytest.CaptureFixture[str]) -> None:
    argv = site_check.command_for(("true",), 5.0)
    assert argv[:4] == [sys.executable, "-P", "-m", "resihp.wrapper.site_check"]
    site_check.main(argv[4:])
    written = capfd.readouterr().out
    assert site_check.read(f"Welcome!\n{written}bye\n") == Answer(outcome="passed", text="exit status 0")
    assert site_check.read("slurmstepd: error\n").outcome == "not asked"
    assert site_check.read(f"{site_check.ANSWER_PREFIX}{{}}\n").outcome == "not asked"
