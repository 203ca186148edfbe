"""What the journal tells as figures stands in columns: stays of nodes, devices, checkpoints, links, diagnoses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resihp.db.reading.queries import Reader
from resihp.db.writer import Ledger
from resihp.parallelism.model import ModelSpec
from resihp.protocol.messages import Declare
from resihp.record import journal
from tests.db.conftest import BEGAN, inventory, node_story, story, write_journal

MODEL = ModelSpec(layers=8, hidden=64, heads=4, kv_groups=4, ffn_hidden=256, vocab=64, sequence=64)
DECLARED = Declare(model=MODEL, micro_batches=16, iterations=1000, resume_from=0, fingerprint="same")

Told = Iterator[tuple[journal.AnyEntry, float]]


@pytest.fixture
def rows(tmp_path: Path, open_ledger: Callable[..., Ledger]) -> Callable[[Told, str], list[dict[str, Any]]]:
    def of(told: Told, table: str) -> list[dict[str, Any]]:
        ledger = open_ledger()
        for record in write_journal(tmp_path / "journal", told):
            ledger.submit(record)
        assert ledger.close()
        with Reader.open(ledger.url) as reader:
            return [reader.job()] if table == "jobs" else reader.rows(table, reader.job()["id"])

    return of


def lost_and_back() -> Told:
    yield from story(ended=False)
    yield journal.NodeLost(node="n2", reason="no word from it for 30 s", how="silent"), BEGAN + 100
    yield journal.NodeJoined(node="n2", host="here", devices=4, inventory=inventory("n2", "580.10")), BEGAN + 400


def test_a_node_that_was_lost_and_came_back_has_both(rows: Callable[[Told, str], list[dict[str, Any]]]) -> None:
    first, second = [row for row in rows(lost_and_back(), "memberships") if row["node"] == "n2"]
    assert (first["lost_reason"], first["how"]) == ("no word from it for 30 s", "silent")
    assert first["lost_at"].timestamp() == BEGAN + 100
    assert (second["joined_at"].timestamp(), second["lost_at"]) == (BEGAN + 400, None)
    assert (first["driver"], second["driver"]) == ("", "580.10")
    assert second["nic_firmware"] == {"mlx5_0": "28.41.1000"}


def test_devices_are_those_of_the_stay(rows: Callable[[Told, str], list[dict[str, Any]]]) -> None:
    found = rows(node_story(), "devices")
    assert [(row["node"], row["device"], row["uuid"]) for row in found] == [("n9", i, f"GPU-n9-{i}") for i in range(4)]


def test_a_checkpoint_has_its_size_and_its_time(rows: Callable[[Told, str], list[dict[str, Any]]]) -> None:
    def told() -> Told:
        yield from story(ended=False)
        yield journal.CheckpointCommitted(iteration=2, folder="/c/2", bytes=10**12, seconds=12.5), BEGAN + 200

    found = {row["iteration"]: row for row in rows(told(), "checkpoints")}
    assert (found[2]["bytes"], found[2]["seconds"], found[2]["folder"]) == (10**12, 12.5, "/c/2")


def test_how_long_a_script_took_for_its_checkpoint_is_not_known(
    rows: Callable[[Told, str], list[dict[str, Any]]],
) -> None:
    def told() -> Told:
        yield from story(ended=False)
        yield journal.CheckpointCommitted(iteration=2, folder="/c/2", bytes=7, seconds=0.0, modified=1.5), BEGAN + 200

    (checkpoint,) = [row for row in rows(told(), "checkpoints") if row["iteration"] == 2]
    assert (checkpoint["bytes"], checkpoint["seconds"]) == (7, None)


def test_of_a_link_both_ends_are_known_and_what_the_logs_said(
    rows: Callable[[Told, str], list[dict[str, Any]]],
) -> None:
    def told() -> Told:
        yield from story(ended=False)
        yield (
            journal.FailureFound(
                failure=7,
                kind="fail-slow",
                component="link",
                cause="link n1-n2 at 40 %",
                ranks=(1, 5),
                node="n1",
                device=None,
                iteration=2,
                epoch=1,
                evidence="",
                detect_s=None,
                speed=0.4,
                confidence=0.9,
                link=(1, 5),
                hardware=True,
                diagnosed=journal.Diagnosed(code="xid 79", category="device", ranks=(1,), node="n1", device=1),
            ),
            BEGAN + 300,
        )

    [found] = [row for row in rows(told(), "failures") if row["failure"] == 7]
    assert (found["link_from"], found["link_to"], found["node"], found["peer_node"]) == (1, 5, "n1", "n2")
    assert (found["code"], found["category"], found["hardware"]) == ("xid 79", "device", True)


def test_versions_of_what_trains_are_the_job_s(rows: Callable[[Told, str], list[dict[str, Any]]]) -> None:
    def told() -> Told:
        for entry, at in story(ended=False):
            yield entry, at
            if isinstance(entry, journal.JobStarted):
                software = journal.Software(torch="2.13.0", megatron_core="0.16.1", nccl="2.27.3")
                yield journal.ModelDeclared(declare=DECLARED, software=software), at

    [found] = rows(told(), "jobs")
    assert (found["torch"], found["megatron_core"], found["nccl"]) == ("2.13.0", "0.16.1", "2.27.3")
    assert (found["cuda"], found["script_commit"]) == (None, None)
