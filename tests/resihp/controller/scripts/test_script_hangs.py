"""A script that prints no iteration any more: whom it waits for, and for how long nobody is blamed."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from resihp.controller import interface as api
from resihp.protocol import messages as m
from resihp.record.journal import FailureFound, RestartDecided
from tests.resihp.controller.rounds.test_restarts import Script

SCRIPT = "/home/me/train.py"
COLLECTIVE = (
    ("/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 3252, "all_reduce"),
    (SCRIPT, 41, "step"),
)
LOADER = (
    ("/lib/python3.11/site-packages/torch/utils/data/dataloader.py", 1295, "_try_get_data"),
    (SCRIPT, 35, "batches"),
)
SAVES = ((SCRIPT, 52, "save"),)


class Printing(Script):
    """A script that prints an iteration each second, until it hangs. `stacks`: what its processes are at, by rank.
    `is_late`: ranks whose end is reported a moment after the kill."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(slurm=False, **settings)
        self.stacks: dict[int, tuple[tuple[str, int, str], ...]] = {}
        self.states: dict[int, str] = {}
        self.idle_s: dict[int, float] = {}
        self.iteration = 0
        self.is_late: set[int] = set()
        self.exits: list[api.WorkerExited] = []

    def prints(self, count: int, every_s: float = 1.0) -> None:
        for _ in range(count):
            self.iteration += 1
            self.passes(every_s)
            figures = m.PrintedFigures(iteration=self.iteration, seconds=every_s, loss=1.0)
            self.feed(api.WorkerPrinted(printed=m.Printed(rank=0, figures=(figures,))))

    def prints_at_once(self, count: int) -> None:
        """Iterations of one second."""
        self.passes(1.0)
        numbers = range(self.iteration + 1, self.iteration + count + 1)
        figures = tuple(m.PrintedFigures(iteration=number, seconds=1.0 / count, loss=1.0) for number in numbers)
        self.iteration += count
        self.feed(api.WorkerPrinted(printed=m.Printed(rank=0, figures=figures)))

    def passes(self, seconds: float) -> None:
        """Let time pass; agents answer inspections."""
        for _ in range(max(1, round(seconds))):
            exits, self.exits = self.exits, []
            for name, node in self.controller.job.nodes.items():
                if node.alive:
                    ranks = [
                        rank for rank in self.controller.job.live if self.controller.job.members[rank].node == name
                    ]
                    beats = tuple(
                        m.WorkerBeat(rank=rank, age_s=0.0, state="S", progress=None, idle_s=self.idle_s.get(rank, 0.0))
                        for rank in ranks
                    )
                    self.feed(api.AgentBeat(node=name, beat=m.Beat(workers=beats)), 0.0)
            self.feed(api.Tick(), min(1.0, seconds))
            for exited in exits:
                self.feed(exited)
            self.obey()

    def obey(self) -> None:
        while self.obeyed < len(self.actions):
            action = self.actions[self.obeyed]
            if isinstance(action, api.LookAtWorkers):
                self.obeyed += 1
                ranks = [
                    rank for rank in self.controller.job.live if self.controller.job.members[rank].node == action.node
                ]
                looks = tuple(
                    m.WorkerLook(rank=rank, state=self.states.get(rank, "S"), frames=self.stacks.get(rank, COLLECTIVE))
                    for rank in ranks
                )
                nccl = "Errors\n  INCOMPLETE" if action.asks_nccl else ""
                self.feed(api.WorkersSeen(node=action.node, looks=looks, nccl=nccl))
            elif isinstance(action, api.SignalWorker):
                self.obeyed += 1
                exited = api.WorkerExited(rank=action.rank, status=-action.signal)
                if action.rank in self.is_late:
                    self.exits.append(exited)
                else:
                    self.feed(exited)
            else:
                before = self.obeyed
                super().obey_one()
                assert self.obeyed > before

    @property
    def killed(self) -> list[int]:
        return [action.rank for action in self.actions if isinstance(action, api.SignalWorker)]


def printing(**settings: Any) -> Printing:
    job = Printing(**settings)
    job.begin()
    job.prints(20)
    return job


