"""One line of words for each entry about what is slow."""

from __future__ import annotations

import msgspec
import pytest

from resihp.record import journal
from resihp.record.describe import explain
from tests.db.test_projection import AT_THE_START, SLOW, SLOW_LINK, device


def test_a_slow_device() -> None:
    text = explain(SLOW)
    assert text.startswith("failure 1: rank 5 (n2 device 1) works at 62% of a healthy device's speed, ")


def test_a_slow_link() -> None:
    assert explain(SLOW_LINK).startswith(
        "failure 2: the link from rank 3 to rank 4 (n1-n2) works at 25% of its speed, "
    )


@pytest.mark.parametrize("entry", [SLOW, SLOW_LINK])
def test_what_is_slow_was_not_noticed_when_it_began(entry: journal.FailureFound) -> None:
    text = explain(entry)
    assert "iteration 12" in text
    assert "noticed in iteration 12" not in text


def test_the_end_of_a_failure() -> None:
    entry = journal.FailureEnded(failure=1, node="n2", device=1, iteration=20, evidence="own work as before")
    assert explain(entry) == "failure 1: over since iteration 20, own work as before"


def test_a_suspicion_to_be_slow_and_its_end() -> None:
    entry = journal.Suspected(rank=5, node="n2", evidence="slow, +60% since iteration 12: own work", kind="slow")
    assert explain(entry) == "rank 5: suspected, slow, +60% since iteration 12: own work"
    cleared = msgspec.structs.replace(entry, evidence="its probe is fine", cleared=True)
    assert explain(cleared) == "rank 5: no longer suspected, its probe is fine"


@pytest.mark.parametrize("cleared", [True, False])
def test_a_suspicion_of_nobody_in_particular(cleared: bool) -> None:
    entry = journal.Suspected(rank=None, node=None, evidence="slow, +60%", kind="slow", cleared=cleared)
    assert "None" not in explain(entry)


def test_probes_name_what_is_not_fit() -> None:
    assert explain(AT_THE_START) == (
        "probe 1 (start): 3 devices, 2 links in 1.25 s; not fit: rank 5 (n2 device 1), rank 6 (n2 device 2), link n1-n2"
    )


def test_probes_that_are_all_fit() -> None:
    entry = journal.ProbesTaken(probe=2, occasion="suspicion", devices=(device(0), device(1)), links=(), seconds=0.2)
    assert explain(entry) == "probe 2 (suspicion): 2 devices in 0.20 s, all fit"
    alone = journal.ProbesTaken(probe=3, occasion="standby", devices=(device(0),), links=(), seconds=0.2)
    assert explain(alone) == "probe 3 (standby): 1 device in 0.20 s, all fit"


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"tuned": True}, "measured times"),
        ({"found": True}, "a search"),
        ({"links": ((1, 4),)}, "link of ranks 1 and 4"),
    ],
)
def test_every_change_of_plan_has_a_cause(change: dict[str, object], cause: str) -> None:
    entry = msgspec.structs.replace(journal.ChangeDecided(reason="saves 3 s"), **change)
    assert explain(entry) == f"change of plan because of {cause}: saves 3 s"
