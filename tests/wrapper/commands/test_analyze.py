"""`resihp analyze FILE`: the JSON's keys, what is printed for people, the picture, errors with exit code 2."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from resihp.detector.offline.recordings import formats
from resihp.errors import UsageError
from resihp.wrapper.cli import app
from resihp.wrapper.commands import analyze
from resihp.wrapper.exit_codes import exit_code_of
from resihp.wrapper.job_folder import create_local_job
from tests.wrapper.commands.status.test_status import record_job

KEYS = [
    *("schema", "kind", "runs", "iterations", "healthy_seconds", "events", "ranks"),
    *("slowdown", "ideal_seconds", "mw", "ms"),
]
DATA = Path(__file__).parents[4] / "shared" / "data"


def run(*argv: str | Path) -> Result:
    return CliRunner().invoke(app, ["analyze", *map(str, argv)])


def found(*argv: str | Path) -> dict[str, Any]:
    result = run(*argv, "--json")
    assert result.exit_code == 0, result.exception
    content: dict[str, Any] = json.loads(result.stdout)
    assert list(content) == KEYS
    for event in content["events"]:
        assert list(event)[:7] == ["run", "iteration", "detected_at", "end", "change", "verdict", "where"]
        assert list(event)[7:] == ["cost_seconds", "ranks", "sizes"]
        assert event["where"] is None or list(event["where"]) == ["dp", "stage", "rank"]
    return content


def seconds(count: int = 250, *, first: int = 120, end: int = 190, change: float = 0.5, seed: int = 0) -> list[float]:
    logs = 0.02 * np.random.default_rng(seed).standard_normal(count)
    logs[first:end] += math.log1p(change)
    return [float(value) for value in 1.2 * np.exp(logs)]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "train.log"
    lines = [
        f" [2024-05-01 12:00:00] iteration {i:8d}/  5000 | elapsed time per iteration (ms): {s * 1000:.1f} | loss: 1 |"
        for i, s in enumerate(seconds(), 1)
    ]
    path.write_text("using world size: 8\n" + "\n".join(lines) + "\n")
    return path


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "times.csv"
    rows = [f"{i},{rank},{s}" for rank in range(4) for i, s in enumerate(seconds(change=0.5 * (rank == 2), seed=rank))]
    path.write_text("iteration,rank,seconds\n" + "\n".join(rows) + "\n")
    return path


def test_a_log_as_json(log: Path) -> None:
    content = found(log)
    assert (content["schema"], content["kind"], content["runs"], content["iterations"]) == (1, "megatron-log", 1, 250)
    assert content["healthy_seconds"] == pytest.approx(1.2, rel=0.02)
    slow, well = content["events"]
    assert (slow["run"], slow["iteration"], slow["end"], slow["verdict"], slow["where"]) == (
        0,
        121,
        191,
        "fail-slow",
        None,
    )
    assert slow["change"] == pytest.approx(0.5, abs=0.05)
    assert slow["detected_at"] <= 124
    assert (well["verdict"], well["iteration"], well["end"]) == ("recovered", 191, None)
    assert content["ranks"] == []
    assert content["slowdown"] is content["ideal_seconds"] is content["mw"] is content["ms"] is None


def test_a_csv_of_ranks_as_json(table: Path) -> None:
    content = found(table)
    assert (content["kind"], content["iterations"]) == ("series", 250)
    slow = [event for event in content["events"] if event["verdict"] == "fail-slow"]
    assert [(event["iteration"], event["where"]) for event in slow] == [(120, {"dp": None, "stage": None, "rank": 2})]


def test_two_runs_in_one_log(tmp_path: Path) -> None:
    path = tmp_path / "restarted.log"
    lines = []
    for number in range(2):
        for i, s in enumerate(seconds(change=0.5 * number, seed=number), 1):
            lines.append(f"iteration {i}/ 500 | elapsed time per iteration (ms): {s * 1000} | lm loss: 1 |")
    path.write_text("\n".join(lines))
    content = found(path)
    assert content["runs"] == 2
    assert [(event["run"], event["verdict"]) for event in content["events"]] == [(1, "fail-slow"), (1, "recovered")]


def test_people_get_a_table_and_two_sentences(log: Path) -> None:
    result = run(log)
    assert result.exit_code == 0, result.exception
    assert "fail-slow" in result.stdout
    [event] = [words for line in result.stdout.splitlines() if (words := line.split())[:2] == ["0", "fail-slow"]]
    assert event[2] == "121"
    read, slow = result.stdout.strip().splitlines()[-2:]
    assert read == "train.log: 250 iterations of one run, 1.20 s each when healthy, judged from plain times."
    assert slow.startswith("1 fail-slow event, the worst +")
    assert " from iteration 121, " in slow
    assert slow.endswith(" lost by it; all over before the end.")


def test_where_nothing_is_found_that_is_said(tmp_path: Path) -> None:
    path = tmp_path / "well.csv"
    path.write_text("iteration,seconds\n" + "\n".join(f"{i},{s}" for i, s in enumerate(seconds(change=0.0))))
    assert "No fail-slow event was found." in run(path).stdout


def test_what_was_left_out_is_told_beside_the_result(log: Path) -> None:
    with log.open("a") as file:
        file.write(" iteration 251/ 500 | elapsed time per iter")
    result = run(log, "--json")
    assert "1 torn log line left out" not in result.stdout
    assert "1 torn log line left out" in run(log).stderr


def test_a_picture_on_request(log: Path, table: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for number, path in enumerate((log, table)):
        picture = tmp_path / f"{number}.png"
        result = run(path, "--plot", picture)
        assert result.exit_code == 0, result.exception
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_picture_is_refused(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match="pip install matplotlib"):
        raise run(log, "--plot", tmp_path / "no.png").exception or AssertionError("it was drawn")
    assert run(log).exit_code == 0


def test_what_resihp_run_printed(tmp_path: Path) -> None:
    """`resihp analyze resihp-4711.out`, a Slurm job's output."""
    path = tmp_path / "resihp-4711.out"
    lines = [f"11-25 17:00:00 iteration {i}  loss 2.0000  4.1k tokens/s  {s:.2f} s" for i, s in enumerate(seconds(), 1)]
    path.write_text("resihp: job 4711: 4 nodes of 8, logs in /x\n" + "\n".join(lines) + "\n")
    assert found(path)["kind"] == "resihp-log"
    read, slow = run(path).stdout.strip().splitlines()[-2:]
    assert read.startswith("resihp-4711.out: 250 iterations of one run, 1.2")
    assert slow.startswith("1 fail-slow event, the worst +")


