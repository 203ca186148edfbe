"""The drain ladder: which rungs are tried, what each answers, and what is never asked of Slurm."""

from __future__ import annotations

import json
import os
import pwd
from pathlib import Path
from typing import Any

import pytest

from resihp.slurm.client import PREFIX, NodeView
from resihp.slurm.drains.drain import Step, climb, descend
from resihp.slurm.drains.exclusions import EXCLUSION_S, Exclusions
from resihp.slurm.drains.site_limits import DrainLimits, most_of
from resihp.slurm.rate_limited import Polite
from tests.slurm.fake_slurm import FakeSlurm

NOW = 1_800_000_000.0
UID = 1000


class Ladder:
    def __init__(self, folder: Path, *, operator: bool, nodes: tuple[NodeView | str, ...] = ("n1", "n2", "n3")) -> None:
        self.slurm = FakeSlurm(nodes, user="alice", operator=operator)
        self.spool = folder / "spool"
        self.spool.mkdir()
        self.exclusions = Exclusions(folder / "home", "vc")

    def climb(self, node: str, **changed: Any) -> list[Step]:
        given: dict[str, Any] = {
            "job_id": "17",
            "allowed_nodes": ("n1", "n2", "n3"),
            "batch_host": "n1",
            "spool": self.spool,
            "exclusions": self.exclusions,
            "now": NOW,
        }
        return list(climb(self.slurm, node, "rank 3 died", **{**given, **changed}))

    def descend(self, node: str, **changed: Any) -> list[Step]:
        given: dict[str, Any] = {"job_id": "17", "spool": self.spool, "exclusions": self.exclusions, "now": NOW}
        return list(descend(self.slurm, node, **{**given, "user": "alice", "uid": UID, **changed}))

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_bytes()) for path in self.spool.iterdir()]

    @property
    def excluded(self) -> list[str]:
        return [item.node for item in self.exclusions.current(NOW)]

    def drained_by(self, who: str, reason: str, node: str = "n3") -> None:
        self.slurm.set_node(node, flags=frozenset({"drain"}), reason=reason, reason_by=who)


@pytest.fixture
def operator(tmp_path: Path) -> Ladder:
    return Ladder(tmp_path, operator=True)


@pytest.fixture
def user(tmp_path: Path) -> Ladder:
    return Ladder(tmp_path, operator=False)


def outcomes(steps: list[Step]) -> dict[str, str]:
    assert len({step.step for step in steps}) == len(steps)
    return {step.step: step.outcome for step in steps}


# --- up -------------------------------------------------------------------------------------------------------------


def test_who_may_drain_drains(operator: Ladder) -> None:
    assert outcomes(operator.climb("n3")) == {"slurm": "done", "exclusion": "done"}
    view = operator.slurm.node_views["n3"]
    assert view.draining
    assert view.reason == f"{PREFIX}rank 3 died"
    assert operator.requests == []
    (exclusion,) = operator.exclusions.current(NOW)
    assert exclusion.node == "n3"
    assert exclusion.job_id == "17"
    assert exclusion.expires_at == NOW + EXCLUSION_S["hardware"]
    assert (exclusion.measure, exclusion.since) == ("drain", NOW)
    assert exclusion.reason == "rank 3 died"


def test_who_may_not_asks_the_site(user: Ladder) -> None:
    assert outcomes(user.climb("n3")) == {"slurm": "refused", "spool": "done", "exclusion": "done"}
    (request,) = user.requests
    assert (request["kind"], request["node"], request["job"]) == ("drain", "n3", "17")
    assert not user.slurm.node_views["n3"].draining
    assert user.excluded == ["n3"]


def test_without_a_spool_the_node_is_still_left_out(user: Ladder) -> None:
    assert outcomes(user.climb("n3", spool=None)) == {"slurm": "refused", "exclusion": "done"}


def test_no_answer_is_unknown_and_the_site_is_asked(operator: Ladder) -> None:
    operator.slurm.unavailable = True
    assert outcomes(operator.climb("n3")) == {"slurm": "unknown", "spool": "done", "exclusion": "done"}


def test_a_node_of_which_slurm_says_nothing_readable_is_neither_drained_nor_undrained(operator: Ladder) -> None:
    """Somebody may have drained it for a reason of his own, which would be written over."""
    operator.slurm.set_node("n3", state="unknown", unreadable="slurm: cannot read the state of node n3")
    steps = operator.climb("n3")
    assert outcomes(steps)["slurm"] == "unknown"
    assert "cannot read the state of node n3" in steps[0].text
    assert outcomes(operator.descend("n3"))["slurm"] == "unknown"
    assert (operator.slurm.calls["drain"], operator.slurm.calls["undrain"]) == (0, 0)


