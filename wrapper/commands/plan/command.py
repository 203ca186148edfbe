"""`resihp plan`: what would be done for given failures, and what it would come to.

Reads the question from options (`resihp.scheduler.what_if.question`) or from a job's ledger
(`wrapper.commands.plan.of_job`), has it decided by the planner, and shows the answer: JSON for programs, tables and
sentences for people, a picture on request (`wrapper.commands.plan.picture`). No job is needed, and none is touched.
Data goes to stdout, messages to stderr. Everything that takes time to import is imported in the functions.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from resihp.errors import PlanError, UsageError
from wrapper.commands.options import command_of
from wrapper.output.render import duration, literal

if TYPE_CHECKING:
    from resihp.parallelism.plan import Plan
    from resihp.scheduler.explained.explanation import Explanation
    from resihp.scheduler.situation import Decision, Situation
    from resihp.scheduler.what_if.answer import WhatIfAnswer
    from resihp.scheduler.what_if.question import Question

TUNED_CHUNKS = 4
"""Virtual stages of a stage that --tune tries at most. A job begins with one (`[layout] tune`)."""


FASTER = 0.995
"""Of the time before: from here on an iteration is shown to take less."""
TRIALS = 20
"""Of a search between two looks at the clock."""


class PlannerChoice(str, Enum):  # noqa: UP042 - StrEnum's help text shows differently in older Typer
    """Who decides: ours, the published heuristic, its first steps, or giving up replicas."""

    resihp = "resihp"
    resihp_paper = "resihp-paper"
    paper_tp_pp = "paper-tp-pp"
    paper_tp = "paper-tp"
    drop_replica = "drop-replica"


def register(app: typer.Typer) -> None:
    """Add `resihp plan` to the command line."""
    app.command()(command_of(PlanOptions, plan))


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What the command line said."""

    job: Annotated[str | None, typer.Argument(help="A job, instead of --model; the newest if left out.")] = None
    model: Annotated[str | None, typer.Option(help="A known model, or a TOML file.", show_default=False)] = None
    layout: Annotated[str | None, typer.Option(help="Degrees: tp=4,dp=2,pp=4.", show_default=False)] = None
    micro_batches: Annotated[int, typer.Option(help="Of each replica, an iteration.")] = 8
    sequence_length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 4096
    micro_batch_size: Annotated[int, typer.Option(help="Sequences of a micro-batch.")] = 1
    gpus_per_node: Annotated[int, typer.Option(help="Devices of a node.")] = 8
    hardware: Annotated[
        str | None, typer.Option(help="a100, h100, or a TOML file.", show_default="a job's own, or a100")
    ] = None
    fail: Annotated[list[str] | None, typer.Option(help="Ranks that are gone: 5,17 or 8-11.")] = None
    fail_node: Annotated[list[str] | None, typer.Option(help="Nodes that are gone: n3.")] = None
    slow: Annotated[list[str] | None, typer.Option(help="A rank's speed: 12:0.5.")] = None
    slow_link: Annotated[list[str] | None, typer.Option(help="A link's speed: n1-n2:0.3.")] = None
    spares: Annotated[int, typer.Option(help="Further nodes, standing by.")] = 0
    schedule: Annotated[str, typer.Option(help="1f1b, interleaved or zero-bubble.")] = "1f1b"
    virtual_stages: Annotated[int, typer.Option(help="Layer chunks of each stage, for interleaved.")] = 1
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Split activations along the sequence.")
    ] = False
    zero_1: Annotated[bool, typer.Option("--zero-1", help="Replicas share the optimizer's state.")] = False
    ignore_memory: Annotated[
        bool, typer.Option("--ignore-memory", help="Plan as if devices had memory for any layout.")
    ] = False
    tune: Annotated[
        bool, typer.Option("--tune", help="The first layout: layers spread by what they cost, orders of their own.")
    ] = False
    search: Annotated[
        float, typer.Option(min=0.0, max=86400.0, help="Seconds to look for a better plan than the one found at once.")
    ] = 0.0
    hurts: Annotated[
        bool, typer.Option("--hurts", help="Which single loss would hurt most, of what --fail and the like leave.")
    ] = False
    planner: Annotated[PlannerChoice, typer.Option(help="Ours, or one to compare it with.")] = PlannerChoice.resihp
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False
    plot: Annotated[Path | None, typer.Option(help="Draw the pipelines into this file.", show_default=False)] = None
    ledger: Annotated[str | None, typer.Option("--ledger", help="Another ledger's URL.", show_default=False)] = None


