"""Invariants of suspicions and of failures: each has a reason in the simulated truth.

Checks suspicions before they are written, and failures after the controller's complete answer. Never suspects a rank
itself. Called by `rules` and by the invariants of entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resihp.record.journal import AnyEntry, FailureEnded, FailureFound, Suspected
from resihp.simulator.invariants.violations import TOLERANCE_S, expect

if TYPE_CHECKING:
    from resihp.simulator.rules import Rules


def check_suspicion(rules: Rules, entry: Suspected) -> None:
    """Check that suspicions of silence and of slowness are numbered in one sequence, and that each one ends with an
    outcome."""
    before = [earlier for earlier in entries_before(rules, entry) if isinstance(earlier, Suspected)]
    last = max((earlier.suspicion for earlier in before), default=0)
    about = [earlier for earlier in before if earlier.suspicion == entry.suspicion]
    expect(entry.cleared == bool(entry.outcome), f"{entry}: cleared without an outcome, or the reverse")
    if not entry.cleared or not about:
        expect(entry.suspicion == last + 1, f"{entry} after suspicion {last}")
    else:
        expect(not any(earlier.cleared for earlier in about), f"{entry} has ended before")
    if entry.kind == "slow":
        check_slow(entry, [earlier for earlier in before if earlier.kind == "slow"])
    else:
        check_silence(rules, entry)


def check_silence(rules: Rules, entry: Suspected) -> None:
    """Check that a suspicion of silence follows from a test and a real silence, and that it is the only one of its
    subject."""
    expect(entry.statistic is not None and entry.threshold is not None, f"{entry} was not tested")
    expect((entry.statistic or 0.0) > (entry.threshold or 0.0), f"{entry} does not exceed its threshold")
    key = entry.node or "" if entry.rank is None else entry.rank
    if entry.cleared:
        expect(key in rules.suspected, f"{entry} was not suspected")
        rules.suspected.discard(key)
        return
    expect(key not in rules.suspected, f"{entry} twice")
    rules.suspected.add(key)
    least = rules.world.settings.silent_beats * rules.world.settings.beat_s - TOLERANCE_S
    if entry.rank is not None:
        worker = rules.world.workers[entry.rank]
        quiet_s = rules.world.now - max(worker.shown_at, worker.answered_at)
        stopped = worker.frozen == "stop" or rules.world.now - worker.thawed_at < 2.0
        expect(quiet_s >= least or stopped, f"{entry} only {quiet_s:.1f} s after its progress")
    elif entry.node is not None:
        quiet_s = rules.world.now - rules.world.nodes[entry.node].last_beat
        expect(quiet_s >= least, f"{entry} only {quiet_s:.1f} s after its last beat")


def check_slow(entry: Suspected, before: list[Suspected]) -> None:
    """Check that at most one suspicion of slowness is open at a time. `before` has the suspicions logged earlier."""
    if all(earlier.suspicion != entry.suspicion for earlier in before):
        at_once = ("dropped", "passed", "unconfirmed", "fine")
        expect(not entry.cleared or entry.outcome in at_once, f"{entry} was never examined")
    closed = {earlier.suspicion for earlier in before if earlier.cleared}
    is_open = {earlier.suspicion for earlier in before} - closed - {entry.suspicion}
    expect(entry.cleared or not is_open, f"{entry} while suspicions {is_open} are open")


def check_blame(rules: Rules, failure: FailureFound) -> None:
    """Check, after the controller's complete answer, that the ranks in a failure are dead or fenced, or that a transfer
    broke."""
    if failure.kind == "fail-slow":
        expect(suspects_slow(rules, failure), f"{failure} without a suspicion")
        return
    if failure.kind == "communication":
        explained = failure.epoch in rules.world.broken_epochs or rules.signalled is not None
        expect(explained, f"attributes a failure to the communication of epoch {failure.epoch}")
        return
    for rank in failure.ranks:
        worker = rules.world.workers[rank]
        is_gone = not worker.alive or worker.fenced or worker.node.dropped or worker.raised or not worker.spawned
        expect(is_gone, f"failure {failure.failure} names rank {rank}, which is alive: {failure.cause}")
        expect(rank not in rules.blamed, f"rank {rank} is in failures {rules.blamed.get(rank)} and {failure.failure}")
        rules.blamed[rank] = failure.failure
        late = worker.node.name in rules.lost_nodes and worker.died_with_node and not worker.raised
        late = late and failure.component != "node" and not rules.world.stopping.signals
        expect(not late, f"failure {failure.failure} is part of the loss of node {worker.node.name}")
    if failure.component == "node":
        assert failure.node is not None
        nobody = not failure.ranks and failure.epoch > 0
        expect(not nobody, f"failure {failure.failure} of node {failure.node} names no rank")
        expect(failure.node not in rules.failed_nodes, f"node {failure.node} fails twice")
        rules.failed_nodes.add(failure.node)
        node = rules.world.nodes[failure.node]
        is_gone = not node.alive or node.dropped or failure.node in rules.world.allocation.lost
        expect(is_gone, f"node {failure.node} is alive")


def suspects_slow(rules: Rules, verdict: FailureFound) -> bool:
    """Return whether the job has just confirmed a suspicion that named the slow ranks, or no ranks."""
    for entry in reversed(entries_before(rules, verdict)):
        match entry:
            case FailureFound(kind="fail-slow") | FailureEnded():
                continue
            case Suspected(kind="slow", outcome="slow"):
                return not entry.ranks or set(entry.ranks).issuperset(verdict.ranks)
            case _:
                return False
    return False


def entries_before(rules: Rules, entry: AnyEntry) -> list[AnyEntry]:
    entries = [logged for _, logged in rules.world.entries]
    here = next((i for i in reversed(range(len(entries))) if entries[i] is entry), len(entries))
    return entries[:here]
