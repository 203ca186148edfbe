"""What the two walks of docs/architecture.md cost on their way through agent and supervisor, in CPU time of one core.

    python benchmarks/walks.py [--micro-batches 16] [--gpus 64] [--blocks 30] [--json FILE]

A report is a `Stepped` with the measurements of its iteration's primitives, a plan the `Propose` of TP2 PP4 for that
many GPUs, 8 on a node, with the order of each stage's work. The agent's and the supervisor's own code, without a
network between them: a report from the worker's socket to the sealed frame, from there to the controller's event; a
plan from the order to the sealed frames of all nodes, from there to the sockets of a node's workers; and what the
controller needs to compare the digests that all ranks confirm. Medians of blocks, in microseconds. The same file
measures any version that has these modules: put that tree first on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from resihp.detector.observation import CHUNKS, pack
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan, spread
from resihp.pipeline.schedules import orders_of
from resihp.protocol import messages as m
from resihp.protocol.channels import LocalChannel
from resihp.protocol.framing import Envelope, LocalCodec, SecureCodec
from resihp.protocol.resumable import Conversation
from resihp.wrapper.agent.sockets import WorkerPipe
from resihp.wrapper.agent.workers import Workers
from resihp.wrapper.config.run_spec import Program, RunRequest
from resihp.wrapper.supervisor.agents.links import AgentLinks

ON_A_NODE = 8
REPORTS = 50
"""In a block; so many fit the buffer of a socket."""
KEY = bytes(32)


def outcome(iteration: int) -> m.StepOutcome:
    return m.StepOutcome(
        iteration=iteration,
        clip=0.731,
        skip=False,
        learning_rate=3e-4,
        gradient_norm=1.371,
        loss=2.718,
        tokens=524288,
        sum_squared_lengths=1 << 32,
        samples=512,
        samples_digest="0123456789abcdef",
    )


def start(rank: int, node: str) -> m.Start:
    return m.Start(
        rank=rank,
        node=node,
        device=rank % ON_A_NODE,
        world_size=ON_A_NODE,
        nodes=(node,),
        faults=(),
        checkpoint_folder="",
        checkpoint_every=0,
        resume=False,
    )


def request(folder: str) -> RunRequest:
    return RunRequest(
        job="walks",
        folder=folder,
        program=Program(kind="script", argv=("train.py",), interpreter=sys.executable, preload=""),
        command=("python", "train.py"),
        cwd=folder,
        python_path="",
        nodes=1,
        gpus_per_node=ON_A_NODE,
        tp=8,
        pp=1,
        schedule="1f1b",
        faults=(),
        checkpoint_folder="",
        checkpoint_every=0,
        checkpoint_keep=1,
        resume=False,
        ledger_url="sqlite",
        restart_count=0,
        configuration={},
    )


class Channel:
    """A connection's two ends in memory: what is posted is sealed at one end, and opened at the other."""

    peer = "10.0.0.1:4000"

    def __init__(self, receives: Any) -> None:
        self._ours: SecureCodec[Any] = SecureCodec(KEY, "client", receives)
        self._theirs: SecureCodec[Any] = SecureCodec(KEY, "server", receives)
        to_theirs, to_ours = self._ours.greeting, self._theirs.greeting
        while to_theirs or to_ours:
            assert not [*self._theirs.feed(to_theirs), *self._ours.feed(to_ours)]
            to_theirs, to_ours = self._ours.take_reply(), self._theirs.take_reply()
        self.frames: list[bytes] = []

    def post(self, envelope: Any) -> None:
        self.frames.append(self._ours.encode(envelope))

    def opened(self) -> list[Envelope[Any]]:
        frames, self.frames = self.frames, []
        return [envelope for frame in frames for envelope in self._theirs.feed(frame)]


