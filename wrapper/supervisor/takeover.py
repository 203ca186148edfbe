"""The source of a take-over: the previous supervisor's journal, or an agent's copy of it.

Decides whether a take-over is possible, and under which term. Starts nothing. Called by
`resihp.wrapper.supervisor.process`.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import psutil

from resihp.errors import ProtocolError
from resihp.protocol.messages import Lead
from resihp.record.journal import JobEnded, JobStarted, NodeJoined, Record
from resihp.record.journal_file import Journal
from resihp.record.quorum import Membership
from resihp.wrapper.config.run_spec import RunRequest
from resihp.wrapper.job_files.dead_jobs import agents_of
from resihp.wrapper.job_folder import write_private


@dataclass(frozen=True)
class TakeoverSource:
    """Source of a take-over: the journal that the previous supervisor left, or an agent's copy of it."""

    node: str
    term: int
    how: Literal["restarted", "elected"]
    records: tuple[Record, ...]
    membership: Membership
    """Leaders and voters according to `records`."""
    journal: Journal
    """The file that contains `records`; the new supervisor continues it."""

    @property
    def lead(self) -> Lead:
        return Lead(term=self.term, node=self.node, log=self.records[-1].seq)


def takeover_source(
    journal: Path,
    node: str,
    how: Literal["restarted", "elected"],
    least_term: int = 0,
    are_started: Callable[[], bool] = lambda: False,
) -> TakeoverSource:
    """Read a journal and return the source of a take-over. Raises ProtocolError if there is nothing to take over.

    `are_started`: whether agents are running that will join, although none has joined yet. The new term is written to a
    file beside the journal before any agent learns it, so that the term of a failed take-over is never used again.
    """
    records: list[Record] = []
    opened = Journal(journal, found=records)
    if not records or not isinstance(records[0].entry, JobStarted):
        raise ProtocolError("the journal has no first record")
    ended = next((record.entry for record in records if isinstance(record.entry, JobEnded)), None)
    if ended is not None:
        raise ProtocolError(f"the job has ended: {ended.reason}")
    membership = Membership()
    for record in records:
        membership.apply(record)
    takeover = TakeoverSource(node, 0, how, tuple(records), membership, opened)
    if not any(isinstance(record.entry, NodeJoined) for record in records) and not are_started():
        raise ProtocolError("no agent had joined it, and not all were started")
    term_file = journal.with_suffix(".term")
    used = int(term_file.read_text()) if term_file.exists() else 0
    term = max(least_term, takeover.membership.term + 1, used + 1)
    write_private(term_file, str(term).encode(), sync=True)
    return replace(takeover, term=term)


def agents_are_started(request: RunRequest) -> bool:
    """Return whether all agents run, as far as this node can tell. Under Slurm one agent on this node is enough,
    because srun starts the agents of the other nodes."""
    started: set[str] = set()
    for process in agents_of(request.of_job):
        with suppress(psutil.Error):
            words = process.cmdline()
            started.update(node for option, node in itertools.pairwise(words) if option == "--node")
    return bool(started) if request.slurm is not None else len(started) == request.settings.nodes


def inherit(copy: Path) -> Path:
    """Return the path of the journal for a supervisor on this node; if it does not exist yet, make it from the agent's
    copy."""
    journal = copy.with_suffix(".journal")
    if not journal.exists():  # otherwise a supervisor on this node has already continued it
        shutil.copyfile(copy, journal)
    return journal
