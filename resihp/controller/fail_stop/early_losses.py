"""Decide about losses before the first plan: their causes, and whether the job starts with the remaining ranks.

Decides when the start no longer waits for any rank, and whether training begins. An error of most ranks is attributed
to the script, an error of one rank to its device, an error of all ranks of one node to the node.

Failures are journaled just before the first plan, once it is known which ranks share them, or when the job ends without
a plan. Until then the journal holds only the events, so that another supervisor reaches the same conclusion.

A program that never declares a model needs all its processes: after a loss it is started again (`rounds`), or ends.
Until the start budget is spent, it looks the same as one that declares late. Known not to declare are a command
(`Settings.declares`), and a script with ranks that have set up communication on their own (`have_met`).

If ranks end one after the other, the cause is the first rank with an end that no other rank caused, because a lost peer
ends all ranks. `review` is called by the controller at the end of each event, `judge` by the `watchdog`.
"""

from __future__ import annotations

import math
import signal as signals

from resihp.controller import interface as api
from resihp.controller import iterations, startup
from resihp.controller.fail_stop import endings, failures, incidents, own_causes
from resihp.controller.rounds import restarts, tried_again
from resihp.controller.state.job import Job
from resihp.controller.state.members import Member
from resihp.protocol import client
from resihp.protocol import messages as m
from resihp.words import alike, count_of, natural

OWN_STATUSES = (m.ABORT_STATUS, client.AGENT_GONE_STATUS)
"""Exit statuses with which resihp itself ends a worker. They say nothing about the script."""
FIRST_SIGNAL_STATUS = 129
"""Lowest exit status that a shell returns for a program that a signal ended."""


def review(job: Job) -> None:
    """Begin training, or end the job, once the start no longer waits for any rank."""
    if job.stage != "gathering" or job.stop_request is not None or job.start.awaited or not job.record.placements:
        return
    if len(job.nodes) < job.settings.nodes:
        return
    if not any(member.ready for member in job.members.values()):
        _nobody_declared(job)
    elif not job.examinations:
        _begin(job)


def have_met(job: Job) -> None:
    """Note that ranks have set up communication without resihp and do not declare a model. Such ranks succeed or fail
    together."""
    if not job.start.met and not job.has_declared:
        job.start.met = True
        job.say(
            "notice",
            "its script has a training loop of its own: it is launched and watched; if a rank fails, all ranks are "
            "started again",
        )


def judge(job: Job) -> None:
    """Decide about losses as time passes. If every failed rank only lost a peer, and another rank is silent, wait for
    the outcome of the silent rank."""
    if job.record.suspects_silent and (failed := _all_failed(job)) and failed == _followers(job):
        return
    if job.start.early_at is not None and job.now - job.start.early_at > tried_again.GRACE_S:
        if _ends_for_the_script(job) or _ends_for_lack_of_devices(job):
            return
        _kill_failed(job)
    if job.needs_all:
        _end_if_incomplete(job)
    elif job.start.awaited and job.now - job.start.ordered_at > job.settings.start_budget_s:
        _budget_is_spent(job)


# --- the end of the wait --------------------------------------------------------------------------------------------


def _begin(job: Job) -> None:
    if _ends_for_the_script(job):
        return
    _leave_unusable_nodes(job)
    if job.stage == "gathering" and not _ends_for_lack_of_devices(job):
        failures.explain_early(job)
        startup.propose(job)


def _nobody_declared(job: Job) -> None:
    """End a start in which no rank has declared: the program is done, or it failed on all ranks."""
    if _ends_for_the_script(job):
        return
    if not _ends_for_a_loss(job):
        iterations.end_when_gone(job)


def _end_if_incomplete(job: Job) -> None:
    """End a program that needs all its processes, if one has failed and the others have had time to fail in the same
    way, or if a node is missing."""
    early_at = job.start.early_at
    if (
        _failed(job)
        and job.live
        and early_at is not None
        and job.now - early_at <= tried_again.grace_s(job, _failed(job))
    ):
        return
    if not _ends_for_the_script(job):
        _ends_for_a_loss(job)