@pytest.mark.parametrize("how", ["loader", "stopped"])
def test_the_rank_that_the_others_wait_for_is_killed_and_the_script_starts_again(how: str) -> None:
    job = printing()
    if how == "loader":
        job.stacks[2], job.idle_s = LOADER, {2: 60.0}
    else:
        job.states[2] = "T"
    job.passes(170)
    assert job.killed == []
    assert any("no iteration for 91 s, usually 1.0 s: looking at the stacks of all ranks" in text for text in job.texts)
    job.passes(40)
    assert job.killed == [2]
    assert len(job.all(RestartDecided)) == 1
    (failure,) = job.all(FailureFound)
    assert failure.ranks == (2,)
    assert "hung: no iteration for 18" in failure.cause
    if how == "loader":
        assert "at /home/me/train.py:35 in batches" in failure.cause
        assert "rank 2:\n  /lib/python3.11/site-packages/torch/utils/data/dataloader.py:1295" in failure.evidence
    assert (
        "ranks 0, 1, 3:" in failure.evidence or "rank 0, 1, 3" in failure.evidence or "ranks 0-1, 3" in failure.evidence
    )


def test_the_evidence_has_what_nccl_says_of_the_job_once() -> None:
    job = printing()
    job.stacks[2], job.idle_s = LOADER, {2: 1000.0}
    job.passes(220)
    (failure,) = job.all(FailureFound)
    assert failure.evidence.count("NCCL's RAS service, which may report no problem during a hang:\nErrors") == 1
    asked = [action.node for action in job.actions if isinstance(action, api.LookAtWorkers) and action.asks_nccl]
    assert set(asked) == {"n1"}, "one node answers for all"


def test_a_rank_that_works_is_left_alone() -> None:
    """It writes a checkpoint, or evaluates."""
    job = printing()
    job.stacks[0], job.idle_s = SAVES, {0: 0.0, 1: 200.0, 2: 200.0, 3: 200.0}
    job.passes(1000)
    assert job.killed == []
    job.stacks, job.idle_s = {}, {}
    job.prints(5)
    assert job.all(RestartDecided) == []


def test_a_rank_that_moves_on_is_left_alone() -> None:
    job = printing()
    job.idle_s = {0: 200.0}
    for line in range(40):
        job.stacks[0] = ((SCRIPT, 60 + line, "download"),)
        job.passes(10)
    assert job.killed == []


def test_an_evaluation_of_an_hour_on_one_rank_is_left_alone() -> None:
    job = printing(idle_limit_s=600.0)
    job.idle_s = {0: 0.0, 1: 4000.0, 2: 4000.0, 3: 4000.0}
    for number in range(120):
        job.stacks[0] = (
            ("/lib/python3.11/site-packages/torch/nn/modules/linear.py", 134, f"layer_{number % 7}"),
            *SAVES,
        )
        job.passes(30)
    job.stacks, job.idle_s = {}, {}
    job.prints(5)
    assert job.killed == []
    assert job.all(RestartDecided) == []


def test_of_two_ranks_that_hang_both_are_named_though_one_is_known_to_be_idle_later() -> None:
    """Agents measure idleness every ten seconds, each process at a time of its own."""
    job = printing()
    job.stacks = {1: LOADER, 2: LOADER}
    job.passes(172)
    job.idle_s = {1: 12.0, 2: 0.0}
    job.passes(12)
    job.idle_s = {1: 24.0, 2: 12.0}
    job.passes(20)
    assert job.killed == [1, 2]
    assert sorted(failure.ranks for failure in job.all(FailureFound)) == [(1,), (2,)]


def test_of_two_ranks_that_hang_both_are_named_though_one_takes_longer_to_die() -> None:
    job = printing()
    job.states = {1: "T", 3: "T"}
    job.is_late = {3}
    job.passes(215)
    assert job.killed == [1, 3]
    assert len(job.all(RestartDecided)) == 1
    assert sorted(failure.ranks for failure in job.all(FailureFound)) == [(1,), (3,)]


def test_a_rank_that_waits_for_a_file_of_a_rank_at_work_is_left_alone() -> None:
    """Rank 0 prepares the data, rank 1 sleeps until they are there, the others wait in a collective for both."""
    job = printing()
    job.stacks[1] = ((SCRIPT, 30, "wait_for_file"),)
    job.idle_s = {0: 0.0, 1: 1000.0, 2: 1000.0, 3: 1000.0}
    for number in range(60):
        job.stacks[0] = ((SCRIPT, 80, f"prepare_{number}"), *SAVES)
        job.passes(10)
    assert job.killed == []
    job.stacks, job.idle_s = {}, {}
    job.prints(5)
    assert job.all(RestartDecided) == []


def test_a_rank_that_hangs_beside_one_that_waits_without_rest_is_killed_alone() -> None:
    job = printing()
    job.stacks = {0: ((SCRIPT, 90, "until_ready"),), 2: LOADER}
    job.idle_s = {0: 0.0, 1: 1000.0, 2: 1000.0, 3: 1000.0}
    job.passes(220)
    assert job.killed == [2]


