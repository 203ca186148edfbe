"""A job's journal as a supervisor writes it: 3 nodes of 4, one process killed in iteration 12, 20 iterations in all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from db.writer import Ledger
from resihp import journal
from resihp.layout import Layout
from resihp.plan import Plan, spread
from resihp.protocol.messages import StepOutcome

BEGAN = 1_750_000_000.0
DP3 = Layout.uniform(tp=2, pp=2, dp=3, layers=8)


def outcome(iteration: int, loss: float | None = None) -> StepOutcome:
    return StepOutcome(
        iteration=iteration,
        clip=1.0,
        skip=False,
        learning_rate=1e-3,
        gradient_norm=2.0,
        loss=4.0 - 0.1 * iteration if loss is None else loss,
        tokens=8192,
        sum_squared_lengths=1 << 40,
        samples=17,
        samples_digest="00ff00ff00ff00ff",
    )


def started(name: str = "local-1", user: str = "me", restart: int = 0) -> journal.JobStarted:
    return journal.JobStarted(
        job=name,
        command=("python", "train.py", "--title", 'a "b" [red]c'),
        nodes=3,
        gpus_per_node=4,
        tp=2,
        pp=2,
        schedule="1f1b",
        host="here",
        user=user,
        restart_count=restart,
        version="0.1.0",
        configuration={"layout": {"tp": 2}},
    )


def story(ended: bool = True) -> Iterator[tuple[journal.AnyEntry, float]]:
    """(entry, time). Iterations take 0.5 s; the failure is noticed 0.3 s into the 12th and costs 1.0 s more."""
    at = BEGAN
    yield started(), at
    for n in range(3):
        yield journal.NodeJoined(node=f"n{n + 1}", host="here", devices=4), at + 0.1
        for device in range(4):
            rank = 4 * n + device
            yield journal.WorkerStarted(rank=rank, node=f"n{n + 1}", device=device, pid=1000 + rank, epoch=0), at + 0.2
    at += 2.0
    plan = Plan(epoch=1, layout=DP3, assignment=spread(12, 3))
    yield journal.PlanDecided(plan=plan, next_iteration=1, action="start", finish=None, reason="start"), at
    for i in range(1, 12):
        at += 0.5
        yield journal.IterationCommitted(epoch=1, outcome=outcome(i), seconds=0.5, predicted_seconds=None), at
    text = "kill:rank=5@iteration=12,phase=forward"
    yield journal.FaultInjected(fault=1, text=text, rank=5, node=None, iteration=12), at + 0.28
    noticed = at + 0.3
    yield journal.WorkerEnded(rank=5, exit=-9, epoch=1), noticed
    yield (
        journal.FailureFound(
            failure=1,
            kind="fail-stop",
            component="process",
            cause="rank 5 killed by signal 9 (SIGKILL)",
            ranks=(5,),
            node="n2",
            device=1,
            iteration=12,
            epoch=2,
            evidence="pid 1005 on node n2: killed by signal 9 (SIGKILL)",
            detect_s=0.02,
        ),
        noticed + 0.1,
    )
    plan = Plan(epoch=2, layout=DP3.without(frozenset({5})), assignment=spread(12, 2))
    reason = "rank 5 killed by signal 9 (SIGKILL)"
    yield journal.PlanDecided(plan=plan, next_iteration=12, action="redo", finish=None, reason=reason), noticed + 0.1
    at = noticed + 1.0
    yield journal.IterationCommitted(epoch=2, outcome=outcome(12), seconds=0.6, predicted_seconds=None), at
    yield (
        journal.Reconfigured(
            epoch=2,
            failures=(1,),
            attempts=1,
            action="redo",
            park_s=0.1,
            plan_s=0.05,
            groups_s=0.2,
            state_s=0.05,
            first_iteration_s=0.6,
            seconds=1.0,
        ),
        at,
    )
    yield journal.Suspected(rank=3, node="n1", evidence="no progress for 3.0 s"), at
    yield journal.Suspected(rank=3, node="n1", evidence="progress again", cleared=True), at
    for i in range(13, 21):
        at += 0.6
        yield journal.IterationCommitted(epoch=2, outcome=outcome(i), seconds=0.6, predicted_seconds=0.59), at
    yield journal.CheckpointCommitted(iteration=20, folder="checkpoints/20", bytes=1 << 20, seconds=0.2), at + 0.2
    if ended:
        for rank in range(12):
            if rank != 5:
                yield journal.WorkerEnded(rank=rank, exit=0, epoch=2), at + 0.3
        yield journal.JobEnded(exit_code=0, state="completed", reason="20 iterations done"), at + 0.3


@pytest.fixture
def records(tmp_path: Path) -> list[journal.Record]:
    """The story's journal, read back from its file, `journal` in the test's folder."""
    path = tmp_path / "journal"
    writer = journal.Journal(path, sync=False)
    for entry, at in story():
        writer.append(entry, at)
    writer.close()
    return journal.read(path)


class Listener:
    """Collects what the writer says."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def __call__(self, text: str) -> None:
        self.heard.append(text)


@pytest.fixture
def open_ledger(tmp_path: Path) -> Iterator[Callable[..., Ledger]]:
    """Opens ledgers in the test's folder, and closes what the test leaves open."""
    opened: list[Ledger] = []

    def opener(**arguments: object) -> Ledger:
        ledger = Ledger.open("sqlite", tmp_path, **arguments)  # type: ignore[arg-type]
        opened.append(ledger)
        return ledger

    yield opener
    for ledger in opened:
        ledger.close(5.0)
