"""`resihp plan`: show the plan for given failures, and its cost.

Reads the question from options (`resihp.scheduler.what_if.question`) or from a job's ledger
(`resihp.wrapper.commands.plan.of_job`), has the planner decide, and shows the answer: JSON for programs, tables and
sentences for people, a plot on request (`resihp.wrapper.commands.plan.picture`). Needs no job and touches none. Data
goes to stdout, messages to stderr. Slow imports are inside the functions.
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
from resihp.wrapper.commands.options import command_of
from resihp.wrapper.output.render import duration, literal

if TYPE_CHECKING:
    from resihp.parallelism.plan import Plan
    from resihp.scheduler.explained.explanation import Explanation
    from resihp.scheduler.situation import Decision, Situation
    from resihp.scheduler.what_if.answer import WhatIfAnswer
    from resihp.scheduler.what_if.question import Question

MAX_TUNED_CHUNKS = 4
"""Most chunks of layers per stage that --tune tries. A job with `[layout] tune` begins with one."""


FASTER_RATIO = 0.995
"""The new plan counts as faster if its iteration time divided by the time before is below this."""
TRIALS_PER_CHECK = 20
"""Number of trials of a search between two looks at the clock."""


class PlannerChoice(str, Enum):  # noqa: UP042 - StrEnum's help text shows differently in older Typer
    """Planners: resihp's own, the published heuristic, the first steps of that heuristic, and dropping replicas."""

    resihp = "resihp"
    resihp_paper = "resihp-paper"
    paper_tp_pp = "paper-tp-pp"
    paper_tp = "paper-tp"
    drop_replica = "drop-replica"


