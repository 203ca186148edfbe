"""Where the time of a job went: every second has one cause, and the causes are what was done to the job."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resihp.db.reading.costs.cost_accounts import OF_HARDWARE, Account, added, between
from resihp.db.reading.costs.goodput import Counting
from resihp.db.reading.costs.job_timeline import timeline
from resihp.db.reading.costs.summary import summarise
from resihp.db.reading.costs.timeline import CAUSES, Again, committed_again
from resihp.db.reading.health import CERTAINTY
from resihp.db.reading.reader import Reader
from resihp.db.reading.tables import with_times
from resihp.db.writer import Ledger
from tests.db.conftest import any_layout_story, story, write_journal

ZERO = datetime(2026, 3, 1, tzinfo=UTC)
Row = dict[str, Any]


def at(seconds: float) -> datetime:
    return ZERO + timedelta(seconds=seconds)


def job(end: float, state: str = "completed") -> Row:
    return {
        **{name: None for name in ("name", "host", "owner", "exit_code", "reason")},
        "state": state,
        "started_at": at(-10),
        "ended_at": None if state == "running" else at(end),
        "last_entry_at": at(end),
        "nodes": 2,
        "gpus_per_node": 4,
    }


def iteration(
    number: int, end: float, seconds: float | None = 1.0, *, epoch: int = 1, predicted: float | None = None
) -> Row:
    return {
        "iteration": number,
        "epoch": epoch,
        "seconds": seconds,
        "predicted_seconds": predicted,
        "tokens": 1000,
        "loss": 1.0,
        "finished_at": at(end),
    }


def plan(epoch: int, active: int, decided: float = -5.0, *, standby: int = 0) -> Row:
    times = {"decided_at": at(decided), "in_effect_at": at(decided + 0.5)}
    return {"epoch": epoch, "active": active, "standby": standby, **times}


def failure(number: int, noticed: float, iteration: int, **more: Any) -> Row:
    injected = more.get("detect_seconds")
    return {
        "failure": number,
        "kind": "fail-stop",
        "component": "device",
        "hardware": None,
        "node": "n1",
        "failed_at": None if injected is None else at(noticed - injected),
        "noticed_at": at(noticed),
        "iteration": iteration,
        "detect_seconds": None,
        "recovered_epoch": None,
        "ended_iteration": None,
        "speed": None,
        "intermittent": False,
        **more,
    }


def transition(epoch: int, seconds: float, finished: float, action: str = "redo") -> Row:
    return {"epoch": epoch, "action": action, "seconds": seconds, "finished_at": at(finished)}


def told(
    of: Row,
    iterations: Sequence[Row],
    failures: Sequence[Row] = (),
    transitions: Sequence[Row] = (),
    plans: Sequence[Row] | None = None,
    checkpoints: Sequence[int] = (),
    nodes: Sequence[Row] = (),
    now: float = 0.0,
    again: Again = (),
) -> Account:
    plans = [plan(1, 8)] if plans is None else plans
    rows: Any = (of, iterations, failures, transitions, plans, checkpoints, nodes, at(now), again)
    found = between(timeline(*rows))
    assert set(found.lost_s) == set(found.lost_gpu_hours) == set(CAUSES)
    assert min(found.lost_s.values()) >= 0.0
    assert found.useful_s + sum(found.lost_s.values()) == pytest.approx(found.held_s)
    assert found.useful_gpu_hours + sum(found.lost_gpu_hours.values()) == pytest.approx(found.gpu_hours)
    assert found.devices * found.held_s / 3600.0 == pytest.approx(found.gpu_hours)
    start_s = found.held_s
    if iterations:
        seconds = statistics.median([row["seconds"] for row in iterations if row["seconds"]])
        seconds = iterations[0]["seconds"] or seconds
        start_s = (iterations[0]["finished_at"] - of["started_at"]).total_seconds() - seconds
    assert found.lost_s["start"] == pytest.approx(start_s)
    figures = summarise(of, iterations, failures, transitions, plans, at(now))
    assert (figures["goodput"], figures["ettr"]) == pytest.approx((found.goodput, found.ettr))
    assert again or figures["slow_seconds"] == pytest.approx(found.lost_s["slow"])
    assert figures["useful_seconds"] + sum(figures["lost_seconds"].values()) == pytest.approx(found.wall_s)
    for cut in (0.0, 3.3, found.held_s / 2, found.held_s):  # parts add up to the whole
        parts = added([between(timeline(*rows), until_s=cut), between(timeline(*rows), since_s=cut)])
        for whole, part in zip(figures_of(found), figures_of(parts), strict=True):
            assert part == pytest.approx(whole, abs=1e-6)
    return found


def figures_of(found: Account) -> list[float]:
    return [
        *(found.held_s, found.wall_s, found.useful_s, found.committed_s, found.gpu_hours, found.useful_gpu_hours),
        *found.lost_s.values(),
        *found.lost_gpu_hours.values(),
        *(float(found.failures), float(found.hardware_failures), float(found.repairs)),
    ]


def lost(found: Account) -> dict[str, float]:
    """What is not zero beside the start, in milliseconds' precision."""
    return {c: round(seconds, 3) for c, seconds in found.lost_s.items() if seconds >= 5e-4 and c != "start"}


