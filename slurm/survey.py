"""Survey of a cluster: its settings, its partitions, the user's rights, and commands that run on its nodes.

For `resihp doctor` and `resihp init`, which run before there is a job; a job itself uses `resihp.slurm.client`. Raises
the same errors: SlurmUnavailableError for no answer, SlurmRefusedError, SlurmOutputError. Changes nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from resihp.slurm import limits
from resihp.slurm.command_call import CompletedCall, call, own_environment, query_environment, submit_environment
from resihp.slurm.commands import TIMEOUT_S, failure
from resihp.slurm.errors import SlurmOutputError, SlurmRefusedError, SlurmUnavailableError
from resihp.slurm.limits import Association, Limits
from resihp.slurm.parsing import parse
from resihp.slurm.parsing.fields import FIELD, RECORD, format_of

_FIELDS = ("Partition", "Available", "Time", "DefaultTime", "NodeAIOT", "Gres", "CPUs", "Memory")
PARTITION_FORMAT = format_of(_FIELDS)
"""Fields for `sinfo --Format`."""

_USER = re.compile(r"([^()]+)\((\d+)\)")
_SOCKET = re.compile(r"\bsocket=([^,\s]+)")
_TO_START = re.compile(r"to start at .*")
_RANKS = ("operator", "administrator")
_RULE = re.compile(r"(\w+)=(\S*)")
_TYPE = re.compile(r"\bgpu:(?!no_consume\b|[0-9]+[KMG]?(?![^:(),\s]))([^:(),\s]+)", re.ASCII)
"""Matches the `a100` in `gpu:a100:8`."""
_GENERATIONS = 32
"""Limit on the ancestors of a user's account that are followed."""


