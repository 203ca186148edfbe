"""Find the ranks that hold up a script which has stopped printing iterations, and end them.

Nothing is known of a script but its iterations and its processes, so time alone condemns nothing. When no iteration has
been printed for much longer than usual, every process is inspected, again and again: its state and the stack of its
main thread. A rank is hung if the others wait for it (`resihp.detector.hangs`) while it is stopped, or does nothing at
the same place: no processor time, no output, no disk. It is killed with its stack as evidence, and the script is
started again. A rank that works, in an evaluation or a checkpoint, is left alone. If it stays in the same functions, as
a loop does that waits without rest, or if all ranks wait at the same place, the script is started again after the limit
for idle processes. Before the first iterations nothing is judged.

`judge` is called by `watchdog` with each tick, `inspected` with each answer of a node.
"""

from __future__ import annotations

import math
import signal as signals
import statistics
from collections.abc import Iterable

from resihp.controller import interface as api
from resihp.controller.fail_stop import failures, incidents, last_to_leave
from resihp.controller.rounds import restarts
from resihp.controller.state.incidents import Incident
from resihp.controller.state.iterations import HangWatch
from resihp.controller.state.job import Job
from resihp.detector.hangs.culprits import STOPPED_STATES, HangVerdict, Look
from resihp.detector.hangs.culprits import judge as judge_looks
from resihp.detector.hangs.stacks import StackFrame, place_in_script
from resihp.record.describe import rank_list
from resihp.words import count_of

MIN_GAPS = 5
"""Number of gaps between printed iterations that must be known before a gap is judged."""
USUAL_FACTOR, LONGEST_FACTOR = 10.0, 3.0
"""How many usual gaps, and how many times the longest gap so far, must pass without an iteration."""
LOOK_EVERY_S = 10.0
"""Seconds between two inspections."""
ANSWER_S = 5.0
"""Seconds that nodes have to answer an inspection."""
MAX_GROUPS = 8
"""Number of groups of ranks with the same stack that the evidence describes."""
MAX_CALLS = 6
"""Number of innermost calls of a stack that the evidence shows."""


def judge(job: Job) -> None:
    """Inspect a script without new iterations, and end the ranks that hold it up."""
    watch, goal = job.start.hang, job.record.goal
    if job.settings.script_hang_s is None or len(watch.gaps_s) < MIN_GAPS or not job.live:
        return
    silent_s = job.now - max(job.counter.at, job.start.ordered_at)
    is_done = bool(goal) and job.counter.iteration >= goal
    if silent_s <= patience_s(job, watch) or is_done or job.start.early_at is not None:
        watch.forget_looks()
        return
    if watch.asked_at is None or (job.now - watch.asked_at >= LOOK_EVERY_S and _is_answered(job, watch)):
        _look(job, watch, silent_s)
    elif _is_answered(job, watch) and not watch.is_judged:
        watch.is_judged = True
        _decide(job, watch, silent_s)


def patience_s(job: Job, watch: HangWatch) -> float:
    """Return the seconds without an iteration after which a script is inspected; before the first iteration of a
    round, at least the start budget."""
    usual_s = statistics.median(watch.gaps_s)
    least_s = _seconds(job.settings.script_hang_s) / 2 if watch.is_begun else job.settings.start_budget_s
    return max(least_s, USUAL_FACTOR * usual_s, LONGEST_FACTOR * watch.longest_s)


def inspected(job: Job, event: api.WorkersSeen) -> None:
    """Note the state and stack of each worker of a node, and what NCCL's service has answered."""
    job.start.hang.nccl = event.nccl or job.start.hang.nccl
    for look in event.looks:
        if look.rank in job.members and job.members[look.rank].node == event.node:
            frames = tuple(StackFrame(*frame) for frame in look.frames)
            job.start.hang.looks[look.rank] = Look(rank=look.rank, state=look.state, frames=frames, source=look.source)


def _is_answered(job: Job, watch: HangWatch) -> bool:
    assert watch.asked_at is not None
    return job.now - watch.asked_at > ANSWER_S or all(rank in watch.looks for rank in job.live)


def _look(job: Job, watch: HangWatch, silent_s: float) -> None:
    """Inspect all processes once more."""
    if watch.asked_at is None:
        usual = f"usually {statistics.median(watch.gaps_s):.1f} s"
        job.say("notice", f"no iteration for {silent_s:.0f} s, {usual}: looking at the stacks of all ranks")
    watch.before, watch.looks = watch.looks, {}
    watch.asked_at, watch.is_judged = job.now, False
    first = job.members[min(job.live)].node
    for name in dict.fromkeys(job.members[rank].node for rank in job.live):
        job.do(api.LookAtWorkers(node=name, asks_nccl=name == first))


def _decide(job: Job, watch: HangWatch, silent_s: float) -> None:
    """End the ranks that hold up the script, if this inspection and the one before agree on them."""
    verdict, verdict_before = judge_looks(watch.looks), judge_looks(watch.before)
    unmoved = [rank for rank in verdict.ranks if _is_unmoved(job, watch, rank)]
    unmoved_before, watch.unmoved = watch.unmoved, unmoved
    if any(_has_moved_on(watch, rank) for rank in verdict.ranks):
        watch.moved_at = job.now  # it is at work, and others of these ranks may wait for its result
    is_settled = unmoved in (list(verdict.ranks), unmoved_before) and watch.moved_at < job.now
    is_confirmed = (
        is_settled and verdict.ranks == verdict_before.ranks and silent_s > _seconds(job.settings.script_hang_s)
    )
    unchanged_s = min(silent_s, job.now - watch.moved_at)
    is_hopeless = bool(watch.before) and unchanged_s > _seconds(job.settings.idle_limit_s)
    if unmoved and (is_confirmed or is_hopeless):
        _end_ranks(job, watch, unmoved, verdict, silent_s)
    elif is_hopeless:
        _end_all(job, watch, verdict, silent_s)