def test_a_stdin_that_is_closed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="stdin: is closed; name a file"):
        analyze.judge(Path("-"))


def test_json_lines_from_stdin() -> None:
    """`... | resihp analyze -`."""
    lines = "".join(f'{{"step": {i}, "step_time": {s}}}\n' for i, s in enumerate(seconds(), 1))
    result = CliRunner().invoke(app, ["analyze", "-"], input=lines)
    assert result.exit_code == 0, result.exception
    read, slow = result.stdout.strip().splitlines()[-2:]
    assert read.startswith("stdin: 250 iterations of one run, 1.2")
    assert slow.startswith("1 fail-slow event, the worst +")
    broken = CliRunner().invoke(app, ["analyze", "-"], input='{"step": 1}\n')
    assert str(broken.exception).startswith("stdin: line 1 has no field for the time")


def test_parquet_of_history_and_of_an_export(fresh_home: Path) -> None:
    """`resihp history iterations --parquet` and `resihp db export`; what ranks computed is compared, not what they took
    as a whole."""
    whole = fresh_home / "iterations.parquet"
    columns = {"iteration": range(1, 251), "seconds": seconds(), "tokens": [4096] * 250}
    two = [pd.DataFrame({"job": name, **columns}) for name in ("local-1", "local-2")]
    pd.concat(two).to_parquet(whole)
    content = found(whole)
    assert (content["kind"], content["runs"], content["iterations"]) == ("series", 2, 500)
    assert {event["run"] for event in content["events"] if event["verdict"] == "fail-slow"} == {0, 1}
    assert "the file has 2 jobs; each is analysed as its own run" in run(whole).stderr
    ranks = fresh_home / "rank_reports.parquet"
    frames = []
    for rank in range(4):
        computed = seconds(change=0.5 * (rank == 2), seed=rank)
        frames.append(
            pd.DataFrame({"iteration": range(250), "rank": rank, "seconds": 9.0, "compute_seconds": computed})
        )
    pd.concat(frames).to_parquet(ranks)
    slow = [event for event in found(ranks)["events"] if event["verdict"] == "fail-slow"]
    assert [event["where"]["rank"] for event in slow] == [2]
    others = fresh_home / "others.parquet"
    pd.DataFrame({"Step": range(250), "train/Step Time (ms)": [1000 * s for s in seconds()]}).to_parquet(others)
    assert found(others)["healthy_seconds"] == pytest.approx(1.2, rel=0.02)
    export = fresh_home / "export" / "iterations"
    export.mkdir(parents=True)
    whole.rename(export / "2026-11.parquet")
    assert str(run(export.parent).exception) == (
        f"{export.parent}: is a folder; name a file in it: resihp analyze {export}/2026-11.parquet"
    )


def test_our_own_ledger_goes_through_a_pipe(fresh_home: Path) -> None:
    """`resihp history iterations --json | resihp analyze -`, and the same as Parquet."""
    record_job(create_local_job())
    rows = CliRunner().invoke(app, ["history", "iterations", "--json"])
    result = CliRunner().invoke(app, ["analyze", "-", "--json"], input=rows.stdout)
    assert result.exit_code == 0, result.exception
    assert json.loads(result.stdout)["iterations"] == 3
    CliRunner().invoke(app, ["history", "iterations", "--parquet", "it.parquet"])
    assert found("it.parquet")["iterations"] == 3


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read: No such file"),
        (b"", "the file is empty"),
        (b"worker,time\n1,2\n", "found columns `worker`, `time`"),
        (b"PAR1 and then nothing of the kind", "cannot be read as one"),
    ],
)
def test_a_file_that_is_none_of_these_is_refused(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "what"
    if content is not None:
        path.write_bytes(content)
    error = run(path, "--json").exception
    assert isinstance(error, UsageError)
    assert str(path) in str(error)
    assert says in str(error)
    assert exit_code_of(error) == 2


def test_a_parquet_without_the_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    pd.DataFrame({"a": [1, 2]}).to_parquet(path)
    with pytest.raises(UsageError, match=r"trace\.parquet: .*column"):
        analyze.judge(path)


def test_a_trace_of_operations_as_json() -> None:
    path = DATA / "bytedance_trace_SE.parquet"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    content = found(path)
    assert content["kind"] == "operations"
    assert not [event for event in content["events"] if event["verdict"] == "fail-slow"]
    assert list(content["ranks"][0]) == ["dp", "stage", "slowdown"]


def test_a_file_that_does_not_fit_into_memory_is_told(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(content: bytes) -> None:
        raise MemoryError

    monkeypatch.setattr(formats, "read", full)
    with pytest.raises(UsageError, match=r"log: too large for the memory of this process; shorten it first: grep"):
        analyze.judge(log)
