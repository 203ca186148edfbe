"""What operators ask of the detector: how a rank stands, whom it does not see, how ranks have done over time.

Decides nothing about the job. That a rank has not been heard of for long, or that no rank is judged at all, is
journaled once, and once it is over: a blind watcher must not look healthy. Scores are telemetry: of all ranks now and
then, of the most suspicious ones more often. Called by `expectation` after each iteration, and by `controller` with
questions.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from resihp.controller import interface as api
from resihp.controller.state.job import Job
from resihp.record.describe import DETECTORS, rank_list
from resihp.record.journal import CoverageChanged

UNHEARD = 200
"""Iterations without a word after which a rank is not watched."""
LOOK_EVERY = 16
"""Iterations between looks at who is watched; what has changed at two of them in a row is told."""
SCORE_EVERY = 10
"""Iterations between scores."""
RANKS_AN_ITERATION = 8
"""All ranks are scored as often as comes to so many an iteration: 16,384 of them every 2050 iterations."""
WORST = 8
"""Ranks that are scored each time: those that are slow, and those with the most evidence against them."""


class RankAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`findings.RankStanding`, and what it has to be read with. Figures are None where nothing is known of the rank."""

    rank: int
    node: str
    device: int
    alive: bool
    working: bool
    """It has work under the present plan."""
    iteration: int
    """The last one that is committed."""
    detector: str
    """What it judges by: as in `journal.CoverageChanged`, or "off"."""
    unwatched: bool
    reported: int | None = None
    level: float | None = None
    noise: float | None = None
    evidence: float | None = None
    slow: bool = False
    pardon: float = 0.0
    pardoned_until: int | None = None
    peers: int | None = None


def asked(job: Job, event: api.StandingAsked) -> None:
    """Answer why a rank is, or is not, taken to be slow."""
    member = job.members.get(event.rank)
    if member is None:
        text = f"there is no rank {event.rank}; the job has ranks {min(job.members, default=0)} to "
        job.do(api.Reply(request=event.request, ok=False, text=text + str(max(job.members, default=0))))
        return
    answer = RankAnswer(
        rank=event.rank,
        node=member.node,
        device=member.device,
        alive=member.alive,
        working=event.rank in job.record.working,
        iteration=job.record.committed,
        detector=job.judged_by if job.settings.detect else "off",
        unwatched=event.rank in job.record.unwatched,
    )
    standing = job.monitor.standing(event.rank) if answer.working and job.settings.detect else None
    if standing is not None:
        figures = {name: getattr(standing, name) for name in standing.__struct_fields__ if name != "rank"}
        figures["level"] = standing.level if math.isfinite(standing.level) else None
        answer = msgspec.structs.replace(answer, **figures)
    job.do(api.Reply(request=event.request, ok=True, text=msgspec.json.encode(answer).decode()))


def note(job: Job, iteration: int, known: str) -> None:
    """After a committed iteration, which the detector judged by what it calls `known`."""
    if iteration % LOOK_EVERY == 0:
        by_ranks = known != "workload" or job.settings.detection.mode == "sequential"
        _look(job, iteration, known if by_ranks else "iterations")
    if iteration % SCORE_EVERY == 0:
        _score(job, iteration)


# --- who is watched -------------------------------------------------------------------------------------------------


def _look(job: Job, iteration: int, known: str) -> None:
    before = job.record
    twice = known == job.judged_by  # a new plan makes the detector warm up for an iteration or two
    job.judged_by = known
    detector = known if twice else before.detector
    unwatched = _unwatched(job, iteration)
    if (detector, unwatched) == (before.detector, before.unwatched):
        return
    silent = [rank for rank in unwatched if rank not in before.unwatched]
    heard = [rank for rank in before.unwatched if rank not in unwatched and rank in before.working]
    entry = CoverageChanged(iteration=iteration, detector=detector, unwatched=unwatched)  # type: ignore[arg-type]
    if silent:
        job.say("notice", f"{_named(job, silent)}: no report for {UNHEARD} iterations; not watched for being slow")
    if heard:
        job.say("notice", f"{_named(job, heard)}: reporting again, watched for being slow")
    if detector != before.detector and detector != "workload":
        job.say("notice", f"detector: {DETECTORS[detector]}")
    job.log(entry)


def _unwatched(job: Job, iteration: int) -> tuple[int, ...]:
    """Ranks with micro-batches that have been silent for long, under one plan after the other."""
    computing = set(job.record.computing)
    covered = {rank: last for rank, last in job.monitor.coverage().items() if rank in computing}
    if not covered:  # of a plan that has just begun nothing is known
        return tuple(rank for rank in job.record.unwatched if rank in job.record.working)
    silent = {rank for rank, last in covered.items() if iteration - last >= UNHEARD}
    for rank in covered.keys() & set(job.record.unwatched):
        standing = job.monitor.standing(rank)
        if standing is None or standing.reported is None:
            silent.add(rank)
    return tuple(sorted(silent))


def _named(job: Job, ranks: list[int]) -> str:
    return job.where(ranks[0]) if len(ranks) == 1 else rank_list(ranks)


# --- scores ---------------------------------------------------------------------------------------------------------


def _score(job: Job, iteration: int) -> None:
    found = job.monitor.scores()
    if found is None:
        return
    ranks, levels, evidence = found
    chosen = np.arange(ranks.size)
    if iteration % _between(ranks.size):
        suspicion = np.where(np.isin(ranks, list(job.monitor.speeds())), np.inf, evidence)
        chosen = np.argsort(-suspicion, kind="stable")[:WORST]
    job.do(
        api.TellScores(
            iteration=iteration,
            scores=tuple(
                (int(ranks[row]), float(levels[row]) if np.isfinite(levels[row]) else None, float(evidence[row]))
                for row in chosen
            ),
        )
    )


def _between(ranks: int) -> int:
    """Iterations between two scores of all of so many ranks."""
    return SCORE_EVERY * max(1, math.ceil(ranks / RANKS_AN_ITERATION / SCORE_EVERY))
