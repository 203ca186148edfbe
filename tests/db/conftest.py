"""A job's journal as a supervisor writes it: 3 nodes of 4, one process killed in iteration 12, 20 iterations in all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from sqlalchemy import event, select

from resihp.db import migrate, models
from resihp.db.engine import make_engine, resolve
from resihp.db.reading.queries import TABLES, Reader
from resihp.db.writer import Ledger
from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.plan import Plan, spread
from resihp.protocol.messages import StepOutcome
from resihp.record import journal, journal_file
from tests.db.postgres import Server, missing

Moved = Literal["redo", "commit", "between"]
Action = Literal["start", "redo", "commit", "between"]
Rung = Literal["slurm", "spool", "exclusion"]
Outcome = Literal["done", "refused", "unknown"]
State = Literal["pending", "running", "joined", "refused", "cancelled", "ended"]

BEGAN = 1_750_000_000.0
DP3 = Layout.uniform(tp=2, pp=2, dp=3, layers=8)


def outcome(iteration: int, loss: float | None = None) -> StepOutcome:
    return StepOutcome(
        iteration=iteration,
        clip=1.0,
        skip=False,
        learning_rate=1e-3,
        gradient_norm=2.0,
        loss=4.0 - 0.1 * iteration if loss is None else loss,
        tokens=8192,
        sum_squared_lengths=1 << 40,
        samples=17,
        samples_digest="00ff00ff00ff00ff",
    )


def started(name: str = "local-1", user: str = "me", restart: int = 0) -> journal.JobStarted:
    return journal.JobStarted(
        job=name,
        command=("python", "train.py", "--title", 'a "b" [red]c'),
        nodes=3,
        gpus_per_node=4,
        tp=2,
        pp=2,
        schedule="1f1b",
        host="here",
        user=user,
        restart_count=restart,
        version="0.1.0",
        configuration={"layout": {"tp": 2}},
    )


def inventory(node: str, driver: str = "570.86.15", devices: int = 4) -> journal.NodeInventory:
    return journal.NodeInventory(
        serial=f"S-{node}",
        kernel="6.1.0-30",
        image="Rocky Linux 9.5",
        driver=driver,
        nic_firmware=(("mlx5_0", "28.41.1000"),),
        devices=tuple(
            journal.DeviceInventory(device=i, name="NVIDIA H100", uuid=f"GPU-{node}-{i}", vbios="96.00.89")
            for i in range(devices)
        ),
    )


def story(ended: bool = True) -> Iterator[tuple[journal.AnyEntry, float]]:
    """(entry, time). Iterations take 0.5 s; the failure is noticed 0.3 s into the 12th and costs 1.0 s more."""
    at = BEGAN
    yield started(), at
    for n in range(3):
        yield journal.NodeJoined(node=f"n{n + 1}", host="here", devices=4), at + 0.1
        for device in range(4):
            rank = 4 * n + device
            yield journal.WorkerStarted(rank=rank, node=f"n{n + 1}", device=device, pid=1000 + rank, epoch=0), at + 0.2
    at += 2.0
    plan = Plan(epoch=1, layout=DP3, assignment=spread(12, 3))
    yield journal.PlanDecided(plan=plan, next_iteration=1, action="start", finish=None, reason="start"), at
    for i in range(1, 12):
        at += 0.5
        yield journal.IterationCommitted(epoch=1, outcome=outcome(i), seconds=0.5, predicted_seconds=None), at
    text = "kill:rank=5@iteration=12,phase=forward"
    yield journal.FaultInjected(fault=1, text=text, rank=5, node=None, iteration=12), at + 0.28
    noticed = at + 0.3
    yield journal.WorkerEnded(rank=5, exit=-9, epoch=1), noticed
    yield (
        journal.FailureFound(
            failure=1,
            kind="fail-stop",
            component="process",
            cause="rank 5 killed by signal 9 (SIGKILL)",
            ranks=(5,),
            node="n2",
            device=1,
            iteration=12,
            epoch=2,
            evidence="pid 1005 on node n2: killed by signal 9 (SIGKILL)",
            detect_s=0.02,
            noticed_s=0.1,
            failed_s=0.12,
        ),
        noticed + 0.1,
    )
    plan = Plan(epoch=2, layout=DP3.without(frozenset({5})), assignment=spread(12, 2))
    reason = "rank 5 killed by signal 9 (SIGKILL)"
    yield journal.PlanDecided(plan=plan, next_iteration=12, action="redo", finish=None, reason=reason), noticed + 0.1
    at = noticed + 1.0
    yield journal.IterationCommitted(epoch=2, outcome=outcome(12), seconds=0.6, predicted_seconds=None), at
    yield (
        journal.Reconfigured(
            epoch=2,
            failures=(1,),
            attempts=1,
            action="redo",
            park_s=0.1,
            plan_s=0.05,
            groups_s=0.2,
            state_s=0.05,
            first_iteration_s=0.6,
            seconds=1.0,
        ),
        at,
    )
    yield journal.Suspected(rank=3, node="n1", evidence="no progress for 3.0 s"), at
    yield journal.Suspected(rank=3, node="n1", evidence="progress again", cleared=True), at
    for i in range(13, 21):
        at += 0.6
        yield journal.IterationCommitted(epoch=2, outcome=outcome(i), seconds=0.6, predicted_seconds=0.59), at
    yield journal.CheckpointCommitted(iteration=20, folder="checkpoints/20", bytes=1 << 20, seconds=0.2), at + 0.2
    if ended:
        for rank in range(12):
            if rank != 5:
                yield journal.WorkerEnded(rank=rank, exit=0, epoch=2), at + 0.3
        yield journal.JobEnded(exit_code=0, state="completed", reason="20 iterations done"), at + 0.3


UNEQUAL = Layout(
    replicas=(
        *DP3.replicas[:1],
        Replica((Stage((4, 7), ((0, 4),)), Stage((6,), ((5, 7),)))),
        *DP3.replicas[2:],
    )
)
"""After rank 5's end: its replica goes on with three ranks and layers spread otherwise."""
BACK = Layout(
    replicas=(
        *DP3.replicas[:1],
        Replica((Stage((4, 12), ((0, 3),)), Stage((6, 7), ((4, 7),)))),
        *DP3.replicas[2:],
    )
)


