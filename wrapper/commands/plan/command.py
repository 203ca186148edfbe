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
from wrapper.output.render import duration, literal, spans

if TYPE_CHECKING:
    from rich.table import Table

    from resihp.parallelism.layout import Layout, Replica
    from resihp.parallelism.plan import Plan
    from resihp.scheduler.explained.explanation import Explanation
    from resihp.scheduler.situation import Decision, Situation
    from resihp.scheduler.what_if.answer import Outlook, WhatIfAnswer
    from resihp.scheduler.what_if.question import Question

CHANGED_SHOWN = 6
"""Replicas that are shown in full; `--json` has them all."""
SLOW_SHOWN = 12
TUNED_CHUNKS = 4
"""Virtual stages of a stage that --tune tries at most. A job begins with one (`[layout] tune`)."""


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
    """
    import msgspec

    from resihp.scheduler.explained.explanation import as_json, explain
    from resihp.scheduler.transition_cost import NOTHING
    from resihp.scheduler.what_if import answer, question

    asked, base, model, hardware = _asked(options)
    situation = question.pose(asked, base)
    decision, planning_s = _decision(options, asked, base, situation)
    found = answer.answer(asked, base, situation, decision)
    explained = explain(decision.plan, decision.seconds, situation, healthy=None if options.tune else base)
    if options.tune:
        found = msgspec.structs.replace(found, cost=NOTHING)  # nothing runs yet
    for remark in found.remarks:
        print(f"resihp: {literal(remark)}", file=sys.stderr)
    if options.as_json:
        told = answer.as_json(found, planning_s) | {"explanation": as_json(explained)}
        print(json.dumps(told, allow_nan=False))
    else:
        _show(asked, model, hardware, found, planning_s, explained, first=options.tune)
    if options.plot is not None:
        from wrapper.commands.plan.picture import draw

        draw(options.plot, asked, found, situation)


def _asked(options: PlanOptions) -> tuple[Question, Plan, str, str]:
    """The question, the plan that it is about, and how model and hardware are called. Raises UsageError, PlanError."""
    import msgspec

    from resihp.scheduler.what_if import catalogue, question

    happened: dict[str, Any] = {
        "failed": question.ranks(options.fail or ()),
        "failed_nodes": question.names(options.fail_node or ()),
        "slow": question.speeds(options.slow or ()),
        "slow_links": question.links(options.slow_link or ()),
    }
    if options.tune and any(happened.values()):
        raise UsageError("plan --tune: plans the first layout; leave --fail, --slow and the like out")
    if options.model is None and options.layout is None:
        from wrapper.commands.plan.of_job import of_job

        of = of_job(options.job, options.ledger, options.hardware, **happened)
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
        **happened,
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
        raise PlanError(f"{_happened(asked)}: {error}; try fewer failures, --spares, or a smaller pp") from None


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
) -> None:
    from rich.console import Console

    from wrapper.output.explanations import sentences as explanations

    console = Console(highlight=False, markup=False, emoji=False)
    nodes = len(set(asked.nodes.values()))
    title = (
        f"{Path(model).stem}, {asked.model.sequence} tokens a sequence, on {len(asked.nodes)} {Path(hardware).stem} "
        f"of {nodes} {'node' if nodes == 1 else 'nodes'}; {_happened(asked)}"
    )
    console.print(literal(title), soft_wrap=True)
    console.print(_times_table(found))
    console.print(_layout_table(asked, found))
    lines = _table(("", False), ("", False))
    lines.show_header, lines.columns[1].no_wrap = False, False
    lines.columns[1].overflow = "fold"
    before = ""
    for about, words in explanations(explained):
        lines.add_row("" if about == before else f" {about}", literal(words))
        before = about
    console.print(lines)
    console.print()
    for sentence in sentences(found, planning_s, first):
        console.print(literal(sentence), soft_wrap=True)


def sentences(found: WhatIfAnswer, planning_s: float, first: bool = False) -> list[str]:
    """Transfers, cost, when it has paid for itself (not of a `first` layout), the alternatives, and why this one."""
    from resihp.scheduler.transition_cost import NOTHING, pays_back_s

    said: list[str] = []
    cost = found.cost
    if first:
        pass
    elif cost == NOTHING:
        said.append("Nothing changes.")
    else:
        parts = {
            "communicators": cost.groups_s,
            "transfer": cost.transfer_s,
            "agreement": cost.fixed_s,
            "work done again": cost.lost_s,
        }
        listed = ", ".join(f"{name} {duration(s)}" for name, s in parts.items() if s >= 0.005)
        moved = _bytes(cost.total_bytes) if cost.total_bytes else "no bytes"
        said.append(
            f"Transition: {moved} of state to move; {duration(cost.seconds)} ({listed}); "
            + _paid_back(pays_back_s(cost, found.unmitigated_s or math.inf, found.after.seconds))
        )
        if found.after.plan.migrations:
            said.append(_migrated(len(found.after.plan.migrations)))
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


def _paid_back(seconds: float) -> str:
    if math.isinf(seconds):
        return "it never pays for itself."
    if seconds == 0:
        return "without it nothing runs."
    return f"paid back after {duration(seconds)} of what it mends."


def _happened(asked: Question) -> str:
    from resihp.scheduler.what_if.question import gone

    lost = sorted(gone(asked))
    said = [f"{_ranks(lost)} gone"] if lost else []
    slow = [f"{rank} at {speed:g}" for rank, speed in sorted(asked.slow.items())]
    if slow:
        more = f" and {len(slow) - SLOW_SHOWN} more" if len(slow) > SLOW_SHOWN else ""
        said.append(f"slow: rank {', '.join(slow[:SLOW_SHOWN])}{more}")
    said += [f"link {a}-{b} at {speed:g}" for (a, b), speed in sorted(asked.slow_links.items())]
    return "; ".join(said) or "nothing has failed"


def _ranks(ranks: list[int]) -> str:
    words = spans(ranks)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {words}"


def _bytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 5e7 else f"{count / 1e6:.1f} MB"


def _times_table(found: WhatIfAnswer) -> Table:
    table = _table(("", False), ("iteration", True), ("", True), ("worst memory", True), ("layout", False))

    def row(name: str, seconds: float | None, outlook: Outlook | None) -> None:
        usable = seconds is not None and math.isfinite(seconds)
        slower = f"{seconds / found.before.seconds:.2f} x" if usable and seconds is not None else ""
        memory = "" if outlook is None else f"{outlook.worst_bytes / 1e9:.1f} GB"
        shape = "" if outlook is None else _shape(outlook.plan.layout)
        table.add_row(name, duration(seconds) if usable else "cannot run", slower, memory, shape)

    row("before", found.before.seconds, found.before)
    row("as it is", found.unmitigated_s, None)
    row("after", found.after.seconds, found.after)
    return table


def _shape(layout: Layout) -> str:
    """`DP2 x PP4 x TP4`; of a layout that is not uniform, who works."""
    words = layout.describe()
    if "|" not in words and len(words) <= 30:
        return words
    idle = f", {len(layout.standby)} standing by" if layout.standby else ""
    return f"{len(layout.active)} ranks work{idle}"


def _layout_table(asked: Question, found: WhatIfAnswer) -> Table:
    """Equal replicas once, with how many ranks and layers their stages have; changed ones in full."""
    from resihp.scheduler.what_if.question import stage_bytes

    table = _table(
        *(("", False), ("replicas", False), ("micro-batches", True), ("stages", False)),
        *(("ranks", False), ("layers", False), ("memory", True)),
    )
    old = set(found.before.plan.layout.replicas)
    for name, outlook in (("before", found.before), ("after", found.after)):
        plan = outlook.plan
        needs = stage_bytes(asked, plan)
        alike: dict[object, list[int]] = {}
        for d, replica in enumerate(plan.layout.replicas):
            shape = tuple((stage.tp, stage.chunks) for stage in replica.stages)
            same = replica in old
            alike.setdefault((same, len(plan.assignment[d]), shape if same else d), []).append(d)
        changed = [group for group in alike.values() if plan.layout.replicas[group[0]] not in old]
        hidden = {d for group in changed[CHANGED_SHOWN:] for d in group}
        first = name
        for group in alike.values():
            if hidden.intersection(group):
                continue
            replica = plan.layout.replicas[group[0]]
            label = [first, spans(group), str(len(plan.assignment[group[0]]))]
            full = replica not in old
            for stages, ranks, layers, need in _stage_rows(replica, needs[group[0]], full):
                table.add_row(*label, stages, ranks, layers, f"{need / 1e9:.1f} GB")
                label = ["", "", ""]
            first = ""
        if hidden:
            table.add_row("", f"{len(hidden)} more changed: --json has them all")
        if plan.layout.standby:
            table.add_row("", "standby", "", "", spans(plan.layout.standby))
    return table


def _stage_rows(replica: Replica, needs: tuple[int, ...], full: bool) -> list[tuple[str, str, str, int]]:
    """(stages, ranks, layers, bytes) of each stage, or of each run of stages that are alike."""
    if full:
        return [
            (
                str(s),
                spans(stage.ranks) or "none",
                ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in stage.chunks),
                need,
            )
            for s, (stage, need) in enumerate(zip(replica.stages, needs, strict=True))
        ]
    rows: list[tuple[list[int], str, str, int]] = []
    for s, (stage, need) in enumerate(zip(replica.stages, needs, strict=True)):
        ranks, layers = f"{stage.tp} each", f"{len(stage.layers)} each"
        if rows and rows[-1][1:3] == (ranks, layers):
            rows[-1] = ([*rows[-1][0], s], ranks, layers, max(need, rows[-1][3]))
        else:
            rows.append(([s], ranks, layers, need))
    return [(spans(stages), ranks, layers, need) for stages, ranks, layers, need in rows]


def _table(*headings: tuple[str, bool]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", padding=(0, 1))
    for heading, right in headings:
        table.add_column(Text(heading), justify="right" if right else "left", overflow="fold")
    return table
