"""Interpret signals that agents receive: they may be meant for the whole job, or for one node.

Slurm, an administrator or the user may send a signal to all processes of a job, or only to those of one node. A
replacement's node has a Slurm job of its own. Called by `shutdown`, which stops the job if the signal is meant for it.
"""

from __future__ import annotations

import signal as signals
from typing import NamedTuple

from resihp.controller import interface as api
from resihp.controller.nodes import replacements
from resihp.controller.state.job import Job
from resihp.controller.state.requests import COINCIDENCE_S, AgentSignal, Meaning
from resihp.words import natural

WARNING_SIGNALS = frozenset((signals.SIGUSR1, signals.SIGUSR2))
"""Signals that Slurm sends some time before the end, if the user requested them with `--signal`."""
_MEANINGS: tuple[Meaning | None, ...] = (None, "warning")
"""The meaning of a signal outside `WARNING_SIGNALS` (None: Slurm is asked), then of a signal in `WARNING_SIGNALS`."""
ENDS_SOON_S = 600.0
"""Seconds before Slurm's time limit from which a replacement's node no longer leaves on a warning: the whole job ends
soon, and a change of the layout would not pay."""


class JobSignal(NamedTuple):
    """A signal that is meant for the whole job. `meaning`: None if Slurm has to be asked."""

    signal: int
    meaning: Meaning | None
    cause: str


def interpret(job: Job, event: api.AgentSignalled) -> JobSignal | None:
    """Note a signal to an agent; return it if it is meant for the whole job, because agents of several nodes, or of the
    only one, received it at once. A signal to the agent of a replacement says nothing about the other nodes."""
    node = job.nodes.get(event.node)
    if node is None or not node.alive or event.signal == signals.SIGCONT:
        return None
    job.agent_signals[event.node] = AgentSignal(event.signal, job.now)
    if job.stop_request is not None:
        job.stop_request.nodes.add(event.node)
    guests = replacements.guests(job)
    if event.node in guests:
        _note_guests_end(job, event)
        return None
    latest = {name: received for name, received in recent(job).items() if name not in guests}
    alone = sum(other.alive for name, other in job.nodes.items() if name not in guests) == 1
    for meaning in _MEANINGS:
        nodes = [name for name, received in latest.items() if _MEANINGS[received.signal in WARNING_SIGNALS] == meaning]
        if len(nodes) > 1 or (nodes and alone):
            number = latest[nodes[0]].signal
            agents = f"agents of {', '.join(sorted(nodes, key=natural))}"
            return JobSignal(number, meaning, f"{agents} received {name_of(number)}")
    return None


def _note_guests_end(job: Job, event: api.AgentSignalled) -> None:
    """Note that Slurm ends the Slurm job of a replacement, so that its node leaves in order."""
    is_warning = event.signal in WARNING_SIGNALS
    if is_warning and job.deadline is not None and job.deadline - job.now < ENDS_SOON_S:
        job.agent_signals[event.node].reported = True
    elif job.stop_request is None and (is_warning or event.signal == signals.SIGTERM):
        job.agent_signals[event.node].reported = True
        job.maintenance.ending.add(event.node)
        job.say("notice", f"node {event.node}: Slurm ends this replacement ({name_of(event.signal)})")
        job.do(api.WatchReplacements())


def recent(job: Job) -> dict[str, AgentSignal]:
    """Return the signals to agents within the last `COINCIDENCE_S` seconds, by node."""
    return {name: received for name, received in job.agent_signals.items() if job.now - received.at <= COINCIDENCE_S}


def report_lone(job: Job) -> None:
    """Report signals that only one agent received."""
    for name, received in job.agent_signals.items():
        if received.reported or job.now - received.at <= COINCIDENCE_S:
            continue
        received.reported = True
        if job.stop_request is None and job.nodes[name].alive:
            job.say("notice", f"node {name}: only its agent received {name_of(received.signal)}; the job goes on")


def name_of(signal: int) -> str:
    """Return a signal's name, such as `SIGTERM`."""
    try:
        return signals.Signals(signal).name
    except ValueError:
        return f"signal {signal}"
