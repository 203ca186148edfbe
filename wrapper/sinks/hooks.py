"""Notifies the user's hooks of a job's events: a JSON document for each event, POSTed to a URL or given to a command on
stdin.

Listens to the journal (`resihp.wrapper.sinks.fanout`). Decides nothing about the job and never delays it: each hook has
its own thread and bounded queue (`resihp.wrapper.sinks.queue`). Events are delivered at least once: the number of the
last delivered record of each hook is saved in the job's folder, and a supervisor that takes over continues after that
record. Receivers recognise a duplicate by its `id`.

The path and query of a webhook's URL may be secret. So messages show only the URL's host, and redirects are not
followed, as they would send the document elsewhere.

    {"schema": 1, "id": "local-3:17", "job": "local-3", "host": "node-1", "time": "2026-03-01T12:00:00.250Z",
     "kind": "failure", "entry": "FailureFound", "text": "failure 1: ...", "ids": {"failure": 1, "node": "n2", ...}}
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from resihp.errors import ConfigurationError
from resihp.plain_files import open_plain
from resihp.record import journal
from resihp.record.recovery import RecoveryTimes
from resihp.wrapper.job_folder import write_private
from resihp.wrapper.output.job_history import JobHistory
from resihp.wrapper.sinks.queue import MAX_WAITING, BackgroundQueue, UndeliveredError

DOCUMENT_SCHEMA = 1
RETRY_PAUSES_S = (1.0, 4.0)
"""Pauses, in seconds, between attempts to deliver one event."""
REAP_S = 1.0
"""How long to wait for a killed command to exit. A command that hangs in a file system is abandoned."""
MAX_URL_FILE_BYTES = 8192
SECRET_VARIABLE = "RESIHP_HOOKS__WEBHOOK"
"""Environment variable that may hold the webhook's URL; it is removed from the command's environment."""

EVENT_ENTRIES: Mapping[str, tuple[type[journal.Entry], ...]] = {
    "start": (journal.JobStarted,),
    "failure": (journal.FailureFound,),
    "recovery": (journal.Reconfigured, journal.FailureEnded),
    "suspicion": (journal.Suspected,),
    "plan": (journal.PlanDecided, journal.PlanInEffect, journal.PlanRefused, journal.PlanWithdrawn),
    "node": (journal.NodeJoined, journal.NodeLost, journal.NodeReleased, journal.SlurmSaw, journal.ReservationSeen),
    "drain": (journal.DrainDecided, journal.DrainAnswered),
    "replacement": (journal.ReplacementAsked, journal.ReplacementChanged),
    "checkpoint": (journal.CheckpointCommitted,),
    "leader": (journal.LeaderChosen,),
    "signal": (journal.JobSignalled,),
    "fault": (journal.FaultInjected,),
    "end": (journal.JobEnded,),
}
"""The valid names of `[hooks] events`, each with the journal entries that it covers."""

_EVENT_OF: Mapping[type[journal.Entry], str] = {kind: event for event, kinds in EVENT_ENTRIES.items() for kind in kinds}
_IDS = (
    *(
        "failure",
        "failures",
        "epoch",
        "iteration",
        "next_iteration",
        "rank",
        "ranks",
        "node",
        "nodes",
        "device",
        "link",
    ),
    *("component", "drain", "replacement", "slurm_job", "step", "outcome", "state", "term", "signal"),
    *("meaning", "measure", "grounds", "action", "seconds", "exit_code", "fault"),
)
"""Fields of journal entries that are copied to `ids` of the document; all other fields appear only in its text."""


def event_of(entry: journal.AnyEntry) -> str | None:
    """Return the name of the event that an entry is reported as; None for entries that are not reported, such as
    iterations."""
    return _EVENT_OF.get(type(entry))


def entries_of(events: Iterable[str]) -> frozenset[type[journal.Entry]]:
    """Return the kinds of journal entries that these events cover."""
    return frozenset(kind for event in events for kind in EVENT_ENTRIES[event])


def document(job: str, record: journal.Record, mended: RecoveryTimes | None = None) -> dict[str, Any]:
    """Return the JSON document about a record. Names and reasons are not escaped. `mended`: recovery times, as for
    `explain`."""
    from resihp.record.describe import explain

    entry = record.entry
    at = datetime.fromtimestamp(record.at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    ids: dict[str, object] = {}
    match entry:
        case journal.PlanDecided():
            ids["epoch"] = entry.plan.epoch
        case journal.FailureFound() | journal.Suspected():
            ids["failure_kind"] = entry.kind
    ids |= {name: value for name in _IDS if (value := getattr(entry, name, None)) is not None}
    return {
        "schema": DOCUMENT_SCHEMA,
        "id": f"{job}:{record.seq}",
        "job": job,
        "host": socket.gethostname(),
        "time": at,
        "kind": event_of(entry),
        "entry": type(entry).__name__,
        "text": explain(entry, mended),
        "ids": ids,
    }


class _HookEvent(NamedTuple):
    """An event to deliver: a journal record and, for a change of plan, the recovery times of the failures that it
    mended."""

    record: journal.Record
    mended: RecoveryTimes | None


class Hook:
    """One hook: a listener that delivers a JSON document for each event, in the background.

    `deliver` delivers a document, or raises UndeliveredError or OSError. `noted`: file with the number of the last
    delivered record. `past`: records written under earlier leaders; those after the last delivered record are delivered
    now. `history`: the job's history, shared with other listeners; None to build one. `kinds`: the entries to deliver.
    `encode` returns what to deliver for a record; None for the JSON document of `document`.
    """

    def __init__(
        self,
        name: str,
        deliver: Callable[[bytes], None],
        job: str,
        kinds: Collection[type[journal.Entry]],
        *,
        noted: Path,
        say: Callable[[str], None],
        past: Sequence[journal.Record] = (),
        history: JobHistory | None = None,
        pauses_s: tuple[float, ...] = RETRY_PAUSES_S,
        encode: Callable[[journal.Record, RecoveryTimes | None], bytes] | None = None,
    ) -> None:
        self.name = name
        self._encode = encode or partial(_encoded_document, job)
        self._send = deliver
        self._kinds = frozenset(kinds)
        self._noted = noted
        self._delivered: int | None = None if past else 0
        self._queue = BackgroundQueue(f"hook {name}", self._deliver, say, pauses_s=pauses_s)
        self._history = history or JobHistory(plans_kept=1)
        waiting = deque((event for record in past if (event := self._event(record)) is not None), maxlen=MAX_WAITING)
        for event in waiting:
            self._queue.put(event)

    def submit(self, record: journal.Record) -> None:
        if (event := self._event(record)) is not None:
            self._queue.put(event)

    def _event(self, record: journal.Record) -> _HookEvent | None:
        """Return the event to deliver for a record; None if the record is not reported. Call it for every record, in
        order, since it also updates the history."""
        self._history.follow(record)
        entry = record.entry
        if type(entry) not in self._kinds:
            return None
        mended = self._history.recovery(entry, record.at) if isinstance(entry, journal.Reconfigured) else None
        return _HookEvent(record, mended)

    def close(self, deadline: float) -> bool:
        return self._queue.close(deadline)

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of events by outcome: delivered (`told`), failed, dropped."""
        queue = self._queue
        return {"told": queue.done, "failed": queue.failed, "dropped": queue.dropped}

    def _deliver(self, event: _HookEvent) -> None:
        record = event.record
        if self._delivered is None:  # read in the queue's thread, since the file system may hang
            self._delivered = _number(self._noted)
        if record.seq <= self._delivered:
            return
        self._send(self._encode(record, event.mended))
        with suppress(OSError):  # if this fails, a later supervisor delivers the event again
            write_private(self._noted, str(record.seq).encode())


