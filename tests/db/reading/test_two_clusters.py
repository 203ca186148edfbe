"""Two clusters in one ledger, whose nodes have the same names: nothing of the one is told of the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from resihp.db.maintenance import record
from resihp.db.reading import fleet, hardware, queries, rates, suspicions
from resihp.db.reading.health import health_frame, usual_speeds
from resihp.db.reading.naming import is_node
from resihp.db.reading.reader import Reader
from resihp.db.writer import Ledger
from resihp.errors import UsageError
from resihp.record import journal
from resihp.wrapper.cli import app
from tests.db.conftest import BEGAN, inventory, started, write_journal

DAY_S = 86_400.0
NOW = datetime.fromtimestamp(BEGAN + 100 * DAY_S, UTC)
NODES = tuple(f"node00{n}" for n in range(1, 9))
Told = Iterator[tuple[journal.AnyEntry, float]]


def job(
    cluster: str | None, day: float, *broken: tuple[str, int], driver: str = "570", nodes: tuple[str, ...] = NODES
) -> Told:
    """A job of a cluster's eight nodes, whose devices fail one after the other."""
    at = BEGAN + day * DAY_S
    name = f"{cluster}-{day}"
    first = started(name)
    if cluster is not None:
        slurm = journal.SlurmIdentity(job=int(day), cluster=cluster)
        first = msgspec.structs.replace(first, slurm=slurm)
    yield first, at
    for node in nodes:
        made = inventory(node, driver=driver)
        own = tuple(msgspec.structs.replace(one, uuid=f"{cluster}-{one.uuid}") for one in made.devices)
        made = msgspec.structs.replace(made, serial=f"{cluster}-{node}", devices=own)
        yield journal.NodeJoined(node=node, host=node, devices=4, inventory=made), at
    for rank, node in enumerate(nodes):
        yield journal.WorkerStarted(rank=rank, node=node, device=0, pid=rank, epoch=0), at
    for i, (node, device) in enumerate(broken):
        yield (
            journal.FailureFound(
                failure=i + 1,
                kind="fail-stop",
                component="device",
                cause="GPU has fallen off the bus (Xid 79)",
                ranks=(NODES.index(node),),
                node=node,
                device=device,
                iteration=12,
                epoch=2,
                evidence="NVRM: Xid 79",
                detect_s=None,
                hardware=True,
            ),
            at + 3600.0 * (i + 1),
        )
    probe = journal.DeviceProbe(
        rank=0,
        node="node001",
        device=0,
        flops=1e12 if cluster == "alpha" else 5e11,
        memory_bytes=1e12,
        speed=1.0,
        fit=True,
        evidence="",
        hardware="H100",
    )
    yield journal.ProbesTaken(probe=1, occasion="start", devices=(probe,), links=(), seconds=1.0), at
    suspected = journal.Suspected(
        rank=0, node="node001", evidence="slow", kind="slow", suspicion=1, ranks=(0,), iteration=3, detected=4
    )
    if cluster == "alpha":
        yield suspected, at + 60.0
        yield msgspec.structs.replace(suspected, cleared=True, outcome="fine"), at + 61.0
    yield journal.JobEnded(exit_code=0, state="completed", reason="done"), at + 20 * 3600.0


@pytest.fixture
def reader(ledger_url: str, tmp_path: Path) -> Iterator[Callable[..., Reader]]:
    opened: list[Reader] = []

    def of(*stories: Told) -> Reader:
        for n, told in enumerate(stories):
            (tmp_path / str(n)).mkdir(exist_ok=True)
            with Ledger.open(ledger_url, tmp_path / str(n)) as ledger:
                for one in write_journal(tmp_path / str(n) / "journal", told):
                    ledger.submit(one)
                assert ledger.flush(30)
        opened.append(Reader.open(ledger_url))
        return opened[-1]

    yield of
    for one in opened:
        one.close()


BROKEN = [("node001", 3), ("node001", 3)]


