"""How to get a shell on a node of a running job: the command to type, by node. Pure.

A node that came as a replacement belongs to a Slurm job of its own, and only that one's number leads there. Used by
`resihp status`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def shells(slurm_job: str, nodes: Sequence[Row], replacements: Sequence[Row]) -> dict[str, str]:
    """Commands by node, of those that the job has. `nodes`, `replacements`: rows of the ledger's tables."""
    guests = {row["node"]: row["slurm_job"] for row in replacements if row["outcome"] == "joined" and row["slurm_job"]}
    return {
        row["node"]: _command(guests.get(row["node"], slurm_job), row["node"])
        for row in nodes
        if row["lost_at"] is None and row["released_at"] is None
    }


def _command(slurm_job: str, node: str) -> str:
    """Quoted: whoever wrote the ledger chose the names, and whoever reads this types it."""
    return f"srun --jobid={shlex.quote(slurm_job)} --overlap -w {shlex.quote(node)} --pty bash"


def line(commands: Mapping[str, str]) -> str:
    """One line for a terminal: the command for a node, and the other Slurm jobs that it has to name for guests."""
    first = next(iter(commands.values()), "")
    job = _job(first)
    others = {node: _job(command) for node, command in commands.items() if _job(command) != job}
    told = ", ".join(f"{number} for {node}" for node, number in others.items())
    return first + (f"  ({told})" if told else "")


def _job(command: str) -> str:
    return next((word for word in command.split() if word.startswith("--jobid=")), "")
