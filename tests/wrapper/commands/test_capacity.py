"""GPUs that have no work, and how long recoveries take from the failure on: what each command says of them."""

from __future__ import annotations

import io
import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from resihp.db import layouts
from resihp.db.writing.catch_up import catch_up
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan, spread
from resihp.record import journal
from resihp.settings import Settings
from resihp.wrapper.job_folder import Job, create_local_job
from resihp.wrapper.output.idle_gpus import IdleGpus
from resihp.wrapper.output.job_history import JobHistory
from resihp.wrapper.sinks.figures import followed
from resihp.wrapper.sinks.terminal import LiveView
from resihp.wrapper.sinks.tracing.spans import Story
from tests.db.conftest import outcome, started, write_journal
from tests.wrapper.commands.history.test_history import text_of
from tests.wrapper.commands.status.test_status import home, resihp, rows

__all__ = ["home"]  # a fixture that every test of this module uses

Told = Iterator[tuple[journal.AnyEntry, float]]
SIX = Layout.uniform(tp=1, pp=2, dp=3, layers=4)
IDLE = (
    "2 of 8 GPUs idle since the start: rank 7 on n2 (79 % of its peers in the start probe), "
    "rank 6 on n2 (no stage for it)"
)


def begins(job: str, nodes: int = 2, **configuration: Any) -> Told:
    began = msgspec.structs.replace(started(job), nodes=nodes, gpus_per_node=4, tp=1, configuration=configuration)
    yield began, 0.0
    for rank in range(4 * nodes):
        node = f"n{1 + rank // 4}"
        if rank % 4 == 0:
            yield journal.NodeJoined(node=node, host="here", devices=4), 0.1
        yield journal.WorkerStarted(rank=rank, node=node, device=rank % 4, pid=rank, epoch=0), 0.2


def plan(epoch: int, layout: Layout, following: int, at: float, action: Any = "start", why: str = "start") -> Told:
    made = Plan(epoch=epoch, layout=layout, assignment=spread(12, len(layout.replicas)))
    decided = journal.PlanDecided(plan=made, next_iteration=following, action=action, finish=None, reason=why)
    yield decided, at
    yield journal.PlanInEffect(epoch=epoch), at + 0.1


def commit(iteration: int, epoch: int, seconds: float) -> journal.IterationCommitted:
    return journal.IterationCommitted(epoch=epoch, outcome=outcome(iteration), seconds=seconds, predicted_seconds=None)


def quarter_idle(job: str, spares: int = 0, iterations: int = 20) -> Told:
    """Rank 7 fails the start's probe; without it there is nothing for rank 6, either. Iterations of 1 s."""
    yield from begins(job, slurm={"spares": spares})
    probes = tuple(
        journal.DeviceProbe(
            rank=rank, node=f"n{1 + rank // 4}", device=rank % 4, flops=1e12, memory_bytes=1e11,
            speed=0.79 if rank == 7 else 1.0, fit=rank != 7, evidence="",
        )
        for rank in range(8)
    )  # fmt: skip
    yield journal.ProbesTaken(probe=1, occasion="start", devices=probes, links=(), seconds=0.5), 1.0
    yield from plan(1, Layout(SIX.replicas, standby=(6, 7)), 1, 2.0)
    for i in range(1, iterations + 1):
        yield commit(i, 1, 1.0), 2.0 + i
    yield journal.JobEnded(exit_code=0, state="completed", reason="done"), 2.0 + iterations