def both(days: tuple[int, ...] = (60, 70, 80, 90)) -> list[Told]:
    """On alpha device 3 of node001 fails again and again; on beta none does, but one of node002."""
    return [
        *(job("alpha", day, *BROKEN, driver="580" if day == 90 else "570") for day in days),
        *(job("beta", day + 1, ("node002", 0)) for day in days),
    ]


def lemons(reader: Reader) -> dict[str, Any]:
    seen = fleet.NodeRecord()
    seen.read(reader, fleet.horizon(NOW), False)
    return {row["node"]: row for row in fleet.lemons(seen, NOW)}


def test_a_lemon_of_one_cluster_is_none_of_the_other(reader: Callable[..., Reader]) -> None:
    ledger = reader(*both())
    found = lemons(ledger)
    assert (found["alpha/node001"]["failures"], found["alpha/node001"]["jobs"]) == (8, 4)
    assert found["alpha/node001"]["lemon"]
    assert (found["beta/node001"]["failures"], found["beta/node001"]["jobs"]) == (0, 4)
    assert not found["beta/node001"]["lemon"]
    assert len(found) == 16
    health = health_frame(ledger, NOW).set_index("node")
    assert (health["failures"]["alpha/node001"], health["failures"]["beta/node001"]) == (4, 0), "outages"
    assert sum(health["device_days"]) == pytest.approx(8 * 8 * 4 * 20 / 24)


def test_failures_of_a_node_are_those_of_its_cluster(reader: Callable[..., Reader]) -> None:
    ledger = reader(*both())
    found = {row["node"]: row["failures"] for row in fleet.joined("node", fleet.failures_by(ledger, "node"))}
    assert found == {"alpha/node001": 8, "beta/node002": 4}
    assert len(ledger.rows("failures", None, node="alpha/node001")) == 8
    assert ledger.rows("failures", None, node="beta/node001") == []
    one = fleet.joined("node", fleet.failures_by(ledger, "node", node="beta/node002"))
    assert [row["failures"] for row in one] == [4]
    job_id = ledger.job("alpha-60")["id"]
    assert [row["key"] for row in fleet.failures_by(ledger, "node", job_id)] == ["node001"], "its own names"


def test_what_is_to_be_repaired_and_what_was(reader: Callable[..., Reader], ledger_url: str) -> None:
    ledger = reader(*both(), job("beta", 95, ("node001", 1)))
    since = NOW - timedelta(days=60)

    def listed() -> dict[tuple[str, int], int]:
        return {(row["node"], row["device"]): row["failures"] for row in rates.repairs(ledger, since)}

    assert listed() == {("alpha/node001", 3): 8, ("beta/node001", 1): 1, ("beta/node002", 0): 4}
    with pytest.raises(UsageError, match=r"several clusters have one; .* alpha/node001, beta/node001"):
        record(ledger_url, "node001", at=NOW, now=NOW)
    row = record(ledger_url, "alpha/node001", device="3", at=NOW, now=NOW)
    assert (row["cluster"], row["node"], row["device_uuid"]) == ("alpha", "node001", "alpha-GPU-node001-3")
    assert listed() == {("beta/node001", 1): 1, ("beta/node002", 0): 4}
    record(ledger_url, "node002", cluster="beta", at=NOW, now=NOW)
    assert listed() == {("beta/node001", 1): 1}
    assert lemons(ledger)["beta/node001"]["observed"] == 1


def test_hosts_of_one_cluster_do_not_change_with_those_of_the_other(reader: Callable[..., Reader]) -> None:
    ledger = reader(*both((60, 90)))
    told = hardware.told_changes(hardware.stays(ledger))
    changed = [(row["job"], row["host"], row["changed"]) for row in told if row["changed"]]
    assert changed == [("alpha-90", f"alpha/{node}", "driver 570 -> 580") for node in NODES]
    own = hardware.told_changes(hardware.stays(ledger, ledger.job("beta-91")["id"]))
    assert {row["job"] for row in own} == {"beta-61", "beta-91"}
    assert {row["node"] for row in own} == {*NODES}
    of_one = hardware.stays(ledger, node="beta/node001")
    assert {row["job"] for row in of_one} == {"beta-61", "beta-91"}


