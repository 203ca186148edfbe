"""Suspicions of silence, as they stand in the journal: told whole, each with an outcome.

They are numbered together with those to be slow (`fail_slow.suspicions`). Of each rank and each node one is open at a
time; those of a supervisor that died stay open under the next. Decides nothing: `watchdog` says when to suspect and
whom, `incidents` and `failures` who is lost.
"""

from __future__ import annotations

import msgspec

from resihp.controller.fail_stop import liveness
from resihp.controller.state.job import Job
from resihp.controller.state.members import Member, Node
from resihp.record.journal import Component, Outcome, Suspected


def is_suspected(job: Job, who: int | str) -> bool:
    """Whether a suspicion of this rank, or of the node of this name, is open."""
    return who in job.record.suspects_silent


def of_node(job: Job, node: Node, limit_s: float) -> None:
    """A node's beats have not come for longer than `limit_s`."""
    if is_suspected(job, node.name):
        return
    silent_s = job.now - node.last_beat
    text = f"{job.settings.silent_beats} missed beats, last {silent_s:.1f} s ago"
    _opened(job, "node", "silent", "s without a beat", silent_s, limit_s, node=node.name, evidence=text)
    job.say("notice", f"node {node.name}: suspected, {text}")


def of_rank(job: Job, member: Member, idle_s: float, limit_s: float) -> None:
    """A rank keeps the others waiting: no progress for `idle_s`, of `limit_s` that there may be none."""
    if is_suspected(job, member.rank):
        return
    text = evidence(job, member)
    sign = _sign(job, member)
    _opened(
        job, "process", sign, "s without progress", idle_s, limit_s, rank=member.rank, node=member.node, evidence=text
    )
    job.say("notice", f"{job.where(member.rank)}: suspected, {text}")


def ended(job: Job, who: int | str, outcome: Outcome, why: str) -> None:
    """The open suspicion of a rank or node came to this; nothing where there is none."""
    known = job.record.suspects_silent.get(who)
    if known is not None:
        job.log(msgspec.structs.replace(known, evidence=why, cleared=True, outcome=outcome))
        if outcome != "lost":
            job.onsets.silent_since.pop(who, None)


def evidence(job: Job, member: Member) -> str:
    """What a rank that makes no progress shows of itself."""
    idle_s = job.now - member.progress_at
    match _sign(job, member):
        case "stopped":
            return f"process {member.pid} is stopped, no progress for {idle_s:.1f} s"
        case "mute":
            return f"its interpreter does not answer, no progress for {idle_s:.1f} s"
        case "unanswered":
            unanswered_s = liveness.device_unanswered_s(member)
            return f"its device has not answered for {unanswered_s:.1f} s, no progress for {idle_s:.1f} s"
        case _:
            return f"no progress for {idle_s:.1f} s while its peers wait for it"


def _sign(job: Job, member: Member) -> str:
    if liveness.is_stopped(member, job.now, job.settings):
        return "stopped"
    if liveness.is_mute(member, job.now, job.settings):
        return "mute"
    return "unanswered" if liveness.device_unanswered_s(member) > 0.0 else "stalled"


def _opened(
    job: Job,
    component: Component,
    sign: str,
    test: str,
    statistic: float,
    threshold: float,
    *,
    node: str,
    evidence: str,
    rank: int | None = None,
) -> None:
    due = job.record.committed + 1
    job.onsets.silent_since[node if rank is None else rank] = job.now - statistic
    job.log(
        Suspected(
            rank=rank,
            node=node,
            evidence=evidence,
            suspicion=job.record.suspicions + 1,
            component=component,
            ranks=() if rank is None else (rank,),
            iteration=due,
            detected=due,
            sign=sign,
            test=test,
            statistic=statistic,
            threshold=threshold,
        )
    )
