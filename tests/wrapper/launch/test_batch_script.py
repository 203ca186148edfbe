"""Whether Slurm's warning reaches `resihp run`: what is read off a batch script, and who waits for whom."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resihp.wrapper.launch.batch_script import is_trapped, lost_warning, options, warning, warning_would_be_lost

WARNED = "#!/bin/bash\n#SBATCH --signal=B:USR2@300\n"
RUN = "resihp run -- python train.py\n"


def test_directives_are_read_as_sbatch_reads_them() -> None:
    script = (
        "#!/bin/bash\n#SBATCH -N2 --no-kill # of them\n# text\n##SBATCH -x\n#SBATCH --comment='\nexec x\n#SBATCH -k\n"
    )
    assert [*options(script)] == ["-N2", "--no-kill"]
    assert [*options(None)] == []


@pytest.mark.parametrize(
    ("script", "name"),
    [
        (WARNED, "USR2"),
        ("#SBATCH --signal B:SIGUSR2@300\n", "USR2"),
        ("#SBATCH --signal=RB:12@60\n", "USR2"),
        ("#SBATCH --signal=B:usr1\n", "USR1"),
        ("#SBATCH --signal=USR2@300\n", None),
        ("#SBATCH --signal=R:USR2@300\n", None),
        ("#SBATCH --signal\n", None),
        ("#SBATCH --signal=B:777@5\n", "777"),
        ("#!/bin/bash\nexec x\n#SBATCH --signal=B:USR2\n", None),
        (None, None),
    ],
)
def test_what_the_shell_is_warned_by(script: str | None, name: str | None) -> None:
    assert warning({}, script) == name
    assert warning({"SBATCH_SIGNAL": "B:TERM@60"}, None) == "TERM"


@pytest.mark.parametrize(
    ("line", "trapped"),
    [
        ("trap 'kill -USR2 $pid' USR2", True),
        ("  trap save SIGUSR2 EXIT", True),
        ("trap save 12", True),
        ("# trap save USR2", False),
        ("trap save EXIT", False),
        ("trap save USR2X", False),
    ],
)
def test_a_script_that_minds_the_signal_itself(line: str, trapped: bool) -> None:
    assert is_trapped("USR2", f"{WARNED}{line}\n{RUN}") is trapped


def test_doctor_reads_what_the_script_would_do() -> None:
    lost = warning_would_be_lost({}, WARNED + RUN)
    assert lost is not None
    assert lost.endswith("write exec before resihp run in the script")
    assert warning_would_be_lost({}, WARNED + "python -m resihp run x\n")
    for script in (
        WARNED + "exec " + RUN,
        WARNED + "trap save USR2\n" + RUN + "wait\n",
        WARNED + "# resihp run would be here\nsrun train\n",
        "#!/bin/bash\n" + RUN,
        "#SBATCH --signal=USR2@300\n" + RUN,
        "#SBATCH --signal=B:USR1@300\nexec " + RUN,
    ):
        assert warning_would_be_lost({}, script) is None, script
    unknown = warning_would_be_lost({}, "#SBATCH --signal=B:ALRM@300\nexec " + RUN)
    assert unknown is not None
    assert unknown.endswith("write #SBATCH --signal=B:USR2@300")


ASK = (
    "import os; from resihp.wrapper.launch.batch_script import lost_warning; "
    "print(lost_warning(os.environ, os.environ['SCRIPT']))"
)


@pytest.mark.parametrize(
    ("script", "lost"),
    [
        ('"$0" -c "$1"; true', True),
        ('(sh -c \'"$0" -c "$1"; true\' "$0" "$1"); true', True),
        ('exec "$0" -c "$1"', False),
    ],
    ids=["waits", "waits behind others", "exec"],
)
def test_a_shell_that_waits_is_seen(script: str, lost: bool, tmp_path: Path) -> None:
    """SLURM_TASK_PID: the process that Slurm has started."""
    starting = 'export SLURM_TASK_PID=$$; exec bash -c "$2" "$0" "$1"'
    done = subprocess.run(
        ["bash", "-c", starting, sys.executable, ASK, script],
        env=os.environ | {"SCRIPT": WARNED},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout.strip() != "None") is lost, done.stderr


def test_elsewhere_nothing_is_said() -> None:
    assert lost_warning({}, WARNED + RUN) is None
    assert lost_warning({"SLURM_TASK_PID": "1"}, None) is None
    assert lost_warning({"SLURM_TASK_PID": str(os.getpid())}, WARNED) is None
