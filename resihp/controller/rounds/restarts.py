"""Start a script again inside the running job, after some of its processes have failed.

The decision is journaled; then each node ends its processes, and the processes that these have started. Once all nodes
have reported that, the next round begins: rank 0, 1, ... on the nodes that `next_round` chooses. No process of two
rounds ever runs at the same time, so a rank number names one process. A restart is refused when the limit of the user
is reached, when the last rounds have made no progress, or when too few nodes are left; the caller then ends the job.

Called by `early_losses` and `failures` (begin), by `controller` (reports of nodes), `watchdog` (timeouts) and
`takeover`.
"""

from __future__ import annotations

from resihp.controller import interface as api
from resihp.controller import startup
from resihp.controller.fail_stop import endings, incidents
from resihp.controller.nodes import replacements
from resihp.controller.rounds import next_round
from resihp.controller.rounds.reasons import is_same
from resihp.controller.scripts import script_checkpoints
from resihp.controller.state.beginnings import Beginning, Restarting
from resihp.controller.state.job import Job
from resihp.record.journal import RestartDecided, WorkersOrdered
from resihp.settings import SCRIPT_ALONE_S
from resihp.words import count_of, natural

FRUITFUL_S = 120.0
"""Seconds that a round has to last to count as progress, if nothing else is known of the script's progress."""
SURELY_FRUITFUL_S = 3600.0
"""Seconds after which a round counts as progress even if it ended as the round before it: in a long job, devices die of
the same cause again and again, and the script has surely saved checkpoints meanwhile."""
MAX_NAMED_NODES = 8
"""Largest number of nodes of a round that the message about its start names."""
MAX_FRUITLESS = 3
"""Number of rounds in a row without progress after which the script is not started again."""
END_TIMEOUT_S = 30.0
"""Seconds that a node has to end the processes of a round. Then the node is given up: a process that cannot be killed
holds its GPU."""
FENCED_S = SCRIPT_ALONE_S + 15.0
"""Seconds from the loss of a silent node until its agent has ended its processes, even those that a driver keeps for a
while."""


def begin(job: Job, reason: str, *, is_planned: bool = False, is_fruitless: bool = False) -> bool:
    """End all processes of the script and start them again; return whether this was decided. If not, the user is told
    the reason. The failure itself must have been journaled.

    `is_planned`: no failure is the reason. `is_fruitless`: the round has made no progress, whatever it has printed.
    """
    if not job.record.placements:
        return False
    if why_not := obstacle(job, reason):
        job.say("notice", f'not started again: {why_not}; see docs/interface.md, "Scripts that do not use resihp"')
        return False
    number = job.record.round + 1
    job.log(
        RestartDecided(
            round=number,
            reason=reason,
            progressed=not is_fruitless and has_progressed(job, reason),
            is_planned=is_planned,
        )
    )
    job.move("restarting")
    processes = "all processes" if is_planned else "the other processes"
    job.say("notice", f"restart {number}: {processes} are ended, then all are started again")
    resume(job)
    return True


def begin_or_end(job: Job, reason: str) -> None:
    """Start the script again after a failure of a process, or end the job. If a dead device leaves too few nodes, Slurm
    runs the job again, because another run may get another node."""
    if begin(job, reason):
        return
    if is_stuck(job, reason):
        endings.end(job, 93, reason)
    elif job.settings.max_restarts and lacks_nodes(job):
        endings.too_few(job, reason, 1)
    else:
        endings.end(job, 1, reason)


def obstacle(job: Job, reason: str) -> str:
    """Return why the script is not started again because of this loss; empty if it is."""
    settings, record = job.settings, job.record
    if job.stop_request is not None:
        return "the job is to stop"
    count = record.round - record.planned_rounds
    if count >= settings.max_restarts:
        times = f"it has been started again {count_of(count, 'time')}; " if count else ""
        return f"{times}[adapt] max_restarts is {settings.max_restarts}"
    if is_stuck(job, reason):
        return f"the last {count_of(MAX_FRUITLESS + 1, 'run')} of the script made no progress"
    return next_round.shortage(job) if lacks_nodes(job) else ""


def lacks_nodes(job: Job) -> bool:
    """Return whether too few nodes are left for another round, and no other node will come."""
    return not next_round.nodes_of(job) and not replacements.may_still_come(job)


def is_stuck(job: Job, reason: str) -> bool:
    """Return whether too many rounds in a row, including the present one, have made no progress."""
    return job.record.fruitless >= MAX_FRUITLESS and not has_progressed(job, reason)


def has_progressed(job: Job, reason: str) -> bool:
    """Return whether the round that ends for this reason counts as progress: it has printed or saved an iteration
    beyond those of the rounds before it, or it lasted for a while and did not end as the round before it, or it lasted
    for long."""
    checkpoints = job.record.checkpoints
    has_saved_more = checkpoints.furthest > checkpoints.furthest_before
    if job.record.committed > job.record.committed_before or has_saved_more:
        return True
    lasted_s = job.now - job.start.ordered_at
    if lasted_s > SURELY_FRUITFUL_S:
        return True
    return lasted_s > FRUITFUL_S and not is_same(reason, job.record.last_restart_reason)


