"""A simulated job and its disturbances; `Scenario.drawn(seed)` draws one at random. Pure data."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any, Literal

from resihp.faults import Fault, Phase
from resihp.parallelism.batch_sizes import BatchSizes, Ramp
from resihp.parallelism.model import ModelSpec

SIGKILL, SIGSTOP, SIGTERM, SIGINT = 9, 19, 15, 2
SIGUSR1, SIGUSR2, SIGCONT = 10, 12, 18
NEVER_S = float("inf")

MODEL = ModelSpec(layers=6, hidden=32, heads=4, kv_groups=2, ffn_hidden=64, vocab=128, sequence=64)

DisturbanceKind = Literal[
    "kill",  # the worker dies (status -9, or `status`)
    "node",  # agent and workers of the worker's node die at once
    "agent",  # the agent dies and its workers with it; some of their exits are still reported
    "vanish",  # like `node`, but unnoticed: the connection just carries nothing any more
    "silent",  # the control connection carries nothing for `seconds`, then all of it
    "blackout",  # agent and workers of the node freeze for `seconds`
    "stop",  # the worker is in state T for `seconds`
    "mute",  # the interpreter is blocked for `seconds`: no beats of the worker's own, state R
    "hang",  # the worker is stuck in user code for `seconds`; its beat thread goes on
    "broken",  # a transfer of the running epoch fails on this rank; all processes stay alive
    "forget",  # the worker loses its state when it parks next
    "deadlock",  # a collective of the running epoch never completes, unreported
    "reconnect",  # the agent reconnects
    "raise",  # the user's code raises on this rank
    "raise_all",  # ... and on all the others in the same place
    "raise_node",  # all ranks of the node raise the same error before they declare
    "signal",  # the supervisor receives `status`
    "cancel",  # all agents, their workers and maybe the supervisor receive `status` (stopping.py)
    "told",  # the node's agent and its workers receive `status`; the node dies after `seconds`
    "inject",  # an operator asks for a kill
    "checkpoint",  # an operator asks for a checkpoint now
    "drained",  # an administrator drains the node, and undoes that after `seconds`
    "supervisor",  # the supervisor dies; another takes over after `seconds`
]

DISTURBANCE_WEIGHTS: dict[DisturbanceKind, int] = {
    "kill": 30,
    "node": 8,
    "agent": 6,
    "vanish": 3,
    "silent": 8,
    "blackout": 4,
    "stop": 7,
    "mute": 8,
    "hang": 5,
    "broken": 5,
    "deadlock": 2,
    "forget": 3,
    "reconnect": 2,
    "raise": 3,
    "signal": 1,
    "inject": 3,
}
"""Relative frequency of each kind."""

Trigger = Literal[
    "time", "arrive", "order", "spawn", "declare", "join", "joined", "park", "parked", "pause", "propose", "go",
    "ready", "begin", "resumed", "sync", "step", "finished", "halt", "save",
]  # fmt: skip

Fate = Literal["fine", "odd", "refuses", "dies", "raises", "hangs", "spawn"]
"""How a process that was started again begins: it joins, declares something else, fails its probe, and so on."""


FAULT_PHASES: tuple[Phase, ...] = ("forward", "backward", "reduce", "step", "park", "groups", "transfer", "resume")

FATE_WEIGHTS: dict[Fate, int] = {"fine": 60, "odd": 8, "refuses": 7, "dies": 8, "raises": 6, "hangs": 3, "spawn": 5}


@dataclass(frozen=True)
class Disturbance:
    """Happens `delay` after the `nth` occurrence of `trigger`, to `rank` or, if None, to the rank of the trigger."""

    kind: DisturbanceKind
    trigger: Trigger = "time"
    nth: int = 1
    delay: float = 0.0
    rank: int | None = None
    seconds: float = NEVER_S
    status: int = -SIGKILL


@dataclass(frozen=True)
class Scenario:
    """One simulated job. The remaining choices (delays, order) are drawn from `seed`."""

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
    faults: tuple[Fault, ...] = ()
    disturbances: tuple[Disturbance, ...] = ()
    latency_s: float = 0.02
    duplicates: float = 0.0
    """Probability that a worker's message is delivered twice, sometimes epochs later."""
    leaks: bool = False
    """Whether messages that a node sent before it was dropped may still be delivered."""
    breaks_loudly: float = 1.0
    """Probability that the transport reports a peer's death to a rank."""
    limit_s: float = 900.0
    model: ModelSpec = MODEL
    start_budget_s: float = 60.0
    odd_declare: int | None = None
    refuses: int | None = None
    objects: int | None = None
    other_digest: int | None = None
    """The rank that declares another model, refuses to start, objects to plans, or computes another digest of them."""
    agrees_up_to: int = 0
    """Epoch up to which no rank objects."""
    objections: int = 99
    """Number of objections of a rank before it gives in."""
    fates: tuple[Fate, ...] = ("fine",)
    """Fates of newcomers in order; the last one repeats."""
    come_backs: int = 3
    chunk_s: float = 0.3
    """Longest time that a chunk of transferred state takes."""
    planner: Literal["real", "wild", "cautious"] = "real"
    """The planner: see `random_planner.RandomPlanner`."""
    thinks: bool = False
    """Whether plans are made ahead, and better ones looked for."""
    planner_trouble: float = 0.0
    checker_trouble: float = 0.0
    """Probabilities that the planner finds no plan, and that the checker refuses it."""
    early_exit: int | None = None
    meaning: Literal["time-limit", "cancelled", "preempted", "unknown"] | None = "cancelled"
    """Slurm's reason for stopping the job; None if it gives none."""
    time_left_s: float | None = None
    """Time until Slurm's limit, counted from the start."""
    mortality: float = 0.0
    """Probability that a worker dies of a signal that was meant for its job."""
    signal_grace_s: float = 20.0
    on_warning: Literal["requeue", "end"] = "requeue"
    may_requeue: bool = False
    restarts_left: int = 0
    slurm: bool = False
    """Whether the job runs in an allocation (allocation.py); the batch script runs on `batch_node`."""
    batch_node: str = ""
    drains: int = 0
    died_before: tuple[str, ...] = ()
    on_drain: Literal["stay", "vacate"] = "stay"
    replacements: int = 0
    spares: int = 0
    least: float = 0.5
    late: tuple[tuple[str, float], ...] = ()
    """Nodes that come later than others, and their delays; NEVER_S if they do not come."""
    spawns: tuple[tuple[str, Literal["hang", "refused"]], ...] = ()
    """Nodes on which no process can be started at the beginning, and how that shows."""
    examine: bool = False
    """Whether devices and links are measured before they are used."""
    slow: float = 0.0
    """Probability that the detector finds something slow, in each iteration (false_alarms.py)."""
    observes: bool = False
    """Whether slow devices and links are only reported."""
    ramp: Ramp = ()
    """Steps of the batch ramp-up, up to `micro_batches`."""
    evaluate_every: int = 0
    """Number of iterations between evaluations; there is one after the last iteration, too. 0: none."""
    shared: bool = False
    """Whether workers share their machines' processors."""
    unfit: float = 0.0
    """Probability of a bad probe result; half as often a probe fails, or is not answered."""
    noise: float = 0.0
    """Probability that a healthy device looks slow in a probe while others train on the same machine."""

    @property
    def batch_sizes(self) -> BatchSizes:
        return BatchSizes(self.micro_batches, self.ramp)

    @property
    def foresight(self) -> dict[str, Any]:
        """Settings of a job that plans ahead and searches for better plans, which requires known memory, here ample; or
        of one that does neither."""
        if not self.thinks:
            return {"plans_ahead": False, "search_s": 0.0}
        return {"plans_ahead": True, "search_s": 1.0, "memory_bytes": 1 << 40}

    @classmethod
    def foreseeing(cls, seed: int) -> Scenario:
        """Draw a longer job of any other kind that plans ahead for possible losses."""
        rng = random.Random(seed + 6_000_000)
        kinds = (cls.drawn, cls.drawn, cls.orphaned, cls.stormy, cls.allocated, cls.ramped, cls.sluggish)
        base = rng.choice(kinds)(seed)
        return dataclasses.replace(
            base,
            thinks=True,
            iterations=base.iterations + rng.choice([4, 12]),
            iteration_s=max(base.iteration_s, rng.choice([0.0, 0.0, 3.0])),
            limit_s=5 * base.limit_s,
            planner=base.planner if rng.random() < 0.8 else "wild",
        )

    @classmethod
    def ramped(cls, seed: int) -> Scenario:
        """Draw a job of any other kind that has fewer micro-batches in its first iterations."""
        rng = random.Random(seed + 5_000_000)
        kinds = (cls.drawn, cls.drawn, cls.orphaned, cls.stormy, cls.allocated, cls.stopped, cls.sluggish, cls.hindered)
        base = rng.choice(kinds)(seed)
        most = base.nodes * base.gpus_per_node  # as many replicas as there can be
        last = rng.choice([1, 2, 3, base.iterations])
        firsts = sorted({1, *(rng.randint(2, base.iterations + 1) for _ in range(last))})
        counts = sorted(rng.sample(range(most, most + 3 * len(firsts)), len(firsts)))
        return dataclasses.replace(
            base, micro_batches=counts[-1], ramp=tuple(zip(firsts, counts, strict=True)) if len(firsts) > 1 else ()
        )

    @classmethod
    def sluggish(cls, seed: int) -> Scenario:
        """Draw a job whose detector reports slow devices everywhere; some are slow."""
        rng = random.Random(seed * 2)
        drawn = cls.drawn(seed) if rng.random() < 0.7 else cls.orphaned(seed)
        return dataclasses.replace(
            drawn,
            iterations=drawn.iterations + 4,
            examine=rng.random() < 0.6,
            slow=rng.choice([0.1, 0.3, 0.6]),
            unfit=rng.choice([0.05, 0.2, 0.5]),
            shared=seed % 3 == 0,
            observes=rng.random() < 0.2,
        )

    @classmethod
    def harassed(cls, seed: int) -> Scenario:
        """Draw a job of two replicas whose ranks are killed or stopped every 4 to 14 s; half of the probes read slow.

        Every process comes back on its device, and is set aside at first if its probe read slow.
        """
        rng = random.Random(seed + 7_000_000)
        nodes, gpus, tp, pp = rng.choice([(2, 1, 1, 1), (2, 2, 1, 2), (4, 1, 1, 2), (4, 2, 2, 2), (3, 2, 1, 3)])
        iteration_s, length_s = rng.choice([0.3, 0.6]), rng.choice([40.0, 80.0])
        ranks, at = nodes * gpus, 10.0
        disturbances: list[Disturbance] = []
        while (at := at + rng.uniform(4.0, 14.0)) < length_s:
            rank = rng.randrange(ranks + len(disturbances))
            kind: DisturbanceKind = rng.choice(["kill", "kill", "stop"])
            disturbances.append(Disturbance(kind, delay=at, rank=rank))
        return cls(
            seed=seed,
            nodes=nodes,
            gpus_per_node=gpus,
            tp=tp,
            pp=pp,
            iterations=int(length_s / iteration_s),
            micro_batches=ranks,
            iteration_s=iteration_s,
            disturbances=tuple(disturbances),
            come_backs=99,
            examine=True,
            noise=0.5,
            limit_s=3000.0,
        )

    @classmethod
    def noisy(cls, seed: int) -> Scenario:
        """Draw a longer job with probes in which all devices are healthy and many probes read slow."""
        rng = random.Random(seed + 8_000_000)
        drawn = rng.choice([cls.drawn, cls.orphaned, cls.stormy, cls.stormy])(seed)
        return dataclasses.replace(
            drawn,
            examine=True,
            iterations=drawn.iterations + rng.choice([20, 60]),
            noise=rng.choice([0.3, 0.6, 0.9]),
            shared=rng.random() < 0.7,
            come_backs=8,
            limit_s=5 * drawn.limit_s,
        )

    @classmethod
    def drawn(cls, seed: int) -> Scenario:
        rng = random.Random(seed * 2 + 1)
        nodes, gpus = rng.choice(
            [(1, 4), (2, 2), (2, 2), (2, 4), (3, 2), (3, 4), (4, 1), (4, 2), (4, 3), (6, 2), (2, 3)]
        )
        ranks = nodes * gpus
        grids = [(tp, pp) for tp in (1, 2) for pp in (1, 2, 3) if gpus % tp == 0 and ranks // (tp * pp) >= 2]
        tp, pp = rng.choice(grids)
        dp = ranks // (tp * pp)
        iterations = rng.randint(3, 10)
        iteration_s = rng.choice([0.2, 0.4, 0.4, 0.8, 1.2]) if rng.random() < 0.95 else rng.uniform(3, 5)
        length_s = 4 + iterations * iteration_s
        disturbances, drawn = list[Disturbance](), rng.random()
        if drawn < 0.02:
            raise_all = Disturbance("raise_all", "sync" if rng.random() < 0.8 else "declare", nth=rng.randint(1, 3))
            disturbances.append(raise_all)
        else:
            for _ in range(rng.choice([0, 1, 1, 1, 2, 2, 2, 3, 3, 4, 5])):
                disturbances += cls._disturbances(rng, length_s, ranks, iterations)
        faults = []
        if rng.random() < 0.3:
            for number in range(rng.choice([1, 1, 2])):
                kind = rng.choice(["kill", "kill", "crash", "crash", "stop", "hang", "raise", "disconnect"])
                on_node = kind == "disconnect" or (kind not in ("hang", "raise") and rng.random() < 0.3)
                faults.append(
                    Fault(
                        id=number,
                        kind=kind,  # type: ignore[arg-type]
                        rank=None if on_node else rng.randrange(ranks),
                        node=f"n{rng.randint(1, nodes)}" if on_node else None,
                        iteration=rng.randint(1, iterations + (rng.random() < 0.1)),
                        phase=rng.choice(FAULT_PHASES if rng.random() < 0.3 else FAULT_PHASES[:4]),
                    )
                )
        return cls(
            seed=seed,
            nodes=nodes,
            gpus_per_node=gpus,
            tp=tp,
            pp=pp,
            iterations=iterations,
            micro_batches=rng.randint(dp, 3 * dp),
            iteration_s=iteration_s,
            resume_from=rng.randint(1, iterations - 1) if rng.random() < 0.1 else 0,
            checkpoint_every=rng.randint(1, 3) if rng.random() < 0.15 else 0,
            faults=tuple(faults),
            disturbances=tuple(disturbances),
            latency_s=rng.choice([0.002, 0.02, 0.02, 0.2]),
            duplicates=rng.choice([0.0, 0.0, 0.05, 0.2]),
            breaks_loudly=rng.choice([1.0, 1.0, 0.5, 0.0]),
            leaks=rng.random() < 0.3,
            objects=rng.randrange(ranks + 4) if rng.random() < 0.06 else None,
            other_digest=rng.randrange(ranks + 4) if rng.random() < 0.03 else None,
            agrees_up_to=rng.choice([1, 1, 2]),
            objections=rng.choice([1, 1, 2, 99]),
            fates=tuple(rng.choices(list(FATE_WEIGHTS), list(FATE_WEIGHTS.values()), k=8)),
            come_backs=rng.choice([3, 3, 3, 1, 0]),
            chunk_s=rng.choice([0.1, 0.3, 0.3, 8.0]),
            evaluate_every=seed % 15 // 5 + 1 if seed % 5 == 0 else 0,
            planner="wild" if seed % 4 else "real",
            planner_trouble=rng.choice([0.0, 0.0, 0.0, 0.2]),
            checker_trouble=rng.choice([0.0, 0.0, 0.0, 0.2]),
        )

    @classmethod
    def stormy(cls, seed: int) -> Scenario:
        """Draw a longer job with the disturbances of four, many duplicate messages, and leaks."""
        base = cls.drawn(seed)
        rng = random.Random(seed)
        ranks = base.nodes * base.gpus_per_node
        length_s = 4 + 2 * base.iterations * base.iteration_s
        more: list[Disturbance] = []
        for _ in range(rng.randint(2, 8)):
            more += cls._disturbances(rng, length_s, ranks, 2 * base.iterations)
        return dataclasses.replace(
            base,
            disturbances=(*base.disturbances, *(disturbance for disturbance in more if disturbance.kind != "signal")),
            iterations=2 * base.iterations,
            pp=1 if seed % 2 else base.pp,
            micro_batches=3 * ranks,
            duplicates=0.2,
            leaks=True,
            limit_s=3000.0,
        )

    @classmethod
    def orphaned(cls, seed: int) -> Scenario:
        """Draw a job whose supervisor dies, once or more, at critical moments; without signals and injected faults."""
        base = cls.drawn(seed)
        rng = random.Random(seed + 1)
        triggers: list[Trigger] = [
            *("spawn", "declare", "park", "parked", "propose", "go", "ready", "begin", "resumed", "sync", "step"),
            *("finished", "halt", "pause", "join", "joined", "time"),
        ]
        deaths = tuple(
            Disturbance(
                "supervisor",
                rng.choice(triggers),
                rng.choice([1, 1, 2, 3, 8]),
                rng.choice([0.0, rng.uniform(0.0, 0.1), rng.uniform(0.0, 2.0)]),
                seconds=rng.choice([0.1, 1.0, 3.0]),
            )
            for _ in range(rng.choice([1, 1, 2, 3]))
        )
        kept = tuple(disturbance for disturbance in base.disturbances if disturbance.kind not in ("signal", "inject"))
        return dataclasses.replace(base, disturbances=(*kept, *deaths), duplicates=0.0, leaks=False)

    @classmethod
    def allocated(cls, seed: int) -> Scenario:
        """Draw a longer job in a Slurm allocation, which loses nodes and may ask for others."""
        base = cls.drawn(seed)
        rng = random.Random(seed + 1_000_000)
        nodes = max(base.nodes, 2)
        iterations = rng.choice([2, 6, 6]) * base.iterations
        length_s = 4 + iterations * base.iteration_s
        kinds: tuple[DisturbanceKind, ...] = ("node", "agent", "vanish", "blackout", "kill")
        ranks = nodes * base.gpus_per_node
        more = tuple(
            Disturbance(rng.choice(kinds), delay=rng.uniform(4, length_s), rank=rng.randrange(ranks))
            for _ in range(rng.choice([1, 1, 2, 3]))
        )
        if rng.random() < 0.3:
            away_s = rng.choice([0.1, 1.0, 3.0])
            more += (Disturbance("supervisor", delay=rng.uniform(4, 2 * length_s), seconds=away_s),)
        if rng.random() < 0.4:
            drained_s = rng.choice([1.0, 20.0, NEVER_S])
            drained = Disturbance("drained", delay=rng.uniform(4, length_s), rank=rng.randrange(ranks))
            more += (dataclasses.replace(drained, seconds=drained_s),)
        return dataclasses.replace(
            base,
            nodes=nodes,
            iterations=iterations,
            micro_batches=3 * ranks,
            disturbances=(*base.disturbances, *more),
            slurm=True,
            batch_node=rng.choice(["n1", "n1", "n2"]),
            drains=rng.choice([0, 1, 2, 4]),
            died_before=tuple(f"n{i + 1}" for i in range(nodes) if rng.random() < 0.3),
            on_drain=rng.choice(["stay", "vacate", "vacate"]),
            replacements=rng.choice([0, 1, 2, 4]),
            may_requeue=rng.random() < 0.7,
            restarts_left=rng.choice([0, 1, 2]),
            limit_s=3000.0,
        )

    @classmethod
    def decimated(cls, seed: int) -> Scenario:
        """Draw a job with spares in which some nodes are lost before training begins, or never come."""
        base = cls.drawn(seed) if seed % 3 else cls.allocated(seed)
        rng = random.Random(seed + 3_000_000)
        nodes, spares = base.nodes + 2, rng.choice([1, 1, 2])
        ranks = nodes * base.gpus_per_node
        kinds: list[DisturbanceKind] = ["node", "node", "vanish", "vanish", "blackout", "agent"]
        triggers: list[Trigger] = ["time", "time", "time", "spawn", "spawn", "declare", "declare", "propose", "go"]
        early: list[Disturbance] = []
        for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
            trigger = rng.choice(triggers)
            nth = rng.randint(1, ranks) if trigger in ("spawn", "declare") else 1
            delay = rng.choice([0.0, rng.uniform(0, 1.0), rng.uniform(0, 6.0)])
            early.append(Disturbance(rng.choice(kinds), trigger, nth, delay, rng.randrange(ranks)))
        if rng.random() < 0.2:
            away_s = rng.choice([0.1, 1.0, 3.0])
            early.append(Disturbance("supervisor", rng.choice(triggers), 1, rng.uniform(0, 3.0), seconds=away_s))
        others = base.disturbances if rng.random() < 0.5 else ()
        slurm = base.slurm or rng.random() < 0.5
        return dataclasses.replace(
            base,
            nodes=nodes,
            spares=spares,
            micro_batches=3 * ranks,
            faults=(),
            disturbances=(
                *(disturbance for disturbance in others if disturbance.kind not in ("signal", "inject")),
                *early,
            ),
            slurm=slurm,
            batch_node="n1" if slurm else "",
            may_requeue=rng.random() < 0.7,
            restarts_left=rng.choice([0, 1, 2]),
            examine=rng.random() < 0.3,
            limit_s=3000.0,
        )

    @classmethod
    def hindered(cls, seed: int) -> Scenario:
        """Draw a job with trouble at its start: nodes that do not come or vanish, and processes that cannot start;
        often its supervisor dies as well."""
        base = cls.drawn(seed) if seed % 3 else cls.allocated(seed)
        rng = random.Random(seed + 4_000_000)
        spares = rng.choice([0, 0, 0, 1])
        nodes = max(base.nodes, 2) + spares
        ranks = nodes * base.gpus_per_node
        late: dict[str, float] = {}
        spawns: dict[str, Literal["hang", "refused"]] = {}
        early: list[Disturbance] = []
        moments: list[tuple[Trigger, int]] = [("arrive", nodes), ("order", nodes), ("spawn", ranks), ("declare", ranks)]
        for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
            name, (trigger, most) = f"n{rng.randint(1, nodes)}", rng.choice(moments)
            nth, delay = rng.randint(1, most), rng.choice([0.0, rng.uniform(0, 0.5), rng.uniform(0, 2.5)])
            trouble = rng.choice(["late", "late", "node", "node", "process", "process", "raise", "raise", "spawn"])
            if trouble == "late":
                late[name] = rng.choice(
                    [NEVER_S, NEVER_S, rng.uniform(1, 59), rng.uniform(60, 70), rng.uniform(60, 150)]
                )
            elif trouble == "spawn":
                spawns[name] = rng.choice(["hang", "refused"])
            elif trouble == "node":
                kinds: list[DisturbanceKind] = ["node", "vanish", "blackout", "agent"]
                early.append(Disturbance(rng.choice(kinds), trigger, nth, delay))
            elif trouble == "process":
                kinds = ["kill", "kill", "hang", "stop", "mute"]
                early.append(Disturbance(rng.choice(kinds), "spawn", rng.randint(1, ranks), delay))
            else:
                kinds = ["raise", "raise", "raise", "raise_node", "raise_node", "raise_all"]
                early.append(Disturbance(rng.choice(kinds), "spawn", rng.randint(1, ranks), delay))
        for _ in range(rng.choice([0, 0, 1, 1, 2])):
            trigger, most = rng.choice([*moments, ("propose", 1), ("go", 1), ("ready", ranks)])
            delay, away_s = rng.choice([0.0, rng.uniform(0, 3.0)]), rng.choice([0.1, 1.0, 3.0])
            early.append(Disturbance("supervisor", trigger, rng.randint(1, most), delay, seconds=away_s))
        others = base.disturbances if rng.random() < 0.3 else ()
        slurm = base.slurm or rng.random() < 0.3
        iterations = rng.choice([2, 6]) * base.iterations
        return dataclasses.replace(
            base,
            nodes=nodes,
            spares=spares,
            micro_batches=3 * ranks,
            iterations=iterations,
            faults=(),
            disturbances=(*(d for d in others if d.kind not in ("signal", "inject")), *early),
            late=tuple(late.items()),
            spawns=tuple(spawns.items()),
            least=rng.choice([0.5, 0.5, 0.25, 0.75, 1.0]),
            refuses=rng.randrange(ranks) if rng.random() < 0.1 else None,
            slurm=slurm,
            batch_node="n1" if slurm else "",
            replacements=rng.choice([0, 1, 2, 4]) if slurm else 0,
            may_requeue=rng.random() < 0.7,
            restarts_left=rng.choice([0, 1, 2]),
            examine=rng.random() < 0.3,
            duplicates=0.0,
            leaks=False,
            limit_s=max(3000.0, 1000.0 + 4 * iterations * base.iteration_s),  # with a quarter of its devices
        )

    @classmethod
    def stopped(cls, seed: int) -> Scenario:
        """Draw a job that is asked to end, at any moment and in any way; half of them have no other disturbances."""
        rng = random.Random(seed + 2_000_000)
        base = cls.allocated(seed) if rng.random() < 0.2 else cls.drawn(seed)
        warned: tuple[DisturbanceKind, int] = ("signal", SIGUSR2)
        kinds: list[tuple[DisturbanceKind, int]] = [warned] * 2 + [
            ("signal", SIGUSR1),
            ("signal", SIGTERM),
            ("cancel", SIGTERM),
            ("cancel", SIGTERM),
            ("cancel", rng.choice([SIGUSR1, SIGUSR2])),
            ("told", SIGTERM),
            ("told", SIGUSR1),
        ]
        moments: tuple[Trigger, ...] = (
            *("park", "parked", "propose", "go", "ready", "begin", "resumed", "sync", "sync", "step", "step", "pause"),
            *("finished", "halt", "join", "joined", "spawn", "declare", "save"),
        )
        timed: Trigger = "time"
        triggers: list[Trigger] = [*moments, *[timed] * 8]
        iterations = rng.choice([1, 2, 6]) * base.iterations
        stops: list[Disturbance] = []
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            kind, status = rng.choice(kinds)
            trigger = rng.choice(triggers)
            delay = rng.uniform(3, 8 + base.iterations * base.iteration_s) if trigger == "time" else rng.uniform(0, 1)
            seconds = rng.uniform(0.1, 30.0) if kind == "told" and rng.random() < 0.7 else NEVER_S
            nth = rng.randint(1, 2 * base.iterations) if trigger in ("sync", "step") else rng.choice([1, 1, 2])
            rank = rng.randrange(base.nodes * base.gpus_per_node)
            stops.append(Disturbance(kind, trigger, nth, delay, rank, seconds, status))
        others = base.disturbances if rng.random() < 0.5 else ()
        if rng.random() < 0.1:
            others += (Disturbance("supervisor", delay=rng.uniform(4, 20), seconds=rng.choice([0.1, 1.0, 3.0])),)
        return dataclasses.replace(
            base,
            iterations=iterations,
            disturbances=(*(disturbance for disturbance in others if disturbance.kind != "signal"), *stops),
            faults=base.faults if others else (),
            slurm=base.slurm or bool(seed % 5 > 1),
            batch_node=base.batch_node or ("n1" if seed % 5 > 1 else ""),
            meaning=rng.choice(["time-limit", "cancelled", "cancelled", "preempted", "unknown", None]),
            time_left_s=rng.choice([None, None, rng.uniform(20, 400)]),
            mortality=rng.choice([0.0, 0.0, 0.1, 1.0]),
            signal_grace_s=rng.choice([20.0, 20.0, 20.0, 6.0, 3.0]),
            on_warning=rng.choice(["requeue", "requeue", "end"]),
            limit_s=3000.0,
        )

    @classmethod
    def interrupted(cls, seed: int) -> Scenario:
        """Draw a job as in `stopped` in which operators stop the job instead: by Ctrl-C, TERM or `resihp stop`. Some
        ask for a checkpoint before."""
        rng = random.Random(seed + 7_000_000)
        base = cls.stopped(seed)
        stops = ("signal", "cancel", "told")
        others = tuple(
            disturbance for disturbance in base.disturbances if disturbance.kind not in stops or rng.random() < 0.1
        )
        operator_stops = [
            dataclasses.replace(
                disturbance, kind="signal", seconds=NEVER_S, status=rng.choice([SIGINT, SIGINT, SIGTERM, 0])
            )
            for disturbance in base.disturbances
            if disturbance.kind in stops and disturbance not in others
        ]
        saves = [
            dataclasses.replace(disturbance, kind="checkpoint", nth=1, delay=disturbance.delay * rng.random())
            for disturbance in operator_stops
            if rng.random() < 0.6
        ]
        if rng.random() < 0.2:
            operator_stops = []
        return dataclasses.replace(base, disturbances=(*others, *saves, *operator_stops))

    @staticmethod
    def _disturbances(rng: random.Random, length_s: float, ranks: int, iterations: int) -> list[Disturbance]:
        kind = rng.choices(list(DISTURBANCE_WEIGHTS), list(DISTURBANCE_WEIGHTS.values()))[0]
        trigger: Trigger = "time"
        nth, delay = 1, rng.uniform(0, length_s)
        if rng.random() < 0.6:
            trigger = rng.choice(
                [
                    *("park", "parked", "propose", "go", "ready", "begin", "resumed", "sync", "sync", "step", "step"),
                    *("finished", "halt", "pause", "join", "joined"),
                ]
            )
            nth = {"sync": rng.randint(1, iterations), "step": rng.randint(1, iterations * ranks)}.get(
                trigger, rng.choice([1, 1, 2, 3]) if trigger != "parked" else rng.randint(1, ranks)
            )
            delay = rng.choice([0.0, rng.uniform(0, 0.1), rng.uniform(0, 1.0)])
        elif rng.random() < 0.95:
            delay = max(delay, 5.0)
        seconds = NEVER_S
        if kind == "silent":
            seconds = rng.uniform(0.5, 20)
        elif kind == "mute":
            seconds = rng.uniform(5, 12)
        elif kind in ("stop", "hang", "blackout") and rng.random() < 0.4:
            seconds = rng.uniform(0.5, 20)
        status = rng.choice([-SIGKILL, -SIGKILL, -11, -6, 1, 1, 0]) if kind == "kill" else -SIGKILL
        if kind == "signal":
            status = rng.choice([SIGTERM, SIGINT])
        rank = rng.randrange(ranks) if trigger == "time" or rng.random() < 0.7 else None
        several = rng.choice([2, 3]) if kind == "kill" and rng.random() < 0.15 else 1
        first = Disturbance(kind, trigger, nth, delay, rank, seconds, status)
        others = [
            Disturbance(kind, trigger, nth, delay + rng.choice([0.0, 0.05]), rng.randrange(ranks), seconds, status)
            for _ in range(several - 1)
        ]
        if kind == "vanish" and rng.random() < 0.5:  # first silent, while it still computes
            before = rng.uniform(0.0, 8.0)
            others.append(Disturbance("silent", trigger, nth, delay, rank))
            first = dataclasses.replace(first, delay=delay + before)
        return [first, *others]