class PartitionView(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes of a partition that are of one kind; a partition with several kinds has several views. Counts are per
    node.

    `nodes`: number of nodes of this kind; `nodes_idle`: how many of them are idle. `seconds`: a job's time limit, None
    for none. `default_seconds`: time limit of a job that requests none.
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
    """Reason why `gpus` is unknown (it is then 0); empty otherwise."""


class PartitionRules(msgspec.Struct, frozen=True, kw_only=True):
    """A partition's rules for jobs. None means no limit. `seconds_of_grace`: time between the notice of a preemption
    and its execution.

    `preempt_mode` is in lower case. `qos`: the QOS that limits all jobs of the partition, empty for none.
    """

    name: str
    max_nodes: int | None
    max_seconds: float | None
    seconds_of_grace: int
    preempt_mode: str
    qos: str
    min_nodes: int = 1


class Survey(Protocol):
    """Queries about a cluster."""

    def settings(self) -> Mapping[str, str]:
        """Return the controller's slurm.conf, as values by key."""

    def partitions(self) -> Sequence[PartitionView]:
        """Return the partitions that this user can see, in Slurm's order."""

    def rules(self, partition: str) -> PartitionRules:
        """Return the rules of a partition that this user can see."""

    def limits(self, user: str, account: str, qos: str, partition: PartitionRules, cluster: str) -> Limits:
        """Return the limits of accounting on a job of this user. Empty `account` and `qos` mean the defaults."""

    def is_operator(self, user: str, settings: Mapping[str, str]) -> bool:
        """Decide whether this user may drain nodes."""

    def munge(self, settings: Mapping[str, str]) -> None:
        """Make a credential and check it on this machine, with the munged that Slurm uses. Raises SlurmError if this
        fails."""

    def would_start(self, options: Sequence[str]) -> str:
        """Return when and where Slurm would start a job with these sbatch options, in Slurm's own text. Submits
        nothing.

        Raises SlurmRefusedError if Slurm would not accept the job.
        """

    def on_nodes(self, job_id: str, nodes: Sequence[str], argv: Sequence[str], *, timeout_s: float) -> str:
        """Run a command once on each of these nodes of the user's running job, beside the job's own work; return all
        output."""


class CommandSurvey:
    """Survey by Slurm's commands."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S, environment: Mapping[str, str] | None = None) -> None:
        self.timeout_s = timeout_s
        self._base = os.environ if environment is None else environment
        self._environment = query_environment(self._base)

    def settings(self) -> Mapping[str, str]:
        return parse.settings(self._ask("scontrol", "show", "config"))

    def partitions(self) -> Sequence[PartitionView]:
        return partitions(self._ask("sinfo", "-h", "--noconvert", "-O", PARTITION_FORMAT))

    def rules(self, partition: str) -> PartitionRules:
        return rules(self._ask("scontrol", "--oneliner", "show", "partition", partition), partition)

    def limits(self, user: str, account: str, qos: str, partition: PartitionRules, cluster: str) -> Limits:
        account = account or self._ask_accounting("user", f"name={user}", "format=defaultaccount").decode().strip()
        rows = self._associations(cluster, account, user) if account else []
        # An association for this partition only takes precedence over one for all partitions.
        own = next((row for row in rows if row.partition == partition.name), None)
        own = own or next((row for row in rows if not row.partition), None)
        if own is None:
            return Limits(account=account, qos=qos, found=())
        all_limits, unseen, account = list(own.limits), "", own.account
        for _ in range(_GENERATIONS):
            above = next((row for row in self._associations(cluster, account, "") if not row.user), None)
            if above is None:
                unseen = account
                break
            all_limits += above.limits
            account = above.parent
            if not account:
                break
        qos = qos or own.qos
        limits_by_qos = limits.qos(self._ask_accounting("qos", f"format={limits.QOS_FORMAT}"))
        for name in dict.fromkeys((partition.qos, qos or "normal")):
            all_limits += limits_by_qos.get(name, ())
        return Limits(account=own.account, qos=qos, found=tuple(all_limits), unseen=unseen)

    def _associations(self, cluster: str, account: str, user: str) -> list[Association]:
        named = (f"cluster={cluster}", f"account={account}", f"user={user}")
        return limits.associations(self._ask_accounting("assoc", *named, f"format={limits.ASSOCIATION_FORMAT}"))

    def _ask_accounting(self, *wanted: str) -> bytes:
        answer = self._call("sacctmgr", "--noheader", "--parsable2", "show", *wanted)
        if answer.status < 0:
            raise SlurmUnavailableError(f"slurm: sacctmgr was ended by signal {-answer.status}")
        # It may exit with 0 although slurmdbd has not answered.
        if answer.status or (answer.complaint and not answer.output):
            raise failure("slurm", "sacctmgr", answer.complaint)
        return answer.output

    def is_operator(self, user: str, settings: Mapping[str, str]) -> bool:
        if os.getuid() == 0 or user == user_of(settings.get("SlurmUser", "")):
            return True
        if "slurmdbd" not in settings.get("AccountingStorageType", ""):
            return False  # without slurmdbd there are no other operators
        return admin_level(self._ask_accounting("user", f"name={user}", "format=adminlevel")) in _RANKS

    def munge(self, settings: Mapping[str, str]) -> None:
        match = _SOCKET.search(settings.get("AuthInfo", ""))
        socket = ["-S", match[1]] if match else []
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
        match = _TO_START.search(answer.complaint)
        return " ".join(match[0].split()) if match else answer.complaint[:200]

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


# --- parsing answers ------------------------------------------------------------------------------------------------


def user_of(text: str) -> str:
    """Return the name in a text such as `slurm(64030)`."""
    match = _USER.fullmatch(text.strip())
    return match[1] if match else text.strip()


def admin_level(output: bytes) -> str:
    """Parse `sacctmgr -nP show user format=adminlevel`: none, operator or administrator; empty for an unknown user."""
    return output.decode("utf-8", "replace").strip().splitlines()[0].lower() if output.strip() else ""


def partitions(output: bytes) -> list[PartitionView]:
    """Parse `sinfo -h -O PARTITION_FORMAT`, which prints one record for each kind of node in each partition.

    A record that cannot be parsed is omitted and does not affect the others. Raises SlurmOutputError if none can be
    parsed.
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
    """Parse one record of `sinfo`. Raises SlurmOutputError."""
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
        cpus=_minimum(cpus),
        memory_mb=_minimum(memory),
        seconds=_limit(longest),
        default_seconds=_limit(usual),
        unreadable=unreadable,
    )


def rules(output: bytes, partition: str) -> PartitionRules:
    """Parse `scontrol --oneliner show partition`. Raises SlurmOutputError."""
    fields = dict(_RULE.findall(output.decode("utf-8", "replace")))
    if fields.get("PartitionName") != partition:
        raise SlurmOutputError(f"slurm: scontrol show partition {partition} returned another partition")
    most, grace, least = fields.get("MaxNodes", "UNLIMITED"), fields.get("GraceTime", "0"), fields.get("MinNodes", "0")
    return PartitionRules(
        name=partition,
        max_nodes=int(most) if most.isdigit() else None,
        max_seconds=_limit(fields.get("MaxTime", "")),
        seconds_of_grace=int(grace) if grace.isdigit() else 0,
        preempt_mode=fields.get("PreemptMode", "").lower(),
        qos="" if fields.get("QoS", "N/A") == "N/A" else fields["QoS"],
        min_nodes=max(1, int(least)) if least.isdigit() else 1,
    )


def _minimum(text: str) -> int:
    """Return the number in `16`, or in `16+`, which is printed where nodes have different counts and 16 is the lowest;
    0 if it cannot be parsed."""
    number = text.removesuffix("+")
    return int(number) if number.isdigit() else 0


def _limit(text: str) -> float | None:
    if text.lower() in ("infinite", "n/a", "none", "unlimited", ""):
        return None
    return parse.seconds_left(text)