def of_journal(folder: Path, url: str, entries: Any) -> Account:
    with Ledger.open(url, folder) as ledger:
        for record in write_journal(folder / "journal", entries):
            ledger.submit(record)
        assert ledger.close()
    with Reader.open(url) as reader:
        row = reader.job()
        figures = reader.summary(row["id"])
        found = reader.account(row, figures["ended_at"] or row["last_entry_at"])
    if figures["ended_at"]:
        assert (found.goodput, found.ettr) == (figures["goodput"], figures["ettr"])
    return found


def test_a_killed_rank(tmp_path: Path, ledger_url: str) -> None:
    found = of_journal(tmp_path, ledger_url, story())
    # Noticed 0.3 s into the iteration, 0.02 s after the kill; 1.0 s to the next commit, 0.6 s of which count. From then
    # on 8 of 12 devices work, 9 iterations of 0.6 s: three stand by, one is gone.
    assert found.wall_s == pytest.approx(5.5 + 1.3 + 8 * 0.6, abs=1e-3)
    # It took 2.0 s to start and 0.3 s to wind down.
    assert lost(found) == {
        "detect": 0.02,
        "redo": 0.28,
        "reconfigure": 0.4,
        "idle": 1.35,
        "capacity": 0.45,
        "other": 0.3,
    }
    assert found.lost_s["start"] == pytest.approx(2.0, abs=1e-3)
    assert found.goodput == pytest.approx((10.9 - 1.8) / 11.6, abs=1e-4)
    assert found.ettr == pytest.approx((10.9 - 1.8) / 13.9, abs=1e-4)
    assert found.gpu_hours == pytest.approx(13.9 * 12 / 3600, abs=1e-4)
    assert found.useful_share == pytest.approx((10.9 - 1.8) / 13.9, abs=1e-4)
    assert found.lost_gpu_hours["idle"] == pytest.approx(5.4 * 3 / 3600, abs=1e-4)
    assert found.lost_gpu_hours["capacity"] == pytest.approx(5.4 * 1 / 3600, abs=1e-4)
    assert (found.failures, found.mttr_s) == (1, pytest.approx(1.02))
    assert found.mtbf_s == pytest.approx(13.9, abs=1e-3)
    assert (found.hardware_failures, found.hardware_mtbf_s) == (0, None)  # it was injected
    assert found.failure_rate == pytest.approx(1000 / (13.9 * 12 / 86400), rel=1e-4)


