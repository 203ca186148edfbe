"""`resihp node drain|undrain|exclude|list|health`: the drain ladder by hand, for nodes of the user's own jobs.

A job drains nodes by itself after a verdict (`resihp.slurm.drains.drain`). These commands follow the same rules: they
drain only nodes that one of the user's jobs holds or has held (`holding`), never a batch host, and never change another
owner's reason. Repairs are in `maintenance`. Data goes to stdout, messages to stderr. Slow imports are inside the
functions.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from resihp.errors import OwnershipError, UsageError
from resihp.wrapper.commands.node import check, maintenance
from resihp.wrapper.commands.node.audited import audited
from resihp.wrapper.commands.node.holding import holder, home_of, lists_with, user
from resihp.wrapper.commands.node.maintenance import connect
from resihp.wrapper.commands.node.tables import rows_of, show_health, show_list
from resihp.wrapper.output.answers import message

if TYPE_CHECKING:
    from resihp.slurm.client import Slurm
    from resihp.slurm.drains.drain import Step
    from resihp.slurm.drains.exclusions import Exclusions
    from resihp.slurm.drains.site_limits import DrainLimits

JSON_SCHEMA = 1

NodeArgument = Annotated[str, typer.Argument(help="Node name in Slurm.")]
JobOption = Annotated[str | None, typer.Option("--job", help="Slurm job that holds or held it.", show_default=False)]
SpoolOption = Annotated[
    Path | None, typer.Option("--spool", help="Folder of the site's hook.", show_default="[slurm] spool")
]
ForOption = Annotated[str, typer.Option("--for", help="How long your jobs avoid it: 12h, 7d.")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]


def register(app: typer.Typer) -> None:
    """Add `resihp node` to the command line."""
    nodes = typer.Typer(help="Take bad nodes out of use, and return them.", no_args_is_help=True)
    nodes.command("drain")(drain)
    nodes.command("undrain")(undrain)
    nodes.command("exclude")(exclude)
    nodes.command("list")(show)
    nodes.command("health")(health)
    check.register(nodes)
    maintenance.register(nodes)
    app.add_typer(nodes, name="node")


# --- commands -------------------------------------------------------------------------------------------------------


def drain(
    node: NodeArgument,
    reason: Annotated[str, typer.Option(help="The node's fault.")] = "drained by hand",
    job: JobOption = None,
    spool: SpoolOption = None,
    keep_out: ForOption = "7d",
    as_json: JsonOption = False,
) -> None:
    """Drain a node of one of your jobs: directly if you may, else by a request to the site's hook.

    Running work on it is not disturbed. Your later jobs avoid the node.

    Example: resihp node drain gpu-17 --reason "Xid 79 on GPU 3"
    """
    from resihp.slurm.drains.drain import climb
    from resihp.slurm.errors import SlurmRefusedError

    slurm = connect()
    holding_job = holder(slurm, node, job)
    exclusions = _exclusions(slurm, home_of(holding_job.id))
    steps = climb(
        slurm,
        node,
        reason,
        job_id=holding_job.id,
        allowed_nodes=(node,),
        batch_host=holding_job.batch_host,
        spool=_spool(spool),
        exclusions=exclusions,
        now=time.time(),
        exclude_s=_seconds(keep_out),
        limits=_limits(slurm, holding_job.id),
    )
    outcomes = _print(audited(steps, exclusions.cluster, holding_job.id, node), as_json)
    _report_other_home(exclusions)
    if not _reached(outcomes):
        unsure = "unknown" in outcomes.values()
        advice = f"it may be drained; check: sinfo -R -n {node}" if unsure else "ask an operator, or for a site hook"
        if node == holding_job.batch_host:
            advice = f"drain it when job {holding_job.id} has ended"
        raise SlurmRefusedError(f"node {node}: not drained, only excluded from your jobs; {advice}")


def undrain(node: NodeArgument, job: JobOption = None, spool: SpoolOption = None, as_json: JsonOption = False) -> None:
    """Undo your own drain, and let your jobs use the node again.

    If the site has a health check, it must pass where it can be asked.
    A drain with another owner's reason stays. Without --job, the node is removed
    from the exclusion list that has it, of any of your folders.
    """
    from resihp.slurm.drains.drain import descend
    from resihp.slurm.errors import SlurmRefusedError
    from resihp.wrapper.launch.allocation import job_id as own_job
    from resihp.wrapper.slurm_tasks.exclusion_lists import own

    slurm = connect()
    exclusions = _exclusions(slurm, home_of(job)) if job else _list_with(slurm, node)
    check.before_undrain(slurm, node)
    steps = descend(
        slurm,
        node,
        job_id=job or own_job(os.environ),
        spool=_spool(spool),
        exclusions=exclusions,
        now=time.time(),
        user=user(),
    )
    outcomes = _print(audited(steps, exclusions.cluster, job or "", node, undrains=True), as_json)
    _report_other_home(exclusions)
    if (own_list := own(exclusions.cluster)) is not None and own_list.path.exists() and own_list.remove(node):
        message(f"node {node}: also removed from the nodes excluded by hand")
    if not _reached(outcomes):
        raise SlurmRefusedError(f"node {node}: still drained; only its owner can undo it: sinfo -R -n {node}")


def health(
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="Read the ledger of this job; default: the newest.")
    ] = None,
    ledger: Annotated[str | None, typer.Option("--ledger", help="Another ledger's URL.", show_default=False)] = None,
    as_json: JsonOption = False,
) -> None:
    """Show which nodes fail more often than others, over all jobs of a ledger.

    A lemon has had more outages than chance explains at the rate of all others;
    it may be the whole node or one of its devices. q: share of false positives
    among all nodes that stand out as much. Only hardware faults count, not
    injected ones. Suspected: jobs in which a device of it was suspected of being
    slow and was not declared slow; this does not affect the result.

    Example: resihp node health --ledger postgresql+psycopg://cluster/resihp
    """
    from resihp.db.reading.health import health_rows
    from resihp.db.reading.suspicions import by_node
    from resihp.wrapper.output.answers import to_json
    from resihp.wrapper.output.ledgers import opened

    with opened(job, ledger) as (reader, _):
        suspected = by_node(reader)
        rows = [{**row, **suspected.get(row["node"], {"jobs": 0, "suspected_jobs": 0})} for row in health_rows(reader)]
    if as_json:
        print(to_json({"schema": JSON_SCHEMA, "rows": rows}))
    elif rows:
        show_health(rows)
    else:
        message("no node of this ledger has taken part in a job yet")


def exclude(
    node: NodeArgument,
    reason: Annotated[str, typer.Option(help="The node's fault.")] = "excluded by hand",
    keep_out: ForOption = "7d",
    remove: Annotated[bool, typer.Option("--remove", help="Use the node again.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Exclude a node from your own jobs, of any folder, without draining it for others."""
    from resihp.slurm.client import PREFIX, sanitised
    from resihp.slurm.parsing.parse import is_node
    from resihp.wrapper.slurm_tasks import exclusion_lists as lists

    if not is_node(node):
        raise UsageError(f"node {node[:80]!a}: not a valid node name; try: sinfo -N")
    slurm = connect()
    cluster = slurm.cluster()
    if remove:
        if not lists.remove(cluster, node):
            raise UsageError(f"node {node}: is not excluded on cluster {cluster}; try: resihp node list")
        message(f"node {node}: used again by your jobs on cluster {cluster}")
    else:
        words = sanitised(reason).removeprefix(PREFIX.strip()).strip()
        now = time.time()
        added = lists.exclude(cluster, node, words, now + _seconds(keep_out), now)
        until = _day(added.expires_at)
        message(f"node {node}: excluded from your jobs on cluster {cluster} until {until}; it is not drained")
    if as_json:
        print(json.dumps({"schema": JSON_SCHEMA, "rows": rows_of(cluster, None)}))