def _seconds(limit_s: float | None) -> float:
    """Return a limit; infinite if there is none."""
    return math.inf if limit_s is None else limit_s


def _is_unmoved(job: Job, watch: HangWatch, rank: int) -> bool:
    """Return whether a process is stopped, or has done nothing at the same place since the last inspection."""
    look, look_before = watch.looks[rank], watch.before.get(rank)
    if look.state in STOPPED_STATES:
        return True
    is_idle = last_to_leave.idle_for_s(job.members[rank]) >= LOOK_EVERY_S
    return look_before is not None and look.frames == look_before.frames and is_idle


def _has_moved_on(watch: HangWatch, rank: int) -> bool:
    """Return whether a process is in other functions than at the last inspection. A loop that waits for something
    stays in its own."""
    look, look_before = watch.looks[rank], watch.before.get(rank)
    return look_before is not None and _functions(look) != _functions(look_before)


def _functions(look: Look) -> list[tuple[str, str]]:
    return [(frame.file, frame.name) for frame in look.frames]


def _end_ranks(job: Job, watch: HangWatch, ranks: list[int], verdict: HangVerdict, silent_s: float) -> None:
    """Kill hung ranks. Their exits start the restart."""
    if any(job.members[rank].fenced for rank in ranks):  # killed before, in vain
        _end_all(job, watch, verdict, silent_s)
        return
    for rank in ranks:
        member = job.members[rank]
        place = _place(watch.looks[rank].frames)
        member.fenced = f"hung: no iteration for {silent_s:.0f} s, {verdict.reason}{place}"
        member.hang_evidence = evidence(watch)
        job.say("warning", f"{job.where(rank)}: given up, {member.fenced}")
        job.do(api.SignalWorker(rank=rank, signal=int(signals.SIGKILL)))
    watch.forget_looks()


def _end_all(job: Job, watch: HangWatch, verdict: HangVerdict, silent_s: float) -> None:
    """Start the script again without a sure cause of its hang: no rank is blamed, even if one stands out."""
    reason = f"no iteration for {silent_s:.0f} s, {verdict.reason}"
    if verdict.ranks:
        place = _place(watch.looks[verdict.ranks[0]].frames)
        reason = f"no iteration for {silent_s:.0f} s: {rank_list(verdict.ranks)} {verdict.reason}{place}"
    job.incidents.append(
        Incident(
            kind="communication",
            component="link",
            cause=reason,
            evidence=evidence(watch),
            found_at=job.now,
            iteration=failures.under_way(job, set()),
            epoch=job.epoch,
        )
    )
    incidents.log_incidents(job)
    watch.forget_looks()
    restarts.begin_or_end(job, reason)


def _place(frames: tuple[StackFrame, ...]) -> str:
    frame = place_in_script(frames) or (frames[0] if frames else None)
    return "" if frame is None else f", at {frame}"


def evidence(watch: HangWatch) -> str:
    """Return one paragraph for each group of ranks with the same stack, the smallest group first; then the answer of
    NCCL's service."""
    groups: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for rank, look in sorted(watch.looks.items()):
        groups.setdefault((look.state if look.state in STOPPED_STATES else "", _calls(look)), []).append(rank)
    ordered = sorted(groups.items(), key=lambda group: (len(group[1]), group[1]))
    paragraphs = [_paragraph(ranks, state, calls) for (state, calls), ranks in ordered[:MAX_GROUPS]]
    if rest := [rank for _, ranks in ordered[MAX_GROUPS:] for rank in ranks]:
        paragraphs.append(f"{count_of(len(rest), 'other rank')} with other stacks")
    if watch.nccl:
        paragraphs.append(f"NCCL's RAS service, which may report no problem during a hang:\n{watch.nccl}")
    return "\n".join(paragraphs)


def _calls(look: Look) -> tuple[str, ...]:
    """Return the innermost calls of a stack, with the text of the first one's line, and the one of the script."""
    if not look.frames:
        return ("stack not known",)
    first, *others = look.frames[:MAX_CALLS]
    place = place_in_script(look.frames)
    if place is not None and place not in look.frames[:MAX_CALLS]:
        others.append(place)
    return (f"{first}: {look.source}" if look.source else str(first), *map(str, others))


def _paragraph(ranks: Iterable[int], state: str, calls: tuple[str, ...]) -> str:
    stopped = " (stopped)" if state else ""
    return "\n".join((f"{rank_list(tuple(ranks))}{stopped}:", *(f"  {call}" for call in calls)))


def note_iteration(job: Job, before_at: float, before: int) -> None:
    """Note that iterations were printed. `before_at`, `before`: time and number of the last one before them. Those of
    one second arrive together."""
    watch = job.start.hang
    if watch.is_begun:
        gap_s, count = job.now - before_at, max(1, job.counter.iteration - before)
        watch.gaps_s.extend([gap_s / count] * min(count, MIN_GAPS))
        watch.longest_s = max(watch.longest_s, gap_s)
    watch.is_begun = True