def any_layout_story() -> Iterator[tuple[journal.AnyEntry, float]]:
    """Rank 5 dies, one plan is refused and one overtaken before the third takes effect; rank 12 comes in its place."""
    assignment = spread(12, 3)

    def decided(epoch: int, layout: Layout, action: Action, reason: str, moved: int = 0) -> journal.PlanDecided:
        plan = Plan(epoch=epoch, layout=layout, assignment=assignment)
        following = {1: 1, 5: 3}.get(epoch, 2)
        return journal.PlanDecided(
            plan=plan, next_iteration=following, action=action, finish=None, reason=reason, bytes_planned=moved
        )

    def reconfigured(epoch: int, failures: tuple[int, ...], action: Moved, moved: int) -> journal.Reconfigured:
        return journal.Reconfigured(
            epoch=epoch,
            failures=failures,
            attempts=3 if failures else 1,
            action=action,
            park_s=0.1,
            plan_s=0.05,
            groups_s=0.2,
            state_s=0.05,
            first_iteration_s=0.6,
            seconds=1.0,
            bytes_moved=moved,
            extra_bytes=moved // 4,
        )

    yield started(), BEGAN
    for n in range(3):
        yield journal.NodeJoined(node=f"n{n + 1}", host="here", devices=4), BEGAN
        for device in range(4):
            rank = 4 * n + device
            yield journal.WorkerStarted(rank=rank, node=f"n{n + 1}", device=device, pid=1000 + rank, epoch=0), BEGAN
    yield decided(1, DP3, "start", "start"), BEGAN + 1
    yield journal.PlanInEffect(epoch=1), BEGAN + 1.5
    yield journal.IterationCommitted(epoch=1, outcome=outcome(1), seconds=0.5, predicted_seconds=None), BEGAN + 2
    yield journal.WorkerEnded(rank=5, exit=-9, epoch=1), BEGAN + 2.2
    yield (
        journal.FailureFound(
            failure=1,
            kind="fail-stop",
            component="device",
            cause="rank 5 killed by signal 9 (SIGKILL)",
            ranks=(5,),
            node="n2",
            device=1,
            iteration=2,
            epoch=2,
            evidence="pid 1005",
            detect_s=0.02,
            noticed_s=0.1,
            failed_s=0.12,
        ),
        BEGAN + 2.3,
    )
    yield decided(2, UNEQUAL, "redo", "rank 5 killed", 3_400_000_000), BEGAN + 2.4
    yield journal.PlanRefused(epoch=2, rank=3, reason="79.1 GB needed, 79.0 GB there"), BEGAN + 2.5
    yield decided(3, UNEQUAL, "redo", "rank 5 killed", 3_400_000_000), BEGAN + 2.6
    yield decided(4, UNEQUAL, "redo", "rank 5 killed", 3_400_000_000), BEGAN + 2.7
    yield journal.PlanInEffect(epoch=4), BEGAN + 2.9
    yield journal.WorkerStarted(rank=12, node="n2", device=1, pid=2012, epoch=4), BEGAN + 2.95
    yield journal.IterationCommitted(epoch=4, outcome=outcome(2), seconds=0.6, predicted_seconds=0.6), BEGAN + 3.2
    yield reconfigured(4, (1,), "redo", 3_400_000_000), BEGAN + 3.2
    yield journal.WorkerStarted(rank=13, node="n3", device=3, pid=2013, epoch=4), BEGAN + 3.3
    yield journal.JoinRefused(rank=13, node="n3", device=3, reason="not ready within 600 s"), BEGAN + 3.4
    yield journal.WorkerEnded(rank=13, exit=-9, epoch=4), BEGAN + 3.5
    yield decided(5, BACK, "between", "rank 12 joined", 1_200_000), BEGAN + 3.9
    yield journal.PlanInEffect(epoch=5), BEGAN + 4.3
    yield journal.IterationCommitted(epoch=5, outcome=outcome(3), seconds=0.5, predicted_seconds=0.5), BEGAN + 4.8
    yield reconfigured(5, (), "between", 1_200_000), BEGAN + 4.8