def test_gpus_that_stand_by_from_the_start_are_a_cause_of_their_own() -> None:
    """Two of eight failed the start's probe, or had no stage: what counts is the layout that was asked for."""
    iterations = [iteration(i, i) for i in range(1, 101)]
    found = told(job(100), iterations, plans=[plan(1, 6, standby=2)])
    assert lost(found) == {"idle": 25.0}
    assert (found.goodput, found.useful_s) == (0.75, 75.0)
    assert found.lost_gpu_hours["idle"] == found.failure_gpu_hours == pytest.approx(2 * 100 / 3600)
    # One of them comes in, another dies later: it is missing, and idles no more.
    iterations = [iteration(i, i, epoch=1 + (i - 1) // 20) for i in range(1, 61)]
    found = told(job(60), iterations, plans=[plan(1, 6, standby=2), plan(2, 7, standby=1), plan(3, 6, standby=1)])
    assert lost(found) == {"idle": 5.0 + 2.5 + 2.5, "capacity": 2.5}
    # Spare nodes are no part of what was asked for.
    of = job(20) | {"nodes": 3, "configuration": '{"slurm": {"spares": 1}}'}
    assert lost(told(of, iterations[:20], plans=[plan(1, 8, standby=4)])) == {}


def test_what_was_slow_is_mended_from_the_moment_on_that_history_tells() -> None:
    """Slowed on purpose at 1.0 s; slow since iteration 3, and mended at 6.0 s: it said 5.00 s here and 4.00 s there."""
    iterations = [*(iteration(i, i) for i in range(1, 6)), iteration(6, 6.0, 0.5, epoch=2)]
    slow = failure(1, 5.0, 3, kind="fail-slow", recovered_epoch=2)
    mended = [transition(2, 0.5, 6.0, "between")]
    assert told(job(7), iterations, [slow | {"failed_at": at(1)}], mended).mttr_s == pytest.approx(5.0)
    # Where nothing tells when it began, `history failures` counts from the notice, and so does this.
    assert told(job(7), iterations, [slow], mended).mttr_s == pytest.approx(1.0)
    rows = [with_times({**row, "back_at": at(6)}) for row in (slow | {"failed_at": at(1)}, slow)]
    assert [row["seconds_to_recover"] for row in rows] == [5.0, 1.0]


def test_a_batch_host_that_died_is_counted_from_the_last_commit_on() -> None:
    """It died at 2.0 s; its successor noticed at 12.5 s, and was back 0.7 s later."""
    iterations = [iteration(1, 1), iteration(2, 2), iteration(3, 13.2, 0.5, epoch=2)]
    failed = failure(1, 12.5, 3, component="node", recovered_epoch=2)
    found = told(job(14), iterations, [failed | {"failed_at": at(2)}], [transition(2, 0.7, 13.2)])
    assert found.mttr_s == pytest.approx(11.2)
    assert found.lost_s["detect"] == pytest.approx(10.5)
    # What was lost is no more than what went by since the last commit; and of a ledger of before it is not known.
    found = told(job(14), iterations, [failed | {"failed_at": at(1)}], [transition(2, 0.7, 13.2)])
    assert found.mttr_s == pytest.approx(12.2)
    assert found.lost_s["detect"] == pytest.approx(10.5)
    found = told(job(14), iterations, [failed], [transition(2, 0.7, 13.2)])
    assert found.mttr_s == pytest.approx(0.7)
    assert found.lost_s["detect"] == 0.0


def test_a_transition_that_began_after_the_notice_begins_neither_the_repair_nor_what_was_thrown_away() -> None:
    """It failed 0.03 s after the last commit, was noticed at 2.08 s, and training was interrupted at 2.12 s."""
    iterations = [iteration(1, 1), iteration(2, 2), iteration(3, 2.78, 0.5, epoch=2)]
    failed = failure(1, 2.08, 3, failed_at=at(2.03), recovered_epoch=2)
    found = told(job(3), iterations, [failed], [transition(2, 0.66, 2.78)])
    assert found.mttr_s == pytest.approx(0.75)
    assert lost(found) == {"redo": 0.03, "detect": 0.05, "reconfigure": 0.2, "other": 0.22}


def test_what_falls_on_a_cut_counts_in_the_part_that_begins_there() -> None:
    """Neither twice nor never: parts add up to the whole wherever a job is cut."""
    iterations = [*(iteration(i, i) for i in range(1, 5)), *(iteration(i, i + 2, epoch=2) for i in range(5, 9))]
    broke = failure(1, 4.5, 5, recovered_epoch=2)
    rows: Any = (
        *(job(10), iterations, [broke], [transition(2, 1.5, 6)], [plan(1, 8), plan(2, 8, 5)]),
        *((), (), at(0), ()),
    )
    of = timeline(*rows)
    ((failed_at, _),) = of.failures
    ((repaired_at, _),) = of.repairs
    for cut, both in ((failed_at, "failures"), (repaired_at, "repairs")):
        before, after = between(of, until_s=cut), between(of, since_s=cut)
        assert (getattr(before, both), getattr(after, both)) == (0, 1)
        assert (before.mttr_s is None, after.mttr_s is None) == (True, False)
    assert between(of, since_s=failed_at, until_s=failed_at).failures == 0


def test_a_change_of_layout_is_no_work_redone(tmp_path: Path, ledger_url: str) -> None:
    found = of_journal(tmp_path, ledger_url, any_layout_story())
    # To 3.2 s: 0.2 s until noticed, 0.4 s of transition; to 4.8 s: 1.1 s, of which 0.6 before ranks paused. Epoch 4 has
    # 11 of 12 devices at work, for 0.6 s.
    assert lost(found) == {"detect": 0.02, "redo": 0.18, "reconfigure": 1.5, "capacity": 0.05}


def test_from_the_commit_to_the_failure_is_redone_and_from_there_on_detection() -> None:
    iterations = [iteration(1, 1), iteration(2, 2), iteration(3, 20, epoch=2)]
    failed = failure(1, 17.0, 3, failed_at=at(3), recovered_epoch=2)
    found = told(job(20), iterations, [failed], [transition(2, 3.0, 20.0)], [plan(1, 8)])
    assert lost(found) == {"detect": 14.0, "redo": 1.0, "reconfigure": 2.0}


def test_an_iteration_that_counted_is_not_redone() -> None:
    # Killed 0.9 s into the third, which all survivors had finished: committed during the transition.
    iterations = [iteration(1, 1), iteration(2, 2), iteration(3, 3.2), iteration(4, 6, epoch=2)]
    found = told(
        job(6),
        iterations,
        [failure(1, 2.9, 3, recovered_epoch=2, detect_seconds=0.1)],
        [transition(2, 3.1, 6.0, "commit")],
    )
    assert lost(found) == {"reconfigure": 2.0}


def test_a_failure_that_ended_the_job_costs_until_the_end() -> None:
    iterations = [iteration(1, 1), iteration(2, 2)]
    found = told(job(32, "failed"), iterations, [failure(1, 2.5, 3, detect_seconds=0.2)])
    assert lost(found) == {"detect": 0.2, "redo": 0.3, "reconfigure": 29.5}
    # The same while it runs, and training has gone on since: nothing was lost.
    found = told(job(32, "running"), [*iterations, iteration(3, 3)], [failure(1, 2.5, 3)], now=3.0)
    assert lost(found) == {}


def test_a_failure_before_the_first_iteration() -> None:
    found = told(job(30, "failed"), [], [failure(1, 5.0, 1, detect_seconds=1.0)])
    assert found.goodput is None
    assert (found.wall_s, found.held_s, found.lost_s["start"]) == (35.0, 40.0, 40.0)
    assert (found.useful_share, found.mtbf_s) == (0.0, 40.0)


def test_a_start_that_failed_costs_what_it_held() -> None:
    """64 nodes of 8 for 40 minutes, of which two never came: nothing was planned, let alone trained."""
    of = {**job(40 * 60 - 10, "failed"), "nodes": 64, "gpus_per_node": 8}
    nodes = [{"node": f"n{i}", "devices": 8, "joined_at": at(30 + i), "released_at": None} for i in range(62)]
    nodes.append({"node": "n62", "devices": 0, "joined_at": at(2000), "released_at": None})  # given up
    for known in ([], nodes):
        found = told(of, [], plans=[], nodes=known)
        assert found.gpu_hours == found.lost_gpu_hours["start"] == pytest.approx(64 * 8 * 40 / 60)
        assert found.useful_share == 0.0


def test_iterations_that_a_later_attempt_committed_again_are_rolled_back() -> None:
    """100 iterations of 2 s; the checkpoint was of the 20th, so 80 of them were of no use."""
    iterations = [iteration(i, 2.0 * i, 2.0) for i in range(1, 101)]
    found = told(job(200), iterations, again=[(21, 100)])
    assert lost(found) == {"rollback": 160.0}
    assert (found.useful_s, found.goodput) == (40.0, 1.0)
    assert found.lost_gpu_hours["rollback"] == pytest.approx(160 * 8 / 3600)
    # What was slow in them is put down to that.
    slow = failure(1, 180.0, 91, kind="fail-slow", speed=0.5)
    iterations[90:] = [iteration(i, 180.0 + 4.0 * (i - 90), 4.0, predicted=2.0) for i in range(91, 101)]
    assert lost(told(job(220), iterations, [slow], again=[(21, 100)])) == {"rollback": 160.0, "slow": 20.0}
    # Rows that were thinned stand for those before them.
    assert lost(told(job(200), [iterations[0], iteration(100, 200.0, 2.0)], again=[(21, 100)])) == {
        "rollback": pytest.approx(198 * 80 / 99, abs=1e-3)
    }


def test_what_is_committed_again_is_told_by_attempts_of_the_same_run() -> None:
    def attempt(uuid: str, first: int | None, last: int | None, run: str = "r") -> Row:
        return {"uuid": uuid, "run": run, "started_at": at(ord(uuid)), "first": first, "last": last}

    found = committed_again([attempt("a", 1, 100), attempt("b", 21, 50), attempt("c", None, None)])
    assert found == {"a": [(21, 50)]}
    later = [attempt("d", 41, 90), attempt("d", 41, 90), attempt("e", 95, 97), attempt("f", 98, 200)]
    found = committed_again([attempt("a", 1, 100), attempt("b", 21, 50), *later])
    assert found == {"a": [(21, 90), (95, 100)], "b": [(41, 50)]}
    assert committed_again([attempt("a", 1, 9, "q"), attempt("b", 1, 9, "r")]) == {}
    assert committed_again([attempt("a", 1, 9, ""), attempt("b", 1, 9, "")]) == {}


def test_the_hardware_fails_less_often_than_the_job() -> None:
    iterations = [iteration(i, i) for i in range(1, 91)]
    failures = [
        failure(1, 10.0, 11, hardware=True, kind="program"),  # its log names an Xid
        failure(2, 20.0, 21, hardware=False),  # out of memory, says its log
        failure(3, 30.0, 31, component="node"),
        failure(4, 40.0, 41, detect_seconds=0.5, hardware=True),  # injected
        failure(5, 50.0, 51, component="program", kind="program"),
        failure(6, 60.0, 61, component="process", kind="fail-slow"),
        failure(7, 70.0, 71, component="link", kind="communication"),
    ]
    found = told(job(90), iterations, failures)
    assert (found.failures, found.hardware_failures) == (7, 3)
    assert found.mtbf_s == pytest.approx(100 / 7)
    assert found.hardware_mtbf_s == pytest.approx(100 / 3)
    assert found.hardware_failure_rate == pytest.approx(3 / (100 * 8 / 86400) * 1000)
    assert set(CERTAINTY) == OF_HARDWARE


def test_slow_iterations_cost_what_goes_beyond_the_prediction() -> None:
    iterations = [
        *(iteration(i, i, predicted=1.0) for i in range(1, 11)),
        *(iteration(10 + i, 10 + 2 * i, 2.0, predicted=1.0) for i in range(1, 6)),
        iteration(16, 21, predicted=1.0),
    ]
    slow = failure(1, 12.0, 11, kind="fail-slow", speed=0.5, ended_iteration=16)
    found = told(job(21), iterations, [slow])
    assert lost(found) == {"slow": 5.0}
    assert found.goodput == 1.0
    assert found.useful_s == 16.0
    # Without a verdict it is the workload, or noise.
    assert lost(told(job(21), iterations)) == {}


def test_where_predictions_are_off_the_slow_is_what_goes_beyond_what_the_job_usually_takes() -> None:
    """As on a busy machine: a wait of 7 ms an iteration cost 17 s, all that a prediction was too low."""
    iterations = [
        *(iteration(i, i, predicted=0.4) for i in range(1, 11)),
        *(iteration(10 + i, 10 + 1.25 * i, 1.25, predicted=0.4) for i in range(1, 5)),
    ]
    slow = failure(1, 12.0, 11, kind="fail-slow", component="reduction", speed=0.8)
    found = told(job(15), iterations, [slow])
    assert lost(found) == {"slow": 1.0}
    assert found.useful_s == 14.0


def test_under_a_plan_that_makes_do_with_the_slow_device_healthy_iterations_are_the_measure() -> None:
    iterations = [
        *(iteration(i, i, predicted=1.0) for i in range(1, 11)),
        *(iteration(10 + i, 10 + 1.25 * i, 1.25, epoch=2, predicted=1.2) for i in range(1, 5)),
    ]
    slow = failure(1, 10.0, 10, kind="fail-slow", speed=0.5)
    plans = [plan(1, 8), plan(2, 8)]
    assert lost(told(job(15), iterations, [slow], plans=plans)) == {"slow": 1.0}
    # On fewer devices than ever before nobody knows better than the detector; the missing ones are lost, too.
    plans = [plan(1, 8), plan(2, 6)]
    assert lost(told(job(15), iterations, [slow], plans=plans)) == {"slow": 0.15, "capacity": 1.25}


def test_a_slow_device_that_stands_by_costs_what_stands_by_and_nothing_else() -> None:
    """Whatever else makes iterations longer than predicted."""
    iterations = [
        *(iteration(i, i, predicted=1.0) for i in range(1, 11)),
        *(iteration(10 + i, 10 + 2 * i, 2.0, predicted=1.0) for i in range(1, 5)),
        *(iteration(14 + i, 18 + 2 * i, 2.0, epoch=2, predicted=1.1) for i in range(1, 6)),
        *(iteration(19 + i, 28 + 3 * i, 3.0, epoch=3, predicted=1.0) for i in range(1, 3)),
    ]
    slow = failure(1, 12.0, 11, kind="fail-slow", speed=0.5, epoch=1)
    put_aside = plan(2, 6, standby=2) | {"unaffected_by": "[1,7]"}
    plans = [plan(1, 8), put_aside, plan(3, 8)]
    assert lost(told(job(34), iterations, [slow], plans=plans)) == {"slow": 8.0, "idle": 2.5}, "in epochs 1 and 3"
    at_another_speed = failure(2, 24.0, 17, kind="fail-slow", speed=0.4, epoch=2, idle=True)
    found = told(job(34), iterations, [slow | {"ended_iteration": 17}, at_another_speed], plans=plans)
    assert lost(found) == {"slow": 8.0, "idle": 2.5}, "found slower while it stood by"
    untold = [one | {"unaffected_by": told} for one, told in zip(plans, (None, "", "[[1]]"), strict=True)]
    assert lost(told(job(34), iterations, [slow], plans=untold))["slow"] > 9.0, "rows of before, and imported ones"


def test_checkpoints_cost_the_pause_behind_them() -> None:
    iterations = [iteration(1, 1), iteration(2, 2.01), iteration(3, 5.01), iteration(4, 6.02), iteration(5, 7.03)]
    assert lost(told(job(7.03), iterations, checkpoints=[2])) == {"checkpoint": 1.99, "other": 0.04}


def test_nodes_are_paid_until_they_are_given_back() -> None:
    iterations = [iteration(i, i) for i in range(1, 11)]
    nodes = [
        {"node": "n1", "devices": 4, "joined_at": at(-10), "released_at": None},
        {"node": "n2", "devices": 4, "joined_at": at(-10), "released_at": at(5)},
        {"node": "n3", "devices": 4, "joined_at": at(7.5), "released_at": None},
        {"node": "n4", "devices": 0, "joined_at": None, "released_at": None},  # never came
    ]
    found = told(job(60), iterations, nodes=nodes)
    assert found.gpu_hours == pytest.approx((4 * 70 + 4 * 15 + 4 * 52.5) / 3600)
    assert found.useful_gpu_hours == pytest.approx((4 * 10 + 4 * 5 + 4 * 2.5) / 3600)
    # Agents that came late, or again, were on nodes that were there all the time; replacements were not.
    nodes[0]["joined_at"], nodes[2] = at(3), nodes[2] | {"replacement": 1}
    assert told(job(60), iterations, nodes=nodes).gpu_hours == found.gpu_hours


def test_gpus_that_were_given_back_cost_time_and_no_gpu_hours() -> None:
    """One of two nodes dies after 10 of 30 iterations, and is given back 5 s later; all that is held then works."""
    iterations = [*(iteration(i, i) for i in range(1, 11)), *(iteration(i, i, epoch=2) for i in range(11, 31))]
    nodes = [
        {"node": "n1", "devices": 4, "joined_at": at(-10), "released_at": None},
        {"node": "n2", "devices": 4, "joined_at": at(-10), "released_at": at(15)},
    ]
    found = told(job(30), iterations, plans=[plan(1, 8), plan(2, 4)], nodes=nodes)
    assert lost(found) == {"capacity": 10.0}
    assert found.gpu_hours == pytest.approx((8 * 25 + 4 * 15) / 3600)
    assert found.lost_gpu_hours["capacity"] == found.failure_gpu_hours == pytest.approx(4 * 5 / 3600)
    assert found.useful_gpu_hours == pytest.approx((8 * 10 + 4 * 20) / 3600)
    # One of those that are held stands by.
    found = told(job(30), iterations, plans=[plan(1, 8), plan(2, 3, standby=1)], nodes=nodes)
    assert lost(found) == {"idle": 2.5, "capacity": 10.0}
    assert found.lost_gpu_hours["idle"] == pytest.approx(1 * 20 / 3600)
    assert found.lost_gpu_hours["capacity"] == pytest.approx(4 * 5 / 3600)


def test_a_clock_that_went_back_costs_nothing() -> None:
    straight = [iteration(i, i) for i in range(1, 7)]
    back = [*straight[:3], *(iteration(i, i - 3600) for i in range(4, 7))]
    found = told(job(6 - 3600), back)
    assert found.wall_s == pytest.approx(6.0)
    assert found.goodput == 1.0
    # Also where a failure falls into it: the transition is found by its epoch, not by the clock.
    back = [*straight[:3], iteration(4, 6 - 3600, epoch=2), iteration(5, 7 - 3600, epoch=2)]
    found = told(
        job(7 - 3600),
        back,
        [failure(1, 3.4, 4, recovered_epoch=2)],
        [transition(2, 2.6, 6 - 3600)],
    )
    assert found.wall_s == pytest.approx(5.0)


def test_rows_that_were_thinned_stand_for_their_neighbours() -> None:
    found = told(job(101), [iteration(1, 1), *(iteration(i, i) for i in range(11, 102, 10))])
    assert found.goodput == pytest.approx(1.0)
    found = told(job(101), [iteration(1, 1), iteration(51, 101)])
    assert found.goodput == pytest.approx(51 / 101)


def test_commits_that_were_reported_late_never_cost_more_than_there_is() -> None:
    # Two iterations are told at once; the transition claims more than went by.
    iterations = [iteration(1, 1), iteration(2, 3.0), iteration(3, 3.0), iteration(4, 4.5, epoch=2)]
    found = told(job(4.5), iterations, [failure(1, 3.1, 4, recovered_epoch=2)], [transition(2, 1.4, 4.5)])
    assert lost(found) == {"redo": 0.1, "reconfigure": 0.4}


def test_iterations_that_overlap_count_once_and_hide_no_failure() -> None:
    """Ranks begin one after the other: an iteration's seconds reach 20 ms back into the one before. Sixty of them are
    more than the 0.8 s that a failure cost."""
    before = [iteration(i, 1.0 + 0.98 * (i - 1)) for i in range(1, 31)]
    died_at = before[-1]["finished_at"]
    back = (died_at - ZERO).total_seconds() + 1.8
    after = [iteration(31 + i, back + 0.98 * i, epoch=2) for i in range(30)]
    broke = failure(1, back - 1.5, 31, detect_seconds=0.1, recovered_epoch=2)
    found = told(
        job(back + 0.98 * 29),
        [*before, *after],
        [broke],
        [transition(2, 1.5, back)],
        [plan(1, 8), plan(2, 8, back - 1.2)],
    )
    assert lost(found) == {"detect": 0.1, "redo": 0.2, "reconfigure": 0.5}
    assert found.goodput == pytest.approx(1 - 0.8 / found.wall_s)


def test_iterations_committed_at_once_share_the_time_before() -> None:
    """A successor commits what its predecessor did not live to."""
    rows = [iteration(1, 1.0), iteration(2, 2.0), *(iteration(i, 5.0) for i in (3, 4, 5)), iteration(6, 6.0)]
    assert told(job(6.0), rows).useful_s == pytest.approx(6.0)


def test_a_job_of_which_nothing_is_known() -> None:
    found = told(job(5), [], plans=[])
    assert (found.wall_s, found.goodput, found.mtbf_s, found.mttr_s) == (0.0, None, None, None)
    assert found.held_s == 15.0


def test_many_failures_and_iterations_take_no_longer_than_their_number() -> None:
    """As many as a big job has: with every failure looked for among all iterations this would take minutes."""
    iterations = [iteration(i, i, epoch=1 + i // 50) for i in range(1, 100_001)]
    transitions = [transition(e, 0.5, max(50 * (e - 1), 1)) for e in range(2, 2001)]
    failures = [failure(e, 50 * e - 0.5, 50 * e, recovered_epoch=e) for e in range(2, 2001)]
    failures += [
        failure(3000 + i, 50 * i, 50 * i, kind="fail-slow", ended_iteration=50 * i + 2000) for i in range(1, 1000)
    ]
    plans = [plan(e, 8) for e in range(1, 2002)]
    began_s = time.process_time()
    assert told(job(100_000), iterations, failures, transitions, plans).wall_s == pytest.approx(100_000)
    assert time.process_time() - began_s < 20


@pytest.mark.parametrize("seed", range(20))
def test_commits_taken_together_count_what_they_count_one_by_one(seed: int) -> None:
    """In parts, each under a plan of its own, with some commits late and some at once."""
    rng = np.random.default_rng(seed)
    together, single = Counting(), Counting()
    for part in range(6):
        size = int(rng.integers(0, 9))
        seconds = rng.uniform(0.5, 1.5, size)
        passed_s = np.where(rng.random(size) < 0.3, 0.01, rng.uniform(0.4, 3.0, size))
        same_plan = bool(part % 2)
        counted = together.of_many(seconds, passed_s, same_plan=same_plan)
        expected = [
            single.of(float(took), float(passed), same_plan=same_plan or place > 0)
            for place, (took, passed) in enumerate(zip(seconds, passed_s, strict=True))
        ]
        assert counted.tolist() == pytest.approx(expected)