def _ends_for_a_loss(job: Job) -> bool:
    """End a program that needs all its processes if one of them is lost; return whether the program was ended. A lost
    node takes precedence over ranks that then lost their peers."""
    failed = _failed(job)
    if failed and not (_lacks_nodes(job) and set(failed) <= _followers(job)):
        _end_for(job, failed)
    elif _lacks_nodes(job):
        _too_few(job, "lost, and a program that does not declare what it trains needs all its processes")
    else:
        return False
    return True


def _budget_is_spent(job: Job) -> None:
    """Give up the ranks that have neither declared nor ended within the start budget. A program that never declares has
    unlimited time, unless a part of it is missing."""
    budget = f"{job.settings.start_budget_s:.0f} s"
    for rank in sorted(job.start.awaited & job.starting):
        startup.never_started(job, rank, f"no report of it within {budget}")
    if not job.ready:
        failed = _failed(job)
        if failed:
            _end_for(job, failed)
        elif _lacks_nodes(job):
            _too_few(job, f"lost, and no rank was ready to train within {budget}")
        return
    for rank in sorted(job.start.awaited):
        _fence(job, job.members[rank], f"not ready to train within {budget} of the start")


def _kill_failed(job: Job) -> None:
    """Kill processes that reported an error but still run. Mark processes dead that survive even that."""
    assert job.start.early_at is not None
    for rank in sorted(job.start.awaited):
        member = job.members.get(rank)
        if member is None or not member.alive:
            continue
        if member.fenced is None and (member.raised is not None or member.unwilling):
            _fence(job, member, "did not end after its script had failed")
        elif member.fenced is not None and job.now - job.start.early_at > job.settings.hang_given_up_s:
            job.start.awaited.discard(rank)
            incidents.mark_dead(job, member, -signals.SIGKILL)


def _fence(job: Job, member: Member, reason: str) -> None:
    if member.fenced is None:
        member.fenced, member.declared = reason, None
        job.start.early_at = job.now
        log = f"{member.node}.rank{member.rank}.log"
        job.say("warning", f"{job.where(member.rank)}: given up, {reason}; see its log, {log}")
        job.do(api.SignalWorker(rank=member.rank, signal=int(signals.SIGKILL)))


# --- causes ----------------------------------------------------------------------------------------------------------


def _ends_for_the_script(job: Job) -> bool:
    """End the job if at least half of its ranks report the same error, on more than one node if the job has several;
    return whether the job was ended."""
    ranks = range(len(job.record.placements))
    nodes = {place.node for place in job.record.placements if job.nodes[place.node].alive}
    unable = [rank for rank in ranks if rank in job.record.refused and job.nodes[_node(job, rank)].alive]
    if unable and {_node(job, rank) for rank in unable} == nodes and not job.ready and not job.start.awaited:
        node = _node(job, unable[0])
        endings.end(job, 2, f"node {node}: cannot start workers: {job.record.refused[unable[0]]}")
        return True
    unwilling = [rank for rank, member in sorted(job.members.items()) if member.unwilling]
    if _is_common(job, unwilling, nodes):
        endings.end(job, 2, job.members[unwilling[0]].unwilling)
        return True
    return _ends_for_same_error(job, nodes) or _ends_for_same_status(job, nodes)


def _ends_for_same_error(job: Job, nodes: set[str]) -> bool:
    """End the job if most of its ranks raise the same exception, unless a lost peer caused it; return whether the job
    was ended."""
    by_error: dict[str, list[int]] = {}
    followers = _followers(job)
    for rank, member in sorted(job.members.items()):
        if member.raised is not None and rank not in followers:
            by_error.setdefault(alike(member.raised.error), []).append(rank)
    worst = max(by_error.values(), key=len, default=[])
    if not _is_common(job, worst, nodes) or own_causes.lost_a_peer(job, worst[0]):
        return False
    raised = job.members[min(worst)].raised
    assert raised is not None
    reason = f"{count_of(len(worst), 'rank')} raised the same: {raised.error}"
    if tried_again.begin(job, worst, reason):
        return True
    if own_causes.may_pass(job, worst[0]):
        endings.outside_failed(job, worst, f"raised the same: {raised.error}")
    else:
        endings.program_is_broken(job, worst)
    return True


