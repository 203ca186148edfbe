"""Who listens to a job beside its ledger: what may be asked for, and that the job never notices them."""

from __future__ import annotations

import json
import os
import threading
import time
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

import resihp.wrapper.sinks.fanout
import resihp.wrapper.sinks.tensorboard
from resihp.db.telemetry.report_rows import Report
from resihp.errors import ConfigurationError
from resihp.record import journal, packing
from resihp.record.journal import IterationsPacked, Record
from resihp.record.packing import MAX_PACKED_ITERATIONS, pack
from resihp.wrapper.commands import run
from resihp.wrapper.config.run_spec import ListenerSettings, load
from resihp.wrapper.config.sources import read
from resihp.wrapper.job_folder import create_local_job
from resihp.wrapper.sinks.fanout import Listeners, asked, listeners, notify_of_end, standing
from resihp.wrapper.sinks.figures import Figures, follow, followed
from resihp.wrapper.sinks.tensorboard import TensorBoard, scalars
from tests.db.conftest import BEGAN, story, write_journal
from tests.resihp.record.test_packing import committed
from tests.wrapper.conftest import StubJob
from tests.wrapper.sinks.test_metrics import free_port, samples
from tests.wrapper.supervisor.test_shell import request_of
from tests.wrapper.test_processes import UNTIL_TOLD, led_by, running, supervisor_of

SECRET = "https://example.org/SECRET"


class Ledger:
    dropped, behind = 4, 7

    def __init__(self) -> None:
        self.records: list[journal.Record] = []
        self.closed = False

    def submit(self, record: journal.Record) -> None:
        self.records.append(record)

    def telemetry(self, rows: list[Report]) -> None: ...
    def scores(self, *_: object) -> None: ...

    def close(self) -> bool:
        self.closed = True
        return True


class Broken:
    def __init__(self) -> None:
        self.heard = 0

    def submit(self, record: journal.Record) -> None:
        self.heard += 1
        raise ZeroDivisionError

    def close(self, deadline: float) -> None:
        raise ZeroDivisionError


def settings(fresh_home: Path, text: str) -> ListenerSettings:
    path = fresh_home / "job.toml"
    path.write_text(text)
    return asked(read({}, path))


def test_a_listener_that_breaks_is_left_out(tmp_path: Path) -> None:
    ledger, first, second = Ledger(), Broken(), Ledger()
    heard = types.SimpleNamespace(submit=second.submit, close=lambda deadline: second.close())
    broken_at_the_end = types.SimpleNamespace(submit=lambda record: None, close=first.close)
    fan_out = Listeners(ledger, [first, broken_at_the_end, heard])
    records = write_journal(tmp_path / "journal", story())
    for record in records:
        fan_out.submit(record)
    assert fan_out.close()
    assert ledger.records == second.records == records
    assert first.heard == 1
    assert ledger.closed
    assert second.closed


def test_nobody_listens_by_default(fresh_home: Path) -> None:
    assert settings(fresh_home, "") == ListenerSettings(events=ListenerSettings().events or read({}).hooks.events)
    assert listeners(request_of(create_local_job()), Ledger(), pytest.fail) == []