def test_devices_stay_where_they_are(reader: Callable[..., Reader]) -> None:
    ledger = reader(*both((60, 90)))
    placed = hardware.placed(ledger.rows("devices", None))
    assert len(placed) == 2 * 8 * 4
    assert {row["node"] for row in placed} == {f"{cluster}/{node}" for cluster in ("alpha", "beta") for node in NODES}
    assert {row["jobs"] for row in placed} == {2}


def test_a_host_s_rate_is_its_own(reader: Callable[..., Reader]) -> None:
    ledger = reader(*both())
    told = {
        row["when"]: row for row in rates.rate_with(ledger, "host", "alpha/node001", 60, NOW) if row["which"] == "all"
    }
    assert (told["with"]["failures"], told["without"]["failures"]) == (8, 4)
    assert told["with"]["device_days"] == pytest.approx(4 * 4 * 20 / 24)
    with pytest.raises(UsageError, match="alpha/node001, beta/node001; name one"):
        rates.rate_with(ledger, "host", "node001", 60, NOW)


def test_what_devices_gave_and_who_was_suspected(reader: Callable[..., Reader]) -> None:
    ledger = reader(*both())
    speeds = {
        cluster: {speed.flops for speed in usual_speeds(ledger, ["node001"], NOW, cluster).values()}
        for cluster in ("alpha", "beta")
    }
    assert speeds == {"alpha": {1e12}, "beta": {5e11}}
    suspected = suspicions.by_node(ledger, NOW)
    assert suspected["alpha/node001"] == {"jobs": 4, "suspected_jobs": 4}
    assert suspected["beta/node001"] == {"jobs": 4, "suspected_jobs": 0}


def test_of_one_cluster_nodes_keep_their_names_also_from_before_it_was_known(reader: Callable[..., Reader]) -> None:
    ledger = reader(job(None, 60, *BROKEN), job("alpha", 70, *BROKEN))
    found = lemons(ledger)
    assert {*found} == {*NODES}
    assert found["node001"]["failures"] == 4
    assert list(queries.frame(ledger, "devices")["node"].unique()) == [*NODES]


def asked(url: str, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["history", *words, "--ledger", url], env={"COLUMNS": "100"})
    return result.exit_code, f"{result.output}{result.exception or ''}"


def test_a_node_of_which_there_is_nothing_is_known_by_its_cluster_s_name(
    reader: Callable[..., Reader], ledger_url: str
) -> None:
    ledger = reader(*both((60,)))
    assert ledger.nodes(None) == [f"{cluster}/{node}" for cluster in ("alpha", "beta") for node in NODES]
    for node in ("beta/node003", "node003"):
        for view in ("failures", "drains", "replacements"):
            assert asked(ledger_url, view, "--all", "--node", node)[0] == 0, (node, view)
    code, said = asked(ledger_url, "drains", "--all", "--node", "gamma/node003")
    assert code != 0
    assert "did you mean" in said
    assert "beta/node003" in said


def test_a_slash_in_a_node_s_own_name_is_no_cluster_s(reader: Callable[..., Reader], ledger_url: str) -> None:
    """What was imported may have such names."""
    odd = (*NODES[:7], "rack/node001")
    ledger = reader(job("alpha", 60, nodes=odd), job("beta", 61, nodes=odd), job("gamma", 62))
    assert is_node("node001", "alpha/node001", ["alpha"])
    assert not is_node("node001", "rack/node001", ["alpha"])
    assert is_node("rack/node001", "alpha/rack/node001", ["alpha"])
    assert {row["job"] for row in ledger.rows("nodes", None, node="beta/rack/node001")} == {"beta-61"}
    assert len(ledger.rows("nodes", None, node="rack/node001")) == 2
    assert "rack/" not in asked(ledger_url, "lemons", "--node", "node001")[1]
