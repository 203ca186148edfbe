"""An agent's copy of the job's journal: the leader's records, in the journal's own file format, on local disk.

Decides nothing: `resihp.record.quorum` derives the voters from the copy, and a successor starts from it. A copy is used
only while its agent lives, so it is not flushed to disk: after a crash of the node it would be useless anyway. Used by
`resihp.wrapper.agent.process`.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from resihp.errors import ProtocolError, UsageError
from resihp.protocol import messages as m
from resihp.protocol.forwarding import records_in
from resihp.record.journal import Record
from resihp.record.journal_file import Journal, read_packed
from resihp.record.journal_format import decode
from resihp.record.quorum import Membership
from resihp.wrapper.job_folder import OurJob
from resihp.wrapper.strict_modes import check_folder


class Replica:
    """One agent's copy of the journal. `membership`: leaders and voters according to the copy."""

    def __init__(self, path: Path) -> None:
        """Begin an empty copy. Raises OSError if the file cannot be created."""
        self.path = path
        self.membership = Membership()
        self.whole = True
        """False once a record could not be written. The copy then still counts in votes, but no successor can start
        from it."""
        path.unlink(missing_ok=True)
        self._journal = Journal(path, sync=False)

    @property
    def log(self) -> int:
        """Number of the copy's last record; 0 if it is empty."""
        return self.membership.log

    def apply(self, message: m.Replicate) -> None:
        """Drop the records after `message.after`, and append the records of the message.

        Raises ProtocolError if the copy then does not end with record `message.after`, or if a record is invalid or out
        of order.
        """
        if message.after < self.log:
            self._rewind(message.after)
        if message.after != self.log:
            raise ProtocolError(f"journal copy: ends with record {self.log}, but the message continues {message.after}")
        for body in records_in(message):
            self.membership.apply(self._take(body))
        if self.whole and self._journal.is_to_be_packed:
            with suppress(OSError):  # the copy is unchanged, only larger
                self._journal.pack()

    def _take(self, body: bytes) -> Record:
        if self.whole:
            try:
                return self._journal.copy(body)
            except OSError as error:
                print(f"journal copy: {self.path}: {error.strerror}; no successor can start here", flush=True)
                self.whole = False
        return decode(body)

    def close(self) -> None:
        self._journal.close()

    def _rewind(self, after: int) -> None:
        """Drop all records after number `after`."""
        if not self.whole:
            raise ProtocolError(f"journal copy: {self.path} is incomplete and cannot be cut after record {after}")
        self._journal.cut(after)
        self.membership = Membership()
        for record in read_packed(self.path):
            self.membership.apply(record)


def local_place(job: OurJob) -> Path:
    """Return the job's folder on this machine's own disk, and create it if needed.

    Raises UsageError if it cannot be created, or if other users may write to it, because they could forge files there.
    """
    place = job.journal_file.parent
    try:
        for folder in (place.parent, place):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.lstat().st_uid != os.getuid():  # also for a link: its owner could change the target
                raise UsageError(f"{folder}: belongs to another user; set RESIHP_LOCAL to a folder of yours")
            check_folder(folder, "RESIHP_LOCAL")
    except OSError as error:
        raise UsageError(f"{place}: cannot hold journals: {error.strerror}; set RESIHP_LOCAL to another") from error
    return place