def test_what_is_asked_for(fresh_home: Path) -> None:
    found = settings(
        fresh_home,
        "[metrics]\nport = 9400\ntextfile = 'x-{job}.prom'\n"
        f"[hooks]\nwebhook = '{SECRET}'\ncommand = ['page', 'me']\nevents = ['end']\ntimeout = '5s'\n",
    )
    assert found == ListenerSettings(
        metrics_port=9400,
        textfile=str(Path.cwd() / "x-{job}.prom"),
        webhook=SECRET,
        command=("page", "me"),
        events=("end",),
        timeout_s=5.0,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[metrics]\ntextfile = 'x.txt'\n",
            r"\[metrics\] textfile: node_exporter reads only files that end with \.prom",
        ),
        ("[metrics]\nport = 70000\n", r"\[metrics\] port"),
        ("[metrics]\ntensorbord = 'x'\n", r"did you mean tensorboard\?"),
        ("[hooks]\nevents = ['failures']\n", r"\[hooks\] events: unknown event failures; did you mean failure\?"),
        ("[hooks]\nwebhook_file = '/no/such'\n", r"webhook_file /no/such: No such file"),
        (f"[hooks]\nwebhook = '{SECRET}'\nwebhook_file = '/no/such'\n", "leave one of them out"),
        ("[hooks]\ntimeout = '1h'\n", r"\[hooks\] timeout"),
    ],
)
def test_what_cannot_be_had_is_refused(fresh_home: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        settings(fresh_home, text)


@pytest.mark.parametrize("where", ["file", "environment"])
def test_a_refused_webhook_is_not_repeated(fresh_home: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if where == "environment":
        monkeypatch.setenv("RESIHP_HOOKS__WEBHOOK", "ftp://SECRET")
    with pytest.raises(ConfigurationError, match=r"\[hooks\] webhook: must be a URL") as caught:
        settings(fresh_home, "" if where == "environment" else "[hooks]\nwebhook = 'ftp://SECRET'\n")
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("missing", "text"), [("prometheus_client", "port = 9400"), ("tensorboard", "tensorboard = 'runs'")]
)
def test_what_is_not_installed_is_refused(
    fresh_home: Path, monkeypatch: pytest.MonkeyPatch, missing: str, text: str
) -> None:
    found = resihp.wrapper.sinks.fanout.find_spec

    def find(name: str) -> object:
        return None if name == missing else found(name)

    monkeypatch.setattr("resihp.wrapper.sinks.fanout.find_spec", find)
    monkeypatch.setattr("resihp.wrapper.sinks.tensorboard.find_spec", find)
    with pytest.raises(ConfigurationError, match=r"not installed; pip install .* or leave it out"):
        settings(fresh_home, f"[metrics]\n{text}\n")


def test_a_secret_stands_in_the_run_s_private_file_alone(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESIHP_HOOKS__WEBHOOK", SECRET)
    options = run.Options(job={"command": ("/bin/true",)}, local=True)
    request = run.prepare(options)
    assert request.listening.webhook == SECRET
    path = request.save()
    assert path.stat().st_mode & 0o077 == 0
    assert load(path) == request
    assert "SECRET" not in json.dumps(request.configuration), "which goes to the journal, the ledger and reports"


def test_all_of_them_in_one_job(fresh_home: Path, tmp_path: Path) -> None:
    job = create_local_job()
    got = tmp_path / "got"
    listening = ListenerSettings(
        metrics_port=free_port(),
        textfile=str(tmp_path / "{job}.prom"),
        command=("/bin/sh", "-c", f"cat >> {got}"),
        events=("failure", "end"),
    )
    request = msgspec.structs.replace(request_of(job), listening=listening)
    ledger = Ledger()
    records = write_journal(tmp_path / "journal", story())
    fan_out = Listeners(ledger, listeners(request, ledger, pytest.fail, records[:20]))
    for record in records[20:]:
        fan_out.submit(record)
    fan_out.close()
    assert [json.loads(line)["kind"] for line in got.read_text().splitlines()] == ["failure", "end"]
    found = samples((tmp_path / f"{job.name}.prom").read_bytes())
    assert found[("resihp_iterations_total",)] == 20
    assert (found[("resihp_telemetry_dropped_total",)], found[("resihp_ledger_behind_records",)]) == (4, 7)
    assert ("resihp_hook_events_total", "hook=command", "outcome=told") in found


def test_a_ledger_that_is_not_open_tells_nothing() -> None:
    assert standing(None, []) == {}
    assert standing(Ledger(), []) == {"telemetry_dropped": 4, "ledger_behind": 7}


def test_what_cannot_be_opened_is_said(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ImportError("no such thing")

    monkeypatch.setattr("resihp.wrapper.sinks.metrics.Metrics", broken)
    said: list[str] = []
    request = msgspec.structs.replace(request_of(create_local_job()), listening=ListenerSettings(textfile="x.prom"))
    assert listeners(request, None, said.append) == []
    assert said == ["metrics: no such thing; the job continues without"]


# --- a supervisor's life --------------------------------------------------------------------------------------------


def kinds(path: Path) -> list[str]:
    return [json.loads(line)["entry"] for line in path.read_text().splitlines()] if path.exists() else []


def test_supervisors_that_die_leave_nobody_untold(stub_job: StubJob, tmp_path: Path) -> None:
    """What one could not tell, the next one does."""
    got = tmp_path / "got"
    listening = ListenerSettings(
        command=("/bin/sh", "-c", f"cat >> {got}"),
        events=("start", "leader", "end"),
        textfile=str(tmp_path / "job.prom"),
    )
    stub_job.start(UNTIL_TOLD, listening=listening)
    running(stub_job, 1)
    for term in (2, 3):
        supervisor_of(stub_job).kill()
        stub_job.until(partial(led_by, stub_job, term))
    (stub_job.folder / "go").touch()
    assert stub_job.wait() == 0, stub_job.stderr
    assert list(dict.fromkeys(kinds(got))) == ["JobStarted", "LeaderChosen", "JobEnded"]
    assert kinds(got).count("LeaderChosen") >= 2
    found = samples((tmp_path / "job.prom").read_bytes())
    assert found[("resihp_takeovers_total",)] == 2
    assert found["resihp_job_state", "state=completed"] == 1


def test_the_end_of_a_job_whose_supervisors_are_all_dead_is_told(fresh_home: Path, tmp_path: Path) -> None:
    records = write_journal(tmp_path / "journal", story(ended=False))
    dead = journal.JobEnded(exit_code=1, state="abnormal", reason="the supervisor was killed")
    records.append(journal.Record(len(records) + 1, BEGAN + 100, dead))
    got = tmp_path / "got"
    job = create_local_job()
    (job.folder / "command.told").write_text(str(len(records) - 1))
    listening = ListenerSettings(command=("/bin/sh", "-c", f"cat >> {got}"), events=("failure", "end"), metrics_port=1)
    notify_of_end(msgspec.structs.replace(request_of(job), listening=listening), records, pytest.fail)
    assert kinds(got) == ["JobEnded"]


# --- TensorBoard ----------------------------------------------------------------------------------------------------


class Writer:
    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.scalars: list[tuple[str, float, int, float]] = []
        self.closed = False

    def add_scalar(self, tag: str, data: float, step: int, *, wall_time: float) -> None:
        self.scalars.append((tag, data, step, wall_time))

    def close(self) -> None:
        self.closed = True


def test_a_take_over_after_a_million_iterations_unpacks_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the loop that beats: a row took 3 us for each listener, a million 7 s in all."""
    (packed,) = pack([committed(n) for n in range(1, MAX_PACKED_ITERATIONS + 1)])
    past = [
        Record(
            MAX_PACKED_ITERATIONS * n,
            packed.at + n,
            msgspec.structs.replace(packed.entry, first=MAX_PACKED_ITERATIONS * (n - 1) + 1),
        )
        for n in range(1, 1_000_000 // MAX_PACKED_ITERATIONS + 1)
    ]
    unpacked: list[int] = []
    here = threading.get_ident()  # what lost time is reckoned from, a thread of its own unpacks

    def rows(seq: int, entry: IterationsPacked) -> Iterator[Record]:
        unpacked.extend([entry.count] if threading.get_ident() == here else [])
        return iter(())

    monkeypatch.setattr(packing, "_rows", rows)
    monkeypatch.setattr(
        resihp.wrapper.sinks.tensorboard, "_writer", lambda folder: pytest.fail("what is past is written")
    )
    listening = ListenerSettings(textfile=str(tmp_path / "job.prom"), tensorboard=str(tmp_path / "runs"), traces=True)
    request = msgspec.structs.replace(request_of(create_local_job()), listening=listening)
    opened = listeners(request, Ledger(), pytest.fail, past)
    Listeners(Ledger(), opened).close()
    assert unpacked == []
    assert len(opened) == 3
    found = samples((tmp_path / "job.prom").read_bytes())
    assert found["resihp_iterations_total",] == found["resihp_iteration",] == len(past) * MAX_PACKED_ITERATIONS


def test_scalars_of_iterations(tmp_path: Path) -> None:
    made: list[Writer] = []

    def opened(folder: str) -> Writer:
        made.append(Writer(folder))
        return made[-1]

    records = write_journal(tmp_path / "journal", story())
    board = TensorBoard(tmp_path / "runs", say=pytest.fail, past=followed(records[:30]), open_writer=opened)
    for record in records[30:]:
        board.submit(record)
    assert board.close(time.monotonic() + 10)
    (writer,) = made
    assert writer.closed
    steps = {step for _, _, step, _ in writer.scalars}
    past = {r.entry.outcome.iteration for r in records[:30] if isinstance(r.entry, journal.IterationCommitted)}
    assert steps == set(range(1, 21)) - past
    last = {tag: value for tag, value, step, _ in writer.scalars if step == 20}
    assert last["loss"] == pytest.approx(2.0)
    assert last["iteration/seconds"] == 0.6
    assert last["iteration/predicted_seconds"] == 0.59
    assert last["goodput"] == pytest.approx(9.1 / 11.6, rel=0.01)


def test_an_evaluation_is_a_scalar_and_a_figure_of_its_iteration() -> None:
    figures, done = Figures(), journal.EvaluationDone(epoch=1, iteration=20, loss=2.25, tokens=4096)
    record = journal.Record(30, 1_750_000_000.0, done)
    follow(figures, record)
    assert list(scalars(figures, record)) == [("validation_loss", 2.25, 20, 1_750_000_000.0)]
    assert figures.validation_loss == 2.25


def test_real_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    board = TensorBoard(tmp_path / "runs", say=pytest.fail)
    for record in write_journal(tmp_path / "journal", story()):
        board.submit(record)
    assert board.close(time.monotonic() + 30)
    assert [name for name in os.listdir(tmp_path / "runs") if "tfevents" in name]
