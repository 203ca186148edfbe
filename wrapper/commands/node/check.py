"""`resihp node check`: check a suspect node on demand, in a short job on that node or on the node itself.

The checks are those of `resihp doctor` for a node, the site's own health check, and a measurement of the GPUs. Each is
one line; the exit code is 3 if one failed or gave no answer. If the node is excluded from the user's jobs, the result
is noted in the exclusion, for `resihp node list`. `before_undrain` asks only the site's health check. Slow imports are
inside the functions.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from resihp.errors import ResihpError, UsageError
from resihp.wrapper.output.answers import JsonOption, message

if TYPE_CHECKING:
    from resihp.slurm.client import JobView, NodeView, Slurm
    from resihp.slurm.survey import Survey
    from resihp.wrapper.commands.doctor.machine import CheckResult
    from resihp.wrapper.config.schema import SiteSection
    from resihp.wrapper.site_check import Answer

JSON_SCHEMA = 1
CHECKS_TIMEOUT_S = 60.0
"""Time limit of each of doctor's checks on the node."""
JOB_MINUTES = 10
"""Time limit of the Slurm job that checks a node: the health check may take 5 minutes, and torch has to be loaded."""
POLL_PAUSES_S = (1.0, 1.0, 2.0, 5.0, 10.0)
OUTPUT_PATIENCE_S = 10.0
"""Seconds until the output of an ended job is seen on this machine, over a network file system."""
OUTPUT_NAME = "output"


def register(nodes: typer.Typer) -> None:
    """Add the command to `resihp node`."""
    nodes.command("check")(check)


def connect() -> tuple[Slurm, Survey]:
    """Return the clients for this machine's Slurm."""
    from resihp.slurm.commands import CommandLine
    from resihp.slurm.survey import CommandSurvey

    return CommandLine(), CommandSurvey()


def check(
    node: Annotated[str, typer.Argument(help="Node name in Slurm.")],
    here: Annotated[bool, typer.Option("--here", help="Check this machine, which is the node; no job.")] = False,
    patience: Annotated[str, typer.Option(help="How long to wait until Slurm has started the job.")] = "10m",
    as_json: JsonOption = False,
) -> None:
    """Check a node: doctor's checks, the site's health check, the speed of its GPUs.

    Runs in a job of yours that holds the node, else in a new job of one node.
    Slurm starts no job on a drained node: log in there and use --here.

    Exit code 3 if a check failed or gave no answer.

    Example: resihp node check gpu-17
    """
    from resihp.wrapper.commands.doctor.command import UNHEALTHY_EXIT_CODE, is_healthy
    from resihp.wrapper.config.values import duration

    try:
        patience_s = duration(patience) or 0.0
    except ValueError as error:
        raise UsageError(f"--patience {patience!r}: {error}") from None
    if here:
        findings = list(_on_this_machine(node))
    else:
        slurm, survey = connect()
        findings = _on_node(slurm, survey, node, patience_s)
        _note(slurm, node, findings)
    if as_json:
        print(
            json.dumps({"schema": JSON_SCHEMA, "node": node, "healthy": is_healthy(findings), "rows": _rows(findings)})
        )
    else:
        _show(node, findings)
    if not is_healthy(findings):
        raise typer.Exit(UNHEALTHY_EXIT_CODE)


# --- on the node ----------------------------------------------------------------------------------------------------


def _on_this_machine(node: str) -> Iterator[CheckResult]:
    from resihp.wrapper.commands.doctor import command, machine, places
    from resihp.wrapper.commands.node import gpu_speed
    from resihp.wrapper.config.sources import read

    if not is_this_machine(node):
        raise UsageError(f"node {node[:80]!a}: this machine is {socket.gethostname()}; without --here a job checks it")
    site = read({}).site
    yield from command.run(
        {
            "gpus": machine.gpus,
            "limits": lambda: machine.limits(1),
            "home": places.home,
            "journal": places.journal,
        },
        CHECKS_TIMEOUT_S,
    )
    # One after the other: each of them may use the GPUs.
    yield from command.run({"health command": lambda: [_health(site)]}, site.health_timeout + CHECKS_TIMEOUT_S)
    longest_s = gpu_speed.MEASUREMENT_TIMEOUT_S + CHECKS_TIMEOUT_S
    yield from command.run({gpu_speed.CHECK_NAME: gpu_speed.check}, longest_s)


def is_this_machine(node: str) -> bool:
    """Decide whether a node's name in Slurm is that of this machine. In a job's step, Slurm tells the name."""
    host = socket.gethostname()
    return node in (os.environ.get("SLURMD_NODENAME", host), host, host.partition(".")[0])