def register(app: typer.Typer) -> None:
    """Add `resihp plan` to the command line."""
    app.command()(command_of(plan, PlanOptions))


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options given on the command line."""

    job: Annotated[str | None, typer.Argument(help="Job, instead of --model; default: the newest.")] = None
    model: Annotated[str | None, typer.Option(help="Known model, or a TOML file.", show_default=False)] = None
    layout: Annotated[str | None, typer.Option(help="Degrees: tp=4,dp=2,pp=4.", show_default=False)] = None
    micro_batches: Annotated[int, typer.Option(help="Micro-batches per replica per iteration.")] = 8
    sequence_length: Annotated[int, typer.Option(help="Tokens per sequence.")] = 4096
    micro_batch_size: Annotated[int, typer.Option(help="Sequences per micro-batch.")] = 1
    gpus_per_node: Annotated[int, typer.Option(help="Devices per node.")] = 8
    hardware: Annotated[
        str | None, typer.Option(help="a100, h100, or a TOML file.", show_default="the job's, or a100")
    ] = None
    fail: Annotated[list[str] | None, typer.Option(help="Lost ranks: 5,17 or 8-11.")] = None
    fail_node: Annotated[list[str] | None, typer.Option(help="Lost nodes: n3.")] = None
    slow: Annotated[list[str] | None, typer.Option(help="Slow rank and its speed: 12:0.5.")] = None
    slow_link: Annotated[list[str] | None, typer.Option(help="Slow link and its speed: n1-n2:0.3.")] = None
    spares: Annotated[int, typer.Option(help="Spare nodes on standby.")] = 0
    schedule: Annotated[str, typer.Option(help="1f1b, interleaved or zero-bubble.")] = "1f1b"
    virtual_stages: Annotated[int, typer.Option(help="Layer chunks per stage (interleaved).")] = 1
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Split activations along the sequence.")
    ] = False
    zero_1: Annotated[bool, typer.Option("--zero-1", help="Shard the optimizer state over replicas.")] = False
    ignore_memory: Annotated[bool, typer.Option("--ignore-memory", help="Plan as if device memory were unlimited.")] = (
        False
    )
    tune: Annotated[
        bool, typer.Option("--tune", help="Plan the first layout: balance layers by cost, tune orders.")
    ] = False
    search: Annotated[float, typer.Option(min=0.0, max=86400.0, help="Seconds to search for a better plan.")] = 0.0
    hurts: Annotated[
        bool, typer.Option("--hurts", help="Rank single losses by the damage, after --fail and the like.")
    ] = False
    planner: Annotated[PlannerChoice, typer.Option(help="Planner to use.")] = PlannerChoice.resihp
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False
    plot: Annotated[Path | None, typer.Option(help="Plot the pipelines to this file.", show_default=False)] = None
    ledger: Annotated[str | None, typer.Option("--ledger", help="Another ledger's URL.", show_default=False)] = None


def plan(options: PlanOptions) -> None:
    """Show the plan for failed or slow devices, and its cost.

    Example: resihp plan --model llama2-13b --layout tp=4,dp=2,pp=4
    --fail 5 --slow 12:0.5 --slow-link n1-n2:0.3

    Without --model and --layout, the question is about a job as it is now. Its
    own slow devices count; --fail and the like are added.
    Example: resihp plan 4711 --fail-node n3

    Otherwise ranks fill nodes n1, n2, ... in order. Known models: llama2-7b,
    -13b, -30b, -70b, qwen2.5-7b, -14b, -32b, -72b, llama3-405b. Times are
    estimates from operations and bytes. Options for ranks, nodes and links take
    several values, separated by commas, and may be repeated.

    To see which single loss would hurt most: resihp plan 4711 --hurts
    """
    import msgspec

    from resihp.scheduler.explained.explanation import as_json, explain
    from resihp.scheduler.transition_cost import NO_COST
    from resihp.scheduler.what_if import answer, question

    if options.hurts and (options.search or options.plot is not None):
        raise UsageError("plan --hurts: compares many plans; leave --search and --plot out")
    query, base, model, hardware = _question(options)
    situation = question.pose(query, base)
    if options.hurts:
        _show_losses(options, query, base, model, hardware, situation)
        return
    decision, planning_s = _decision(options, query, base, situation)
    outcome = answer.answer(query, base, situation, decision)
    explained = explain(decision.plan, decision.seconds, situation, healthy=None if options.tune else base)
    if options.tune:
        outcome = msgspec.structs.replace(outcome, cost=NO_COST)  # nothing runs yet
    for remark in outcome.remarks:
        print(f"resihp: {literal(remark)}", file=sys.stderr)
    if options.as_json:
        result = answer.as_json(outcome, planning_s) | {"explanation": as_json(explained)}
        print(json.dumps(result, allow_nan=False))
    else:
        again = _search_command(options) if happened(options) else ""
        _show(query, model, hardware, outcome, planning_s, explained, first=options.tune, again=again)
    if options.plot is not None:
        from resihp.wrapper.commands.plan.picture import draw

        draw(options.plot, query, outcome, situation)


def _show_losses(
    options: PlanOptions, query: Question, base: Plan, model: str, hardware: str, situation: Situation
) -> None:
    """Print the single losses that would hurt most under the plan in effect, or with --fail, under the new plan."""
    from rich.console import Console

    from resihp.scheduler.what_if import losses
    from resihp.wrapper.commands.plan import hurts

    decide = _decider(options.planner)
    _warm(decide)
    plan = _decision(options, query, base, situation)[0].plan if happened(options) or options.tune else base
    began = time.perf_counter()
    with Console(stderr=True).status("") as status:  # only on a terminal
        losses_found = losses.after_each(
            situation, plan, decide, lambda done, total: status.update(f"{done} of {total} losses planned")
        )
    planning_s = time.perf_counter() - began
    if query.zero_1:
        print(f"resihp: {hurts.SHARDED_STATE_REMARK}", file=sys.stderr)
    if options.as_json:
        print(json.dumps(hurts.as_json(query, losses_found, planning_s), allow_nan=False))
    else:
        hurts.show(query, model, hardware, losses_found, planning_s)


def happened(options: PlanOptions) -> bool:
    """Return whether the options name a device, node or link that failed or is slow."""
    return bool(options.fail or options.fail_node or options.slow or options.slow_link)


def _search_command(options: PlanOptions) -> str:
    subject = f" {options.job}" if options.job else ""
    if options.model is not None:
        subject = f" --model {options.model} --layout {options.layout} ..."
    return f"resihp plan{subject}{f' --hardware {options.hardware}' if options.hardware else ''} --search 10"


def _question(options: PlanOptions) -> tuple[Question, Plan, str, str]:
    """Return the question, the plan before failures, and names of model and hardware. Raises UsageError, PlanError."""
    import msgspec

    from resihp.scheduler.what_if import catalogue, option_texts, question

    failures: dict[str, Any] = {
        "failed": option_texts.ranks(options.fail or ()),
        "failed_nodes": option_texts.names(options.fail_node or ()),
        "slow": option_texts.speeds(options.slow or ()),
        "slow_links": option_texts.links(options.slow_link or ()),
    }
    if options.tune and any(failures.values()):
        raise UsageError("plan --tune: plans the first layout; leave --fail, --slow and the like out")
    if options.model is None and options.layout is None:
        from resihp.wrapper.commands.plan.of_job import of_job

        job_question = of_job(options.job, options.ledger, options.hardware, **failures)
        for remark in job_question.remarks:
            print(f"resihp: {literal(remark)}", file=sys.stderr)
        query = msgspec.structs.replace(job_question.question, ignore_memory=options.ignore_memory)
        return query, job_question.base, job_question.model, job_question.hardware
    if options.job is not None:
        raise UsageError(f"plan {options.job}: a job has its own model and layout; leave --model and --layout out")
    if options.model is None or options.layout is None:
        raise UsageError("plan: --model and --layout belong together; for example --layout tp=4,dp=2,pp=4")
    tp, dp, pp = option_texts.degrees(options.layout)
    if options.sequence_length < 1:
        raise UsageError(f"--sequence-length {options.sequence_length}: must be at least 1")
    hardware = options.hardware or "a100"
    query = question.Question(
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
        **failures,
    )
    base = question.first_plan(query)
    question.check_memory(query, base)
    return query, base, options.model, hardware


def _decision(options: PlanOptions, query: Question, base: Plan, situation: Situation) -> tuple[Decision, float]:
    """Return the planner's decision, and the seconds that it took. Raises PlanError."""
    if options.search and (options.tune or options.planner is not PlannerChoice.resihp):
        raise UsageError("plan --search: starts from resihp's own plan; leave --tune and --planner out")
    if options.tune:
        decide = _tuner(base, most_chunks=options.virtual_stages if options.virtual_stages > 1 else MAX_TUNED_CHUNKS)
    else:
        decide = _decider(options.planner)
        _warm(decide)
    situation.times.span(0, 0)  # builds the cost tables before the clock starts
    began = time.perf_counter()
    try:
        decision = decide(situation)
        if options.search:
            decision = _searched(situation, decision, options.search)
        return decision, time.perf_counter() - began
    except PlanError as error:
        from resihp.wrapper.commands.plan.tables import happened as describe_failures

        raise PlanError(f"{describe_failures(query)}: {error}; try fewer failures, --spares, or a smaller pp") from None