def node_story() -> Iterator[tuple[journal.AnyEntry, float]]:
    """Node n3 dies: drained by Slurm, given back at the second try; the second request brings n9, later undrained."""
    yield started(), BEGAN
    for n in range(3):
        yield journal.NodeJoined(node=f"n{n + 1}", host="here", devices=4), BEGAN
    yield journal.NodeLost(node="n3", reason="connection closed for 1 s"), BEGAN + 5
    reason = "job local-1 lost rank 8, 9, 10, 11: connection closed for 1 s"
    yield journal.DrainDecided(drain=1, node="n3", failure=1, reason=reason), BEGAN + 7

    def answered(drain: int, node: str, step: Rung, outcome: Outcome, text: str) -> journal.DrainAnswered:
        return journal.DrainAnswered(drain=drain, node=node, step=step, outcome=outcome, text=text)

    def changed(number: int, state: State, node: str | None = None, text: str = "") -> journal.ReplacementChanged:
        slurm_job = None if state == "refused" else f"4{number}"
        return journal.ReplacementChanged(replacement=number, state=state, slurm_job=slurm_job, node=node, text=text)

    yield answered(1, "n3", "slurm", "unknown", "no answer"), BEGAN + 7.1
    yield answered(1, "n3", "spool", "done", "asked for"), BEGAN + 7.2
    yield answered(1, "n3", "exclusion", "done", "kept out"), BEGAN + 7.3
    yield journal.NodeReleased(node="n3", outcome="refused", text="DB index is being set"), BEGAN + 7.4
    for number, text in ((1, "invalid partition"), (2, "")):
        asked = journal.ReplacementAsked(
            replacement=number, node="n3", excluded=("n1", "n2", "n3"), reason="8 of 12 ranks have work"
        )
        yield asked, BEGAN + 8 * number
        if text:
            yield changed(number, "refused", text=text), BEGAN + 9
    yield answered(1, "n3", "slurm", "done", "drained"), BEGAN + 16.5
    yield journal.SlurmSaw(node="n3", state="down+drain", text="resihp: job local-1 lost ranks"), BEGAN + 16.6
    yield changed(2, "pending"), BEGAN + 17
    yield changed(2, "running", "n9"), BEGAN + 18
    yield journal.NodeReleased(node="n3", outcome="done", text=""), BEGAN + 19
    yield journal.NodeJoined(node="n9", host="there", devices=4, inventory=inventory("n9")), BEGAN + 20
    yield changed(2, "joined", "n9"), BEGAN + 20
    yield journal.DrainDecided(drain=2, node="n2", failure=2, reason="job local-1 lost rank 5: killed"), BEGAN + 30
    yield answered(2, "n2", "slurm", "refused", "Invalid user id"), BEGAN + 30.1
    yield journal.SlurmSaw(node="n3", state="idle", text=""), BEGAN + 40


def absent_story() -> Iterator[tuple[journal.AnyEntry, float]]:
    """Of the nodes waited for, n3 and n4 do not come; the job begins without them. n9 comes instead of n3, n4 late."""
    yield started(), BEGAN
    for n in range(2):
        yield journal.NodeJoined(node=f"n{n + 1}", host="here", devices=4), BEGAN
    for name in ("n3", "n4"):
        yield journal.NodeLost(node=name, reason="has not joined within 600 s", how="silent"), BEGAN + 600
    yield journal.ReplacementAsked(replacement=1, node="n3", excluded=("n1",), reason="8 of 16 devices"), BEGAN + 601
    yield journal.NodeJoined(node="n9", host="there", devices=4), BEGAN + 620
    entry = journal.ReplacementChanged(replacement=1, state="joined", slurm_job="41", node="n9", text="")
    yield entry, BEGAN + 620
    yield journal.NodeJoined(node="n4", host="here", devices=4), BEGAN + 630
    yield journal.NodeLost(node="n5", reason="has not joined within 640 s", how="silent"), BEGAN + 640


