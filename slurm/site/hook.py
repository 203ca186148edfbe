#!/usr/bin/python3 -I
"""The site hook of resihp: run by root, it drains nodes that users' jobs have found to be bad.

It reads drain requests from the site's spool folder and decides each one by information of the kernel and of Slurm: the
requester is the owner of the file, and the requester's nodes are those that the user's jobs hold, or have just held,
according to Slurm. The hook never trusts the request itself about either. It never follows a link, never opens any
other file of a user, and never changes a node with a reason that is not resihp's. Runs as HealthCheckProgram on each
node, or from cron on one host (see README.md in this folder). One file, standard library only, Python 3.8 or later.
Each decision is one line in syslog and on stderr.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import json
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import syslog
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

PREFIX = "resihp: "
"""Start of every reason that resihp sets. Only nodes with such a reason are undrained."""
VERSION = 1
MAX_BYTES = 4096
MAX_TEXT = 100
MAX_NAMES = 200_000
"""Limit on the directory entries that one run reads."""
MAX_FILES = 20_000
"""Limit on the files that one run reads. If there are more, a random selection is read, so that no user can hide
another user's request for long."""
MAX_READS = 2_000
PER_USER_RUN = 16
"""Limit on the requests of one user that one run reads; any further ones are removed unread."""
REPORTED_PER_USER = 4
"""Limit on the refusals of one user that are reported in lines of their own in one run; further ones are only
counted."""
REPORTED_PER_RUN = 100
FOLDERS_REPORTED = 100
MAX_FOLDERS = 1_000
SKEW_S = 600.0
"""Largest permitted difference between the time stated in a request and the time of its file. A copy of an old request
exceeds it."""
STRAY_S = 600.0
SLURM_TIMEOUT_S = 20.0
WORK_LIMIT_S = 30.0
"""Seconds of one run after which no further request is decided and no further file is removed."""
ALARM_AFTER_S = 50
"""Limit on one run. slurmd ends a health check after 60 s; even on a hung file system the lock must not be held
longer."""
SEARCH_PATHS = "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin:/opt/slurm/bin"
CONFIG_PATHS = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf")
NO_CONTACT_MESSAGES = ("unable to contact", "timed out", "connection refused", "zero bytes", "endpoint", "no route")

_ID = re.compile(r"[0-9a-zA-Z][0-9a-zA-Z-]{7,63}")
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_TAG = re.compile(r" \(asked by uid (\d+), job \d+\)\Z")


class Refused(Exception):
    """The request will never be carried out, and is removed."""


class Waits(Exception):
    """The request cannot be carried out now. It stays in the spool until it is too old."""


class Gone(Exception):
    """The requester has removed the request."""


class NoAnswer(Exception):
    """Slurm does not answer: the outcome is unknown, and everything stays unchanged."""


class OutOfTime(Exception):
    """The run has reached its time limit."""


class Unsafe(Exception):
    """Another user could manipulate a folder, so the hook does nothing at all."""


class SpoolEntry(NamedTuple):
    """One file of the spool, with its owner and change time as listed. Decisions use the opened file, which is read
    later."""

    name: str
    uid: int
    changed_at: float


class SpooledRequest(NamedTuple):
    """A request. `uid` and `arrived_at` come from the kernel (owner and ctime of the file), the other fields from the
    file's content."""

    name: str
    uid: int
    arrived_at: float
    kind: str
    node: str
    text: str


class NodeHolding(NamedTuple):
    """Interval during which a user's job held a node, according to Slurm."""

    uid: int
    node: str
    begin: float
    end: float
    job: int


class View(NamedTuple):
    """A node as Slurm sees it. `reason` is empty if there is none; `reason_uid`: the author of it, None if
    unknown."""

    flags: frozenset[str]
    reason: str
    reason_uid: int | None

    @property
    def drained_by_us(self) -> bool:
        return "drain" in self.flags and self.reason.startswith(PREFIX)

    @property
    def asked_by(self) -> int | None:
        """The uid of the user for whom this hook drained the node; None if the hook did not drain it."""
        tag = _TAG.search(self.reason) if self.drained_by_us and self.reason_uid == os.geteuid() else None
        return int(tag[1]) if tag else None

    @property
    def drainable(self) -> bool:
        """Whether no person has set the node aside or given it a reason. Slurm's own reason "Not responding" does not
        count."""
        if self.reason == "Not responding" and not self.flags & {"drain", "fail"}:
            return True
        noted = self.reason and not self.reason.startswith(PREFIX)
        return not noted and not self.flags & {"drain", "fail", "down", "error"}


