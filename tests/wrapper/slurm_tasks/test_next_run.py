"""A requeued job is kept from the nodes that its user's jobs avoid, as far as it can do without them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resihp.slurm.client import NodeChoice
from resihp.slurm.drains.exclusions import Exclusions
from resihp.wrapper import registry
from resihp.wrapper.config.run_spec import SlurmRequest
from resihp.wrapper.slurm_tasks.next_run import exclude_bad_nodes
from tests.slurm.fake_slurm import FakeSlurm
from tests.wrapper.run_requests import run_request

HOUR_S = 3600.0


class Requeued:
    """A job of two nodes, n1 and n2, that waits in a cluster of four."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, nodes: tuple[str, ...] = ("n3", "n4")) -> None:
        monkeypatch.setattr(registry, "place", lambda: None)
        self.home = folder
        self.slurm = FakeSlurm(("n1", "n2", *nodes))
        self.job = self.slurm.add_job("n1", "n2", id="77")
        self.slurm.requeue(self.job)
        self.said: list[str] = []
        self.request = run_request(
            "77",
            folder / "jobs" / "77",
            nodes=2,
            gpus=1,
            settings={"node_names": ("n1", "n2")},
            slurm=SlurmRequest(
                job_id="77", cluster="fake", batch_node="n1", host_names={}, cpus=16, gpus=1, partition="main"
            ),
        )

    def avoid(self, node: str, *, for_s: float = HOUR_S, job_id: str = "77") -> None:
        now = time.time()
        Exclusions(self.home, "fake").add(node, "it died", now + for_s, job_id=job_id, now=now)

    def exclude(self) -> tuple[str, ...]:
        exclude_bad_nodes(self.request, self.slurm, self.said.append)
        return self.slurm.node_choice(self.job).excluded

    def chose(self, **choice: Any) -> None:
        self.slurm.node_choices[self.job] = NodeChoice(partition="main", **choice)


@pytest.fixture
def requeued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Requeued:
    return Requeued(tmp_path, monkeypatch)


def test_a_node_that_died_is_excluded_from_the_next_run(requeued: Requeued) -> None:
    requeued.avoid("n2")
    assert requeued.exclude() == ("n2",)
    assert requeued.said == [
        "job 77: its next run will not get n2; if it should: scontrol update JobId=77 ExcNodeList="
    ]


def test_a_job_without_bad_nodes_is_left_as_it_is(requeued: Requeued) -> None:
    assert requeued.exclude() == ()
    assert (requeued.said, requeued.slurm.calls["exclude_nodes"]) == ([], 0)


def test_the_users_own_choice_is_kept(requeued: Requeued) -> None:
    requeued.chose(excluded=("n4",))
    assert requeued.exclude() == ("n4",)
    assert requeued.slurm.calls["exclude_nodes"] == 0
    requeued.slurm.node_views["n5"] = msgspec.structs.replace(requeued.slurm.node_views["n1"], name="n5")
    requeued.avoid("n2")
    assert requeued.exclude() == ("n2", "n4")


def test_an_exclusion_of_an_earlier_run_ends_with_its_time(requeued: Requeued) -> None:
    requeued.chose(excluded=("n2", "n4"))
    requeued.avoid("n2", for_s=-1)
    requeued.avoid("n4", for_s=-1, job_id="50")  # of another job: here the user excludes it
    assert requeued.exclude() == ("n4",)