def _encoded_document(job: str, record: journal.Record, mended: RecoveryTimes | None) -> bytes:
    return json.dumps(document(job, record, mended), default=str).encode()


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


# --- by a webhook ---------------------------------------------------------------------------------------------------


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        return None


def webhook(url_of: Callable[[], str], timeout_s: float) -> Callable[[bytes], None]:
    """Return a function that POSTs a document to the webhook, through the proxies of the environment. `url_of` is
    called for each document, as its token may change."""
    opener = build_opener(_NoRedirects)

    def deliver(content: bytes) -> None:
        try:
            url = url_of()
        except ConfigurationError as error:
            raise UndeliveredError(str(error), again=False) from None
        host = masked(url)
        headers = {"Content-Type": "application/json", "User-Agent": "resihp"}
        request = Request(url, data=content, headers=headers, method="POST")
        try:
            with opener.open(request, timeout=timeout_s):
                pass
        except HTTPError as error:
            error.close()
            later = error.code >= 500 or error.code in (408, 429)
            raise UndeliveredError(f"{host} answered {error.code}", again=later) from None
        except URLError as error:
            reason = error.reason
            words = "no answer in time" if isinstance(reason, TimeoutError) else _os_words(reason)
            raise UndeliveredError(f"{host}: {words}") from None
        except TimeoutError:
            raise UndeliveredError(f"{host}: no answer within {timeout_s:g} s") from None
        except (OSError, HTTPException, ValueError) as error:  # the error's message may contain the URL
            raise UndeliveredError(f"{host}: {type(error).__name__}") from None

    return deliver


