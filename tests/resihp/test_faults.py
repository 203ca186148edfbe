"""`--fault` values: what is understood, and what is said about those that are not."""

from __future__ import annotations

import pytest

from resihp.errors import ConfigurationError
from resihp.faults import Fault, parse

GOOD = [
    ("kill:rank=1@iteration=3", Fault(id=7, kind="kill", rank=1, iteration=3)),
    ("kill:rank=1@iteration=3,phase=backward", Fault(id=7, kind="kill", rank=1, iteration=3, phase="backward")),
    ("crash:rank=0@iteration=1,phase=reduce", Fault(id=7, kind="crash", rank=0, iteration=1, phase="reduce")),
    ("kill:node=n2@iteration=12,phase=step", Fault(id=7, kind="kill", node="n2", iteration=12, phase="step")),
    ("stop:node=gpu-17@phase=forward,iteration=2", Fault(id=7, kind="stop", node="gpu-17", iteration=2)),
    ("stop:rank=5@iteration=2", Fault(id=7, kind="stop", rank=5, iteration=2)),
    ("hang:rank=5@iteration=2", Fault(id=7, kind="hang", rank=5, iteration=2)),
    ("raise:rank=5@iteration=2", Fault(id=7, kind="raise", rank=5, iteration=2)),
    ("disconnect:node=n2@iteration=2", Fault(id=7, kind="disconnect", node="n2", iteration=2)),
    ("disconnect:node=n2@iteration=2,phase=park", Fault(id=7, kind="disconnect", node="n2", iteration=2, phase="park")),
    ("kill:rank=1@iteration=3,phase=groups", Fault(id=7, kind="kill", rank=1, iteration=3, phase="groups")),
    ("crash:rank=1@iteration=3,phase=transfer", Fault(id=7, kind="crash", rank=1, iteration=3, phase="transfer")),
    ("kill:node=n1@iteration=3,phase=resume", Fault(id=7, kind="kill", node="n1", iteration=3, phase="resume")),
    (
        "slow:rank=5,speed=0.5@iteration=10,until=40",
        Fault(id=7, kind="slow", rank=5, iteration=10, speed=0.5, until=40),
    ),
    ("slow:node=n2,speed=0.01@iteration=10", Fault(id=7, kind="slow", node="n2", iteration=10, speed=0.01)),
    (
        "slow:link=n2-n10,speed=0.3@iteration=10",
        Fault(id=7, kind="slow", link=("n10", "n2"), iteration=10, speed=0.3),
    ),
    (
        "slow:link=gpu-02-gpu-01,speed=0.3@iteration=10,until=20",
        Fault(id=7, kind="slow", link=("gpu-01", "gpu-02"), iteration=10, speed=0.3, until=20),
    ),
    (
        "slow:rank=5,speed=0.5@iteration=10,until=40,every=10",
        Fault(id=7, kind="slow", rank=5, iteration=10, speed=0.5, until=40, every=10),
    ),
    (
        "slow:rank=0@until=11,speed=0.999,iteration=10,phase=backward",
        Fault(id=7, kind="slow", rank=0, iteration=10, phase="backward", speed=0.999, until=11),
    ),
]


@pytest.mark.parametrize(("text", "fault"), GOOD, ids=[text for text, _ in GOOD])
def test_parses(text: str, fault: Fault) -> None:
    assert parse(text, 7) == fault


@pytest.mark.parametrize("text", [text for text, _ in GOOD])
def test_its_own_words_parse_to_itself(text: str) -> None:
    fault = parse(text, 1)
    assert parse(str(fault), 1) == fault