def test_a_drain_whose_answer_is_lost_is_unknown(operator: Ladder) -> None:
    operator.slurm.nodes = lambda names: {"n3": NodeView(name="n3", state="allocated")}  # type: ignore[method-assign]
    operator.slurm.swallow_answers = True
    assert outcomes(operator.climb("n3"))["slurm"] == "unknown"
    assert operator.slurm.node_views["n3"].draining


def test_what_is_not_to_be_drained_is_only_left_out(operator: Ladder) -> None:
    assert outcomes(operator.climb("n3", measure="exclude", exclude_s=60.0)) == {"exclusion": "done"}
    assert not operator.slurm.node_views["n3"].draining
    assert operator.requests == []
    assert operator.slurm.calls == {}, "Slurm is not even asked"
    (exclusion,) = operator.exclusions.current(NOW)
    assert (exclusion.expires_at, exclusion.measure) == (NOW + 60.0, "exclude")


def test_no_more_nodes_are_drained_than_the_site_allows(operator: Ladder) -> None:
    operator.drained_by("bob", f"{PREFIX}job 4 lost rank 1: Xid 79", "n1")
    operator.drained_by("root", "disk", "n2")
    steps = operator.climb("n3", limits=DrainLimits(drained=1))
    assert outcomes(steps) == {"slurm": "refused", "exclusion": "done"}, "nor is the hook asked"
    assert "the site allows 1 at a time; try: sinfo -R | grep resihp:" in steps[0].text
    assert not operator.slurm.node_views["n3"].draining
    assert outcomes(operator.climb("n3", limits=DrainLimits(drained=2)))["slurm"] == "done"


@pytest.mark.parametrize(("share", "nodes", "most"), [(0.02, 200, 4), (0.02, 49, 1), (0.1, 30, 3), (0.29, 100, 29)])
def test_a_share_is_rounded_down_but_is_a_node_at_least(share: float, nodes: int, most: int) -> None:
    assert most_of(share, nodes) == most


def test_a_share_of_the_partition_is_counted_in_it(tmp_path: Path) -> None:
    operator = Ladder(tmp_path, operator=True, nodes=tuple(f"n{number}" for number in range(1, 11)))
    limits = DrainLimits(drained_share=0.2, partition="main")
    operator.drained_by("bob", f"{PREFIX}job 4 lost rank 1: Xid 79", "n9")
    assert outcomes(operator.climb("n2", limits=limits))["slurm"] == "done"
    steps = operator.climb("n3", limits=limits)
    assert outcomes(steps) == {"slurm": "refused", "exclusion": "done"}
    assert steps[0].text == (
        "node n3: not drained: 2 nodes of partition main are drained with our reason, and the site allows 20 % of its "
        "10 nodes at a time, which is 2; try: sinfo -R | grep resihp:"
    )
    elsewhere = DrainLimits(drained_share=0.2, partition="other")
    assert outcomes(operator.climb("n3", limits=elsewhere))["slurm"] == "done", "no node of it is drained"
    unknown = operator.climb("n4", limits=DrainLimits(drained_share=0.2), allowed_nodes=("n4",))
    assert "the job's partition is not known" in unknown[0].text


def test_jobs_of_one_user_drain_so_many_nodes_an_hour(tmp_path: Path) -> None:
    """Whichever job it was, and whether it was scontrol or the site's hook; older drains and those of others count
    not."""
    operator = Ladder(tmp_path, operator=True, nodes=tuple(f"n{number}" for number in range(1, 9)))
    me = pwd.getpwuid(os.getuid()).pw_name
    limits = DrainLimits(user_drains_per_hour=2)
    for node, who, reason, age_s in (
        ("n4", me, f"{PREFIX}job 4 lost rank 1: Xid 79", 3000.0),
        ("n5", me, f"{PREFIX}job 5 lost rank 1: Xid 79", 4000.0),
        ("n6", "bob", f"{PREFIX}job 6 lost rank 1: Xid 79", 10.0),
        ("n7", me, "disk", 10.0),
    ):
        operator.slurm.set_node(node, flags=frozenset({"drain"}), reason=reason, reason_by=who, reason_at=NOW - age_s)
    assert outcomes(operator.climb("n2", limits=limits))["slurm"] == "done"
    operator.slurm.set_node("n2", reason_by=me, reason_at=NOW)
    steps = operator.climb("n3", limits=limits)
    assert outcomes(steps) == {"slurm": "refused", "exclusion": "done"}, "nor is the hook asked"
    assert f"jobs of {me} had 2 nodes drained in the last hour, and the site allows 2; try: sinfo -R" in steps[0].text
    by_hook = f"{PREFIX}Xid 79 (asked by uid {os.getuid()}, job 9)"
    operator.slurm.set_node("n2", reason=by_hook, reason_by="slurm")
    assert outcomes(operator.climb("n3", limits=limits))["slurm"] == "refused"
    operator.slurm.set_node("n2", flags=frozenset(), reason="", reason_by="")
    assert outcomes(operator.climb("n3", limits=limits))["slurm"] == "done", "it was undrained"


