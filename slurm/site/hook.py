#!/usr/bin/python3 -I
"""The site hook of resihp: root runs it, and it drains the nodes that users' jobs have found to be bad.

It reads drain requests from the site's spool folder and decides each by what the kernel and Slurm say: who asks is the
owner of the file; which nodes are theirs is what Slurm says that their jobs hold or have just held. It never believes a
request about either, never follows a link, never opens anything else of a user, and never touches a node whose reason
is not its own. Runs as HealthCheckProgram on each node, or from cron on one host (README.md beside it). One file,
standard library only, Python 3.8 or later. One line for each decision goes to syslog and to stderr.
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
"""What every reason begins with that is ours: only nodes with such a reason are ever given back."""
VERSION = 1
MAX_BYTES = 4096
MAX_TEXT = 100
MAX_NAMES = 200_000
"""Directory entries that one run goes through."""
MAX_FILES = 20_000
"""Files that one run looks at: of more, so many at random, so that nobody can hide somebody else's request for long."""
MAX_READS = 2_000
PER_USER_RUN = 16
"""Requests of one user that one run reads; what else this user has there is removed unread."""
TOLD_PER_USER = 4
"""Refusals of one user that get a line of their own in one run; the rest are counted."""
TOLD_PER_RUN = 100
FOLDERS_TOLD = 100
MAX_FOLDERS = 1_000
SKEW_S = 600.0
"""How far the time in a request may be from its file's: an old request that is put there again is farther."""
STRAY_S = 600.0
SLURM_S = 20.0
WORK_S = 30.0
"""No request is begun after so long, nothing more is cleaned."""
ALARM_S = 50
"""slurmd ends a health check after 60 s; even a hung file system must not keep the lock for longer than this."""
PATHS = "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin:/opt/slurm/bin"
CONFIGURATIONS = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf")
NO_CONTACT = ("unable to contact", "timed out", "connection refused", "zero bytes", "endpoint", "no route")

_ID = re.compile(r"[0-9a-zA-Z][0-9a-zA-Z-]{7,63}")
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_TAG = re.compile(r" \(asked by uid (\d+), job \d+\)\Z")


class Refused(Exception):
    """This request will never be carried out: it is removed."""


class Waits(Exception):
    """Not now: it stays, until it is too old."""


class Gone(Exception):
    """Its owner has taken it back."""


class NoAnswer(Exception):
    """Slurm does not answer: what was asked is unknown, and everything stays as it is."""


class OutOfTime(Exception):
    """The alarm has rung."""


class Unsafe(Exception):
    """A folder that somebody else could tamper with: nothing is done at all."""


class SpoolEntry(NamedTuple):
    """A name in the spool and what was there a moment ago; what counts is what the open file says later."""

    name: str
    uid: int
    changed_at: float


class SpooledRequest(NamedTuple):
    """`uid` and `arrived_at` are the kernel's (owner and ctime), the rest is what the file says."""

    name: str
    uid: int
    arrived_at: float
    kind: str
    node: str
    text: str


class NodeHolding(NamedTuple):
    """From when until when a user's job held a node, as Slurm says."""

    uid: int
    node: str
    begin: float
    end: float
    job: int


class View(NamedTuple):
    """A node as Slurm sees it; `reason` is empty without one."""

    flags: frozenset[str]
    reason: str
    reason_uid: int | None

    @property
    def drained_by_us(self) -> bool:
        return "drain" in self.flags and self.reason.startswith(PREFIX)

    @property
    def asked_by(self) -> int | None:
        """For whom this hook has drained it; None if it has not."""
        tag = _TAG.search(self.reason) if self.drained_by_us and self.reason_uid == os.geteuid() else None
        return int(tag[1]) if tag else None

    @property
    def drainable(self) -> bool:
        """Nobody has set it aside or given it a reason; that Slurm itself finds it gone is nobody's reason."""
        if self.reason == "Not responding" and not self.flags & {"drain", "fail"}:
            return True
        noted = self.reason and not self.reason.startswith(PREFIX)
        return not noted and not self.flags & {"drain", "fail", "down", "error"}


# --- what the operator reads ----------------------------------------------------------------------------------------

_mark = ""


