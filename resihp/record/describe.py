"""Describe each journal entry in one line of words, for the ledger's `events`, for `status` and for the live view.
Pure.

Style: lower case; the subject first; numbers of failures, ranks and plans included.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from resihp.record import journal
from resihp.record.recovery import RecoveryTimes
from resihp.words import count_of


def rank_list(ranks: Iterable[int]) -> str:
    """Return a list of ranks in words: `rank 5`, `ranks 0-3, 8`, or `no rank` for an empty list."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    if not runs:
        return "no rank"
    words = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {words}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {words}"


def size(count: int) -> str:
    """Return a size in bytes in words, with units of powers of 1000: `812 B`, `18.2 kB`, `340 MB`, `3.4 GB`."""
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * unit:
            return f"{count / unit:.{0 if count >= 99.95 * unit else 1}f} {letter}B"
    return f"{count} B"


DETECTORS: Mapping[str, str] = {
    "warming up": "warming up, nothing can be found yet",
    "workload": "judges each rank's own work",
    "iterations": "judges whole iterations, no rank by itself",
    "plain times": "judges plain iteration times, no rank reports its chunks",
    "off": "off",
}
"""The detector's state (`CoverageChanged.detector`, or "off") in words for the user."""


_RANK = re.compile(r"rank \d+\b")


def _numbers(numbers: tuple[int, ...], noun: str) -> str:
    return f"{noun} {numbers[0]}" if len(numbers) == 1 else f"{noun}s {', '.join(map(str, numbers))}"


def _exit(exit: int | None) -> str:
    if exit is None:
        return "gone with its node"
    return f"killed by signal {-exit}" if exit < 0 else f"exited with status {exit}"


def _failure(entry: journal.FailureFound) -> str:
    cause = entry.cause
    where = [entry.node] if entry.node is not None else []
    if entry.device is not None:
        where.append(f"device {entry.device}")
    first = _RANK.match(cause)
    if where and (len(entry.ranks) == 1 or first is not None):
        subject = first[0] if first is not None else f"rank {entry.ranks[0]}"
        bare = cause.removeprefix(subject).strip(" :")
        cause = f"{subject} ({' '.join(where)}) {bare}"
    elif entry.ranks and entry.component == "node":
        cause = f"{cause}, {rank_list(entry.ranks)} lost"
    when = "slow since" if entry.kind == "fail-slow" else "noticed in"
    is_dated = entry.epoch or entry.kind == "fail-slow"  # epoch 0: there was no plan yet
    onset = f", {when} iteration {entry.iteration}" if is_dated else ""
    return f"failure {entry.failure}: {cause}{onset}"


def _suspicion(entry: journal.Suspected) -> str:
    subject = f"rank {entry.rank}" if entry.rank is not None else f"node {entry.node}"
    if entry.rank is None and entry.node is None:
        subject = "no device in particular"
        if entry.ranks:
            subject = f"{entry.component} of {rank_list(entry.ranks)}"
    elif entry.rank is not None and len(entry.ranks) > 1:
        subject = f"{subject} and {len(entry.ranks) - 1} others"
    number = f"suspicion {entry.suspicion}: " if entry.suspicion else ""
    if not entry.cleared:
        return f"{number}{subject}: suspected, {entry.evidence}"
    words = {"slow": "found slow", "dropped": "not looked into", "lost": "lost", "": "no longer suspected"}
    return f"{number}{subject}: {words.get(entry.outcome, words[''])}, {entry.evidence}"


def _probes(entry: journal.ProbesTaken) -> str:
    unfit = [f"rank {probe.rank} ({probe.node} device {probe.device})" for probe in entry.devices if not probe.fit]
    unfit += [f"link {link.nodes[0]}-{link.nodes[1]}" for link in entry.links if not link.fit]
    links = f", {count_of(len(entry.links), 'link')}" if entry.links else ""
    verdict = f"; not fit: {', '.join(unfit)}" if unfit else ", all fit"
    looks = f", {entry.looks} looks at some" if entry.looks > 1 else ""
    measured = f"{count_of(len(entry.devices), 'device')}{links} in {entry.seconds:.2f} s{looks}"
    return f"probe {entry.probe} ({entry.occasion}): {measured}{verdict}"


def explain(entry: journal.AnyEntry, mended: RecoveryTimes | None = None) -> str:
    """Return one line that describes an entry. Names and reasons are quoted unchanged.

    `mended`: only for a `Reconfigured` entry, the recovery times of its failures, which the entry alone does not
    contain.
    """
    if isinstance(entry, journal.Reconfigured):
        return _reconfigured(entry, mended)
    kinds = (_job, _member, _plan, _iteration, _script, _trouble, _maintenance)
    text = next((words for describe in kinds if (words := describe(entry))), None)
    assert text is not None, f"{type(entry).__name__}: no words for it"
    return text


