"""Repairs written down by hand, and boards that jobs have seen elsewhere, in a ledger: what counts against whom."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from resihp.db.maintenance import record
from resihp.db.reading import fleet, hardware, naming, queries, rates
from resihp.db.reading.health import health_frame
from resihp.db.reading.reader import Reader
from resihp.db.writer import Ledger
from resihp.errors import ResihpError, UsageError
from resihp.record import journal
from resihp.slurm.errors import SlurmUnavailableError
from resihp.wrapper.cli import app
from resihp.wrapper.commands.node import maintenance as node_commands
from tests.db.conftest import BEGAN, inventory, started, write_journal
from tests.slurm.fake_slurm import FakeSlurm

DAY_S = 86_400.0
NOW = datetime.fromtimestamp(BEGAN + 100 * DAY_S, UTC)
Told = Iterator[tuple[journal.AnyEntry, float]]
Machines = Mapping[str, journal.NodeInventory | None]


def machine(node: str, **devices: str) -> journal.NodeInventory:
    """Of four devices; `d3="GPU-x"`: another than its own in that slot."""
    own = inventory(node)
    changed = tuple(
        msgspec.structs.replace(one, uuid=devices.get(f"d{one.device}", one.uuid), bus=f"0000:0{one.device}:00.0")
        for one in own.devices
    )
    return msgspec.structs.replace(own, serial=devices.get("serial", own.serial), devices=changed)


def job(day: float, *broken: tuple[str, int], machines: Machines | None = None) -> Told:
    """A job of nodes n1 to n3, whose devices fail one after the other."""
    at = BEGAN + day * DAY_S
    yield started(f"j{day}"), at
    for name in ("n1", "n2", "n3"):
        made = (machines or {}).get(name, machine(name))
        yield journal.NodeJoined(node=name, host=f"host-{name}", devices=4, inventory=made), at
    for i, (node, device) in enumerate(broken):
        yield (
            journal.FailureFound(
                failure=i + 1,
                kind="fail-stop",
                component="device",
                cause="GPU has fallen off the bus (Xid 79)",
                ranks=(device,),
                node=node,
                device=device,
                iteration=12,
                epoch=2,
                evidence="NVRM: Xid 79",
                detect_s=None,
            ),
            at + 3600.0 * (i + 1),
        )
    yield journal.JobEnded(exit_code=0, state="completed", reason="done"), at + 20 * 3600.0


BAD = (50, 57, 64, 71)
"""Days on which n2's device 1 fails."""


@pytest.fixture
def told(tmp_path: Path, open_ledger: Callable[..., Ledger]) -> Callable[..., str]:
    """The URL of a ledger that holds these jobs, after those in which n2's device 1 failed."""

    def make(*stories: Told) -> str:
        url = ""
        for i, entries in enumerate((*(job(day, ("n2", 1)) for day in BAD), *stories)):
            ledger = open_ledger()
            for one in write_journal(tmp_path / f"journal-{i}", entries):
                ledger.submit(one)
            assert ledger.close()
            url = ledger.url
        return url

    return make


def lemons(url: str) -> dict[str, str]:
    """Devices by node, of all that are called lemons, which is the same wherever one asks."""
    with Reader.open(url) as reader:
        found = health_frame(reader, NOW)
        listed = queries.lemons(reader, NOW)
    by_health = dict(found[found["lemon"]][["node", "lemon_devices"]].itertuples(index=False))
    assert dict(listed[listed["lemon"]][["node", "lemon_devices"]].itertuples(index=False)) == by_health
    return by_health


def test_a_board_takes_its_record_along(told: Callable[..., str]) -> None:
    assert lemons(told()) == {"n2": "1"}


def test_a_new_board_has_none(told: Callable[..., str]) -> None:
    assert lemons(told(job(80, machines={"n2": machine("n2", d1="GPU-new")}))) == {}


def test_the_old_board_is_found_in_another_node(told: Callable[..., str]) -> None:
    moved = {"n2": machine("n2", d1="GPU-new"), "n3": machine("n3", d0="GPU-n2-1")}
    url = told(job(80, machines=moved))
    assert lemons(url) == {"n3": "0"}
    with Reader.open(url) as reader:
        frame = health_frame(reader, NOW).set_index("node")
    assert "on n2 device 1, where the device was then" in frame["evidence"]["n3"]
    assert frame["failures"].to_dict() == {"n1": 0, "n2": 0, "n3": 4}