# --- messages to the operator ---------------------------------------------------------------------------------------

_mark = ""


def say(text: str) -> None:
    """Log one line in printable ASCII, whatever characters a user has put into a name."""
    line = _mark + "".join(c if " " <= c <= "~" else "?" for c in text)[:500]
    syslog.syslog(syslog.LOG_NOTICE, line)
    with suppress(OSError, ValueError):
        print(f"resihp-hook: {line}", file=sys.stderr, flush=True)


def user(uid: int) -> str:
    import pwd

    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


# --- folders that nobody else can tamper with -----------------------------------------------------------------------


def open_folder(path: str) -> int:
    """Return a descriptor of the folder, which is opened step by step, without following links. Raises Unsafe.

    Each folder on the way must belong to root or to the hook's user, and no other user may be able to rename its
    entries.
    """
    if not path.startswith("/") or ".." in path.split("/"):
        raise Unsafe(f"{path}: give its path from the root, without ..")
    descriptor = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    done = ""
    for name in (part for part in path.split("/") if part not in ("", ".")):
        done += f"/{name}"
        try:
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=descriptor)
        except OSError as error:
            linked = error.errno in (errno.ELOOP, errno.ENOTDIR)
            raise Unsafe(f"{done}: {'a link, or no folder' if linked else error.strerror}") from None
        finally:
            os.close(descriptor)
        descriptor, status = below, os.fstat(below)
        problem = ""
        if status.st_uid not in (0, os.geteuid()):
            problem = f"belongs to {user(status.st_uid)}, not to root"
        elif status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
            problem = f"others may write there and it is not sticky; chmod +t {done}"
        if problem:
            os.close(descriptor)
            raise Unsafe(f"{done}: {problem}")
    return descriptor


def open_state(path: str) -> int:
    """Open the folder of this hook's memory; create it if missing. Raises Unsafe if other users have any access to
    it."""
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    descriptor = open_folder(path)
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        os.close(descriptor)
        raise Unsafe(f"{path}: must not be accessible to others; chmod 700 {path}")
    return descriptor


# --- the spool ------------------------------------------------------------------------------------------------------


