"""Change from one plan to the next, as a transaction: park, decide, propose, build beside the old plan, take effect.

No rank gives up state before every rank has acknowledged the new plan. Until `PlanInEffect` is in the journal, the plan
in effect (`JobRecord.plan`) is the old one, and the old layout says which rank holds which state. Any failure before
that parks all ranks again, in the next epoch, and the transition starts again from the old plan. `planning` chooses the
plan; `consent` handles the ranks' answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from resihp.controller import interface as api
from resihp.controller import iterations
from resihp.controller.ahead import last_copies
from resihp.controller.fail_stop import endings, incidents
from resihp.controller.planning import next_plan, situations
from resihp.controller.planning.choices import Choice
from resihp.controller.rounds import rollback
from resihp.controller.state.job import Job
from resihp.controller.state.members import Member
from resihp.controller.state.transitions import Outlook, Pause, Transition
from resihp.errors import LayoutError, NotEnoughDevicesError
from resihp.parallelism.plan import Plan
from resihp.protocol import messages as m
from resihp.record.journal import PlanDecided, PlanInEffect, PlanRefused
from resihp.record.slowness import unaffecting
from resihp.scheduler.cost.layout_change import communicators
from resihp.scheduler.explained.recorded import basis_of


def park(job: Job, reason: str, cautious: bool = False) -> None:
    """Begin a new epoch: order all ranks to stop training and report. A transition that was in progress starts
    again."""
    verdicts = job.pause.failures if job.pause is not None else []
    job.pause = None
    ready = job.ready
    _open(job, reason, ready, cautious=cautious)
    assert job.transition is not None
    job.transition.failures += verdicts
    job.order(ready, m.Park(epoch=job.epoch, reason=reason))
    decide_when_parked(job)


def pause(
    job: Job, reason: str, failures: Iterable[int] = (), *, resizes: bool = False, tuned: Plan | None = None
) -> None:
    """Ask all ranks to stop between two iterations. The transition begins once the first rank with work has stopped.

    `failures`: numbers of the failures that the new plan responds to. `tuned`: the plan to continue with, unless
    something else happens first.
    """
    job.move("pausing")
    job.say("progress", f"{reason}: pausing after an iteration")
    job.pause = Pause(
        epoch=job.epoch + 1, reason=reason, asked=set(), failures=list(failures), resizes=resizes, tuned=tuned
    )
    ask_to_pause(job, job.ready)


def resize(job: Job) -> None:
    """Begin a transition to a new plan if the next iteration has another number of micro-batches.

    Ranks know the batch sizes and have stopped by themselves, so the order to park reaches them while they wait. The
    record alone shows whether a plan is due, so a new leader gives the same order.
    """
    if not job.record.trains or not job.record.trains.ramp or not job.may_interrupt or job.furthest >= job.record.goal:
        return
    assert job.record.plan is not None
    due, now = job.declaration.batch_sizes.at(job.furthest + 1), job.record.plan.micro_batches
    if due != now:
        reason = f"iteration {job.furthest + 1} has {due} micro-batches, those before it had {now}"
        pause(job, reason, resizes=True)


def ask_to_pause(job: Job, ranks: tuple[int, ...]) -> None:
    assert job.pause is not None
    job.pause.asked.update(ranks)
    job.order(ranks, m.Park(epoch=job.pause.epoch, reason=job.pause.reason, after_iteration=True))


def _open(job: Job, reason: str, ranks: tuple[int, ...], *, cautious: bool = False, graceful: bool = False) -> None:
    old = job.transition
    job.epoch += 1
    was = job.stage
    job.move("parking")
    job.stuck = None
    job.transition = Transition(
        epoch=job.epoch,
        began_at=old.began_at if old else job.now,
        stage_at=job.now,
        committed_before=old.committed_before if old else job.record.committed,
        initial=bool(old and old.initial),
        attempts=old.attempts + 1 if old else 1,
        graceful=graceful or bool(old and old.graceful and was != "first-iteration"),
        urged=not graceful,
        cautious=cautious,
        waiting=set(ranks),
        asked=set(ranks),
        failures=old.failures if old else [],
        reason=reason,
    )
    for rank in ranks:
        job.members[rank].finished = False


def parked(job: Job, member: Member, parked: m.Parked) -> None:
    if parked.outcome is not None and max(parked.holds, default=0) >= job.record.rollbacks.epoch:
        iterations.note_outcome(job, member, parked.epoch, parked.outcome)
    if job.pause is not None and parked.epoch == job.pause.epoch:
        _paused(job, member, parked)
        return
    transition = job.transition
    if transition is None or job.stage != "parking" or parked.epoch != job.epoch:
        return
    if member.rank not in transition.asked:
        return
    transition.parked[member.rank] = parked
    transition.waiting.discard(member.rank)
    decide_when_parked(job)


def _paused(job: Job, member: Member, parked: m.Parked) -> None:
    """Handle an answer to a request to pause. The first answer of a rank with work begins the transition, unless
    training is done."""
    pause = job.pause
    assert pause is not None
    pause.answers[member.rank] = parked
    if member.rank not in job.record.working:
        return
    job.pause = None
    if parked.stepped >= job.record.goal:
        job.move("running")
        return
    stuck = job.stuck
    verdicts = pause.failures
    _open(job, pause.reason, tuple(rank for rank in job.ready if rank in pause.asked), graceful=True)
    assert job.transition is not None
    job.transition.resizes, job.transition.tuned = pause.resizes, pause.tuned
    job.transition.parked = {rank: answer for rank, answer in pause.answers.items() if rank in job.transition.asked}
    job.transition.waiting -= job.transition.parked.keys()
    job.transition.failures += verdicts
    if stuck is not None:
        broke(job, f"rank {stuck[1]}: {stuck[2]}")
    decide_when_parked(job)


def broke(job: Job, evidence: str) -> None:
    """Order the remaining ranks to park at once, because communication failed before all ranks had finished the
    iteration. The iteration is then redone, or some ranks have to finish its step."""
    transition = job.transition
    assert transition is not None
    if job.stage == "parking" and transition.graceful:
        transition.graceful = False
        transition.reason += f"; communication failed: {evidence}"
        urge(job, evidence)


def urge(job: Job, reason: str) -> None:
    """Order the ranks that have not parked to park at once, in the same epoch."""
    transition = job.transition
    assert transition is not None
    if job.stage == "parking" and not transition.urged:
        transition.urged = True
        job.order(tuple(sorted(transition.waiting)), m.Park(epoch=transition.epoch, reason=reason))


def is_settling(job: Job) -> bool:
    """Return whether all ranks have parked or have been ordered to park at once. In either case another loss needs no
    new order."""
    transition = job.transition
    return transition is not None and job.stage == "parking" and (transition.urged or not transition.waiting)


def go_on_without(job: Job, lost_ranks: set[int]) -> None:
    """Continue the transition without ranks that will never park or no longer count. A plan that was refused while they
    took part may work without them, so the transition is no longer cautious."""
    assert job.transition is not None
    job.transition.cautious = False
    job.transition.asked -= lost_ranks
    job.transition.waiting -= lost_ranks
    for rank in lost_ranks:
        job.transition.parked.pop(rank, None)
    decide_when_parked(job)


def decide_when_parked(job: Job) -> None:
    """Once all surviving ranks have parked, decide whether the iteration is committed or redone, and propose the next
    plan."""
    transition = job.transition
    if transition is None or job.stage != "parking" or transition.waiting:
        return
    if job.stop_request is not None:
        return  # no plan comes after this one: `shutdown` saves the state, and ends the job
    transition.park_s = job.now - transition.began_at
    iterations.commit_up_to(job, max(job.reports, default=job.record.committed))
    if job.incidents:
        transition.reason = "; ".join(incident.cause for incident in job.incidents)
    if endings.same_error_everywhere(job):
        return
    transition.base = situations.base(job)
    lost_state = situations.state_lost(job, transition.base)
    if lost_state is not None and rollback.waits(job):
        return
    cause = incidents.cause_from_outside(job)
    transition.failures += incidents.log_incidents(job)
    if lost_state is not None:
        reason = f"{cause}; {lost_state}" if cause else lost_state
        if not rollback.begin(job, reason):
            endings.too_few(job, reason)
            return
        transition.base = None
    if rollback.awaits_processes(job):
        return
    transition.action = _action(job, transition)
    transition.finish = job.record.last_outcome
    job.move("proposing")
    transition.stage_at = job.now
    choice = _decide(job, transition)
    if choice is not None:
        transition.reason = f"{transition.reason}; {choice.reason}"
        propose(job, choice)


def _action(job: Job, transition: Transition) -> Outlook:
    """Decide whether the iteration in progress is committed or redone, or whether there was none."""
    if transition.initial and job.record.committed == transition.committed_before:
        return "start"
    stepped = {answer.stepped for rank, answer in transition.parked.items() if situations.can_go_on(job, rank)}
    if transition.graceful and stepped <= {job.record.committed}:
        return "between"
    return "commit" if job.record.committed > transition.committed_before else "redo"


def _decide(job: Job, transition: Transition) -> Choice | None:
    """Return the best plan, or a cautious plan after a refusal. Return None if there is no plan; the job has then
    ended."""
    available = set(transition.parked)
    if transition.resizes and not transition.cautious:
        with suppress(LayoutError):
            return next_plan.resized(job, job.epoch, available, transition.base)
    if transition.tuned is not None and not transition.cautious:
        with suppress(LayoutError):
            return next_plan.tuned(job, job.epoch, available, transition.base, transition.tuned)
    if not transition.cautious:
        try:
            return next_plan.best(job, job.epoch, available, transition.base)
        except (LayoutError, NotEnoughDevicesError) as error:
            refused(job, None, str(error))
            transition.cautious = True
    try:
        return next_plan.cautious(job, job.epoch, available, transition.base)
    except NotEnoughDevicesError as error:
        endings.too_few(job, str(error))
    except LayoutError as error:
        refused(job, None, str(error))
        endings.end(job, 1, f"no plan can be carried out: {error}")
    return None


def refused(job: Job, rank: int | None, reason: str) -> None:
    """Record and report that `rank` refused a plan, or that the planner found none (`rank` None). No rank has acted on
    the plan."""
    job.log(PlanRefused(epoch=job.epoch, rank=rank, reason=reason))
    if rank is None:
        job.say("warning", f"no plan for epoch {job.epoch}: {reason}")
    else:
        job.say("warning", f"{job.where(rank)}: refuses the plan of epoch {job.epoch}: {reason}")


def propose(job: Job, choice: Choice) -> None:
    transition, plan = job.transition, choice.plan
    assert transition is not None
    transition.plan = plan
    transition.next_iteration = job.record.committed + 1
    transition.waiting = set(plan.layout.ranks)
    job.log(
        PlanDecided(
            plan=plan,
            next_iteration=transition.next_iteration,
            action=transition.action,
            finish=transition.finish,
            reason=transition.reason,
            bytes_planned=situations.bytes_planned(job, transition.base, plan),
            predicted=choice.predicted,
            present=choice.present,
            unit=choice.situation.unit,
            basis=basis_of(choice.situation, choice.kept_out),
            considered=choice.considered,
            unaffected_by=unaffecting(job.record, plan.without_mirrors().layout),
        )
    )
    job.order(
        plan.layout.ranks,
        m.Propose(
            plan=plan,
            next_iteration=transition.next_iteration,
            base=transition.base,
            checkpoint="" if transition.base is not None else job.record.rollbacks.loaded(job.record.trains)[1],
            nodes=job.node_of,
        ),
    )


def planning_took(job: Job, event: api.PlanningTook) -> None:
    """Note the seconds of planning for the transition in progress."""
    if job.transition is not None and job.transition.epoch == event.epoch:
        job.transition.planning_s = event.seconds


def go_when_confirmed(job: Job) -> None:
    """Order all ranks to build the new plan once every rank has confirmed it: they finish the step, build
    communicators, and copy state beside the state that they hold."""
    transition = job.transition
    if transition is None or job.stage != "proposing" or transition.waiting:
        return
    assert transition.plan is not None
    transition.plan_s = job.now - transition.stage_at
    job.move("building")
    transition.stage_at = transition.moved_at = job.now
    transition.waiting = set(transition.plan.layout.ranks)
    job.stuck = None
    job.order(
        transition.plan.layout.ranks,
        m.Go(
            epoch=job.epoch,
            next_iteration=transition.next_iteration,
            finish=transition.finish,
        ),
    )


def acknowledged(job: Job, member: Member, ready: m.Ready) -> None:
    """Note that a rank has received all state for the new plan. It still holds all state for the old plan."""
    transition = job.awaiting(member, ready.epoch, "building")
    if transition is None:
        return
    transition.groups_s = max(transition.groups_s, ready.groups_s)
    transition.state_s = max(transition.state_s, ready.state_s)
    transition.bytes_moved += ready.bytes_received
    transition.extra_bytes = max(transition.extra_bytes, ready.extra_bytes)
    transition.moved_at = job.now
    transition.waiting.discard(member.rank)
    if not transition.waiting:
        _take_effect(job, transition)


def _take_effect(job: Job, transition: Transition) -> None:
    """Commit the transaction: from now on the new plan's layout says which rank holds which state."""
    assert transition.plan is not None
    before, plan = job.record.plan, transition.plan
    # State that is loaded or initialised instead of moved says nothing about the time of later changes.
    state_s = 0.0 if transition.base is None else transition.state_s
    job.log(
        PlanInEffect(
            epoch=job.epoch,
            took_s=transition.park_s + transition.plan_s + transition.groups_s + state_s,
            busiest_bytes=transition.extra_bytes,
            communicators=communicators(plan.layout),
        )
    )
    job.stand_at(job.record.active, job.record.committed)
    job.order(plan.layout.ranks, m.Begin(epoch=job.epoch, evaluated=job.record.evaluated))
    job.move("first-iteration")
    transition.cautious = False
    transition.stage_at = transition.begun_at = job.now
    job.progress_at = job.now
    verb = "started" if transition.initial else "resumed"
    job.say("notice", f"{verb}: {plan.describe()}, epoch {job.epoch}, iteration {job.record.committed + 1}")
    last_copies.report(job, before, plan)
    if job.record.committed >= job.record.goal:
        iterations.transition_done(job)
    iterations.halt_when_finished(job)