def _ends_for_same_status(job: Job, nodes: set[str]) -> bool:
    """End the job if most of its ranks exit with the same status soon after the start and before they have declared;
    return whether the job was ended. A script that has declared on some rank is not broken for all ranks."""
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
    if tried_again.begin(job, worst, f"{count_of(len(worst), 'rank')} exited with status {status}"):
        return True
    if all(own_causes.may_pass(job, rank) for rank in worst):
        cause = own_causes.reported_cause(job, job.members[worst[0]])
        endings.outside_failed(job, worst, f"failed alike; {cause}")
    else:
        endings.program_ends(job, worst, status)
    return True


def _followers(job: Job) -> set[int]:
    """Return the ranks that failed because another rank ended, provided that some other rank may have failed by itself.
    A refused connection counts if it may have been a connection to a rank that had already failed."""
    failed = _all_failed(job)
    failed_members = [job.members[rank] for rank in failed if rank in job.members]
    elsewhere = bool(job.record.suspects_silent) or _lacks_nodes(job)
    causes = [own_causes.may_follow_from(member) for member in failed_members if member.follows in ("", "never")]
    since = -math.inf if elsewhere or len(failed_members) < len(failed) else min(causes, default=math.inf)
    followers = {member.rank for member in failed_members if member.follows == "surely"}
    for member in failed_members:
        if member.follows == "perhaps" and member.failed_at is not None and member.failed_at >= since:
            followers.add(member.rank)
    return followers if followers < failed or elsewhere or own_causes.ended_early(job) else set()


def _all_failed(job: Job) -> set[int]:
    """Return the ranks that failed, including ranks that raised an exception but have not ended."""
    return {*_failed(job), *(rank for rank, member in job.members.items() if member.raised is not None)}


def _is_common(job: Job, ranks: list[int], nodes: set[str]) -> bool:
    all_of_them = len(job.record.placements)
    several = len({_node(job, rank) for rank in ranks}) > 1 or len(nodes) <= 1
    return bool(ranks) and several and 2 * len(ranks) >= all_of_them and (len(ranks) > 1 or all_of_them == 1)


def _leave_unusable_nodes(job: Job) -> None:
    """Give up the nodes without a usable device, if none of their devices is tried again."""
    reasons_by_node: dict[str, dict[str, None]] = {}
    usable = {place.node for rank, place in enumerate(job.record.placements) if not _reason_not_to_retry(job, rank)}
    for rank, place in enumerate(job.record.placements):
        if place.node not in usable and job.nodes[place.node].alive:
            reasons_by_node.setdefault(place.node, {})[_reason_not_to_retry(job, rank)] = None
    for name, reasons in reasons_by_node.items():
        if job.stage == "gathering":
            first, *others = reasons
            more = f" and {len(others)} more" if others else ""
            failures.node_lost(job, name, f"none of its processes could start: {first}{more}", "useless")


def _reason_not_to_retry(job: Job, rank: int) -> str:
    """Return the reason for which a lost rank's device is not tried again; empty if it is tried again."""
    if rank in job.record.refused:
        return job.record.refused[rank]
    member = job.members.get(rank)
    if member is None or member.alive:
        return ""
    return member.raised.error if member.raised is not None else member.unwilling


def _node(job: Job, rank: int) -> str:
    return job.record.placements[rank].node


# --- enough devices --------------------------------------------------------------------------------------------------


def _ends_for_lack_of_devices(job: Job) -> bool:
    """End the job if it has lost too many devices to start; return whether the job was ended. Losses of whole nodes are
    handled when they happen."""
    if job.record.round or startup.devices_left(job) >= job.settings.devices_least:
        return False
    failed = _failed(job)
    if failed:
        _end_for(job, failed)
    else:
        _too_few(job, "lost" if job.needs_all else "lost before training began")
    return True


