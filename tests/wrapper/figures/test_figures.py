"""Figures of recorded jobs, wherever they are shown, equal what an independent program makes of the raw rows.

Five real jobs (`record.py`): two failures and a come-back; one that ends for a loss, and the one that goes on from its
checkpoint; Ctrl-C; a supervisor that is killed; a slow device. What is compared: `history cost`, `history failures`,
`status`, `report`, the metrics, the line of the live view, to the millisecond.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from resihp.record import journal, journal_file
from resihp.record.journal import Record
from resihp.settings import Settings
from resihp.wrapper.cli import app
from resihp.wrapper.job_folder import Job, create_local_job
from resihp.wrapper.output.ledgers import opened
from resihp.wrapper.sinks.figures import Figures, followed
from resihp.wrapper.sinks.lost_time import LostTime
from resihp.wrapper.sinks.metrics import families
from resihp.wrapper.sinks.terminal import LiveView
from tests.wrapper.figures import recompute

RECORDED = Path(__file__).parent / "recorded"
JOBS = ("two-failures", "interrupted", "resumed", "ctrl-c", "supervisor-killed", "slow")
MS = 1e-3
SETTINGS = Settings(job="recorded", nodes=2, gpus_per_node=2, tp=1, pp=2)


def records_of(name: str) -> list[Record]:
    lines = (RECORDED / f"{name}.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Record) for line in lines]


def made(name: str) -> Job:
    """A job of this home whose journal is the recorded one."""
    job = create_local_job()
    writer = journal_file.Journal(job.journal_file, sync=False)
    for record in records_of(name):
        entry = record.entry
        if isinstance(entry, journal.JobStarted):
            entry = msgspec.structs.replace(entry, job=job.name, host=job.read().host)
        writer.append(entry, record.at)
    writer.close()
    job.exit_code_file.write_text("0\n")
    [started] = [record.entry for record in records_of(name) if isinstance(record.entry, journal.JobStarted)]
    job.run_file.write_text(json.dumps({"run": started.run}))
    return job


def asked(*arguments: str) -> Any:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.stdout, result.output
    return json.loads(result.stdout)


@pytest.fixture
def job(request: pytest.FixtureRequest, fresh_home: Path) -> Job:
    """With the attempt that repeated what it had done, where there is one."""
    job = made(request.param)
    if request.param == "interrupted":
        made("resumed")
    return job


def repeated(name: str) -> set[int]:
    """Iterations that the next attempt committed again, by the journals."""
    if name != "interrupted":
        return set()
    first, second = (
        {r.entry.outcome.iteration for r in records_of(each) if isinstance(r.entry, journal.IterationCommitted)}
        for each in ("interrupted", "resumed")
    )
    assert first & second, "nothing was repeated: record it again"
    return first & second


def by_name(pairs: dict[str, float | None]) -> Any:
    return pytest.approx(pairs, abs=MS / 2)


@pytest.mark.parametrize(("job", "name"), [(name, name) for name in JOBS], indirect=["job"], ids=JOBS)
def test_every_figure_is_the_one_that_raw_rows_give(job: Job, name: str) -> None:
    with opened(job.name, None):
        pass  # brings the ledger up to the journal
    rows = recompute.read(job.folder / "ledger.db", job.name)
    expected = recompute.figures(rows, repeated(name))
    records = job.records()

    moments_are_the_journals(rows, records)
    cost = {row["cause"]: row for row in asked("history", "cost", job.name)["rows"]}
    assert {cause: row["seconds"] for cause, row in cost.items()} == by_name(expected["seconds"])
    assert {cause: row["gpu_hours"] * 3600 for cause, row in cost.items()} == by_name(
        {cause: hours * 3600 for cause, hours in expected["gpu_hours"].items()}
    )
    shares = {cause: row["share"] * expected["held"] for cause, row in cost.items()}
    assert shares == by_name(expected["seconds"])

    failures = asked("history", "failures", job.name)["rows"]
    for failure, told in zip(rows.failures, failures, strict=True):
        times = recompute.times_of(rows, failure)
        assert {column: told[column] for column in times} == by_name(times)

    status = asked("status", job.name)
    seconds = {
        "useful_seconds": expected["done"],
        "wall_seconds": expected["wall"],
        "slow_seconds": expected["seconds"]["slow"],
        "iteration_seconds": expected["iteration_seconds"],
        "ettr": expected["ettr"],
        "goodput": expected["goodput"],
    }
    assert {key: status[key] for key in seconds} == by_name(seconds)
    assert status["lost_seconds"] == by_name(expected["lost_by_kind"])
    exact = ("iteration", "loss", "epoch")
    assert {key: status[key] for key in exact} == {key: expected[key] for key in exact}
    assert status["committed_iterations"] == expected["committed"]
    assert status["failures"] == len(rows.failures)
    assert status["tokens_per_second"] == pytest.approx(expected["tokens_per_second"], rel=1e-6)
    events = {row["epoch"]: row["text"] for row in status["events"] if row["kind"] == "Reconfigured"}
    recovered = recompute.recoveries(rows)
    for epoch, told in recovered.items():
        assert re.search(r", ([\d.]+) s after it \(noticed after ([\d.]+) s, ([\d.]+) s without", events[epoch])
        assert [float(number) for number in re.findall(r"([\d.]+) s", events[epoch])][:3] == pytest.approx(
            [told["seconds_to_recover"], told["noticed_after"], told["without_noticing"]], abs=0.0051
        )

    report = asked("report", job.name, "--markdown")["figures"]
    of_report = {
        "goodput": expected["goodput"],
        "ettr": expected["ettr"],
        "held_seconds": expected["held"],
        "wall_seconds": expected["wall"],
        "useful_seconds": expected["seconds"]["useful"],
        "mttr_seconds": expected["mttr"],
    }
    assert {key: report[key] for key in of_report} == by_name(of_report)
    lost = {cause: seconds for cause, seconds in expected["seconds"].items() if cause != "useful"}
    assert report["lost_seconds"] == by_name(lost)
    assert report["failures"] == len(rows.failures)

    metrics_agree(rows, records, recompute.figures(rows))
    live_view_agrees(recovered, records)


def moments_are_the_journals(rows: recompute.Rows, records: list[Record]) -> None:
    """The ledger's moments are those of the journal's own figures."""
    found = {r.entry.failure: r for r in records if isinstance(r.entry, journal.FailureFound)}
    assert found.keys() == {row["failure"] for row in rows.failures}
    for row in rows.failures:
        record = found[row["failure"]]
        raw = msgspec.to_builtins(record.entry)
        assert row["noticed_at"] == pytest.approx(record.at - (raw["noticed_s"] or 0.0), abs=MS / 10)
        if raw["failed_s"] is not None:
            assert row["failed_at"] == pytest.approx(record.at - raw["failed_s"], abs=MS / 10)


def metrics_agree(rows: recompute.Rows, records: list[Record], expected: dict[str, Any]) -> None:
    """The metrics as the job ended; they know nothing of later attempts."""
    lost = LostTime(records)
    while lost.step():
        pass
    figures: Figures = followed(records)
    now = records[-1].at + 100.0
    samples = [sample for family in families(figures, now, {}, lost.by_cause()) for sample in family.samples]

    def by_label(name: str, label: str) -> dict[str, float]:
        return {sample.labels[label]: sample.value for sample in samples if sample.name == name}

    plain = {sample.name: sample.value for sample in samples}
    seconds = {
        "resihp_useful_seconds_total": expected["done"],
        "resihp_wall_lost_seconds": max(expected["wall"] - expected["done"], 0.0),
        "resihp_goodput_ratio": expected["goodput"],
        "resihp_iteration": expected["iteration"],
        "resihp_iterations_total": expected["committed"],
        "resihp_tokens_total": sum(row["tokens"] for row in rows.iterations),
        "resihp_loss": expected["loss"],
        "resihp_epoch": expected["epoch"],
        "resihp_checkpoints_total": len(rows.checkpoints),
        "resihp_last_commit_timestamp_seconds": rows.iterations[-1]["finished_at"],
        "resihp_last_iteration_seconds": rows.iterations[-1]["seconds"],
    }
    assert {name: plain[name] for name in seconds} == by_name(seconds)
    causes = {cause: value for cause, value in expected["seconds"].items() if cause != "useful"}
    assert by_label("resihp_lost_seconds_total", "cause") == by_name(causes)
    recovered: dict[str, float] = {}
    for told in recompute.recoveries(rows).values():
        recovered[told["action"]] = recovered.get(told["action"], 0.0) + told["seconds_to_recover"]
    assert by_label("resihp_recovery_seconds_total", "action") == by_name(recovered)
    changes: dict[str, float] = {}
    for row in rows.reconfigurations:
        changes[row["action"]] = changes.get(row["action"], 0.0) + row["seconds"]
    assert by_label("resihp_reconfiguration_seconds_total", "action") == by_name(changes)


def live_view_agrees(recovered: dict[int, dict[str, Any]], records: list[Record]) -> None:
    """The line that the terminal showed has the same seconds, as they are rounded there."""
    for record in records:
        if isinstance(record.entry, journal.Reconfigured) and record.entry.epoch in recovered:
            line = live_line(records, record)
            told = recovered[record.entry.epoch]
            for seconds, words in (
                (told["seconds_to_recover"], r"([\d.]+) s after the"),
                (told["noticed_after"], r"noticed after ([\d.]+) s"),
                (told["without_noticing"], r"([\d.]+) s without noticing"),
            ):
                match = re.search(words, line)
                assert match is not None, line
                assert float(match[1]) == pytest.approx(seconds, rel=0.006, abs=0.006), line


def live_line(records: list[Record], until: Record) -> str:
    file = io.StringIO()
    view = LiveView(Console(file=file, force_terminal=False, width=500), SETTINGS)
    for record in records:
        view.entry(record)
        if record is until:
            break
    view.close()
    return [line for line in file.getvalue().splitlines() if "recovered:" in line][-1]
