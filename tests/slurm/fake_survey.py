"""A cluster's survey in memory, for tests: keeps the protocol of `resihp.slurm.survey.Survey`. Decides nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from resihp.slurm.errors import SlurmRefusedError, SlurmUnavailableError
from resihp.slurm.limits import Limit, Limits
from resihp.slurm.survey import PartitionRules, PartitionView

SETTINGS = {
    "ClusterName": "fake",
    "AccountingStorageType": "accounting_storage/slurmdbd",
    "AuthType": "auth/munge",
    "InactiveLimit": "0 sec",
    "JobRequeue": "1",
    "KillOnBadExit": "0",
    "KillWait": "30 sec",
    "PreemptMode": "OFF",
    "PreemptType": "preempt/none",
    "PrivateData": "none",
    "ProctrackType": "proctrack/cgroup",
    "SlurmUser": "slurm(64030)",
    "SlurmdTimeout": "300 sec",
}


def partition(name: str = "gpu", **changes: object) -> PartitionView:
    """Four idle nodes of eight GPUs, two days at most."""
    usual: dict[str, object] = {
        "name": name,
        "default": True,
        "up": True,
        "nodes": 4,
        "nodes_idle": 4,
        "gpus": 8,
        "cpus": 96,
        "memory_mb": 1_000_000,
        "seconds": 172800.0,
        "default_seconds": None,
    }
    return PartitionView(**(usual | changes))  # type: ignore[arg-type]


class FakeSurvey:
    """`unavailable`: no answer. `started` gets the command of `on_nodes`, and says what the nodes write."""

    def __init__(
        self,
        *partitions: PartitionView,
        operator: bool = False,
        started: Callable[[Sequence[str], Sequence[str]], str] = lambda nodes, argv: "",
        **settings: str,
    ) -> None:
        self.calls: Counter[str] = Counter()
        self.unavailable = False
        self.operator = operator
        self.refusal = ""
        """Why no job is taken."""
        self.rule = PartitionRules(
            name="gpu", max_nodes=None, max_seconds=None, seconds_of_grace=0, preempt_mode="off", qos=""
        )
        """Of each partition, by its own name."""
        self.limited: tuple[Limit, ...] = ()
        self.options: tuple[str, ...] = ()
        """Of the last job that would have been submitted."""
        self._partitions = partitions or (partition(),)
        self._settings = SETTINGS | settings
        self._started = started

    def settings(self) -> Mapping[str, str]:
        self._called("settings")
        return self._settings

    def partitions(self) -> Sequence[PartitionView]:
        self._called("partitions")
        return self._partitions

    def rules(self, partition: str) -> PartitionRules:
        self._called("rules")
        return msgspec.structs.replace(self.rule, name=partition)

    def limits(self, user: str, account: str, qos: str, partition: PartitionRules, cluster: str) -> Limits:
        self._called("limits")
        return Limits(account=account or "lab", qos=qos or "normal", found=self.limited)

    def is_operator(self, user: str, settings: Mapping[str, str]) -> bool:
        self._called("is_operator")
        return self.operator

    def munge(self, settings: Mapping[str, str]) -> None:
        self._called("munge")

    def would_start(self, options: Sequence[str]) -> str:
        self._called("would_start")
        self.options = tuple(options)
        if self.refusal:
            raise SlurmRefusedError(f"slurm: would not take a job: sbatch: {self.refusal}")
        return "to start at 2030-01-01T00:00:00 using 1 processors on nodes n1 in partition gpu"

    def on_nodes(self, job_id: str, nodes: Sequence[str], argv: Sequence[str], *, timeout_s: float) -> str:
        self._called("on_nodes")
        return self._started(nodes, argv)

    def _called(self, kind: str) -> None:
        self.calls[kind] += 1
        if self.unavailable:
            raise SlurmUnavailableError("slurm: Unable to contact slurm controller; try: scontrol ping")
