"""Journal suspicions of silence: their beginnings, and an outcome for each.

They are numbered together with suspicions of slowness (`fail_slow.suspicions`). Each rank and each node has at most one
open suspicion of silence. Suspicions that are open when a supervisor dies stay open under the next supervisor. Makes no
decision: `watchdog` decides when to suspect a rank or node, `incidents` and `failures` decide that one is lost.
"""

from __future__ import annotations

import msgspec

from resihp.controller.fail_stop import liveness
from resihp.controller.state.job import Job
from resihp.controller.state.members import Member, Node
from resihp.record.journal import Component, Outcome, Suspected


def is_suspected(job: Job, subject: int | str) -> bool:
    """Return whether a suspicion of silence is open for `subject`: a rank, or the name of a node."""
    return subject in job.record.suspects_silent


def of_node(job: Job, node: Node, limit_s: float) -> None:
    """Suspect a node that has sent no heartbeat for more than `limit_s` seconds."""
    if is_suspected(job, node.name):
        return
    silent_s = job.now - node.last_beat
    text = f"{job.settings.silent_beats} missed heartbeats, last {silent_s:.1f} s ago"
    _opened(job, "node", "silent", "s without a beat", silent_s, limit_s, node=node.name, evidence=text)
    job.say("notice", f"node {node.name}: suspected, {text}")


def of_rank(job: Job, member: Member, idle_s: float, limit_s: float) -> None:
    """Suspect a rank that keeps the others waiting: it has made no progress for `idle_s` seconds, more than
    `limit_s`."""
    if is_suspected(job, member.rank):
        return
    text = evidence(job, member)
    sign = _sign(job, member)
    _opened(
        job, "process", sign, "s without progress", idle_s, limit_s, rank=member.rank, node=member.node, evidence=text
    )
    job.say("notice", f"{job.where(member.rank)}: suspected, {text}")


def ended(job: Job, subject: int | str, outcome: Outcome, why: str) -> None:
    """Journal the outcome of the open suspicion of a rank or node, if there is one. `why`: the evidence for it."""
    suspicion = job.record.suspects_silent.get(subject)
    if suspicion is not None:
        job.log(msgspec.structs.replace(suspicion, evidence=why, cleared=True, outcome=outcome))
        if outcome != "lost":
            job.onsets.silent_since.pop(subject, None)


def evidence(job: Job, member: Member) -> str:
    """Describe the signs that a rank without progress shows."""
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