def _health(site: SiteSection) -> CheckResult:
    """Return the result of the site's own health check on this machine."""
    from resihp.wrapper import site_check
    from resihp.wrapper.commands.doctor.machine import CheckResult, Outcome
    from resihp.wrapper.config.sources import SITE_FILE

    if not site.health_command:
        text = f"no health_command in [site] of {SITE_FILE}"
        return CheckResult(check="health command", outcome="skipped", text=text)
    answer = site_check.ask_here(site.health_command, site.health_timeout)
    outcomes: dict[str, Outcome] = {"passed": "ok", "failed": "failed"}
    command = shlex.join(site.health_command)
    return CheckResult(
        check="health command", outcome=outcomes.get(answer.outcome, "unknown"), text=f"{command}: {answer.text}"
    )


# --- from elsewhere -------------------------------------------------------------------------------------------------


def _on_node(slurm: Slurm, survey: Survey, node: str, patience_s: float) -> list[CheckResult]:
    """Have the node checked by a step of the user's job that holds it, or by a job of its own."""
    from resihp.wrapper.commands.node.holding import running_on

    view = slurm.nodes([node]).get(node)
    if view is None:
        raise UsageError(f"node {node[:80]!a}: Slurm does not know it; try: sinfo -N")
    argv = [sys.executable, "-P", "-m", "resihp", "node", "check", node, "--here", "--json"]
    holding_job = running_on(slurm, node)
    if holding_job is not None:
        message(f"node {node}: checked beside your job {holding_job.id}, which holds it")
        output = survey.on_nodes(holding_job.id, [node], argv, timeout_s=60.0 * JOB_MINUTES)
    else:
        _refuse_if_unusable(view)
        output = _in_own_job(slurm, view, argv, patience_s)
    return _read(node, output)


def _refuse_if_unusable(view: NodeView) -> None:
    """Raise SlurmRefusedError for a node on which Slurm starts no job."""
    from resihp.slurm.client import PREFIX
    from resihp.slurm.errors import SlurmRefusedError

    if view.usable:
        return
    state = "+".join([view.state, *sorted(view.flags)])
    why = f" ({view.reason})" if view.reason else ""
    advice = f"log in there and type: resihp node check {view.name} --here"
    if view.draining:
        ours = view.reason.startswith(PREFIX)
        undrain = f"resihp node undrain {view.name}" if ours else f"scontrol update NodeName={view.name} State=UNDRAIN"
        advice += f"; or give it back first: {undrain}"
    raise SlurmRefusedError(f"node {view.name}: not checked: Slurm starts no job there, it is {state}{why}; {advice}")


def _in_own_job(slurm: Slurm, view: NodeView, argv: Sequence[str], patience_s: float) -> str:
    """Submit a job of one node, wait until it has ended, and return its output. The job is cancelled if this is
    interrupted or takes too long."""
    from resihp.wrapper.job_folder import check_our_home, home

    shared_home = check_our_home(home())
    shared_home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="check-", dir=shared_home, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        script = folder / "check.sbatch"
        script.write_text(f"#!/bin/sh\nexec {shlex.join(argv)}\n")
        job_id = slurm.submit(script, [*_options(view, patience_s), f"--output={folder / OUTPUT_NAME}"])
        try:
            message(f"node {view.name}: job {job_id} is to check it")
            _wait(slurm, view.name, job_id, patience_s)
            return _output(folder / OUTPUT_NAME)
        finally:
            _cancel(slurm, job_id)


def _options(view: NodeView, patience_s: float) -> list[str]:
    """Return the options of sbatch for a job on this node alone. Slurm removes it if it has not started in time, even
    if nobody waits for it any more."""
    from resihp.wrapper.config.sources import read

    section = read({}).slurm
    given = {"partition": section.partition, "account": section.account, "qos": section.qos}
    return [
        *(f"--{name}={value}" for name, value in given.items() if value),
        *("--job-name=resihp-check", f"--nodelist={view.name}", "--nodes=1", "--ntasks=1", "--exclusive"),
        *(f"--time={JOB_MINUTES}", f"--deadline=now+{60 * JOB_MINUTES + max(60, round(patience_s))}", "--no-requeue"),
        *([f"--gpus-per-node={view.gpus}"] if view.gpus else []),
    ]


def _wait(slurm: Slurm, node: str, job_id: str, patience_s: float) -> None:
    """Wait until the job has ended. Raises SlurmRefusedError if it has not started in `patience_s` seconds."""
    from resihp.slurm.errors import SlurmRefusedError

    asked_at, reasons, looks = time.monotonic(), {"", "None"}, 0
    while True:
        view = _view(slurm, job_id)
        if view is not None and not view.active:
            return
        waited_s = time.monotonic() - asked_at
        if view is not None and view.state == "pending":
            if waited_s > patience_s:
                advice = "--patience 1h waits longer"
                raise SlurmRefusedError(f"node {node}: not checked: job {job_id} did not start ({view.why}); {advice}")
            if view.why not in reasons:
                reasons.add(view.why)
                message(f"job {job_id}: waits for node {node} ({view.why})")
        if waited_s > patience_s + 60.0 * (JOB_MINUTES + 2):
            raise SlurmRefusedError(
                f"node {node}: not checked: job {job_id} does not end; try: scontrol show job {job_id}"
            )
        time.sleep(POLL_PAUSES_S[min(looks, len(POLL_PAUSES_S) - 1)])
        looks += 1


