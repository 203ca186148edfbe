"""Being asked to stop: signals from Slurm or an operator, time that runs out, a quorum that is gone. Blames no node.

Decides what a signal means, and leads a job to an end that loses nothing: training pauses after the iteration under
way, one whole replica writes what it holds, the job ends. What takes too long is given up: an iteration for the one
before it, ranks that do not park for those that have, a checkpoint for the one that there is. Nothing new is begun
meanwhile, and whatever dies is Slurm's doing.

==========================  ==========================  =======================================================
received                    is taken for                then
==========================  ==========================  =======================================================
TERM under Slurm            a stop: Slurm tells why     checkpoint, exit 143; 75 for the time limit, preemption
TERM by agents of several   the same                    the same
nodes, or of the only one
USR1 or USR2, also by       a warning: time runs out    checkpoint, exit 75 (requeue) or 143, as configured
agents of several nodes
a signal by one agent       its node's own business     a notice; its end is no failure of the node's
INT, TERM without Slurm,    an operator                 checkpoint, exit 130 for INT, else 143; asked once more, the
`resihp stop`                                           end, at once
no quorum follows           another one may lead        the end, at once, exit 75: the guardian decides
==========================  ==========================  =======================================================

`proceed` is called by the controller at the end of each event, `resume` by `takeover`.
"""

from __future__ import annotations

import math
import signal as signals
from collections.abc import Iterable

from resihp.controller import interface as api
from resihp.controller import iterations, planning
from resihp.controller import transition as transitions
from resihp.controller.fail_stop import incidents
from resihp.controller.state.job import Job
from resihp.controller.state.members import natural
from resihp.controller.state.requests import COINCIDENCE_S, AgentSignal, Departure, Meaning
from resihp.protocol import messages as m
from resihp.record.journal import JobSignalled, PlanWithdrawn

MEANING_PATIENCE_S = 2.0
"""How long Slurm may take to say why; training pauses meanwhile."""
WARNING_BUDGET_S = 120.0
"""How long a checkpoint may take after a warning when the time limit is not known."""
OPERATOR_BUDGET_S = 300.0
"""How long it may take for an operator, who can ask once more; not after TERM, whose sender may have less patience."""
LIMIT_MARGIN_S = 30.0
"""How long before the time limit the job has ended."""
HURRY_S = 60.0
"""How long before the end the iteration under way is given up; at most half of the time there was."""
LATE_S = 30.0
"""How long before the end nobody is waited for to park, if others have; at most a quarter."""


# --- what was received ----------------------------------------------------------------------------------------------


def signalled(job: Job, event: api.Signalled) -> None:
    """The supervisor's own signals."""
    if event.signal in _WARNINGS:
        _begin(job, event.signal, "warning", f"received {_name(event.signal)}")
    elif event.signal == signals.SIGTERM and job.settings.slurm:
        _begin(job, event.signal, None, "received SIGTERM")
    elif event.signal in (signals.SIGTERM, signals.SIGINT):
        _operator(job, event.signal, f"received {_name(event.signal)}")


def stop_asked(job: Job, event: api.StopAsked) -> None:
    """`resihp stop`."""
    departure = job.departure
    if event.at_once:
        job.do(api.Reply(request=event.request, ok=True, text="ends at once"))
        incidents.end(job, 128 + signals.SIGTERM, f"stopped by an operator, at once; {_unsaved(job)}")
    elif departure is not None and departure.meaning != "warning":
        job.do(api.Reply(request=event.request, ok=True, text="is stopping already"))
    else:
        job.do(api.Reply(request=event.request, ok=True, text=_follows(job)))
        _operator(job, 0, "an operator asked for it")


def _operator(job: Job, signal: int, told: str) -> None:
    """The first time, what is done is saved; the second time, nothing is waited for."""
    if job.departure is None or job.departure.meaning != "operator":
        _begin(job, signal, "operator", told)
    else:
        incidents.end(job, 128 + signal, f"{told} once more: ended at once; {_unsaved(job)}")


def agent_signalled(job: Job, event: api.AgentSignalled) -> None:
    """An agent's: of several nodes at once, they are meant for the job."""
    node = job.nodes.get(event.node)
    if node is None or not node.alive or event.signal == signals.SIGCONT:
        return
    job.agent_signals[event.node] = AgentSignal(event.signal, job.now)
    if job.departure is not None:
        job.departure.nodes.add(event.node)
    recent = _recent(job)
    alone = sum(other.alive for other in job.nodes.values()) == 1
    for meaning in _MEANINGS:
        nodes = [name for name, each in recent.items() if _MEANINGS[each.signal in _WARNINGS] == meaning]
        if len(nodes) > 1 or (nodes and alone):
            number = recent[nodes[0]].signal
            whom = f"agents of {', '.join(_sorted(nodes))}"
            _begin(job, number, meaning, f"{whom} received {_name(number)}")
            return


