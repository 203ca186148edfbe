"""All runs of a Slurm job as one: what was held, what of it counts, how it ended."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from resihp.wrapper.commands.report import runs
from resihp.wrapper.commands.report.runs import Run, run, total

T0 = datetime(2026, 3, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
NOW = T0 + 100 * HOUR


def job(name: str, begins_h: float, hours: float | None, **changes: Any) -> dict[str, Any]:
    usual = {
        "name": name,
        "state": "completed",
        "exit_code": 0,
        "reason": "",
        "started_at": T0 + begins_h * HOUR,
        "ended_at": None if hours is None else T0 + (begins_h + hours) * HOUR,
        "last_entry_at": T0 + (begins_h + (hours or 0)) * HOUR,
    }
    return usual | changes


def node(
    joined_h: float, *, lost_h: float | None = None, released_h: float | None = None, guest: int | None = None
) -> Any:
    return {
        "devices": 8,
        "joined_at": T0 + joined_h * HOUR,
        "lost_at": None if lost_h is None else T0 + lost_h * HOUR,
        "released_at": None if released_h is None else T0 + released_h * HOUR,
        "replacement": guest,
    }


def iterations(first: int, last: int, epoch: int = 1, seconds: float = 1800.0) -> list[dict[str, Any]]:
    """One each half an hour, whatever their ranks took for them."""
    return [
        {"iteration": i, "seconds": seconds, "epoch": epoch, "finished_at": T0 + (i - first + 1) * HOUR / 2}
        for i in range(first, last + 1)
    ]


PLANS = [{"epoch": 1, "active": 16, "decided_at": T0}, {"epoch": 2, "active": 8, "decided_at": T0}]
PREEMPTED = [{"text": "job: received signal 15 on 2 nodes (preempted)"}]


def both() -> list[Run]:
    first = job("12", 0, 4, state="cancelled", exit_code=75, reason="preempted; to be run again")
    second = job("12-r1", 10, 3)
    return [
        # Newest first, as they are found. A guest for the node that was lost at once, and that Slurm took back later.
        run(
            second,
            iterations(5, 8),
            PLANS,
            [node(10), node(10, lost_h=10.5, released_h=11), node(11, guest=1)],
            [],
            NOW,
        ),
        run(first, [*iterations(1, 3), *iterations(4, 6, epoch=2)], PLANS, [node(0.1), node(0.1)], PREEMPTED, NOW),
    ]


def test_iterations_that_overlap_use_no_more_than_the_time_that_they_took() -> None:
    """Ranks begin one after the other: of a job whose iterations took 2000 s each, every 1800 s, 111 % was used."""
    found = run(job("12", 0, 4), iterations(1, 8, seconds=2000.0), PLANS, [node(0), node(0)], [], NOW)
    assert sum(hours for _, hours in found.used) == pytest.approx(4 * 16, rel=0.02)


def test_what_was_held_and_what_of_it_counts() -> None:
    found = total("12", both())
    assert [each.name for each in found.runs] == ["12", "12-r1"]
    assert [each.wall_s for each in found.runs] == [4 * 3600, 3 * 3600]
    assert found.held == pytest.approx(4 * 16 + 3 * 8 + 1 * 8 + 2 * 8), (
        "own nodes from the start, the guest since it came"
    )
    assert found.used_gpu_hours == pytest.approx([3 * 8 + 1 * 4, 4 * 8]), "iterations 5 and 6 were done again"
    assert found.efficiency == pytest.approx(60 / 112)
    assert (found.restarts, found.preemptions, found.nodes_lost) == (1, 1, 1)
    assert found.outcome == "completed, iteration 8"
    assert runs.sentence(found) == (
        "Slurm job 12: completed, iteration 8; 53.6 % of its GPU-hours went into iterations that were kept; "
        "1 restart, 1 preemption, 1 node lost, 1 replaced by other Slurm jobs."
    )


def test_a_line_for_each_run_and_one_for_all() -> None:
    first, second, together = runs.lines(total("12", both()))
    assert first[0::6] == ("12", "cancelled: preempted; to be run again")
    assert second[2:5] == ("3 h 00 min", "48 GPU-h", "32 GPU-h")
    assert together == ("all", "", "7 h 00 min", "112 GPU-h", "60 GPU-h", "1", "completed, iteration 8")
    assert len(runs.lines(total("12", both()[1:]))) == 1, "nothing to add up"


@pytest.mark.parametrize(
    ("last", "outcome"),
    [
        (job("12", 0, 1, state="cancelled", exit_code=75), "to be run again"),
        (job("12", 0, 1, state="failed", exit_code=5), "failed, iteration 2"),
        (job("12", 0, None, state="running", exit_code=None), "running, iteration 2"),
        (job("12", 0, 1, state="abnormal", exit_code=1), "abnormal, iteration 2"),
    ],
)
def test_how_it_ended(last: dict[str, Any], outcome: str) -> None:
    assert total("12", [run(last, iterations(1, 2), PLANS, [node(0)], [], NOW)]).outcome == outcome
