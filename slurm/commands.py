"""Slurm through its own commands: `CommandLine` implements `resihp.slurm.client.Slurm` on a real cluster.

Decides which command carries out a query or order, and whether a failed command means no answer, a refusal, or a
refusal because of the caller's rights. Slurm prints its reasons as sentences, so this module matches sentences; an
unknown sentence counts as a refusal and is quoted. Never retries, caches or limits calls: `resihp.slurm.rate_limited`
does. Names and ids are checked before they are put on a command line, and no shell is used.

Measured with Slurm 22.05.8, 24.11.5 and 26.05.5. Fields are requested by name, so other versions since 20.11 should
give the same answers.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from resihp.slurm import releases
from resihp.slurm.client import JobRequest, JobView, NodeChoice, NodeView, Reservation, sanitised
from resihp.slurm.command_call import CompletedCall, call, query_environment, submit_environment
from resihp.slurm.errors import SlurmOutputError, SlurmRefusedError, SlurmUnavailableError, SlurmUsageError
from resihp.slurm.parsing import parse, parse_request, reservations

TIMEOUT_S = 10.0
COMMENT_TIMEOUT_S = 5.0
"""Shorter than TIMEOUT_S: the comment is only for people to read, and nothing should wait longer for it."""
MAX_NAMES_PER_CALL = 1000
"""Limit on the nodes or jobs on one command line; the kernel allows 128 KiB for each argument."""
MAX_SINGLE_CALLS = 8
"""Largest number of nodes or jobs for which each has a call of its own. For a single name, slurmctld sends one record
(REQUEST_NODE_INFO_SINGLE, REQUEST_JOB_INFO_SINGLE). For several names it sends its whole table, and the command picks
the rows; `scontrol show node` does so for a single name as well (22.05.8, 24.11.5, 26.05.5). On a cluster of 5,000
nodes, the table takes 5 to 8 ms and 1.7 MB, a single node 0.05 to 0.2 ms and 4 KB. Each call is two or three RPCs, and
a site that limits them (rl_enable) allows 30 at once by default."""

_NO_ANSWER = (
    "unable to contact slurm controller",
    "unable to establish",
    "unable to connect",
    "unable to process configuration",
    "socket timed out",
    "connection refused",
    "connection reset",
    "connection timed out",
    "connection failure",
    "shutdown failure",
    "receive failure",
    "send failure",
    "zero bytes were transmitted",
    "no route to host",
    "network is unreachable",
    "temporarily unable",
    "temporarily unavailable",
    "standby mode",
    # From munge, or between clusters: the controller has not checked the caller's rights.
    "munge encode failed",
    "protocol authentication error",
    "invalid authentication credential",
    # scontrol prints this if no answer ever came (22.05.8, slurmctld stopped), and for some refusals of `update`.
    "unexpected message received",
)
_PERMISSION = ("invalid user id", "permission denied", "access denied", "operation not permitted", "not authorized")
_SPEAKER = re.compile(r"^\S+: (?:error: |fatal: )?")
_UNKNOWN_JOB = "invalid job id specified"

_FOR_NOW = "try again in a bit"
"""Part of the refusal to change a requeued job, in lower case, until accounting knows the job."""
_NO_SUCH_OPTION = ("unrecognized", "invalid", "ambiguous", "argument")
"""Words, in lower case, of srun's complaints about its options. Without a controller it complains in other words."""