def batch_host_dies(job: str) -> Told:
    """Iterations of 0.5 s. n1, which leads, dies just after the tenth, at 10.0 s; n2 leads from 19.6 s on, notices at
    20.3 s that it is gone, and trains again at 21.0 s."""
    yield from begins(job)
    yield from plan(1, Layout.uniform(tp=1, pp=2, dp=4, layers=4), 1, 4.0)
    for i in range(1, 11):
        yield commit(i, 1, 0.5), 5.0 + 0.5 * i
    yield journal.LeaderChosen(term=2, node="n2", host="here", how="elected", after=0), 19.6
    lost = tuple(range(4))
    for rank in lost:
        yield journal.WorkerEnded(rank=rank, exit=None, epoch=1), 20.3
    yield journal.NodeLost(node="n1", reason="its agent did not come back", how="silent"), 20.3
    found = journal.FailureFound(
        failure=1, kind="fail-stop", component="node", cause="node n1: its agent did not come back", ranks=lost,
        node="n1", device=None, iteration=11, epoch=2, evidence="", detect_s=None, noticed_s=0.01, failed_s=10.31,
    )  # fmt: skip
    yield found, 20.31
    yield from plan(2, Layout(Layout.uniform(tp=1, pp=2, dp=4, layers=4).replicas[2:]), 11, 20.5, "redo", "n1 is gone")
    yield commit(11, 2, 0.4), 21.0
    back = journal.Reconfigured(
        epoch=2, failures=(1,), attempts=1, action="redo", park_s=0.02, plan_s=0.1, groups_s=0.1, state_s=0.08,
        first_iteration_s=0.4, seconds=0.7, bytes_moved=1_300_000,
    )  # fmt: skip
    yield back, 21.0
    yield journal.JobEnded(exit_code=0, state="completed", reason="done"), 21.0


def of(told: Callable[[str], Told]) -> Job:
    """A job of this home with that journal, whose ledger the commands make."""
    job = create_local_job()
    began = job.read().created_at
    write_journal(job.journal_file, ((entry, began + at) for entry, at in told(job.name)))
    job.exit_code_file.write_text("0\n")
    return job


def in_words(text: str) -> str:
    return " ".join(text.split())


# --- GPUs without work ----------------------------------------------------------------------------------------------


def test_status_says_which_gpus_are_idle_and_why() -> None:
    job = of(quarter_idle)
    text = text_of("status", job.name)
    assert IDLE in text
    assert "goodput 75.0 %" in text
    assert "lost: idle GPUs 5.00 s" in text
    state = json.loads(resihp("status", job.name, "--json").stdout)
    assert state["goodput"] == pytest.approx(0.75, abs=1e-4)
    assert state["lost_seconds"] == pytest.approx({"idle": 5.0, "other": 0.0}, abs=1e-3)
    assert [(gpu["node"], gpu["rank"], gpu["why"], gpu["since"]) for gpu in state["idle"]] == [
        ("n2", 6, "no stage for it", 0),
        ("n2", 7, "79 % of its peers in the start probe", 0),
    ]


def test_history_cost_has_them_as_a_cause_of_their_own_and_adds_up() -> None:
    job = of(quarter_idle)
    found = {row["cause"]: row for row in rows("cost", job.name)}
    assert found["idle"]["seconds"] == pytest.approx(5.0, abs=1e-3)
    assert found["idle"]["gpu_hours"] == pytest.approx(2 * 20 / 3600, abs=1e-5)
    assert found["capacity"]["seconds"] == 0.0
    assert sum(float(str(row["gpu_hours"])) for row in found.values()) == pytest.approx(8 * 22 / 3600, abs=1e-6)
    assert sum(float(str(row["seconds"])) for row in found.values()) == pytest.approx(22.0, abs=1e-3)
    text = text_of("history", "cost", job.name)
    assert "idle GPUs 5.00 s 22.7 % 0.0111" in text
    assert "of that, idle GPUs 0.0111 (22.7 %)" in text
    assert IDLE in text
    of(batch_host_dies)
    every = text_of("history", "cost", "--all")
    assert f"idle GPUs in 1 of 2 jobs: {job.name} (0.0111 GPU-hours)" in every
    by_job = {row["job"]: row for row in rows("cost", "--all", "--by", "job")}
    assert by_job[job.name]["failure_gpu_hours"] == pytest.approx(2 * 20 / 3600, abs=1e-5)
    assert by_job[job.name]["goodput"] == pytest.approx(0.75, abs=1e-4)


