"""`resihp doctor`: check whether this cluster can run resihp, and name the next command to type. Changes nothing.

Every check runs in its own thread with its own timeout: a check that hangs or raises is `unknown`. A check that is not
possible from here is `skipped`, with advice on how to run it. Exit code 3 if a check failed or gave no answer: a blind
doctor must not look healthy.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from resihp.errors import ResihpError, UsageError

if TYPE_CHECKING:
    from resihp.slurm.client import Slurm
    from resihp.slurm.survey import Survey
    from resihp.wrapper.commands.doctor.machine import CheckResult
    from resihp.wrapper.commands.doctor.slurm_checks import Check
    from resihp.wrapper.config.schema import SiteSection

JSON_SCHEMA = 1
UNHEALTHY_EXIT_CODE = 3
"""Exit code if a check failed or gave no answer."""
DEFAULT_TIMEOUT_S = 30.0
"""Default timeout of a check, in seconds."""
TIMEOUT_FACTORS = {"torch": 3, "nodes": 3}
"""Factors by which the timeout is longer for checks that start large programs, or programs on all nodes."""

OUTCOME_STYLES = {
    "ok": "green",
    "warning": "yellow",
    "failed": "bold red",
    "skipped": "dim",
    "unknown": "bold magenta",
}

_log = logging.getLogger("resihp.doctor")


def register(app: typer.Typer) -> None:
    """Add `resihp doctor` to the command line."""
    app.command()(doctor)


def connect() -> tuple[Slurm, Survey]:
    """Return the clients for this machine's Slurm."""
    from resihp.slurm.commands import CommandLine
    from resihp.slurm.survey import CommandSurvey

    return CommandLine(), CommandSurvey()


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
    config: Annotated[Path | None, typer.Option(help="Job file (TOML) to check.")] = None,
    timeout: Annotated[str, typer.Option(help="Time limit of a check.", show_default="30s")] = "30s",
) -> None:
    """Check whether this machine and its Slurm cluster can run resihp.

    In an allocation, all of its nodes are checked: salloc --nodes=2 resihp doctor

    Exit code 3 if a check failed or gave no answer.
    """
    from resihp.wrapper.config.values import duration

    try:
        timeout_s = duration(timeout) or DEFAULT_TIMEOUT_S
    except ValueError as error:
        raise UsageError(f"--timeout {timeout!r}: {error}") from None
    findings = run(checks(config), timeout_s)
    if as_json:
        import msgspec

        rows = [msgspec.to_builtins(finding) for finding in findings]
        print(json.dumps({"schema": JSON_SCHEMA, "healthy": is_healthy(findings), "rows": rows}))
    else:
        show(findings)
    if not is_healthy(findings):
        raise typer.Exit(UNHEALTHY_EXIT_CODE)


def checks(job_file: Path | None = None) -> dict[str, Check]:
    """Return the checks that apply here, in the order of the report."""
    from resihp.wrapper.commands.doctor import slurm_settings
    from resihp.wrapper.commands.doctor.slurm_checks import SlurmChecks

    checks_here = here(job_file)
    if not slurm_settings.is_there():
        text = "no Slurm on this machine: only resihp run --local works"
        checks_here["slurm"] = lambda: [_finding("slurm", "skipped", text, "run it on a login node to check Slurm")]
        return checks_here
    return checks_here | SlurmChecks(*connect(), os.environ, job_file).by_name()


def here(job_file: Path | None = None) -> dict[str, Check]:
    """Return the checks of this machine."""
    from resihp.wrapper.commands.doctor import machine, places, training_libraries

    checks_here: dict[str, Check] = {
        "configuration": lambda: places.configuration(job_file),
        "python": machine.python,
        "packages": machine.packages,
        "torch": training_libraries.torch,
        "gpus": machine.gpus,
        "limits": lambda: machine.limits(_nodes_of(job_file)),
        "home": places.home,
        "journal": places.journal,
        "ledger": lambda: places.ledger(job_file),
        "ports": places.ports,
    }
    site = _site(job_file)
    if site is not None and site.health_command:
        checks_here["health command"] = places.health_command
    if site is not None and (site.audit or site.share):
        checks_here["site"] = lambda: places.site_folders(job_file)
    return checks_here


