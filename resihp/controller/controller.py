"""Entry point of the controller: takes one event about a running job and returns actions.

Uses no clock, no socket and no tensor. The supervisor shell, the simulator and the fuzz harness all call this same
code. The durable state is `Job.record`, and only `Job.log` changes it. The table in `lifecycle` defines the stages of a
job's life. Each of the other modules of this package makes one kind of decision.

The change from one plan to the next is a transaction. In stage `parking` every rank reports its progress; in stage
`proposing` every rank checks the plan and confirms it; in stage `building` ranks copy state beside their existing
state. Only when all ranks have acknowledged does the plan take effect (in the journal), and ranks free the old state. A
failure before that moment parks all ranks again, in the next epoch, and the plan in effect is still the old one.

`startup` the start of a job · `early_losses` losses before the first plan · `transition` the change from one plan to
the next · `planning` the choice of a plan and of the state it starts from · `consent` the ranks' answers to a plan ·
`iterations` commits · `failures` losses · `joins` processes that join · `watchdog` silence and timeouts · `expectation`
healthy iteration times · `slowness` slow devices and links · `probing` probes · `standings` operators' questions to the
detector · `fault_injection` injected faults · `shutdown` requests to stop · `upkeep` the nodes ·
`replacements` new nodes · `printed_iterations` scripts that do not report · `ahead` plans made in advance ·
`takeover` the start of a new supervisor · `incidents` root causes · `endings` the end of the job.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self, assert_never

from resihp.controller import (
    consent,
    fault_injection,
    iterations,
    replan_policy,
    shutdown,
    startup,
    takeover,
    transition,
)
from resihp.controller import interface as api
from resihp.controller.ahead import asking
from resihp.controller.fail_slow import expectation, slowness, standings
from resihp.controller.fail_stop import early_losses, endings, failures, watchdog
from resihp.controller.fail_stop.onsets import Commit
from resihp.controller.interface import AnyAction, AnyEvent, Dependencies
from resihp.controller.nodes import drains, replacements, reservations, upkeep
from resihp.controller.rounds import growth, restarts
from resihp.controller.scripts import printed_iterations, script_checkpoints, script_hangs
from resihp.controller.state.job import Job
from resihp.controller.state.members import Member
from resihp.controller.state.transitions import Transition
from resihp.controller.tuning import retuning
from resihp.protocol import messages as m
from resihp.record.journal import AnyEntry
from resihp.settings import Settings

_HEARD_WHILE_CLOSING = (
    *(api.AgentLost, api.AgentBeat, api.Tick),
    *(api.InjectAsked, api.StandingAsked, api.StopAsked, api.CheckpointAsked),
    *(api.Signalled, api.AgentSignalled, api.TimeLeft, api.StopMeaning, api.QuorumLost),
    *(api.DrainStep, api.ReleaseAnswered, api.ReplacementNews, api.SlurmSees, api.ReservationAhead),
)
"""Events that still matter in stage `closing`: losses of nodes, requests, and answers of Slurm."""


class Controller:
    """The state machine of one job. `handle` is its entry point for events, and the returned actions are its only
    output."""

    def __init__(self, settings: Settings, dependencies: Dependencies | None = None) -> None:
        self.job = Job(settings, dependencies=dependencies)

    @classmethod
    def recover(
        cls,
        settings: Settings,
        entries: Iterable[AnyEntry],
        dependencies: Dependencies | None = None,
        commits: Iterable[Commit] = (),
    ) -> Self:
        """Return a controller that replaces one that died. `entries`: the dead controller's journal. The caller then
        sends an `AgentJoined` event for each agent that reconnects.

        `commits`: the last committed iterations, with times in seconds before now (negative). They date failures that
        happened before the take-over. Raises ProtocolError for a job that has ended.
        """
        controller = cls(settings, dependencies)
        controller.job = takeover.begin(settings, entries, controller.job.dependencies, commits)
        return controller

    def journaled(self, entry: AnyEntry) -> None:
        """Apply an entry that the shell wrote into the journal by itself, such as a completed checkpoint."""
        self.job.apply(entry)

    def handle(self, event: AnyEvent, now: float) -> list[AnyAction]:
        """Handle one event at time `now` (monotonic seconds); return the actions to carry out, in order."""
        job = self.job
        job.now = max(now, job.now)
        job.actions = []
        job.lifecycle.hear(job.now, event)
        if job.stage == "ended":
            return []
        if job.started_at is None:
            job.started_at = job.progress_at = job.now
            job.onsets.begin(job.now)
        waiting = [event]
        if job.stage == "recovering":
            waiting = takeover.handle(job, event)
        for pending in waiting:
            if not job.has_ended and (job.stage != "closing" or isinstance(pending, _HEARD_WHILE_CLOSING)):
                _handle(job, pending)
        shutdown.proceed(job)
        if job.stage == "closing":
            upkeep.watch_lost(job)
            endings.review(job)
        elif job.stage not in ("recovering", "ended"):
            _review(job)
        return job.actions

    def check(self) -> None:
        """Assert the invariants between two events. Tests call this after each event."""
        job = self.job
        if job.record.plan is not None and job.training:
            dead = [rank for rank in job.record.active if not job.members[rank].alive]
            done = job.record.committed >= job.record.goal
            assert not dead or done, f"running with dead ranks {dead}"
        if job.transition is not None and job.stage != "ended":
            _check_transition(job, job.transition)
        if job.pause is not None:
            assert job.training, "pausing while not training"
            assert job.transition is None, "pausing in a transition"
        assert job.furthest == max((member.stepped for member in job.members.values()), default=0)
        assert all(i > job.record.committed for i in job.reports), "reports of a committed iteration are still held"


def _check_transition(job: Job, under_way: Transition) -> None:
    assert under_way.epoch == job.epoch, "a transition of an older epoch is under way"
    assert all(job.members[rank].ready for rank in under_way.waiting), "waiting for a rank that is gone"
    assert under_way.waiting <= under_way.asked, "waiting for a rank that takes no part"
    assert job.stage != "building" or job.record.plan is not under_way.plan, "in effect too early"


def _review(job: Job) -> None:
    """Let each policy react to the new state of the job after an event.

    The order of the calls is itself a policy. Each policy sees the decisions of the policies before it. Once one of
    them interrupts training, the policies after it cannot interrupt training again.
    """
    fault_injection.end_slowness(job)  # before speeds are judged
    reservations.review(job)
    iterations.review_askers(job)  # a requested checkpoint is ordered before a change of plan can park its ranks
    slowness.review(job)  # verdicts before plans, which are compared by the speeds that verdicts give
    early_losses.review(job)  # training begins once the start's probes have been judged
    transition.resize(job)  # due in any case, so before changes of plan that are weighed
    replan_policy.review_copies(job)  # keeping state comes before saving time
    replan = replan_policy.review(job) or retuning.review(job)  # failures and newcomers come before tuning
    if replan is not None:
        transition.pause(job, replan.reason, replan.failures, tuned=replan.plan)
    upkeep.review(job)  # with the plan decided: it shows which nodes have work left
    asking.review(job)  # last: plans ahead are for a job in which nothing else is due


def _handle(job: Job, event: AnyEvent) -> None:
    match event:
        case api.AgentJoined():
            startup.agent_joined(job, event)
        case api.AgentLost():
            failures.node_lost(job, event.node, event.reason, event.how, cannot_start=event.cannot_start)
        case api.AgentBeat():
            watchdog.beat(job, event)
        case api.WorkerSpawned():
            startup.spawned(job, event)
        case api.SpawnRefused():
            startup.spawn_refused(job, event)
        case api.WorkerExited():
            failures.exited(job, event)
        case api.WorkerSaid():
            _said(job, event)
        case api.WorkerPrinted() | api.WorkersSeen() | api.CheckpointsFound() | api.ProcessesEnded():
            _learned_of_script(job, event)
        case api.InjectAsked() | api.StandingAsked() | api.StopAsked() | api.CheckpointAsked():
            _requested(job, event)
        case api.CheckpointLost():
            iterations.answer_askers(job, False, event.reason)
        case api.Signalled() | api.AgentSignalled() | api.TimeLeft() | api.StopMeaning() | api.QuorumLost():
            shutdown.hear(job, event)
        case api.DrainStep() | api.ReleaseAnswered() | api.ReplacementNews() | api.SlurmSees() | api.ReservationAhead():
            _answered_by_slurm(job, event)
        case api.NodesRemembered():
            job.usual_speeds.update(event.usual)
        case api.Thought():
            asking.thought(job, event)
        case api.PlanningTook():
            transition.planning_took(job, event)
        case api.Tick():
            watchdog.tick(job)
        case _:
            assert_never(event)


def _learned_of_script(
    job: Job, event: api.WorkerPrinted | api.WorkersSeen | api.CheckpointsFound | api.ProcessesEnded
) -> None:
    """Handle what was learned about a script that does not declare a model."""
    match event:
        case api.WorkerPrinted():
            printed_iterations.printed(job, event.printed)
        case api.WorkersSeen():
            script_hangs.inspected(job, event)
        case api.CheckpointsFound():
            _checkpoints_found(job, event)
        case api.ProcessesEnded():
            restarts.processes_ended(job, event)
        case _:
            assert_never(event)


def _checkpoints_found(job: Job, event: api.CheckpointsFound) -> None:
    """Take the result of a search, for which a start of the script may have waited."""
    has_news = script_checkpoints.found(job, event)
    if job.stage == "restarting":
        restarts.judge(job)
    elif job.stage == "gathering" and not job.record.placements:
        startup.start_workers(job)
    elif has_news:
        growth.review(job)


def _requested(job: Job, event: api.InjectAsked | api.StandingAsked | api.StopAsked | api.CheckpointAsked) -> None:
    """Handle an operator's request."""
    match event:
        case api.InjectAsked():
            fault_injection.inject_asked(job, event)
        case api.StandingAsked():
            standings.asked(job, event)
        case api.StopAsked():
            shutdown.stop_asked(job, event)
        case api.CheckpointAsked():
            iterations.checkpoint_asked(job, event)
        case _:
            assert_never(event)


