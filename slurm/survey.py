"""What a cluster is like, asked of Slurm once: its settings, its partitions, our rights, its nodes from the inside.

For `resihp doctor` and `resihp init`, which look before a job is there; a job itself asks through `slurm.client`.
Raises the same errors: SlurmUnavailableError for no answer, SlurmRefusedError, SlurmOutputError. Changes nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from slurm import limits, parse
from slurm.command_call import CompletedCall, call, own_environment, query_environment, submit_environment
from slurm.commands import TIMEOUT_S, failure
from slurm.errors import SlurmOutputError, SlurmRefusedError, SlurmUnavailableError
from slurm.limits import Association, Limits

FIELD, RECORD = parse.FIELD, parse.RECORD
_FIELDS = ("Partition", "Available", "Time", "DefaultTime", "NodeAIOT", "Gres", "CPUs", "Memory")
FORMAT = ",".join(f"{field}:{RECORD if field == _FIELDS[-1] else FIELD}" for field in _FIELDS)
"""For `sinfo --Format`."""

_USER = re.compile(r"([^()]+)\((\d+)\)")
_SOCKET = re.compile(r"\bsocket=([^,\s]+)")
_TO_START = re.compile(r"to start at .*")
_RANKS = ("operator", "administrator")
_RULE = re.compile(r"(\w+)=(\S*)")
_TYPE = re.compile(r"\bgpu:(?!no_consume\b|[0-9]+[KMG]?(?![^:(),\s]))([^:(),\s]+)", re.ASCII)
"""The a100 in gpu:a100:8."""
_GENERATIONS = 32
"""How many accounts above a user's are looked at."""