def _searched(situation: Situation, decision: Decision, seconds: float) -> Decision:
    from resihp.scheduler.anytime import Anytime

    anytime = Anytime(situation, decision)
    if anytime.obstacle is not None:
        print(f"resihp: no search: {anytime.obstacle}", file=sys.stderr)
        return decision
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        anytime.run(TRIALS_PER_CHECK)
    return anytime.decision()


def _decider(planner: PlannerChoice) -> Callable[[Situation], Decision]:
    from resihp.scheduler import planners

    return planners.named(planner.value).decide


def _tuner(base: Plan, most_chunks: int) -> Callable[[Situation], Decision]:
    from resihp.scheduler.layouts.first_layout import tuned

    return lambda situation: tuned(base, situation, most_chunks=most_chunks)


def _warm(decide: Callable[[Situation], Decision]) -> None:
    """Make the planner decide a small question first, so that the measured time excludes imports and compilation."""
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
    query: Question,
    model: str,
    hardware: str,
    outcome: WhatIfAnswer,
    planning_s: float,
    explained: Explanation,
    *,
    first: bool,
    again: str,
) -> None:
    from resihp.wrapper.commands.plan import tables
    from resihp.wrapper.output.answers import console, tell
    from resihp.wrapper.output.explanations import sentences as explanations
    from resihp.wrapper.output.tables import Column, show

    screen = console()
    tell(screen, tables.title(query, model, hardware))
    tables.show_times(screen, outcome)
    tables.show_layouts(screen, query, outcome)
    rows, previous_topic = [], ""
    for topic, words in explanations(explained):
        rows.append(("" if topic == previous_topic else topic, words))
        previous_topic = topic
    show(screen, (Column(""), Column("", wraps=True)), rows)
    for sentence in sentences(outcome, planning_s, first, again):
        tell(screen, sentence)