def _answered_by_slurm(
    job: Job,
    event: api.DrainStep | api.ReleaseAnswered | api.ReplacementNews | api.SlurmSees | api.ReservationAhead,
) -> None:
    """Handle an answer or a report from Slurm about a node or a replacement request."""
    match event:
        case api.DrainStep():
            drains.drain_step(job, event)
        case api.ReleaseAnswered():
            upkeep.release_answered(job, event)
        case api.ReplacementNews():
            replacements.news(job, event)
        case api.SlurmSees():
            upkeep.slurm_sees(job, event)
        case api.ReservationAhead():
            reservations.ahead(job, event)
        case _:
            assert_never(event)


def _said(job: Job, event: api.WorkerSaid) -> None:
    member = job.members.get(event.rank)
    if member is None:
        return
    job.nodes[member.node].last_beat = job.now  # any message is a sign of life
    if member.alive or isinstance(event.message, m.Stepped | m.Raised):
        _take_message(job, member, event.message)


def _take_message(job: Job, member: Member, message: m.WorkerMessage) -> None:
    match message:
        case m.Declare():
            startup.declared(job, member, message)
        case m.Refuse():
            startup.refused(job, member, message)
        case m.Confirm():
            consent.confirmed(job, member, message)
        case m.Object():
            consent.objected(job, member, message)
        case m.Ready():
            transition.acknowledged(job, member, message)
        case m.Workload():
            expectation.iteration_begins(job, message)
        case m.Stepped():
            iterations.stepped(job, member, message)
        case m.Evaluated():
            iterations.evaluated(job, message)
        case m.Parked():
            transition.parked(job, member, message)
        case m.Stuck():
            failures.stuck(job, member, message)
        case m.Raised():
            failures.raised(job, member, message)
        case m.Finished():
            iterations.finished(job, member)
        case m.FaultDue():
            fault_injection.fault_due(job, member, message.fault)
        case m.CheckpointPart():
            iterations.checkpoint_part(job, member, message)
        case m.Probed():
            slowness.probed(job, member, message)
        case m.ScriptSaved():
            script_checkpoints.reported(job, message)
        case m.Progress():
            pass  # heartbeats carry the same data
        case _:
            assert_never(message)
