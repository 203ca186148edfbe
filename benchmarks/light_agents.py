"""Agents without a node, hundreds in a process: what the supervisor of a large job hears, from a machine that has none.

Each has the real link to its leader (`resihp.wrapper.agent.supervisor_link`) over a real socket, beats once a second,
copies the journal as far as its number, and answers for its workers: they start, declare, confirm, build, park and step
as they are told. What workers say is encoded once for all that say the same. Told by `supervisor.py` over a pipe when
to step, to die or to connect again; `Tally` is what it asks for.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from benchmarks.walks import outcome
from resihp.detector.observation import pack
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan
from resihp.pipeline.schedules import orders_of
from resihp.protocol import messages as m
from resihp.protocol.forwarding import label_of, order_in, records_in
from resihp.protocol.framing import encode
from resihp.record import journal_format
from resihp.wrapper.agent.supervisor_link import LeaderLink
from resihp.wrapper.agent.worker_history import REPORTED_STEPS, WorkerRecord

MODEL = ModelSpec(layers=64, hidden=8192, heads=64, kv_groups=8, ffn_hidden=28672, vocab=128_000, sequence=8192)
MICRO_BATCHES = 16
"""Of a replica."""
TOKENS = 8192
VARIANTS = 4
"""Different reports of equally much work in an iteration: no device is as fast as another."""
BEAT_S = 1.0
AT_ONCE = 16
"""Agents that speak before others are heard again."""

_orders: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(m.WorkerOrder)


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """How the agents of one process stand."""

    following: int
    """Of the newest term that any of them follows."""
    term: int
    begun: int
    """Agents whose workers were told to train by the newest plan."""
    epoch: int
    released: int
    followed_at: float
    """When the last of them began to follow, in seconds since 1970."""
    longest_silence_s: float
    """That any of them has heard nothing, since it was last asked to forget."""


class Workloads:
    """What ranks say of a plan, encoded once; `iterations`: what the job is to train."""

    def __init__(self, ranks: int, ranks_of_replica: int, iterations: int) -> None:
        micro_batches = MICRO_BATCHES * (ranks // ranks_of_replica)
        self.declare = encode(
            m.Declare(
                model=MODEL, micro_batches=micro_batches, iterations=iterations, resume_from=0, fingerprint="light"
            )
        )
        self._ring = ranks
        self._plan: Plan | None = None
        self._digests: dict[int, bytes] = {}
        self._primitives: dict[int, int] = {}
        """How many each rank that has work computes in an iteration."""
        self._stepped: dict[tuple[int, int], list[bytes]] = {}

    def proposed(self, epoch: int, body: bytes) -> bytes:
        if epoch not in self._digests:
            plan: Plan = _orders.decode(body).plan
            self._plan, self._stepped = plan, {}
            self._digests = {epoch: encode(m.Confirm(epoch=epoch, digest=plan.digest))}
            self._primitives = {
                rank: len(order)
                for replica, orders in zip(plan.layout.replicas, orders_of(plan), strict=True)
                for stage, order in zip(replica.stages, orders, strict=True)
                for rank in stage.ranks
            }
        return self._digests[epoch]

    def probed(self, rank: int, probe: int) -> bytes:
        speed = m.Speed(flops=4e14 * random.uniform(0.98, 1.02), memory_bytes=2e12, hardware="light")
        near = [m.Transfer(peer=(rank + side) % self._ring, seconds=0.001) for side in (1, -1)]
        return encode(m.Probed(probe=probe, speed=speed, transfers=tuple(near), seconds=1.0))

    def workload(self, iteration: int) -> bytes:
        assert self._plan is not None
        count = sum(map(len, self._plan.assignment))
        return encode(
            m.Workload(
                epoch=self._plan.epoch, iteration=iteration, tokens=(TOKENS,) * count, squares=(TOKENS**2,) * count
            )
        )

    def stepped(self, rank: int, iteration: int) -> bytes | None:
        """None for a rank that has no work."""
        primitives = self._primitives.get(rank)
        if primitives is None:
            return None
        if (primitives, iteration) not in self._stepped:
            self._stepped = {key: said for key, said in self._stepped.items() if key[1] == iteration}
            self._stepped[primitives, iteration] = [self._report(primitives, iteration) for _ in range(VARIANTS)]
        return self._stepped[primitives, iteration][rank % VARIANTS]

    def _report(self, primitives: int, iteration: int) -> bytes:
        assert self._plan is not None
        computed = [random.uniform(0.98, 1.02) * 0.1 for _ in range(primitives)]
        starts = [0.1 * i for i in range(primitives)]
        rows = [starts, computed, computed, [TOKENS] * primitives, [TOKENS**2] * primitives]
        report = m.Stepped(
            epoch=self._plan.epoch,
            outcome=outcome(iteration),
            seconds=9.0,
            compute_s=sum(computed),
            reduced_s=8.9,
            chunks=pack(rows),
        )
        return encode(report)


class Link(LeaderLink):
    """Notes when it began to follow, and how long nothing was heard."""

    followed_at = 0.0
    last_heard = 0.0
    longest_silence_s = 0.0

    def _follow(self, *arguments: Any) -> None:
        super()._follow(*arguments)
        self.followed_at = time.time()
        self.note()

    def _hand_over(self, order: m.AgentOrder) -> None:
        self.note()
        super()._hand_over(order)

    def note(self) -> None:
        now = time.monotonic()
        if self.last_heard:
            self.longest_silence_s = max(self.longest_silence_s, now - self.last_heard)
        self.last_heard = now

    def break_off(self) -> None:
        if self._channel is not None:
            self._channel.abort()


class LightAgent:
    """One agent (`supervisor_link.Follower`) and its workers, ranks and devices as they were given."""

    def __init__(self, node: str, number: int, devices: int, address: tuple[str, int], key: bytes) -> None:
        self.node = node
        self.log = 0
        self.epoch = 0
        """Of the plan that is in effect here."""
        self.released = False
        self.link = Link(address, key, self, succession=True)
        self._number = number
        self._devices = devices
        self._newest = 0
        self._ranks: dict[int, int] = {}
        self._records: dict[int, WorkerRecord] = {}
        self._told: Workloads
        self._stepped = 0
        self._running: list[asyncio.Task[None]] = []

    def start(self, told: Workloads) -> None:
        self._told = told
        self._running = [
            asyncio.create_task(work) for work in (self.link.run(), self.link.watch(), self._beat(random.random()))
        ]

    def die(self) -> None:
        for task in self._running:
            task.cancel()
        self.link.break_off()

    # --- what the link asks -----------------------------------------------------------------------------------

    async def introduce(self, own_host: str) -> m.Join:
        return m.Join(
            node=self.node,
            host=f"{self.node}.cluster",
            pid=100_000 + self._number,
            devices=self._devices,
            epoch=max(1, self.epoch) if self.link.welcome else 0,
            peer_port=1,
            hardware="light",
        )

    def inventory(self) -> m.Inventory:
        """As `resihp.wrapper.agent.workers` tells it: the last steps of every worker."""
        return m.Inventory(
            workers=tuple(
                m.RunningWorker(
                    rank=rank, device=device, pid=rank + 2, steps=record.steps(REPORTED_STEPS), said=record.still_true()
                )
                for rank, device in self._ranks.items()
                for record in (self._records[rank],)
            ),
            epoch=self._newest,
        )

    def dismiss(self, grace_s: float) -> None:
        self.released = True

    def obey(self, order: m.AgentOrder) -> None:
        match order:
            case m.Spawn():
                for start in order.workers:
                    self._ranks[start.rank] = start.device
                    self._records[start.rank] = WorkerRecord()
                    self.link.send(m.Spawned(rank=start.rank, device=start.device, pid=start.rank + 2))
                for start in order.workers:
                    self._say(start.rank, self._told.declare)
            case m.ToWorkers():
                self._ordered(order)
            case m.Replicate():
                if records := records_in(order):
                    self.log = journal_format.decode(records[-1]).seq
            case m.Release():
                self.dismiss(order.grace_s)
            case _:
                pass

    def _ordered(self, to: m.ToWorkers) -> None:
        body = order_in(to)
        label = label_of(body)
        self._newest = max(self._newest, label.announced_epoch)
        for rank in to.ranks:
            self._records[rank].note_order(label)
        answer: Callable[[int], bytes | None] = lambda rank: None  # noqa: E731
        match label.type:
            case m.Propose.__name__:
                confirm = self._told.proposed(label.announced_epoch, body)
                answer = lambda rank: confirm  # noqa: E731
            case m.Go.__name__:
                self.epoch = label.epoch
                ready = encode(m.Ready(epoch=label.epoch, groups_s=1.0, state_s=1.0))
                answer = lambda rank: ready  # noqa: E731
            case m.Probe.__name__:
                number = _orders.decode(body).probe
                answer = lambda rank: self._told.probed(rank, number)  # noqa: E731
            case m.Park.__name__:
                parked = m.Parked(
                    epoch=label.epoch,
                    holds=(self.epoch,),
                    stepped=self._stepped,
                    outcome=outcome(self._stepped) if self._stepped else None,
                    ready=False,
                )
                told = encode(parked)
                answer = lambda rank: told  # noqa: E731
            case _:
                pass
        for rank in to.ranks:
            if (body := answer(rank)) is not None:
                self._say(rank, body)

    # --- what it says -----------------------------------------------------------------------------------------

    def step(self, iteration: int) -> None:
        """All of its workers have taken the step of an iteration."""
        self._stepped = iteration
        if 0 in self._ranks:
            self._say(0, self._told.workload(iteration + 1))
        for rank in self._ranks:
            if (report := self._told.stepped(rank, iteration)) is not None:
                self._say(rank, report)

    def jump(self, log: int, iteration: int) -> None:
        """The journal was written on to this record, of that iteration: so was its copy."""
        self.log, self._stepped = log, iteration

    def _say(self, rank: int, body: bytes) -> None:
        self._records[rank].add_report(label_of(body), body)
        self.link.send(m.FromWorker(rank=rank, body=body))

    async def _beat(self, late_s: float) -> None:
        await asyncio.sleep(late_s * BEAT_S)
        while True:
            progress = m.Progress(
                epoch=max(1, self.epoch),
                iteration=self._stepped + 1,
                primitives=int(time.monotonic() * 10),
                activity="compute" if self.epoch else "starting",
            )
            beats = [m.WorkerBeat(rank=rank, age_s=0.3, state="S", progress=progress) for rank in self._ranks]
            self.link.send(m.Beat(workers=tuple(beats)))
            await asyncio.sleep(BEAT_S)


def serve(
    orders: Connection,
    nodes: list[tuple[int, str]],
    devices: int,
    ranks: int,
    ranks_of_replica: int,
    iterations: int,
    address: tuple[str, int],
    key: bytes,
) -> None:
    """Be the agents of these (number, name) until the pipe is closed. Entry of a process."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # links tell of each connection
    os.nice(10)  # the other machines', which would not take the supervisor's cores from it
    told = Workloads(ranks, ranks_of_replica, iterations)
    agents = {node: LightAgent(node, number, devices, address, key) for number, node in nodes}
    asyncio.run(_serve(orders, agents, told))