_WARNINGS = frozenset((signals.SIGUSR1, signals.SIGUSR2))
"""What Slurm sends ahead, and only if it was asked to (`--signal`)."""
_MEANINGS: tuple[Meaning | None, ...] = (None, "warning")
"""Of other signals, of those."""


def _recent(job: Job) -> dict[str, AgentSignal]:
    """Agents that were signalled just now, by node."""
    return {name: each for name, each in job.agent_signals.items() if job.now - each.at <= COINCIDENCE_S}


def time_left(job: Job, event: api.TimeLeft) -> None:
    job.deadline = None if event.seconds is None else job.now + event.seconds


def meaning_told(job: Job, event: api.StopMeaning) -> None:
    departure = job.departure
    if departure is not None and not departure.told:
        departure.meaning = event.meaning


def quorum_lost(job: Job, event: api.QuorumLost) -> None:
    """What is decided here may not count: our workers end, and Slurm is asked for nothing."""
    incidents.end(job, 75, f"lost the quorum: {event.reason}")


def resume(job: Job) -> None:
    """A supervisor that died was stopping the job: so does the next one."""
    signalled = job.record.signalled
    if signalled is not None:
        job.departure = Departure(
            signal=signalled.signal,
            first_at=-math.inf,
            asked_at=-math.inf,
            nodes=set(signalled.nodes),
            meaning=signalled.meaning,
            told=True,
        )


def _begin(job: Job, signal: int, meaning: Meaning | None, told: str) -> None:
    """Stop, unless that is under way; a stop follows a warning, and Slurm's an operator's, with less time."""
    before = job.departure
    if before is not None and not _is_more(job, before.meaning, meaning):
        return
    if meaning is None and not job.settings.slurm:
        meaning = "unknown"
    recent = _recent(job)
    job.departure = Departure(
        signal=signal,
        first_at=before.first_at if before else min([job.now, *(each.at for each in recent.values())]),
        asked_at=job.now,
        nodes=set(recent),
        meaning=meaning,
        writers=before.writers if before else (),
    )
    what = "time is running out" if meaning == "warning" else "the job is to stop"
    hint = " (once more to end at once)" if signal == signals.SIGINT else ""
    job.say("notice", f"{told}: {what}; {'goes on with that' if before else _follows(job)}{hint}")
    if meaning is None:
        job.do(api.AskWhy())
    elif job.settings.slurm:
        job.do(api.AskTimeLeft())


def _is_more(job: Job, before: Meaning | None, meaning: Meaning | None) -> bool:
    """Whether a stop that is under way becomes another one, with less time."""
    if before == "operator":
        return meaning is None and job.settings.slurm
    return before == "warning" and meaning != "warning"


def _follows(job: Job) -> str:
    if job.stage == "halting":
        return "training is done"
    if job.stage == "gathering":
        return "training has not begun"
    return "stopping after the iteration under way, with a checkpoint"


# --- what follows -----------------------------------------------------------------------------------------------------


def proceed(job: Job) -> None:
    """The next step towards the end, if the job is to end."""
    if job.stage in ("recovering", "ended"):
        return
    _tell_of_lone_signals(job)
    departure = job.departure
    if departure is None:
        return
    if departure.asked_at == -math.inf:
        departure.asked_at = job.now
    left_s = _ends_at(job, departure) - job.now
    _tell_meaning(job, departure, at_once=left_s <= 0)
    if job.stage == "halting":
        if departure.interrupted or (left_s <= 0 and departure.meaning != "warning"):
            _leave(job, departure.interrupted or "workers had not left")
    elif job.record.plan is None:
        _leave(job, "training had not begun")
    elif left_s <= 0:
        why = "not all was written in time" if departure.writers else "nobody parked in time"
        _leave(job, _no_checkpoint(job, why))
    else:
        budget_s = left_s + job.now - departure.asked_at
        _withdraw(job)
        if _is_still(job, late=left_s < min(LATE_S, budget_s / 4)):
            _save(job, departure)
        elif left_s < min(HURRY_S, budget_s / 2):
            _hurry(job, departure)
        elif job.stage == "running" and job.furthest < job.record.goal:
            transitions.pause(job, "the job is to stop")


def _tell_of_lone_signals(job: Job) -> None:
    for name, each in job.agent_signals.items():
        if each.told or job.now - each.at <= COINCIDENCE_S:
            continue
        each.told = True
        if job.departure is None and job.nodes[name].alive:
            job.say("notice", f"node {name}: its agent alone received {_name(each.signal)}; the job goes on")