def test_jobs_of_one_name_are_told_apart_and_no_name_steers_the_terminal(tmp_path: Path) -> None:
    """In a ledger of many hosts several are called local-1."""
    url = f"sqlite:///{tmp_path}/shared.db"
    for told in (quarter_idle, quarter_idle, batch_host_dies):
        job = of(told)
        catch_up(url, job.folder, job.journal_file)
    with closing(sqlite3.connect(tmp_path / "shared.db")) as ledger, ledger:
        ledger.execute("UPDATE jobs SET name = 'local-1\x1b[2J'")
        uuids = [uuid[:8] for (uuid,) in ledger.execute("SELECT uuid FROM jobs ORDER BY id LIMIT 2")]
    shown = resihp("history", "cost", "--all", "--ledger", url).stdout
    assert "idle GPUs in 2 of 3 jobs" in shown
    assert all(f"local-1\\x1b[2J, id {uuid} (0.0111 GPU-hours)" in in_words(shown) for uuid in uuids)
    assert "\x1b" not in shown


def test_the_report_says_so_too(tmp_path: Path) -> None:
    job = of(quarter_idle)
    text = in_words(resihp("report", job.name, "--markdown").stdout)
    assert IDLE in text.replace("\\", "")
    assert "| idle devices | 5.00 s |" in text
    resihp("report", job.name, "-o", str(tmp_path / "page.html"))
    page = in_words((tmp_path / "page.html").read_text().replace("\N{NO-BREAK SPACE}", " "))
    assert IDLE in page


def shown(told: Told, past: int = 0) -> str:
    """What the console of a supervisor shows that leads from record `past` on."""
    file = io.StringIO()
    records = [journal.Record(seq, 1e9 + at, entry) for seq, (entry, at) in enumerate(told, 1)]
    settings = Settings(job="local-1", nodes=2, gpus_per_node=4, tp=1, pp=2)
    view = LiveView(Console(file=file, width=200), settings, clock=lambda: 0.0, past=records[:past])
    for record in records[past:]:
        view.entry(record)
    view.close()
    assert view.errors == 0
    return file.getvalue()


def test_the_console_says_so_as_training_begins_and_at_the_end() -> None:
    text = shown(quarter_idle("local-1"))
    assert text.count(IDLE) == 2
    last = text.splitlines()[-1]
    assert last.endswith(f"{IDLE}; for the cost: resihp history cost local-1")
    assert "idle" not in shown(batch_host_dies("local-1")).splitlines()[0]


def test_spare_nodes_stand_by_as_they_were_asked_to() -> None:
    """They are shown, and no time is lost for them."""

    def with_spare(job: str) -> Told:
        yield from begins(job, slurm={"spares": 1})
        yield from plan(1, Layout(Layout.uniform(tp=1, pp=2, dp=2, layers=4).replicas, standby=(4, 5, 6, 7)), 1, 2.0)
        for i in range(1, 11):
            yield commit(i, 1, 1.0), 2.0 + i
        yield journal.JobEnded(exit_code=0, state="completed", reason="done"), 12.0

    job = of(with_spare)
    text = text_of("status", job.name)
    assert "4 of 8 GPUs idle since the start: ranks 4-7 on n2 (spare)" in text
    assert "goodput 100.0 %" in text
    assert {row["cause"]: row["seconds"] for row in rows("cost", job.name)}["idle"] == 0.0