def test_an_exclusion_that_is_over_is_removed_also_if_another_cannot_be_made(requeued: Requeued) -> None:
    requeued.chose(excluded=("n4",))
    requeued.avoid("n4", for_s=-1)
    requeued.avoid("n2")
    for name in ("n1", "n3"):
        requeued.slurm.set_node(name, state="down")
    assert requeued.exclude() == ()
    (said,) = requeued.said
    assert said.startswith("job 77: its next run may get n2 again: it needs 2 nodes")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"n3": {"state": "down"}, "n4": {"state": "down"}},
            "it needs 2 nodes, and without them only 1 of their kind are",
        ),
        ({"n3": {"flags": frozenset({"drain"})}, "n4": {"gpus": 4}}, "it needs 2 nodes, and without them only 1 of"),
        ({"n3": {"flags": frozenset({"maint"})}, "n4": {"features": frozenset({"old"})}}, "it needs 2 nodes"),
    ],
)
def test_it_is_not_left_without_nodes(requeued: Requeued, changes: dict[str, Any], why: str) -> None:
    for name, change in changes.items():
        requeued.slurm.set_node(name, **change)
    requeued.avoid("n2")
    assert requeued.exclude() == ()
    (said,) = requeued.said
    assert said.startswith(f"job 77: its next run may get n2 again: {why}")


def test_nodes_in_use_by_others_are_worth_waiting_for(requeued: Requeued) -> None:
    for name in ("n3", "n4"):
        requeued.slurm.set_node(name, state="allocated")
    requeued.avoid("n2")
    assert requeued.exclude() == ("n2",)


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        ({"requested": ("n2",)}, "it was submitted for n2 by name"),
        ({"contiguous": True}, "it was submitted for contiguous nodes"),
        ({"reservation": "workshop"}, "it runs in the reservation workshop"),
    ],
)
def test_where_it_is_not_known_which_others_it_could_get_nothing_is_changed(
    requeued: Requeued, choice: dict[str, Any], why: str
) -> None:
    requeued.chose(**choice)
    requeued.avoid("n2")
    assert requeued.exclude() == ()
    assert requeued.said == [f"job 77: its next run may get n2 again: {why}"]


@pytest.mark.parametrize("method", ["node_choice", "partition_nodes", "exclude_nodes"])
def test_a_refusal_is_said_and_harms_nothing(requeued: Requeued, method: str) -> None:
    requeued.avoid("n2")
    requeued.slurm.refuse[method] = "not today"
    exclude_bad_nodes(requeued.request, requeued.slurm, requeued.said.append)
    requeued.slurm.refuse.clear()
    assert requeued.slurm.node_choice(requeued.job).excluded == ()
    (said,) = requeued.said
    assert "may get" in said
    assert "not today" in said


def test_a_controller_that_does_not_answer_at_first_is_asked_again(requeued: Requeued) -> None:
    requeued.avoid("n2")
    requeued.slurm.unavailable = True
    pauses: list[float] = []

    def wait(seconds: float) -> None:
        pauses.append(seconds)
        requeued.slurm.unavailable = len(pauses) < 3

    exclude_bad_nodes(requeued.request, requeued.slurm, requeued.said.append, sleep=wait)
    assert len(pauses) == 3
    assert requeued.slurm.node_choice(requeued.job).excluded == ("n2",)
    assert [said.startswith("job 77: its next run will not get n2") for said in requeued.said] == [True]


def test_a_job_that_cannot_be_changed_yet_is_changed_later(requeued: Requeued) -> None:
    requeued.avoid("n2")
    requeued.slurm.refuse["exclude_nodes"] = "Job update not available right now, ... try again in a bit"
    exclude_bad_nodes(
        requeued.request, requeued.slurm, requeued.said.append, sleep=lambda _: requeued.slurm.refuse.clear()
    )
    assert requeued.slurm.node_choice(requeued.job).excluded == ("n2",)


def test_a_controller_that_never_answers_is_asked_until_slurm_has_ended_the_process(requeued: Requeued) -> None:
    """By default, Slurm kills the process that asks 30 s after it has accepted the requeue."""
    requeued.avoid("n2")
    requeued.slurm.unavailable = True
    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += 4.0 + seconds  # an attempt and its pause

    exclude_bad_nodes(requeued.request, requeued.slurm, requeued.said.append, clock=lambda: now[0], sleep=wait)
    assert 30 < now[0] < 60
    (said,) = requeued.said
    assert "its next run may get" in said