def test_where_it_is_not_known_how_many_are_drained_none_is(operator: Ladder) -> None:
    operator.slurm.refuse["drained"] = "Access denied"
    assert outcomes(operator.climb("n3", limits=DrainLimits(drained=9)))["slurm"] == "refused"
    assert not operator.slurm.node_views["n3"].draining


@pytest.mark.parametrize(
    "broken",
    [
        {"spool": Path("/nonexistent")},
        {"spool": Path("/dev/null")},
        {"exclusions": Exclusions(Path("/dev/null"), "vc")},
    ],
)
def test_a_rung_that_breaks_does_not_keep_from_the_next(user: Ladder, broken: dict[str, Any]) -> None:
    found = outcomes(user.climb("n3", **broken))
    assert list(found) == ["slurm", "spool", "exclusion"]
    assert sorted(found.values()) in (["done", "refused", "refused"], ["done", "refused", "unknown"])


@pytest.mark.parametrize("node", ["n9", "", "n[1-3]", "n1,n2", "ALL", "-n3", "n3 State=DOWN", "n3\n", "../n3"])
def test_a_node_that_the_job_never_held_is_not_even_asked_about(operator: Ladder, node: str) -> None:
    operator.slurm.node_views["n9"] = NodeView(name="n9", state="idle")
    assert outcomes(operator.climb(node)) == {"slurm": "refused"}
    assert not operator.slurm.calls
    assert operator.requests == []
    assert operator.excluded == []


def test_a_name_that_is_none_is_refused_even_where_it_is_allowed(operator: Ladder) -> None:
    assert outcomes(operator.climb("n[1-3]", allowed_nodes=("n[1-3]",))) == {"slurm": "refused"}
    assert not operator.slurm.calls


def test_the_batch_host_is_never_drained(operator: Ladder) -> None:
    assert outcomes(operator.climb("n1")) == {"slurm": "refused", "exclusion": "done"}
    assert not operator.slurm.calls
    assert operator.requests == []


@pytest.mark.parametrize(
    "changed",
    [
        {"flags": frozenset({"drain"}), "reason": "bad disk", "reason_by": "root"},
        {"state": "down", "reason": "PSU", "reason_by": "root"},
        {"state": "idle", "reason": "watch this one", "reason_by": "root"},
        {"state": "idle", "flags": frozenset({"fail"})},
        {"flags": frozenset({"drain"}), "reason": f"{PREFIX}of another job", "reason_by": "bob"},
        {"state": "down", "flags": frozenset({"drain", "not_responding"}), "reason": "Not responding"},
    ],
)
def test_what_somebody_has_set_aside_is_left_as_it_is(operator: Ladder, changed: dict[str, Any]) -> None:
    before = operator.slurm.set_node("n3", **changed)
    steps = operator.climb("n3")
    assert outcomes(steps) == {"slurm": "done", "exclusion": "done"}
    assert "already" in steps[0].text
    assert before.reason in steps[0].text
    assert operator.slurm.node_views["n3"] == before
    assert operator.slurm.calls["drain"] == 0


def test_a_node_that_slurm_cannot_reach_is_drained_all_the_same(operator: Ladder) -> None:
    operator.slurm.set_node(
        "n3", state="down", flags=frozenset({"not_responding"}), reason="Not responding", reason_by="root"
    )
    operator.climb("n3")
    assert operator.slurm.node_views["n3"].reason == f"{PREFIX}rank 3 died"


def test_a_reason_that_was_set_since_the_last_look_stands(operator: Ladder) -> None:
    polite = Polite(operator.slurm)
    assert not polite.nodes(["n3"])["n3"].reason
    operator.drained_by("root", "bad disk")
    given: dict[str, Any] = {"job_id": "17", "spool": None, "exclusions": operator.exclusions, "now": NOW}
    steps = list(climb(polite, "n3", "x", allowed_nodes=("n3",), batch_host="n1", **given))
    assert "'bad disk' by root stands" in steps[0].text
    assert operator.slurm.node_views["n3"].reason == "bad disk"