def _view(slurm: Slurm, job_id: str) -> JobView | None:
    """Return the job's view; None if Slurm gives no answer now."""
    from resihp.slurm.errors import SlurmUnavailableError

    with suppress(SlurmUnavailableError):
        return slurm.job(job_id)
    return None


def _output(path: Path) -> str:
    deadline = time.monotonic() + OUTPUT_PATIENCE_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cancel(slurm: Slurm, job_id: str) -> None:
    """Cancel the job, unless it has ended."""
    view = _view(slurm, job_id)
    if view is None or view.active:
        with suppress(ResihpError):
            slurm.cancel(job_id)


def _read(node: str, output: str) -> list[CheckResult]:
    """Return the results that the node printed; a node without an answer is a result, too."""
    import msgspec

    from resihp.wrapper.commands.doctor.machine import CheckResult

    for line in reversed(output.splitlines()):
        with suppress(ValueError, KeyError, TypeError, msgspec.ValidationError):
            return msgspec.convert(json.loads(line)["rows"], list[CheckResult])
    last_line = (output.strip().splitlines() or ["it printed nothing"])[-1]
    text = f"no answer from {node}: {''.join(c for c in last_line if c.isprintable())[:200]}"
    advice = f"does {sys.prefix} exist there, and {os.environ.get('RESIHP_HOME', '.resihp')}?"
    return [CheckResult(check="node", outcome="unknown", text=text, advice=advice)]


# --- output ---------------------------------------------------------------------------------------------------------


def _rows(findings: Sequence[CheckResult]) -> list[dict[str, Any]]:
    import msgspec

    return [msgspec.to_builtins(finding) for finding in findings]


def _show(node: str, findings: Sequence[CheckResult]) -> None:
    from resihp.wrapper.commands.doctor.command import print_table

    print_table(findings)
    message(f"node {node}: {summary(findings)}")


def summary(findings: Sequence[CheckResult]) -> str:
    """Return the result of a check in a few words: `passed`, or the names of the checks that failed."""
    failed = [finding.check for finding in findings if finding.outcome == "failed"]
    unknown = [finding.check for finding in findings if finding.outcome == "unknown"]
    parts = [f"failed: {', '.join(failed)}"] if failed else []
    parts += [f"no answer: {', '.join(unknown)}"] if unknown else []
    return "; ".join(parts) or "passed"


def _note(slurm: Slurm, node: str, findings: Sequence[CheckResult]) -> None:
    """Note the result in the exclusion of the node, if the node is excluded."""
    from resihp.wrapper.slurm_tasks import exclusion_lists

    try:
        exclusion_lists.note_check(slurm.cluster(), node, summary(findings), time.time())
    except ResihpError as error:
        message(f"node {node}: the result is not noted for resihp node list: {error}")


# --- before an undrain ----------------------------------------------------------------------------------------------


def before_undrain(slurm: Slurm, node: str) -> None:
    """Ask the site's health check about a node that resihp has drained. Raises SlurmRefusedError unless the check
    passes, or cannot be asked from here."""
    from resihp.slurm.client import PREFIX
    from resihp.slurm.errors import SlurmError, SlurmRefusedError
    from resihp.wrapper.config.sources import read

    site = read({}).site
    if not site.health_command:
        return
    try:
        view = slurm.nodes([node]).get(node)
        if view is None or not view.draining or not view.reason.startswith(PREFIX):
            return
        answer = _ask_site(slurm, node, site)
    except SlurmError as error:
        message(f"node {node}: the site's health check was not asked: {error}")
        return
    if answer.outcome == "passed":
        message(f"node {node}: the site's health check passes: {answer.text}")
    elif answer.outcome == "not asked":
        advice = f"to ask it on the node: resihp node check {node} --here"
        message(f"node {node}: the site's health check was not asked: {answer.text}; {advice}")
    else:
        text = f"not undrained: the site's health check does not pass there: {answer.text}"
        without = f"without the check: scontrol update NodeName={node} State=UNDRAIN"
        raise SlurmRefusedError(f"node {node}: {text}; once it is repaired, type this again; {without}")


def _ask_site(slurm: Slurm, node: str, site: SiteSection) -> Answer:
    """Ask on this machine if it is the node, else beside the user's job that holds it."""
    from resihp.wrapper import site_check
    from resihp.wrapper.commands.node.holding import running_on
    from resihp.wrapper.site_check import Answer

    if is_this_machine(node):
        return site_check.ask_here(site.health_command, site.health_timeout)
    holding_job = running_on(slurm, node)
    if holding_job is None:
        return Answer(
            outcome="not asked", text="none of your jobs runs there, and Slurm starts none while it is drained"
        )
    _, survey = connect()
    argv = site_check.command_for(site.health_command, site.health_timeout)
    longest_s = site_check.longest_s(site.health_command, site.health_timeout)
    return site_check.read(survey.on_nodes(holding_job.id, [node], argv, timeout_s=longest_s))