class Job:
    """One agent with its workers and their sockets, and the supervisor's links to all agents."""

    def __init__(self, folder: str, gpus: int) -> None:
        self.nodes = tuple(f"n{node}" for node in range(gpus // ON_A_NODE))
        self.events: list[Any] = []
        launcher: Any = self
        self.links = AgentLinks(launcher, self.events.append, lambda work: None, reconnect_s=1.0)
        self.down = {node: self._follow(node) for node in self.nodes}
        self.up = Channel(Envelope[m.AgentMessage])
        self.conversation: Conversation[Any] = Conversation()
        self.conversation.connect(self.up.post)
        self.conversation.take(Envelope())
        self.up.opened()
        forks, _ = self._sockets = socket.socketpair()
        self.workers = Workers(request(folder), "n0", Path(folder), self.conversation.post, lambda: None, forks)
        self.workers.spawn(m.Spawn(workers=tuple(start(rank, "n0") for rank in range(ON_A_NODE)), environment={}))
        self.pipes = [self.workers._workers[rank].pipe for rank in range(ON_A_NODE)]
        self.ends = [end for _, end in self.workers._forks._waiting]
        for end in self.ends:
            assert isinstance(LocalChannel(end).recv(m.WorkerOrder), m.Start)

    def _follow(self, node: str) -> Channel:
        """The supervisor has its agent's inventory."""
        at, link = self.nodes.index(node) * ON_A_NODE, self.links._links[node]
        channel = Channel(Envelope[m.AgentOrder])
        link.conversation.connect(channel.post)
        link.conversation.take(Envelope())
        link.join = m.Join(node=node, host=node, pid=1, devices=ON_A_NODE, epoch=1)
        running = tuple(m.RunningWorker(rank=at + i, device=i, pid=9) for i in range(ON_A_NODE))
        self.links._receive(link, m.Inventory(workers=running))
        channel.opened()
        return channel


def timed(work: Callable[[], object]) -> float:
    """CPU seconds of this process."""
    began = time.process_time()
    work()
    return time.process_time() - began


def received(end: socket.socket, pipe: WorkerPipe) -> m.WorkerOrder:
    """What comes out at the worker's end, however little the socket holds."""
    codec: LocalCodec[m.WorkerOrder] = LocalCodec(m.WorkerOrder)
    while True:
        for order in codec.feed(end.recv(1 << 20)):
            return order
        pipe._flush()


def report_block(job: Job, reports: list[bytes]) -> tuple[float, float]:
    """(agent, supervisor) for one report."""
    job.ends[0].sendall(b"".join(reports))
    agent_s = timed(job.pipes[0].drain)
    assert len(job.up.frames) == len(reports)
    link = job.links._links["n0"]
    job.events.clear()

    def supervisor() -> None:
        for envelope in job.up.opened():
            job.links._receive(link, link.conversation.take(envelope))

    supervisor_s = timed(supervisor)
    assert [type(event.message) for event in job.events] == [m.Stepped] * len(reports)
    job.conversation.take(Envelope(acknowledged=job.conversation.sent))
    return agent_s / len(reports), supervisor_s / len(reports)


def plan_block(job: Job, propose: m.Propose) -> tuple[float, float, float]:
    """(supervisor, agent, comparing the digests) for one plan."""
    ranks = propose.plan.layout.ranks
    supervisor_s = timed(lambda: job.links.order(ranks, propose))
    channel = job.down["n0"]

    def agent() -> None:
        for envelope in channel.opened():
            job.workers.order(job.conversation.take(envelope))

    agent_s = timed(agent)
    assert all(received(end, pipe) == propose for end, pipe in zip(job.ends, job.pipes, strict=True))
    for node, link in job.links._links.items():
        job.down[node].frames.clear()
        link.conversation.take(Envelope(acknowledged=link.conversation.sent))
    fresh = Plan(**{name: getattr(propose.plan, name) for name in propose.plan.__struct_fields__})
    return supervisor_s, agent_s, timed(lambda: [fresh.digest for _ in ranks])


async def measured(micro_batches: int, gpus: int, blocks: int) -> dict[str, float]:
    """Medians in microseconds, and bytes."""
    primitives = 3 * micro_batches
    chunks = pack([[0.01 * i for i in range(primitives)]] * len(CHUNKS))
    codec: LocalCodec[Any] = LocalCodec(m.WorkerMessage)
    layout = Layout.uniform(tp=2, pp=4, dp=gpus // 8, layers=32)
    plan = Plan(epoch=2, layout=layout, assignment=spread(micro_batches * (gpus // 8), gpus // 8))
    plan = msgspec.structs.replace(plan, orders=orders_of(plan))
    nodes = {rank: f"n{rank // ON_A_NODE}" for rank in layout.ranks}
    propose = m.Propose(plan=plan, next_iteration=5, nodes=nodes)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(folder, gpus)
        found: list[tuple[float, ...]] = []
        for block in range(blocks + 1):
            reports = [
                codec.encode(m.Stepped(epoch=1, outcome=outcome(i), seconds=1.0, compute_s=0.9, chunks=chunks))
                for i in range(block * REPORTS, (block + 1) * REPORTS)
            ]
            found.append((*report_block(job, reports), *plan_block(job, propose)))
        for pipe in job.pipes:
            pipe.close()
    report_agent, report_supervisor, plan_supervisor, plan_agent, digests = (
        statistics.median(column) * 1e6 for column in zip(*found[1:], strict=True)
    )
    return {
        "report_bytes": len(reports[0]),
        "report_agent_us": report_agent,
        "report_supervisor_us": report_supervisor,
        "plan_bytes": len(codec.encode(propose)),
        "plan_supervisor_us": plan_supervisor,
        "plan_agent_us": plan_agent,
        "plan_digests_us": digests,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, default=16, help="of a replica")
    parser.add_argument("--gpus", type=int, default=64, help="a multiple of 8")
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = asyncio.run(measured(options.micro_batches, options.gpus, options.blocks))
    table = Table("what", "here")
    for name, value in found.items():
        table.add_row(name.replace("_", " "), f"{value:.1f}" if name.endswith("us") else f"{value:.0f}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
