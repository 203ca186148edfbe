"""What is lost before the first plan: whose fault it is, and whether the job begins with the rest.

Decides when the start waits for nobody any more, and what it came to. What most ranks say of the script is the
script's; what one says is its device's, what all of a node say the node's. Failures are written just before the first
plan, when it is known who shares them, or when the job ends without one: until then the journal has what happened, so
that another supervisor comes to the same. Nothing is concluded of a program that never declares but that it needs all
its processes. Until the start budget is spent nobody can tell it from one that is slow to declare, which begins without
what it has lost: only what is known not to declare ends with its first loss. That is a command (`Settings.declares`),
and a script whose ranks have met by themselves (`have_met`). Of ranks that end one after the other the first one counts
whose end is not another's doing: a lost peer ends them all. `review` is called by the controller at the end of each
event, `judge` by the `watchdog`.
"""

from __future__ import annotations

import math
import signal as signals

from resihp.controller import interface as api
from resihp.controller import iterations, startup
from resihp.controller.fail_stop import failures, incidents, root_causes
from resihp.controller.state.job import Job
from resihp.controller.state.members import Member, natural
from resihp.protocol import client
from resihp.protocol import messages as m
from resihp.words import count_of

GRACE_S = 3.0
"""How long what a rank raised waits for the same of other ranks, and for the process to end."""
OWN_STATUSES = (m.ABORT_STATUS, client.AGENT_GONE_STATUS)
"""With which we end a worker, whatever its script does."""
FIRST_SIGNAL_STATUS = 129
"""A shell's status for a program that a signal ended; so from there on."""


def review(job: Job) -> None:
    """Nobody is waited for any more: begin, or end."""
    if job.stage != "gathering" or job.departure is not None or job.start.awaited or not job.record.placements:
        return
    if len(job.nodes) < job.settings.nodes:
        return
    if not any(member.ready for member in job.members.values()):
        _nobody_declared(job)
    elif not job.examinations:
        _begin(job)


def have_met(job: Job) -> None:
    """Ranks have found each other without us, and nobody says what they train: they stand or fall together."""
    if not job.start.met and not job.has_declared:
        job.start.met = True
        job.say(
            "notice",
            "its script makes process groups of its own: it is launched and watched, and ends with its first rank that "
            "fails",
        )


def judge(job: Job) -> None:
    """Time has passed. Where all that failed lost a peer, and somebody is silent, that one is heard of first."""
    if job.record.suspects_silent and (failed := _all_failed(job)) and failed == _followers(job):
        return
    if job.start.early_at is not None and job.now - job.start.early_at > GRACE_S:
        if _is_the_scripts(job) or _is_too_little(job):
            return
        _part_with(job)
    if job.needs_all:
        _needs_all(job)
    elif job.start.awaited and job.now - job.start.ordered_at > job.settings.start_budget_s:
        _budget_is_spent(job)


# --- the end of the wait --------------------------------------------------------------------------------------------


def _begin(job: Job) -> None:
    if _is_the_scripts(job):
        return
    _leave_useless(job)
    if job.stage == "gathering" and not _is_too_little(job):
        failures.explain_early(job)
        startup.propose(job)


def _nobody_declared(job: Job) -> None:
    """All have ended: a plain program that is done, or a start that failed everywhere."""
    if _is_the_scripts(job):
        return
    if not _ends_for_what_is_lost(job):
        iterations.end_when_gone(job)


def _needs_all(job: Job) -> None:
    """It ends with the first of its processes that fails, once others may have failed alike, and with a node that it
    lacks."""
    if _failed(job) and job.live and job.start.early_at is not None and job.now - job.start.early_at <= GRACE_S:
        return
    _ends_for_what_is_lost(job)


def _ends_for_what_is_lost(job: Job) -> bool:
    """End what cannot do without any process, if it lacks one: for a node rather than for what then lost its peers."""
    failed = _failed(job)
    if failed and not (_lacks_nodes(job) and set(failed) <= _followers(job)):
        _end_for(job, failed)
    elif _lacks_nodes(job):
        _too_few(job, "lost, and a program that does not say what it trains cannot do without them")
    else:
        return False
    return True


def _budget_is_spent(job: Job) -> None:
    """Whoever has neither declared nor ended by now never will. A plain program never declares: it has all the time
    there is, unless something is missing of it."""
    budget = f"{job.settings.start_budget_s:.0f} s"
    for rank in sorted(job.start.awaited & job.starting):
        startup.never_started(job, rank, f"nothing was heard of it within {budget}")
    if not job.ready:
        failed = _failed(job)
        if failed:
            _end_for(job, failed)
        elif _lacks_nodes(job):
            _too_few(job, f"lost, and no rank was ready to train within {budget}")
        return
    for rank in sorted(job.start.awaited):
        _fence(job, job.members[rank], f"not ready to train within {budget} of the start")


