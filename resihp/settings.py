"""What a job was asked to be, for whoever decides about it. Plain data: agents read it, too, and import little else."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from resihp.faults import Fault

PlannerName = Literal["resihp", "resihp-paper", "paper-tp", "paper-tp-pp", "drop-replica"]
"""By whose rules jobs are planned (`resihp.scheduler.planners`)."""

Mode = Literal["sequential", "paper", "greyhound"]


class Thresholds(msgspec.Struct, frozen=True, kw_only=True):
    """What probes are judged by (`resihp.detector.probes`). Speeds: 1 is as fast as others."""

    fit: float = 0.8
    """A device that reaches less than this of its peers, or of its own past, is not fit to be learnt as healthy."""
    sure: float = 0.9975
    """How sure it must be that a suspect is slow, by its probe and by training together, for a verdict."""
    link_fit: float = 0.6
    """As `fit`, for links, whose times scatter more."""
    link_confirmed: float = 0.8
    """A link under suspicion that reaches less than this of two others or more is slow."""


class Detection(msgspec.Struct, frozen=True, kw_only=True):
    """How slow devices and links are looked for."""

    mode: Mode = "sequential"
    """Who looks: see `resihp.detector.modes`."""
    false_alarms_per: int = 10_000
    """Iterations between false alarms, on average at least, over all ranks and links. With `patience` and `least`, of
    mode sequential alone."""
    patience: int = 24
    """Iterations after which a device is suspected again on the same evidence, though its probe was fine."""
    least: float = 0.03
    """Smallest slow-down that is told, log units: about the share by which it takes longer."""
    thresholds: Thresholds = Thresholds()


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the job was asked to be. Times in seconds; defaults are those of the design's detection table."""

    job: str
    nodes: int
    gpus_per_node: int
    node_names: tuple[str, ...] = ()
    """The job's own; empty where they are not known."""
    tp: int
    pp: int
    schedule: str = "1f1b"
    chunks: int = 1
    """Layer chunks of each stage (Megatron's virtual pipeline stages)."""
    sequence_parallel: bool = False
    tune: bool = False
    """Whether the layout is tuned (`resihp.scheduler.layouts.first_layout`), first and by measured times, where the job
    was asked to have one chunk a stage."""
    memory_bytes: int | None = None
    """What each device has for the job; None where it is not known, and then not checked."""
    come_backs: int = 3
    """How often a process may be started again on the same device."""
    faults: tuple[Fault, ...] = ()
    checkpoint_every: int = 0
    beat_s: float = 1.0
    silent_beats: int = 3
    node_given_up_s: float = 6.0
    hang_given_up_s: float = 15.0
    start_budget_s: float = 600.0
    idle_limit_s: float | None = 1800.0
    """How long the last processes of a script that says nothing of what it trains may do nothing; None: for ever."""
    declares: bool = True
    """Whether its processes may say what they train; a command does not, and cannot do without any of them."""
    transition_budget_s: float = 60.0
    reconnect_s: float = 1.0
    spares: int = 0
    """Nodes beyond what the first layout uses; their ranks begin as standby."""
    least: float = 0.5
    """Share of the first layout's devices with which the job begins although others are missing."""
    slurm: bool = False
    """Whether there is a Slurm to drain nodes, take them back, and give others."""
    drains: int = 0
    """How many nodes this job may ask to have drained: what earlier runs of the same Slurm job have left of it."""
    died_before: tuple[str, ...] = ()
    """Nodes that died under earlier runs of the same Slurm job."""
    replacements: int = 0
    """How many nodes this job may ask for in place of lost ones."""
    replacement_least_left_s: float = 1800.0
    """Time that must be left until the job's limit for a replacement to be worth asking for."""
    replacement_wait_s: float = 60.0
    """How long one is expected to take to come, until one has."""
    on_drain: Literal["stay", "vacate"] = "stay"
    """What is done about a node of the job that an administrator drains: train on, or leave it if that can be."""
    batch_node: str = ""
    """Where the job's batch script runs: Slurm cannot do without it. Empty without Slurm."""
    on_warning: Literal["requeue", "end"] = "requeue"
    """What follows the checkpoint when Slurm warns that time is running out."""
    may_requeue: bool = False
    """Whether Slurm may run the job again when too many of its nodes are lost."""
    restarts_left: int = 0
    """How many more runs may follow this one if it fails and has added no checkpoint."""
    examine: bool = False
    """Whether devices and links are measured before the first iteration, and when a device joins."""
    detect: bool = True
    """Whether slow devices and links are looked for while training."""
    detection: Detection = Detection()
    observes: bool = False
    """Whether what is slow is found and told, and nothing is done about it: no device stands by for it, no plan is made
    for it. Nor is any node drained, given back or asked for. What stops is recovered from all the same."""
    probe_budget_s: float = 30.0
    """How long an answer to a probe may take before the device counts as unfit; a suspicion is then dropped."""
    planner: PlannerName = "resihp"
    """By whose rules it is planned anew."""
    plans_ahead: bool = False
    """Whether plans for what may be lost next are made while training goes on."""
    search_s: float = 0.0
    """With these, for how long a better plan is looked for than the one that is found at once; 0: not at all."""
    recheck_s: float = 60.0
    """How often a slow device that stands by is measured again. One that a probe set aside is sooner at first, and ten
    times as rarely in the end."""
    signal_grace_s: float = 20.0
    """How long a checkpoint may take once Slurm has signalled all of the job; it kills the rest."""

    @property
    def devices_asked(self) -> int:
        """Of the first layout, spares not counted."""
        return (self.nodes - self.spares) * self.gpus_per_node

    @property
    def ranks_asked(self) -> int:
        """Of these, those that a grid of whole replicas has work for."""
        replica = self.tp * self.pp
        return self.devices_asked // replica * replica

    @property
    def devices_least(self) -> int:
        """With fewer the job does not begin. A command needs all that it was asked to have."""
        if not self.declares:
            return self.devices_asked
        return max(1, math.ceil(self.least * self.devices_asked - 1e-9))
