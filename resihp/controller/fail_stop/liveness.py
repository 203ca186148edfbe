"""Define when silence or lack of progress makes a rank or node suspect, when it is given up, and which ranks are the
cause. Pure functions of the received heartbeats.

Rules (interface.md, "Detection times"): a silent node is suspected after three missed heartbeats. It is given up six
seconds after its last heartbeat, unless the collectives of its peers make progress. A hang is suspected after max(3
heartbeats, 3 predicted iterations) without progress. It is given up after max(15 s, 10 predicted iterations), or at
once if the process is stopped. A rank that waits in communication is a victim, never the cause. Called by the
controller on every tick.
"""

from __future__ import annotations

from collections.abc import Iterable

from resihp.controller.state.members import Member, Node
from resihp.settings import Settings

STOPPED_STATES = frozenset("Tt")


def silence_limit_s(settings: Settings) -> float:
    """Return the seconds without a heartbeat of a node, or of a worker's own thread, after which it is suspected."""
    return settings.silent_beats * settings.beat_s


def is_stopped(member: Member, now: float, settings: Settings) -> bool:
    """Return whether the kernel reports the process as stopped (by SIGSTOP or a debugger)."""
    fresh = now - member.beat_at <= 2 * settings.beat_s
    return fresh and member.beat is not None and member.beat.state in STOPPED_STATES


def is_mute(member: Member, now: float, settings: Settings) -> bool:
    """Return whether the worker's own thread has sent no heartbeat for a while although its agent has. The cause is a
    worker that does not release the GIL."""
    if member.beat is None:
        return False
    return member.beat.age_s > silence_limit_s(settings)


def node_given_up(node: Node, progress_at: float, predicted_s: float, now: float, settings: Settings) -> bool:
    """Return whether a node has been silent for too long while its peers made no progress. Without the node, peers can
    continue for one iteration at most."""
    silent_s, idle_s = now - node.last_beat, now - progress_at
    return silent_s > settings.node_given_up_s - settings.beat_s and idle_s > max(
        silence_limit_s(settings), predicted_s
    )


def hang_suspected_s(settings: Settings, predicted_s: float) -> float:
    return max(silence_limit_s(settings), 3 * predicted_s)


def hang_given_up_s(settings: Settings, predicted_s: float) -> float:
    return max(settings.hang_given_up_s, 10 * predicted_s)


def blocking_ranks(members: Iterable[Member], now: float, settings: Settings) -> list[Member]:
    """Return the ranks, among these ranks without progress, that keep the others waiting.

    Stopped processes come first, then ranks with a mute thread, then ranks that are not in communication, as far as
    their devices answer. A device that does not answer may itself be waiting for a peer. So no rank is returned if
    several devices do not answer and no other rank is computing. No rank is returned either if all ranks wait for each
    other; then communication is broken.
    """
    ranks = list(members)
    stopped = [m for m in ranks if is_stopped(m, now, settings)]
    if stopped:
        return stopped
    mute = [m for m in ranks if is_mute(m, now, settings)]
    if mute:
        return mute
    at_work = [
        m
        for m in ranks
        if m.beat is not None and m.beat.progress is not None and m.beat.progress.activity != "communication"
    ]
    answering = [m for m in at_work if not device_unanswered_s(m)]
    return answering or (at_work if len(at_work) == 1 else [])


def device_unanswered_s(member: Member) -> float:
    """Return the seconds for which the device of a rank without progress has not answered, as of its last heartbeat."""
    beat = member.beat
    return 0.0 if beat is None or beat.progress is None else beat.progress.unanswered_s
