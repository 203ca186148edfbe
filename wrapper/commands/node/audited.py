"""Records the steps of `resihp node` in the site's audit, if the site has one.

Called by `resihp.wrapper.commands.node.command` after the steps. A line that cannot be written is a warning.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from resihp.errors import ResihpError
from resihp.wrapper.output.answers import message

if TYPE_CHECKING:
    from resihp.slurm.drains.drain import Step

UNDRAIN_NAMES = {"slurm": "undrain", "spool": "undrain request", "exclusion": "exclusion revoked"}


def audited(steps: Iterable[Step], cluster: str, job: str, node: str, *, undrains: bool = False) -> Iterator[Step]:
    """Yield the steps, and record each."""
    from resihp.wrapper.sinks.audit import STEP_NAMES

    names = UNDRAIN_NAMES if undrains else STEP_NAMES
    for step in steps:
        _record(cluster, job, node, names[step.step], step.outcome, step.text)
        yield step


def _record(cluster: str, job: str, node: str, decision: str, outcome: str, reason: str) -> None:
    """Append a line to the site's audit. `job`: empty if it is not known."""
    from resihp.wrapper.config.sources import read
    from resihp.wrapper.site_folders import audit

    made = audit.Decision(
        id=f"{cluster}:by-hand:{secrets.token_hex(8)}",
        at=time.time(),
        cluster=cluster,
        job=job,
        node=node,
        decision=decision,
        outcome=outcome,
        reason=reason,
    )
    try:
        if folder := read({}).site.audit:
            audit.append(Path(folder), audit.line(made))
    except ResihpError as error:
        message(f"warning: {error}")