def plan(options: PlanOptions) -> None:
    """What would be done if devices failed or slowed down, and what it would come to.

    Example: resihp plan --model llama2-13b --layout tp=4,dp=2,pp=4
    --fail 5 --slow 12:0.5 --slow-link n1-n2:0.3

    Without --model and --layout: of a job, as it is now. Its own slow devices
    count; --fail and the like come on top. Example: resihp plan 4711 --fail-node n3

    Else ranks fill nodes n1, n2, ... in order. Known models: llama2-7b, -13b, -30b,
    -70b, qwen2.5-7b, -14b, -32b, -72b, llama3-405b. Times are estimates from
    operations and bytes. Options that name ranks, nodes and links take several,
    with commas, and may be repeated.

    Which single loss would hurt most: resihp plan 4711 --hurts
    """
    import msgspec

    from resihp.scheduler.explained.explanation import as_json, explain
    from resihp.scheduler.transition_cost import NO_COST
    from resihp.scheduler.what_if import answer, question

    if options.hurts and (options.search or options.plot is not None):
        raise UsageError("plan --hurts: asks about many plans; leave --search and --plot out")
    asked, base, model, hardware = _asked(options)
    situation = question.pose(asked, base)
    if options.hurts:
        _hurts(options, asked, base, model, hardware, situation)
        return
    decision, planning_s = _decision(options, asked, base, situation)
    found = answer.answer(asked, base, situation, decision)
    explained = explain(decision.plan, decision.seconds, situation, healthy=None if options.tune else base)
    if options.tune:
        found = msgspec.structs.replace(found, cost=NO_COST)  # nothing runs yet
    for remark in found.remarks:
        print(f"resihp: {literal(remark)}", file=sys.stderr)
    if options.as_json:
        told = answer.as_json(found, planning_s) | {"explanation": as_json(explained)}
        print(json.dumps(told, allow_nan=False))
    else:
        again = _search_command(options) if happened(options) else ""
        _show(asked, model, hardware, found, planning_s, explained, first=options.tune, again=again)
    if options.plot is not None:
        from wrapper.commands.plan.picture import draw

        draw(options.plot, asked, found, situation)


def _hurts(options: PlanOptions, asked: Question, base: Plan, model: str, hardware: str, situation: Situation) -> None:
    """Which single loss would hurt most: of the plan in effect, or where something was asked, of what answers it."""
    from rich.console import Console

    from resihp.scheduler.what_if import losses
    from wrapper.commands.plan import hurts

    decide = _decider(options.planner)
    _warm(decide)
    plan = _decision(options, asked, base, situation)[0].plan if happened(options) or options.tune else base
    began = time.perf_counter()
    with Console(stderr=True).status("") as status:  # only on a terminal
        found = losses.after_each(
            situation, plan, decide, lambda done, of: status.update(f"{done} of {of} losses asked about")
        )
    planning_s = time.perf_counter() - began
    if asked.zero_1:
        print(f"resihp: {hurts.SHARED}", file=sys.stderr)
    if options.as_json:
        print(json.dumps(hurts.as_json(asked, found, planning_s), allow_nan=False))
    else:
        hurts.show(asked, model, hardware, found, planning_s)


def happened(options: PlanOptions) -> bool:
    """Whether something is asked to have failed or to be slow."""
    return bool(options.fail or options.fail_node or options.slow or options.slow_link)


def _search_command(options: PlanOptions) -> str:
    of = f" {options.job}" if options.job else ""
    if options.model is not None:
        of = f" --model {options.model} --layout {options.layout} ..."
    return f"resihp plan{of}{f' --hardware {options.hardware}' if options.hardware else ''} --search 10"


