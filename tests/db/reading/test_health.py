"""Nodes by health, over all jobs of a ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pytest

from resihp.db.reading.health import health_frame, nodes_by_health, usual_speeds
from resihp.db.reading.queries import Reader
from resihp.db.writer import Ledger
from resihp.record import journal
from tests.db.conftest import BEGAN, node_story, started, story, write_journal

DAY_S = 86_400.0
NOW = datetime.fromtimestamp(BEGAN + 100 * DAY_S, UTC)
Told = Iterator[tuple[journal.AnyEntry, float]]


def failed(number: int, node: str | None, **what: Any) -> journal.FailureFound:
    given: dict[str, Any] = {
        "kind": "fail-stop",
        "component": "device",
        "cause": "rank 5: GPU has fallen off the bus (Xid 79)",
        "ranks": (5,),
        "device": 1,
        "iteration": 12,
        "epoch": 2,
        "evidence": "NVRM: Xid (PCI:0000:3b:00): 79",
        "detect_s": None,
    }
    return journal.FailureFound(failure=number, node=node, **(given | what))


def job(day: float, *failures: journal.FailureFound, name: str, hours: float = 20.0) -> Told:
    """A job of nodes n1 to n3, 4 devices each, that fails like this, an hour between failures."""
    at = BEGAN + day * DAY_S
    yield started(name), at
    for n in range(3):
        yield journal.NodeJoined(node=f"n{n + 1}", host="here", devices=4), at
    for i, failure in enumerate(failures):
        yield failure, at + 3600.0 * (i + 1)
    yield journal.JobEnded(exit_code=0, state="completed", reason="done"), at + 3600.0 * hours


@pytest.fixture
def ledger_of(tmp_path: Path, open_ledger: Callable[..., Ledger]) -> Iterator[Callable[..., Reader]]:
    """A reader of a ledger that holds these jobs."""
    with ExitStack() as stack:

        def make(*stories: Told) -> Reader:
            url = ""
            for i, told in enumerate(stories):
                ledger = open_ledger()
                for record in write_journal(tmp_path / f"journal-{i}", told):
                    ledger.submit(record)
                assert ledger.close()
                url = ledger.url
            return stack.enter_context(Reader.open(url))

        yield make


def test_a_node_that_fails_in_job_after_job_comes_first(ledger_of: Callable[..., Reader]) -> None:
    reader = ledger_of(
        *(job(day, failed(1, "n2"), name=f"j{day}") for day in (70, 80, 88, 95)), job(97, failed(1, "n1"), name="last")
    )
    found = health_frame(reader, NOW)
    assert list(found.columns) == [
        *("node", "lemon", "observed", "expected", "window_days", "p", "q", "lemon_devices", "devices"),
        *("failures", "unsure", "last", "device_days", "rate", "evidence"),
    ]
    assert found["node"].tolist() == ["n2", "n1", "n3"]
    assert found["failures"].tolist() == [4, 1, 0]
    assert found["lemon"].tolist() == [True, False, False]
    assert found["observed"].tolist() == [4, 1, 0]
    assert 0 < found["expected"][0] < 0.1
    assert found["q"][0] < 0.01 < found["q"][1]
    assert found["p"].is_monotonic_increasing
    assert found["devices"].tolist()[1:] == ["", ""]
    assert found["lemon_devices"][0] == "1"
    assert found["devices"][0].startswith("device 1: 4 outages in 180 days, 0.0")
    assert found["rate"].is_monotonic_decreasing
    assert found["last"][0] == pd.Timestamp(BEGAN + 95 * DAY_S + 3600, unit="s", tz="UTC")
    assert found["last"].isna().tolist() == [False, False, True]
    assert found["evidence"][0].split("; ")[0].endswith("job j95: rank 5: GPU has fallen off the bus (Xid 79)")
    assert len(found["evidence"][0].split("; ")) == 3
    assert found["evidence"][2] == ""
    assert found["device_days"][2] == pytest.approx(5 * 20 * 4 / 24)


@pytest.mark.parametrize(
    "what",
    [
        {"kind": "program", "component": "script"},
        {"kind": "communication", "component": "link"},
        {"detect_s": 0.02},
        {"node": None},
    ],
    ids=str,
)
def test_what_is_no_nodes_fault_does_not_count(ledger_of: Callable[..., Reader], what: dict[str, Any]) -> None:
    innocent = {"node": "n2"} | what
    reader = ledger_of(*(job(day, failed(1, innocent["node"], **_rest(innocent)), name=f"j{day}") for day in (90, 95)))
    assert [one.failures for one in nodes_by_health(reader, NOW)] == [0, 0, 0]


def _rest(what: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in what.items() if name != "node"}


def test_injected_failures_count_when_asked_for(ledger_of: Callable[..., Reader]) -> None:
    reader = ledger_of(story(), job(0.5, failed(1, "n3", detect_s=0.02), name="j"))
    now = datetime.fromtimestamp(BEGAN, UTC) + timedelta(days=1.5)
    assert [(one.failures, one.unsure) for one in nodes_by_health(reader, now)] == [(0, 0)] * 3
    counted = {one.node: (one.failures, one.unsure) for one in nodes_by_health(reader, now, injected=True)}
    assert counted == {"n1": (0, 0), "n2": (0, 1), "n3": (1, 0)}  # a process of n2 was killed, a device of n3 failed


def test_a_process_that_died_of_anything_weighs_less_than_a_device(ledger_of: Callable[..., Reader]) -> None:
    reader = ledger_of(job(99, failed(1, "n1", component="process"), failed(2, "n2"), name="j"))
    assert [one.node for one in nodes_by_health(reader, NOW)] == ["n2", "n1", "n3"]


def test_processes_that_die_in_job_after_job_make_no_lemon_and_are_told(ledger_of: Callable[..., Reader]) -> None:
    dead = {"component": "process", "cause": "rank 5 killed by signal 9 (SIGKILL)"}
    found = health_frame(
        ledger_of(*(job(day, failed(1, "n2", **dead), name=f"j{day}") for day in range(40, 99, 7))), NOW
    )
    assert (found["node"][0], found["failures"][0], found["unsure"][0]) == ("n2", 0, 9)
    assert found["evidence"][0].endswith("rank 5 killed by signal 9 (SIGKILL)")
    assert not found["lemon"].any()


def test_what_was_long_ago_counts_as_much_and_ranks_less(ledger_of: Callable[..., Reader]) -> None:
    reader = ledger_of(*(job(day, failed(1, "n2"), name=f"j{day}") for day in (1, 5, 9)), job(99, name="now"))
    for half_life in (1, 30, 3650):
        worst = nodes_by_health(reader, NOW, half_life=timedelta(days=half_life))[0]
        assert (worst.node, worst.failures, worst.lemon) == ("n2", 3, True)
    assert nodes_by_health(reader, NOW + timedelta(days=100))[0].failures == 0


def test_a_device_and_a_node_fail_on_their_own_account(ledger_of: Callable[..., Reader]) -> None:
    def told(day: int) -> Told:
        broken = (
            failed(1, "n1", device=3),
            failed(2, "n2", component="node", device=None),
            failed(3, "n3", device=day % 4),
        )
        yield from job(day, *broken, name=f"j{day}")

    frame = health_frame(ledger_of(*(told(day) for day in (60, 67, 74, 82, 89))), NOW).set_index("node")
    assert frame["failures"].tolist() == [5, 5, 5]
    # All three fail as often as each other, which is no reason to distrust one; but one device of n1 does all of it.
    assert frame["lemon_devices"].to_dict() == {"n1": "3", "n2": "", "n3": ""}
    assert frame["observed"].tolist() == [5, 5, 5]


def test_a_node_undrained_since_starts_afresh_when_asked_for(ledger_of: Callable[..., Reader]) -> None:
    def told() -> Told:
        for entry, at in node_story():
            if isinstance(entry, journal.DrainDecided) and entry.drain == 1:
                yield failed(1, "n3", component="node", device=None), at
            yield entry, at

    now = datetime.fromtimestamp(BEGAN + 1000, UTC)
    reader = ledger_of(told())
    assert nodes_by_health(reader, now)[0].node == "n3"
    assert nodes_by_health(reader, now)[0].failures == 1
    assert all(one.failures == 0 for one in nodes_by_health(reader, now, afresh=True))


def probed(day: float, occasion: Literal["start", "suspicion"]) -> Told:
    def device(node: int, fit: bool) -> journal.DeviceProbe:
        evidence = "" if fit else "GEMM at 62% of its peers"
        what = {"flops": 1e12, "memory_bytes": 1e12, "speed": 1.0 if fit else 0.62, "fit": fit, "evidence": evidence}
        return journal.DeviceProbe(rank=4 * node, node=f"n{node + 1}", device=0, **what)

    devices = tuple(device(node, fit=node != 2) for node in range(3))
    link = journal.LinkProbe(ranks=(0, 4), nodes=("n1", "n2"), speed=0.5, fit=False)
    entry = journal.ProbesTaken(probe=1, occasion=occasion, devices=devices, links=(link,), seconds=0.3)
    entries = list(job(day, name=f"j{day}"))
    yield from entries[:-1]
    yield entry, entries[-2][1] + 1.0
    yield entries[-1]


def test_a_device_found_unfit_before_it_got_work_counts(ledger_of: Callable[..., Reader]) -> None:
    found = health_frame(ledger_of(probed(99, "start"), probed(98, "suspicion")), NOW)
    assert (found["node"][0], found["failures"].tolist()) == ("n3", [1, 0, 0])
    assert found["evidence"][0].endswith("job j99: device 0 found unfit, GEMM at 62% of its peers")


def test_what_is_slow_counts_as_far_as_the_detector_is_sure(ledger_of: Callable[..., Reader]) -> None:
    slow = {"kind": "fail-slow", "speed": 0.8}
    reader = ledger_of(
        job(99, failed(1, "n1", confidence=0.6, **slow), failed(2, "n2", confidence=1.0, **slow), name="j")
    )
    assert [one.node for one in nodes_by_health(reader, NOW)] == ["n2", "n1", "n3"]


def test_a_ledger_without_failures_and_one_without_nodes(ledger_of: Callable[..., Reader]) -> None:
    reader = ledger_of(iter([(started("j"), BEGAN)]))
    found = health_frame(reader, NOW)
    assert found.empty
    assert str(found["last"].dtype) == "datetime64[ns, UTC]"


# --- what nodes usually give --------------------------------------------------------------------------------------


def measured(day: float, *flops: float, host: str = "here", **changes: Any) -> Told:
    """A job of node n1 alone, whose devices gave this at the start."""
    devices = tuple(
        journal.DeviceProbe(
            rank=i,
            node="n1",
            device=i,
            **{
                "flops": speed,
                "memory_bytes": 1e12,
                "speed": 1.0,
                "fit": True,
                "evidence": "",
                "hardware": "A100",
                **{name: value for name, value in changes.items() if name != "occasion"},
            },
        )
        for i, speed in enumerate(flops)
    )
    at = BEGAN + day * DAY_S
    yield started(f"j{day}"), at
    yield journal.NodeJoined(node="n1", host=host, devices=len(flops)), at
    occasion = changes.get("occasion", "start")
    yield journal.ProbesTaken(probe=1, occasion=occasion, devices=devices, links=(), seconds=0.3), at + 1.0


def test_what_a_node_usually_gives_is_read_from_its_healthy_measurements(ledger_of: Callable[..., Reader]) -> None:
    reader = ledger_of(
        measured(90, 1.0e12, 1.02e12),
        measured(91, 1.1e12, 1.1e12),
        measured(92, 1.2e12, 1.2e12),
        measured(93, 3e11, 3e11, fit=False),
        measured(94, 3e11, 3e11, occasion="suspicion"),
        measured(95, 3e11, 3e11, occasion="standby"),
        measured(96, 0.0, 0.0),
        measured(97, 3e11, 3e11, hardware=""),
    )
    (place, speed), *more = usual_speeds(reader, ["n1", "n7"], NOW).items()
    assert more == []
    assert (place, speed.flops, speed.memory_bytes) == (("n1", "here", "A100"), 1.1e12, 1e12)
    assert usual_speeds(reader, ["n2"], NOW) == {}


def test_measurements_of_long_ago_or_of_a_namesake_do_not_tell(ledger_of: Callable[..., Reader]) -> None:
    reader = ledger_of(measured(1, 1e12), measured(98, 1e12), measured(99, 1e12), measured(97, 1e12, host="there"))
    assert usual_speeds(reader, ["n1"], NOW) == {}
