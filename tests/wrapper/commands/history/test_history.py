"""`history` over all jobs and `why`: the questions of the morning after, odd names, and what cannot be answered."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from resihp.db.migrate import upgrade
from resihp.db.reading import fleet
from resihp.db.reading.costs import fleet_costs
from resihp.db.reading.reader import Reader
from resihp.db.writing.catch_up import catch_up
from resihp.errors import JobNotFoundError, LedgerError, UsageError
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan, spread
from resihp.record import journal
from resihp.wrapper.commands.history import all_jobs, one_job, query
from resihp.wrapper.commands.history.views import HISTORY_VIEWS
from resihp.wrapper.job_folder import Job, create_local_job
from tests.db.conftest import absent_story, inventory, outcome, started, write_journal
from tests.wrapper.commands.status.test_status import home, resihp, rows

__all__ = ["home"]  # a fixture that every test of this module uses

ODD = "n2 '; DROP TABLE jobs; -- <script>alert(1)</script> [red]ü😀[/red]"
LAYOUT = Layout.uniform(tp=1, pp=2, dp=2, layers=4)


def hurt(
    job: Job,
    *,
    killed: str = "n2",
    slow_until: int | None = None,
    speed: float = 0.5,
    off: float = 1.0,
    kills: bool = False,
) -> Iterator[tuple[journal.AnyEntry, float]]:
    """40 iterations of 1 s. Rank 1 of n1 is at half its speed from iteration 31 on, rank 3 dies in iteration 21, of a
    fault on purpose if it `kills`, of which another supervisor does not know any more. What is predicted is `off` by
    this factor."""
    began = job.read().created_at - 3600.0
    at = began
    yield msgspec.structs.replace(started(job.name), nodes=2, gpus_per_node=2), at
    for rank in range(4):
        node = "n1" if rank < 2 else killed
        if rank % 2 == 0:
            yield journal.NodeJoined(node=node, host="here", devices=2), at
        yield journal.WorkerStarted(rank=rank, node=node, device=rank % 2, pid=rank, epoch=0), at
    plan = Plan(epoch=1, layout=LAYOUT, assignment=spread(4, 2))
    yield (
        journal.PlanDecided(plan=plan, next_iteration=1, action="start", finish=None, reason="start", predicted=10.0),
        at,
    )
    yield journal.PlanInEffect(epoch=1), at + 0.5
    at += 1.0

    def commit(iteration: int, epoch: int, seconds: float, predicted: float) -> journal.IterationCommitted:
        return journal.IterationCommitted(
            epoch=epoch, outcome=outcome(iteration), seconds=seconds, predicted_seconds=off * predicted
        )

    for i in range(1, 21):
        at += 1.0
        yield commit(i, 1, 1.0, 1.0), at
    if kills:
        text = "kill:rank=3@iteration=21,phase=forward"
        yield journal.FaultInjected(fault=1, text=text, rank=3, node=None, iteration=21, kind="kill"), at + 0.4
    yield journal.WorkerEnded(rank=3, exit=-9, epoch=1), at + 0.5
    cause = "rank 3 killed by signal 9 (SIGKILL)"

    def found(failure: int, kind: Any, rank: int, node: str, iteration: int, **more: Any) -> journal.FailureFound:
        return journal.FailureFound(
            failure=failure,
            kind=kind,
            component="device",
            cause=more.pop("cause", cause),
            ranks=(rank,),
            node=node,
            device=rank % 2,
            iteration=iteration,
            epoch=2,
            evidence="seen",
            **more,
        )

    detect_s = None if kills else 0.1
    yield found(1, "fail-stop", 3, killed, 21, detect_s=detect_s, failed_s=detect_s), at + 0.5
    plan = Plan(epoch=2, layout=LAYOUT.without(frozenset({3})), assignment=spread(4, 1))
    yield (
        journal.PlanDecided(plan=plan, next_iteration=21, action="redo", finish=None, reason=cause, predicted=20.0),
        at + 0.6,
    )
    yield journal.PlanInEffect(epoch=2), at + 0.8
    at += 4.5
    yield commit(21, 2, 2.0, 2.0), at
    yield (
        journal.Reconfigured(
            epoch=2,
            failures=(1,),
            attempts=1,
            action="redo",
            park_s=0.5,
            plan_s=0.5,
            groups_s=0.5,
            state_s=0.5,
            first_iteration_s=2.0,
            seconds=4.0,
        ),
        at,
    )
    for i in range(22, 31):
        at += 2.0
        yield commit(i, 2, 2.0, 2.0), at
    slow = f"rank 1 at {100 * speed:.0f} % of its speed"
    for i in range(31, 41):
        at += 4.0
        yield commit(i, 2, 4.0, 2.0), at
        if i == 35:
            yield (
                found(2, "fail-slow", 1, "n1", 31, detect_s=None, cause=slow, speed=speed, confidence=0.99),
                at,
            )
            unfit = journal.DeviceProbe(
                rank=1, node="n1", device=1, flops=5e13, memory_bytes=1e12, speed=0.5, fit=False, evidence="at 50 %"
            )
            yield journal.ProbesTaken(probe=1, occasion="standby", seconds=0.1, devices=(unfit,), links=()), at
        if slow_until == i + 1:
            yield journal.FailureEnded(failure=2, iteration=i + 1, evidence="as fast as before"), at
    yield journal.JobEnded(exit_code=0, state="completed", reason="40 iterations done"), at


def told(**options: Any) -> Job:
    job = create_local_job()
    write_journal(job.journal_file, hurt(job, **options))
    job.exit_code_file.write_text("0\n")
    return job


def text_of(*arguments: str) -> str:
    """What a terminal of 80 columns shows, in one line of words."""
    shown = resihp(*arguments).stdout
    assert max(map(len, [*shown.splitlines(), ""])) <= 80
    return " ".join(shown.split())


# --- the questions of the morning after -----------------------------------------------------------------------------


def test_why_was_iteration_37_slow() -> None:
    told()
    text = text_of("why", "37")
    assert "iteration 37 took 4.00 s, 2.00 times the 2.00 s predicted for healthy devices" in text
    assert "n1 device 1 was slow, at 50% of its speed since iteration 31" in text
    assert "3 of 4 devices" not in text
    assert "2 of 4 devices worked" in text
    answer = json.loads(resihp("why", "37", "--json").stdout)
    assert (answer["schema"], answer["job"], answer["slow"]) == (1, "local-1", True)
    assert [row["failure"] for row in answer["failures"]] == [2]
    assert [(row["failure"], row["explains_seconds"]) for row in answer["causes"]] == [(2, 2.0)]
    assert (answer["measure"], answer["excess_seconds"], answer["unexplained_seconds"]) == ("predicted", 2.0, 0.0)
    assert not json.loads(resihp("why", "25", "--json").stdout)["slow"]
    assert "0.10 s until it was noticed, 0.40 s of work redone, 2.00 s to reconfigure" in text_of("why", "21")


def test_why_does_not_name_a_device_that_cannot_explain_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    told(speed=0.92)
    assert resihp("why", "37").stdout.splitlines()[:3] == [
        "iteration 37 took 4.00 s, 2.00 times the 2.00 s predicted for healthy devices",
        "- unexplained: 1.83 s of the 2.00 s excess",
        "- too little to be the cause: n1 device 1 was slow, at 92% of its speed since iteration 31 (failure 2: rank 1 "
        "at 92 % of its speed): accounts for up to 0.17 s of the 2.00 s excess",
    ]


def test_why_compares_with_what_is_usual_where_predictions_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    told(off=0.25)
    assert resihp("why", "37").stdout.splitlines()[:3] == [
        "iteration 37 took 4.00 s, 2.00 times the 2.00 s usual for this job (median of the last 10 iterations of this "
        "shape)",
        "- predicted for healthy devices: 0.50 s, not used: those iterations took 4 times their predictions",
        "- n1 device 1 was slow, at 50% of its speed since iteration 31 (failure 2: rank 1 at 50 % of its speed): "
        "accounts for up to 2.00 s of the 2.00 s excess",
    ]
    assert resihp("why", "25").stdout.splitlines()[0] == (
        "iteration 25 took 2.00 s: not slow, 1.00 times the 2.00 s usual for this job (median of the last 4 iterations "
        "of this shape)"
    )


def test_what_was_broken_on_purpose_and_what_came_after_it_counts_against_no_node() -> None:
    told(kills=True)
    health = [line.split()[:5] for line in resihp("node", "health").stdout.splitlines()]
    assert ["n1", "no", "0", "in", "180"] in health
    assert ["n2", "no", "0", "in", "180"] in health
    assert "found unfit" not in text_of("node", "health")
    assert [(row["node"], row["failures"], row["observed"]) for row in rows("lemons")] == [("n1", 0, 0), ("n2", 0, 0)]
    assert rows("repairs", "--all") == []
    around = (datetime.now(UTC) - timedelta(days=1)).isoformat()
    assert {row["failures"] for row in rows("rate", "--all", "--around", around)} == {0}
    counted = rows("lemons", "--injected")
    assert {(row["node"], row["failures"], row["observed"]) for row in counted} == {("n1", 1, 1), ("n2", 1, 1)}


def test_what_happened_by_itself_counts_against_nodes() -> None:
    told()
    assert "found unfit" in text_of("node", "health")
    assert [(row["node"], row["observed"]) for row in rows("lemons")] == [("n1", 1), ("n2", 0)]


def test_which_node_failed_most_this_month() -> None:
    told()
    told()
    told(killed="n7")
    found = rows("failures", "--all", "--by", "node", "--since", "30d")
    assert [(row["node"], row["failures"], row["fail_stop"], row["fail_slow"], row["jobs"]) for row in found] == [
        ("n1", 3, 0, 3, 3),
        ("n2", 2, 2, 0, 2),
        ("n7", 1, 1, 0, 1),
    ]
    assert "n1 3 0 3 3 - -" in text_of("history", "failures", "--all", "--by", "node", "--since", "30d")
    assert rows("failures", "--all", "--by", "node", "--until", "1d") == []
    assert [row["failures"] for row in rows("failures", "--all", "--by", "job")] == [2, 2, 2]
    found = rows("failures", "local-1", "--by", "component")
    assert [(row["component"], row["failures"]) for row in found] == [("device", 2)]


def test_how_many_gpu_hours_did_failures_cost() -> None:
    job = told()
    # 0.1 s until noticed, 0.4 s redone, 2.0 s to reconfigure; of the 60 s of the second plan half for want of two of
    # four devices: one was dead, the other had no stage; of the other half 10 iterations 2 s too long.
    seconds = {"detect": 0.1, "redo": 0.4, "reconfigure": 2.0, "slow": 10.0, "idle": 15.0, "capacity": 15.0}
    found = {row["cause"]: row for row in rows("cost", job.name)}
    for cause, each in seconds.items():
        assert found[cause]["seconds"] == pytest.approx(each, abs=1e-3), cause
        assert found[cause]["gpu_hours"] == pytest.approx(each * 4 / 3600, abs=1e-6)
        assert found[cause]["of_failures"]
    assert found["useful"]["seconds"] == pytest.approx(40.0, abs=1e-3)
    text = text_of("history", "cost")
    assert "failures cost 0.0472 of 0.0928 GPU-hours (50.9 %)" in text
    assert "2 of 4 GPUs idle since iteration 21: rank 3 on n2 (it died), rank 2 on n2 (no stage for it)" in text
    assert "idle GPUs in" not in text
    told()
    stood_by = "idle GPUs in 2 of 2 jobs: local-2 (0.0167 GPU-hours), local-1 (0.0167 GPU-hours)"
    assert stood_by in text_of("history", "cost", "--all")
    both = {row["cause"]: row for row in rows("cost", "--all")}
    assert both["slow"]["seconds"] == pytest.approx(20.0, abs=1e-3)
    assert [row["job"] for row in rows("cost", "--all", "--by", "job")] == ["local-2", "local-1"]
    assert rows("cost", "--by", "job")[0]["mttr_seconds"] == pytest.approx(4.1)


def test_what_did_it_cost_in_money_whom_and_when() -> None:
    first = told()
    told()
    for by, name in (("owner", "me"), ("account", "-")):
        [row] = rows("cost", "--all", "--by", by, "--price", "3600")
        assert (row[by], row["jobs"], row["failures"], row["hardware_failures"]) == (name, 2, 4, 2)
        assert row["money"] == pytest.approx(row["gpu_hours"] * 3600)
    weeks = rows("cost", "--all", "--by", "week")
    assert sum(row["gpu_hours"] for row in weeks) == pytest.approx(row["gpu_hours"])
    assert all("money" not in row for row in weeks)
    began = first.read().created_at - 3600.0
    cut = datetime.fromtimestamp(began + 6.0, UTC).isoformat()  # 1 s of start, 5 iterations
    early = {row["cause"]: row["seconds"] for row in rows("cost", "--all", "--until", cut)}
    assert 5.0 <= early["useful"] <= 10.0
    assert early["start"] + early["useful"] == pytest.approx(sum(early.values()))
    told_text = text_of("history", "cost", "--price", "3600")
    assert re.search(r"until the first known iteration 1\.00 s \S+ % 0\.0011 4 ", told_text)  # 1 s of 4 devices
    assert re.search(r"failures cost 0\.0472 of \S+ GPU-hours \(\S+ %\), 170 of \S+ in money", told_text)
    assert re.search(
        r"useful share \S+ %, MTTR 4\.10 s \(detection included\) failures 2: MTBF .* of hardware 1: MTBF", told_text
    )
    assert "per 1,000 GPU-days" in text_of("history", "cost")
    assert "lab" not in text_of("history", "cost", "--all", "--by", "account")


def test_iterations_that_a_later_job_of_this_home_repeated() -> None:
    """Each has a ledger of its own."""
    run = "00000000-0000-0000-0000-00000000000a"
    for _ in range(2):
        job = create_local_job()
        job.run_file.write_text(json.dumps({"run": run}))
        job.exit_code_file.write_text("0\n")
        of_run = (
            (msgspec.structs.replace(entry, run=run) if isinstance(entry, journal.JobStarted) else entry, at)
            for entry, at in hurt(job)
        )
        write_journal(job.journal_file, of_run)
    first, second = ({row["cause"]: row["seconds"] for row in rows("cost", name)} for name in ("local-1", "local-2"))
    assert (first["useful"], first["rollback"]) == pytest.approx((0.0, 40.0), abs=1e-3)
    assert (second["useful"], second["rollback"]) == pytest.approx((40.0, 0.0), abs=1e-3)
    both = {row["cause"]: row["seconds"] for row in rows("cost", "--all")}
    assert (both["useful"], both["rollback"]) == pytest.approx((40.0, 40.0), abs=1e-3)
    # The report of each tells the same, in its figures and in words.
    for name, cost in (("local-1", first), ("local-2", second)):
        told = json.loads(resihp("report", name, "--markdown", "--json").stdout)
        lost = {cause: seconds for cause, seconds in cost.items() if cause != "useful"}
        assert told["figures"]["lost_seconds"] == pytest.approx(lost)
        assert told["figures"]["useful_seconds"] == pytest.approx(cost["useful"])
        assert ("repeated iterations" in told["text"]) == (name == "local-1")


def test_did_the_last_plan_keep_its_promise() -> None:
    told()
    found = rows("promises")
    assert [(row["epoch"], row["promised"], row["verdict"]) for row in found] == [
        (1, None, "promised nothing"),
        (2, 2.0, "kept"),
    ]
    assert found[-1]["kept"] == pytest.approx(2.0)
    assert "2 +100.0 % +100.0 % kept" in text_of("history", "promises")
    told()
    of_all_jobs = [(row["job"], row["epoch"], row["promised"]) for row in rows("promises", "--all")]
    assert of_all_jobs == [("local-2", 2, 2.0), ("local-1", 2, 2.0)], "without plans that promised nothing"


def doubted(job: Job) -> Iterator[tuple[journal.AnyEntry, float]]:
    """Node n2 is silent for a while, rank 1 is found slow; its plan stays."""
    *entries, (end, at) = hurt(job)
    yield from entries
    silence = journal.Suspected(
        rank=None,
        node="n2",
        evidence="3 missed heartbeats, last 3.2 s ago",
        suspicion=1,
        component="node",
        iteration=41,
        detected=41,
        sign="silent",
        test="s without a beat",
        statistic=3.25,
        threshold=3.0,
    )
    yield silence, at
    yield msgspec.structs.replace(silence, cleared=True, outcome="passed", evidence="beats again"), at
    slow = msgspec.structs.replace(silence, rank=1, node="n1", kind="slow", suspicion=2, component="device", ranks=(1,))
    yield msgspec.structs.replace(slow, sign="", test="log evidence", statistic=15.3, threshold=14.5), at
    yield (
        journal.ChangeDeclined(
            about="plan",
            reason="rank 1 is slow",
            why="the job ends first",
            iteration=41,
            failures=(2,),
            layout="another",
            predicted=3.5,
            present=4.0,
            unit="s",
            considered=(journal.OtherPlan(name="all devices", predicted=7.0),),
        ),
        at,
    )
    yield end, at


def test_what_was_suspected_and_against_which_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    job = create_local_job()
    write_journal(job.journal_file, doubted(job))
    job.exit_code_file.write_text("0\n")
    assert text_of("history", "suspicions"), "of 80 columns"
    monkeypatch.setenv("COLUMNS", "300")
    told = resihp("history", "suspicions").stdout
    assert re.search(r"1 +silent +node n2 .* 3.25 / 3 s without a beat +passed", told), told
    assert re.search(r"2 +slow-compute +rank 1 .* 15.3 / 14.5 log evidence +open", told), told
    of_kind = json.loads(resihp("history", "suspicions", "--kind", "silent", "--json").stdout)["rows"]
    assert [(row["suspicion"], row["meaning"]) for row in of_kind] == [(1, "a node's beats do not come")]
    assert resihp("history", "suspicions", "--all", "--kind", "silent", "--csv").stdout.count("\n") == 2


def test_what_was_decided_and_what_was_not(monkeypatch: pytest.MonkeyPatch) -> None:
    job = create_local_job()
    write_journal(job.journal_file, doubted(job))
    job.exit_code_file.write_text("0\n")
    found = json.loads(resihp("history", "decisions", "--json").stdout)["rows"]
    assert [(row["kind"], row["epoch"], row["outcome"]) for row in found] == [
        ("plan", 1, "promised nothing"),
        ("plan", 2, "kept its promise"),
        ("plan stays", None, "in effect to the end, or still"),
    ]
    assert found[1]["failures"] == [1]
    assert found[2]["refused"] == [
        {"name": "another", "predicted": 3.5, "why": "the job ends first"},
        {"name": "all devices", "predicted": 7.0, "why": "100.0% slower"},
    ]
    assert text_of("history", "decisions"), "of 80 columns"
    monkeypatch.setenv("COLUMNS", "300")
    told = resihp("history", "decisions").stdout
    assert "all devices 7 s (100.0% slower)" in told
    assert "kept its promise" in told
    assert resihp("history", "decisions", "--limit", "1", "--csv").stdout.count("rank 1 is slow") == 1


def test_which_nodes_to_distrust() -> None:
    for _ in range(4):
        told()
    found = rows("lemons", "--injected")
    assert [(row["node"], row["failures"], row["jobs"]) for row in found] == [("n2", 4, 4), ("n1", 4, 4)]
    # Four jobs at the same time: to each node it is one outage, which makes no lemon.
    assert [(row["observed"], row["lemon"], row["lemon_devices"]) for row in found] == [(1, False, "")] * 2
    assert all(row["expected"] < row["p"] < row["q"] == 1.0 for row in found)
    assert [row["node"] for row in rows("lemons", "--node", "n1")] == ["n1"]
    assert "n2" in text_of("history", "lemons", "--injected")


# --- what is shown --------------------------------------------------------------------------------------------------


def test_a_terminal_shows_the_newest_fifty_and_says_so() -> None:
    job = told()
    path = job.folder / "more"
    path.mkdir()
    entries = [
        (journal.IterationCommitted(epoch=1, outcome=outcome(i), seconds=1.0, predicted_seconds=None), 1.75e9 + i)
        for i in range(1, 121)
    ]
    write_journal(path / "journal", iter([(started("long"), 1.75e9), *entries]))
    catch_up("sqlite", path, path / "journal")
    url = f"sqlite:///{path / 'ledger.db'}"
    shown = resihp("history", "iterations", "--ledger", url)
    lines = [line.split() for line in shown.stdout.splitlines() if line.strip()[:1].isdigit()]
    assert [int(line[0]) for line in lines] == list(range(71, 121))
    assert shown.stderr == ("resihp: job long: the newest 50 of 120 iterations; more with --limit, all with --json\n")
    assert len(rows("iterations", "--ledger", url)) == 120
    assert [row["iteration"] for row in rows("iterations", "--ledger", url, "--limit", "2")] == [119, 120]
    assert len(list(csv.reader(io.StringIO(resihp("history", "iterations", "--ledger", url, "--csv").stdout)))) == 121
    shown = resihp("history", "iterations", "--ledger", url, "--limit", "120")
    assert "resihp:" not in shown.stderr
    shown = resihp("history", "iterations", "--all", "--limit", "3")
    assert "resihp: all jobs: the newest 3 iterations; more with --limit" in shown.stderr
    assert [row["iteration"] for row in rows("iterations", "--all", "--limit", "2")] == [39, 40]


def test_a_node_that_never_came_is_shown_and_can_be_asked_for() -> None:
    job = told()
    path = job.folder / "absent"
    path.mkdir()
    write_journal(path / "journal", absent_story())
    catch_up("sqlite", path, path / "journal")
    ledger = ("--ledger", f"sqlite:///{path / 'ledger.db'}")
    shown = text_of("history", "nodes", *ledger)
    assert re.search(r"n3 .* never joined .* n9", shown)
    [row] = rows("nodes", "--node", "n3", *ledger)
    assert (row["joined_at"], row["lost_reason"], row["replaced_by"]) == (None, "has not joined within 600 s", "n9")
    assert "n3" not in [row["node"] for row in rows("lemons", *ledger)]


def test_all_jobs_of_a_home_and_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    first, second, third = told(), told(), told()
    found = rows("failures", "--all")
    assert sorted(str(row["job"]) for row in found) == [name for n in (1, 2, 3) for name in [f"local-{n}"] * 2]
    assert [row["noticed_at"] for row in found] == sorted(str(row["noticed_at"]) for row in found)
    (second.folder / "ledger.db").write_bytes(b"this is no database" * 100)
    shutil.rmtree(third.folder / "ledger.db", ignore_errors=True)
    (third.folder / "ledger.db").unlink()
    connection = sqlite3.connect(first.folder / "ledger.db")
    with connection:
        connection.execute("UPDATE resihp_version SET version_num = '0999'")
        connection.execute("UPDATE compatibility SET min_reader = '0999', min_writer = '0999'")
    connection.close()
    result = resihp("history", "failures", "--all", "--json")
    assert {row["job"] for row in json.loads(result.stdout)["rows"]} == {third.name}
    assert f"resihp: warning: job {second.name}: left out: " in result.stderr
    assert f"resihp: warning: job {first.name}: left out: " in result.stderr
    assert "upgrade resihp" in result.stderr


def test_where_no_ledger_can_be_read_nobody_is_told_that_nothing_happened() -> None:
    only = told()
    (only.folder / "ledger.db").write_bytes(b"this is no database" * 100)
    for view in ("failures", "cost", "jobs", "lemons"):
        with pytest.raises(LedgerError, match=rf"job {only.name}: ledger .*database"):
            resihp("history", view, "--all", "--json")
    other = told()
    (other.folder / "ledger.db").write_bytes(b"this is no database" * 100)
    with pytest.raises(LedgerError, match=r"none of 2 jobs in .* can be read: "):
        resihp("history", "failures", "--all")


def test_a_server_that_is_down_is_tried_once_for_all_jobs_and_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    readable, *others = told(), told(), told(), told()
    for job in others:
        job.set_ledger("postgresql+psycopg://nobody@127.0.0.1:1/nothing")
    tried: list[str] = []
    opened = Reader.open

    def open_(url: str) -> Reader:
        tried.append(url)
        return opened(url)

    monkeypatch.setattr(Reader, "open", open_)
    result = resihp("history", "failures", "--all", "--json")
    assert {row["job"] for row in json.loads(result.stdout)["rows"]} == {readable.name}
    assert len([url for url in tried if url.startswith("postgresql")]) == 1
    assert result.stderr.count("left out: ") == 1
    assert "warning: 3 jobs (local-4, local-3, local-2): left out: ledger postgresql+psycopg://" in result.stderr


@pytest.mark.parametrize("view", ["failures", "nodes", "workers", "plans", "reconfigurations", "drains", "probes"])
def test_every_table_can_be_of_all_jobs(view: str, tmp_path: Path) -> None:
    told()
    told()
    found = rows(view, "--all")
    parsed = list(csv.reader(io.StringIO(resihp("history", view, "--all", "--csv").stdout)))
    assert parsed[0][0] == "job"
    assert len(parsed) == len(found) + 1
    path = tmp_path / "out.parquet"
    resihp("history", view, "--all", "--parquet", str(path))
    assert path.stat().st_size > 0
    text_of("history", view, "--all")


@pytest.mark.parametrize(
    ("view", "counted"),
    [
        (("iterations", "--all"), 40),
        (("devices", "--all"), 4),
        (("failures", "--all"), 2),
        (("rate", "--having", "driver=570.86.15"), 6),
    ],
)
def test_of_one_user_alone(view: tuple[str, ...], counted: int) -> None:
    job = create_local_job()
    made = [
        (msgspec.structs.replace(one, inventory=inventory(one.node, devices=2)), at)
        if isinstance(one, journal.NodeJoined)
        else (one, at)
        for one, at in hurt(job)
    ]
    write_journal(job.journal_file, iter(made))
    job.exit_code_file.write_text("0\n")

    def exposed(found: list[dict[str, Any]]) -> int:
        return len([row for row in found if row.get("device_days") != 0.0])

    asked = ("history", *view, "--limit", "100", "--json")
    found = json.loads(resihp(*asked).stdout)["rows"]
    assert len(found) == counted
    of_owner = json.loads(resihp(*asked, "--user", "me").stdout)["rows"]
    assert of_owner == found
    assert exposed(json.loads(resihp(*asked, "--user", "nobody").stdout)["rows"]) == 0


def test_two_jobs_that_differ_in_a_secret_do_not_tell_it() -> None:
    for secret in ("B0ssKey", "B1ssKey"):
        job = create_local_job()
        [(first, at), *rest] = hurt(job)
        assert isinstance(first, journal.JobStarted)
        hooks = {"hooks": {"webhook": f"https://hooks.example/{secret}", "token": secret}}
        first = msgspec.structs.replace(first, configuration=hooks)
        write_journal(job.journal_file, iter([(first, at), *rest]))
        job.exit_code_file.write_text("0\n")
    for form in ((), ("--json",)):
        shown = resihp("compare", "local-1", "local-2", *form).stdout
        assert "hooks.webhook" in shown
        assert "ssKey" not in shown


def test_what_iterations_take_for_their_tokens_is_no_secret() -> None:
    told(), told()
    rows = json.loads(resihp("compare", "local-1", "local-2", "--json").stdout)["rows"]
    assert rows[-1]["what"] == "device-seconds for a million tokens"
    assert float(rows[-1]["first"]) == float(rows[-1]["second"]) > 0.0


def test_what_differs_is_shown_literally(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shared.db"
    for job in (told(), told()):
        catch_up(url, job.folder, job.journal_file)
    with closing(sqlite3.connect(tmp_path / "shared.db")) as ledger, ledger:
        ledger.execute("UPDATE jobs SET torch = '\x1b]0;taken over\x07' WHERE name = 'local-2'")
    shown = resihp("compare", "local-1", "local-2", "--ledger", url).stdout
    assert "taken over" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("odd", ["", "[1]", "{", '"text"'])
def test_a_job_whose_configuration_is_none_is_compared_all_the_same(odd: str, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shared.db"
    for job in (told(), told()):
        catch_up(url, job.folder, job.journal_file)
    with closing(sqlite3.connect(tmp_path / "shared.db")) as ledger, ledger:
        ledger.execute("UPDATE jobs SET configuration = ?, model = ? WHERE name = 'local-2'", (odd, odd))
    assert "iterations compared" in resihp("compare", "local-1", "local-2", "--ledger", url).stdout


def test_ledgers_of_a_home_tell_of_rates_and_repairs_together(tmp_path: Path) -> None:
    """As one ledger does that holds the same jobs."""
    url = f"sqlite:///{tmp_path}/shared.db"
    for job in (told(), told()):
        catch_up(url, job.folder, job.journal_file)
    for view in (("rate", "--around", "30m"), ("repairs",)):
        shared, here = (
            json.loads(resihp("history", *view, *where, "--json").stdout)["rows"] for where in (("--ledger", url), ())
        )
        keys = [(row.get("which"), row.get("when"), row.get("node"), row.get("device")) for row in here]
        assert len(keys) == len(set(keys)) > 0
        assert [row["failures"] for row in here] == [row["failures"] for row in shared]
        rates_here, rates_there = ([row.get("rate") or 0.0 for row in each] for each in (here, shared))
        assert rates_here == pytest.approx(rates_there, rel=1e-3)
        assert sum(row["failures"] for row in here) > 0
        if view[0] == "rate":
            both_jobs = 2 * 4 * 83.5 / 86400  # of four devices, for 83.5 s each
            assert [row["device_days"] for row in here if row["when"] == "before"] == pytest.approx([both_jobs] * 3)


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plans", "--by", "node"), "--by is for failures"),
        (("cost", "--by", "node"), "unknown --by node; choose one of job, owner, account"),
        (("failures", "--price", "2"), "--price is for cost"),
        (("promises", "--since", "1d"), "leave --since and --until out"),
        (("rate",), "needs --around TIME or --having TRAIT=VALUE"),
        (("rate", "--having", "colour=red"), "traits are driver"),
        (("rate", "--having", "driver"), "must be TRAIT=VALUE"),
        (("failures", "--around", "1d"), "are for rate"),
        (("failures", "--user", "me"), "use it with --all"),
        (("nodes", "--kind", "fail-stop"), "has no kinds"),
        (("iterations", "--all", "--kind", "fail-stop"), "has no kinds"),
        (("hosts", "--all", "--user", "me"), "leave it out"),
        (("cost", "--node", "n1"), "has no nodes"),
        (("cost", "--since", "1d"), "leave --since and --until out"),
        (("failures", "--injected"), "--injected is for lemons"),
        (("failures", "local-1", "--all"), "JOB local-1 and --all exclude each other"),
        (("iterations", "--all", "--json"), "set --limit"),
        (("iterations", "--all", "--node", "n1"), "has no nodes"),
        (("failures", "--node", "n3"), "node n3: not in job local-1, which holds n1, n2"),
        (("failures", "--all", "--by", "node", "--node", "N-1"), r"node N-1: not in all jobs; did you mean n1"),
        (("workers", "--all", "--node", "gpu-17"), "node gpu-17: not in all jobs, which holds n1, n2"),
        (("failures", "local-l"), r"job local-l: .*did you mean local-1"),
        (("failures", "--since", "9999-12-31T23:59-10:00"), "not a time"),
        (("cost", "--all", "--since", "0001-01-01"), "not a time"),
        (("rate", "--around", "0001-01-02"), "not a time"),
        (("rate", "--around", "1d", "--days", "1e12"), "at most 36,500"),
    ],
)
def test_what_cannot_be_answered_says_what_can(arguments: tuple[str, ...], words: str) -> None:
    told()
    with pytest.raises(UsageError, match=words):
        resihp("history", *arguments)


def test_an_unknown_job_of_a_shared_ledger_and_an_iteration_that_was_not(tmp_path: Path) -> None:
    job = told()
    url = f"sqlite:///{tmp_path}/shared.db"
    catch_up(url, job.folder, job.journal_file)
    with pytest.raises(JobNotFoundError, match=r"job locl-1: not in ledger .*; did you mean local-1\?"):
        resihp("history", "failures", "locl-1", "--ledger", url)
    with pytest.raises(UsageError, match="iteration 370: not committed in job local-1; committed: 1 to 40"):
        resihp("why", "370")


def test_an_empty_ledger_and_an_empty_home(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/empty.db"
    upgrade(url)
    with pytest.raises(JobNotFoundError, match="holds no job yet"):
        resihp("history", "failures", "--ledger", url)
    assert rows("failures", "--all", "--ledger", url) == []
    assert resihp("history", "lemons", "--ledger", url).stderr == "resihp: all jobs: no node in use lately\n"
    assert "failures cost 0 of 0 GPU-hours (-)" in text_of("history", "cost", "--all", "--ledger", url)
    with pytest.raises(JobNotFoundError, match="start one with resihp run"):
        resihp("history", "failures", "--all")


def test_odd_names_are_shown_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    told(killed=ODD)
    assert text_of("history", "failures", "--by", "node")
    monkeypatch.setenv("COLUMNS", "300")
    [row] = rows("failures", "--node", ODD)
    assert row["node"] == ODD
    [row] = rows("failures", "--all", "--by", "node", "--node", ODD)
    assert (row["node"], row["failures"]) == (ODD, 1)
    shown = resihp("history", "failures", "--by", "node").stdout
    assert ODD in shown
    assert "\x1b" not in shown
    assert [line[0] for line in csv.reader(io.StringIO(resihp("history", "nodes", "--csv").stdout))][1:] == ["n1", ODD]
    assert len(rows("nodes")) == 2


def test_times_of_other_zones_are_the_same_moments() -> None:
    job = told()
    cut = datetime.fromtimestamp(job.read().created_at - 3600 + 11.0, UTC)
    zones = [cut, cut.astimezone(), cut.replace(tzinfo=None), *(shifted(cut, hours) for hours in (-11, 5.75, 14))]
    for time in zones:
        if time.tzinfo is None or time.utcoffset() is not None:
            found = rows("iterations", "--until", time.isoformat())
            assert [row["iteration"] for row in found] == list(range(1, 10)), (time, "iteration 10 ends then")


def shifted(time: datetime, hours: float) -> datetime:
    from datetime import timezone

    return time.astimezone(timezone(timedelta(hours=hours)))


def test_what_the_command_offers_is_what_the_ledger_knows() -> None:
    """Both are written down where they are offered, too: the ledger's module takes time to import."""
    assert query.FAILURE_GROUPS == fleet.GROUPS
    assert query.COST_GROUPS == fleet_costs.COST_BY
    assert [view.value for view in query.History] == list(HISTORY_VIEWS)
    offered = resihp("history", "--help").stdout
    assert all(re.search(rf"\b{view}\b", offered) for view in HISTORY_VIEWS)


