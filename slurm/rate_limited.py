"""Rate limit for Slurm: one `Polite` client for each job stands between the callers and the controller, which all jobs
share.

Decides when to send a query and when to return the last answer. Only names without a recent answer are queried, a node
at most once a minute in steady state; a caller that knows of a change states how old an answer may be (`fresh_s`).
After a failure, a query is not sent again for a pause that doubles with each failure; during the pause the failure is
raised again, and no old view is returned. Orders that change something are always sent, and nothing is ever retried.

Implements the protocol `resihp.slurm.client.Slurm`, so that callers can use it like any other client. Safe to use from
several threads: threads that send the same query at the same time share one call.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, ParamSpec, TypeVar

from resihp.slurm.client import JobRequest, JobView, NodeChoice, NodeView, Reservation, Slurm
from resihp.slurm.errors import SlurmError

NODES_FRESH_S = 60.0
JOBS_FRESH_S = 15.0
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0

_View = TypeVar("_View")
_Answer = TypeVar("_Answer")
_Arguments = ParamSpec("_Arguments")


class _Pause:
    """The pause after failures of one kind of query, until which the query is not sent again."""

    def __init__(self) -> None:
        self._error: SlurmError | None = None
        self._failures = 0
        self._until = 0.0

    def check(self, now: float) -> None:
        """Raise the last failure again if the pause is not over."""
        if self._error is not None and now < self._until:
            raise copy.copy(self._error)

    def failed(self, error: SlurmError, now: float) -> None:
        self._error = error
        self._until = now + min(FIRST_PAUSE_S * 2**self._failures, LONGEST_PAUSE_S)
        self._failures = min(self._failures + 1, 30)

    def answered(self) -> None:
        self._error, self._failures = None, 0


class _Views(Generic[_View]):
    """Cached views of one kind by name, with the times at which they were fetched. A view is None if Slurm does not
    know the name."""

    def __init__(self, fetch: Callable[[list[str]], Mapping[str, _View]], clock: Callable[[], float]) -> None:
        self._fetch = fetch
        self._clock = clock
        self._lock = threading.Lock()
        self._views: dict[str, _View | None] = {}
        self._seen: dict[str, float] = {}
        self._pause = _Pause()

    def get(self, names: Iterable[str], fresh_s: float, urgent: bool = False) -> dict[str, _View]:
        wanted_names = list(dict.fromkeys(names))
        with self._lock:
            # Read the clock after waiting for the lock: another thread may have queried these names meanwhile.
            now = self._clock()
            stale_names = [name for name in wanted_names if name not in self._seen or now - self._seen[name] >= fresh_s]
            if stale_names:
                if not urgent:
                    self._pause.check(now)
                self._refresh(stale_names, now)
            return {name: view for name in wanted_names if (view := self._views[name]) is not None}

    def forget(self, name: str) -> None:
        """Make sure that the next query for this name is sent."""
        with self._lock:
            self._seen.pop(name, None)

    def _refresh(self, names: list[str], now: float) -> None:
        try:
            views = self._fetch(names)
        except SlurmError as error:
            self._pause.failed(error, self._clock())
            raise
        self._pause.answered()
        for name in names:
            self._views[name] = views.get(name)
            self._seen[name] = now


class Polite:
    """Rate-limited client (see the module). `calls` counts the calls sent to Slurm, by method name."""

    def __init__(
        self,
        slurm: Slurm,
        *,
        clock: Callable[[], float] = time.monotonic,
        nodes_fresh_s: float = NODES_FRESH_S,
        jobs_fresh_s: float = JOBS_FRESH_S,
    ) -> None:
        self.calls: Counter[str] = Counter()
        self._slurm = slurm
        self._clock = clock
        self._nodes_fresh_s = nodes_fresh_s
        self._jobs_fresh_s = jobs_fresh_s
        self._counting = threading.Lock()
        self._constant = threading.Lock()
        self._pauses = {"version": _Pause(), "cluster": _Pause(), "request": _Pause(), "reservations": _Pause()}
        self._version: tuple[int, int, int] | None = None
        self._cluster: str | None = None
        self._requests: dict[str, JobRequest] = {}
        self._nodes = _Views[NodeView](lambda names: self._count("nodes", slurm.nodes)(names), clock)
        self._jobs = _Views[JobView](lambda ids: self._count("jobs", slurm.jobs)(ids), clock)

    def version(self) -> tuple[int, int, int]:
        with self._constant:
            if self._version is None:
                self._version = self._guarded("version", self._slurm.version)
            return self._version

    def cluster(self) -> str:
        with self._constant:
            if self._cluster is None:
                self._cluster = self._guarded("cluster", self._slurm.cluster)
            return self._cluster

    def nodes(self, names: Sequence[str], *, fresh_s: float | None = None) -> Mapping[str, NodeView]:
        """Return the views of these nodes. `fresh_s`: how old an answer may be; 0 after a known change, None for the
        default."""
        usual = self._nodes_fresh_s
        return self._nodes.get(names, usual if fresh_s is None else fresh_s)

    def partition_nodes(self, partition: str) -> Mapping[str, NodeView]:
        return self._count("partition_nodes", self._slurm.partition_nodes)(partition)

    def drained(self) -> Mapping[str, NodeView]:
        """Return the drained nodes. Never cached, because a decision to drain, which is rare, depends on them."""
        return self._count("drained", self._slurm.drained)()

    def reservations(self) -> Sequence[Reservation]:
        """Return the reservations. Never cached: callers rarely ask."""
        return self._guarded("reservations", self._slurm.reservations)

    def job(self, job_id: str, *, fresh_s: float | None = None, urgent: bool = False) -> JobView | None:
        return self.jobs([job_id], fresh_s=fresh_s, urgent=urgent).get(job_id)

    def jobs(
        self, job_ids: Iterable[str], *, fresh_s: float | None = None, urgent: bool = False
    ) -> Mapping[str, JobView]:
        """Return the views of these jobs. `fresh_s` as for `nodes`; `urgent`: send the query even during the pause
        after a failure."""
        usual = self._jobs_fresh_s
        return self._jobs.get(job_ids, usual if fresh_s is None else fresh_s, urgent)

    def request(self, job_id: str) -> JobRequest:
        with self._constant:
            if job_id not in self._requests:
                self._requests[job_id] = self._guarded("request", lambda: self._slurm.request(job_id))
            return self._requests[job_id]

    def node_choice(self, job_id: str) -> NodeChoice:
        return self._count("node_choice", self._slurm.node_choice)(job_id)

    def gpus(self, job_id: str) -> Mapping[str, int]:
        return self._count("gpus", self._slurm.gpus)(job_id)

    def batch_script(self, job_id: str) -> str:
        return self._count("batch_script", self._slurm.batch_script)(job_id)

    def expand(self, nodelist: str) -> tuple[str, ...]:
        return self._count("expand", self._slurm.expand)(nodelist)

    def drain(self, node: str, reason: str) -> None:
        with self._changing(self._nodes, node):
            self._count("drain", self._slurm.drain)(node, reason)

    def undrain(self, node: str) -> None:
        with self._changing(self._nodes, node):
            self._count("undrain", self._slurm.undrain)(node)

    def keep_nodes(self, job_id: str, keep: Sequence[str]) -> None:
        with self._changing(self._jobs, job_id):
            self._count("keep_nodes", self._slurm.keep_nodes)(job_id, keep)

    def submit(self, script: Path, options: Sequence[str] = ()) -> str:
        return self._count("submit", self._slurm.submit)(script, options)

    def check_step(self, options: Sequence[str]) -> None:
        self._slurm.check_step(options)

    def requeue(self, job_id: str) -> None:
        with self._changing(self._jobs, job_id):
            self._count("requeue", self._slurm.requeue)(job_id)

    def exclude_nodes(self, job_id: str, nodes: Sequence[str]) -> None:
        with self._changing(self._jobs, job_id):
            self._count("exclude_nodes", self._slurm.exclude_nodes)(job_id, nodes)

    def cancel(self, job_id: str) -> None:
        with self._changing(self._jobs, job_id):
            self._count("cancel", self._slurm.cancel)(job_id)

    def runs_again(self, job_id: str) -> bool:
        return self._count("runs_again", self._slurm.runs_again)(job_id)

    def end_for_good(self, job_id: str) -> None:
        self._count("end_for_good", self._slurm.end_for_good)(job_id)

    def comment(self, job_id: str, text: str) -> None:
        """Set a job's comment. The cached views of the job stay valid."""
        self._count("comment", self._slurm.comment)(job_id, text)

    def _count(self, kind: str, method: Callable[_Arguments, _Answer]) -> Callable[_Arguments, _Answer]:
        with self._counting:
            self.calls[kind] += 1
        return method

    @staticmethod
    @contextmanager
    def _changing(views: _Views[NodeView] | _Views[JobView], name: str) -> Iterator[None]:
        """Discard the cached view of `name` after an order, whether or not the order succeeded."""
        try:
            yield
        finally:
            views.forget(name)

    def _guarded(self, kind: str, question: Callable[[], _Answer]) -> _Answer:
        """Send a query for a constant answer, unless the pause after a failure is not over."""
        pause = self._pauses[kind]
        pause.check(self._clock())
        try:
            answer = self._count(kind, question)()
        except SlurmError as error:
            pause.failed(error, self._clock())
            raise
        pause.answered()
        return answer
