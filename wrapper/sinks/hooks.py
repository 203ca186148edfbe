"""What others are told of a job as it happens: a JSON document for each event, POSTed, or given to a command on stdin.

Listens to the journal (`wrapper.sinks.fanout`); decides nothing about the job and never holds it up: each way has a
thread and a bounded queue of its own (`wrapper.sinks.queue`). Told at least once: how far each way has come is noted in
the job's folder, and a supervisor that takes over goes on from there; `id` tells what was told twice.

A webhook's URL may be a secret (its path, its query): messages show its host only, and redirects, which would carry
the document elsewhere, are not followed.

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
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
from wrapper.job_folder import write_private
from wrapper.output.recoveries import Recoveries
from wrapper.sinks.queue import MOST_WAITING, Aside, UndeliveredError

SCHEMA = 1
PAUSES_S = (1.0, 4.0)
"""Between the tries to deliver one event."""
REAP_S = 1.0
"""How long a killed command may take to go; one that hangs in a file system is left behind."""
LONGEST_URL_FILE = 8192
SECRET_VARIABLE = "RESIHP_HOOKS__WEBHOOK"
"""May hold the webhook's URL, which is no affair of the command's."""

EVENTS: Mapping[str, tuple[type[journal.Entry], ...]] = {
    "start": (journal.JobStarted,),
    "failure": (journal.FailureFound,),
    "recovery": (journal.Reconfigured, journal.FailureEnded),
    "suspicion": (journal.Suspected,),
    "plan": (journal.PlanDecided, journal.PlanInEffect, journal.PlanRefused, journal.PlanWithdrawn),
    "node": (journal.NodeJoined, journal.NodeLost, journal.NodeReleased, journal.SlurmSaw),
    "drain": (journal.DrainDecided, journal.DrainAnswered),
    "replacement": (journal.ReplacementAsked, journal.ReplacementChanged),
    "checkpoint": (journal.CheckpointCommitted,),
    "leader": (journal.LeaderChosen,),
    "signal": (journal.JobSignalled,),
    "fault": (journal.FaultInjected,),
    "end": (journal.JobEnded,),
}
"""What `[hooks] events` may name, and the journal's entries that each stands for."""

_EVENT_OF: Mapping[type[journal.Entry], str] = {kind: event for event, kinds in EVENTS.items() for kind in kinds}
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
"""Fields of entries that a program would look at; the others are in the text."""


def event_of(entry: journal.AnyEntry) -> str | None:
    """The event that an entry is; None for what nobody is told, such as iterations."""
    return _EVENT_OF.get(type(entry))


def document(job: str, record: journal.Record, mended: RecoveryTimes | None = None) -> dict[str, Any]:
    """What is told of a record. Job, names and reasons stand in it as they are. `mended`: as for `explain`."""
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
        "schema": SCHEMA,
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
    """What is to be told: a record, and how long the failures took that it says are mended."""

    record: journal.Record
    mended: RecoveryTimes | None


