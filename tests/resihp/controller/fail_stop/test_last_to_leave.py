"""The last process of a plain script: waited for while it works, ended when it does nothing."""

from __future__ import annotations

from typing import Any

import pytest

from resihp.controller import interface as api
from resihp.protocol import messages as m
from resihp.record.journal import FailureFound
from tests.resihp.controller.fail_stop.test_early_losses import gathered
from tests.resihp.controller.test_startup import Start


def left(*ended: int, met: bool = True, **settings: Any) -> Start:
    """A plain script of four ranks, of which these have ended well."""
    job = gathered(**{"slurm": False, "idle_limit_s": 600.0, "node_given_up_s": 1e9, **settings})
    job.spawn(0, 1, 2, 3)
    job.feed(api.AgentBeat(node="n1", beat=m.Beat(workers=(), met=met)))
    for rank in ended:
        job.feed(api.WorkerExited(rank=rank, status=0))
    return job


def passes(job: Start, seconds: float, idle: dict[int, bool], idle_before_s: float = 1e6) -> None:
    """Time passes; these ranks are there, and do nothing or work."""
    for i in range(round(seconds / 10)):
        job.now += 10.0
        for node, ranks in (("n1", (0, 1)), ("n2", (2, 3))):
            beats = tuple(
                m.WorkerBeat(
                    rank=rank, age_s=0.1, state="S", progress=None, idle_s=idle_before_s + 10 * i if idle[rank] else 0
                )
                for rank in ranks
                if rank in idle
            )
            job.feed(api.AgentBeat(node=node, beat=m.Beat(workers=beats, met=True)))
        job.feed(api.Tick())


def said(job: Start) -> list[str]:
    return [action.text for action in job.actions if isinstance(action, api.Say)]


@pytest.mark.parametrize("met", [True, False])
def test_a_rank_that_does_nothing_when_all_others_are_done_is_told_then_ended(met: bool) -> None:
    job = left(1, 2, 3, met=met)
    passes(job, 100, {0: True})
    (notice,) = [text for text in said(job) if "idle for" in text]
    assert notice.startswith(
        "rank 0 (n1 device 0): idle for 60 s; ranks 1-3 have already exited with status 0. If this stays so, the job "
    )
    assert "py-spy dump --pid 1000 on " in notice
    assert job.end is None
    passes(job, 550, {0: True})
    assert job.end is not None
    assert job.end[0] == 1
    assert job.end[1].startswith("rank 0 (n1 device 0): killed after being idle for 60")
    assert job.end[1].endswith("exited with status 0; raise [job] idle_limit (now 600 s) to wait longer")
    (failure,) = job.all(FailureFound)
    assert (failure.component, failure.node, failure.ranks) == ("process", None, (0,))
    assert failure.cause.startswith("rank 0 (n1 device 0) did not end: idle for 60")


def test_a_rank_that_does_nothing_is_waited_for_for_ever_where_the_limit_is_never() -> None:
    job = left(1, 2, 3, idle_limit_s=None)
    passes(job, 20_000, {0: True})
    (notice,) = [text for text in said(job) if "idle for" in text]
    assert 'The job waits, because [job] idle_limit is "never". To see where it is stuck: py-spy dump' in notice
    assert job.end is None
    job.feed(api.WorkerExited(rank=0, status=0))
    assert job.end == (0, "done")


def test_of_many_ranks_that_do_nothing_one_is_named() -> None:
    """Thousands may wait in a barrier for the one that has left."""
    job = left(1)
    passes(job, 100, {0: True, 2: True, 3: True})
    (notice,) = [text for text in said(job) if "idle for" in text]
    assert notice.startswith("rank 0 (n1 device 0) and 2 other ranks: idle for 60 s; rank 1 has already exited")
    passes(job, 550, {0: True, 2: True, 3: True})
    assert job.end is not None
    assert job.end[1].startswith("ranks 0, 2-3: killed after being idle")


def test_a_rank_that_works_is_waited_for_as_long_as_it_takes() -> None:
    job = left(1, 2, 3)
    passes(job, 4000, {0: False})
    assert job.end is None
    job.feed(api.WorkerExited(rank=0, status=0))
    assert job.end == (0, "done")


def test_one_that_works_now_and_then_is_waited_for() -> None:
    job = left(1, 2, 3)
    for _ in range(4):
        passes(job, 500, {0: True}, idle_before_s=0.0)
        passes(job, 20, {0: False})
    assert job.end is None


def test_time_counts_from_the_last_end_and_only_where_all_that_are_left_do_nothing() -> None:
    job = left(1)
    passes(job, 500, {0: True, 2: True, 3: True})
    job.feed(api.WorkerExited(rank=2, status=0))
    passes(job, 500, {0: True, 3: True})
    assert job.end is None
    passes(job, 1000, {0: True, 3: False})
    assert job.end is None
    passes(job, 700, {0: True, 3: True})
    assert job.end is not None
    assert job.all(FailureFound)[0].ranks == (0, 3)


def test_nobody_is_ended_while_none_has_ended_nor_where_agents_do_not_look() -> None:
    job = left()
    passes(job, 2000, {0: True, 1: True, 2: True, 3: True})
    assert job.end is None
    job = left(1, 2, 3)
    for _ in range(200):
        job.now += 10.0
        beat = m.WorkerBeat(rank=0, age_s=0.1, state="S", progress=None)
        job.feed(api.AgentBeat(node="n1", beat=m.Beat(workers=(beat,))))
        job.feed(api.AgentBeat(node="n2", beat=m.Beat(workers=())))
        job.feed(api.Tick())
    assert job.end is None
