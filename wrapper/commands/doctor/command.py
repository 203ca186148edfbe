"""`resihp doctor`: can this cluster run it? Looks, changes nothing, and says the next command to type.

Every check has a thread and a time of its own: one that hangs is `unknown`, and so is one that breaks. What cannot be
looked at from here is `skipped`, with what would tell. Exit code 3 when something failed or gave no answer: a blind
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
    from slurm.client import Slurm
    from slurm.survey import Survey
    from wrapper.commands.doctor.machine import CheckResult
    from wrapper.commands.doctor.slurm_checks import Check

SCHEMA = 1
UNHEALTHY = 3
"""Exit code."""
PATIENCE_S = 30.0
LONGER = {"torch": 3, "nodes": 3}
"""Checks that start large programs, or some on all nodes, and how many times as long they may take."""

_log = logging.getLogger("resihp.doctor")


def register(app: typer.Typer) -> None:
    """Add `resihp doctor` to the command line."""
    app.command()(doctor)


def connect() -> tuple[Slurm, Survey]:
    """The Slurm of this machine."""
    from slurm.commands import CommandLine
    from slurm.survey import CommandSurvey

    return CommandLine(), CommandSurvey()


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
    config: Annotated[Path | None, typer.Option(help="A job file (TOML), to look at what it asks for.")] = None,
    timeout: Annotated[str, typer.Option(help="How long a check may take.", show_default="30s")] = "30s",
) -> None:
    """Look whether this machine, and the Slurm cluster it belongs to, can run resihp.

    In an allocation it looks at all of its nodes: salloc --nodes=2 resihp doctor

    Exit code 3 when something failed or gave no answer.
    """
    from wrapper.config.values import duration

    try:
        patience_s = duration(timeout) or PATIENCE_S
    except ValueError as error:
        raise UsageError(f"--timeout {timeout!r}: {error}") from None
    findings = run(checks(config), patience_s)
    if as_json:
        import msgspec

        rows = [msgspec.to_builtins(finding) for finding in findings]
        print(json.dumps({"schema": SCHEMA, "healthy": is_healthy(findings), "rows": rows}))
    else:
        show(findings)
    if not is_healthy(findings):
        raise typer.Exit(UNHEALTHY)


def checks(job_file: Path | None = None) -> dict[str, Check]:
    """What applies here, in the order of the report."""
    from wrapper.commands.doctor import slurm_settings
    from wrapper.commands.doctor.slurm_checks import SlurmChecks

    found = here(job_file)
    if not slurm_settings.is_there():
        text = "no Slurm on this machine: only resihp run --local works"
        found["slurm"] = lambda: [_finding("slurm", "skipped", text, "on a cluster's login node this looks further")]
        return found
    return found | SlurmChecks(*connect(), os.environ, job_file).by_name()


def here(job_file: Path | None = None) -> dict[str, Check]:
    """What is looked at on this machine."""
    from wrapper.commands.doctor import machine, places, training_libraries

    return {
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


def _nodes_of(job_file: Path | None) -> int:
    """Of the allocation that we are in, or of the job that is configured; spares included."""
    from wrapper.config.schema import read

    if allocated := os.environ.get("SLURM_NNODES"):
        return int(allocated)
    try:
        found = read({}, job_file)
    except ResihpError:
        return 1  # what is wrong with it is said elsewhere
    return found.job.nodes + found.slurm.spares


def run(wanted: Mapping[str, Check], patience_s: float) -> list[CheckResult]:
    """All at once, each in a thread; what does not come back in time is unknown, and its thread left behind."""
    results: dict[str, list[CheckResult]] = {}

    def look(name: str, check: Check) -> None:
        try:
            results[name] = list(check())
        except ResihpError as error:
            results[name] = [_finding(name, "failed", str(error))]
        except Exception as error:  # noqa: BLE001 - what breaks a check is not known to be well
            _log.debug("%s", name, exc_info=True)
            results[name] = [_finding(name, "unknown", f"could not be looked at: {type(error).__name__}: {error}")]

    threads = {}
    began = time.monotonic()
    for name, check in wanted.items():
        threads[name] = threading.Thread(target=look, args=(name, check), name=name, daemon=True)
        threads[name].start()
    found: list[CheckResult] = []
    for name, thread in threads.items():
        longest_s = patience_s * LONGER.get(name, 1)
        thread.join(max(0.0, began + longest_s - time.monotonic()))
        text = f"no answer within {longest_s:g} s"
        found += results.get(name) or [_finding(name, "unknown", text, "resihp doctor --timeout 5m waits longer")]
    return found


def is_healthy(findings: Sequence[CheckResult]) -> bool:
    return not any(finding.outcome in ("failed", "unknown") for finding in findings)


def _finding(check: str, outcome: object, text: str, advice: str = "") -> CheckResult:
    from wrapper.commands.doctor.machine import CheckResult

    return CheckResult(check=check, outcome=outcome, text=text, advice=advice)  # type: ignore[arg-type]


def show(findings: Sequence[CheckResult]) -> None:
    """The report on stdout, what it comes to on stderr."""
    from rich.text import Text

    from wrapper.output.answers import console
    from wrapper.output.render import literal
    from wrapper.output.tables import Column
    from wrapper.output.tables import show as show_table

    styles = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim", "unknown": "bold magenta"}
    columns = (Column("check"), Column("", kept=True), Column("what was found, and what to do", wraps=True))
    rows = []
    for finding in findings:
        text = Text(literal(finding.text))
        if finding.advice:
            text.append(f"\n-> {literal(finding.advice)}", style="cyan")
        rows.append((finding.check, Text(finding.outcome, style=styles[finding.outcome]), text))
    show_table(console(), columns, rows)
    counts = {outcome: sum(finding.outcome == outcome for finding in findings) for outcome in styles}
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    end = "this can run resihp" if is_healthy(findings) else "this cannot run resihp as it is"
    if not counts["failed"] and counts["unknown"]:
        end = "what gave no answer may be broken"
    print(f"resihp: {told}: {end}", file=sys.stderr)
