"""The command that opens a shell on each node of a running job. Pure.

A node that joined as a replacement belongs to a separate Slurm job, and only the number of that Slurm job gives access
to the node. Used by `resihp status`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def shells(slurm_job: str, nodes: Sequence[Row], replacements: Sequence[Row]) -> dict[str, str]:
    """Return the command for each node that is now part of the job. `nodes`, `replacements`: rows of the ledger's
    tables."""
    guests = {row["node"]: row["slurm_job"] for row in replacements if row["outcome"] == "joined" and row["slurm_job"]}
    return {
        row["node"]: _command(guests.get(row["node"], slurm_job), row["node"])
        for row in nodes
        if row["lost_at"] is None and row["released_at"] is None
    }


def _command(slurm_job: str, node: str) -> str:
    """Return the command. Names are quoted, as the ledger's writer chose them and the user types the command."""
    return f"srun --jobid={shlex.quote(slurm_job)} --overlap -w {shlex.quote(node)} --pty bash"


def line(commands: Mapping[str, str]) -> str:
    """Return one line for a terminal: the command for one node, and the numbers of the other Slurm jobs for
    replacements."""
    first = next(iter(commands.values()), "")
    job = _job(first)
    others = {node: _job(command) for node, command in commands.items() if _job(command) != job}
    numbers = ", ".join(f"{number} for {node}" for node, number in others.items())
    return first + (f"  ({numbers})" if numbers else "")


def _job(command: str) -> str:
    return next((word for word in command.split() if word.startswith("--jobid=")), "")
