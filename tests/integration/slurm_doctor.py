"""What the doctor says of a test cluster to one of its users: only the checks that ask Slurm, which are quick."""

from __future__ import annotations

import sys

import msgspec

from resihp.wrapper.commands.doctor.machine import CheckResult
from tests.integration.slurm_jobs import Desk

_ASK = """
import os, sys
from pathlib import Path
import msgspec
from resihp.wrapper.commands.doctor import command as doctor
from resihp.wrapper.commands.doctor.slurm_checks import SlurmChecks
found = doctor.run(SlurmChecks(*doctor.connect(), os.environ, Path(sys.argv[1])).by_name(), 300)
sys.stdout.buffer.write(msgspec.json.encode(found))
"""
_GRAVITY = ("ok", "skipped", "warning", "unknown", "failed")


def findings(desk: Desk, job: str = "", *, before: str = "") -> list[CheckResult]:
    """All that is found on a node, where a desk's user can read us. `before`: shell commands that come first."""
    (desk.folder / "asked.toml").write_text(job)
    argv = [sys.executable, "-c", _ASK, str(desk.folder / "asked.toml")]
    done = desk.cluster.run(
        "env",
        *(f"{name}={value}" for name, value in desk.environment.items() if name not in ("HOME", "USER", "LOGNAME")),
        *("sh", "-c", f'{before or ":"}; exec "$@"', "sh"),
        *argv,
        user=desk.user,
        node=desk.cluster.nodes[0],
        timeout_s=300,
    )
    return msgspec.json.decode(done.stdout, type=list[CheckResult])


def ask(desk: Desk, job: str = "", *, before: str = "") -> dict[str, CheckResult]:
    """The gravest finding of each check."""
    found = sorted(findings(desk, job, before=before), key=lambda finding: _GRAVITY.index(finding.outcome))
    return {finding.check: finding for finding in found}
