"""`resihp doctor`: can this cluster run it? Looks, changes nothing, and says the next command to type.

Every check has a thread and a time of its own: one that hangs is `unknown`, and so is one that breaks. What cannot be
looked at from here is `skipped`, with what would tell. Exit code 3 when something failed or gave no answer: a blind
doctor must not look healthy.
"""

from __future__ import annotations

import getpass
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from resihp.errors import ResihpError, UsageError

if TYPE_CHECKING:
    from slurm.client import Slurm
    from slurm.survey import Survey
    from wrapper.commands.doctor.machine import CheckResult

    Check = Callable[[], Iterable[CheckResult]]

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

    found = here(job_file)
    if not slurm_settings.is_there():
        text = "no Slurm on this machine: only resihp run --local works"
        found["slurm"] = lambda: [_finding("slurm", "skipped", text, "on a cluster's login node this looks further")]
        return found
    return found | slurm_checks(*connect(), os.environ, job_file)


def here(job_file: Path | None = None) -> dict[str, Check]:
    """What is looked at on this machine."""
    from wrapper.commands.doctor import machine, places

    return {
        "configuration": lambda: places.configuration(job_file),
        "python": machine.python,
        "packages": machine.packages,
        "torch": machine.torch,
        "gpus": machine.gpus,
        "limits": machine.limits,
        "home": places.home,
        "journal": places.journal,
        "ledger": lambda: places.ledger(job_file),
        "ports": places.ports,
    }


def slurm_checks(
    slurm: Slurm, survey: Survey, environment: Mapping[str, str], job_file: Path | None = None
) -> dict[str, Check]:
    """What is asked of Slurm, and of the nodes of the allocation that we are in."""
    from slurm.errors import SlurmError, SlurmRefusedError
    from wrapper.commands.doctor import nodes as doctor_nodes
    from wrapper.commands.doctor import site, slurm_settings
    from wrapper.config.schema import read
    from wrapper.config.values import ports_of
    from wrapper.job_folder import home
    from wrapper.launch.allocation import batch_script, find, job_id, no_kill_seen
    from wrapper.launch.batch_script import warning_would_be_lost

    lock = threading.Lock()
    answered: list[Mapping[str, str]] = []
    silence: list[SlurmError] = []

    def settings() -> Mapping[str, str]:
        """Asked once, by whoever comes first; no answer is none for all."""
        with lock:
            if silence:
                raise silence[0]
            if not answered:
                try:
                    answered.append(survey.settings())
                except SlurmError as error:
                    silence.append(error)
                    raise
            return answered[0]

    def version() -> Iterable[CheckResult]:
        settings()
        yield from slurm_settings.version(slurm)
        yield from slurm_settings.offers(slurm.version(), settings(), survey)

    def rights() -> Iterable[CheckResult]:
        from slurm.drains.spool import folder_of

        spool = folder_of(read({}, job_file).slurm.spool)
        yield from slurm_settings.rights(survey, settings(), getpass.getuser(), spool)
        yield from slurm_settings.releases_nodes(slurm.version(), settings())

    def node_death() -> Iterable[CheckResult]:
        yield from slurm_settings.survival(settings())
        if "nodes" in settings().get("PrivateData", "").lower():
            yield from site.visibility(settings(), survey.is_operator(getpass.getuser(), settings()))

    def partition() -> Iterable[CheckResult]:
        configuration = read({}, job_file)
        job = site.wanted(configuration)
        views = survey.partitions()
        yield from slurm_settings.partitions(views, configuration.slurm.partition)
        for name in slurm_settings.chosen(views, configuration.slurm.partition):
            if kinds := [view for view in views if view.name == name and view.up]:
                yield from site.shape(kinds, survey.rules(name), job)

    def limits() -> Iterable[CheckResult]:
        enforced = settings().get("AccountingStorageEnforce", "").lower().split(",")
        if not {"limits", "safe"} & set(enforced):
            return [_finding("limits", "ok", "accounting limits no jobs here (AccountingStorageEnforce)")]
        configuration = read({}, job_file)
        section = configuration.slurm
        views = survey.partitions()
        there = {view.name for view in views}
        names = [name for name in slurm_settings.chosen(views, section.partition) if name in there]
        if not names:
            return [_finding("limits", "skipped", "no partition to look at")]
        rules, cluster = survey.rules(names[0]), settings()["ClusterName"]
        found = survey.limits(getpass.getuser(), section.account, section.qos, rules, cluster)
        return site.limits(found, site.wanted(configuration))

    def requeue() -> Iterable[CheckResult]:
        yield from slurm_settings.requeue(settings())
        yield from site.exit_codes(settings())

    def submission() -> Iterable[CheckResult]:
        yield from slurm_settings.submission(survey, read({}, job_file))
        yield from site.plugins(settings())
        yield from site.inherited(settings())

    def nodes() -> Iterable[CheckResult]:
        if not job_id(environment):
            yield from doctor_nodes.outside()
            return
        found = find(environment, slurm)
        script = batch_script(slurm, found.job_id)
        if (lost := warning_would_be_lost(environment, script)) is not None:
            yield _finding("warning", "warning", f"job {found.job_id}: {lost}")
        if not no_kill_seen(environment, script):
            text = f"job {found.job_id}: no --no-kill in its batch script: if a node fails, Slurm ends the whole job"
            yield _finding("node death", "warning", text, "resihp submit sets it; or #SBATCH --no-kill")
        wanted = read({}, job_file)
        ports, interface = ports_of(wanted.slurm.ports), wanted.network.interface
        yield from doctor_nodes.examine(found, slurm, survey, home(), ports=ports, interface=interface)

    def asked(name: str, check: Check) -> Check:
        """No answer is unknown; that there is none at all is said once, as a finding about Slurm itself."""

        def guarded() -> Iterable[CheckResult]:
            try:
                if name not in ("slurm", "nodes"):
                    settings()
                return list(check())
            except SlurmError as error:
                if silence and name != "slurm":
                    return [_finding(name, "skipped", "Slurm does not answer")]
                if isinstance(error, SlurmRefusedError) and error.permission and name in ("partition", "limits"):
                    return [_finding(name, "skipped", f"{error}; a job does not need to be told")]
                outcome = "failed" if isinstance(error, SlurmRefusedError) else "unknown"
                return [_finding(name, outcome, str(error), slurm_settings.NO_ANSWER)]

        return guarded

    found: dict[str, Check] = {
        "slurm": version,
        "node death": node_death,
        "requeue": requeue,
        "firewall": lambda: slurm_settings.firewall(settings(), read({}, job_file).slurm.ports),
        "drain": rights,
        "partition": partition,
        "limits": limits,
        "submission": submission,
        "munge": lambda: slurm_settings.munge(survey, settings()),
        "nodes": nodes,
    }
    return {name: asked(name, check) for name, check in found.items()}


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
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from wrapper.output.render import literal

    styles = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim", "unknown": "bold magenta"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("what was found, and what to do", overflow="fold")
    for finding in findings:
        text = Text(literal(finding.text))
        if finding.advice:
            text.append(f"\n-> {literal(finding.advice)}", style="cyan")
        table.add_row(Text(finding.check), Text(finding.outcome, style=styles[finding.outcome]), text)
    Console(highlight=False, markup=False, emoji=False).print(table)
    counts = {outcome: sum(finding.outcome == outcome for finding in findings) for outcome in styles}
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    end = "this can run resihp" if is_healthy(findings) else "this cannot run resihp as it is"
    if not counts["failed"] and counts["unknown"]:
        end = "what gave no answer may be broken"
    print(f"resihp: {told}: {end}", file=sys.stderr)
