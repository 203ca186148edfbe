"""`resihp run --dry-run`: show layout, memory, checkpoint and excluded nodes of a run. Starts and writes nothing.

Input is validated as by `resihp run` itself (`resihp.wrapper.commands.run.check`). The model that a script trains is
known only after the script has run: memory is estimated if an earlier job of this home ran the same command.
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
from resihp.wrapper.commands.run import Checked
from resihp.wrapper.config.run_spec import load
from resihp.wrapper.job_folder import all_jobs
from resihp.wrapper.output.answers import SCHEMA, console, tell, to_json
from resihp.wrapper.output.render import literal
from resihp.wrapper.slurm_tasks.exclusion_lists import known, lists

MAX_JOBS_SEARCHED = 20
"""How many of this home's newest jobs are searched for the same command."""
MAX_STAGES_LISTED = 32
"""Most stages that are listed; the others are only counted."""


def show(checked: Checked, *, as_json: bool) -> None:
    """Print the dry run. Raises the errors of `dry_run_lines` before anything is printed."""
    lines = [literal(line) for line in dry_run_lines(checked)]
    if as_json:
        print(to_json({"schema": SCHEMA, "dry_run": True, "lines": lines}))
        return
    screen = console()
    for line in lines:
        tell(screen, line)


def dry_run_lines(checked: Checked) -> Iterator[str]:
    """Yield the lines to print. Raises LayoutError or PlanError if the model is known and does not fit."""
    shape, layout = checked.shape, checked.configuration.layout
    nodes = {rank: shape.nodes[rank // shape.gpus_per_node] for rank in range(len(shape.nodes) * shape.gpus_per_node)}
    laid_out = shape.laid_out * shape.gpus_per_node
    earlier_job = _declared(checked.configuration.job.command)
    plan = None if earlier_job is None else _plan(checked, earlier_job[1], nodes, laid_out)
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
    yield from _stages(grid, nodes, plan, None if earlier_job is None else earlier_job[1])
    yield from _of_memory(checked, earlier_job, plan)
    yield _of_checkpoint(checked)
    yield from _left_out(checked)
    yield "nothing was started or written"


def _declared(command: Sequence[str]) -> tuple[str, Declare] | None:
    """Return the newest job that ran this command and declared its model, with its declaration; None if there is
    none."""
    for job in islice(all_jobs(), MAX_JOBS_SEARCHED):
        try:
            if load(job.run_file).command != tuple(command):
                continue
            entries = [record.entry for record in job.records()]
        except (OSError, ResihpError):
            continue
        declaration = next((entry.declare for entry in entries if isinstance(entry, ModelDeclared)), None)
        if declaration is not None:
            return job.name, declaration
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
    """Yield a line for each stage: its ranks, their nodes and, if the model is known, layers and memory."""
    stages = [(d, s, stage) for d, replica in enumerate(grid.replicas) for s, stage in enumerate(replica.stages)]
    for d, s, stage in stages[:MAX_STAGES_LISTED]:
        where = ", ".join(dict.fromkeys(nodes[rank] for rank in stage.ranks))
        line = f"  replica {d} stage {s}: {_ranks(stage.ranks)} on {where}"
        if plan is not None and declared is not None:
            needed = memory.needed_bytes(plan, stage.ranks[0], declared.model, declared.model.sequence)
            line += f", {len(stage.layers)} layers, {size(needed)} per device"
        yield line
    if len(stages) > MAX_STAGES_LISTED:
        yield f"  and {count_of(len(stages) - MAX_STAGES_LISTED, 'stage')} more, in the same way"


def _of_memory(checked: Checked, earlier_job: tuple[str, Declare] | None, plan: Plan | None) -> Iterator[str]:
    device_bytes = checked.configuration.job.memory_per_device
    if earlier_job is None or plan is None:
        yield "memory: unknown until the script declares its model; no earlier job here ran this command"
        return
    name, declared = earlier_job
    needed, rank = memory.most_needed(plan, declared.model, declared.model.sequence)
    overhead = device_memory.overhead(declared.device, declared.back_end)
    of_device = f" of {size(device_bytes)}" if device_bytes is not None else ""
    yield (
        f"memory: about {size(overhead.with_gaps(needed))}{of_device} on the fullest device, rank {rank}'s; "
        f"model as in job {name}, {count_of(declared.iterations, 'iteration')}"
    )


def _of_checkpoint(checked: Checked) -> str:
    from resihp.worker.checkpoints import newest_complete

    resumption = checked.restart.resumption
    if resumption is None:
        return "checkpoint: none, training starts from the beginning"
    where = newest_complete(resumption.folder, verify=False)
    return f"checkpoint: resumes from iteration {resumption.iteration}, {where}"


def _left_out(checked: Checked) -> Iterator[str]:
    """Yield a line about nodes on standby, one about each node that died in earlier runs, and one about each node that
    the user's jobs avoid."""
    shape = checked.shape
    if shape.spares:
        yield f"standby: {', '.join(shape.nodes[-shape.spares :])}, not used by the layout"
    if checked.of_slurm is None:
        return
    for node in checked.of_slurm.died_before:
        yield f"node {node}: died during an earlier run of this job"
    cluster = checked.of_slurm.request.cluster
    now = time.time()
    for exclusion in known(lists(cluster)):
        if exclusion.expires_at <= now:
            continue
        until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(exclusion.expires_at))
        here = " (but it is in this allocation)" if exclusion.node in shape.nodes else ""
        yield f"excluded: {exclusion.node} until {until}: {exclusion.reason}{here}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"ranks {ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"


def _listed(nodes: Sequence[str]) -> str:
    number = len(nodes)
    return ", ".join(nodes) if number <= 8 else f"{number} nodes, {nodes[0]} to {nodes[-1]}"