def write_journal(path: Path, told: Iterator[tuple[journal.AnyEntry, float]]) -> list[journal.Record]:
    writer = journal_file.Journal(path, sync=False)
    for entry, at in told:
        writer.append(entry, at)
    writer.close()
    return journal_file.read(path)


@pytest.fixture
def records(tmp_path: Path) -> list[journal.Record]:
    """The story's journal, read back from its file, `journal` in the test's folder."""
    return write_journal(tmp_path / "journal", story())


def everything(ledger: Ledger, name: str | None = None) -> dict[str, Any]:
    """A job's row but for whom the database says it is by, and its rows of every table of `resihp history`."""
    with Reader.open(ledger.url) as reader:
        job = reader.job(name)
        job.pop("written_by")
        return {"job": job, **{table: reader.rows(table, job["id"]) for table in TABLES}}


def rank_reports(url: str) -> list[dict[str, Any]]:
    with Reader.open(url) as reader:
        return reader.fetch(
            select(models.RankReportRow).order_by(models.RankReportRow.iteration, models.RankReportRow.rank)
        )


@contextmanager
def held(url: str) -> Iterator[None]:
    """Another connection holds a lock that every writer needs."""
    engine = make_engine(resolve(url), write=True)  # on SQLite a transaction of such a one is enough
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.exec_driver_sql("LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE")
        yield
    engine.dispose()


class Listener:
    """Collects what the writer says."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def __call__(self, text: str) -> None:
        self.heard.append(text)


_creations: dict[str, list[tuple[str, Any]]] = {}
"""By the name of the database: the statements with which Alembic created the first ledger of this process."""


@pytest.fixture(autouse=True)
def created_like_the_first(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alembic creates the first ledger of a process, and every one of the tests of migrations; others are made by the
    same statements, which take a tenth of the time once they need not be compiled."""
    from alembic import command

    if request.path.name == "test_migrate.py":
        return
    folder, real = migrate.MIGRATIONS_FOLDER, command.upgrade

    def upgrade(config: Any, revision: str) -> None:
        connection = config.attributes["connection"]
        if revision != "head" or folder != migrate.MIGRATIONS_FOLDER or migrate.version_of(connection) is not None:
            return real(config, revision)
        name = connection.dialect.name
        if name not in _creations:
            seen: list[tuple[str, Any]] = []

            def note(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
                if not statement.startswith(("SELECT", "PRAGMA")):
                    seen.append((statement, parameters))

            event.listen(connection, "before_cursor_execute", note)
            real(config, revision)
            event.remove(connection, "before_cursor_execute", note)
            _creations[name] = seen
            return None
        for statement, parameters in _creations[name]:
            connection.exec_driver_sql(statement, parameters or None)
        return None

    monkeypatch.setattr(command, "upgrade", upgrade)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    """A private PostgreSQL, one for each process that runs tests, as long as it does."""
    if why := missing():
        pytest.skip(why)
    with Server() as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: Server) -> Iterator[str]:
    """An empty PostgreSQL database, gone after the test."""
    url = postgres_server.new_database()
    yield url
    postgres_server.drop_database(url)


@pytest.fixture(params=["sqlite", "postgresql"])
def ledger_urls(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], str]]:
    """Gives URLs of ledgers that do not exist yet, on each of the databases: the first SQLite file is `ledger.db`."""
    given: list[str] = []

    def on_sqlite() -> str:
        given.append(f"sqlite:///{tmp_path / ('ledger.db' if not given else f'ledger-{len(given)}.db')}")
        return given[-1]

    if request.param == "sqlite":
        yield on_sqlite
        return
    server: Server = request.getfixturevalue("postgres_server")

    def on_postgresql() -> str:
        given.append(server.new_database())
        return given[-1]

    yield on_postgresql
    for url in given:
        server.drop_database(url)


on_sqlite = pytest.mark.parametrize("ledger_urls", ["sqlite"], indirect=True)
"""For a test about SQLite's own ways."""
on_postgresql = pytest.mark.parametrize("ledger_urls", ["postgresql"], indirect=True)


@pytest.fixture
def ledger_url(ledger_urls: Callable[[], str]) -> str:
    """Where the test's ledger is to be: the test runs on SQLite and on PostgreSQL."""
    return ledger_urls()


@pytest.fixture
def open_ledger(tmp_path: Path, ledger_url: str) -> Iterator[Callable[..., Ledger]]:
    """Opens the test's ledger, or another `url`, and closes what the test leaves open."""
    opened: list[Ledger] = []

    def opener(url: str = ledger_url, **arguments: Any) -> Ledger:
        ledger = Ledger.open(url, tmp_path, **arguments)
        opened.append(ledger)
        return ledger

    yield opener
    for ledger in opened:
        ledger.close(5.0)