def _part_with(job: Job) -> None:
    """Processes that said that they cannot go on, and are still there; and those that do not even die."""
    assert job.start.early_at is not None
    for rank in sorted(job.start.awaited):
        member = job.members.get(rank)
        if member is None or not member.alive:
            continue
        if member.fenced is None and (member.raised is not None or member.unwilling):
            _fence(job, member, "did not end after its script had failed")
        elif member.fenced is not None and job.now - job.start.early_at > job.settings.hang_given_up_s:
            job.start.awaited.discard(rank)
            incidents.bury(job, member, -signals.SIGKILL)


def _fence(job: Job, member: Member, reason: str) -> None:
    if member.fenced is None:
        member.fenced, member.declared = reason, None
        job.start.early_at = job.now
        log = f"{member.node}.rank{member.rank}.log"
        job.say("warning", f"{job.where(member.rank)}: given up, {reason}; its log, {log}, tells more")
        job.do(api.SignalWorker(rank=member.rank, signal=int(signals.SIGKILL)))


# --- whose fault ----------------------------------------------------------------------------------------------------


def _is_the_scripts(job: Job) -> bool:
    """End the job for what at least half of its ranks say, on more than one of its nodes if there are several."""
    ranks = range(len(job.record.placements))
    nodes = {place.node for place in job.record.placements if job.nodes[place.node].alive}
    unable = [rank for rank in ranks if rank in job.record.refused and job.nodes[_node(job, rank)].alive]
    if unable and {_node(job, rank) for rank in unable} == nodes and not job.ready and not job.start.awaited:
        node = _node(job, unable[0])
        incidents.end(job, 2, f"node {node}: cannot start workers: {job.record.refused[unable[0]]}")
        return True
    unwilling = [rank for rank, member in sorted(job.members.items()) if member.unwilling]
    if _is_common(job, unwilling, nodes):
        incidents.end(job, 2, job.members[unwilling[0]].unwilling)
        return True
    by_error: dict[str, list[int]] = {}
    followers = _followers(job)
    for rank, member in sorted(job.members.items()):
        if member.raised is not None and rank not in followers:
            by_error.setdefault(failures.alike(member.raised.error), []).append(rank)
    worst = max(by_error.values(), key=len, default=[])
    if _is_common(job, worst, nodes) and not root_causes.lost_a_peer(job, worst[0]):
        if root_causes.may_pass(job, worst[0]):
            raised = job.members[min(worst)].raised
            assert raised is not None
            incidents.outside_is_broken(job, worst, f"raised the same: {raised.error}")
        else:
            incidents.program_is_broken(job, worst)
        return True
    return _ends_alike(job, nodes)


def _ends_alike(job: Job, nodes: set[str]) -> bool:
    """End the job whose script exits with the same status everywhere, soon after its start, and before it has said what
    it trains: who has come so far does not run a script that is broken for all."""
    if job.now - job.start.ordered_at > job.settings.start_budget_s:
        return False
    by_status: dict[int, list[int]] = {}
    for rank in sorted(job.record.unexplained.keys() - _followers(job)):
        member, status = job.members.get(rank), job.record.unexplained[rank] or 0
        if member is None or member.raised is not None or member.unwilling or member.fenced is not None:
            continue
        if member.declared is not None:
            continue
        if 0 < status < FIRST_SIGNAL_STATUS and status not in OWN_STATUSES:
            by_status.setdefault(status, []).append(rank)
    status, worst = max(by_status.items(), key=lambda item: len(item[1]), default=(0, []))
    if not _is_common(job, worst, nodes):
        return False
    if all(root_causes.may_pass(job, rank) for rank in worst):
        words = root_causes.own_words(job, job.members[worst[0]])
        incidents.outside_is_broken(job, worst, f"failed alike; {words}")
    else:
        incidents.program_ends(job, worst, status)
    return True


def _followers(job: Job) -> set[int]:
    """Ranks that failed for the end of another one, where there is one that did not, or may be. A connection that was
    refused may have been one to a rank that had failed by then."""
    failed = _all_failed(job)
    known = [job.members[rank] for rank in failed if rank in job.members]
    elsewhere = bool(job.record.suspects_silent) or _lacks_nodes(job)
    causes = [root_causes.may_follow_from(member) for member in known if member.follows in ("", "never")]
    since = -math.inf if elsewhere or len(known) < len(failed) else min(causes, default=math.inf)
    followers = {member.rank for member in known if member.follows == "surely"}
    for member in known:
        if member.follows == "perhaps" and member.failed_at is not None and member.failed_at >= since:
            followers.add(member.rank)
    return followers if followers < failed or elsewhere else set()


def _all_failed(job: Job) -> set[int]:
    """Those that have raised and not ended are among them."""
    return {*_failed(job), *(rank for rank, member in job.members.items() if member.raised is not None)}


def _is_common(job: Job, ranks: list[int], nodes: set[str]) -> bool:
    all_of_them = len(job.record.placements)
    several = len({_node(job, rank) for rank in ranks}) > 1 or len(nodes) <= 1
    return bool(ranks) and several and 2 * len(ranks) >= all_of_them and (len(ranks) > 1 or all_of_them == 1)