def _tell_meaning(job: Job, departure: Departure, at_once: bool) -> None:
    if departure.told:
        return
    if departure.meaning is None and (at_once or job.now - departure.asked_at > MEANING_PATIENCE_S):
        departure.meaning = "unknown"
    if departure.meaning is not None:
        departure.told = True
        nodes = _sorted(departure.nodes)
        job.log(JobSignalled(signal=departure.signal, nodes=nodes, meaning=departure.meaning))


def _ends_at(job: Job, departure: Departure) -> float:
    graced = departure.asked_at + job.settings.signal_grace_s
    limit = math.inf if job.deadline is None else max(job.deadline - LIMIT_MARGIN_S, graced)
    if departure.meaning == "operator" and departure.signal != signals.SIGTERM:
        return min(departure.asked_at + OPERATOR_BUDGET_S, limit)
    if departure.meaning != "warning":
        return graced
    return departure.asked_at + WARNING_BUDGET_S if job.deadline is None else limit


def _withdraw(job: Job) -> None:
    """A plan that was proposed: nobody has acted on it, and nobody will. All have parked for it."""
    transition = job.transition
    if transition is not None and job.stage == "proposing":
        assert transition.plan is not None
        job.log(PlanWithdrawn(epoch=transition.plan.epoch, reason="the job is to stop"))
        job.move("parking")
        transition.plan = None
        transition.waiting.clear()


def _is_still(job: Job, late: bool) -> bool:
    """Whether all have parked, or, when it is late, have had the time to."""
    return job.transition is not None and job.stage == "parking" and (late or not job.transition.waiting)


def _hurry(job: Job, departure: Departure) -> None:
    """The iteration under way takes too long: what it has done is lost, not what was done before."""
    if job.record.committed == job.declaration.resume_from and not job.reports:
        _leave(job, "there is nothing to save")
        return
    if job.transition is not None and job.stage == "parking":
        transitions.urge(job, "the job is to stop now")
    else:
        what = f"iteration {job.furthest + 1}" if job.furthest < job.record.goal else "the last evaluation"
        job.say("notice", f"{what} takes too long to be waited for")
        transitions.park(job, "the job is to stop now")


def _save(job: Job, departure: Departure) -> None:
    """Let those who hold a whole copy of the model write the last committed iteration, and end once they have."""
    assert job.record.plan is not None
    assert job.transition is not None
    if not departure.writers:
        iterations.commit_up_to(job, max(job.reports, default=job.record.committed))
    if job.record.committed == job.declaration.resume_from:
        _leave(job, "there is nothing to save")
        return
    if job.checkpointed == job.record.committed:
        _leave(job, "its checkpoint is written")
        return
    if departure.writers and all(job.members[rank].ready for rank in departure.writers):
        return
    assert job.record.last_outcome is not None
    layout = job.record.plan.layout
    for index in range(len(layout.replicas)):
        writers = layout.model_copy(index).ranks
        if all(job.members[rank].ready and planning.can_go_on(job, rank) for rank in writers):
            departure.writers = writers
            job.say("progress", f"writing a checkpoint of iteration {job.record.committed}")
            order = m.Save(epoch=job.record.plan.epoch, replica=index, finish=job.record.last_outcome)
            job.order(writers, order)
            return
    departure.writers = ()
    if not job.transition.waiting:
        _leave(job, _no_checkpoint(job, "no replica is whole"))


def _no_checkpoint(job: Job, why: str) -> str:
    return f"no checkpoint of it, {why}; {_newest(job)}"


def _newest(job: Job) -> str:
    return f"the newest one is of iteration {job.checkpointed}" if job.checkpointed else "this run has written none"


def _unsaved(job: Job) -> str:
    return f"no checkpoint of iteration {job.record.committed} was waited for; {_newest(job)}"


def _leave(job: Job, outcome: str) -> None:
    """End, once it is known what for; asked again at each event until then."""
    departure = job.departure
    assert departure is not None
    if not departure.told:
        return
    comes_back = departure.meaning in ("warning", "time-limit", "preempted")
    requeue = comes_back and job.settings.on_warning == "requeue"
    cause = {
        "warning": "time is running out",
        "time-limit": "the time limit is reached",
        "cancelled": "the job is cancelled",
        "preempted": "the job is preempted",
    }.get(departure.meaning or "", f"received {_name(departure.signal)}" if departure.signal else "asked to stop")
    reason = f"{cause}: stopped after iteration {job.record.committed}; {outcome}"
    number = signals.SIGINT if departure.signal == signals.SIGINT else signals.SIGTERM
    incidents.end(job, 75 if requeue else 128 + number, reason, requeue=requeue)


def _sorted(nodes: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(nodes, key=natural))


def _name(signal: int) -> str:
    try:
        return signals.Signals(signal).name
    except ValueError:
        return f"signal {signal}"
