"""Descriptors: as many as we may have for our own processes, as many as there were for the user's."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from resihp.process import MOST_OPEN_FILES

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