def _site(job_file: Path | None) -> SiteSection | None:
    from resihp.wrapper.config.sources import read

    try:
        return read({}, job_file).site
    except ResihpError:
        return None  # the check of the configuration reports the error


def _nodes_of(job_file: Path | None) -> int:
    """Return the number of nodes of this allocation, or else of the configured job, including its spares."""
    from resihp.wrapper.config.sources import read

    if allocated := os.environ.get("SLURM_NNODES"):
        return int(allocated)
    try:
        configuration = read({}, job_file)
    except ResihpError:
        return 1  # the check of the configuration reports the error
    return configuration.job.nodes + configuration.slurm.spares


def run(checks_by_name: Mapping[str, Check], timeout_s: float) -> list[CheckResult]:
    """Run all checks at once, each in a thread. A check that exceeds its timeout is unknown, and its thread is
    abandoned."""
    results: dict[str, list[CheckResult]] = {}

    def look(name: str, check: Check) -> None:
        try:
            results[name] = list(check())
        except ResihpError as error:
            results[name] = [_finding(name, "failed", str(error))]
        except Exception as error:  # noqa: BLE001 - a check that raises says nothing about its subject
            _log.debug("%s", name, exc_info=True)
            results[name] = [_finding(name, "unknown", f"the check failed: {type(error).__name__}: {error}")]

    threads = {}
    began = time.monotonic()
    for name, check in checks_by_name.items():
        threads[name] = threading.Thread(target=look, args=(name, check), name=name, daemon=True)
        threads[name].start()
    findings: list[CheckResult] = []
    for name, thread in threads.items():
        longest_s = timeout_s * TIMEOUT_FACTORS.get(name, 1)
        thread.join(max(0.0, began + longest_s - time.monotonic()))
        text = f"no answer within {longest_s:g} s"
        findings += results.get(name) or [_finding(name, "unknown", text, "resihp doctor --timeout 5m waits longer")]
    return findings


def is_healthy(findings: Sequence[CheckResult]) -> bool:
    """Return whether all checks gave an answer and none failed."""
    return not any(finding.outcome in ("failed", "unknown") for finding in findings)


def _finding(check: str, outcome: object, text: str, advice: str = "") -> CheckResult:
    from resihp.wrapper.commands.doctor.machine import CheckResult

    return CheckResult(check=check, outcome=outcome, text=text, advice=advice)  # type: ignore[arg-type]


def show(findings: Sequence[CheckResult]) -> None:
    """Print the report on stdout, and its summary on stderr."""
    print_table(findings)
    counts = {outcome: sum(finding.outcome == outcome for finding in findings) for outcome in OUTCOME_STYLES}
    totals = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    end = "resihp can run here" if is_healthy(findings) else "resihp cannot run here as it is"
    if not counts["failed"] and counts["unknown"]:
        end = "checks without an answer may hide a fault"
    print(f"resihp: {totals}: {end}", file=sys.stderr)


def print_table(findings: Sequence[CheckResult]) -> None:
    """Print one line for each result on stdout, with its advice below it."""
    from rich.text import Text

    from resihp.wrapper.output.answers import console
    from resihp.wrapper.output.render import literal
    from resihp.wrapper.output.tables import Column
    from resihp.wrapper.output.tables import show as show_table

    columns = (Column("check"), Column("", kept=True), Column("finding and advice", wraps=True))
    rows = []
    for finding in findings:
        text = Text(literal(finding.text))
        if finding.advice:
            text.append(f"\n-> {literal(finding.advice)}", style="cyan")
        rows.append((finding.check, Text(finding.outcome, style=OUTCOME_STYLES[finding.outcome]), text))
    show_table(console(), columns, rows)