class Spool:
    """The folder in which users put requests. Accessed only through its descriptor; only regular files in it are
    read."""

    def __init__(self, path: str, dry: bool) -> None:
        self.path = os.path.normpath(path)
        self._dry = dry
        self._folder = open_folder(self.path)
        status = os.fstat(self._folder)
        self._device = status.st_dev
        # Entries are removed: a mistyped path must not empty /etc or /tmp.
        if not status.st_mode & 0o022 or status.st_mode & 0o004:
            os.close(self._folder)
            mode = stat.S_IMODE(status.st_mode)
            raise Unsafe(f"{self.path}: no spool, its mode is {mode:o}; if it is to be one: chmod 1733 {self.path}")

    def names(self) -> list[str]:
        """Return the names of entries that are not folders. Empty folders of users are removed; other folders are never
        opened."""
        mounted = self._mounted()
        names: list[str] = []
        folders: list[str] = []
        with os.scandir(self._folder) as entries:
            for number, entry in enumerate(entries):
                if number >= MAX_NAMES:
                    say(f"{self.path}: more than {MAX_NAMES} entries, the rest is not seen; clean it up")
                    break
                if entry.name not in mounted:
                    with suppress(OSError):
                        (folders if entry.is_dir(follow_symlinks=False) else names).append(entry.name)
        if len(folders) > FOLDERS_REPORTED:
            say(f"{self.path}: {len(folders)} unexpected folders in it; check their owners")
        for name in folders[: 0 if self._dry else MAX_FOLDERS]:
            with suppress(OSError):
                if os.stat(name, dir_fd=self._folder, follow_symlinks=False).st_uid != os.geteuid():
                    os.rmdir(name, dir_fd=self._folder)
        if len(names) > MAX_FILES:
            say(f"{self.path}: {len(names)} files, {MAX_FILES} of them are read in this run")
            names = random.SystemRandom().sample(names, MAX_FILES)
        return names

    def _mounted(self) -> frozenset[str]:
        """Return the names of entries that are mount points. They are skipped, because a user's own file system could
        block the hook forever."""
        names = []
        with suppress(OSError), open("/proc/self/mountinfo", "rb") as file:
            for line in file:
                point = re.sub(rb"\\(\d{3})", lambda match: bytes([int(match[1], 8)]), line.split()[4])
                place, _, name = os.fsdecode(point).rpartition("/")
                if place == self.path:
                    names.append(name)
        return frozenset(names)

    def look(self, names: Sequence[str], now: float) -> tuple[dict[int, list[SpoolEntry]], list[SpoolEntry]]:
        """Return the files that may be requests, by owner and oldest first, and the entries to remove unread."""
        requests: dict[int, list[SpoolEntry]] = {}
        strays: list[SpoolEntry] = []
        for name in names:
            try:
                status = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
            except OSError:
                continue  # withdrawn
            entry = SpoolEntry(name, status.st_uid, status.st_ctime)
            if name.endswith(".json"):
                requests.setdefault(entry.uid, []).append(entry)
            elif (
                not stat.S_ISREG(status.st_mode) or status.st_ctime < now - STRAY_S
            ):  # a young one is about to be renamed
                strays.append(entry)
        for entries in requests.values():
            entries.sort(key=lambda entry: (entry.changed_at, entry.name))
            strays += entries[PER_USER_RUN:]
            del entries[PER_USER_RUN:]
        return requests, strays

    def read(self, entry: SpoolEntry, now: float) -> SpooledRequest:
        """Read a request. Raises Refused, Gone, or, for a file with a time in the future (after a clock was set back),
        Waits.

        An entry that is not a regular file is not opened, because opening a device or a pipe can have effects.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            entry_status = os.stat(entry.name, dir_fd=self._folder, follow_symlinks=False)
            if not stat.S_ISREG(entry_status.st_mode):
                raise Refused("a symbolic link" if stat.S_ISLNK(entry_status.st_mode) else "not a regular file")
            descriptor = os.open(entry.name, flags, dir_fd=self._folder)
        except FileNotFoundError:
            raise Gone from None
        except OSError as error:
            raise Refused("a symbolic link" if error.errno == errno.ELOOP else f"{error.strerror}") from None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise Refused("not a regular file")
            if status.st_uid != entry.uid or status.st_dev != self._device:
                raise Refused("replaced while it was looked at")
            if status.st_nlink != 1:
                raise Refused(f"has {status.st_nlink} links")
            if status.st_mode & 0o022:
                raise Refused("users other than its owner may write it")
            if status.st_size > MAX_BYTES:
                raise Refused(f"{status.st_size} bytes, at most {MAX_BYTES} are read")
            if status.st_ctime > now + SKEW_S:
                raise Waits("it is from the future; is the clock right?")
            content = os.read(descriptor, MAX_BYTES)
        finally:
            os.close(descriptor)
        return parsed(content, entry.name, status.st_uid, status.st_ctime)

    def remove(self, name: str) -> None:
        """Remove the entry itself, never the target of a link."""
        if not self._dry:
            with suppress(OSError):
                os.unlink(name, dir_fd=self._folder)


def parsed(content: bytes, name: str, uid: int, arrived_at: float) -> SpooledRequest:
    """Parse a request. Raises Refused if it is invalid."""
    try:
        fields = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError):
        raise Refused("not a request: no JSON") from None
    if not isinstance(fields, dict) or fields.get("version") != VERSION:
        raise Refused(f"not a request of version {VERSION}")
    kind, node, text, made_at = (fields.get(key) for key in ("kind", "node", "reason", "time"))
    if kind not in ("drain", "undrain"):
        raise Refused("asks for neither drain nor undrain")
    if not isinstance(node, str) or not _NODE.fullmatch(node):
        raise Refused("names no node")
    if not isinstance(text, str):
        raise Refused("has no reason")
    # If another user puts a user's old request there again (by a hard link to it), one of these differs.
    stem = name[: -len(".json")]
    if not _ID.fullmatch(stem) or fields.get("id") != stem:
        raise Refused("its name differs from its id")
    if isinstance(made_at, bool) or not isinstance(made_at, (int, float)) or not 0 < made_at < 1e11:
        raise Refused("has no time")
    if abs(made_at - arrived_at) > SKEW_S:
        raise Refused("its time differs from its file's")
    return SpooledRequest(name, uid, arrived_at, str(kind), node, cleaned(text))


def cleaned(text: str) -> str:
    """Return the text as it may appear in a reason: ASCII words, without characters that have a special meaning in
    other tools."""
    text = "".join(c if (c.isascii() and c.isalnum()) or c in ".,:+/_%()@#-" else " " for c in text)
    return " ".join(text.split())[:MAX_TEXT].strip() or "no reason given"


# --- Slurm ----------------------------------------------------------------------------------------------------------


class SlurmCommands:
    """The queries and orders that the hook sends to Slurm, with explicit fields."""

    def __init__(self, configuration: str | None) -> None:
        self._paths = f"{os.environ.get('PATH', '')}:{SEARCH_PATHS}".strip(":")
        self._environment = {"PATH": self._paths, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
        usual = [path for path in (os.environ.get("SLURM_CONF"), *CONFIG_PATHS) if path and os.path.exists(path)]
        config_path = configuration or next(iter(usual), None)
        if config_path is not None:
            self._environment["SLURM_CONF"] = config_path

    def jobs(self, now: float) -> list[NodeHolding]:
        """Return the times for which jobs held their nodes; ended jobs are included while Slurm remembers them
        (MinJobAge)."""
        return holdings(self._ask("squeue", "-a", "-h", "-t", "all", "-o", "%A|%U|%T|%S|%e|%N"), now)

    def steps(self, now: float) -> list[NodeHolding]:
        """Return running job steps with the nodes on which they began, including nodes that the job has lost or given
        back since.

        The time of a loss is unknown; therefore the end of these holdings equals their beginning.
        """
        return holdings(self._ask("squeue", "-a", "-h", "-s", "-o", "%i|%U|STEP|%S|%S|%N"), now)

    def views(self, *nodes: str) -> dict[str, View]:
        """Return the views of these nodes, or of all nodes if none is given. Records that cannot be parsed are
        omitted."""
        only = ("-n", ",".join(nodes)) if nodes else ()
        # Terminated by control characters: a reason may contain bars and line breaks.
        fields = "nodelist:\x1f,statecomplete:\x1f,userlong:\x1f,reason:\x1e"
        views = {}
        for record in self._ask("sinfo", "-a", "-h", "-N", *only, "-O", fields).split("\x1e"):
            parts = record.lstrip("\n").split("\x1f")
            if len(parts) != 4 or not _NODE.fullmatch(parts[0]):
                continue
            user_match = re.fullmatch(r".*\((\d+)\)", parts[2])
            views[parts[0]] = View(
                flags=frozenset(re.findall(r"[a-z_]+", parts[1].lower())),
                reason="" if parts[3] == "none" else parts[3],
                reason_uid=int(user_match[1]) if user_match else None,
            )
        return views

    def idle_since(self, node: str) -> float | None:
        """Return the time when a job last held the node; None if unknown."""
        match = re.search(r" LastBusyTime=(\d+) ", self._ask("scontrol", "-o", "show", "node", node))
        return float(match[1]) if match else None

    def drain(self, node: str, reason: str) -> None:
        self._tell("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}")

    def undrain(self, node: str) -> None:
        """Undrain a node. UNDRAIN leaves a node that is down as it is; RESUME would not.

        24.11.5 without accounting would keep resihp's reason; "none" is Slurm's own word for a missing reason.
        """
        self._tell("scontrol", "update", f"NodeName={node}", "State=UNDRAIN", "Reason=none")

    def _ask(self, *argv: str) -> str:
        done = self._run(argv)
        if done.returncode != 0:
            raise NoAnswer(f"{argv[0]}: {_words(done.stderr)}")
        return done.stdout.decode("utf-8", "replace")

    def _tell(self, *argv: str) -> None:
        done = self._run(argv)
        words = _words(done.stderr)
        if done.returncode != 0 and any(part in words.lower() for part in NO_CONTACT_MESSAGES):
            raise NoAnswer(f"{argv[0]}: {words}")
        if done.returncode != 0:
            raise Refused(f"Slurm says no: {words}")

    def _run(self, argv: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
        program = shutil.which(argv[0], path=self._paths)
        if program is None:
            raise NoAnswer(f"{argv[0]} is not in {self._paths}")
        try:
            return subprocess.run(
                [program, *argv[1:]],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=SLURM_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise NoAnswer(f"{argv[0]}: no answer within {SLURM_TIMEOUT_S:.0f} s") from None
        except OSError as error:
            raise NoAnswer(f"{program}: {error.strerror}") from None


def _words(stderr: bytes) -> str:
    return " ".join(stderr.decode("ascii", "replace").split())[:200]


def holdings(output: str, now: float) -> list[NodeHolding]:
    """Parse lines `id|uid|state|begin|end|nodes`. A line that cannot be parsed is no evidence, and is skipped."""
    results = []
    for line in output.splitlines():
        parts = line.split("|")
        if len(parts) != 6:
            continue
        try:
            # 12.3, 12_5.3 (array) and 12+1.3 (heterogeneous) are steps of job 12
            job, uid, begin = int(re.split(r"\D", parts[0])[0]), int(parts[1]), float(parts[3])
            runs = parts[2] in ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "RESIZING", "STOPPED")
            end = now if runs else min(float(parts[4]), now)
            results += [NodeHolding(uid, node, begin, max(begin, end), job) for node in expanded(parts[5])]
        except ValueError:
            continue
    return results


def expanded(nodes: str, most: int = 100_000) -> Iterator[str]:
    """Yield the names in a node list such as `n[1-3,07],login`. Blanks after commas are ignored. Raises ValueError."""
    nodes = re.sub(r"\s*([,\[\]])\s*", r"\1", nodes.strip())
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes):
        parts = re.split(r"\[([^\[\]]*)\]", item)
        names = [parts[0]]
        for ranges, after in zip(parts[1::2], parts[2::2]):  # noqa: B905 - Python 3.8
            numbers = []
            for piece in ranges.split(","):
                first, _, last = piece.partition("-")
                if int(last or first) - int(first) > most:
                    raise ValueError(nodes)
                numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
            if len(names) * len(numbers) > most:
                raise ValueError(nodes)
            names = [name + number + after for name in names for number in numbers]
        yield from names


# --- memory between runs --------------------------------------------------------------------------------------------


class Memory:
    """State that is kept between runs: actions of the last hour, holdings of nodes, and requests that were reported as
    waiting.

    Stored in a folder that only root can read. Written before an action, so that the action always counts.
    """

    def __init__(self, folder: int, now: float, *, keep_s: float, dry: bool) -> None:
        self._folder = folder
        self._now = now
        self._keep_s = keep_s
        self._dry = dry
        self.acted: list[tuple[float, int]] = []
        self.held: list[NodeHolding] = []
        self.waiting: dict[str, str] = {}

    def load(self) -> None:
        """Load the state of the last run. Times in the future, after a clock was set back, become the current time. A
        broken file is renamed, and raises Unsafe once."""
        try:
            descriptor = os.open("memory.json", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
        except FileNotFoundError:
            return
        with os.fdopen(descriptor, "rb") as file:
            content = file.read()
        try:
            fields = json.loads(content.decode())
            self.acted = [(min(float(at), self._now), int(uid)) for at, uid in fields["acted"]]
            self.held = [
                NodeHolding(int(uid), str(node), float(begin), min(float(end), self._now), int(job))
                for uid, node, begin, end, job in fields["held"]
            ]
            self.waiting = {str(name): str(text) for name, text in fields["waiting"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            os.rename("memory.json", "memory.broken", src_dir_fd=self._folder, dst_dir_fd=self._folder)
            raise Unsafe("memory.json was broken, it is memory.broken now; the next run begins anew") from None
        self.acted = [item for item in self.acted if item[0] > self._now - 3600]

    def remember(self, holdings: Iterable[NodeHolding]) -> None:
        """Add holdings. Of each user on each node, the latest holding is kept, as long as a request may refer to it."""
        latest: dict[tuple[int, str], NodeHolding] = {}
        for item in (*self.held, *holdings):
            before = latest.get((item.uid, item.node))
            if before is None or item.end >= before.end:
                latest[item.uid, item.node] = item
        self.held = [item for item in latest.values() if item.end > self._now - self._keep_s]

    def save(self) -> None:
        if self._dry:
            return
        fields = {"acted": self.acted, "held": self.held, "waiting": self.waiting}
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open("memory.new", flags, 0o600, dir_fd=self._folder), "wb") as file:
            file.write(json.dumps(fields).encode())
            file.flush()
            os.fsync(file.fileno())
        os.rename("memory.new", "memory.json", src_dir_fd=self._folder, dst_dir_fd=self._folder)


# --- decisions ------------------------------------------------------------------------------------------------------


class SiteHook:
    """One run of the hook: decides the requests in the spool one by one; the users take turns."""

    def __init__(
        self, options: argparse.Namespace, spool: Spool, slurm: SlurmCommands, memory: Memory, now: float
    ) -> None:
        self._options = options
        self._spool = spool
        self._slurm = slurm
        self._memory = memory
        self._now = now
        self._until = time.monotonic() + WORK_LIMIT_S
        self._refusals: dict[int, int] = {}
        self._jobs: list[NodeHolding] = []
        self._steps: list[NodeHolding] = []
        self._views: dict[str, View] | None = None
        self._drained: list[int | None] = []
        """One entry for each node that is drained with resihp's reason: the user for whom the hook drained it; None if
        the hook did not drain it."""

    def run(self, names: Sequence[str]) -> None:
        if self._options.remember:
            self._ask_jobs()
        requests, strays = self._spool.look(names, self._now)
        if self._options.all and requests:
            # Slurm is queried before files are read, so that files of users without nodes cost almost nothing.
            known_users = self._known_users()
            for uid in [uid for uid in requests if uid not in known_users]:
                strays += requests.pop(uid)
        turns = self._turns(requests)
        if turns:
            self._known_users()
        waiting: dict[str, str] = {}
        for request in turns:
            if time.monotonic() > self._until:
                say("out of time; the remaining requests wait for the next run")
                break
            self._decide(request, waiting)
        self._memory.waiting = waiting
        self._memory.save()
        self._clean(strays)

    def _ask_jobs(self) -> None:
        self._jobs = self._slurm.jobs(self._now)
        self._memory.remember(self._jobs)

    def _known_users(self) -> set[int]:
        """Return the users with a right to make requests: they hold or held a node, or a node is drained for them.
        Queries Slurm once per run."""
        if self._views is None:
            if not self._jobs:
                self._ask_jobs()
            self._steps = self._slurm.steps(self._now)
            self._views = self._slurm.views()
            self._drained = [view.asked_by for view in self._views.values() if view.drained_by_us]
        users = {item.uid for item in (*self._jobs, *self._steps, *self._memory.held)}
        return users.union(uid for uid in self._drained if uid is not None)

    def _turns(self, entries: dict[int, list[SpoolEntry]]) -> list[SpooledRequest]:
        """Return the requests for this host's nodes, in rounds of one request per user, so that no user waits behind
        another user's many requests."""
        owners = list(entries)
        random.SystemRandom().shuffle(owners)
        queues: list[list[SpooledRequest]] = []
        reads = 0
        for uid in owners:
            queue: list[SpooledRequest] = []
            for entry in entries[uid] if reads < MAX_READS else ():
                reads += 1
                with suppress(Gone):
                    self._take(entry, queue)
            queues.append(queue)
        longest = max((len(queue) for queue in queues), default=0)
        return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]

    def _take(self, entry: SpoolEntry, queue: list[SpooledRequest]) -> None:
        try:
            request = self._spool.read(entry, self._now)
            if request.arrived_at < self._now - self._options.max_age_s:
                raise Refused(f"older than {self._options.max_age_s / 3600:g} h")
        except Refused as refusal:
            self._refuse(entry.uid, entry.name, str(refusal))
        except (Waits, OSError) as error:
            say(f"request {entry.name} of {user(entry.uid)} waits: {error}")
        else:
            if self._options.all or request.node == self._options.node:
                queue.append(request)

    def _decide(self, request: SpooledRequest, waiting: dict[str, str]) -> None:
        requester = f"asked by {user(request.uid)} in {request.name}"
        try:
            done = self._drain(request) if request.kind == "drain" else self._undrain(request)
        except Refused as refusal:
            self._refuse(request.uid, request.name, f"{request.kind} of node {request.node}: {refusal}")
        except (Waits, NoAnswer) as pause:
            waiting[request.name] = str(pause)
            if self._memory.waiting.get(request.name) != str(pause):
                say(f"{request.kind} of node {request.node} waits: {pause}; {requester}")
        else:
            say(f"{done}; {requester}")
            self._spool.remove(request.name)

    def _drain(self, request: SpooledRequest) -> str:
        node = request.node
        holding = self._find_holding(request)
        if not self._options.shared and self._is_shared(holding):
            raise Refused(f"other users' jobs were on it together with job {holding.job}")
        view = self._view(node)
        if view.drained_by_us:
            return f"node {node} is already drained: {view.reason}"
        if not view.drainable:
            raise Refused(f"left alone, it is {'+'.join(sorted(view.flags))} with reason {view.reason or 'none'!r}")
        if self._drained.count(request.uid) >= self._options.user_drained:
            raise Refused(f"{self._options.user_drained} nodes are drained for this user, as many as the site allows")
        if len(self._drained) >= self._options.drained:
            raise Waits(f"{len(self._drained)} nodes are drained with our reason, as many as the site allows")
        self._count(request)
        reason = f"{PREFIX}{request.text} (asked by uid {request.uid}, job {holding.job})"
        self._tell(lambda: self._slurm.drain(node, reason))
        self._drained.append(request.uid)
        return f"drained node {node}: {reason}"

    def _undrain(self, request: SpooledRequest) -> str:
        node = request.node
        view = self._view(node)
        if "drain" not in view.flags:
            return f"node {node} is not drained"
        if not view.drained_by_us:
            raise Refused(f"left alone, it is drained with reason {view.reason or 'none'!r}")
        if view.asked_by != request.uid:
            raise Refused(f"was not drained by this hook for them; it has {view.reason!r}")
        self._count(request)
        self._tell(lambda: self._slurm.undrain(node))
        with suppress(ValueError):  # drained by another host's hook in the meantime
            self._drained.remove(request.uid)
        return f"undrained node {node}, which had: {view.reason}"

    def _find_holding(self, request: SpooledRequest) -> NodeHolding:
        """Return the requester's holding of the node that was current, or recently over, when the request arrived.
        Raises Refused if there is none."""
        proofs = [item for item in (*self._jobs, *self._memory.held) if self._matches_request(item, request)]
        if not proofs:
            steps = [item for item in self._steps if (item.uid, item.node) == (request.uid, request.node)]
            proofs = [item for item in map(self._departed, steps) if self._matches_request(item, request)]
            self._memory.remember(proofs)
        if not proofs:
            raise Refused("no job of this user holds it, or has just held it")
        return max(proofs, key=lambda item: item.end)

    def _matches_request(self, item: NodeHolding, request: SpooledRequest) -> bool:
        if (item.uid, item.node) != (request.uid, request.node):
            return False
        return item.begin <= request.arrived_at + SKEW_S and item.end >= request.arrived_at - self._options.window_s

    def _departed(self, step: NodeHolding) -> NodeHolding:
        """Return the holding of a job step with its latest possible end: when another job came to the node, or when the
        node was last busy."""
        others = (item for item in (*self._jobs, *self._memory.held) if item.node == step.node)
        after = [item.begin for item in others if item.begin > step.begin]
        idle = min(after) if after else self._slurm.idle_since(step.node)
        return step if idle is None else step._replace(end=max(step.begin, min(idle, self._now)))

    def _is_shared(self, holding: NodeHolding) -> bool:
        """Decide whether another user's job was on the node at the same time: then one user alone must not have it
        drained."""
        holdings_on_node = (item for item in (*self._jobs, *self._memory.held) if item.node == holding.node)
        return any(
            item.uid != holding.uid and item.begin < holding.end and holding.begin < item.end
            for item in holdings_on_node
        )

    def _view(self, node: str) -> View:
        """Return the node's current view; no earlier answer of this run is used. Raises Refused if Slurm does not know
        the node."""
        view = self._slurm.views(node).get(node)
        if view is None:
            raise Refused("Slurm does not know it")
        return view

    def _count(self, request: SpooledRequest) -> None:
        """Count an action before it is done. Raises Refused or Waits if the limit of the last hour is reached."""
        if sum(uid == request.uid for _, uid in self._memory.acted) >= self._options.user_rate:
            raise Refused(f"{self._options.user_rate} of this user's requests were carried out within the hour")
        if len(self._memory.acted) >= self._options.rate:
            raise Waits(f"{self._options.rate} requests were carried out within the hour")
        self._memory.acted.append((self._now, request.uid))
        self._memory.save()

    def _tell(self, order: Callable[[], None]) -> None:
        if not self._options.dry_run:
            order()

    def _refuse(self, uid: int, name: str, text: str) -> None:
        self._refusals[uid] = self._refusals.get(uid, 0) + 1
        if self._refusals[uid] <= REPORTED_PER_USER and sum(self._refusals.values()) <= REPORTED_PER_RUN:
            say(f"refused {name} of {user(uid)}: {text}")
        self._spool.remove(name)

    def _clean(self, strays: Sequence[SpoolEntry]) -> None:
        """Remove the entries that were not read, and report their number and their owners."""
        counts = {uid: count - REPORTED_PER_USER for uid, count in self._refusals.items() if count > REPORTED_PER_USER}
        for entry in strays:
            if time.monotonic() > self._until:
                break
            self._spool.remove(entry.name)
            counts[entry.uid] = counts.get(entry.uid, 0) + 1
        if counts:
            most = sorted(counts, key=lambda uid: -counts[uid])[:3]
            culprits = ", ".join(f"{counts[uid]} of {user(uid)}" for uid in most)
            rest = f", and of {len(counts) - 3} other users" if len(counts) > 3 else ""
            say(
                f"refused {sum(counts.values())} more (no requests, too many, or users without nodes): {culprits}{rest}"
            )