def _job(entry: journal.AnyEntry) -> str | None:
    """Describe entries about the job as a whole."""
    match entry:
        case journal.JobStarted():
            restart = f", restart {entry.restart_count}" if entry.restart_count else ""
            return (
                f"job {entry.job}: started on {entry.host} with {count_of(entry.nodes, 'node')} of "
                f"{entry.gpus_per_node}, TP{entry.tp} x PP{entry.pp}{restart}"
            )
        case journal.ModelDeclared():
            declare = entry.declare
            ramp = f" (at first {declare.ramp[0][1]})" if declare.ramp else ""
            return (
                f"model: {declare.model.layers} layers, {declare.micro_batches} micro-batches{ramp}, "
                f"{count_of(declare.iterations, 'iteration')}"
            )
        case journal.LeaderChosen():
            how = "started again" if entry.how == "restarted" else "chosen by a quorum of agents"
            return f"supervisor: {how} on {entry.node or entry.host}, term {entry.term}"
        case journal.JobSignalled():
            nodes = f" on {count_of(len(entry.nodes), 'node')}" if entry.nodes else ""
            if not entry.signal:
                return "job: asked to stop (operator)"
            return f"job: received signal {entry.signal}{nodes} ({entry.meaning})"
        case journal.FaultInjected():
            when = "" if "@iteration=" in entry.text else f" in iteration {entry.iteration}"
            return f"fault {entry.fault}: {entry.text} injected{when}"
        case journal.CheckpointCommitted() if entry.modified is None:
            return f"checkpoint of iteration {entry.iteration}: {size(entry.bytes)} in {entry.seconds:.2f} s"
        case journal.JobEnded():
            code = "" if entry.exit_code is None else f", exit code {entry.exit_code}"
            return f"job: {entry.state}{code}{f', {entry.reason}' if entry.reason else ''}"
        case _:
            return None


def _member(entry: journal.AnyEntry) -> str | None:
    """Describe entries about nodes and processes of the job."""
    match entry:
        case journal.NodeJoined():
            return f"node {entry.node}: joined on {entry.host} with {entry.devices} devices"
        case journal.NodeLost():
            return f"node {entry.node}: lost, {entry.reason}"
        case journal.WorkersOrdered():
            nodes = ", ".join(dict.fromkeys(node for _, node, _ in entry.workers))
            restart = f"restart {entry.round}: " if entry.round else ""
            ranks = _numbers(tuple(rank for rank, _, _ in entry.workers), "rank")
            return f"{restart}{ranks}: to be started on {nodes}"
        case journal.WorkerStarted():
            return f"rank {entry.rank}: started on {entry.node} device {entry.device}, pid {entry.pid}"
        case journal.WorkerEnded():
            return f"rank {entry.rank}: {_exit(entry.exit)}"
        case journal.JoinRefused():
            return f"rank {entry.rank} ({entry.node} device {entry.device}): not accepted, {entry.reason}"
        case _:
            return None


def _plan(entry: journal.AnyEntry) -> str | None:
    """Describe entries about plans."""
    match entry:
        case journal.PlanDecided():
            plan = entry.plan
            order = {
                "start": "starts",
                "redo": "redone",
                "commit": "next, the one before counts",
                "between": "next",
            }[entry.action]
            moved = f", {size(entry.bytes_planned)} to move" if entry.bytes_planned else ""
            tail = f": {entry.reason}" if entry.reason else ""
            return f"epoch {plan.epoch}: {plan.describe()}, iteration {entry.next_iteration} {order}{moved}{tail}"
        case journal.PlanInEffect():
            return f"epoch {entry.epoch}: in effect"
        case journal.PlanRefused():
            subject = "our own check" if entry.rank is None else f"rank {entry.rank}"
            return f"epoch {entry.epoch}: plan refused by {subject}: {entry.reason}"
        case journal.PlanWithdrawn():
            return f"epoch {entry.epoch}: plan withdrawn, {entry.reason}"
        case journal.ChangeDeclined():
            stays = "the plan stays" if entry.about == "plan" else "no other node is asked for"
            return f"{entry.reason}: {stays}: {entry.why}"
        case journal.ChangeDecided():
            places = [f"{node} device {device}" for node, device in entry.devices]
            places += [f"link of ranks {a} and {b}" for a, b in entry.links]
            places += ["measured times"] if entry.tuned else []
            places += ["a search"] if entry.found else []
            return f"change of plan because of {', '.join(places)}: {entry.reason}"
        case _:
            return None


def _iteration(entry: journal.AnyEntry) -> str | None:
    """Describe entries about iterations."""
    match entry:
        case journal.IterationCommitted():
            loss = "" if entry.outcome.loss_is_unknown else f", loss {entry.outcome.loss:.4f}"
            return f"iteration {entry.outcome.iteration}: committed{loss}"
        case journal.EvaluationDone():
            return f"iteration {entry.iteration}: validation loss {entry.loss:.4f}"
        case journal.IterationsPacked():
            return f"iterations {entry.first} to {entry.last}: committed"
        case journal.IterationsUnreported():
            return f"iterations {entry.first} to {entry.last}: done while no supervisor led, their figures are lost"
        case _:
            return None


