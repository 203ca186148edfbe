"""Slurm in memory, for tests: nodes, jobs, the rights of whoever asks, and outages.

Keeps the protocol of `resihp.slurm.client.Slurm` and passes the same contract tests as
`resihp.slurm.commands.CommandLine`; where they say nothing it does what Slurm 22.05.8 was seen to do. Time does not
pass here and nothing is scheduled: a test says what happens (`start`, `finish`, `set_node`).
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from resihp.slurm import releases
from resihp.slurm.client import Gres, JobRequest, JobView, NodeChoice, NodeView, Reservation, sanitised
from resihp.slurm.errors import SlurmOutputError, SlurmRefusedError, SlurmUnavailableError, SlurmUsageError
from resihp.slurm.parsing.parse import JOB_ID, NODE_LIST, PARTITION_LIST, is_node, node_list

_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?", re.ASCII)
_PART = re.compile(r"([^\[\],]+)(?:\[([0-9,-]+)\])?", re.ASCII)
_ENDED = frozenset({"completed", "cancelled", "failed", "timeout", "node_fail", "preempted"})


class FakeSlurm:
    """See the module. Every method counts in `calls` under its name, also when it fails.

    `user` asks; `operator` says whether as one that may change nodes and others' jobs. `unavailable`: no answer, and
    nothing happens. `swallow_answers`: no answer, but what was asked happens. `refuse` maps a method's name to the
    words of a refusal.
    """

    def __init__(
        self,
        nodes: Iterable[NodeView | str] = (),
        *,
        user: str = "trainer",
        operator: bool = False,
        cluster: str = "fake",
        version: tuple[int, int, int] = (22, 5, 8),
    ) -> None:
        views = [NodeView(name=n, state="idle", address=n, cpus=16) if isinstance(n, str) else n for n in nodes]
        self.node_views = {view.name: view for view in views}
        self.job_views: dict[str, JobView] = {}
        self.job_requests: dict[str, JobRequest] = {}
        """What jobs asked for, by the options that they were submitted with; a test may say something else."""
        self.node_choices: dict[str, NodeChoice] = {}
        """Nodes that jobs request or exclude by name; `submit` takes them from its options."""
        self.reserved: list[Reservation] = []
        """Reservations, as a test has them made."""
        self.scripts: dict[str, str] = {}
        """Batch scripts by job."""
        self.job_gpus: dict[str, dict[str, int]] = {}
        """How many GPUs jobs have on their nodes."""
        self.submissions: list[tuple[str, Path, tuple[str, ...]]] = []
        """(job, script, options) of each `submit`."""
        self.calls: Counter[str] = Counter()
        self.user = user
        self.operator = operator
        self.unavailable = False
        self.swallow_answers = False
        self.refuse: dict[str, str] = {}
        self._cluster = cluster
        self._version = version
        self._lock = threading.RLock()
        self._next = 1

    # What a test makes happen.

    def set_node(self, name: str, **changes: Any) -> NodeView:
        """Change a node's view: `set_node("n3", state="down", flags=frozenset({"not_responding"}))`."""
        with self._lock:
            self.node_views[name] = msgspec.structs.replace(self.node_views[name], **changes)
            return self.node_views[name]

    def add_job(self, *nodes: str, script: str | None = None, **view: Any) -> str:
        """A job of `user` on these nodes, running; without nodes pending. `script` makes it a batch job."""
        with self._lock:
            job_id = view.pop("id", None) or self._new_id()
            state = "pending"
            self.job_views[job_id] = JobView(**{"id": job_id, "name": "job", "user": self.user, "state": state, **view})
            if script is not None:
                self.scripts[job_id] = script
            if nodes:
                self.start(job_id, *nodes)
            return str(job_id)

    def start(self, job_id: str, *nodes: str) -> None:
        """Slurm gives a pending job nodes, and it runs."""
        self.set_job(job_id, state="running", nodes=nodes, batch_host=nodes[0], why="")
        for node in nodes:
            self.set_node(node, state="allocated")

    def finish(self, job_id: str, state: str = "completed") -> None:
        """A job ends; its nodes are free again."""
        with self._lock:
            held = self.job_views[job_id].nodes
            self.set_job(job_id, state=state)
            self._free(held)

    def set_job(self, job_id: str, **changes: Any) -> JobView:
        """Change a job's view, and nothing else."""
        with self._lock:
            self.job_views[job_id] = msgspec.structs.replace(self.job_views[job_id], **changes)
            return self.job_views[job_id]

    # The protocol.

    def version(self) -> tuple[int, int, int]:
        # Needs no controller.
        self.calls["version"] += 1
        return self._version

    def cluster(self) -> str:
        self._called("cluster")
        self._answer()
        return self._cluster

    def nodes(self, names: Sequence[str]) -> Mapping[str, NodeView]:
        with self._lock:
            self._called("nodes")
            self._answer()
            return {name: self.node_views[name] for name in names if name in self.node_views}

    def partition_nodes(self, partition: str) -> Mapping[str, NodeView]:
        with self._lock:
            self._called("partition_nodes")
            if not PARTITION_LIST.fullmatch(partition):
                raise SlurmRefusedError(f"partition {partition!a}: no partition has such a name")
            self._answer()
            return {
                name: msgspec.structs.replace(view, address="", reason="", reason_by="", reason_at=None)
                for name, view in self.node_views.items()
                if "main" in partition.split(",")
            }

    def drained(self) -> Mapping[str, NodeView]:
        with self._lock:
            self._called("drained")
            self._answer()
            return {name: view for name, view in self.node_views.items() if view.draining}

    def reservations(self) -> Sequence[Reservation]:
        with self._lock:
            self._called("reservations")
            self._answer()
            return tuple(self.reserved)

    def job(self, job_id: str) -> JobView | None:
        return self.jobs([job_id]).get(job_id)

    def jobs(self, job_ids: Iterable[str]) -> Mapping[str, JobView]:
        with self._lock:
            self._called("jobs")
            self._answer()
            return {job_id: self.job_views[job_id] for job_id in job_ids if job_id in self.job_views}

    def request(self, job_id: str) -> JobRequest:
        with self._lock:
            self._called("request")
            self._valid_job(job_id)
            if job_id not in self.job_views:
                raise SlurmRefusedError(f"job {job_id}: its request cannot be read: Invalid job id specified")
            self._answer()
            return self.job_requests.get(job_id, JobRequest(partition="main"))

    def node_choice(self, job_id: str) -> NodeChoice:
        with self._lock:
            self._called("node_choice")
            self._valid_job(job_id)
            if job_id not in self.job_views:
                raise SlurmRefusedError(f"job {job_id}: its nodes cannot be read: Invalid job id specified")
            self._answer()
            return self.node_choices.get(job_id, NodeChoice(partition="main"))

    def gpus(self, job_id: str) -> Mapping[str, int]:
        with self._lock:
            self._called("gpus")
            self._valid_job(job_id)
            if job_id not in self.job_views:
                raise SlurmRefusedError(f"job {job_id}: its GPUs cannot be read: Invalid job id specified")
            self._answer()
            return {node: count for node, count in self.job_gpus.get(job_id, {}).items() if count}

    def batch_script(self, job_id: str) -> str:
        with self._lock:
            self._called("batch_script")
            self._own(job_id, "its batch script cannot be read")
            if job_id not in self.scripts:
                raise SlurmRefusedError(f"job {job_id}: its batch script cannot be read: Job script not specified")
            self._answer()
            return self.scripts[job_id]

    def expand(self, nodelist: str) -> tuple[str, ...]:
        # Needs no controller.
        self.calls["expand"] += 1
        return expand(nodelist)

    def drain(self, node: str, reason: str) -> None:
        with self._lock:
            self._called("drain")
            view = self._operated(node, "not drained")
            by = {"reason_by": self.user, "reason_at": float(int(time.time()))}
            self.set_node(node, flags=view.flags | {"drain"}, reason=sanitised(reason), **by)
            self._answer()

    def undrain(self, node: str) -> None:
        with self._lock:
            self._called("undrain")
            view = self._operated(node, "not undrained")
            self.set_node(node, flags=view.flags - {"drain", "fail"}, reason="", reason_by="", reason_at=None)
            self._answer()

    def keep_nodes(self, job_id: str, keep: Sequence[str]) -> None:
        with self._lock:
            self._called("keep_nodes")
            view = self._own(job_id, "its nodes were not changed")
            if view.state != "running":
                raise SlurmRefusedError(f"job {job_id}: its nodes were not changed: Job is not running")
            if not keep or not set(keep) <= set(view.nodes) or view.batch_host not in keep:
                raise SlurmRefusedError(f"job {job_id}: its nodes were not changed: Invalid node name specified")
            self.set_job(job_id, nodes=tuple(node for node in view.nodes if node in keep))
            self._free(node for node in view.nodes if node not in keep)
            self._answer()

    def submit(self, script: Path, options: Sequence[str] = ()) -> str:
        with self._lock:
            self._called("submit")
            try:
                text = script.read_text()
            except OSError as error:
                raise SlurmRefusedError(f"{script}: not submitted: Unable to open file: {error.strerror}") from None
            names = [option.split("=", 1)[1] for option in options if option.startswith("--job-name=")]
            name = names[-1] if names else script.name
            job_id = self.add_job(script=text, name=name, why="Priority", submitted_at=float(int(time.time())))
            self.job_requests[job_id] = asked(options)
            given = dict(option.removeprefix("--").split("=", 1) for option in options if "=" in option)
            self.node_choices[job_id] = NodeChoice(
                partition=given.get("partition", "main"),
                requested=expand(given["nodelist"]) if "nodelist" in given else (),
                excluded=expand(given["exclude"]) if "exclude" in given else (),
                contiguous="--contiguous" in options,
            )
            self.submissions.append((job_id, script, tuple(options)))
            self._answer()
            return job_id

    def check_step(self, options: Sequence[str]) -> None:
        """Refuse the option that has no meaning."""
        if "--nonsense" in options:
            raise SlurmUsageError("[slurm] step_extra: srun: unrecognized option '--nonsense'")

    def requeue(self, job_id: str) -> None:
        with self._lock:
            self._called("requeue")
            view = self._own(job_id, "not requeued")
            if view.state == "pending":
                self._answer()
                return
            self.set_job(job_id, state="pending", nodes=(), batch_host="", why="BeginTime", restarts=view.restarts + 1)
            self._free(view.nodes)
            self._answer()

    def exclude_nodes(self, job_id: str, nodes: Sequence[str]) -> None:
        with self._lock:
            self._called("exclude_nodes")
            subject = "the nodes that it excludes were not changed"
            view = self._own(job_id, subject)
            if not set(nodes) <= set(self.node_views):
                raise SlurmRefusedError(f"job {job_id}: {subject}: Invalid node name specified")
            if view.state != "pending":
                raise SlurmRefusedError(f"job {job_id}: {subject}: Job is no longer pending execution")
            before = self.node_choices.get(job_id, NodeChoice(partition="main"))
            self.node_choices[job_id] = msgspec.structs.replace(before, excluded=tuple(sorted(nodes)))
            self._answer()

    def cancel(self, job_id: str) -> None:
        with self._lock:
            self._called("cancel")
            self._valid_job(job_id)
            # Of a job that is not there, or no more, scancel does not complain.
            view = self.job_views.get(job_id)
            if view is not None and view.state not in _ENDED:
                self._own(job_id, "not cancelled")
                self.finish(job_id, "cancelled")
            self._answer()

    def runs_again(self, job_id: str) -> bool:
        with self._lock:
            self._called("runs_again")
            view = self._own(job_id, "unknown")
            self._answer()
            return view.preempted and releases.of(self._version).keeps_preemption

    def end_for_good(self, job_id: str) -> None:
        with self._lock:
            self._called("end_for_good")
            self._own(job_id, "may be held")
            self._answer()

    def comment(self, job_id: str, text: str) -> None:
        with self._lock:
            self._called("comment")
            view = self._own(job_id, "its comment was not changed")
            if view.state in _ENDED | {"completing"}:
                raise SlurmRefusedError(f"job {job_id}: its comment was not changed: Job has already finished")
            self.set_job(job_id, comment="".join(c if c.isprintable() else " " for c in text))
            self._answer()

    # Rights and outages.

    def _called(self, kind: str) -> None:
        with self._lock:
            self.calls[kind] += 1
            if self.unavailable:
                raise SlurmUnavailableError("slurm: Unable to contact slurm controller; try: scontrol ping")
            if kind in self.refuse:
                text = self.refuse[kind]
                raise SlurmRefusedError(f"slurm: {text}", for_now="try again" in text)

    def _answer(self) -> None:
        if self.swallow_answers:
            raise SlurmUnavailableError("slurm: Socket timed out on send/recv operation; try: scontrol ping")

    def _operated(self, node: str, what: str) -> NodeView:
        """A node that this user may change."""
        if not is_node(node):
            raise SlurmRefusedError(f"node {node!a}: no node has such a name")
        if not self.operator:
            raise SlurmRefusedError(f"node {node}: {what}: Invalid user id", permission=True)
        if node not in self.node_views:
            raise SlurmRefusedError(f"node {node}: {what}: Invalid node name specified")
        return self.node_views[node]

    def _own(self, job_id: str, what: str) -> JobView:
        """A job that this user may change."""
        self._valid_job(job_id)
        view = self.job_views.get(job_id)
        if view is None:
            raise SlurmRefusedError(f"job {job_id}: {what}: Invalid job id specified")
        if view.user != self.user and not self.operator:
            raise SlurmRefusedError(f"job {job_id}: {what}: Access/permission denied", permission=True)
        return view

    @staticmethod
    def _valid_job(job_id: str) -> None:
        if not JOB_ID.fullmatch(job_id):
            raise SlurmRefusedError(f"job {job_id!a}: no job has such an id")

    def _new_id(self) -> str:
        while str(self._next) in self.job_views:
            self._next += 1
        return str(self._next)

    def _free(self, nodes: Iterable[str]) -> None:
        for node in nodes:
            if self.node_views[node].state == "allocated":
                self.set_node(node, state="idle")


