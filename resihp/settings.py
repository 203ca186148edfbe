"""Defines the settings of a job and their defaults: plain data, used by the controller, the detector and the agents.

This module reads no file and imports little, because every agent loads it. `resihp.wrapper.config.schema` takes the
defaults of job.toml from here.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from resihp.faults import Fault

PlannerName = Literal["resihp", "resihp-paper", "paper-tp", "paper-tp-pp", "drop-replica"]
"""Name of the planner that makes the job's plans (`resihp.scheduler.planners`)."""

Mode = Literal["sequential", "paper", "greyhound"]
"""Name of a detection method (`resihp.detector.modes`)."""


SCRIPT_ALONE_S = 25.0
"""Seconds without a message of a supervisor after which an agent ends the processes of a script that does not declare a
model: they may be started again elsewhere, and must not write checkpoints at the same time."""


class ProbeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits by which probes are judged (`resihp.detector.probes`). Speeds are relative to other devices or links: 1 is
    equally fast."""

    fit: float = 0.8
    """Minimum speed of a healthy device, relative both to its peers and to its own past."""
    link_fit: float = 0.6
    """Minimum speed of a healthy link: at the start relative to the median of all links of its kind, later relative to
    a single other link or to its own past. Lower than `fit`, because transfer times vary more."""
    link_confirmed: float = 0.8
    """Minimum speed of a healthy link relative to the median of two or more other links."""


class Detection(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the detection of slow devices and links."""

    mode: Mode = "sequential"
    """Detection method (`resihp.detector.modes`)."""
    false_alarms_per: int = 10_000
    """Lower bound of the average number of iterations between false alarms, over all ranks and links. Mode `sequential`
    only."""
    patience: int = 24
    """Iterations after a healthy probe for which the same evidence does not make the device suspect again. Mode
    `sequential` only."""
    least: float = 0.03
    """Smallest slow-down that is reported, in log units: about the fraction by which an iteration takes longer. Mode
    `sequential` only."""
    sure: float = 0.9975
    """Probability at which a suspected device is declared slow; its probe and its training times together give it."""
    probe_limits: ProbeLimits = ProbeLimits()


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a job. Fields with the suffix `_s` are seconds; the default times are those of the design's
    detection table."""

    job: str
    nodes: int
    gpus_per_node: int
    node_names: tuple[str, ...] = ()
    """Names of the job's nodes; empty if the names are unknown."""
    tp: int
    pp: int
    schedule: str = "1f1b"
    chunks: int = 1
    """Number of layer chunks per stage (Megatron's virtual pipeline stages)."""
    sequence_parallel: bool = False
    tune: bool = False
    """Whether `resihp.scheduler.layouts.first_layout` tunes the layout, at the start and again with measured times.
    Only for jobs with one chunk per stage."""
    memory_bytes: int | None = None
    """Bytes of each device's memory that the job may use; None: unknown, and memory is not checked."""
    max_restarts: int = 100
    """Number of times that all processes of a script that does not declare a model may be started again in this run, or
    that training of a declared model may go back to a checkpoint."""
    min_nodes: int = 0
    """Minimum number of nodes with which such a script is started again when nodes are lost; 0: with as many as the
    job requested."""
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
    """Seconds that the last processes of a script that reports no training may be idle; None: no limit."""
    script_hang_s: float | None = 180.0
    """Seconds without a printed iteration after which a rank of a script that does nothing, while others wait for it,
    is hung; None: no rank is."""
    declares: bool = True
    """Whether the job's processes may declare a training run. The processes of a plain command do not, and a plain
    command starts only with all devices that it requested."""
    transition_budget_s: float = 60.0
    reconnect_s: float = 1.0
    spares: int = 0
    """Number of nodes in addition to those of the first layout; the ranks of these nodes begin on standby."""
    spares_wait: bool = False
    """Whether workers start on spare nodes only after others have declared a model: a script that never declares one
    uses the nodes that were requested, and a spare node takes the place of a lost one."""
    finds_checkpoints: bool = False
    """Whether the checkpoints of a script that declares no model are looked for (`[checkpoint] latest`)."""
    takes_checkpoint: bool = False
    """Whether such a script resumes from the checkpoint that it is given: `{checkpoint}` is in its arguments, or
    RESIHP_RESUME_FROM in its text."""
    least: float = 0.5
    """Minimum fraction of the first layout's devices with which the job starts if the others are missing."""
    slurm: bool = False
    """Whether the job runs under Slurm, which can drain nodes, take them back, and provide others."""
    drains_left: int = 0
    """Number of nodes that this run may ask Slurm to drain: the job's limit minus the drains that earlier runs of the
    same Slurm job requested."""
    died_before: tuple[str, ...] = ()
    """Nodes that died under earlier runs of the same Slurm job."""
    replacements: int = 0
    """Number of replacement nodes that this job may request from Slurm."""
    replacement_least_left_s: float = 1800.0
    """Minimum seconds left until the job's time limit at which a replacement is still requested."""
    replacement_wait_s: float = 60.0
    """Assumed seconds from a request to the arrival of a replacement, until the first replacement has arrived."""
    site_check_s: float = 0.0
    """Seconds that the site's own health check of a node may take before the node is drained; 0 without such a
    check."""
    on_drain: Literal["stay", "vacate"] = "stay"
    """Reaction when an administrator drains a node of the job: train on ("stay"), or stop using the node and give it
    back between two iterations, if the layout can do without it ("vacate")."""
    batch_node: str = ""
    """Node that runs the job's batch script and therefore cannot leave the job; empty without Slurm."""
    on_warning: Literal["requeue", "end"] = "requeue"
    """Action after the checkpoint that the job saves when Slurm warns that the time limit is near."""
    warning_lead_s: float = 0.0
    """How many seconds before the time limit Slurm warns the job; 0 if unknown."""
    may_requeue: bool = False
    """Whether Slurm may requeue the job when too many of its nodes are lost."""
    restarts_left: int = 0
    """Number of runs that may follow this run if this run fails without having saved a checkpoint."""
    examine: bool = True
    """Whether devices and links are measured before the first iteration, and again when a device joins."""
    detect: bool = True
    """Whether slow devices and links are detected while training."""
    detection: Detection = Detection()
    observes: bool = False
    """Whether slow devices and links are only reported: no slow device is put on standby, no plan is made because of
    slowness, and no node is drained, released or requested. The job recovers from failures as usual."""
    probe_budget_s: float = 30.0
    """Timeout of a probe in seconds. After a timeout, a joining device counts as unfit and a suspicion is dropped."""
    planner: PlannerName = "resihp"
    """Name of the planner that makes new plans."""
    plans_ahead: bool = True
    """Whether plans for the next possible losses are made in advance, while training goes on."""
    search_s: float = 1.0
    """With `plans_ahead`: seconds of search for a better plan than the first one found; 0: no search."""
    recheck_s: float = 60.0
    """Seconds between two probes of a slow device on standby. After a failed probe the next ones come sooner; with
    further failures the interval grows to ten times this value."""
    signal_grace_s: float = 20.0
    """Seconds that a checkpoint may take after Slurm has signalled the whole job, before Slurm kills the job."""

    @property
    def devices_asked(self) -> int:
        """Number of devices requested for the first layout, without spares."""
        return (self.nodes - self.spares) * self.gpus_per_node

    @property
    def ranks_asked(self) -> int:
        """Number of devices that have work in the first layout: `devices_asked`, rounded down to whole replicas."""
        replica = self.tp * self.pp
        return self.devices_asked // replica * replica

    @property
    def nodes_least(self) -> int:
        """Minimum number of nodes for a script that does not declare a model."""
        return min(self.min_nodes, self.nodes) or self.nodes - self.spares

    @property
    def devices_least(self) -> int:
        """Minimum number of devices with which the job starts; for a plain command, those of `nodes_least`."""
        if not self.declares:
            return self.nodes_least * self.gpus_per_node
        return max(1, math.ceil(self.least * self.devices_asked - 1e-9))