def test_ledgers_of_two_clusters_in_one_home_tell_nodes_apart() -> None:
    for number, cluster in enumerate(("alpha", "beta")):
        job = create_local_job()
        told = [
            (msgspec.structs.replace(entry, slurm=journal.SlurmIdentity(job=7 + number, cluster=cluster)), at)
            if isinstance(entry, journal.JobStarted)
            else (entry, at)
            for entry, at in hurt(job)
        ]
        write_journal(job.journal_file, iter(told))
        job.exit_code_file.write_text("0\n")
    everywhere = {f"{cluster}/{node}" for cluster in ("alpha", "beta") for node in ("n1", "n2")}
    assert {row["node"] for row in rows("lemons", "--injected")} == everywhere
    counted = rows("failures", "--all", "--by", "node")
    assert {row["node"]: row["failures"] for row in counted} == dict.fromkeys(everywhere, 1)
    assert {row["node"] for row in rows("hosts", "--all", "--node", "alpha/n1")} <= {"alpha/n1"}
    assert len(rows("failures", "--all", "--node", "beta/n2")) == 1


def test_spares_of_many_jobs_begin_with_those_that_saved_most(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"job": name, "saved_gpu_hours": saved, "started_at": began}
        for name, saved, began in (
            ("a", 1.0, 3),
            ("b", 9.0, 2),
            ("c", 1.0, 1),
        )
    ]
    asked_for: list[dict[str, Any]] = []

    def spares_rows(_: object, *of: object, **wanted: Any) -> list[dict[str, Any]]:
        asked_for.append(wanted | {"of": of})
        return list(rows)

    monkeypatch.setattr("resihp.db.reading.plans.plan_rows.spares_rows", spares_rows)
    asked = query.HistoryQuery(
        view="spares", by=None, node=None, rank=None, since=None, until=None, limit=None, injected=False
    )
    everywhere = all_jobs.AllJobs(asked, None, "sqlite", names_nodes=False)
    monkeypatch.setattr(everywhere, "ask", lambda read: read(cast(Any, None)))
    found = all_jobs.read_spares(asked, everywhere)
    assert [row["job"] for row in found.rows] == ["b", "c", "a"]
    assert asked_for == [{"since": None, "until": None, "jobs": None, "of": ()}]
    job = one_job.OneJob(cast(Any, None), {"id": 7, "name": "4711"}, None)
    listing = one_job.read_spares(asked, job)
    assert (listing.subject, listing.rows, listing.closing) == ("job 4711", rows, one_job.SPARES_FOOTNOTE)
    assert asked_for[1] == {"of": ({"id": 7, "name": "4711"},)}