def asked(options: Iterable[str]) -> JobRequest:
    """What some of sbatch's options ask for, in a cluster whose only partition is `main`."""
    given = dict(option.removeprefix("--").split("=", 1) for option in options if "=" in option)
    kind, _, count = given.get("gpus-per-node", "").rpartition(":")
    return JobRequest(
        partition=given.get("partition", "main"),
        account=given.get("account", ""),
        constraint=given.get("constraint", ""),
        licenses=given.get("licenses", ""),
        wckey=given.get("wckey", ""),
        network=given.get("network", ""),
        exclusive="node" if "--exclusive" in options else given.get("exclusive", ""),
        oversubscribe="--oversubscribe" in options,
        gres=(Gres("gpu", kind, int(count)),) if count else (),
        memory_mb=int(given.get("mem", 0)),
        memory_per_gpu_mb=int(given.get("mem-per-gpu", 0)),
    )


def expand(nodelist: str) -> tuple[str, ...]:
    """Names in a list such as `n[1-3,7],m[01-02]`: one range at the end of each name, as nearly all clusters have.

    Raises SlurmOutputError for what is not such a list.
    """
    broken = SlurmOutputError(f"node list {nodelist[:80]!a}: not a node list")
    nodelist = node_list(nodelist)
    if not NODE_LIST.fullmatch(nodelist):
        raise broken
    names: list[str] = []
    rest = nodelist
    while rest:
        part = _PART.match(rest)
        if part is None:
            raise broken
        prefix, ranges = part.groups()
        numbers = [""] if ranges is None else [number for text in ranges.split(",") for number in _numbers(text)]
        if not numbers:
            raise broken
        names += [prefix + number for number in numbers]
        rest = rest[part.end() :]
        if (rest and not rest.startswith(",")) or rest == ",":
            raise broken
        rest = rest.lstrip(",")
    return tuple(names)


def _numbers(text: str) -> list[str]:
    """`08-11` is 08, 09, 10, 11. Empty for what is not a range."""
    found = _RANGE.fullmatch(text)
    if found is None:
        return []
    first, last = found.group(1), found.group(2) or found.group(1)
    if int(last) < int(first) or int(last) - int(first) >= 65536:
        return []
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
