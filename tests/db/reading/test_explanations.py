"""Plans of the ledger, explained: from what was kept with them, and not at all where nothing was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from resihp.db.reading.queries import Reader
from resihp.db.writer import Ledger
from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan, spread
from resihp.protocol.messages import Declare
from resihp.record import journal
from resihp.scheduler import Situation, decide
from resihp.scheduler.cost.profile import Profile, Times
from resihp.scheduler.explained.recorded import basis_of, situation_of
from resihp.wrapper.cli import app
from tests.db.conftest import outcome

MODEL = ModelSpec(layers=16, hidden=1024, heads=16, kv_groups=16, ffn_hidden=4096, vocab=32000, sequence=2048)
DECLARE = Declare(model=MODEL, micro_batches=16, iterations=1000, resume_from=0, fingerprint="same")
GRID = Layout.uniform(tp=2, pp=2, dp=2, layers=16)
NODES = {rank: f"n{1 + rank // 4}" for rank in range(8)}
TIMES = Profile(layers=(Times(0.1, 0.1, 0.1),) * 16, head=Times(0.2, 0.2, 0.2), step_s=0.5)
LOST, UNFIT = 5, 7


def after() -> tuple[Situation, Plan, float]:
    """Rank 5 is gone, rank 3 slow, and rank 7 is to stand by."""
    layout = msgspec.structs.replace(GRID)
    situation = Situation(
        epoch=2,
        base=layout,
        available=tuple(rank for rank in range(8) if rank not in (LOST, UNFIT)),
        nodes=NODES,
        model=MODEL,
        micro_batches=16,
        tokens=MODEL.sequence,
        tp=2,
        pp=2,
        speeds={3: 0.5},
        memory_bytes=80_000_000_000,
        profile=TIMES,
    )
    decision = decide(situation)
    standby = tuple(sorted({*decision.plan.layout.standby, UNFIT}))
    plan = msgspec.structs.replace(decision.plan, layout=Layout(decision.plan.layout.replicas, standby))
    return situation, plan, decision.seconds


def entries(*, told: bool) -> list[journal.AnyEntry]:
    situation, plan, seconds = after()
    first = Plan(epoch=1, layout=GRID, assignment=spread(16, 2))
    basis = basis_of(situation, (UNFIT,)) if told else None
    return [
        journal.JobStarted(
            job="7",
            command=("python", "train.py"),
            nodes=2,
            gpus_per_node=4,
            tp=2,
            pp=2,
            schedule="1f1b",
            host="here",
            user="me",
            restart_count=0,
            version="0.1.0",
            configuration={"job": {"memory_per_device": 80_000_000_000}},
        ),
        *(journal.NodeJoined(node=node, host=node, devices=4) for node in ("n1", "n2")),
        *(journal.WorkerStarted(rank=r, node=node, device=r % 4, pid=r, epoch=0) for r, node in NODES.items()),
        journal.ModelDeclared(declare=DECLARE),
        journal.PlanDecided(plan=first, next_iteration=1, action="start", finish=None, reason="start"),
        journal.PlanDecided(
            plan=plan,
            next_iteration=1,
            action="redo",
            finish=None,
            reason="rank 5 is gone",
            predicted=seconds,
            unit="s",
            basis=basis,
        ),
        journal.PlanInEffect(epoch=2),
        journal.IterationCommitted(epoch=2, outcome=outcome(1), seconds=1.0, predicted_seconds=None),
    ]


@pytest.fixture(params=[True, False], ids=["told", "of an older journal"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, bool]:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    with Ledger.open(url, tmp_path) as writer:
        for seq, entry in enumerate(entries(told=request.param), 1):
            writer.submit(journal.Record(seq, 1_700_000_000.0 + seq, entry))
        assert writer.flush(30)
    return url, request.param


def asked(*words: str) -> Any:
    result = CliRunner().invoke(app, [*words], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout) if "--json" in words else result.stdout


def test_a_situation_comes_back_from_the_record() -> None:
    situation, plan, _ = after()
    basis = msgspec.json.decode(msgspec.json.encode(basis_of(situation, (UNFIT,))), type=journal.PlanBasis)
    back = situation_of(basis, plan, DECLARE, nodes=NODES, tp=2, pp=2, chunks=1, memory_bytes=situation.memory_bytes)
    assert back == msgspec.structs.replace(situation, base=plan.layout, overhead=back.overhead)


def test_plans_are_explained_where_it_was_kept_what_they_were_decided_from(ledger: tuple[str, bool]) -> None:
    url, told = ledger
    with Reader.open(url) as reader:
        job = reader.job()
        found = reader.explanations(job["id"], reader.rows("plans", job["id"]))
    assert list(found) == ([2] if told else [])
    rows = asked("history", "plans", "--ledger", url, "--json")["rows"]
    assert rows[0]["explanation"] is None
    words = asked("why", "1", "--ledger", url)
    assert ("its plan, of epoch 2:" in words) is told
    if told:
        idle = {rank: one["why"] for one in rows[1]["explanation"]["idle"] for rank in one["ranks"]}
        assert idle[UNFIT] == "unfit"
        assert set(idle) == set(rows[1]["layout"]["standby"])
        assert rows[1]["explanation"]["above_bound"] >= 0
        assert f"rank {UNFIT}: kept out" in words
        assert asked("why", "1", "--ledger", url, "--json")["explanation"] == rows[1]["explanation"]


def test_what_was_imported_and_makes_no_plan_is_not_explained() -> None:
    from resihp.db.reading.plans.explanations import explanations

    job = {"model": msgspec.json.encode(DECLARE).decode(), "configuration": "{}", "tp": 2, "pp": 2}
    row = {"epoch": 1, "action": "start", "basis": {}, "predicted": 1.0, "schedule": "1f1b"}
    row |= {"layout": {"replicas": "none"}, "assignment": [[0]]}
    assert explanations(job, [row], NODES) == {}
    assert explanations(job | {"configuration": "{"}, [row], NODES) == {}
    assert explanations(job | {"model": None}, [row], NODES) == {}


def test_a_stage_without_ranks_is_explained_by_what_passes_elsewhere() -> None:
    """The ledger does not have what migrates: it is dealt out as the plan deals it."""
    from resihp.db.layouts import to_plain
    from resihp.db.reading.plans.explanations import explanations

    one, two = GRID.replicas
    layout = Layout((one, Replica((two.stages[0], Stage((), two.stages[1].chunks)))))
    job = {"model": msgspec.json.encode(DECLARE).decode(), "configuration": "{}", "tp": 2, "pp": 2}
    row = {
        "epoch": 2,
        "action": "redo",
        "basis": {},
        "predicted": 800.0,
        "schedule": "1f1b",
        "layout": to_plain(layout),
    }
    row |= {"assignment": [[*range(8)], [*range(8, 16)]]}
    found = explanations(job, [row], NODES)[2].limiting
    assert (found.replica, found.stage) == (0, 1)
    assert found.share == pytest.approx(16 * TIMES_IN_UNITS / 800.0)


TIMES_IN_UNITS = (8 * 3 + 3 * MODEL.hidden * MODEL.vocab_rows / MODEL.parameters_per_layer) / 2
"""Of the second stage, with the head, for one micro-batch on two devices."""
