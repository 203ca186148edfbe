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