class Hook:
    """One way to tell. `tell` delivers a document, or raises UndeliveredError or OSError.

    `noted`: the file that tells up to which record it was told. `past`: records of those who led before us, of which
    what is not noted is told now.
    """

    def __init__(
        self,
        name: str,
        tell: Callable[[bytes], None],
        job: str,
        events: Sequence[str],
        *,
        noted: Path,
        say: Callable[[str], None],
        past: Sequence[journal.Record] = (),
        pauses_s: tuple[float, ...] = PAUSES_S,
    ) -> None:
        self.name = name
        self._tell = tell
        self._job = job
        self._events = frozenset(events)
        self._noted = noted
        self._told: int | None = None if past else 0
        self._aside = Aside(f"hook {name}", self._deliver, say, pauses_s=pauses_s)
        self._recoveries = Recoveries()
        waiting = deque((event for record in past if (event := self._event(record)) is not None), maxlen=MOST_WAITING)
        for event in waiting:
            self._aside.put(event)

    def submit(self, record: journal.Record) -> None:
        if (event := self._event(record)) is not None:
            self._aside.put(event)

    def _event(self, record: journal.Record) -> _HookEvent | None:
        """Return what is to be told of a record, None for nothing; every record has to come by, in order."""
        self._recoveries.follow(record)
        entry = record.entry
        if event_of(entry) not in self._events:
            return None
        mended = self._recoveries.of(entry, record.at) if isinstance(entry, journal.Reconfigured) else None
        return _HookEvent(record, mended)

    def close(self, deadline: float) -> bool:
        return self._aside.close(deadline)

    @property
    def counts(self) -> Mapping[str, int]:
        """Events by what became of them."""
        aside = self._aside
        return {"told": aside.done, "failed": aside.failed, "dropped": aside.dropped}

    def _deliver(self, event: _HookEvent) -> None:
        record = event.record
        if self._told is None:  # read here, since files may hang
            self._told = _number(self._noted)
        if record.seq <= self._told:
            return
        self._tell(json.dumps(document(self._job, record, event.mended), default=str).encode())
        with suppress(OSError):  # then it may be told again
            write_private(self._noted, str(record.seq).encode())


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
    """POSTs documents there. The proxies of the environment are used. `url_of` is asked each time: tokens change."""
    opener = build_opener(_NoRedirects)

    def tell(content: bytes) -> None:
        try:
            url = url_of()
        except ConfigurationError as error:
            raise UndeliveredError(str(error), again=False) from None
        shown = masked(url)
        headers = {"Content-Type": "application/json", "User-Agent": "resihp"}
        request = Request(url, data=content, headers=headers, method="POST")
        try:
            with opener.open(request, timeout=timeout_s):
                pass
        except HTTPError as error:
            error.close()
            later = error.code >= 500 or error.code in (408, 429)
            raise UndeliveredError(f"{shown} answered {error.code}", again=later) from None
        except URLError as error:
            reason = error.reason
            words = "no answer in time" if isinstance(reason, TimeoutError) else _os_words(reason)
            raise UndeliveredError(f"{shown}: {words}") from None
        except TimeoutError:
            raise UndeliveredError(f"{shown}: no answer within {timeout_s:g} s") from None
        except (OSError, HTTPException, ValueError) as error:  # whose words may hold the URL
            raise UndeliveredError(f"{shown}: {type(error).__name__}") from None

    return tell


def _os_words(reason: object) -> str:
    words = reason.strerror if isinstance(reason, OSError) and reason.strerror else type(reason).__name__
    return words.lower()


def masked(url: str) -> str:
    """A webhook for messages: scheme and host."""
    parts = urlsplit(url)
    return f"webhook {parts.scheme}://{parts.hostname or '?'}/***"


def checked(url: str) -> str:
    """Raises ValueError, which never holds the URL, for one that nothing can be POSTed to."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname)
        port = parts.port
    except ValueError:
        known, port = False, None
    if not known or port == 0 or not url.isascii() or any(c.isspace() or not c.isprintable() for c in url):
        raise ValueError("must be a URL such as https://example.org/hook, without spaces")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must not hold a user and a password; put a token into its path or query")
    return url


def url_in(path: Path) -> str:
    """The URL that a file of ours holds. Raises ConfigurationError unless nobody else may read it."""
    subject = f"[hooks] webhook_file {path}"
    try:
        with os.fdopen(open_plain(path, follow=True), "rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(LONGEST_URL_FILE)
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
    """Gives documents to a command on stdin, one process for each; killed, with what it started, when it takes long.

    Its output goes nowhere.
    """
    name = f"command {argv[0]}"

    def tell(content: bytes) -> None:
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
            raise UndeliveredError(f"{name}: not done within {timeout_s:g} s, killed", again=False) from None
        finally:
            _end(process)
        if process.returncode:
            raise UndeliveredError(f"{name}: ended with {process.returncode}", again=False)

    return tell


def _end(process: subprocess.Popen[bytes]) -> None:
    """A command that is not done, with whatever it has started: that is in its session."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(REAP_S)
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