def test_a_job_that_cannot_tell_its_devices_changes_nothing(told: Callable[..., str]) -> None:
    blind = msgspec.structs.replace(inventory("n2"), devices=())
    assert lemons(told(job(80, machines={"n2": None}), job(81, machines={"n2": blind}))) == {"n2": "1"}


def test_ranks_that_share_a_gpu_do_not_make_it_move(told: Callable[..., str]) -> None:
    shared = {name: machine(name, d0="GPU-n2-1", d1="GPU-n2-1") for name in ("n1", "n2", "n3")}
    assert lemons(told(job(80, machines=shared))) == {"n2": "1"}


def test_a_name_that_other_hardware_has_got_starts_anew(told: Callable[..., str]) -> None:
    other = machine("n2", serial="S-other", **{f"d{i}": f"GPU-other-{i}" for i in range(4)})
    assert lemons(told(job(80, machines={"n2": other}))) == {}


def test_ledgers_of_single_jobs_tell_the_same_together(tmp_path: Path) -> None:
    swapped = {"n2": machine("n2", d1="GPU-new")}
    stories = [*(job(day, ("n2", 1)) for day in BAD), job(80, machines=swapped)]
    readers = []
    for i, entries in enumerate(stories):
        with Ledger.open(f"sqlite:///{tmp_path / f'{i}.db'}", tmp_path) as ledger:
            for one in write_journal(tmp_path / f"journal-{i}", entries):
                ledger.submit(one)
            assert ledger.close()
        readers.append(Reader.open(ledger.url))
    assert queries.lemons(readers[:-1], NOW)["lemon_devices"].tolist()[0] == "1"
    assert not queries.lemons(readers, NOW)["lemon"].any()
    for reader in readers:
        reader.close()


# --- repairs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what", [{}, {"device": "1"}, {"device": "GPU-n2-1"}, {"device": "1", "kind": "replaced"}], ids=str
)
def test_what_was_repaired_starts_anew(told: Callable[..., str], what: dict[str, str]) -> None:
    url = told()
    row = record(url, "n2", at=NOW - timedelta(days=20), now=NOW, **what)
    assert row["device_uuid"] == ("GPU-n2-1" if what else None)
    assert lemons(url) == {}


def test_what_failed_after_the_repair_counts(told: Callable[..., str]) -> None:
    url = told()
    record(url, "n2", at=NOW - timedelta(days=100 - 40), now=NOW)
    assert lemons(url) == {"n2": "1"}
    record(url, "n2", at=NOW - timedelta(days=100 - 60), now=NOW)
    with Reader.open(url) as reader:
        assert health_frame(reader, NOW).set_index("node")["failures"]["n2"] == 2


def test_where_no_uuid_is_known_a_repair_is_of_the_number(told: Callable[..., str]) -> None:
    blind: Machines = {"n1": None, "n2": None, "n3": None}
    url = told(*(job(day, ("n1", 2), machines=blind) for day in (20, 27, 34, 41)))
    with Reader.open(url) as reader:
        assert hardware.placements(reader, NOW)  # of jobs that told their devices
    assert record(url, "n1", device="2", at=NOW - timedelta(days=55), now=NOW)["device_uuid"] == "2"
    with Reader.open(url) as reader:
        assert health_frame(reader, NOW).set_index("node")["failures"]["n1"] == 0


