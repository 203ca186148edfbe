"""What operators ask of the detector: who is watched, how ranks stand, scores over time."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from resihp.controller import interface as api
from resihp.controller.fail_slow.standings import COVERAGE_CHECK_ITERATIONS, UNWATCHED_AFTER_ITERATIONS, RankAnswer
from resihp.detector.findings import Assessment, RankStanding
from resihp.detector.observation import Observation
from resihp.record.fold import fold
from resihp.record.journal import CoverageChanged
from resihp.settings import Detection
from tests.resihp.controller.fail_slow.test_slowness import Job, Scripted


class Known(Scripted):
    """A detector that heard of ranks last in these iterations, or in the last one, and judges by this."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks, self.last = 6, 0
        self.silent: dict[int, int | None] = {}
        """None: never under the present plan."""
        self.known: Any = "workload"
        self.evidence = np.linspace(0.0, 0.5, self.ranks)

    def observe(self, observation: Observation) -> Assessment:
        self.last = observation.iteration
        return msgspec.structs.replace(super().observe(observation), known=self.known)

    def coverage(self) -> dict[int, int]:
        last = {rank: self.silent.get(rank, self.last) for rank in range(self.ranks)}
        return {rank: 0 if then is None else then for rank, then in last.items()}

    def standing(self, rank: int) -> RankStanding | None:
        return RankStanding(
            rank=rank,
            reported=self.silent.get(rank, self.last),
            level=1.031 if rank else float("nan"),
            noise=0.01,
            evidence=0.41,
            slow=False,
            pardon=0.02,
            pardoned_until=812,
            peers=2,
        )

    def scores(self) -> Any:
        return np.arange(self.ranks), np.where(np.arange(self.ranks) == 0, np.nan, 1.01), self.evidence


class Watched(Job):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.known = Known()
        self.job.monitor = self.known  # type: ignore[assignment]
        self.run()

    def to(self, iteration: int) -> Watched:
        while self.job.record.committed < iteration:
            self.step(self.job.record.committed + 1)
        return self

    def told(self) -> list[str]:
        return [action.text for action in self.actions if isinstance(action, api.Say)]


def test_a_rank_that_is_silent_for_long_is_told_once_and_once_it_is_back() -> None:
    job = Watched()
    job.known.silent = {5: 10}
    job.to(UNWATCHED_AFTER_ITERATIONS + 6 * COVERAGE_CHECK_ITERATIONS)
    told = [text for text in job.told() if "report" in text]
    assert told == ["rank 5 (n3 device 1): no report for 200 iterations; not watched for being slow"]
    assert [entry.unwatched for entry in job.all(CoverageChanged)] == [(), (5,)]
    job.known.silent = {}
    job.to(UNWATCHED_AFTER_ITERATIONS + 7 * COVERAGE_CHECK_ITERATIONS)
    assert job.told()[-1] == "rank 5 (n3 device 1): reporting again, watched for being slow"
    assert fold(job.all(CoverageChanged)).unwatched == ()


def test_another_plan_does_not_make_a_silent_rank_look_watched() -> None:
    job = Watched()
    job.known.silent = {5: 1}
    job.to(UNWATCHED_AFTER_ITERATIONS + 2 * COVERAGE_CHECK_ITERATIONS)
    job.known.silent = {5: None}
    coverage = job.known.coverage
    job.known.coverage = lambda: {**coverage(), 5: job.known.last - 1}  # type: ignore[method-assign]
    job.to(UNWATCHED_AFTER_ITERATIONS + 4 * COVERAGE_CHECK_ITERATIONS)
    assert job.job.record.unwatched == (5,)
    job.known.coverage = dict  # type: ignore[assignment, method-assign]
    job.to(UNWATCHED_AFTER_ITERATIONS + 6 * COVERAGE_CHECK_ITERATIONS)
    assert job.job.record.unwatched == (5,)


def test_what_it_judges_by_is_journaled_once_it_lasts() -> None:
    job = Watched().to(3 * COVERAGE_CHECK_ITERATIONS - 1)
    assert [entry.detector for entry in job.all(CoverageChanged)] == ["workload"]
    job.known.known = "warming up"
    job.to(3 * COVERAGE_CHECK_ITERATIONS)
    job.known.known = "workload"
    job.to(5 * COVERAGE_CHECK_ITERATIONS)
    assert len(job.all(CoverageChanged)) == 1
    job.known.known = "plain times"
    job.to(7 * COVERAGE_CHECK_ITERATIONS)
    assert job.job.record.detector == "plain times"
    assert job.told()[-1] == "detector: judges plain iteration times, no rank reports its chunks"


def test_a_mode_that_judges_no_rank_does_not_look_as_if_it_did() -> None:
    job = Watched(detection=Detection(mode="paper")).to(2 * COVERAGE_CHECK_ITERATIONS)
    assert job.job.record.detector == "iterations"
    assert job.told()[-1] == "detector: judges whole iterations, no rank by itself"


def ask(job: Job, rank: int) -> api.Reply:
    answer = job.feed(api.StandingAsked(request=7, rank=rank))
    return next(action for action in answer if isinstance(action, api.Reply))


def test_a_rank_s_standing_is_answered_in_json() -> None:
    job = Watched().to(40)
    reply = ask(job, 5)
    assert reply.ok
    answer = msgspec.json.decode(reply.text, type=RankAnswer)
    assert (answer.rank, answer.node, answer.device, answer.working, answer.iteration) == (5, "n3", 1, True, 40)
    assert (answer.level, answer.evidence, answer.peers, answer.detector) == (1.031, 0.41, 2, "workload")
    assert (answer.pardon, answer.pardoned_until) == (0.02, 812)
    assert msgspec.json.decode(ask(job, 0).text, type=RankAnswer).level is None
    assert ask(job, 99) == api.Reply(request=7, ok=False, text="there is no rank 99; the job has ranks 0 to 5")


def test_without_a_detector_that_is_said() -> None:
    answer = msgspec.json.decode(ask(Watched(detect=False).to(20), 3).text, type=RankAnswer)
    assert (answer.detector, answer.level, answer.working) == ("off", None, True)


@pytest.mark.parametrize(("ranks", "between"), [(6, 10), (1024, 130), (16_384, 2050)])
def test_all_ranks_are_scored_now_and_then_and_the_most_suspicious_more_often(ranks: int, between: int) -> None:
    """So that three months of 16,384 ranks, at ten seconds an iteration, are about eight million rows."""
    job = Watched()
    job.known.ranks, job.known.evidence = ranks, np.linspace(0.0, 0.5, ranks)
    job.known.coverage = dict  # type: ignore[assignment, method-assign]
    job.known.estimates = {3: 0.8}
    job.to(2 * between)
    scores = {action.iteration: action.scores for action in job.actions if isinstance(action, api.TellScores)}
    assert list(scores) == list(range(10, 2 * between + 1, 10))
    assert [at for at in scores if len(scores[at]) == ranks] == [between, 2 * between]
    assert scores[between][0] == (0, None, 0.0)
    if ranks > 6:
        assert [rank for rank, _, _ in scores[10]] == [3, *range(ranks - 1, ranks - 8, -1)]
        assert sum(map(len, scores.values())) / (2 * between) < 9