def test_a_mirror_computes_nothing_so_its_gpus_count_as_idle() -> None:
    """The same in the console, status, cost and metrics."""

    def with_mirror(job: str) -> Told:
        yield from begins(job)
        layout = Layout.uniform(tp=1, pp=2, dp=4, layers=4)
        made = Plan(epoch=1, layout=layout, assignment=(*spread(12, 3), ()))
        yield journal.PlanDecided(plan=made, next_iteration=1, action="start", finish=None, reason="start"), 2.0
        yield journal.PlanInEffect(epoch=1), 2.0
        for i in range(1, 11):
            yield commit(i, 1, 1.0), 2.0 + i
        yield journal.JobEnded(exit_code=0, state="completed", reason="done"), 12.0

    line = "2 of 8 GPUs idle since the start: ranks 6-7 on n2 (holds a copy of the state)"
    job = of(with_mirror)
    assert line in shown(with_mirror(job.name))
    state = json.loads(resihp("status", job.name, "--json").stdout)
    assert state["idle_line"] == line
    assert state["goodput"] == pytest.approx(0.75, abs=1e-4)
    assert {row["cause"]: row["seconds"] for row in rows("cost", job.name)}["idle"] == pytest.approx(2.5, abs=1e-3)
    [row] = rows("plans", job.name)
    assert (row["active"], row["standby"], row["layout"]["mirrors"]) == (6, 2, [3])
    records = [journal.Record(seq, 1e9 + at, entry) for seq, (entry, at) in enumerate(with_mirror(job.name), 1)]
    assert followed(records).goodput(1e9 + 12.0) == pytest.approx(0.75, abs=1e-4)
    followed_plan = JobHistory.of_records(records).shown_plan
    assert followed_plan is not None
    assert followed_plan.description == row["description"] == state["description"]
    assert "mirror" in row["description"]


def test_since_when_and_why_each_has_no_work() -> None:
    """Of what died, stands by for it, was lost with its node, never came, and is slow."""
    history = JobHistory()

    def line(*entries: journal.AnyEntry) -> str:
        for entry in entries:
            history.follow(journal.Record(history.seq + 1, 1e9 + history.seq, entry))
        return IdleGpus(history).line()

    uniform = Layout.uniform(tp=1, pp=2, dp=4, layers=4)
    full, _ = zip(*[*begins("j"), *plan(1, uniform, 1, 0.0)], strict=True)
    assert line(*full) == ""
    died = journal.FailureFound(
        failure=1, kind="fail-stop", component="device", cause="", ranks=(3,), node="n1", device=3, iteration=12,
        epoch=2, evidence="", detect_s=None,
    )  # fmt: skip
    shrunk, _ = zip(*plan(2, uniform.without(frozenset({3})), 12, 0.0, "redo"), strict=True)
    assert line(died, *shrunk) == (
        "2 of 8 GPUs idle since iteration 12: rank 3 on n1 (it died), rank 2 on n1 (no stage for it)"
    )
    slow = msgspec.structs.replace(died, failure=2, kind="fail-slow", ranks=(5,), node="n2", device=1, speed=0.4)
    left = Layout(uniform.replicas[:1], standby=(2, 4, 5, 6, 7))
    less, _ = zip(*plan(3, left, 20, 0.0, "between"), strict=True)
    assert line(slow, *less) == (
        "6 of 8 GPUs idle: rank 3 on n1 (it died, since iteration 12), rank 5 on n2 (slow, 40 % of its speed, since "
        "iteration 20), rank 2 on n1 (no stage for it, since iteration 12), ranks 4, 6-7 on n2 (no stage for it, since "
        "iteration 20)"
    )
    gone = journal.NodeLost(node="n2", reason="silent")
    assert "ranks 4-7 on n2 (its node was lost, since iteration 20)" in line(gone)
    assert "2 of 8 GPUs idle since iteration 12" in line(journal.NodeJoined(node="n2", host="h", devices=4), *shrunk)