def test_a_node_is_known_however_many_there_are(told: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    url = told()
    monkeypatch.setattr(naming, "MAX_NAMES_SEARCHED", 1)
    assert record(url, "n3", at=NOW, now=NOW)["node"] == "n3"


def test_what_was_repaired_is_not_to_be_repaired_any_more(told: Callable[..., str]) -> None:
    blind: Machines = {"n1": None, "n2": None, "n3": None}
    url = told(job(20, ("n1", 2), ("n1", 3), machines=blind))

    def to_do() -> set[tuple[str, int]]:
        with Reader.open(url) as reader:
            return {(row["node"], row["device"]) for row in rates.repairs(reader, NOW - timedelta(days=100))}

    assert to_do() == {("n1", 2), ("n1", 3), ("n2", 1)}
    record(url, "n1", device="2", at=NOW - timedelta(days=55), now=NOW)  # by number, as nobody knows more
    assert to_do() == {("n1", 3), ("n2", 1)}
    record(url, "n2", device="GPU-n2-1", at=NOW - timedelta(days=20), now=NOW)
    assert to_do() == {("n1", 3)}


def test_what_cannot_be_written_down(told: Callable[..., str]) -> None:
    url = told()
    with pytest.raises(UsageError, match=r"node 'n22': not in ledger .*did you mean n2"):
        record(url, "n22")
    with pytest.raises(UsageError, match=r"device 'GPU-x': this ledger has never seen it; resihp history devices"):
        record(url, "n2", device="GPU-x")
    with pytest.raises(UsageError, match=r"device '9{20}': this ledger has never seen it"):
        record(url, "n2", device="9" * 20)
    with pytest.raises(UsageError, match="is in the future"):
        record(url, "n2", at=NOW + timedelta(days=1), now=NOW)
    with Reader.open(url) as reader:
        assert hardware.maintenance_rows(reader) == []


def run(*argv: str) -> Result:
    return CliRunner().invoke(app, ["node", *argv])


def test_the_command_line_writes_and_lists(told: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    url = told()
    monkeypatch.setattr(node_commands, "connect", lambda: FakeSlurm(("n1",), cluster="vc"))
    what = ("--device", "1", "--kind", "replaced", "--note", "RMA 17", "--at", "2025-08-20")
    made = run("repaired", "n2", *what, "--ledger", url)
    assert made.exit_code == 0, made.exception
    assert "node n2: device GPU-n2-1: replaced at 2025-08-20 00:00 UTC" in made.stderr

    def no_slurm() -> FakeSlurm:
        raise SlurmUnavailableError("scontrol: not found")

    monkeypatch.setattr(node_commands, "connect", no_slurm)
    assert run("repaired", "n1", "--at", "2025-08-21", "--ledger", url).exit_code == 0
    rows = json.loads(run("maintenance", "--ledger", url, "--json").stdout)["rows"]
    assert [
        (row["cluster"], row["node"], row["device_uuid"], row["kind"], row["text"], row["counts"]) for row in rows
    ] == [
        ("vc", "n2", "GPU-n2-1", "replaced", "RMA 17", True),
        ("", "n1", None, "repaired", "", True),
    ]
    shown = run("maintenance", "n2", "--ledger", url).stdout
    assert "replaced" in shown
    assert "n1 " not in shown
    assert "no repairs recorded for node n3" in run("maintenance", "n3", "--ledger", url).stderr


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["n2", "--kind", " "], "--kind: use repaired"),
        (["n2", "--kind", "x" * 41], "--kind: at most 40 characters"),
        (["n2", "--note", "a\nb"], "--note: at most 2000 characters in one line"),
        (["n2", "--at", "tomorrow"], "not a time"),
    ],
)
def test_what_the_command_line_refuses(tmp_path: Path, argv: list[str], text: str) -> None:
    result = run("repaired", *argv, "--ledger", f"sqlite:///{tmp_path / 'none.db'}")
    assert isinstance(result.exception, ResihpError)
    assert text in str(result.exception)


def test_horizon_of_a_reading(told: Callable[..., str]) -> None:
    """A repair of long ago is of no interest, nor is where devices were then."""
    url = told()
    record(url, "n2", at=NOW - timedelta(days=30), now=NOW)
    with Reader.open(url) as reader:
        assert hardware.renewals(reader, NOW - timedelta(days=29)) == []
        assert len(hardware.renewals(reader, NOW - timedelta(days=31))) == 1
        assert fleet.lemons(fleet.NodeRecord(), NOW) == []


# --- views ----------------------------------------------------------------------------------------------------------


def history(view: str, url: str, *argv: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["history", view, *argv, "--ledger", url, "--json"])
    assert result.exit_code == 0, result.exception
    return list(json.loads(result.stdout)["rows"])


def updated(node: str, **facts: Any) -> journal.NodeInventory:
    return msgspec.structs.replace(machine(node), **facts)


