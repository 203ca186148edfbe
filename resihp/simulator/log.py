"""The log of a run, in lines that a person can read."""

from __future__ import annotations

from resihp.controller import interface as api
from resihp.protocol import messages as m
from resihp.record.journal import FailureFound, IterationCommitted, PlanDecided, Suspected


def log_tail(log: list[tuple[float, object]], lines: int = 60, beats: bool = False) -> str:
    """The last lines, without ticks and (unless asked for) beats."""
    quiet = api.Tick if beats else api.Tick | api.AgentBeat
    return "\n".join([f"{at:9.3f} {written(what)}" for at, what in log if not isinstance(what, quiet)][-lines:])


def written(what: object) -> str:
    """One line of the log."""
    match what:
        case str():
            return what
        case api.WorkerSaid():
            return f"  <- rank {what.rank}: {short(what.message)}"
        case api.Log():
            return f"     journal {short(what.entry)}"
        case api.Order():
            return f"  -> ranks {list(what.ranks)}: {short(what.order)}"
        case api.Say():
            return f"  -> say {what.text}"
        case (
            api.End()
            | api.DropNode()
            | api.SignalWorker()
            | api.SignalNode()
            | api.StartWorkers()
            | api.CutConnection()
        ):
            return f"  -> {what}"
        case _:
            return f"  <- {what}"


def short(what: object) -> str:
    """Messages and entries without what every line would repeat."""
    match what:
        case m.Declare():
            return "Declare"
        case m.Confirm():
            return f"Confirm {what.epoch}"
        case m.Stepped():
            return f"Stepped epoch {what.epoch} iteration {what.outcome.iteration}"
        case m.Parked():
            return f"Parked {what.epoch} holds {list(what.holds)} stepped {what.stepped} ready {what.ready}"
        case m.Propose():
            base = what.base and f"base {what.base.epoch} survivors {list(what.base.survivors)}"
            return f"Propose {what.plan.epoch} {base}"
        case m.Go():
            return f"Go {what.epoch} next {what.next_iteration} finish {what.finish and what.finish.iteration}"
        case PlanDecided():
            shape = [[list(stage.ranks) for stage in replica.stages] for replica in what.plan.layout.replicas]
            shape_told = f"{shape} standby {list(what.plan.layout.standby)}"
            return f"Plan {what.plan.epoch} {what.action} next {what.next_iteration}: {shape_told}; {what.reason}"
        case IterationCommitted():
            return f"IterationCommitted {what.outcome.iteration} epoch {what.epoch} seconds {what.seconds}"
        case FailureFound():
            ranks = f"ranks {list(what.ranks)} node {what.node}"
            return (
                f"FailureFound {what.failure} {what.kind} {what.component} {ranks} detect {what.detect_s}: {what.cause}"
            )
        case Suspected():
            return f"Suspected rank {what.rank} node {what.node} cleared {what.cleared}: {what.evidence}"
        case _:
            return str(what)