class CommandLine:
    """Slurm's commands. Safe to use from several threads.

    `bin`: folder of the commands, instead of PATH. `environment`: replaces this process's environment.
    """

    def __init__(
        self,
        *,
        timeout_s: float = TIMEOUT_S,
        bin: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self._bin = bin
        base = os.environ if environment is None else environment
        self._environment = query_environment(base)
        self._submit_environment = submit_environment(base)
        # A node list always expands to the same names, and a job's list is expanded again and again.
        self._expanded: dict[str, tuple[str, ...]] = {}
        self._version: releases.Version | None = None
        self._lock = threading.Lock()

    def version(self) -> tuple[int, int, int]:
        if self._version is None:
            self._version = parse.version(self._ask("slurm", "sinfo", "--version"))
        return self._version

    def cluster(self) -> str:
        return parse.cluster(self._ask("slurm", "scontrol", "show", "config"))

    def nodes(self, names: Sequence[str]) -> Mapping[str, NodeView]:
        views: dict[str, NodeView] = {}
        for some in _portions(filter(parse.is_node, names)):
            # --all: also nodes in partitions that are hidden from us. --noconvert: prints 2048 CPUs, not 2K.
            options = ["-h", "-N", "--all", "--noconvert", "-n", ",".join(some), "-O", parse.NODE_FORMAT]
            views_by_name = parse.nodes(self._ask("slurm", "sinfo", *options))
            views |= {name: view for name, view in views_by_name.items() if name in some}
        return views

    def partition_nodes(self, partition: str) -> Mapping[str, NodeView]:
        if not parse.PARTITION_LIST.fullmatch(partition):
            raise SlurmRefusedError(f"partition {partition[:80]!a}: no partition has such a name; try: sinfo")
        options = ["-h", "-N", "--noconvert", "-p", partition, "-O", parse.PARTITION_NODE_FORMAT]
        return parse.partition_nodes(self._ask(f"partition {partition}", "sinfo", *options))

    def drained(self) -> Mapping[str, NodeView]:
        options = ["-h", "-N", "--all", "--noconvert", "-t", "drain", "-O", parse.NODE_FORMAT]
        views_by_name = parse.nodes(self._ask("slurm", "sinfo", *options))
        for view in views_by_name.values():
            if view.unreadable:  # it is draining, but the reason and its author cannot be parsed
                raise SlurmOutputError(view.unreadable)
        return {name: view for name, view in views_by_name.items() if view.draining}

    def reservations(self) -> Sequence[Reservation]:
        answer = self._ask("slurm: reservations", "scontrol", "show", "reservation", "--oneliner")
        return [
            msgspec.structs.replace(reservation, nodes=self._expand(nodelist) if nodelist else ())
            for reservation, nodelist in reservations.reservations(answer)
        ]

    def job(self, job_id: str) -> JobView | None:
        return self.jobs([job_id]).get(job_id)

    def jobs(self, job_ids: Iterable[str]) -> Mapping[str, JobView]:
        views: dict[str, JobView] = {}
        for some in _portions(filter(parse.JOB_ID.fullmatch, job_ids)):
            options = ["-h", "--all", "-t", "all", "-j", ",".join(some), "-O", parse.JOB_FORMAT]
            answer = self._call("squeue", *options)
            if answer.status != 0 and _UNKNOWN_JOB in answer.complaint.lower():
                # squeue fails only if it is queried for a single unknown job; among several, it omits unknown jobs.
                continue
            for ids, view, nodelist in parse.jobs(self._checked(answer, "slurm", "squeue")):
                for job_id in ids.intersection(some):
                    nodes = self._expand(nodelist) if nodelist else ()
                    views[job_id] = msgspec.structs.replace(view, id=job_id, nodes=nodes)
        return views

    def request(self, job_id: str) -> JobRequest:
        self._check_job(job_id)
        options = ["-h", "--all", "--noconvert", "-t", "all", "-j", job_id, "-O", parse_request.REQUEST_FORMAT]
        return parse_request.request(self._ask(f"job {job_id}: its request cannot be read", "squeue", *options), job_id)

    def node_choice(self, job_id: str) -> NodeChoice:
        self._check_job(job_id)
        answer = self._ask(f"job {job_id}: its nodes cannot be read", "scontrol", "show", "job", job_id)
        return parse.node_choice(answer, self._expand)

    def gpus(self, job_id: str) -> Mapping[str, int]:
        self._check_job(job_id)
        answer = self._ask(f"job {job_id}: its GPUs cannot be read", "scontrol", "show", "job", "-d", job_id)
        return {node: count for nodelist, count in parse.job_gpus(answer) for node in self._expand(nodelist)}

    def batch_script(self, job_id: str) -> str:
        self._check_job(job_id)
        subject = f"job {job_id}: its batch script cannot be read"
        answer = self._call("scontrol", "write", "batch_script", job_id, "-")
        if not answer.output and answer.complaint:
            # scontrol exits with 0 all the same.
            raise failure(subject, "scontrol", answer.complaint)
        return parse.script(self._checked(answer, subject, "scontrol"), job_id)

    def expand(self, nodelist: str) -> tuple[str, ...]:
        nodelist = parse.node_list(nodelist)
        if not parse.NODE_LIST.fullmatch(nodelist):
            raise SlurmOutputError(f"node list {nodelist[:80]!a}: not a node list")
        return self._expand(nodelist)

    def drain(self, node: str, reason: str) -> None:
        text = sanitised(reason)
        command = ["update", f"NodeName={self._checked_node(node)}", "State=DRAIN", f"Reason={text}"]
        self._ask(f"node {node}: not drained", "scontrol", *command)

    def undrain(self, node: str) -> None:
        # 24.11.5 without accounting would keep the reason; "none" is Slurm's own word for a missing reason.
        command = ["update", f"NodeName={self._checked_node(node)}", "State=UNDRAIN", "Reason=none"]
        self._ask(f"node {node}: not undrained", "scontrol", *command)

    def keep_nodes(self, job_id: str, keep: Sequence[str]) -> None:
        self._check_job(job_id)
        names = ",".join(self._checked_node(node) for node in keep)
        if not names:
            raise SlurmRefusedError(f"job {job_id}: cannot be left without nodes; try: scancel {job_id}")
        self._ask(
            f"job {job_id}: its nodes were not changed", "scontrol", "update", f"JobId={job_id}", f"NodeList={names}"
        )

    def submit(self, script: Path, options: Sequence[str] = ()) -> str:
        # Absolute, so that a script's name is not taken for an option.
        argv = ["sbatch", "--parsable", *options, "--", str(script.absolute())]
        answer = self._call(*argv, environment=self._submit_environment)
        return parse.submitted(self._checked(answer, f"{script}: not submitted", "sbatch"))

    def check_step(self, options: Sequence[str]) -> None:
        answer = self._call("srun", *options, "--help")
        if answer.status and any(word in answer.complaint.lower() for word in _NO_SUCH_OPTION):
            complaint = answer.complaint.partition(' Try "')[0][:200]
            raise SlurmUsageError(f"[slurm] step_extra: {complaint}; correct it in job.toml")

    def requeue(self, job_id: str) -> None:
        self._check_job(job_id)
        answer = self._call("scontrol", "requeue", job_id)
        if "is pending execution" not in answer.complaint.lower():  # else it is pending already, as wanted
            self._checked(answer, f"job {job_id}: not requeued", "scontrol")

    def exclude_nodes(self, job_id: str, nodes: Sequence[str]) -> None:
        self._check_job(job_id)
        names = ",".join(self._checked_node(node) for node in nodes)
        subject = f"job {job_id}: the nodes that it excludes were not changed"
        self._ask(subject, "scontrol", "update", f"JobId={job_id}", f"ExcNodeList={names}")

    def cancel(self, job_id: str) -> None:
        self._check_job(job_id)
        self._ask(f"job {job_id}: not cancelled", "scancel", job_id)

    def runs_again(self, job_id: str) -> bool:
        self._check_job(job_id)
        if not releases.of(self.version()).keeps_preemption:
            return False
        options = ["-h", "--all", "-j", job_id, "-O", parse.PREEMPTION_FORMAT]
        preempted = parse.preemption(self._ask(f"job {job_id}", "squeue", *options))
        if not preempted.now:
            return False
        settings = parse.settings(self._ask("slurm", "scontrol", "show", "config"))
        kind, mode = settings.get("PreemptType", ""), settings.get("PreemptMode", "")
        if kind == "preempt/partition_prio":
            partition_text = self._ask("slurm", "scontrol", "show", "partition", "-o", "--", preempted.partition)
            mode = parse.partition_mode(partition_text)
        elif kind == "preempt/qos":
            own = ["-nP", "show", "qos", f"name={preempted.qos}", "format=preemptmode"]
            qos_mode = parse.qos_mode(self._ask("slurm", "sacctmgr", *own))
            mode = mode if qos_mode == "cluster" else qos_mode
        # Slurm holds a job that it has started this many times.
        most = settings.get("MaxBatchRequeue", "")
        return "requeue" in mode.lower().split(",") and most.isdigit() and preempted.tries < int(most)

    def end_for_good(self, job_id: str) -> None:
        self._check_job(job_id)
        if not releases.of(self.version()).expedites:
            return
        if parse.expedited(self._ask(f"job {job_id}", "scontrol", "show", "job", job_id)):
            self._ask(f"job {job_id}: may be held", "scontrol", "update", f"JobId={job_id}", "Requeue=0")

    def comment(self, job_id: str, text: str) -> None:
        self._check_job(job_id)
        line = "".join(c if c.isprintable() else " " for c in text)
        answer = self._call(
            *("scontrol", "update", f"JobId={job_id}", f"Comment={line}"),
            timeout_s=min(COMMENT_TIMEOUT_S, self.timeout_s),
        )
        self._checked(answer, f"job {job_id}: its comment was not changed", "scontrol")

    def _expand(self, nodelist: str) -> tuple[str, ...]:
        with self._lock:
            names = self._expanded.get(nodelist)
        if names is None:
            names = parse.hostnames(self._ask("slurm", "scontrol", "show", "hostnames", nodelist), nodelist)
            with self._lock:
                if len(self._expanded) > MAX_NAMES_PER_CALL:
                    self._expanded.clear()
                self._expanded[nodelist] = names
        return names

    def _ask(self, subject: str, *argv: str) -> bytes:
        """Return the output of a command. Raises SlurmError if it fails, with a message that begins with `subject`."""
        return self._checked(self._call(*argv), subject, argv[0])

    def _call(
        self, *argv: str, environment: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> CompletedCall:
        program = argv[0] if self._bin is None else str(self._bin / argv[0])
        environment = self._environment if environment is None else environment
        return call([program, *argv[1:]], environment=environment, timeout_s=timeout_s or self.timeout_s)

    @staticmethod
    def _checked(answer: CompletedCall, subject: str, command: str) -> bytes:
        if answer.status < 0:
            raise SlurmUnavailableError(f"{subject}: {command} was ended by signal {-answer.status}")
        if answer.status > 0:
            raise failure(subject, command, answer.complaint)
        return answer.output

    @staticmethod
    def _checked_node(name: str) -> str:
        if not parse.is_node(name):
            raise SlurmRefusedError(f"node {name[:80]!a}: no node has such a name; try: sinfo -N")
        return name

    @staticmethod
    def _check_job(job_id: str) -> None:
        if not parse.JOB_ID.fullmatch(job_id):
            raise SlurmRefusedError(f"job {job_id[:80]!a}: no job has such an id; try: squeue --me")


def failure(subject: str, command: str, complaint: str) -> SlurmOutputError | SlurmRefusedError | SlurmUnavailableError:
    """Return the error that corresponds to a failed command's standard error."""
    lowered = complaint.lower()
    # Some complaints begin with the command's name, some do not.
    text = f"{subject}: {command}: {_SPEAKER.sub('', complaint)[:300]}"
    if not complaint:
        return SlurmOutputError(f"{subject}: {command} failed without a message")
    if any(sentence in lowered for sentence in _NO_ANSWER):
        return SlurmUnavailableError(f"{text}; try: scontrol ping")
    if any(sentence in lowered for sentence in _PERMISSION):
        return SlurmRefusedError(f"{text}; ask a Slurm operator, or the job's owner", permission=True)
    return SlurmRefusedError(text, for_now=_FOR_NOW in lowered)


def _portions(items: Iterable[str]) -> Iterator[list[str]]:
    """Return the distinct names or ids in portions, each for one call."""
    distinct = list(dict.fromkeys(items))
    size = 1 if len(distinct) <= MAX_SINGLE_CALLS else MAX_NAMES_PER_CALL
    for start in range(0, len(distinct), size):
        yield distinct[start : start + size]