BAD = [
    ("", "expected KIND:TARGET@WHEN"),
    ("kill", "expected KIND:TARGET@WHEN"),
    ("kill:rank=1", "expected KIND:TARGET@WHEN"),
    ("kill@iteration=3", "expected KIND:TARGET@WHEN"),
    ("explode:rank=1@iteration=3", "unknown kind 'explode', one of kill, crash, stop, hang, raise, disconnect"),
    ("KILL:rank=1@iteration=3", "unknown kind 'KILL'"),
    ("kill:1@iteration=3", "'1' is not one key=value"),
    ("kill:rank=1,rank=2@iteration=3", "'rank=2' is not one key=value"),
    ("kill:rank=1@iteration=3,", "'' is not one key=value"),
    ("kill:rank=1,speed=0.5@iteration=3", "speed does not apply to kill"),
    ("slow:rank=1@iteration=3,factor=3", "factor does not apply to slow; example: slow:rank=5,speed=0.5@iteration=10"),
    ("kill:link=n1-n2@iteration=3", "link does not apply to kill"),
    ("kill:rank=1@iteration=3,until=5", "until does not apply to kill"),
    ("kill:rank=1,node=n2@iteration=3", "one of rank=R and node=N"),
    ("kill:phase=step@iteration=3", "one of rank=R and node=N"),
    ("hang:node=n2@iteration=3", "hang happens to a rank, not to a node"),
    ("raise:node=n2@iteration=3", "raise happens to a rank, not to a node"),
    ("disconnect:rank=2@iteration=3", "disconnect happens to a node, not to a rank"),
    (
        "kill:rank=1@iteration=3,phase=sideways",
        "unknown phase 'sideways', one of forward, backward, reduce, step, park, groups, transfer, resume",
    ),
    ("kill:rank=1@phase=step", "iteration and rank are whole numbers"),
    ("kill:rank=one@iteration=3", "iteration and rank are whole numbers"),
    ("kill:rank=1@iteration=3.5", "iteration and rank are whole numbers"),
    ("kill:rank=1@iteration=0", "iterations count from 1, ranks from 0"),
    ("kill:rank=-1@iteration=3", "iterations count from 1, ranks from 0"),
    ("kill:node=@iteration=3", "node"),
    ("slow:rank=1@iteration=3", "slow needs a speed"),
    ("slow:rank=1,speed=half@iteration=3", "slow needs a speed"),
    ("slow:rank=1,speed=0.5@iteration=3,until=later", "until and every are whole numbers"),
    ("slow:rank=1,speed=0.5@iteration=3,until=7.5", "until and every are whole numbers"),
    ("slow:rank=1,speed=1@iteration=3", "a speed is from 0.01 to below 1"),
    ("slow:rank=1,speed=50%@iteration=3", "slow needs a speed"),
    ("slow:rank=1,speed=0@iteration=3", "a speed is from 0.01 to below 1"),
    ("slow:rank=1,speed=-0.5@iteration=3", "a speed is from 0.01 to below 1"),
    ("slow:rank=1,speed=nan@iteration=3", "a speed is from 0.01 to below 1"),
    ("slow:rank=1,speed=inf@iteration=3", "a speed is from 0.01 to below 1"),
    ("slow:rank=1,speed=0.5@iteration=3,until=3", "it ends before it begins"),
    ("slow:rank=1,speed=0.5@iteration=3,until=1", "it ends before it begins"),
    ("slow:rank=1,speed=0.5@iteration=3,every=0", "every=10 is one iteration in ten"),
    ("slow:rank=1,speed=0.5@iteration=3,every=often", "until and every are whole numbers"),
    ("kill:rank=1@iteration=3,every=2", "every does not apply to kill"),
    ("slow:rank=1,node=n2,speed=0.5@iteration=3", "one of rank=R, node=N and link=N-M"),
    ("slow:rank=1,link=n1-n2,speed=0.5@iteration=3", "one of rank=R, node=N and link=N-M"),
    ("slow:link=n1,speed=0.5@iteration=3", "link=n1 is not two nodes"),
    ("slow:link=n1-n1,speed=0.5@iteration=3", "link=n1-n1 is not two nodes"),
    ("slow:link=n1-,speed=0.5@iteration=3", "link=n1- is not two nodes"),
    ("slow:link=n1-n2-n3,speed=0.5@iteration=3", "link=n1-n2-n3 is not two nodes"),
    ("slow:link=n1-n2@iteration=3", "slow needs a speed"),
    ("stop:rank=1,speed=0.5@iteration=3,until=5", "speed, until does not apply to stop"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[text or "empty" for text, _ in BAD])
def test_refuses_and_quotes_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(text, 0)
    told = str(caught.value)
    assert told.startswith(f"fault {text!r}: ")
    assert message in told


@pytest.mark.parametrize("text", [text for text, message in BAD if "unknown" not in message])
def test_refusals_show_a_valid_example(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(text, 0)
    parse(str(caught.value).rpartition("example: ")[2], 0)


@pytest.mark.parametrize("text", [text for text, _ in GOOD if text.startswith("slow:")])
def test_a_fault_that_lasts_says_how_slow_and_until_when(text: str) -> None:
    fault = parse(text, 1)
    assert f",speed={fault.speed:g}@iteration=10," in str(fault)
    assert (f",until={fault.until}" in str(fault)) is (fault.until is not None)


def test_a_slow_link_hits_all_ranks_of_both_its_nodes() -> None:
    fault = parse("slow:link=n1-n2,speed=0.5@iteration=3", 0)
    assert [fault.hits(rank, node) for rank, node in ((0, "n1"), (1, "n2"), (2, "n3"))] == [True, True, False]


def test_target_names_what_is_hit() -> None:
    assert parse("kill:rank=1@iteration=3", 0).target == "rank=1"
    assert parse("kill:node=n2@iteration=3", 0).target == "node=n2"
    assert parse("slow:link=n2-n1,speed=0.5@iteration=3", 0).target == "link=n1-n2"
    assert str(Fault(id=1, kind="kill", rank=3)) == "kill:rank=3"
    assert str(Fault(id=1, kind="slow", node="n2", speed=0.25)) == "slow:node=n2,speed=0.25"