def test_a_loop_that_waits_without_rest_ends_at_the_limit_for_idle_processes_and_is_named() -> None:
    job = printing(idle_limit_s=600.0)
    job.idle_s = {0: 4000.0, 1: 4000.0, 2: 0.0, 3: 4000.0}
    for number in range(60):
        job.stacks[2] = ((SCRIPT, 70 + number % 2, "until_ready"),)
        job.passes(10)
    assert job.all(RestartDecided) == []
    job.passes(20)
    assert job.killed == []
    assert len(job.all(RestartDecided)) == 1
    (failure,) = job.all(FailureFound)
    assert failure.node is None
    assert re.search(r"no iteration for \d+ s: rank 2 does not wait for other ranks, as they do", failure.cause)
    assert "train.py:7" in failure.cause
    assert "in until_ready" in failure.cause


def test_a_longer_gap_than_any_before_is_not_judged_if_gaps_vary() -> None:
    job = printing()
    job.stacks[0], job.idle_s = SAVES, {0: 500.0}
    job.passes(85)
    job.prints(1)
    job.passes(250)
    assert job.killed == [], "three times the longest gap have not passed"
    job.passes(60)
    assert job.killed == [0]


def test_ranks_that_all_wait_are_started_again_at_the_limit_for_idle_processes() -> None:
    job = printing(idle_limit_s=600.0)
    job.idle_s = dict.fromkeys(range(4), 300.0)
    job.passes(590)
    assert job.all(RestartDecided) == []
    job.passes(40)
    assert len(job.all(RestartDecided)) == 1
    (failure,) = job.all(FailureFound)
    assert failure.node is None
    assert "all ranks wait at the same place" in failure.cause


def test_before_the_first_iterations_nobody_is_blamed() -> None:
    job = Printing()
    job.begin()
    job.prints(3)
    job.stacks[1], job.idle_s = LOADER, {1: 1000.0}
    job.passes(1000)
    assert job.killed == []


def test_short_iterations_are_known_after_two_seconds() -> None:
    job = Printing()
    job.begin()
    job.prints_at_once(10)
    job.prints_at_once(10)
    job.stacks[1], job.idle_s = LOADER, {1: 1000.0}
    job.passes(220)
    assert job.killed == [1]
    assert any("usually 0.1 s: looking at the stacks" in text for text in job.texts)


def test_after_a_restart_the_first_iteration_has_the_start_budget() -> None:
    job = printing()
    job.kill(3)
    job.obey()
    job.stacks[1], job.idle_s = LOADER, {1: 1000.0}
    job.passes(590)
    assert job.killed == []
    job.passes(60)
    assert job.killed == [1]


def test_a_script_that_is_done_may_take_its_time() -> None:
    job = Printing()
    job.begin()
    figures = m.PrintedFigures(iteration=1, seconds=1.0, loss=1.0)
    job.feed(api.WorkerPrinted(printed=m.Printed(rank=0, figures=(figures,), goal=20)))
    job.iteration = 1
    job.prints(19)
    job.stacks[0], job.idle_s = SAVES, {0: 1000.0}
    job.passes(1000)
    assert job.killed == []


def test_never_means_never() -> None:
    job = printing(script_hang_s=None)
    job.stacks[2], job.idle_s = LOADER, {2: 1000.0}
    job.passes(1000)
    assert job.killed == []
    assert not any(isinstance(action, api.LookAtWorkers) for action in job.actions)


@pytest.mark.parametrize("seed", range(5))
def test_nobody_is_blamed_in_2000_iterations_with_pauses(seed: int) -> None:
    """Evaluations and slow checkpoints of one rank, and compilations of all."""
    draw = random.Random(seed)
    job = printing()
    for _ in range(100):
        job.prints(20)
        working = draw.choice([(draw.randrange(4),), tuple(range(4))])
        job.idle_s = {rank: 0.0 if rank in working else 5000.0 for rank in range(4)}
        for number in range(draw.choice([0, 0, 1, 6, 25])):
            functions = draw.choice([("save",), ("evaluate", "forward"), ("compile",)])
            stack = tuple((SCRIPT, 100 + number, f"{name}_{number % 5}") for name in functions)
            job.stacks = dict.fromkeys(working, stack)
            job.passes(10)
        job.stacks, job.idle_s = {}, {}
    assert job.killed == []
    assert job.all(FailureFound) == []
    assert job.all(RestartDecided) == []
