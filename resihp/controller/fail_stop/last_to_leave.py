"""Decide how long the last processes of a script that does not train with resihp may be idle, once other processes have
exited successfully.

A process can hang as it exits, in a library's destructor or waiting for a peer that has ended, and would then occupy
its nodes for ever. A process that works is never ended: its agent reports for how long neither the process nor any of
its children used a processor, waited for a disk, or wrote (`WorkerBeat.idle_s`). Called by `watchdog` with each tick
before the first plan. For training that has declared itself, `watchdog.judge_leaving` decides.
"""

from __future__ import annotations

import math

from resihp.controller.fail_stop import endings
from resihp.controller.state.incidents import Incident
from resihp.controller.state.job import Job
from resihp.controller.state.members import Member
from resihp.record.describe import rank_list
from resihp.words import count_of

NOTICED_AFTER_S = 60.0
"""Seconds of idleness after which the user is told, with the time left until the job is ended."""
MAX_EVIDENCE = 8
"""Largest number of processes that the evidence describes."""


def judge(job: Job) -> None:
    """Tell the user that the last processes are idle, and end the job once they have been idle for
    `Settings.idle_limit_s`."""
    ended = job.record.unexplained
    live = [job.members[rank] for rank in job.live]
    ended_well = bool(ended) and all(status == 0 for status in ended.values())
    are_the_last = ended_well and bool(live) and not job.has_declared and not job.starting
    if not are_the_last:
        job.start.last_since = None
        return
    if job.start.last_since is None or job.start.last_since[0] != len(ended):
        job.start.last_since = len(ended), job.now
    since = job.start.last_since[1]
    idle_s = min(min(idle_for_s(member), job.now - since) for member in live)
    limit_s = math.inf if job.settings.idle_limit_s is None else job.settings.idle_limit_s
    if idle_s < min(NOTICED_AFTER_S, limit_s):
        job.start.idle_noticed = False
        return
    others = f"{rank_list(ended)} {'has' if len(ended) == 1 else 'have'} already exited with status 0"
    if not job.start.idle_noticed and idle_s < limit_s:
        job.start.idle_noticed = True
        first = job.where(live[0].rank)
        more = f" and {count_of(len(live) - 1, 'other rank')}" if len(live) > 1 else ""
        next_step = (
            'The job waits, because [job] idle_limit is "never"'
            if math.isinf(limit_s)
            else f"If this stays so, the job is ended in {limit_s - idle_s:.0f} s ([job] idle_limit)"
        )
        job.say(
            "warning",
            f"{first}{more}: idle for {idle_s:.0f} s; {others}. {next_step}. To see where it is stuck: "
            f"{_stack_command(job, live[0])}",
        )
    if idle_s < limit_s:
        return
    _end(job, live, f"idle for {idle_s:.0f} s; {others}", limit_s)


def _end(job: Job, idle: list[Member], how: str, limit_s: float) -> None:
    """End the job because its remaining processes are idle. It is not known whether their work was done, so the job has
    failed."""
    ranks = [member.rank for member in idle]
    job.incidents.append(
        Incident(
            kind="fail-stop",
            component="process",
            cause=f"{rank_list(ranks)} did not end: {how}",
            evidence="\n".join(
                f"pid {member.pid} on node {member.node}: {_state(member)}" for member in idle[:MAX_EVIDENCE]
            ),
            found_at=job.now,
            iteration=job.record.committed + 1,
            epoch=job.epoch,
            ranks=set(ranks),
        )
    )
    where = job.where(ranks[0]) if len(ranks) == 1 else rank_list(ranks)
    limit = f"raise [job] idle_limit (now {limit_s:.0f} s) to wait longer"
    endings.end(job, 1, f"{where}: killed after being {how}; {limit}")


def _state(member: Member) -> str:
    """Return the kernel's state of a process."""
    return f"state {member.beat.state}" if member.beat is not None else "no heartbeat yet"


def idle_for_s(member: Member) -> float:
    """Return the seconds for which a process has been idle, by its agent's last heartbeat; 0 if not known."""
    if member.beat is None or member.beat.idle_s is None:
        return 0.0
    return member.beat.idle_s


def _stack_command(job: Job, member: Member) -> str:
    """Return the command that shows the stack of a process."""
    host = job.nodes[member.node].host
    return f"py-spy dump --pid {member.pid} on {host or member.node}"