def say(text: str) -> None:
    """One line, printable ASCII whatever a user has put into a name."""
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
    """A descriptor of the folder, reached step by step without following a link. Raises Unsafe.

    Each folder on the way has to be root's or ours, and such that nobody else can rename what is in it.
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
        descriptor, found = below, os.fstat(below)
        problem = ""
        if found.st_uid not in (0, os.geteuid()):
            problem = f"belongs to {user(found.st_uid)}, not to root"
        elif found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
            problem = f"others may write there and it is not sticky; chmod +t {done}"
        if problem:
            os.close(descriptor)
            raise Unsafe(f"{done}: {problem}")
    return descriptor


def open_state(path: str) -> int:
    """The folder for what this hook remembers, made if it is not there. Raises Unsafe where others can even read it."""
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    descriptor = open_folder(path)
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        os.close(descriptor)
        raise Unsafe(f"{path}: has to be ours alone; chmod 700 {path}")
    return descriptor


# --- the spool ------------------------------------------------------------------------------------------------------


class Spool:
    """The folder that users drop requests into. Looks only through its descriptor, at regular files in it."""

    def __init__(self, path: str, dry: bool) -> None:
        self.path = os.path.normpath(path)
        self._dry = dry
        self._folder = open_folder(self.path)
        self._device = os.fstat(self._folder).st_dev

    def names(self) -> list[str]:
        """Names of what is no folder; empty folders are removed, others are never looked into."""
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
        if len(folders) > FOLDERS_TOLD:
            say(f"{self.path}: {len(folders)} folders in it, which do not belong there; look whose they are")
        for name in folders[: 0 if self._dry else MAX_FOLDERS]:
            with suppress(OSError):
                os.rmdir(name, dir_fd=self._folder)
        if len(names) > MAX_FILES:
            say(f"{self.path}: {len(names)} files, {MAX_FILES} of them are looked at now")
            names = random.SystemRandom().sample(names, MAX_FILES)
        return names

    def _mounted(self) -> frozenset[str]:
        """Names that something is mounted on: a user's own file system could make us wait for ever."""
        found = []
        with suppress(OSError), open("/proc/self/mountinfo", "rb") as file:
            for line in file:
                point = re.sub(rb"\\(\d{3})", lambda match: bytes([int(match[1], 8)]), line.split()[4])
                place, _, name = os.fsdecode(point).rpartition("/")
                if place == self.path:
                    found.append(name)
        return frozenset(found)

    def look(self, names: Sequence[str], now: float) -> tuple[dict[int, list[SpoolEntry]], list[SpoolEntry]]:
        """Files that could be requests by owner, the oldest first; and what is to be removed unread."""
        requests: dict[int, list[SpoolEntry]] = {}
        strays: list[SpoolEntry] = []
        for name in names:
            try:
                found = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
            except OSError:
                continue  # taken back
            entry = SpoolEntry(name, found.st_uid, found.st_ctime)
            if name.endswith(".json"):
                requests.setdefault(entry.uid, []).append(entry)
            elif not stat.S_ISREG(found.st_mode) or found.st_ctime < now - STRAY_S:  # else it is about to be renamed
                strays.append(entry)
        for entries in requests.values():
            entries.sort(key=lambda entry: (entry.changed_at, entry.name))
            strays += entries[PER_USER_RUN:]
            del entries[PER_USER_RUN:]
        return requests, strays

    def read(self, entry: SpoolEntry, now: float) -> SpooledRequest:
        """Raises Refused, Gone, or Waits for a file from the future: a clock was put back.

        What is no plain file is not even opened: to open a device or a pipe is to do something to it.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            seen = os.stat(entry.name, dir_fd=self._folder, follow_symlinks=False)
            if not stat.S_ISREG(seen.st_mode):
                raise Refused("a symbolic link" if stat.S_ISLNK(seen.st_mode) else "not a regular file")
            descriptor = os.open(entry.name, flags, dir_fd=self._folder)
        except FileNotFoundError:
            raise Gone from None
        except OSError as error:
            raise Refused("a symbolic link" if error.errno == errno.ELOOP else f"{error.strerror}") from None
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise Refused("not a regular file")
            if found.st_uid != entry.uid or found.st_dev != self._device:
                raise Refused("replaced while it was looked at")
            if found.st_nlink != 1:
                raise Refused(f"has {found.st_nlink} links")
            if found.st_mode & 0o022:
                raise Refused("others than its owner may write it")
            if found.st_size > MAX_BYTES:
                raise Refused(f"{found.st_size} bytes, at most {MAX_BYTES} are read")
            if found.st_ctime > now + SKEW_S:
                raise Waits("it is from the future; is the clock right?")
            content = os.read(descriptor, MAX_BYTES)
        finally:
            os.close(descriptor)
        return parsed(content, entry.name, found.st_uid, found.st_ctime)

    def remove(self, name: str) -> None:
        """Take the name away, never what a link points to."""
        if not self._dry:
            with suppress(OSError):
                os.unlink(name, dir_fd=self._folder)


def parsed(content: bytes, name: str, uid: int, arrived_at: float) -> SpooledRequest:
    """What the request asks for. Raises Refused."""
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
    # A request of somebody's that another user puts there again (a link, kept until then) differs in one of these.
    stem = name[: -len(".json")]
    if not _ID.fullmatch(stem) or fields.get("id") != stem:
        raise Refused("its name and its id differ")
    if isinstance(made_at, bool) or not isinstance(made_at, (int, float)) or not 0 < made_at < 1e11:
        raise Refused("has no time")
    if abs(made_at - arrived_at) > SKEW_S:
        raise Refused("its time and that of its file differ")
    return SpooledRequest(name, uid, arrived_at, str(kind), node, cleaned(text))


def cleaned(text: str) -> str:
    """What may stand in a reason: words of ASCII that no tool takes for syntax."""
    text = "".join(c if (c.isascii() and c.isalnum()) or c in ".,:+/_%()@#-" else " " for c in text)
    return " ".join(text.split())[:MAX_TEXT].strip() or "no reason given"


# --- Slurm ----------------------------------------------------------------------------------------------------------


class SlurmCommands:
    """The few questions that are asked of Slurm, with explicit fields, and the two things that are told to it."""

    def __init__(self, configuration: str | None) -> None:
        self._paths = f"{os.environ.get('PATH', '')}:{PATHS}".strip(":")
        self._environment = {"PATH": self._paths, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
        usual = [path for path in (os.environ.get("SLURM_CONF"), *CONFIGURATIONS) if path and os.path.exists(path)]
        found = configuration or next(iter(usual), None)
        if found is not None:
            self._environment["SLURM_CONF"] = found

    def jobs(self, now: float) -> list[NodeHolding]:
        """Who holds which node; of jobs that have ended, as long as Slurm keeps them (MinJobAge)."""
        return holdings(self._ask("squeue", "-a", "-h", "-t", "all", "-o", "%A|%U|%T|%S|%e|%N"), now)

    def steps(self, now: float) -> list[NodeHolding]:
        """Steps that run, with the nodes they began on: those that the job has lost or given back since included.

        When that was is not known; the end of these holdings is their beginning.
        """
        return holdings(self._ask("squeue", "-a", "-h", "-s", "-o", "%i|%U|STEP|%S|%S|%N"), now)

    def views(self, *nodes: str) -> dict[str, View]:
        """These nodes, or all; what cannot be read is left out."""
        only = ("-n", ",".join(nodes)) if nodes else ()
        # Ended by control characters: a reason may have bars and line breaks in it.
        fields = "nodelist:\x1f,statecomplete:\x1f,userlong:\x1f,reason:\x1e"
        found = {}
        for record in self._ask("sinfo", "-a", "-h", "-N", *only, "-O", fields).split("\x1e"):
            parts = record.lstrip("\n").split("\x1f")
            if len(parts) != 4 or not _NODE.fullmatch(parts[0]):
                continue
            who = re.fullmatch(r".*\((\d+)\)", parts[2])
            found[parts[0]] = View(
                flags=frozenset(re.findall(r"[a-z_]+", parts[1].lower())),
                reason="" if parts[3] == "none" else parts[3],
                reason_uid=int(who[1]) if who else None,
            )
        return found

    def idle_since(self, node: str) -> float | None:
        """When a job last held the node; None when that cannot be told."""
        match = re.search(r" LastBusyTime=(\d+) ", self._ask("scontrol", "-o", "show", "node", node))
        return float(match[1]) if match else None

    def drain(self, node: str, reason: str) -> None:
        self._tell("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}")

    def undrain(self, node: str) -> None:
        """UNDRAIN leaves a node down that is down; RESUME would not.

        24.11.5 without accounting would keep our reason; none is what Slurm itself says where there is not any.
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
        if done.returncode != 0 and any(part in words.lower() for part in NO_CONTACT):
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
                timeout=SLURM_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise NoAnswer(f"{argv[0]}: no answer within {SLURM_S:.0f} s") from None
        except OSError as error:
            raise NoAnswer(f"{program}: {error.strerror}") from None