def resume(job: Job) -> None:
    """Order all nodes of the round to end its processes; also after a take-over, because the order may be lost."""
    waiting: dict[str, list[int]] = {}
    for rank, place in enumerate(job.record.placements):
        if job.nodes[place.node].alive:
            waiting.setdefault(place.node, []).append(rank)
    job.start.ending = Restarting(waiting=waiting, since=job.now)
    for name in waiting:
        job.do(api.EndProcesses(node=name, round=job.record.round))
    proceed(job)


def processes_ended(job: Job, event: api.ProcessesEnded) -> None:
    """Handle the report of a node. A report of an earlier round is the answer to a repeated order."""
    if event.round == job.record.round:
        node_ended(job, event.node)


def node_ended(job: Job, name: str) -> None:
    """Note that no process of the round is left on a node, because it has reported so or is lost."""
    if job.stage == "restarting" and job.start.ending is not None:
        for rank in job.start.ending.waiting.pop(name, ()):
            if rank in job.members and job.members[rank].alive:  # a lost supervisor had the report of its end
                incidents.mark_dead(job, job.members[rank], None)
        proceed(job)


def overdue(job: Job) -> list[str]:
    """Return the nodes that have not ended their processes in time."""
    if job.start.ending is None or job.now - job.start.ending.since <= END_TIMEOUT_S:
        return []
    return sorted(job.start.ending.waiting, key=natural)


def proceed(job: Job) -> None:
    """Start the next round, once all nodes have ended the processes of the last one."""
    ending = job.start.ending
    if job.stage != "restarting" or ending is None or ending.waiting or job.stop_request is not None:
        return
    nodes, ending.ended_at = next_round.nodes_of(job), ending.ended_at or job.now
    if unfenced := _unfenced(job):
        if not ending.waits_for_fence:
            ending.waits_for_fence = True
            names = ", ".join(unfenced)
            job.say(
                "notice", f"node {names}: may still run its processes; the others start {FENCED_S:.0f} s after its loss"
            )
    elif nodes and script_checkpoints.is_ready(job, ending.ended_at):
        _start(job, nodes, ended_since=ending.since)
    elif nodes:
        pass  # the answer starts the round
    elif not replacements.may_still_come(job):
        endings.too_few(job, next_round.shortage(job))
    elif not ending.waits_for_nodes:
        ending.waits_for_nodes = True
        job.say("notice", f"{next_round.shortage(job)}; waits for another node")


def judge(job: Job) -> None:
    """Start the next round if nothing stands in its way any more; end the job if a node that it lacks has not come in
    time."""
    ending = job.start.ending
    if ending is None or job.stop_request is not None:
        return
    if ending.waits_for_nodes and job.now - ending.since > job.settings.start_budget_s:
        waited = f"no other node came within {job.settings.start_budget_s:.0f} s"
        endings.too_few(job, f"{next_round.shortage(job)}, {waited}")
    else:
        proceed(job)


def _unfenced(job: Job) -> list[str]:
    """Return the lost nodes of the round on which processes may still run: those that are only silent. Their agents end
    the processes, if they live, `SCRIPT_ALONE_S` seconds after the last message of this supervisor."""
    return [
        name
        for name in dict.fromkeys(place.node for place in job.record.placements)
        if name in job.record.lost
        and job.record.lost[name].how in ("silent", "useless")
        and not job.record.slurm_sees.get(name, ("", ""))[0].startswith("down")
        and job.now - job.maintenance.releases[name].lost_at < FENCED_S
    ]


def _start(job: Job, nodes: tuple[str, ...], ended_since: float) -> None:
    """Order the processes of the next round. `ended_since`: when those of the last round were ordered to end."""
    assert job.record.restart is not None
    number = job.record.restart.round
    reached = job.counter.iteration if job.counter.at >= job.start.ordered_at else 0
    checkpoint = script_checkpoints.choose(job, job.record.restart, reached)
    devices = [(name, device) for name in nodes for device in range(job.settings.gpus_per_node)]
    job.start = Beginning(
        met=True,
        hang=job.start.hang.of_next_round(),
        own_work=job.start.own_work.of_next_round(len(devices)),
        restarted=ended_since,
    )
    job.errors.clear()
    job.signalled.clear()
    job.starting.clear()
    job.log(
        WorkersOrdered(
            workers=tuple((rank, *place) for rank, place in enumerate(devices)),
            round=number,
            checkpoint="" if checkpoint is None else checkpoint.folder,
            reached=reached,
        )
    )
    job.move("gathering")
    job.progress_at = job.now
    where = count_of(len(nodes), "node") if len(nodes) > MAX_NAMED_NODES else ", ".join(nodes)
    resumes = "" if checkpoint is None else f", from {checkpoint.folder} (iteration {checkpoint.iteration})"
    job.say("notice", f"restart {number}: {count_of(len(devices), 'rank')} on {where}{resumes}")
    startup.start_workers(job)
