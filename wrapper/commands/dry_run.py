"""`resihp run --dry-run`: what the run would be: layout, memory, checkpoint, nodes left out. Starts and writes nothing.

What can be refused is refused as by `resihp run` itself (`wrapper.commands.run.check`). What a script trains is known
only once it has run: memory is estimated where an earlier job of this home ran the same command.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice

from resihp.errors import ResihpError
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan
from resihp.protocol.messages import Declare
from resihp.record.describe import size
from resihp.record.journal import ModelDeclared
from resihp.scheduler.cost import device_memory, memory
from resihp.scheduler.planner import first_plan
from resihp.words import count_of
from wrapper.commands.run import Checked
from wrapper.config.run_spec import load
from wrapper.job_folder import all_jobs
from wrapper.output.answers import SCHEMA, console, tell, to_json
from wrapper.output.render import literal
from wrapper.slurm_tasks.exclusion_lists import known, lists

LOOKED_AT = 20
"""Jobs of this home, the newest, in which the same command is looked for."""
ROWS = 32
"""Stages that are listed; further replicas are only counted."""


def show(checked: Checked, *, as_json: bool) -> None:
    """Print it. Raises as `told` does, before anything is printed."""
    lines = [literal(line) for line in told(checked)]
    if as_json:
        print(to_json({"schema": SCHEMA, "dry_run": True, "lines": lines}))
        return
    screen = console()
    for line in lines:
        tell(screen, line)


def told(checked: Checked) -> Iterator[str]:
    """What is printed, line by line. Raises LayoutError or PlanError where the model is known, and does not fit."""
    shape, layout = checked.shape, checked.configuration.layout
    nodes = {rank: shape.nodes[rank // shape.gpus_per_node] for rank in range(len(shape.nodes) * shape.gpus_per_node)}
    laid_out = shape.laid_out * shape.gpus_per_node
    known = _declared(checked.configuration.job.command)
    plan = None if known is None else _plan(checked, known[1], nodes, laid_out)
    dp = laid_out // (layout.tp * layout.pp)
    ranks = dp * layout.pp * layout.tp
    yield f"layout: DP{dp} x PP{layout.pp} x TP{layout.tp}, {count_of(ranks, 'rank')} on {_listed(shape.nodes)}"
    grid = Layout.uniform(
        tp=layout.tp,
        pp=layout.pp,
        dp=dp,
        layers=layout.pp * layout.virtual_stages if plan is None else _layers(plan),
        chunks=layout.virtual_stages,
    )
    yield from _stages(grid, nodes, plan, None if known is None else known[1])
    yield from _of_memory(checked, known, plan)
    yield _of_checkpoint(checked)
    yield from _left_out(checked)
    yield "nothing was started, nothing written"


def _declared(command: Sequence[str]) -> tuple[str, Declare] | None:
    """The newest job that ran this command far enough to say what it trains, and what that is."""
    for job in islice(all_jobs(), LOOKED_AT):
        try:
            if load(job.run_file).command != tuple(command):
                continue
            entries = [record.entry for record in job.records()]
        except (OSError, ResihpError):
            continue
        found = next((entry.declare for entry in entries if isinstance(entry, ModelDeclared)), None)
        if found is not None:
            return job.name, found
    return None


def _plan(checked: Checked, declared: Declare, nodes: dict[int, str], most: int) -> Plan:
    configuration = checked.configuration
    overhead = device_memory.overhead(declared.device, declared.back_end)
    resumption = checked.restart.resumption
    return first_plan(
        model=declared.model,
        nodes=nodes,
        tp=configuration.layout.tp,
        pp=configuration.layout.pp,
        micro_batches=declared.batch_sizes.at((resumption.iteration if resumption else 0) + 1),
        chunks=configuration.layout.virtual_stages,
        schedule=configuration.layout.schedule,
        sequence_parallel=configuration.layout.sequence_parallel,
        memory_bytes=configuration.job.memory_per_device,
        overhead=overhead,
        tokens=declared.model.sequence,
        most=most,
    )


def _layers(plan: Plan) -> int:
    return sum(len(stage.layers) for stage in plan.layout.replicas[0].stages)


def _stages(grid: Layout, nodes: dict[int, str], plan: Plan | None, declared: Declare | None) -> Iterator[str]:
    """A line for each stage: its ranks, where they are, and with the model what they hold."""
    stages = [(d, s, stage) for d, replica in enumerate(grid.replicas) for s, stage in enumerate(replica.stages)]
    for d, s, stage in stages[:ROWS]:
        where = ", ".join(dict.fromkeys(nodes[rank] for rank in stage.ranks))
        line = f"  replica {d} stage {s}: {_ranks(stage.ranks)} on {where}"
        if plan is not None and declared is not None:
            needed = memory.needed_bytes(plan, stage.ranks[0], declared.model, declared.model.sequence)
            line += f", {len(stage.layers)} layers, {size(needed)} a device"
        yield line
    if len(stages) > ROWS:
        yield f"  and {count_of(len(stages) - ROWS, 'stage')} more, in the same way"


def _of_memory(checked: Checked, known: tuple[str, Declare] | None, plan: Plan | None) -> Iterator[str]:
    has = checked.configuration.job.memory_per_device
    if known is None or plan is None:
        yield "memory: not known before the script has said what it trains; no earlier job here ran this command"
        return
    name, declared = known
    needed, rank = memory.most_needed(plan, declared.model, declared.model.sequence)
    overhead = device_memory.overhead(declared.device, declared.back_end)
    of = f" of {size(has)}" if has is not None else ""
    yield (
        f"memory: {size(overhead.with_gaps(needed))}{of} on rank {rank}'s device, the fullest, by estimate: the model "
        f"is the one of job {name}, {count_of(declared.iterations, 'iteration')}"
    )


def _of_checkpoint(checked: Checked) -> str:
    from resihp.worker.checkpoints import newest_complete

    found = checked.restart.resumption
    if found is None:
        return "checkpoint: none is taken, training begins afresh"
    where = newest_complete(found.folder, verify=False)
    return f"checkpoint: goes on from iteration {found.iteration}, {where}"


def _left_out(checked: Checked) -> Iterator[str]:
    """Nodes that stand by or have a record, and whom the user's jobs keep away from."""
    shape = checked.shape
    if shape.spares:
        yield f"stands by: {', '.join(shape.nodes[-shape.spares :])}, beyond what the layout uses"
    if checked.of_slurm is None:
        return
    for node in checked.of_slurm.died_before:
        yield f"node {node}: died under an earlier run of this job"
    cluster = checked.of_slurm.request.cluster
    now = time.time()
    for one in known(lists(cluster)):
        if one.expires_at <= now:
            continue
        until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(one.expires_at))
        here = " (it is in this allocation all the same)" if one.node in shape.nodes else ""
        yield f"left out: {one.node} until {until}: {one.reason}{here}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"ranks {ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"


def _listed(nodes: Sequence[str]) -> str:
    many = len(nodes)
    return ", ".join(nodes) if many <= 8 else f"{many} nodes, {nodes[0]} to {nodes[-1]}"
