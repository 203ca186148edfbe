"""What nodes gave in former jobs is told when it is known; a ledger that does not answer holds nobody up."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import resihp.db.engine
from resihp.db.writer import Ledger
from resihp.protocol.messages import Speed
from resihp.wrapper.supervisor.node_history import NodeMemory

USUAL = {("n1", "here", "A100"): Speed(flops=1e14)}


async def within(memory: NodeMemory, seconds: float) -> list[Any]:
    """What it told in so much time."""
    told: list[Any] = []
    heard = asyncio.Event()

    def tell(usual: Any) -> None:
        told.append(usual)
        heard.set()

    memory.recall(["n1"], tell)
    try:
        async with asyncio.timeout(seconds):
            await heard.wait()
    except TimeoutError:
        pass
    return told


def test_what_is_known_is_told_in_the_event_loop() -> None:
    asked: list[Any] = []

    def read(url: str, nodes: Sequence[str]) -> Any:
        asked.append((url, tuple(nodes)))
        return USUAL

    assert asyncio.run(within(NodeMemory("postgresql://x/y", read), 10.0)) == [USUAL]
    assert asked == [("postgresql://x/y", ("n1",))]


def test_a_ledger_that_hangs_holds_up_neither_the_job_nor_its_end() -> None:
    let_go, asked = threading.Event(), threading.Event()

    def hang(url: str, nodes: Sequence[str]) -> Any:
        asked.set()
        let_go.wait(60)
        return USUAL

    async def job() -> str:
        NodeMemory("postgresql://x/y", hang).recall(["n1"], lambda usual: None)
        await asyncio.to_thread(asked.wait, 10)
        return "over"

    assert asyncio.run(job()) == "over"
    let_go.set()  # and nobody is there any more to be told


@pytest.mark.parametrize("state", ["absent", "locked", "empty"])
def test_a_ledger_that_knows_nothing_tells_nothing(tmp_path: Path, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resihp.db.engine, "BUSY_TIMEOUT_S", 0.05)
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    if state != "absent":
        Ledger.open(url, tmp_path).close()
    other = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None) if state == "locked" else None
    if other is not None:
        other.execute("PRAGMA journal_mode=DELETE")
        other.execute("BEGIN EXCLUSIVE")
    assert asyncio.run(within(NodeMemory(url), 0.5)) == []
    assert (tmp_path / "ledger.db").exists() is (state != "absent"), "and it is not made either"
