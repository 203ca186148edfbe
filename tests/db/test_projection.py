"""Entries about what is slow become rows: failures that end, and probes of devices and links."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from resihp.db.projection import applying
from resihp.db.reading.queries import Reader
from resihp.db.writer import Ledger
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan, spread
from resihp.protocol.messages import Declare
from resihp.record import journal
from tests.db.conftest import BEGAN, DP3, inventory, outcome, started, write_journal
from tests.db.test_writer import everything

Told = Iterator[tuple[journal.AnyEntry, float]]

SLOW = journal.FailureFound(
    failure=1,
    kind="fail-slow",
    component="device",
    cause="rank 5 works at 62% of a healthy device's speed",
    ranks=(5,),
    node="n2",
    device=1,
    iteration=12,
    epoch=1,
    evidence="matrix products at 62% of its peers, 2e+05 GFLOP/s; own work takes longer",
    detect_s=1.5,
    speed=0.62,
    confidence=0.98,
)
SLOW_LINK = msgspec.structs.replace(
    SLOW,
    failure=2,
    component="link",
    cause="the link from rank 3 to rank 4 (n1-n2) works at 25% of its speed",
    ranks=(3, 4),
    node="n1",
    device=None,
    detect_s=None,
    speed=0.25,
    link=(3, 4),
)


def device(rank: int, **changes: Any) -> journal.DeviceProbe:
    given: dict[str, Any] = {
        "rank": rank,
        "node": f"n{rank // 4 + 1}",
        "device": rank % 4,
        "flops": 4e14,
        "memory_bytes": 2e12,
        "speed": 1.0,
        "fit": True,
        "evidence": "matrix products at 100% of its peers, 4e+05 GFLOP/s",
    }
    return journal.DeviceProbe(**given | changes)


AT_THE_START = journal.ProbesTaken(
    probe=1,
    occasion="start",
    devices=(
        device(0),
        device(5, flops=2e14, speed=0.5, fit=False, evidence="matrix products at 50% of its peers"),
        device(6, flops=0.0, memory_bytes=0.0, speed=None, fit=False, evidence="a product is off by 3"),
    ),
    links=(
        journal.LinkProbe(ranks=(0, 1), nodes=("n1", "n1"), speed=1.1, fit=True),
        journal.LinkProbe(ranks=(3, 4), nodes=("n1", "n2"), speed=0.25, fit=False),
    ),
    seconds=1.25,
)


def slow_story() -> Told:
    """Rank 5 and a link are slow from iteration 12 on; another plan follows; rank 5 is fast again from 20 on."""
    yield started(), BEGAN
    for n in range(3):
        yield journal.NodeJoined(node=f"n{n + 1}", host="here", devices=4), BEGAN
    yield AT_THE_START, BEGAN + 1
    plan = Plan(epoch=1, layout=DP3, assignment=spread(12, 3))
    yield journal.PlanDecided(plan=plan, next_iteration=1, action="start", finish=None, reason="start"), BEGAN + 1
    yield journal.PlanInEffect(epoch=1), BEGAN + 1
    for i in range(1, 15):
        committed = journal.IterationCommitted(epoch=1, outcome=outcome(i), seconds=0.5, predicted_seconds=0.4)
        yield committed, BEGAN + 1 + 0.5 * i
    suspected = journal.Suspected(rank=5, node="n2", evidence="slow, +60% since iteration 12: ...", kind="slow")
    yield suspected, BEGAN + 8.1
    taken = journal.ProbesTaken(
        probe=2, occasion="suspicion", devices=(device(5, speed=0.62, fit=False),), links=(), seconds=0.2
    )
    yield taken, BEGAN + 8.4
    yield SLOW, BEGAN + 8.5
    yield SLOW_LINK, BEGAN + 8.6
    yield (
        journal.PlanDecided(
            plan=msgspec.structs.replace(plan, epoch=2),
            next_iteration=15,
            action="between",
            finish=None,
            reason="rank 5 is slow",
        ),
        BEGAN + 9,
    )
    yield journal.PlanInEffect(epoch=2), BEGAN + 9.5
    committed = journal.IterationCommitted(epoch=2, outcome=outcome(15), seconds=0.5, predicted_seconds=0.4)
    yield committed, BEGAN + 10
    yield (
        journal.Reconfigured(
            epoch=2,
            failures=(1,),
            attempts=1,
            action="between",
            park_s=0.1,
            plan_s=0.05,
            groups_s=0.2,
            state_s=0.05,
            first_iteration_s=0.5,
            seconds=1.0,
        ),
        BEGAN + 10,
    )
    yield (
        journal.FailureEnded(failure=1, node="n2", device=1, iteration=20, evidence="as fast as before"),
        BEGAN + 12.5,
    )
    yield journal.JobEnded(exit_code=0, state="completed", reason="done"), BEGAN + 13


@pytest.fixture
def project(tmp_path: Path, open_ledger: Callable[..., Ledger]) -> Callable[[Told], Ledger]:
    def brought_in(told: Told) -> Ledger:
        ledger = open_ledger()
        (tmp_path / "journal").unlink(missing_ok=True)
        for record in write_journal(tmp_path / "journal", told):
            ledger.submit(record)
        assert ledger.close()
        return ledger

    return brought_in


def test_every_kind_of_entry_has_its_place_in_the_ledger() -> None:
    """One without it is told to the user of each job as a fault, and the reports beside it are dropped."""
    assert set(applying._APPLY) == set(get_args(journal.AnyEntry))


def test_what_is_slow_is_a_failure_with_its_speed_until_it_ends(project: Callable[[Told], Ledger]) -> None:
    found = everything(project(slow_story()))
    device_row, link_row = found["failures"]
    assert (device_row["kind"], device_row["component"]) == ("fail-slow", "device")
    assert (device_row["node"], device_row["device"], device_row["ranks"]) == ("n2", 1, [5])
    assert (device_row["speed"], device_row["confidence"], device_row["detect_seconds"]) == (0.62, 0.98, 1.5)
    assert (device_row["iteration"], device_row["ended_iteration"]) == (12, 20)
    assert device_row["ended_at"].timestamp() == pytest.approx(BEGAN + 12.5)
    assert device_row["noticed_at"].timestamp() == pytest.approx(BEGAN + 8.5)
    assert device_row["recovered_epoch"] == 2, "another plan took it into account"
    assert (link_row["kind"], link_row["component"], link_row["ranks"]) == ("fail-slow", "link", [3, 4])
    assert (link_row["node"], link_row["device"], link_row["speed"]) == ("n1", None, 0.25)
    assert (link_row["ended_iteration"], link_row["ended_at"], link_row["recovered_epoch"]) == (None, None, None)


def test_a_failure_that_is_not_of_speed_has_none(project: Callable[[Told], Ledger]) -> None:
    dead = msgspec.structs.replace(SLOW, kind="fail-stop", component="process", speed=None, confidence=None)
    (row,) = everything(project(iter([(started(), BEGAN), (dead, BEGAN + 1)])))["failures"]
    assert (row["speed"], row["confidence"], row["ended_iteration"]) == (None, None, None)


def test_each_device_and_each_link_of_a_probe_is_a_row(project: Callable[[Told], Ledger]) -> None:
    rows = everything(project(slow_story()))["probes"]
    assert [(row["probe"], row["occasion"], row["kind"], row["rank"], row["passed"]) for row in rows] == [
        (1, "start", "device", 0, True),
        (1, "start", "device", 5, False),
        (1, "start", "device", 6, False),
        (1, "start", "link", 0, True),
        (1, "start", "link", 3, False),
        (2, "suspicion", "device", 5, False),
    ]
    slow, broken = rows[1], rows[2]
    assert (slow["node"], slow["device"], slow["flops"], slow["memory_bytes"]) == ("n2", 1, 2e14, 2e12)
    assert (slow["speed"], slow["evidence"]) == (0.5, "matrix products at 50% of its peers")
    assert (slow["peer"], slow["peer_node"]) == (None, None)
    assert slow["measured_at"].timestamp() == pytest.approx(BEGAN + 1)
    assert (broken["speed"], broken["evidence"]) == (None, "a product is off by 3")
    link = rows[4]
    assert (link["rank"], link["node"], link["peer"], link["peer_node"]) == (3, "n1", 4, "n2")
    assert (link["device"], link["flops"], link["speed"]) == (None, None, 0.25)


def test_what_is_told_of_it_stands_with_the_events(project: Callable[[Told], Ledger]) -> None:
    rows = everything(project(slow_story()))["events"]
    events = {row["kind"]: row for row in rows}
    assert (events["Suspected"]["rank"], events["Suspected"]["node"]) == (5, "n2")
    assert (events["FailureEnded"]["node"], events["FailureEnded"]["iteration"]) == ("n2", 20)
    assert events["FailureEnded"]["text"] == "failure 1: over since iteration 20, as fast as before"
    assert [row["text"][:7] for row in rows if row["kind"] == "ProbesTaken"] == ["probe 1", "probe 2"]


def test_the_same_journal_twice_makes_the_same_rows(
    project: Callable[[Told], Ledger], open_ledger: Callable[..., Ledger], tmp_path: Path
) -> None:
    ledger = project(slow_story())
    before = everything(ledger)
    again = open_ledger()
    again.catch_up(tmp_path / "journal")
    assert again.close()
    assert everything(ledger) == before


def test_an_evaluation_stands_beside_its_iteration_and_with_the_events(project: Callable[[Told], Ledger]) -> None:
    """Of what the job resumed from there is no iteration: the event alone."""
    told: list[tuple[journal.AnyEntry, float]] = [(started(), BEGAN)]
    for i in (20, 21, 22):
        if i > 20:
            committed = journal.IterationCommitted(epoch=1, outcome=outcome(i), seconds=0.6, predicted_seconds=None)
            told.append((committed, BEGAN + i))
        if i != 21:
            told.append((journal.EvaluationDone(epoch=1, iteration=i, loss=i / 10, tokens=4096), BEGAN + i + 0.5))
    found = everything(project(iter(told)))
    assert {row["iteration"]: row["validation_loss"] for row in found["iterations"]} == {21: None, 22: 2.2}
    events = [row for row in found["events"] if row["kind"] == "EvaluationDone"]
    assert [(row["iteration"], row["text"]) for row in events] == [
        (20, "iteration 20: validation loss 2.0000"),
        (22, "iteration 22: validation loss 2.2000"),
    ]


def test_a_job_has_the_versions_that_it_told_and_a_node_what_it_was_made_of(
    project: Callable[[Told], Ledger],
) -> None:
    size = ModelSpec(layers=4, hidden=32, heads=4, kv_groups=4, ffn_hidden=128, vocab=256, sequence=64)
    declare = Declare(model=size, micro_batches=8, iterations=12, resume_from=0, fingerprint="abcd")
    software = journal.Software(torch="2.8.0", megatron_core="0.14.0", script_commit="1" * 40)
    twice = msgspec.structs.replace(made := inventory("n1"), devices=(*made.devices, made.devices[0]))
    told: list[tuple[journal.AnyEntry, float]] = [
        (started(), BEGAN),
        (journal.NodeJoined(node="n1", host="here", devices=4, inventory=twice), BEGAN),
        (journal.ModelDeclared(declare=declare, software=software), BEGAN + 1),
    ]
    found = everything(project(iter(told)))
    names = ("torch", "megatron_core", "cuda", "nccl", "script_commit")
    assert [found["job"][name] for name in names] == ["2.8.0", "0.14.0", None, None, "1" * 40]
    [stay] = found["memberships"]
    assert (stay["serial"], stay["driver"], stay["nic_firmware"]) == ("S-n1", "570.86.15", {"mlx5_0": "28.41.1000"})
    assert [row["uuid"] for row in found["devices"]] == [f"GPU-n1-{i}" for i in range(4)]


def test_the_end_of_a_failure_that_nobody_knows_is_an_event(project: Callable[[Told], Ledger]) -> None:
    ended = journal.FailureEnded(failure=7, node=None, device=None, iteration=3, evidence="as fast as before")
    found = everything(project(iter([(started(), BEGAN), (ended, BEGAN + 1)])))
    assert found["failures"] == []
    assert [row["kind"] for row in found["events"]] == ["JobStarted", "FailureEnded"]


def test_figures_that_are_no_numbers_are_null(project: Callable[[Told], Ledger]) -> None:
    taken = msgspec.structs.replace(
        AT_THE_START, devices=(device(0, speed=math.nan, flops=math.inf),), links=AT_THE_START.links
    )
    told: list[tuple[journal.AnyEntry, float]] = [
        (started(), BEGAN),
        (taken, BEGAN + 1),
        (msgspec.structs.replace(SLOW, confidence=math.nan), BEGAN + 2),
    ]
    found = everything(project(iter(told)))
    assert (found["probes"][0]["speed"], found["probes"][0]["flops"]) == (None, None)
    assert (found["failures"][0]["speed"], found["failures"][0]["confidence"]) == (0.62, None)


def test_a_speed_that_cannot_be_is_kept_as_an_event(project: Callable[[Told], Ledger]) -> None:
    odd = msgspec.structs.replace(SLOW, speed=1.5)
    found = everything(project(iter([(started(), BEGAN), (odd, BEGAN + 1), (SLOW, BEGAN + 2)])))
    assert [row["speed"] for row in found["failures"]] == [0.62]
    assert [row["kind"] for row in found["events"]] == ["JobStarted", "UnprojectedFailureFound", "FailureFound"]


def test_a_slow_link_that_nobody_mended_is_no_lost_time(project: Callable[[Told], Ledger]) -> None:
    """The job goes on; what it costs shows in the iterations."""
    without = [(entry, at) for entry, at in slow_story() if entry != SLOW_LINK]
    before = lost(project(slow_story()))
    assert lost(project((entry, at + 100) for entry, at in without)) == pytest.approx(before)


def lost(ledger: Ledger) -> dict[str, float]:
    with Reader.open(ledger.url) as reader:
        seconds: dict[str, float] = reader.summary(reader.job(None)["id"])["lost_seconds"]
    assert seconds.keys() == {"fail-slow", "other"}
    return seconds