# --- start ----------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    here = os.environ.get("SLURMD_NODENAME")
    parser = argparse.ArgumentParser(
        prog="resihp-hook", description="Drain nodes that users' jobs have found to be bad."
    )
    add = parser.add_argument
    add("--spool", default="/var/spool/resihp", help="folder that users drop requests into [%(default)s]")
    add(
        "--state",
        default="/var/lib/resihp-hook",
        help="folder for the hook's memory, readable by root only [%(default)s]",
    )
    scope = parser.add_mutually_exclusive_group(required=here is None)
    scope.add_argument("--node", default=here, help="act on this node only [$SLURMD_NODENAME]")
    scope.add_argument("--all", action="store_true", help="act on all nodes")
    add("--conf", help="slurm.conf, where it is not in /etc/slurm")
    add("--remember", action="store_true", help="record node holders even when there is no request (cron on one host)")
    add("--shared", action="store_true", help="also drain nodes that jobs of several users share")
    add("--window-s", type=float, default=900.0, help="seconds for which a past holding of a node counts [%(default)s]")
    add("--max-age-s", type=float, default=86400.0, help="seconds after which a request is refused [%(default)s]")
    add("--drained", type=int, default=8, help="limit on nodes drained with our reason at a time [%(default)s]")
    add("--user-drained", type=int, default=4, help="limit on nodes drained for one user at a time [%(default)s]")
    add("--user-rate", type=int, default=8, help="limit on requests of one user carried out per hour [%(default)s]")
    add("--rate", type=int, default=32, help="limit on requests carried out per hour [%(default)s]")
    add("--dry-run", action="store_true", help="show the actions without draining or removing anything")
    return parser.parse_args(argv)


def alarm(_number: int, _frame: Any) -> NoReturn:
    raise OutOfTime(f"gave up after {ALARM_AFTER_S} s")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the hook once. Always returns 0, because a health check must not fail because of the hook; problems are
    logged."""
    global _mark
    options = parse(argv)
    _mark = "not done (dry run): " if options.dry_run else ""
    syslog.openlog("resihp-hook", syslog.LOG_PID, syslog.LOG_DAEMON)
    signal.signal(signal.SIGALRM, alarm)
    signal.alarm(ALARM_AFTER_S)
    try:
        spool = Spool(options.spool, options.dry_run)
        names = spool.names()
        if not names and not options.remember:
            return 0
        state = open_state(options.state)
        lock = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=state)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0  # another run is active
        now = time.time()
        memory = Memory(state, now, keep_s=options.window_s + options.max_age_s, dry=options.dry_run)
        memory.load()
        SiteHook(options, spool, SlurmCommands(options.conf), memory, now).run(names)
    except (Unsafe, NoAnswer, OutOfTime, OSError) as error:
        say(f"stopped; the remaining requests wait for the next run: {error}")
    except Exception as error:  # noqa: BLE001 - a health check must not end with a traceback
        say(f"stopped by a bug in the hook, please report it: {error!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