def _lacks_nodes(job: Job) -> bool:
    """Return whether nodes are missing and no spare nodes took their places, or nodes with started processes are
    lost."""
    placements = job.record.placements
    needed = job.settings.nodes_least * job.settings.gpus_per_node
    return len(placements) < needed or any(not job.nodes[p.node].alive for p in placements)


def _failed(job: Job) -> list[int]:
    """Return the ranks that failed. Ranks that were lost with their node, and ranks of a plain program that exited with
    status 0, are not among them."""
    ended, others_train = job.record.unexplained, bool(job.ready)
    return [
        rank
        for rank in sorted(ended)
        if job.nodes[_node(job, rank)].alive and (rank in job.record.refused or ended[rank] or others_train)
    ]


def _end_for(job: Job, failed: list[int]) -> None:
    """End the job because of failed ranks. The stated reason is the first rank with an end that no other rank
    caused."""
    followers = _followers(job)
    causes = _in_order(job, _all_failed(job) - followers)
    rank = causes[0] if causes else failed[0]
    place = job.record.placements[rank]
    where = f"rank {rank} ({place.node} device {place.device})"
    member = job.members.get(rank)
    same = _raised_the_same(job, rank, causes)
    if ended := not causes and own_causes.ended_early(job):
        where, text = job.where(ended[0]), own_causes.ended_early_cause(ended)
    elif member is None:
        text = f"could not be started: {job.record.refused[rank]}"
    elif member.raised is not None:
        job.say("error", endings.traceback_of(job, rank))
        others = (
            f"{count_of(len(same), 'other rank')} raised the same error" if same else "other ranks did not raise it"
        )
        text = f"{member.raised.error}{failures.early(job)}; {others}"
    elif member.unwilling:
        text = member.unwilling
    else:
        how = member.fenced or failures.ending(job.record.unexplained[rank] or 0)
        if member.follows in ("perhaps", "surely"):
            how = own_causes.reported_cause(job, member).removeprefix(f"rank {rank}").lstrip(": ")
        text = f"{how}{failures.early(job)}; see its log, {place.node}.rank{rank}.log"
    if more := len(causes) - 1 - len(same):
        text += f"; {more} more failed"
    if followers:
        text += (
            f"; {len(followers)} others then lost their peer" if len(followers) > 1 else "; another then lost its peer"
        )
    plain = not job.has_declared
    failures.explain_early(job)
    reason = f"{where}: {text}"
    if plain:
        restarts.begin_or_end(job, reason)
    else:
        endings.end(job, 1, reason)


def _raised_the_same(job: Job, rank: int, among: list[int]) -> list[int]:
    """Return the other ranks in `among` that raised the same exception as `rank`, apart from numbers in its text."""
    texts = {
        other: alike(member.raised.error)
        for other in {rank, *among}
        if (member := job.members.get(other)) is not None and member.raised is not None
    }
    return [other for other in texts if other != rank and texts[other] == texts.get(rank)]


def _in_order(job: Job, ranks: set[int]) -> list[int]:
    """Return the ranks in the order in which they failed, as far as that is known, else in the order in which they
    ended."""
    ended = {rank: position for position, rank in enumerate(job.record.unexplained)}

    def order(rank: int) -> tuple[float, int]:
        member = job.members.get(rank)
        failed_at = member.failed_at if member is not None else None
        return -math.inf if failed_at is None else failed_at, ended.get(rank, len(ended))

    return sorted(ranks, key=order)


def _too_few(job: Job, outcome: str) -> None:
    lost_nodes = sorted((name for name, node in job.nodes.items() if not node.alive), key=natural) or ["processes were"]
    failures.explain_early(job)
    reason = f"{', '.join(lost_nodes)} {outcome}"
    if not (job.needs_all and restarts.begin(job, reason)):
        endings.too_few(job, reason)
