"""The stacks of a running process are read from outside, whatever it waits for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from resihp.detector.hangs.stacks import main_thread
from resihp.worker import stacks
from tests.waiting import until

STUCK_PROGRAM = """
import os, sys, threading
sys.path.insert(0, {path!r})
from resihp.worker import stacks
stacks.ignore()
pid = os.fork()
if pid:
    print(pid, flush=True)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
{change}
def loads():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
loads()
"""


def process(change: str) -> tuple[subprocess.Popen[str], int]:
    """A process that forks a worker that hangs in a lock; and the worker's id."""
    path = os.path.dirname(os.path.dirname(os.path.dirname(stacks.__file__)))
    program = STUCK_PROGRAM.format(path=path, change=change)
    started = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    return started, int(started.stdout.readline())


def end(started: subprocess.Popen[str], pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    started.wait()
    assert started.stdout is not None
    started.stdout.close()


def test_the_stack_of_a_process_that_waits_in_a_lock() -> None:
    started, pid = process("stacks.register()")
    until(lambda: stacks.file_of(pid))
    file = stacks.file_of(pid)
    assert file is not None
    time.sleep(0.2)
    for _ in range(2):
        before = file.stat().st_size
        os.kill(pid, stacks.STACK_SIGNAL)
        until(lambda before=before: file.stat().st_size > before)
        time.sleep(0.1)
        assert [frame.name for frame in main_thread(file.read_text()[before:])] == ["loads", "<module>"]
    end(started, pid)


def test_a_process_that_has_not_registered_survives_the_signal() -> None:
    started, pid = process("pass")
    time.sleep(0.2)
    assert stacks.file_of(pid) is None
    os.kill(pid, stacks.STACK_SIGNAL)
    time.sleep(0.2)
    assert os.path.exists(f"/proc/{pid}")
    end(started, pid)


def test_a_script_that_closes_all_files_is_not_asked() -> None:
    """Its own file may have the number by now."""
    started, pid = process("stacks.register(); os.closerange(3, 64)")
    time.sleep(0.3)
    assert stacks.file_of(pid) is None
    end(started, pid)


def test_a_program_that_replaces_the_process_is_not_asked() -> None:
    started, pid = process("stacks.register(); os.execvp('sleep', ['sleep', '100'])")
    time.sleep(0.5)
    assert stacks.file_of(pid) is None
    end(started, pid)


def test_a_process_that_is_gone_has_no_stacks() -> None:
    assert stacks.file_of(1 << 22) is None