def _os_words(reason: object) -> str:
    words = reason.strerror if isinstance(reason, OSError) and reason.strerror else type(reason).__name__
    return words.lower()


def masked(url: str) -> str:
    """Return the scheme and host of a webhook's URL, to be shown in messages."""
    parts = urlsplit(url)
    return f"webhook {parts.scheme}://{parts.hostname or '?'}/***"


def checked(url: str) -> str:
    """Return the URL if a document can be POSTed to it; otherwise raise a ValueError that does not contain the URL."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        port = parts.port
    except ValueError:
        is_valid, port = False, None
    if not is_valid or port == 0 or not url.isascii() or any(c.isspace() or not c.isprintable() for c in url):
        raise ValueError("must be a URL such as https://example.org/hook, without spaces")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must not hold a user and a password; put a token into its path or query")
    return url


def url_in(path: Path) -> str:
    """Return the webhook's URL from a file. Raises ConfigurationError if other users may read the file."""
    subject = f"[hooks] webhook_file {path}"
    try:
        with os.fdopen(open_plain(path, follow=True), "rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(MAX_URL_FILE_BYTES)
    except OSError as error:
        raise ConfigurationError(f"{subject}: {error.strerror}") from None
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o077:
        raise ConfigurationError(f"{subject}: others may read it; chmod 600 {path}")
    try:
        return checked(content.decode().strip())
    except UnicodeDecodeError:
        raise ConfigurationError(f"{subject}: is not text") from None
    except ValueError as error:
        raise ConfigurationError(f"{subject}: {error}") from None


# --- by a command ---------------------------------------------------------------------------------------------------


def command(argv: Sequence[str], timeout_s: float) -> Callable[[bytes], None]:
    """Return a function that starts the command for one document and passes the document on stdin.

    A command that exceeds `timeout_s` is killed, with all processes that it started. Its output is discarded.
    """
    name = f"command {argv[0]}"

    def deliver(content: bytes) -> None:
        try:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: value for name, value in os.environ.items() if name != SECRET_VARIABLE},
                start_new_session=True,
            )
        except OSError as error:
            raise UndeliveredError(f"{name}: cannot be started ({error.strerror})", again=False) from None
        try:
            process.communicate(content + b"\n", timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise UndeliveredError(f"{name}: not finished within {timeout_s:g} s, killed", again=False) from None
        finally:
            _end(process)
        if process.returncode:
            raise UndeliveredError(f"{name}: ended with {process.returncode}", again=False)

    return deliver


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a command that has not finished, and all processes in its session."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(REAP_S)
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
