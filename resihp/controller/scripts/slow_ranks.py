"""Find the slow ranks of a script that measures its own work (`resihp.section`), and journal the verdicts.

Heartbeats carry each process's totals. Once enough time and enough iterations have passed, the differences of the
totals form a window, which `resihp.detector.own_seconds` judges. A verdict is a report: training is not interrupted.
When the script is started again for another reason, `rounds.next_round` prefers other nodes. The verdict ends once the
rank needs no more than before. `judge` is called by `watchdog` with each tick.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import numpy as np

from resihp.controller.state.job import Job
from resihp.detector.own_seconds import SlowRank, WorkWindow
from resihp.protocol.messages import ScriptTotals
from resihp.record.journal import FailureEnded, FailureFound

MIN_WINDOW_S = 10.0
MIN_WINDOW_ITERATIONS = 20
"""A window has at least so many seconds and so many iterations."""


def judge(job: Job) -> None:
    """Close a window if it is long enough, and act on what it shows."""
    watch = job.start.own_work
    if not job.settings.detect or job.now - watch.began_at < MIN_WINDOW_S:
        return
    totals = {rank: job.members[rank].totals for rank in job.live}
    reported = {rank: own for rank, own in totals.items() if own is not None}
    counted = [own.iterations - watch.before[rank].iterations for rank, own in reported.items() if rank in watch.before]
    if len(counted) < 2 or statistics.median_low(counted) < MIN_WINDOW_ITERATIONS:
        if len(counted) < 2:
            watch.before, watch.began_at = reported, job.now
        return
    window = _window(watch.before, reported, watch.began_at, len(job.record.placements))
    watch.before, watch.began_at = reported, job.now
    if not np.isfinite(window.own).any():
        return  # it calls `resihp.iteration` without sections
    judgement = watch.seconds.add(window, _known_slow(job))
    for recovered in judgement.recovered:
        _end(job, recovered)
    for slow in judgement.slow:
        _declare(job, slow)


def _window(
    before: Mapping[int, ScriptTotals], now: Mapping[int, ScriptTotals], began_at: float, ranks: int
) -> WorkWindow:
    """Return the own seconds per iteration of each rank between two reports."""
    own = np.full(ranks, np.nan)
    sections: dict[str, np.ndarray] = {}
    for rank in before.keys() & now.keys():
        first, last = before[rank], now[rank]
        count = last.iterations - first.iterations
        if count < MIN_WINDOW_ITERATIONS // 2 or last.own_s <= first.own_s:
            continue
        own[rank] = (last.own_s - first.own_s) / count
        earlier = {name: seconds for name, seconds, _ in first.sections}
        for name, seconds, _ in last.sections:
            column = sections.setdefault(name, np.full(ranks, np.nan))
            column[rank] = (seconds - earlier.get(name, 0.0)) / count
    iteration = min(totals.iteration for rank, totals in before.items() if rank in now) + 1
    return WorkWindow(iteration=iteration, began_at=began_at, own=own, sections=sections)


def _known_slow(job: Job) -> dict[int, float]:
    """Return the speed of each rank on a device with a verdict."""
    slow = job.record.slow
    return {rank: slow[device].speed for rank in job.live if (device := job.device_of(rank)) in slow} if slow else {}


def _declare(job: Job, slow: SlowRank) -> None:
    member = job.members[slow.rank]
    place = f", most of it in section {slow.section}" if slow.section else ""
    cause = f"rank {slow.rank} takes {slow.factor:.2f} times as long for its own work{place}"
    job.log(
        FailureFound(
            failure=job.record.failures + 1,
            kind="fail-slow",
            component="device",
            cause=cause,
            ranks=(slow.rank,),
            node=member.node,
            device=member.device,
            iteration=slow.iteration,
            epoch=job.epoch,
            evidence=(
                f"compared with the other ranks and with its own past, since iteration {slow.iteration}; its times "
                f"vary by {slow.spread:.1%}"
            ),
            detect_s=None,
            noticed_s=0.0,
            failed_s=job.now - slow.began_at,
            speed=min(1.0 / slow.factor, 1.0),
        )
    )
    job.say(
        "warning",
        f"{job.where(slow.rank)}: slow since iteration {slow.iteration}, its own work takes {slow.factor:.2f} times "
        f"as long as before{place}; training goes on, resihp why-not {slow.rank} has the evidence",
    )


def _end(job: Job, recovered: SlowRank) -> None:
    node, index = device = job.device_of(recovered.rank)
    entry = FailureEnded(
        failure=job.record.slow[device].failure,
        node=node,
        device=index,
        iteration=max(recovered.iteration, job.record.slow[device].since),
        evidence=f"its own work takes {recovered.factor:.2f} times as long as before it was slow",
    )
    job.log(entry)
    job.say("notice", f"node {node} device {index}: as fast as before, since iteration {entry.iteration}")
