"""The site's own health check (`[site] health_command`): runs it on one node, and reads its answer.

Decides what counts as an answer. Exit status 0 means healthy, any other means broken; a check that hangs, is killed or
cannot be started says nothing about the node. `ask_here` runs the command on this machine; `command_for` is the command
that does so on another node, as a step of a job, and `read` reads its output. Runs no shell, and raises nothing.

Callers: `resihp.wrapper.slurm_tasks` before a drain, `resihp node` and `resihp doctor`.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Literal

import msgspec

ANSWER_PREFIX = "resihp-site-check "
"""Prefix of the line in which a node's answer arrives. Other lines, such as a node's login messages, are ignored."""
STEP_MARGIN_S = 25.0
"""Seconds that Slurm may take to start a step on the node and to end it, in addition to the time limit of the check."""
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where the command is looked for, and its PATH: every user's job is to run the same check."""
MAX_OUTPUT_BYTES = 4096
"""Bytes of output that are kept; the rest is read and discarded."""
MAX_TEXT_CHARS = 120
REAP_S = 1.0
_NOT_RUN_EXIT_CODES = (126, 127)
"""Exit statuses by which a shell, as in a site's wrapper script, says that it could not run a command."""
_KEPT_VARIABLES = ("HOME", "USER", "LOGNAME", "TMPDIR", "CUDA_VISIBLE_DEVICES")


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of the site's check about one node. `text`: its exit status and the first line of its output.

    `silent`: it was started and gave no verdict. `not asked`: it could not be started there, as `text` says.
    """

    outcome: Literal["passed", "failed", "silent", "not asked"]
    text: str


def ask_here(command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None) -> Answer:
    """Run the check on this machine. When `timeout_s` have passed, it is killed with all processes of its session."""
    program = program_path(command[0])
    if program is None:
        return Answer(outcome="not asked", text=f"{command[0]}: there is no such command, or it is not executable")
    try:
        process = subprocess.Popen(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(os.environ if environment is None else environment),
            start_new_session=True,
        )
    except OSError as error:
        return Answer(outcome="not asked", text=f"{command[0]}: cannot be started ({error.strerror})")
    try:
        output = _read(process, timeout_s)
        status = process.poll()
    finally:
        _end(process)
    return _answer(status, _first_line(output), timeout_s)


def program_path(name: str) -> str | None:
    """Return the path of the site's command on this machine; None if it does not exist or is not executable."""
    return shutil.which(name, path=SYSTEM_PATH)


def longest_s(command: Sequence[str], timeout_s: float) -> float:
    """Return how long a node's answer may take, with the start of a step there; 0 if the site has no check."""
    return timeout_s + STEP_MARGIN_S if command else 0.0


def command_for(command: Sequence[str], timeout_s: float) -> list[str]:
    """Return the command that runs the check on the node where it is started, and prints the answer for `read`."""
    return [sys.executable, "-P", "-m", "resihp.wrapper.site_check", f"{timeout_s:g}", *command]


def read(output: str) -> Answer:
    """Return the answer in the output of `command_for`."""
    for line in output.splitlines():
        if line.startswith(ANSWER_PREFIX):
            with suppress(msgspec.MsgspecError):
                return msgspec.json.decode(line.removeprefix(ANSWER_PREFIX), type=Answer)
    return Answer(outcome="not asked", text="no answer from the node")


def _environment(base: Mapping[str, str]) -> dict[str, str]:
    kept = {key: value for key, value in base.items() if key in _KEPT_VARIABLES or key.startswith("SLURM")}
    return {**kept, "PATH": SYSTEM_PATH, "LC_ALL": "C"}


def _read(process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    """Return the first bytes of the output once the process has exited or the time is up. A process that it leaves
    behind may keep the output open, so the output's end is not awaited."""
    assert process.stdout is not None
    deadline = time.monotonic() + timeout_s
    output = b""
    os.set_blocking(process.stdout.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left_s := deadline - time.monotonic()) > 0:
            has_exited = process.poll() is not None
            chunk = None
            if selector.select(0.0 if has_exited else min(left_s, 0.05)):
                with suppress(BlockingIOError):
                    chunk = os.read(process.stdout.fileno(), 1 << 16)
            output += (chunk or b"")[: MAX_OUTPUT_BYTES - len(output)]
            if has_exited and (not chunk or len(output) >= MAX_OUTPUT_BYTES):
                break
            if chunk == b"":  # it has closed its output
                with suppress(subprocess.TimeoutExpired):
                    process.wait(left_s)
    return output


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the check's session. A process that hangs in the kernel is abandoned."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(REAP_S)
    if process.stdout is not None:
        process.stdout.close()


def _first_line(output: bytes) -> str:
    """Return the first line with any text, without control characters."""
    for line in output.decode("utf-8", "replace").splitlines():
        text = " ".join("".join(c if c.isprintable() else " " for c in line).split())
        if text:
            return text[:MAX_TEXT_CHARS]
    return ""


def _answer(status: int | None, line: str, timeout_s: float) -> Answer:
    """Return the answer that an exit status stands for. `status`: None if the time was up."""
    line_text = f": {line}" if line else ""
    if status == 0:
        return Answer(outcome="passed", text=f"exit status 0{line_text}")
    if status is None:
        return Answer(outcome="silent", text=f"not finished within {timeout_s:g} s, killed{line_text}")
    if status < 0:
        return Answer(outcome="silent", text=f"ended by signal {-status}{line_text}")
    if status in _NOT_RUN_EXIT_CODES:
        return Answer(outcome="not asked", text=f"exit status {status}{line_text}")
    return Answer(outcome="failed", text=f"exit status {status}{line_text}")


def main(arguments: Sequence[str]) -> None:
    timeout_s, *command = arguments
    answer = ask_here(command, float(timeout_s))
    print(f"{ANSWER_PREFIX}{msgspec.json.encode(answer).decode()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