def _words(stderr: bytes) -> str:
    return " ".join(stderr.decode("ascii", "replace").split())[:200]


def holdings(output: str, now: float) -> list[NodeHolding]:
    """Read `id|uid|state|begin|end|nodes` lines. What cannot be read proves nothing, and is left out."""
    found = []
    for line in output.splitlines():
        parts = line.split("|")
        if len(parts) != 6:
            continue
        try:
            # 12.3, 12_5.3 (array) and 12+1.3 (heterogeneous) are steps of job 12
            job, uid, begin = int(re.split(r"\D", parts[0])[0]), int(parts[1]), float(parts[3])
            runs = parts[2] in ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "RESIZING", "STOPPED")
            end = now if runs else min(float(parts[4]), now)
            found += [NodeHolding(uid, node, begin, max(begin, end), job) for node in expanded(parts[5])]
        except ValueError:
            continue
    return found


def expanded(nodes: str, most: int = 100_000) -> Iterator[str]:
    """Names in a node list such as `n[1-3,07],login`; blanks after commas say nothing. Raises ValueError."""
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


# --- what is remembered ---------------------------------------------------------------------------------------------


class Memory:
    """What this hook did within the last hour, who held what, and which requests were said to wait.

    In a folder of root's own, and written before anything is done, so that what was done always counts.
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
        """Times in the future, after a clock was put back, count as now. Raises Unsafe once for a broken file."""
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

    def remember(self, held: Iterable[NodeHolding]) -> None:
        """Keep the latest of each user on each node, as long as a request may refer to it."""
        latest: dict[tuple[int, str], NodeHolding] = {}
        for item in (*self.held, *held):
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
    """One run: what lies in the spool, decided one by one, the users taking turns."""

    def __init__(
        self, options: argparse.Namespace, spool: Spool, slurm: SlurmCommands, memory: Memory, now: float
    ) -> None:
        self._options = options
        self._spool = spool
        self._slurm = slurm
        self._memory = memory
        self._now = now
        self._until = time.monotonic() + WORK_S
        self._refusals: dict[int, int] = {}
        self._jobs: list[NodeHolding] = []
        self._steps: list[NodeHolding] = []
        self._views: dict[str, View] | None = None
        self._drained: list[int | None] = []
        """For whom the nodes are drained that have our reason; None for those that the hook did not drain."""

    def run(self, names: Sequence[str]) -> None:
        if self._options.remember:
            self._ask_jobs()
        requests, strays = self._spool.look(names, self._now)
        if self._options.all and requests:
            # One host asks Slurm before it reads: files of those who hold nothing, however many, cost next to nothing.
            known = self._known()
            for uid in [uid for uid in requests if uid not in known]:
                strays += requests.pop(uid)
        turns = self._turns(requests)
        if turns:
            self._known()
        waiting: dict[str, str] = {}
        for request in turns:
            if time.monotonic() > self._until:
                say("out of time; what is left waits for the next run")
                break
            self._decide(request, waiting)
        self._memory.waiting = waiting
        self._memory.save()
        self._clean(strays)

    def _ask_jobs(self) -> None:
        self._jobs = self._slurm.jobs(self._now)
        self._memory.remember(self._jobs)

    def _known(self) -> set[int]:
        """Users who could ask for something: they hold or held a node, or have had one drained. Asks Slurm once."""
        if self._views is None:
            if not self._jobs:
                self._ask_jobs()
            self._steps = self._slurm.steps(self._now)
            self._views = self._slurm.views()
            self._drained = [view.asked_by for view in self._views.values() if view.drained_by_us]
        known = {item.uid for item in (*self._jobs, *self._steps, *self._memory.held)}
        return known.union(uid for uid in self._drained if uid is not None)

    def _turns(self, entries: dict[int, list[SpoolEntry]]) -> list[SpooledRequest]:
        """Requests for our nodes, one of each user, then the next of each: nobody waits for somebody's many."""
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
        who = f"asked by {user(request.uid)} in {request.name}"
        try:
            done = self._drain(request) if request.kind == "drain" else self._undrain(request)
        except Refused as refusal:
            self._refuse(request.uid, request.name, f"{request.kind} of node {request.node}: {refusal}")
        except (Waits, NoAnswer) as pause:
            waiting[request.name] = str(pause)
            if self._memory.waiting.get(request.name) != str(pause):
                say(f"{request.kind} of node {request.node} waits: {pause}; {who}")
        else:
            say(f"{done}; {who}")
            self._spool.remove(request.name)

    def _drain(self, request: SpooledRequest) -> str:
        node = request.node
        held = self._held(request)
        if not self._options.shared and self._is_shared(held):
            raise Refused(f"other users' jobs were on it together with job {held.job}")
        view = self._view(node)
        if view.drained_by_us:
            return f"node {node} is already drained: {view.reason}"
        if not view.drainable:
            raise Refused(f"left alone, it is {'+'.join(sorted(view.flags))} with reason {view.reason or 'none'!r}")
        if self._drained.count(request.uid) >= self._options.user_drained:
            raise Refused(f"{self._options.user_drained} nodes are drained for them, as many as the site allows")
        if len(self._drained) >= self._options.drained:
            raise Waits(f"{len(self._drained)} nodes are drained with our reason, as many as the site allows")
        self._count(request)
        reason = f"{PREFIX}{request.text} (asked by uid {request.uid}, job {held.job})"
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
        with suppress(ValueError):  # drained by another host's hook since we looked
            self._drained.remove(request.uid)
        return f"undrained node {node}, which had: {view.reason}"

    def _held(self, request: SpooledRequest) -> NodeHolding:
        """The user's own time on the node that was under way or just over when the request came. Raises Refused."""
        proofs = [item for item in (*self._jobs, *self._memory.held) if self._fits(item, request)]
        if not proofs:
            steps = [item for item in self._steps if (item.uid, item.node) == (request.uid, request.node)]
            proofs = [item for item in map(self._left, steps) if self._fits(item, request)]
            self._memory.remember(proofs)
        if not proofs:
            raise Refused("no job of theirs holds it, or has just held it")
        return max(proofs, key=lambda item: item.end)

    def _fits(self, item: NodeHolding, request: SpooledRequest) -> bool:
        if (item.uid, item.node) != (request.uid, request.node):
            return False
        return item.begin <= request.arrived_at + SKEW_S and item.end >= request.arrived_at - self._options.window_s

    def _left(self, step: NodeHolding) -> NodeHolding:
        """The step's job has left this node: at the latest when another one came, or when the node was last busy."""
        others = (item for item in (*self._jobs, *self._memory.held) if item.node == step.node)
        after = [item.begin for item in others if item.begin > step.begin]
        idle = min(after) if after else self._slurm.idle_since(step.node)
        return step if idle is None else step._replace(end=max(step.begin, min(idle, self._now)))

    def _is_shared(self, held: NodeHolding) -> bool:
        """Whether another user's job was on the node at the same time: then one user alone must not drain it."""
        known = (item for item in (*self._jobs, *self._memory.held) if item.node == held.node)
        return any(item.uid != held.uid and item.begin < held.end and held.begin < item.end for item in known)

    def _view(self, node: str) -> View:
        """As it is now: nothing that was read earlier in this run may decide."""
        view = self._slurm.views(node).get(node)
        if view is None:
            raise Refused("Slurm does not tell of it")
        return view

    def _count(self, request: SpooledRequest) -> None:
        """Raises Refused or Waits where enough was done within the hour; else it counts, before it is done."""
        if sum(uid == request.uid for _, uid in self._memory.acted) >= self._options.user_rate:
            raise Refused(f"{self._options.user_rate} of theirs were carried out within the hour")
        if len(self._memory.acted) >= self._options.rate:
            raise Waits(f"{self._options.rate} requests were carried out within the hour")
        self._memory.acted.append((self._now, request.uid))
        self._memory.save()

    def _tell(self, order: Callable[[], None]) -> None:
        if not self._options.dry_run:
            order()

    def _refuse(self, uid: int, name: str, text: str) -> None:
        self._refusals[uid] = self._refusals.get(uid, 0) + 1
        if self._refusals[uid] <= TOLD_PER_USER and sum(self._refusals.values()) <= TOLD_PER_RUN:
            say(f"refused {name} of {user(uid)}: {text}")
        self._spool.remove(name)

    def _clean(self, strays: Sequence[SpoolEntry]) -> None:
        """Remove what was not read; tell how much that was, and whose."""
        counts = {uid: count - TOLD_PER_USER for uid, count in self._refusals.items() if count > TOLD_PER_USER}
        for entry in strays:
            if time.monotonic() > self._until:
                break
            self._spool.remove(entry.name)
            counts[entry.uid] = counts.get(entry.uid, 0) + 1
        if counts:
            most = sorted(counts, key=lambda uid: -counts[uid])[:3]
            whose = ", ".join(f"{counts[uid]} of {user(uid)}" for uid in most)
            rest = f", and of {len(counts) - 3} other users" if len(counts) > 3 else ""
            say(f"refused {sum(counts.values())} more (no requests, too many, or users without nodes): {whose}{rest}")