def _leave_useless(job: Job) -> None:
    """Nodes none of whose devices can be used, and where none is tried again, are lost like any other."""
    told: dict[str, dict[str, None]] = {}
    usable = {place.node for rank, place in enumerate(job.record.placements) if not _hopeless(job, rank)}
    for rank, place in enumerate(job.record.placements):
        if place.node not in usable and job.nodes[place.node].alive:
            told.setdefault(place.node, {})[_hopeless(job, rank)] = None
    for name, reasons in told.items():
        if job.stage == "gathering":
            first, *others = reasons
            more = f" and {len(others)} more" if others else ""
            failures.node_lost(job, name, f"none of its processes could begin: {first}{more}", "useless")


def _hopeless(job: Job, rank: int) -> str:
    """Why a lost rank's device is not tried again; empty where it is."""
    if rank in job.record.refused:
        return job.record.refused[rank]
    member = job.members.get(rank)
    if member is None or member.alive:
        return ""
    return member.raised.error if member.raised is not None else member.unwilling


def _node(job: Job, rank: int) -> str:
    return job.record.placements[rank].node


# --- whether it is enough -------------------------------------------------------------------------------------------


def _is_too_little(job: Job) -> bool:
    """End the job that has lost too much to begin; nodes alone are asked about when they are lost."""
    if startup.devices_left(job) >= job.settings.devices_least:
        return False
    failed = _failed(job)
    if failed:
        _end_for(job, failed)
    else:
        _too_few(job, "lost" if job.needs_all else "lost before training began")
    return True


def _lacks_nodes(job: Job) -> bool:
    """Whether nodes are missing that no spares stand in for, or that had processes."""
    placements = job.record.placements
    return len(placements) < job.settings.devices_asked or any(not job.nodes[p.node].alive for p in placements)


def _failed(job: Job) -> list[int]:
    """Ranks that were lost, not with their node, and not as a plain program ends."""
    ended, others_train = job.record.unexplained, bool(job.ready)
    return [
        rank
        for rank in sorted(ended)
        if job.nodes[_node(job, rank)].alive and (rank in job.record.refused or ended[rank] or others_train)
    ]


def _end_for(job: Job, failed: list[int]) -> None:
    """Whatever these ranks failed of is told by the first of all whose end is not another's doing."""
    followers = _followers(job)
    causes = _in_order(job, _all_failed(job) - followers)
    rank = causes[0] if causes else failed[0]
    place = job.record.placements[rank]
    where = f"rank {rank} ({place.node} device {place.device})"
    member = job.members.get(rank)
    same = _raised_the_same(job, rank, causes)
    if member is None:
        told = f"could not be started: {job.record.refused[rank]}"
    elif member.raised is not None:
        job.say("error", incidents.traceback_of(job, rank))
        others = (
            f"{count_of(len(same), 'other rank')} raised the same error" if same else "other ranks did not raise it"
        )
        told = f"{member.raised.error}{failures.early(job)}; {others}"
    elif member.unwilling:
        told = member.unwilling
    else:
        how = member.fenced or failures.ending(job.record.unexplained[rank] or 0)
        if member.follows in ("perhaps", "surely"):
            how = root_causes.own_words(job, member).removeprefix(f"rank {rank}").lstrip(": ")
        told = f"{how}{failures.early(job)}; its log, {place.node}.rank{rank}.log, tells more"
    if more := len(causes) - 1 - len(same):
        told += f"; {more} more failed"
    if followers:
        told += (
            f"; {len(followers)} others then lost their peer" if len(followers) > 1 else "; another then lost its peer"
        )
    plain = not job.has_declared
    failures.explain_early(job)
    if plain:
        job.say("notice", incidents.NOT_RESTARTED)
    incidents.end(job, 1, f"{where}: {told}")


def _raised_the_same(job: Job, rank: int, among: list[int]) -> list[int]:
    """The others of these ranks that raised what a rank did, whatever numbers it names."""
    texts = {
        other: failures.alike(member.raised.error)
        for other in {rank, *among}
        if (member := job.members.get(other)) is not None and member.raised is not None
    }
    return [other for other in texts if other != rank and texts[other] == texts.get(rank)]


def _in_order(job: Job, ranks: set[int]) -> list[int]:
    """As they failed, as far as that is known, then as they ended."""
    ended = {rank: at for at, rank in enumerate(job.record.unexplained)}

    def order(rank: int) -> tuple[float, int]:
        member = job.members.get(rank)
        at = member.failed_at if member is not None else None
        return -math.inf if at is None else at, ended.get(rank, len(ended))

    return sorted(ranks, key=order)


def _too_few(job: Job, what: str) -> None:
    lost = sorted((name for name, node in job.nodes.items() if not node.alive), key=natural) or ["processes were"]
    failures.explain_early(job)
    if job.needs_all and not incidents.runs_again(job):
        job.say("notice", incidents.NOT_RESTARTED)
    incidents.too_few(job, f"{', '.join(lost)} {what}")
