"""Formats the log of a simulated run for people."""

from __future__ import annotations

from resihp.controller import interface as api
from resihp.protocol import messages as m
from resihp.record.journal import FailureFound, IterationCommitted, PlanDecided, Suspected


def log_tail(log: list[tuple[float, object]], lines: int = 60, beats: bool = False) -> str:
    """Return the last `lines` lines of a log as text, without ticks, and without heartbeats unless `beats`."""
    quiet = api.Tick if beats else api.Tick | api.AgentBeat
    return "\n".join([f"{at:9.3f} {written(item)}" for at, item in log if not isinstance(item, quiet)][-lines:])


def written(item: object) -> str:
    """Format one entry of the log as a line."""
    match item:
        case str():
            return item
        case api.WorkerSaid():
            return f"  <- rank {item.rank}: {short(item.message)}"
        case api.Log():
            return f"     journal {short(item.entry)}"
        case api.Order():
            return f"  -> ranks {list(item.ranks)}: {short(item.order)}"
        case api.Say():
            return f"  -> say {item.text}"
        case (
            api.End()
            | api.DropNode()
            | api.SignalWorker()
            | api.SignalNode()
            | api.StartWorkers()
            | api.CutConnection()
        ):
            return f"  -> {item}"
        case _:
            return f"  <- {item}"


def short(item: object) -> str:
    """Format a message or journal entry, without the fields that are the same in every line."""
    match item:
        case m.Declare():
            return "Declare"
        case m.Confirm():
            return f"Confirm {item.epoch}"
        case m.Stepped():
            return f"Stepped epoch {item.epoch} iteration {item.outcome.iteration}"
        case m.Parked():
            return f"Parked {item.epoch} holds {list(item.holds)} stepped {item.stepped} ready {item.ready}"
        case m.Propose():
            base = item.base and f"base {item.base.epoch} survivors {list(item.base.survivors)}"
            return f"Propose {item.plan.epoch} {base}"
        case m.Go():
            return f"Go {item.epoch} next {item.next_iteration} finish {item.finish and item.finish.iteration}"
        case PlanDecided():
            shape = [[list(stage.ranks) for stage in replica.stages] for replica in item.plan.layout.replicas]
            layout_text = f"{shape} standby {list(item.plan.layout.standby)}"
            return f"Plan {item.plan.epoch} {item.action} next {item.next_iteration}: {layout_text}; {item.reason}"
        case IterationCommitted():
            return f"IterationCommitted {item.outcome.iteration} epoch {item.epoch} seconds {item.seconds}"
        case FailureFound():
            ranks = f"ranks {list(item.ranks)} node {item.node}"
            return (
                f"FailureFound {item.failure} {item.kind} {item.component} {ranks} detect {item.detect_s}: {item.cause}"
            )
        case Suspected():
            return f"Suspected rank {item.rank} node {item.node} cleared {item.cleared}: {item.evidence}"
        case _:
            return str(item)