def test_hosts_tell_what_changed_on_them_since_the_stay_before(told: Callable[..., str]) -> None:
    other = tuple(
        msgspec.structs.replace(one, vbios="96.00.99" if one.device == 2 else one.vbios)
        for one in machine("n1").devices
    )
    after: Machines = {
        "n1": updated(
            "n1", driver="580.1.2", kernel="6.1.0-31", devices=tuple(other), nic_firmware=(("mlx5_0", "28.43"),)
        ),
        "n2": machine("n2", d1="GPU-n3-7"),
        "n3": None,  # told nothing, which is no change
    }
    url = told(job(80, machines=after), job(81, machines={**after, "n3": updated("n3", image="Rocky Linux 9.6")}))
    rows = history("hosts", url, "--all")
    assert len(rows) == 6 * 3
    changed = {(row["job"], row["node"]): row["changed"] for row in rows if row["changed"]}
    assert changed == {
        ("j80", "n1"): "kernel 6.1.0-30 -> 6.1.0-31; driver 570.86.15 -> 580.1.2; firmware of mlx5_0 28.41.1000 -> "
        "28.43; VBIOS of device 2 96.00.89 -> 96.00.99",
        ("j80", "n2"): "device 1 GPU-n2-1 -> GPU-n3-7",
        ("j81", "n3"): "image Rocky Linux 9.5 -> Rocky Linux 9.6",
    }
    assert [row["changed"] for row in history("hosts", url, "j80")] == [*list(changed.values())[:2], ""]
    [last, *_] = history("hosts", url, "--all", "--node", "n1", "--since", "2025-09-03", "--until", "2025-09-04")
    assert (last["job"], last["changed"], last["vbios"]) == ("j80", changed[("j80", "n1")], "96.00.89, 96.00.99")
    assert [row["job"] for row in history("hosts", url, "--all", "--node", "n1", "--limit", "2")] == ["j80", "j81"]
    with Reader.open(url) as reader:
        assert queries.hosts(reader)["changed"].tolist() == [row["changed"] for row in rows]
        assert len(queries.hosts(reader, reader.job("j80")["id"])) == 3


def test_a_machine_that_was_renamed_is_still_the_same_host(told: Callable[..., str]) -> None:
    def renamed() -> Told:
        for entry, at in job(80):
            if isinstance(entry, journal.NodeJoined) and entry.node == "n1":
                entry = msgspec.structs.replace(entry, node="x1", inventory=updated("n1", kernel="6.2"))
            yield entry, at

    rows = history("hosts", told(renamed()), "--all", "--node", "x1")
    assert [(row["host"], row["changed"]) for row in rows] == [("host-n1", "kernel 6.1.0-30 -> 6.2")]


def test_devices_of_all_jobs_are_told_by_where_they_were(told: Callable[..., str]) -> None:
    moved: Machines = {"n2": machine("n2", d1="GPU-new"), "n3": machine("n3", d0="GPU-n2-1")}
    url = told(job(80, machines=moved), job(81, machines=moved), job(82, machines={"n1": None, "n2": None, "n3": None}))
    rows = history("devices", url, "--all")
    assert len(rows) == 12 + 2
    where = [(row["node"], row["device"], row["jobs"]) for row in rows if row["uuid"] == "GPU-n2-1"]
    assert where == [("n2", 1, 4), ("n3", 0, 2)]
    [new] = history("devices", url, "--all", "--node", "n2", "--since", "2025-09-01", "--limit", "1")
    assert {row["uuid"] for row in history("devices", url, "--all", "--node", "n2")} >= {"GPU-new", "GPU-n2-1"}
    assert new["last_seen"] > new["first_seen"]
    of_job = history("devices", url, "j80", "--node", "n3")
    assert [(row["device"], row["uuid"]) for row in of_job] == [
        (0, "GPU-n2-1"),
        *((i, f"GPU-n3-{i}") for i in range(1, 4)),
    ]
    assert history("devices", url, "j82") == []


def test_they_can_be_read_on_a_terminal(told: Callable[..., str]) -> None:
    url = told(job(80, machines={"n1": updated("n1", driver="580.1.2")}))
    for argv, words in (
        (("hosts", "--all"), "580.1.2"),
        (("hosts", "j80"), "host-n1"),
        (("devices", "j80"), "NVIDIA H100"),
        (("devices", "--all"), "GPU-n1-0"),
    ):
        shown = CliRunner().invoke(app, ["history", *argv, "--ledger", url], env={"COLUMNS": "80"})
        assert shown.exit_code == 0, shown.exception
        assert words in shown.stdout
        assert max(map(len, shown.stdout.splitlines())) <= 80