# --- start ----------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    here = os.environ.get("SLURMD_NODENAME")
    parser = argparse.ArgumentParser(prog="resihp-hook", description="Drains nodes that users' jobs found to be bad.")
    add = parser.add_argument
    add("--spool", default="/var/spool/resihp", help="the folder that users drop requests into [%(default)s]")
    add("--state", default="/var/lib/resihp-hook", help="a folder for what this remembers, root's own [%(default)s]")
    scope = parser.add_mutually_exclusive_group(required=here is None)
    scope.add_argument("--node", default=here, help="act on this node only [$SLURMD_NODENAME]")
    scope.add_argument("--all", action="store_true", help="act on all nodes")
    add("--conf", help="slurm.conf, where it is not in /etc/slurm")
    add("--remember", action="store_true", help="ask who holds what also when there is no request (cron on one host)")
    add("--shared", action="store_true", help="drain nodes that several users' jobs share, too")
    add("--window-s", type=float, default=900.0, help="how long ago 'has just held' may be [%(default)s]")
    add("--max-age-s", type=float, default=86400.0, help="older requests are refused [%(default)s]")
    add("--drained", type=int, default=8, help="nodes drained with our reason at the same time [%(default)s]")
    add("--user-drained", type=int, default=4, help="of them for one user [%(default)s]")
    add("--user-rate", type=int, default=8, help="requests of one user carried out in an hour [%(default)s]")
    add("--rate", type=int, default=32, help="requests carried out in an hour [%(default)s]")
    add("--dry-run", action="store_true", help="say what would be done; drains and removes nothing")
    return parser.parse_args(argv)


def alarm(_number: int, _frame: Any) -> NoReturn:
    raise OutOfTime(f"gave up after {ALARM_S} s")


def main(argv: Sequence[str] | None = None) -> int:
    """Always 0: a health check must not fail because of us. What is wrong is in the log."""
    global _mark
    options = parse(argv)
    _mark = "dry run: " if options.dry_run else ""
    syslog.openlog("resihp-hook", syslog.LOG_PID, syslog.LOG_DAEMON)
    signal.signal(signal.SIGALRM, alarm)
    signal.alarm(ALARM_S)
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
            return 0  # another run is at it
        now = time.time()
        memory = Memory(state, now, keep_s=options.window_s + options.max_age_s, dry=options.dry_run)
        memory.load()
        SiteHook(options, spool, SlurmCommands(options.conf), memory, now).run(names)
    except (Unsafe, NoAnswer, OutOfTime, OSError) as error:
        say(f"stopped, what is left waits for the next run: {error}")
    except Exception as error:  # noqa: BLE001 - a health check must not end with a traceback
        say(f"stopped by a mistake in the hook itself, please report it: {error!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