def _asked(options: PlanOptions) -> tuple[Question, Plan, str, str]:
    """The question, the plan that it is about, and how model and hardware are called. Raises UsageError, PlanError."""
    import msgspec

    from resihp.scheduler.what_if import catalogue, question

    given: dict[str, Any] = {
        "failed": question.ranks(options.fail or ()),
        "failed_nodes": question.names(options.fail_node or ()),
        "slow": question.speeds(options.slow or ()),
        "slow_links": question.links(options.slow_link or ()),
    }
    if options.tune and any(given.values()):
        raise UsageError("plan --tune: plans the first layout; leave --fail, --slow and the like out")
    if options.model is None and options.layout is None:
        from wrapper.commands.plan.of_job import of_job

        of = of_job(options.job, options.ledger, options.hardware, **given)
        for remark in of.remarks:
            print(f"resihp: {literal(remark)}", file=sys.stderr)
        asked = msgspec.structs.replace(of.question, ignore_memory=options.ignore_memory)
        return asked, of.base, of.model, of.hardware
    if options.job is not None:
        raise UsageError(f"plan {options.job}: a job has its own model and layout; leave --model and --layout out")
    if options.model is None or options.layout is None:
        raise UsageError("plan: --model and --layout belong together; for example --layout tp=4,dp=2,pp=4")
    tp, dp, pp = question.degrees(options.layout)
    if options.sequence_length < 1:
        raise UsageError(f"--sequence-length {options.sequence_length}: must be at least 1")
    hardware = options.hardware or "a100"
    asked = question.Question(
        model=catalogue.model(options.model, options.sequence_length),
        hardware=catalogue.hardware(hardware),
        tp=tp,
        dp=dp,
        pp=pp,
        micro_batches=options.micro_batches,
        micro_batch_size=options.micro_batch_size,
        gpus_per_node=options.gpus_per_node,
        chunks=options.virtual_stages,
        schedule=options.schedule,
        sequence_parallel=options.sequence_parallel,
        zero_1=options.zero_1,
        ignore_memory=options.ignore_memory,
        spares=options.spares,
        **given,
    )
    base = question.first_plan(asked)
    question.check_memory(asked, base)
    return asked, base, options.model, hardware


def _decision(options: PlanOptions, asked: Question, base: Plan, situation: Situation) -> tuple[Decision, float]:
    """What is decided, and the seconds that it took. Raises PlanError."""
    if options.search and (options.tune or options.planner is not PlannerChoice.resihp):
        raise UsageError("plan --search: begins with our own plan; leave --tune and --planner out")
    if options.tune:
        decide = _tuner(base, most_chunks=options.virtual_stages if options.virtual_stages > 1 else TUNED_CHUNKS)
    else:
        decide = _decider(options.planner)
        _warm(decide)
    situation.times.span(0, 0)  # the cost tables
    began = time.perf_counter()
    try:
        decision = decide(situation)
        if options.search:
            decision = _searched(situation, decision, options.search)
        return decision, time.perf_counter() - began
    except PlanError as error:
        from wrapper.commands.plan.tables import happened as told

        raise PlanError(f"{told(asked)}: {error}; try fewer failures, --spares, or a smaller pp") from None


def _searched(situation: Situation, decision: Decision, seconds: float) -> Decision:
    from resihp.scheduler.anytime import Anytime

    anytime = Anytime(situation, decision)
    if anytime.obstacle is not None:
        print(f"resihp: nothing is searched: {anytime.obstacle}", file=sys.stderr)
        return decision
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        anytime.run(TRIALS)
    return anytime.decision()


def _decider(planner: PlannerChoice) -> Callable[[Situation], Decision]:
    from resihp.scheduler import planners

    return planners.named(planner.value).decide


def _tuner(base: Plan, most_chunks: int) -> Callable[[Situation], Decision]:
    from resihp.scheduler.layouts.first_layout import tuned

    return lambda situation: tuned(base, situation, most_chunks=most_chunks)