def sentences(outcome: WhatIfAnswer, planning_s: float, first: bool = False, again: str = "") -> list[str]:
    """Return sentences on transfers, cost and payback (not of a `first` layout), on alternatives, and on the reason.

    `again`: the command that searches for a better plan on all devices; empty if nothing has failed.
    """
    from resihp.scheduler.losses import held_alone
    from resihp.scheduler.transition_cost import NO_COST, pays_back_s
    from resihp.wrapper.commands.plan.tables import gigabytes

    lines: list[str] = []
    cost = outcome.cost
    if first:
        pass
    elif cost == NO_COST:
        lines.append("Nothing changes.")
    else:
        parts = {
            "communicators": cost.groups_s,
            "transfer": cost.transfer_s,
            "agreement": cost.fixed_s,
            "repeated work": cost.lost_s,
        }
        listed = ", ".join(f"{name} {duration(s)}" for name, s in parts.items() if s >= 0.005)
        moved = gigabytes(cost.total_bytes) if cost.total_bytes else "no bytes"
        lines.append(
            f"Transition: {moved} of state to move; {duration(cost.seconds)} ({listed}); "
            + _paid_back(pays_back_s(cost, outcome.unmitigated_s or math.inf, outcome.after.seconds))
        )
        if outcome.after.plan.migrations:
            lines.append(_migrated(len(outcome.after.plan.migrations)))
    if again and outcome.after.seconds < FASTER_RATIO * outcome.before.seconds:
        lines.append(_faster(outcome, again))
    if outcome.sole_holders:
        lines.append(f"One holder left: {held_alone(outcome.sole_holders)}.")
    lines.append(f"Highest memory, rank {outcome.after.worst_rank}: {outcome.after.worst_parts}.")
    lines.append(f"Why: {outcome.reason} (decided in {planning_s * 1e3:.1f} ms).")
    if outcome.alternatives:
        others = "; ".join(
            f"{name} {duration(seconds)} ({seconds / outcome.after.seconds - 1:+.0%})"
            for name, seconds in outcome.alternatives
        )
        lines.append(f"Alternatives: {others}.")
    return lines


def _migrated(count: int) -> str:
    return f"{'One stage' if count == 1 else f'{count} stages'} of micro-batches will be computed by another replica."


def _faster(outcome: WhatIfAnswer, again: str) -> str:
    """Explain why a failure seems to make a job faster."""
    healthy_s = outcome.after_healthy_s
    if healthy_s < FASTER_RATIO * outcome.before.seconds:
        ratio = healthy_s / outcome.before.seconds
        why = f"a better plan, which is faster without the failure, too ({duration(healthy_s)}, {ratio:.2f} x)"
    else:
        why = "a better plan, without the slow devices"
    return f"Faster than before: not due to the failure, but to {why}; to search on all devices: {again}."


def _paid_back(seconds: float) -> str:
    if math.isinf(seconds):
        return "it never pays for itself."
    if seconds == 0:
        return "without it, training cannot run."
    return f"it pays for itself if the failure lasts {duration(seconds)}."