@pytest.mark.parametrize(("since", "read"), [(71, 1), (68, 4), (3, 64)])
def test_no_more_layouts_are_read_than_it_takes(since: int, read: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16,384 ranks each took 50 ms. Rank 3 has no work since that plan, of 70."""
    uniform = Layout.uniform(tp=1, pp=2, dp=4, layers=4)

    def often(job: str) -> Told:
        yield from begins(job)
        for epoch in range(1, 71):
            layout = uniform.without(frozenset({3})) if epoch >= since else uniform
            yield from plan(epoch, layout, epoch, 2.0 * epoch, "start" if epoch == 1 else "between")
            yield commit(epoch, epoch, 1.0), 2.0 * epoch + 1.0

    live = JobHistory.of_records(journal.Record(seq, at, entry) for seq, (entry, at) in enumerate(often("j"), 1))
    job = of(often)
    found: list[str] = []
    ranks_of = layouts.ranks_of
    monkeypatch.setattr(layouts, "ranks_of", lambda text: (found.append(text), ranks_of(text))[1])
    assert json.loads(resihp("status", job.name, "--json").stdout)["idle_line"] == IdleGpus(live).line()
    assert len(found) == read


# --- from the failure on --------------------------------------------------------------------------------------------


def test_the_console_of_the_successor_counts_from_the_failure_on() -> None:
    """The batch host died 11 s before training was back; "recovered in 0.70 s" said who noticed at the last moment."""
    told = list(batch_host_dies("local-1"))
    led = next(n for n, (entry, _) in enumerate(told) if isinstance(entry, journal.LeaderChosen))
    [line] = [line for line in shown(iter(told), past=led).splitlines() if "recovered" in line]
    assert line.endswith(
        "recovered: DP2 x PP2 x TP1, iteration 11 redone, 11.0 s after the failure (noticed after 10.3 s, decided in "
        "0.12 s, moved in 0.18 s, first iteration 0.40 s; 0.70 s without noticing), 1.3 MB moved"
    )


def test_history_status_and_the_report_count_from_the_failure_on() -> None:
    job = of(batch_host_dies)
    [row] = rows("failures", job.name)
    assert row["seconds_to_recover"] == pytest.approx(11.0, abs=1e-3)
    assert row["noticed_after_seconds"] == pytest.approx(10.3, abs=1e-3)
    assert row["seconds_without_noticing"] == pytest.approx(0.7, abs=1e-3)
    assert re.search(r"11\.0 s, .*noticed .*after .*10\.3 s", text_of("history", "failures", job.name))
    [node] = rows("failures", "--all", "--by", "node")
    assert node["recover_seconds"] == pytest.approx(11.0, abs=1e-3)
    assert node["without_noticing_seconds"] == pytest.approx(0.7, abs=1e-3)
    assert "MTTR 11.0 s (detection included)" in text_of("history", "cost", job.name)
    status = text_of("status", job.name)
    assert "recovered from failure 1, 11.00 s after it (noticed after 10.30 s, 0.70 s without noticing)" in status
    report = in_words(resihp("report", job.name, "--markdown").stdout).replace("\\", "")
    assert "training was back 11.0 s after it (10.3 s of that for detection)" in report
    assert "training back in 11.0 s (0.70 s without detection)" in report
    assert "11.00 s after it (noticed after 10.30 s, 0.70 s without noticing)" in json.dumps(rows("events", job.name))


@pytest.mark.parametrize("successor", ["n2", "n1"])
def test_status_tells_where_the_output_goes_on_after_the_batch_host(successor: str) -> None:
    """The file of `#SBATCH --output` ends with its host; nothing said where the rest was. One that was started again
    on the same host goes on in that file."""

    def told(job: str) -> Told:
        for entry, at in batch_host_dies(job):
            if isinstance(entry, journal.NodeJoined):
                entry = msgspec.structs.replace(entry, host="here" if entry.node == "n1" else f"of-{entry.node}")
            if isinstance(entry, journal.LeaderChosen):
                entry = msgspec.structs.replace(entry, node=successor)
            yield entry, at

    job = of(told)
    log = f"{job.folder}/logs/n2.agent.log"
    where = json.loads(resihp("status", job.name, "--json").stdout)["output"]
    assert where == (log if successor == "n2" else None)
    assert ("output continues in" in text_of("status", job.name)) == (successor == "n2")


def test_a_trace_begins_with_the_failure() -> None:
    story = Story()
    told = enumerate(batch_host_dies("local-1"), 1)
    [trace] = [one for seq, (entry, at) in told for one in story.follow(journal.Record(seq, at, entry))]
    assert (round(trace.root.start, 3), round(trace.root.end, 3)) == (10.0, 21.0)
    assert [child.name for child in trace.root.children][:2] == ["notice", "park"]
    assert trace.root.attributes["resihp.seconds_to_recover"] == pytest.approx(11.0)
    assert trace.root.attributes["resihp.noticed_after"] == pytest.approx(10.3)