def test_a_node_that_slurm_does_not_know(operator: Ladder) -> None:
    del operator.slurm.node_views["n3"]
    assert outcomes(operator.climb("n3"))["slurm"] == "refused"
    assert operator.slurm.calls["drain"] == 0


def test_rungs_are_told_one_by_one(operator: Ladder) -> None:
    """What is done is told before the next rung is tried: a hung file system must not hide that Slurm has drained."""
    steps = climb(
        operator.slurm,
        "n3",
        "x",
        job_id="17",
        allowed_nodes=("n3",),
        batch_host="n1",
        spool=None,
        exclusions=operator.exclusions,
        now=NOW,
    )
    assert next(steps).step == "slurm"
    assert operator.excluded == []
    assert next(steps).step == "exclusion"


# --- down -----------------------------------------------------------------------------------------------------------


def test_what_was_drained_is_given_back(operator: Ladder) -> None:
    operator.climb("n3")
    assert outcomes(operator.descend("n3")) == {"slurm": "done", "exclusion": "done"}
    assert operator.slurm.node_views["n3"].usable
    assert operator.excluded == []


def test_what_the_hook_drained_for_us_is_asked_back(user: Ladder) -> None:
    user.drained_by("root", f"{PREFIX}rank 3 died (asked by uid {UID}, job 17)")
    assert outcomes(user.descend("n3")) == {"slurm": "refused", "spool": "done", "exclusion": "done"}
    (request,) = user.requests
    assert (request["kind"], request["node"]) == ("undrain", "n3")


def test_a_user_is_who_runs_the_command_unless_another_is_named(user: Ladder) -> None:
    user.drained_by("root", f"{PREFIX}rank 3 died (asked by uid {os.getuid()}, job 17)")
    assert outcomes(user.descend("n3", uid=None))["spool"] == "done"
    (request,) = user.requests
    assert (request["kind"], request["node"], request["job"]) == ("undrain", "n3", "17")


@pytest.mark.parametrize(
    ("who", "reason"),
    [
        ("root", "bad disk"),
        ("alice", "set by hand"),
        ("bob", f"{PREFIX}of his own job"),
        ("root", f"{PREFIX}rank 3 died (asked by uid {UID + 1}, job 17)"),
        ("", ""),
    ],
)
@pytest.mark.parametrize("rights", [True, False])
def test_what_others_drained_stands(tmp_path: Path, rights: bool, who: str, reason: str) -> None:
    ladder = Ladder(tmp_path, operator=rights)
    ladder.drained_by(who, reason)
    assert outcomes(ladder.descend("n3")) == {"slurm": "refused", "exclusion": "done"}
    assert ladder.slurm.calls["undrain"] == 0
    assert ladder.slurm.node_views["n3"].draining
    assert ladder.requests == []


def test_a_node_that_is_not_drained_stays_so(operator: Ladder) -> None:
    assert outcomes(operator.descend("n3")) == {"slurm": "done", "exclusion": "done"}
    assert operator.slurm.calls["undrain"] == 0


def test_no_answer_leaves_it_unknown(operator: Ladder) -> None:
    operator.climb("n3")
    operator.slurm.unavailable = True
    assert outcomes(operator.descend("n3")) == {"slurm": "unknown", "exclusion": "done"}
    assert operator.excluded == []


@pytest.mark.parametrize("flags", [{"drain"}, {"drain", "not_responding"}, set()])
def test_a_node_that_is_down_is_not_given_back_by_taking_its_drain_away(operator: Ladder, flags: set[str]) -> None:
    reason = f"{PREFIX}x" if flags else "Not responding"
    operator.slurm.set_node("n3", state="down", flags=frozenset(flags), reason=reason, reason_by="alice")
    step = operator.descend("n3")[0]
    assert (step.step, step.outcome) == ("slurm", "done")
    state = "+".join(["down", *sorted(flags - {"drain"})])
    assert f"; but it is {state}" in step.text
    assert step.text.endswith(": once slurmd answers there, scontrol update NodeName=n3 State=RESUME")


@pytest.mark.parametrize("state", ["idle", "mixed"])
def test_a_node_that_works_needs_nothing_more(operator: Ladder, state: str) -> None:
    operator.slurm.set_node("n3", state=state, flags=frozenset({"drain"}), reason=f"{PREFIX}x", reason_by="alice")
    assert operator.descend("n3")[0].text == f"node n3: undrained, it had '{PREFIX}x'"
    assert operator.descend("n3")[0].text == "node n3: is not drained"


def test_a_refusal_names_the_node_once(tmp_path: Path) -> None:
    user = Ladder(tmp_path, operator=False)
    assert user.climb("n3")[0].text.count("node n3: ") == 1