async def _serve(orders: Connection, agents: dict[str, LightAgent], told: Workloads) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(orders.fileno(), readable.set)
    while True:
        await readable.wait()
        readable.clear()
        while orders.poll():
            try:
                order, *arguments = orders.recv()
            except EOFError:
                return
            links = [agent.link for agent in agents.values()]
            match order:
                case "start":
                    for agent in agents.values():
                        agent.start(told)
                case "step":
                    for i, agent in enumerate(list(agents.values())):
                        agent.step(*arguments)
                        if i % AT_ONCE == 0:
                            await asyncio.sleep(0)
                case "die":
                    for node in arguments:
                        if node in agents:
                            agents.pop(node).die()
                case "break":
                    for link in links:
                        link.break_off()
                case "jump":
                    for agent in agents.values():
                        agent.jump(*arguments)
                case "forget":
                    for link in links:
                        link.note()
                        link.longest_silence_s = 0.0
                case "tally":
                    orders.send(tally(list(agents.values())))


def tally(agents: list[LightAgent]) -> Tally:
    term = max((agent.link.promised for agent in agents), default=0)
    epoch = max((agent.epoch for agent in agents), default=0)
    now = time.monotonic()
    return Tally(
        following=sum(agent.link.connected and agent.link.promised == term for agent in agents),
        term=term,
        begun=sum(agent.epoch == epoch for agent in agents),
        epoch=epoch,
        released=sum(agent.released for agent in agents),
        followed_at=max(agent.link.followed_at for agent in agents),
        longest_silence_s=max(
            max(agent.link.longest_silence_s, now - agent.link.last_heard if agent.link.last_heard else 0.0)
            for agent in agents
        ),
    )
