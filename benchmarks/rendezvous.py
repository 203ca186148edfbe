"""What it costs the supervisor that all ranks of a job find each other, in CPU time of one core.

    python benchmarks/rendezvous.py [--nodes 128 256 512 1024 2048] [--gpus-per-node 8] [--json FILE]

Each rank attends six groups and each NCCL communicator's first rank tells its id, as on GPUs: all ranks, its tensor
group, two pipeline edges, its data group, its gradients' group. Real messages, sealed and numbered, from the bytes that
come from an agent to the bytes that go to agents; without a network. `exponent`: of CPU time by ranks, from all sizes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from resihp.protocol import messages as m
from resihp.protocol.framing import Envelope, SecureCodec
from resihp.protocol.resumable import Conversation
from resihp.wrapper.supervisor.agents.rendezvous import Exchange

MEETING = m.MeetingId(epoch=1)
NCCL_ID_BYTES = 128
AT_ONCE = 50
"""Messages that come in one turn of the supervisor's loop."""


class Link:
    """One agent's connection, both ends of it."""

    def __init__(self) -> None:
        self.agent: SecureCodec[Any] = SecureCodec(bytes(32), "client", Envelope[m.AgentOrder])
        self.ours: SecureCodec[Any] = SecureCodec(bytes(32), "server", Envelope[m.AgentMessage])
        list(self.ours.feed(self.agent.greeting))
        list(self.agent.feed(self.ours.greeting))
        to_us, to_agent = self.agent.take_reply(), self.ours.take_reply()
        list(self.ours.feed(to_us))
        list(self.agent.feed(to_agent))
        self.messages_out = self.bytes_out = self._said = 0
        self.conversation: Conversation[Any] = Conversation()
        self.conversation.connect(self._send)
        self.conversation.take(Envelope(message=m.Beat(workers=())))

    def _send(self, envelope: Envelope[Any]) -> None:
        self.messages_out += 1
        self.bytes_out += len(self.ours.encode(envelope))

    def sealed(self, message: m.MeetingMessage) -> bytes:
        self._said += 1
        return self.agent.encode(Envelope(number=self._said, message=message))

    def heard(self, frame: bytes) -> Iterator[Any]:
        for envelope in self.ours.feed(frame):
            yield self.conversation.take(envelope)


def groups(rank: int, ranks: int, on_a_node: int) -> tuple[str, ...]:
    ahead, behind = (rank + on_a_node) % ranks, (rank - on_a_node) % ranks
    return (
        "world",
        f"tensor/{rank // on_a_node}",
        f"edge/{rank}/{ahead}",
        f"edge/{behind}/{rank}",
        f"data/{rank % 64}/{rank // 1024}",
        f"sync/{rank // 32}",
    )


def said(links: list[Link], on_a_node: int) -> list[tuple[int, bytes]]:
    """All that comes, by node: an agent asks once for each group, and tells each id at once."""
    ranks = len(links) * on_a_node
    frames = []
    told: set[str] = set()
    for node, link in enumerate(links):
        asked: set[str] = set()
        for rank in range(node * on_a_node, (node + 1) * on_a_node):
            wanted = [group for group in groups(rank, ranks, on_a_node) if group not in asked]
            asked.update(wanted)
            frames.append((node, link.sealed(m.Attend(meeting=MEETING, groups=tuple(wanted)))))
    for node, link in enumerate(links):
        for rank in range(node * on_a_node, (node + 1) * on_a_node):
            for group in groups(rank, ranks, on_a_node):
                if group not in told:
                    told.add(group)
                    words = (m.Said(group, "0", bytes(NCCL_ID_BYTES)),)
                    frames.append((node, link.sealed(m.Publish(meeting=MEETING, said=words))))
    return frames


async def measure(nodes: int, on_a_node: int) -> dict[str, float]:
    links = [Link() for _ in range(nodes)]
    posts = [link.conversation.post for link in links]
    exchange = Exchange(lambda node, order: posts[int(node)](order))
    exchange.open(MEETING)
    frames = said(links, on_a_node)
    began = time.process_time()
    for i, (node, frame) in enumerate(frames):
        for message in links[node].heard(frame):
            exchange.receive(str(node), message)
        if i % AT_ONCE == 0:
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    cpu_s = time.process_time() - began
    return {
        "nodes": nodes,
        "ranks": nodes * on_a_node,
        "messages_in": len(frames),
        "messages_out": sum(link.messages_out for link in links),
        "megabytes_out": sum(link.bytes_out for link in links) / 1e6,
        "cpu_s": cpu_s,
        "us_per_rank": 1e6 * cpu_s / (nodes * on_a_node),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    arguments = parser.parse_args()
    rows = [asyncio.run(measure(nodes, arguments.gpus_per_node)) for nodes in arguments.nodes]
    table = Table(title="all ranks find each other: the supervisor's part")
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=120).print(table)
    if len(rows) > 1:
        slope = np.polyfit([math.log(row["ranks"]) for row in rows], [math.log(row["cpu_s"]) for row in rows], 1)[0]
        print(f"exponent {slope:.2f}; target: 2048 nodes in less than 3 s")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