def _warm(decide: Callable[[Situation], Decision]) -> None:
    """A small decision, so that what is timed afterwards is the decision alone."""
    from resihp.scheduler.what_if import catalogue, question

    small = question.Question(
        model=catalogue.model("llama2-7b", 1024),
        hardware=catalogue.hardware("a100"),
        tp=2,
        dp=2,
        pp=2,
        micro_batches=4,
        gpus_per_node=8,
        failed=(1,),
    )
    decide(question.pose(small, question.first_plan(small)))


# --- terminal -------------------------------------------------------------------------------------------------------


def _show(
    asked: Question,
    model: str,
    hardware: str,
    found: WhatIfAnswer,
    planning_s: float,
    explained: Explanation,
    *,
    first: bool,
    again: str,
) -> None:
    from wrapper.commands.plan import tables
    from wrapper.output.answers import console, tell
    from wrapper.output.explanations import sentences as explanations
    from wrapper.output.tables import Column, show

    screen = console()
    tell(screen, tables.title(asked, model, hardware))
    tables.show_times(screen, found)
    tables.show_layouts(screen, asked, found)
    rows, before = [], ""
    for about, words in explanations(explained):
        rows.append(("" if about == before else about, words))
        before = about
    show(screen, (Column(""), Column("", wraps=True)), rows)
    for sentence in sentences(found, planning_s, first, again):
        tell(screen, sentence)


def sentences(found: WhatIfAnswer, planning_s: float, first: bool = False, again: str = "") -> list[str]:
    """Transfers, cost, when it has paid for itself (not of a `first` layout), the alternatives, and why this one.

    `again`: the command that asks for a better plan of all that is there, where something has failed.
    """
    from resihp.scheduler.losses import held_alone
    from resihp.scheduler.transition_cost import NO_COST, pays_back_s
    from wrapper.commands.plan.tables import gigabytes

    said: list[str] = []
    cost = found.cost
    if first:
        pass
    elif cost == NO_COST:
        said.append("Nothing changes.")
    else:
        parts = {
            "communicators": cost.groups_s,
            "transfer": cost.transfer_s,
            "agreement": cost.fixed_s,
            "work done again": cost.lost_s,
        }
        listed = ", ".join(f"{name} {duration(s)}" for name, s in parts.items() if s >= 0.005)
        moved = gigabytes(cost.total_bytes) if cost.total_bytes else "no bytes"
        said.append(
            f"Transition: {moved} of state to move; {duration(cost.seconds)} ({listed}); "
            + _paid_back(pays_back_s(cost, found.unmitigated_s or math.inf, found.after.seconds))
        )
        if found.after.plan.migrations:
            said.append(_migrated(len(found.after.plan.migrations)))
    if again and found.after.seconds < FASTER * found.before.seconds:
        said.append(_faster(found, again))
    if found.sole_holders:
        said.append(f"One holder left: {held_alone(found.sole_holders)}.")
    said.append(f"Memory of rank {found.after.worst_rank}, the most: {found.after.worst_parts}.")
    said.append(f"Why: {found.reason} (decided in {planning_s * 1e3:.1f} ms).")
    if found.alternatives:
        others = "; ".join(
            f"{name} {duration(seconds)} ({seconds / found.after.seconds - 1:+.0%})"
            for name, seconds in found.alternatives
        )
        said.append(f"Instead: {others}.")
    return said


def _migrated(count: int) -> str:
    return f"{'One stage' if count == 1 else f'{count} stages'} of micro-batches will be computed by another replica."


def _faster(found: WhatIfAnswer, again: str) -> str:
    """Why a failure seems to make a job faster."""
    now = found.after_healthy_s
    if now < FASTER * found.before.seconds:
        why = f"another plan, which would be faster now, too ({duration(now)}, {now / found.before.seconds:.2f} x)"
    else:
        why = "another plan, in which what is slow has no part"
    return f"Faster than before: not by the failure, but by {why}; better plans of all devices: {again}."


def _paid_back(seconds: float) -> str:
    if math.isinf(seconds):
        return "it never pays for itself."
    if seconds == 0:
        return "without it nothing runs."
    return f"paid back after {duration(seconds)} of what it mends."