class PartitionView(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes of a partition that are alike; a partition of several kinds has several. Counts are of one node.

    `nodes_idle` of `nodes` have nothing to do. `seconds`: a job's time limit, None for none; `default_seconds` that of
    a job that names none.
    """

    name: str
    default: bool
    up: bool
    nodes: int
    nodes_idle: int
    gpus: int
    cpus: int
    memory_mb: int
    seconds: float | None
    default_seconds: float | None
    gpu_types: tuple[str, ...] = ()
    unreadable: str = ""
    """Why `gpus` is not known, and 0; empty where it is."""


class PartitionRules(msgspec.Struct, frozen=True, kw_only=True):
    """What a partition does with jobs. None is no limit; `seconds_of_grace` comes before a preemption.

    `preempt_mode` in lower case; `qos` is one that bounds all its jobs, empty for none.
    """

    name: str
    max_nodes: int | None
    max_seconds: float | None
    seconds_of_grace: int
    preempt_mode: str
    qos: str


class Survey(Protocol):
    """What is asked."""

    def settings(self) -> Mapping[str, str]:
        """slurm.conf as the controller has it, by key."""

    def partitions(self) -> Sequence[PartitionView]:
        """Those that this user can see, in Slurm's order."""

    def rules(self, partition: str) -> PartitionRules:
        """Of one that this user can see."""

    def limits(self, user: str, account: str, qos: str, partition: PartitionRules, cluster: str) -> Limits:
        """What accounting allows this user's job; `account` and `qos` empty for the usual ones."""

    def is_operator(self, user: str, settings: Mapping[str, str]) -> bool:
        """Whether this user may drain nodes."""

    def munge(self, settings: Mapping[str, str]) -> None:
        """Have a credential made and checked on this machine, by the munged that Slurm uses."""

    def would_start(self, options: Sequence[str]) -> str:
        """When and where Slurm would start a job with these options of sbatch, in its words. Submits nothing.

        Raises SlurmRefusedError when it would not take it.
        """

    def on_nodes(self, job_id: str, nodes: Sequence[str], argv: Sequence[str], *, timeout_s: float) -> str:
        """Run a command once on each node of one's own running job, beside what runs there; what they all wrote."""


class CommandSurvey:
    """By Slurm's commands, as `slurm.commands.CommandLine`."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S, environment: Mapping[str, str] | None = None) -> None:
        self.timeout_s = timeout_s
        self._base = os.environ if environment is None else environment
        self._environment = query_environment(self._base)

    def settings(self) -> Mapping[str, str]:
        return parse.settings(self._ask("scontrol", "show", "config"))

    def partitions(self) -> Sequence[PartitionView]:
        return partitions(self._ask("sinfo", "-h", "--noconvert", "-O", FORMAT))

    def rules(self, partition: str) -> PartitionRules:
        return rules(self._ask("scontrol", "--oneliner", "show", "partition", partition), partition)

    def limits(self, user: str, account: str, qos: str, partition: PartitionRules, cluster: str) -> Limits:
        account = account or self._of_accounts("user", f"name={user}", "format=defaultaccount").decode().strip()
        rows = self._associations(cluster, account, user) if account else []
        # One that is only for this partition goes before the one for all.
        own = next((row for row in rows if row.partition == partition.name), None)
        own = own or next((row for row in rows if not row.partition), None)
        if own is None:
            return Limits(account=account, qos=qos, found=())
        found, unseen, account = list(own.limits), "", own.account
        for _ in range(_GENERATIONS):
            above = next((row for row in self._associations(cluster, account, "") if not row.user), None)
            if above is None:
                unseen = account
                break
            found += above.limits
            account = above.parent
            if not account:
                break
        qos = qos or own.qos
        known = limits.qos(self._of_accounts("qos", f"format={limits.QOS_FORMAT}"))
        for name in dict.fromkeys((partition.qos, qos or "normal")):
            found += known.get(name, ())
        return Limits(account=own.account, qos=qos, found=tuple(found), unseen=unseen)

    def _associations(self, cluster: str, account: str, user: str) -> list[Association]:
        named = (f"cluster={cluster}", f"account={account}", f"user={user}")
        return limits.associations(self._of_accounts("assoc", *named, f"format={limits.ASSOCIATION_FORMAT}"))

    def _of_accounts(self, *wanted: str) -> bytes:
        answer = self._call("sacctmgr", "--noheader", "--parsable2", "show", *wanted)
        if answer.status < 0:
            raise SlurmUnavailableError(f"slurm: sacctmgr was ended by signal {-answer.status}")
        # It may end with 0 although slurmdbd has not answered.
        if answer.status or (answer.complaint and not answer.output):
            raise failure("slurm", "sacctmgr", answer.complaint)
        return answer.output

    def is_operator(self, user: str, settings: Mapping[str, str]) -> bool:
        if os.getuid() == 0 or user == user_of(settings.get("SlurmUser", "")):
            return True
        if "slurmdbd" not in settings.get("AccountingStorageType", ""):
            return False  # nobody else can have been made one
        return admin_level(self._of_accounts("user", f"name={user}", "format=adminlevel")) in _RANKS

    def munge(self, settings: Mapping[str, str]) -> None:
        found = _SOCKET.search(settings.get("AuthInfo", ""))
        socket = ["-S", found[1]] if found else []
        made = self._call("munge", *socket, "-n")
        if made.status:
            raise SlurmUnavailableError(f"munge: no credential can be made: {made.complaint[:200]}")
        read, write = os.pipe()  # larger than a credential
        try:
            os.write(write, made.output)
            os.close(write)
            checked = self._call("unmunge", *socket, "-i", f"/proc/{os.getpid()}/fd/{read}")
        finally:
            os.close(read)
        if checked.status:
            raise SlurmRefusedError(f"munge: its own credential is refused: {checked.complaint[:200]}")

    def would_start(self, options: Sequence[str]) -> str:
        argv = ["sbatch", "--test-only", "--wrap=true", *options]
        answer = call(argv, environment=submit_environment(self._base), timeout_s=self.timeout_s)
        if answer.status:
            raise failure("slurm: would not take a job", "sbatch", answer.complaint)
        found = _TO_START.search(answer.complaint)
        return " ".join(found[0].split()) if found else answer.complaint[:200]

    def on_nodes(self, job_id: str, nodes: Sequence[str], argv: Sequence[str], *, timeout_s: float) -> str:
        options = [
            f"--jobid={job_id}",
            f"--nodes={len(nodes)}",
            f"--ntasks={len(nodes)}",
            "--ntasks-per-node=1",
            f"--nodelist={','.join(nodes)}",
            *("--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--overlap", "--mem=0", "--cpu-bind=none", "--mpi=none"),
            *("--input=none", "--export=ALL", "--immediate=20"),
        ]
        environment = query_environment(own_environment(self._base))
        answer = call(["srun", *options, *argv], environment=environment, timeout_s=timeout_s)
        if answer.status and not answer.output:
            raise failure(f"job {job_id}: nothing could be started on its nodes", "srun", answer.complaint)
        return answer.output.decode("utf-8", "replace")

    def _ask(self, *argv: str) -> bytes:
        answer = self._call(*argv)
        if answer.status < 0:
            raise SlurmUnavailableError(f"slurm: {argv[0]} was ended by signal {-answer.status}")
        if answer.status:
            raise failure("slurm", argv[0], answer.complaint)
        return answer.output

    def _call(self, *argv: str) -> CompletedCall:
        return call(argv, environment=self._environment, timeout_s=self.timeout_s)


# --- answers, read --------------------------------------------------------------------------------------------------


def user_of(text: str) -> str:
    """The name in `slurm(64030)`."""
    found = _USER.fullmatch(text.strip())
    return found[1] if found else text.strip()


def admin_level(output: bytes) -> str:
    """From `sacctmgr -nP show user format=adminlevel`: none, operator or administrator; empty for an unknown user."""
    return output.decode("utf-8", "replace").strip().splitlines()[0].lower() if output.strip() else ""


def partitions(output: bytes) -> list[PartitionView]:
    """From `sinfo -h -O FORMAT`, a record for nodes of each kind in each partition.

    A record that cannot be read is left out, and takes no other with it. Raises SlurmOutputError where none can be.
    """
    *records, rest = output.decode("utf-8", "replace").split(RECORD)
    if rest.strip():
        whole = f"{len(records)} record{'s' * (len(records) != 1)}"
        raise SlurmOutputError(f"slurm: sinfo's output is cut off after {whole}")
    views = []
    refusal = None
    for record in records:
        try:
            views.append(_partition([field.strip() for field in record.removeprefix("\n").split(FIELD)]))
        except SlurmOutputError as error:
            refusal = refusal or error
    if refusal is not None and not views:
        raise refusal
    return views


def _partition(fields: list[str]) -> PartitionView:
    """One record of `sinfo`. Raises SlurmOutputError."""
    if len(fields) != len(_FIELDS):
        raise SlurmOutputError(f"slurm: cannot read sinfo's record of {len(fields)} fields")
    name, available, longest, usual, nodes, gres, cpus, memory = fields
    counts = nodes.split("/")
    if len(counts) != 4 or not all(count.isdecimal() and count.isascii() for count in counts):
        raise SlurmOutputError(f"slurm: cannot read the nodes of partition {name[:80]!a}: {nodes[:80]!a}")
    unreadable, count = "", 0
    try:
        count = parse.gpus(gres)
    except SlurmOutputError as error:
        unreadable = str(error)
    return PartitionView(
        name=name.removesuffix("*"),
        default=name.endswith("*"),
        up=available == "up",
        nodes=int(counts[3]),
        nodes_idle=int(counts[1]),
        gpus=count,
        gpu_types=tuple(sorted(set(_TYPE.findall(gres)))),
        cpus=_least(cpus),
        memory_mb=_least(memory),
        seconds=_limit(longest),
        default_seconds=_limit(usual),
        unreadable=unreadable,
    )


def rules(output: bytes, partition: str) -> PartitionRules:
    """From `scontrol --oneliner show partition`. Raises SlurmOutputError."""
    found = dict(_RULE.findall(output.decode("utf-8", "replace")))
    if found.get("PartitionName") != partition:
        raise SlurmOutputError(f"slurm: scontrol show partition {partition} does not tell of it")
    most, grace = found.get("MaxNodes", "UNLIMITED"), found.get("GraceTime", "0")
    return PartitionRules(
        name=partition,
        max_nodes=int(most) if most.isdigit() else None,
        max_seconds=_limit(found.get("MaxTime", "")),
        seconds_of_grace=int(grace) if grace.isdigit() else 0,
        preempt_mode=found.get("PreemptMode", "").lower(),
        qos="" if found.get("QoS", "N/A") == "N/A" else found["QoS"],
    )


def _least(text: str) -> int:
    """`16`, or `16+` where nodes have different counts: the least."""
    number = text.removesuffix("+")
    return int(number) if number.isdigit() else 0


def _limit(text: str) -> float | None:
    if text.lower() in ("infinite", "n/a", "none", "unlimited", ""):
        return None
    return parse.seconds_left(text)