def show(as_json: JsonOption = False) -> None:
    """List nodes excluded from your jobs, of all your folders, and which of them Slurm has drained for resihp.

    Measure: drain for nodes to be drained for all users, exclude for nodes that
    only your jobs avoid.

    All nodes that resihp has drained, of any user: sinfo -R | grep resihp:
    """
    from resihp.slurm.errors import SlurmError
    from resihp.wrapper.job_folder import home
    from resihp.wrapper.slurm_tasks import exclusion_lists as lists

    try:
        home()
    except OwnershipError as error:
        message(f"warning: {error}")
    slurm = connect()
    views: Slurm | None = slurm
    try:
        names = [slurm.cluster()]
    except SlurmError as error:
        message(f"{error}; drains in Slurm are not shown")
        views, names = None, lists.known_clusters()
    rows = [row for name in names for row in rows_of(name, views)]
    if as_json:
        print(json.dumps({"schema": JSON_SCHEMA, "rows": rows}))
    elif rows:
        show_list(rows)
    else:
        message("no node is excluded from your jobs")


# --- where things are -----------------------------------------------------------------------------------------------


def _spool(given: Path | None) -> Path | None:
    from resihp.slurm.drains.spool import folder_of
    from resihp.wrapper.config.sources import read

    return folder_of(str(given) if given else read({}).slurm.spool)


