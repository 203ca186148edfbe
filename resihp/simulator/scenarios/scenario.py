"""A simulated job and its disturbances. Data only.

Draws nothing at random: the other modules of this folder do. Used by these modules, by the simulated world, and by
tests that define a job by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from resihp.faults import Fault
from resihp.parallelism.batch_sizes import BatchSizes, Ramp
from resihp.parallelism.model import ModelSpec

SIGKILL, SIGSTOP, SIGTERM, SIGINT = 9, 19, 15, 2
SIGUSR1, SIGUSR2, SIGCONT = 10, 12, 18
NEVER_S = float("inf")

MODEL = ModelSpec(layers=6, hidden=32, heads=4, kv_groups=2, ffn_hidden=64, vocab=128, sequence=64)

DisturbanceKind = Literal[
    "kill",  # the worker dies (status -9, or `status`)
    "node",  # agent and workers of the worker's node die at once
    "agent",  # the agent and its workers die; some exits of workers are still reported
    "vanish",  # like `node`, but the connection stays open and carries nothing any more
    "silent",  # the control connection carries nothing for `seconds`, then delivers everything
    "blackout",  # agent and workers of the node freeze for `seconds`
    "stop",  # the worker is in state T for `seconds`
    "mute",  # the interpreter is blocked for `seconds`: no heartbeats of the worker, state R
    "hang",  # the worker is stuck in user code for `seconds`; it still sends heartbeats
    "broken",  # a transfer of the epoch in effect fails on this rank; all processes stay alive
    "forget",  # the worker loses its state when it parks next
    "deadlock",  # no collective of the epoch in effect completes, and no error is reported
    "reconnect",  # the agent reconnects
    "raise",  # the user's code raises on this rank
    "raise_all",  # the user's code raises the same error on all ranks
    "raise_node",  # all ranks of the node raise the same error before they declare
    "signal",  # the supervisor receives `status`
    "cancel",  # all agents, their workers and maybe the supervisor receive `status` (stopping.py)
    "told",  # the node's agent and its workers receive `status`; the node dies after `seconds`
    "inject",  # an operator requests an injected fault
    "checkpoint",  # an operator asks for a checkpoint now
    "drained",  # an administrator drains the node, and resumes it after `seconds`
    "supervisor",  # the supervisor dies; another takes over after `seconds`
]

Trigger = Literal[
    "time", "arrive", "order", "spawn", "declare", "join", "joined", "park", "parked", "pause", "propose", "go",
    "ready", "begin", "resumed", "sync", "step", "finished", "halt", "save",
]  # fmt: skip

Fate = Literal["fine", "odd", "refuses", "dies", "raises", "hangs", "spawn"]
"""Outcome of a process that is started later: it joins, declares another model, refuses to start, and so on."""


@dataclass(frozen=True)
class Disturbance:
    """Occurs `delay` seconds after the `nth` occurrence of `trigger`, on `rank`, or on the rank of the trigger if
    None."""

    kind: DisturbanceKind
    trigger: Trigger = "time"
    nth: int = 1
    delay: float = 0.0
    rank: int | None = None
    seconds: float = NEVER_S
    status: int = -SIGKILL


@dataclass(frozen=True)
class Scenario:
    """One simulated job. All other choices (delays, order) are drawn from `seed`."""

    seed: int = 0
    nodes: int = 2
    gpus_per_node: int = 2
    tp: int = 1
    pp: int = 2
    iterations: int = 6
    micro_batches: int = 8
    iteration_s: float = 0.5
    resume_from: int = 0
    checkpoint_every: int = 0
    max_restarts: int | None = None
    """How often the job may go back to its newest checkpoint; None: as often as it needs, but never in every third
    seed."""
    faults: tuple[Fault, ...] = ()
    disturbances: tuple[Disturbance, ...] = ()
    latency_s: float = 0.02
    duplicates: float = 0.0
    """Probability that a worker's message is delivered twice; the second time may be epochs later."""
    leaks: bool = False
    """Whether messages that a node sent before it was dropped may still be delivered."""
    breaks_loudly: float = 1.0
    """Probability that the transport reports the death of a peer to a rank."""
    limit_s: float = 900.0
    model: ModelSpec = MODEL
    start_budget_s: float = 60.0
    odd_declare: int | None = None
    refuses: int | None = None
    objects: int | None = None
    other_digest: int | None = None
    """Each of these four fields is a rank or None. The rank declares another model (`odd_declare`), refuses to start
    (`refuses`), objects to plans (`objects`), or computes a different digest of plans (`other_digest`)."""
    agrees_up_to: int = 0
    """Last epoch in which no rank objects."""
    objections: int = 99
    """Number of objections of a rank, after which it confirms plans."""
    fates: tuple[Fate, ...] = ("fine",)
    """Outcomes of newcomers, in order; the last one repeats."""
    come_backs: int = 3
    chunk_s: float = 0.3
    """Maximum seconds for the transfer of a chunk of state."""
    planner: Literal["real", "wild", "cautious"] = "real"
    """Kind of planner, as in `random_planner.RandomPlanner`."""
    thinks: bool = False
    """Whether plans are made ahead, and better plans are searched for."""
    planner_trouble: float = 0.0
    checker_trouble: float = 0.0
    """Probabilities that the planner finds no plan (`planner_trouble`), and that the checker refuses a plan
    (`checker_trouble`)."""
    early_exit: int | None = None
    meaning: Literal["time-limit", "cancelled", "preempted", "unknown"] | None = "cancelled"
    """Reason for stopping the job as reported by Slurm; None if Slurm does not answer."""
    time_left_s: float | None = None
    """Seconds from the start until Slurm's time limit; None if unknown."""
    reserved_s: float | None = None
    """Seconds from Slurm's report of a reservation of nodes of the job until it begins; None: there is none."""
    mortality: float = 0.0
    """Probability that a worker dies of a signal to its job."""
    signal_grace_s: float = 20.0
    on_warning: Literal["requeue", "end"] = "requeue"
    may_requeue: bool = False
    restarts_left: int = 0
    slurm: bool = False
    """Whether the job runs in a Slurm allocation (allocation.py). The batch script runs on node `batch_node`."""
    batch_node: str = ""
    drains: int = 0
    died_before: tuple[str, ...] = ()
    on_drain: Literal["stay", "vacate"] = "stay"
    replacements: int = 0
    spares: int = 0
    least: float = 0.5
    late: tuple[tuple[str, float], ...] = ()
    """Nodes that arrive later than others, with delays in seconds; `NEVER_S` for a node that does not arrive."""
    spawns: tuple[tuple[str, Literal["hang", "refused"]], ...] = ()
    """Nodes on which no process can be started at the beginning: the start hangs, or is refused."""
    examine: bool = False
    """Whether devices and links are probed before they get work."""
    slow: float = 0.0
    """Probability of a false finding of the detector in an iteration (false_alarms.py)."""
    observes: bool = False
    """Whether slow devices and links are only reported, without a change of plan."""
    ramp: Ramp = ()
    """Steps of the batch ramp-up, up to `micro_batches`."""
    evaluate_every: int = 0
    """Number of iterations between evaluations, with another evaluation after the last iteration; 0 for none."""
    shared: bool = False
    """Whether workers share the CPUs of their node."""
    unfit: float = 0.0
    """Probability that a probe finds its device slow; with half of this probability, a probe fails or is not
    answered."""
    noise: float = 0.0
    """Probability that a healthy device looks slow in a probe while other workers train on the same node."""

    @property
    def batch_sizes(self) -> BatchSizes:
        return BatchSizes(self.micro_batches, self.ramp)

    @property
    def max_rollbacks(self) -> int:
        """Number of times that the job may go back to its newest checkpoint."""
        if self.max_restarts is not None:
            return self.max_restarts
        return 100 if self.seed % 3 else 0

    @property
    def foresight(self) -> dict[str, Any]:
        """Settings for planning ahead and searching for better plans, which need a known (here ample) memory; or for
        neither."""
        if not self.thinks:
            return {"plans_ahead": False, "search_s": 0.0}
        return {"plans_ahead": True, "search_s": 1.0, "memory_bytes": 1 << 40}