def _script(entry: journal.AnyEntry) -> str | None:
    """Describe entries about a script that does not declare a model."""
    match entry:
        case journal.RestartDecided():
            return f"restart {entry.round}: decided, {entry.reason}"
        case journal.RollbackDecided():
            place = f"the checkpoint of iteration {entry.iteration}" if entry.folder else "the beginning"
            return f"rollback: back to {place}, {entry.reason}"
        case journal.CheckpointCommitted() if entry.modified is not None:
            return f"checkpoint of iteration {entry.iteration}: {entry.folder}"
        case journal.CheckpointDistrusted():
            why = f"{entry.reason}: {entry.failure}" if entry.failure else entry.reason
            return f"checkpoint {entry.folder}: no longer used to resume from, {why}"
        case journal.CounterSeen():
            counter = f"iteration counter of rank {entry.rank}: {entry.iteration}"
            counter += f" of {entry.goal}" if entry.goal else ""
            if entry.iteration > entry.furthest:
                return f"{counter}, read from its output"
            return f"{counter}, iterations up to {entry.furthest} are done again"
        case journal.LossNotFinite():
            return f"iteration {entry.iteration}: rank {entry.rank} printed the loss {entry.loss}"
        case _:
            return None


def _reconfigured(entry: journal.Reconfigured, mended: RecoveryTimes | None) -> str:
    """Describe a completed change of plan. With `mended`, times count from the first of its failures."""
    planned = entry.action == "between" and not entry.failures
    causes = _numbers(entry.failures, "failure") if entry.failures else "interruption"
    outcome = "layout changed" if planned else f"recovered from {causes}"
    tries = f" after {entry.attempts} attempts" if entry.attempts > 1 else ""
    moved = f", {size(entry.bytes_moved)} moved" if entry.bytes_moved else ""
    when = f" in {entry.seconds:.2f} s"
    if mended is not None:
        without_s, noticed_s = mended.seconds_without_noticing, mended.noticed_after
        when = f", {without_s:.2f} s after it was noticed"
        if noticed_s is not None:
            noticing = f"noticed after {noticed_s:.2f} s, {without_s:.2f} s without noticing"
            when = f", {mended.seconds_to_recover:.2f} s after it ({noticing})"
    change = f"restart {entry.epoch}" if entry.is_restart else f"epoch {entry.epoch}"
    return f"{change}: {outcome}{when}{tries}{moved}"


def _trouble(entry: journal.AnyEntry) -> str | None:
    """Describe entries about broken or slow components."""
    match entry:
        case journal.Suspected():
            return _suspicion(entry)
        case journal.CoverageChanged():
            unwatched = f"; not watched: {rank_list(entry.unwatched)}" if entry.unwatched else ""
            return f"detector: {DETECTORS[entry.detector]}{unwatched}"
        case journal.FailureFound():
            return _failure(entry)
        case journal.FailureEnded():
            return f"failure {entry.failure}: over since iteration {entry.iteration}, {entry.evidence}"
        case journal.ProbesTaken():
            return _probes(entry)
        case _:
            return None


def _maintenance(entry: journal.AnyEntry) -> str | None:
    """Describe entries about nodes that leave or arrive."""
    match entry:
        case journal.DrainDecided():
            how = "" if entry.measure == "drain" else ", excluded from the user's next jobs"
            return f"drain {entry.drain}: node {entry.node}{how}, {entry.reason}"
        case journal.DrainWaived():
            return f"node {entry.node}: nothing is done about failure {entry.failure}"
        case journal.DrainAnswered():
            return f"drain {entry.drain}: node {entry.node}, {entry.step} {entry.outcome}: {entry.text}"
        case journal.NodeReleased():
            return f"node {entry.node}: given back to Slurm, {entry.outcome}{f': {entry.text}' if entry.text else ''}"
        case journal.ReplacementAsked():
            return f"replacement {entry.replacement}: asked for in place of node {entry.node}, {entry.reason}"
        case journal.ReplacementChanged():
            job = f" (Slurm job {entry.slurm_job})" if entry.slurm_job else ""
            node = f" as node {entry.node}" if entry.node else ""
            tail = f": {entry.text}" if entry.text else ""
            return f"replacement {entry.replacement}{job}: {entry.state}{node}{tail}"
        case journal.ReservationSeen(seconds=None):
            return f"reservation {entry.reservation}: no longer ahead of this job"
        case journal.ReservationSeen():
            minutes = (entry.seconds or 0.0) / 60
            return f"reservation {entry.reservation}: begins on {', '.join(entry.nodes)} in {minutes:.0f} min"
        case journal.SlurmSaw():
            return f"node {entry.node}: Slurm reports it {entry.state}{f', {entry.text}' if entry.text else ''}"
        case _:
            return None
