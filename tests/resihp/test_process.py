"""Descriptors: as many as we may have for our own processes, as many as there were for the user's."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from resihp.process import MOST_OPEN_FILES, free_memory, titled

SAY = """
import os, resource, subprocess, sys
from resihp.process import OPEN_FILES, raise_open_files, restore_open_files
raise_open_files()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
if sys.argv[1:]:
    if sys.argv[1] != "same":  # a site where srun does not pass limits on
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    sys.stdout.flush()
    subprocess.run([sys.executable, sys.argv[0]], check=True)
else:
    restore_open_files()
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], OPEN_FILES in os.environ)
"""


@pytest.mark.parametrize(("there", "usual"), [("same", 500), ("300", 300)])
def test_our_own_have_all_and_the_users_what_they_had(there: str, usual: int, tmp_path: str) -> None:
    """From supervisor to agent to fork server, on a node that has the limits of the batch script, or its own."""
    script = f"{tmp_path}/say.py"
    with open(script, "w") as file:
        file.write(SAY)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, hard))
    try:
        done = subprocess.run([sys.executable, script, there], check=True, capture_output=True, text=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    most = str(min(hard, MOST_OPEN_FILES))
    assert done.stdout.split() == [most, most, str(usual), "False"]


ADOPT = """
import os, subprocess, sys
from resihp.process import Orphans, adopt_orphans, state_letter, wait_for
adopt_orphans()
LEAVE = "import os, sys; pid = os.fork(); pid or os.read(0, 1); pid and print(pid, flush=True)"
own = subprocess.Popen([sys.executable, "-c", LEAVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
orphan = int(own.stdout.readline())
"""

REAP = (
    ADOPT
    + """
own.wait()
own.stdin.write(b"x")
own.stdin.close()
os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOWAIT)
assert state_letter(orphan) == "Z"
ours = subprocess.Popen(["true"])
os.waitid(os.P_PID, ours.pid, os.WEXITED | os.WNOWAIT)
orphans = Orphans()
orphans.reap()
assert state_letter(orphan) == "Z", "it may be somebody's who is about to wait for it"
assert ours.wait() == 0
orphans.reap()
print(state_letter(orphan))
"""
)

WAIT = (
    ADOPT
    + """
own.wait()
child = subprocess.Popen(["sh", "-c", "read x; exit 7"], stdin=subprocess.PIPE)
own.stdin.write(b"x")
own.stdin.close()
import threading, time
def until_reaped():
    while os.path.exists(f"/proc/{orphan}"):
        time.sleep(0.005)
    child.stdin.close()
threading.Thread(target=until_reaped).start()
print(wait_for(child))
"""
)


@pytest.mark.parametrize(("script", "said"), [(REAP, "X"), (WAIT, "7")])
def test_what_was_adopted_does_not_stay_when_it_has_ended(script: str, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == said


WORDS = [
    b"/usr/bin/python3",
    b"-P",
    b"-m",
    b"resihp.wrapper.agent.process",
    b"--run",
    b"/jobs/6/run.json",
    b"--node",
    b"n2",
]
WORDS += [b"--supervisor", b"127.0.0.1:4711", b""]
ROOM = sum(len(word) + 1 for word in WORDS[:-1])


def test_a_title_stands_in_place_of_the_interpreter() -> None:
    told = titled(b"resihp job 6 a n2", WORDS, 6, ROOM)
    assert len(told) == ROOM
    assert told.rstrip(b"\0").split(b"\0") == [b"resihp job 6 a n2", *WORDS[2:-1]]


@pytest.mark.parametrize("title", [b"resihp job 12345678 agent gpu-17", b"resihp job " + b"6" * 300])
def test_by_what_a_process_is_found_is_never_cut(title: bytes) -> None:
    told = titled(title, WORDS, 6, ROOM).rstrip(b"\0").split(b"\0")
    assert title.startswith(told[0])
    assert told[1:7] == WORDS[2:8]


def test_where_there_is_no_room_nothing_is_changed() -> None:
    assert titled(b"resihp job 6 agent n2", WORDS, 6, 20) == b""


def test_the_title_is_seen_and_the_environment_stays() -> None:
    script = (
        "import os, pathlib; from resihp.process import name_process; name_process('6', 'rank 5', keep=0)\n"
        "me = pathlib.Path('/proc/self')\n"
        "print(me.joinpath('cmdline').read_bytes().rstrip(bytes(1)).decode())\n"
        "print(me.joinpath('comm').read_text().strip())\n"
        "print('HELD=by-this' in me.joinpath('environ').read_text().split(chr(0)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={"HELD": "by-this"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["resihp job 6 rank 5", "resihp-rank-5", "True"]


def test_a_command_follows_the_title_from_the_word_that_it_is_found_by() -> None:
    words = [b"/venv/bin/python", b"/venv/bin/resihp", b"run", b"--local", b"--", b"python", b"train.py", b""]
    room = sum(len(word) + 1 for word in words[:-1])
    told = titled(b"resihp job 6 guardian", words, 1, room, since=b"run").rstrip(b"\0").split(b"\0")
    assert told[:2] == [b"resihp job 6 guardian", b"run"]


SPARING_PROGRAM = """
import os, subprocess
from resihp.process import kill_children, state_letter
spared, other = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
assert kill_children(20.0, spare={spared.pid})
print(state_letter(spared.pid), state_letter(other.pid))
assert kill_children(20.0)
print(state_letter(spared.pid))
"""


def test_a_spared_child_lives_on_when_all_others_are_killed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SPARING_PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() in (["S", "X", "X"], ["R", "X", "X"]), done.stderr


MIB = 1 << 20


def machine(folder: Path, cgroup: str, files: dict[str, object]) -> int:
    """Return the memory that is free on a machine with 1,000 MiB and these files of control groups."""
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "meminfo").write_text("MemTotal:  9999999 kB\nMemAvailable:  1024000 kB\n")
    (folder / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, content in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return free_memory(folder / "proc", folder / "cgroup") // MIB


def test_without_a_limit_the_machines_memory_is_free(tmp_path: Path) -> None:
    assert machine(tmp_path, "0::/job\n", {"job/memory.max": "max", "job/memory.current": 5 * MIB}) == 1000


def test_the_smallest_limit_of_the_groups_counts(tmp_path: Path) -> None:
    files = {
        "memory.max": "max",
        "job/memory.max": 800 * MIB,
        "job/memory.current": 500 * MIB,
        "job/memory.stat": f"anon 5\ninactive_file {100 * MIB}",
        "job/step/memory.max": "max",
    }
    assert machine(tmp_path, "0::/job/step\n", files) == 400


def test_limits_of_the_first_version_of_control_groups_count(tmp_path: Path) -> None:
    files = {
        "memory/slurm/memory.limit_in_bytes": 600 * MIB,
        "memory/slurm/memory.usage_in_bytes": 500 * MIB,
        "memory/slurm/memory.stat": f"total_inactive_file {50 * MIB}",
    }
    assert machine(tmp_path, "3:cpu:/slurm\n9:memory:/slurm\n", files) == 150


def test_a_group_over_its_limit_has_nothing_free(tmp_path: Path) -> None:
    files: dict[str, object] = {"job/memory.max": 100 * MIB, "job/memory.current": 200 * MIB}
    assert machine(tmp_path, "0::/job\n", files) == 0
