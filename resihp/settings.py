"""The settings of a job, as the controller and others use them, with their defaults.

Plain data; agents read it, too, so imports are few. `wrapper.config.schema` takes the defaults of job.toml from here.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from resihp.faults import Fault

PlannerName = Literal["resihp", "resihp-paper", "paper-tp", "paper-tp-pp", "drop-replica"]
"""The planner that makes the job's plans (`resihp.scheduler.planners`)."""

Mode = Literal["sequential", "paper", "greyhound"]


class Thresholds(msgspec.Struct, frozen=True, kw_only=True):
    """Limits by which probes are judged (`resihp.detector.probes`). Speeds are relative; 1 is as fast as the others."""

    fit: float = 0.8
    """Minimum speed, relative to its peers and to its own past, at which a device is recorded as healthy."""
    sure: float = 0.9975
    """Probability of being slow, from its probe and from training together, at which a suspect is declared slow."""
    link_fit: float = 0.6
    """As `fit`, for links, whose times vary more."""
    link_confirmed: float = 0.8
    """A suspected link whose speed is below this fraction of two or more other links is slow."""


class Detection(msgspec.Struct, frozen=True, kw_only=True):
    """How slow devices and links are detected."""

    mode: Mode = "sequential"
    """The detection method: see `resihp.detector.modes`."""
    false_alarms_per: int = 10_000
    """Average number of iterations between false alarms, at least, over all ranks and links. This field, `patience` and
    `least` apply to mode sequential only."""
    patience: int = 24
    """Iterations after which the same evidence makes a device suspect again although its probe was healthy."""
    least: float = 0.03
    """Smallest slow-down that is reported, in log units: about the fraction by which an iteration takes longer."""
    thresholds: Thresholds = Thresholds()


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a job. Times in seconds; the defaults are those of the design's detection table."""

    job: str
    nodes: int
    gpus_per_node: int
    node_names: tuple[str, ...] = ()
    """Names of the job's nodes; empty if they are not known."""
    tp: int
    pp: int
    schedule: str = "1f1b"
    chunks: int = 1
    """Layer chunks of each stage (Megatron's virtual pipeline stages)."""
    sequence_parallel: bool = False
    tune: bool = False
    """Whether `resihp.scheduler.layouts.first_layout` tunes the layout, at the start and again with measured times.
    Only for jobs with one chunk per stage."""
    memory_bytes: int | None = None
    """Memory of each device that the job may use; None if it is not known, and then it is not checked."""
    come_backs: int = 3
    """Number of times a process may be started again on the same device."""
    faults: tuple[Fault, ...] = ()
    checkpoint_every: int = 0
    beat_s: float = 1.0
    silent_beats: int = 3
    node_given_up_s: float = 6.0
    hang_given_up_s: float = 15.0
    start_budget_s: float = 600.0
    idle_limit_s: float | None = 1800.0
    """How long the last processes of a script that reports no training may be idle; None: no limit."""
    declares: bool = True
    """Whether the job's processes may declare a training run. A plain command does not, and needs all of them."""
    transition_budget_s: float = 60.0
    reconnect_s: float = 1.0
    spares: int = 0
    """Number of nodes beyond those of the first layout; their ranks begin as standby."""
    least: float = 0.5
    """Fraction of the first layout's devices with which the job starts although others are missing."""
    slurm: bool = False
    """Whether the job runs under Slurm, which can drain nodes, take them back, and provide others."""
    drains: int = 0
    """Number of nodes that this job may still ask to have drained, after earlier runs of the same Slurm job."""
    died_before: tuple[str, ...] = ()
    """Nodes that died under earlier runs of the same Slurm job."""
    replacements: int = 0
    """Number of replacement nodes that this job may ask for."""
    replacement_least_left_s: float = 1800.0
    """Minimum time left before the job's time limit for a replacement to be worth requesting."""
    replacement_wait_s: float = 60.0
    """Expected time until a replacement arrives, before the first one has arrived."""
    on_drain: Literal["stay", "vacate"] = "stay"
    """Reaction when an administrator drains a node of the job: train on, or vacate the node if possible."""
    batch_node: str = ""
    """Node that runs the job's batch script; Slurm cannot give it up. Empty without Slurm."""
    on_warning: Literal["requeue", "end"] = "requeue"
    """What follows the checkpoint when Slurm warns that the time limit is near."""
    may_requeue: bool = False
    """Whether Slurm may requeue the job when too many of its nodes are lost."""
    restarts_left: int = 0
    """Number of further runs that may follow this one if it fails without having added a checkpoint."""
    examine: bool = True
    """Whether devices and links are measured before the first iteration, and when a device joins."""
    detect: bool = True
    """Whether slow devices and links are detected while training."""
    detection: Detection = Detection()
    observes: bool = False
    """Whether slow devices and links are reported without any reaction: no device is put on standby and no plan is made
    for them, and no node is drained, given back or asked for. Failures are recovered from as usual."""
    probe_budget_s: float = 30.0
    """Maximum time until a probe answers. After it a joining device counts as unfit, and a suspicion is dropped."""
    planner: PlannerName = "resihp"
    """The planner of new plans."""
    plans_ahead: bool = True
    """Whether plans for the next possible losses are made while training goes on."""
    search_s: float = 1.0
    """With `plans_ahead`, time spent on looking for a better plan than the one found first; 0: none."""
    recheck_s: float = 60.0
    """Interval at which a slow device on standby is measured again. A device that failed a probe is measured sooner at
    first, and in the end only a tenth as often."""
    signal_grace_s: float = 20.0
    """Time that a checkpoint may take after Slurm has signalled the whole job; Slurm kills the job afterwards."""

    @property
    def devices_asked(self) -> int:
        """Number of devices of the first layout, spares not counted."""
        return (self.nodes - self.spares) * self.gpus_per_node

    @property
    def ranks_asked(self) -> int:
        """Number of those devices that a grid of whole replicas has work for."""
        replica = self.tp * self.pp
        return self.devices_asked // replica * replica

    @property
    def devices_least(self) -> int:
        """Minimum number of devices with which the job begins. A plain command needs all that it requested."""
        if not self.declares:
            return self.devices_asked
        return max(1, math.ceil(self.least * self.devices_asked - 1e-9))