def _limits(slurm: Slurm, job_id: str) -> DrainLimits:
    """Return the site's limits on drains. A limit that is a share refers to the partition of the job, or else to the
    configured one."""
    from resihp.slurm.errors import SlurmError
    from resihp.wrapper.config.site_limits import drain_limits
    from resihp.wrapper.config.sources import read

    configuration = read({})
    partition = configuration.slurm.partition
    if isinstance(configuration.site.drained, str):
        with suppress(SlurmError):  # the job has ended, for example
            partition = slurm.node_choice(job_id).partition or partition
    return drain_limits(configuration, partition)


def _exclusions(slurm: Slurm, other_home: Path | None = None) -> Exclusions:
    """Return the exclusion list of `other_home`, by default of this home."""
    from resihp.slurm.drains.exclusions import Exclusions
    from resihp.wrapper.job_folder import check_our_home, home

    return Exclusions(check_our_home(other_home or home()), slurm.cluster())


def _list_with(slurm: Slurm, node: str) -> Exclusions:
    """Return the exclusion list that contains the node: the list of this home, or else of another home.

    Raises UsageError if several other homes exclude the node.
    """
    own_list = _exclusions(slurm)
    lists = lists_with(node, own_list.cluster, time.time())
    if not lists or any(other_list.path == own_list.path for other_list in lists):
        return own_list
    if len(lists) > 1:
        homes = "".join(f"\nRESIHP_HOME={shlex.quote(str(other_list.path.parent.parent))}" for other_list in lists)
        raise UsageError(
            f"node {node[:80]!a}: {len(lists)} of your homes exclude it; name a job of one, "
            f"resihp node undrain {node[:80]} --job ID, or set:{homes}"
        )
    return lists[0]


def _report_other_home(exclusions: Exclusions) -> None:
    from resihp.wrapper.job_folder import home

    if (list_home := exclusions.path.parent.parent) != home():
        message(f"the exclusion list is in {list_home}, the home of that job")


def _seconds(text: str) -> float:
    from resihp.wrapper.config.values import duration

    try:
        return duration(text) or 0.0
    except ValueError as error:
        raise UsageError(f"--for {text!r}: {error}") from None


# --- output ---------------------------------------------------------------------------------------------------------


def _reached(outcomes: dict[str, str]) -> bool:
    return "done" in (outcomes.get("slurm"), outcomes.get("spool"))


def _print(steps: Iterator[Step], as_json: bool) -> dict[str, str]:
    """Print the result of each step of the drain ladder; return the results by step."""
    from resihp.wrapper.output.answers import console
    from resihp.wrapper.output.tables import Column, show

    rows = [{"step": step.step, "outcome": step.outcome, "text": step.text} for step in steps]
    if as_json:
        print(json.dumps({"schema": JSON_SCHEMA, "rows": rows}))
    else:
        columns = (Column("step"), Column("outcome", kept=True), Column("result", wraps=True))
        show(console(), columns, [(row["step"], row["outcome"], row["text"]) for row in rows])
    return {row["step"]: row["outcome"] for row in rows}


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")
