"""Of thousands of ranks not every report is kept: what is, is enough to see who was slow, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import numpy as np
import pytest
from sqlalchemy import select

from resihp.db import models
from resihp.db.exchange import export, import_from
from resihp.db.reading.queries import Reader
from resihp.db.retention import prune
from resihp.db.telemetry import condensed
from resihp.db.telemetry.condensed import (
    FASTEST,
    MAX_OPEN_ITERATIONS,
    MOST_OUTLYING,
    SLOWEST,
    WHOLE_AROUND_FINDING,
    WHOLE_EVERY,
    Condensed,
)
from resihp.db.telemetry.report_rows import QUANTILE_COLUMNS, Quantiles, Report
from resihp.db.writer import Ledger
from resihp.record import journal
from tests.db.conftest import BEGAN, Listener, outcome, rank_reports, started, story

RANKS, STAGES = 1200, 4
USUALLY = SLOWEST + FASTEST
Opener = Callable[..., Ledger]


def iteration(number: int, epoch: int = 1, slow: dict[int, float] | None = None) -> list[Report]:
    """Stages have more work and less of it; each rank's times scatter by half a per cent. `slow`: rank and factor."""
    random = np.random.default_rng(number)
    compute = (1.0 + np.arange(RANKS) % STAGES * 0.1) * random.normal(1.0, 0.005, RANKS)
    for rank, factor in (slow or {}).items():
        compute[rank] *= factor
    whole = float(compute.max()) * 1.1
    return [(number, epoch, rank, whole, float(compute[rank])) for rank in range(RANKS)]


def taken(told: Condensed) -> tuple[list[Report], list[Quantiles]]:
    """All that is to be written until now."""
    reports: list[Report] = []
    quantiles: list[Quantiles] = []
    while told:
        some, spread = told.batch()
        reports += some
        quantiles += spread
        told.remove()
    return reports, quantiles


def ran(*iterations: list[Report], today: Callable[[], int] = lambda: 1) -> tuple[Condensed, Counter[int]]:
    """How many reports of each iteration are kept."""
    told = Condensed(today)
    for each in iterations:
        told.put(each)
    told.finish()
    return told, Counter(report[0] for report in taken(told)[0])


def test_quantiles_are_those_of_all_ranks() -> None:
    told = Condensed()
    rows = iteration(7)
    rows[0] = (7, 1, 0, None, None)
    told.put(rows)
    told.finish()
    _, [spread] = taken(told)
    compute = [row[4] for row in rows if row[4] is not None]
    wanted = np.quantile(compute, [0, 0.05, 0.5, 0.95, 1])
    named = dict(zip(QUANTILE_COLUMNS, spread, strict=True))
    assert (named["iteration"], named["epoch"], named["ranks"]) == (7, 1, RANKS)
    assert [named[f"compute_seconds_{part}"] for part in ("min", "p5", "p50", "p95", "max")] == pytest.approx(wanted)
    assert named["seconds_min"] == named["seconds_max"] == rows[1][3]


def test_where_nobody_stands_out_only_the_slowest_and_fastest_are_kept() -> None:
    _, kept = ran(*(iteration(number) for number in range(1, 90)))
    assert all(USUALLY <= rows <= USUALLY + 2 for rows in kept.values()), kept


def test_a_rank_that_gets_slow_within_a_light_stage_is_kept_until_it_is_as_before() -> None:
    """5 % slower it has still less work than whole stages: among all ranks it does not stand out."""
    rank = 4 * 17
    told = Condensed()
    for number in range(101, 199):
        told.put(iteration(number, slow={rank: 1.05} if 150 <= number < 190 else None))
    told.finish()
    kept = {report[0] for report in taken(told)[0] if report[2] == rank}
    assert {*range(150, 190)} <= kept
    assert len(kept - {*range(150, 190)}) < 10


def test_many_that_stand_out_at_once_are_not_all_kept() -> None:
    slow = {rank: 1.5 for rank in range(0, RANKS, 3)}
    _, kept = ran(*(iteration(number, slow=slow if number > 60 else None) for number in range(1, 99)))
    assert max(kept.values()) <= USUALLY + MOST_OUTLYING


def test_every_so_many_iterations_all_are_kept() -> None:
    _, kept = ran(*(iteration(number) for number in (WHOLE_EVERY - 1, WHOLE_EVERY, WHOLE_EVERY + 1)))
    assert [kept[number] == RANKS for number in (WHOLE_EVERY - 1, WHOLE_EVERY, WHOLE_EVERY + 1)] == [False, True, False]


def test_around_a_finding_everything_is_kept() -> None:
    told, kept = Condensed(), Counter[int]()
    found = 150
    for number in range(1, 251):
        told.put(iteration(number))
        if number == found:
            told.finding()
        kept.update(report[0] for report in taken(told)[0])
    told.finish()
    kept.update(report[0] for report in taken(told)[0])
    whole = {number for number, rows in kept.items() if rows == RANKS}
    assert {*range(found - WHOLE_AROUND_FINDING, found + WHOLE_AROUND_FINDING + 1)} <= whole
    assert len(whole) <= 2 * WHOLE_AROUND_FINDING + MAX_OPEN_ITERATIONS + 3
    assert max(kept.values()) == RANKS, "none is written twice"


def test_findings_without_end_fill_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(condensed, "WHOLE_ROWS_A_DAY", 30 * RANKS)
    today = [1]
    told, kept = Condensed(lambda: today[0]), Counter[int]()

    def whole(numbers: range) -> int:
        for number in numbers:
            told.put(iteration(number))
            told.finding()
        kept.update(report[0] for report in taken(told)[0])
        return sum(rows == RANKS for rows in kept.values())

    assert whole(range(1, 90)) == 30
    assert told.spent
    told.spent = False
    today[0] = 2
    assert whole(range(101, 130)) == 60
    assert told.spent, "said each day"


def test_reports_come_in_any_order_and_late_ones_are_counted() -> None:
    told = Condensed()
    rows = [row for number in range(1, MAX_OPEN_ITERATIONS) for row in iteration(number)]
    np.random.default_rng(1).shuffle(rows)  # type: ignore[arg-type]
    told.put((int(i), int(e), int(r), s, c) for i, e, r, s, c in rows)
    told.put(row for number in range(MAX_OPEN_ITERATIONS, MAX_OPEN_ITERATIONS + 2) for row in iteration(number))
    assert taken(told)[1][0][2] == RANKS
    told.put([(1, 1, RANKS, 1.0, 1.0)])
    assert told.lost == 1


def test_iterations_that_are_done_again_after_a_change_of_plan_are_those_of_the_new_one() -> None:
    """From a checkpoint far behind: the numbers go back."""
    told = Condensed()
    for number in range(501, 520):
        told.put(iteration(number))
    for number in range(401, 420):
        told.put(iteration(number, epoch=2))
    told.finish()
    _, spread = taken(told)
    assert [(row[1], row[0], row[2]) for row in spread] == [
        *((1, number, RANKS) for number in range(501, 520)),
        *((2, number, RANKS) for number in range(401, 420)),
    ]
    assert told.lost == 0


@pytest.mark.parametrize("rank", [condensed.MOST_RANKS, (1 << 31) - 1])
def test_a_rank_that_cannot_be_takes_no_memory(rank: int) -> None:
    told = Condensed()
    told.put([(1, 1, rank, 1.0, 1.0), (1, 1, 3, 1.0, 1.0)])
    told.finish()
    assert taken(told)[1][0][2] == 2


# --- behind a job ---------------------------------------------------------------------------------------------------


def many_ranks() -> journal.Record:
    return journal.Record(1, BEGAN, msgspec.structs.replace(started(), nodes=RANKS // 4, gpus_per_node=4))


def found(seq: int) -> journal.Record:
    suspected = journal.Suspected(rank=5, node="n1", evidence="x", kind="slow", suspicion=1, ranks=(5,))
    return journal.Record(seq, BEGAN + seq, suspected)


def quantile_rows(url: str) -> list[dict[str, object]]:
    with Reader.open(url) as reader:
        return reader.fetch(select(models.RankQuantilesRow).order_by(models.RankQuantilesRow.iteration))


def test_a_ledger_of_many_ranks_has_quantiles_outliers_and_all_around_a_suspicion(
    open_ledger: Opener, ledger_urls: Callable[[], str], tmp_path: Path
) -> None:
    ledger = open_ledger()
    ledger.submit(many_ranks())
    for number in range(1, 80):
        ledger.telemetry(iteration(number))
        if number % 20 == 0:
            assert ledger.flush(60)
    ledger.submit(found(2))
    assert ledger.flush(60)
    for number in range(80, 85):
        ledger.telemetry(iteration(number))
        assert ledger.flush(60)
    assert ledger.close(60)
    kept = Counter(row["iteration"] for row in rank_reports(ledger.url))
    assert [row["iteration"] for row in quantile_rows(ledger.url)] == list(range(1, 85))
    assert {row["ranks"] for row in quantile_rows(ledger.url)} == {RANKS}
    assert {number for number, rows in kept.items() if rows == RANKS} == {
        *range(80 - MAX_OPEN_ITERATIONS - WHOLE_AROUND_FINDING, 85)
    }
    assert kept[5] <= USUALLY + MOST_OUTLYING
    assert ledger.dropped == 0

    export(ledger.url, tmp_path / "out")
    other = f"sqlite:///{tmp_path / 'other.db'}"
    import_from(str(tmp_path / "out"), other)
    assert len(quantile_rows(other)) == 84
    assert [merged.outcome for merged in import_from(str(tmp_path / "out"), other)] == ["unchanged"]


def test_a_job_of_fewer_ranks_keeps_every_report(open_ledger: Opener) -> None:
    ledger = open_ledger()
    ledger.submit(journal.Record(1, BEGAN, started()))
    ledger.telemetry(iteration(1))
    assert ledger.flush(60)
    assert len(rank_reports(ledger.url)) == RANKS
    assert quantile_rows(ledger.url) == []


# --- for how long ---------------------------------------------------------------------------------------------------


def ago(days: float, name: str, user: str, url: str, folder: Path) -> None:
    """A job of so long ago, with telemetry."""
    shift = datetime.now(UTC).timestamp() - days * 86400 - BEGAN
    with Ledger.open(url, folder) as ledger:
        for number, (entry, at) in enumerate(story(), 1):
            if isinstance(entry, journal.JobStarted):
                entry = msgspec.structs.replace(entry, job=name, user=user)
            ledger.submit(journal.Record(number, at + shift, entry))
        ledger.telemetry([(i, 1, rank, 0.5, 0.4) for i in range(1, 21) for rank in range(12)])
        ledger.scores(10, [(0, 1.0, 0.1)])
        assert ledger.flush(60)


def left(url: str) -> dict[str, int]:
    """Rank reports and scores of each job."""
    query = select(models.JobRow.name, models.JobRow.id)
    counts = {}
    with Reader.open(url) as reader:
        for job in reader.fetch(query):
            tables = (models.RankReportRow, models.RankScoreRow)
            counts[job["name"]] = sum(
                len(reader.fetch(select(table.iteration).where(table.job_id == job["id"]))) for table in tables
            )
    return counts


def test_a_writer_removes_what_is_too_old_of_its_own_user(
    ledger_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resihp.db.retention.ROWS_PER_PRUNE", 60)  # in many steps
    for name, days, user in (("old", 100, "me"), ("new", 80, "me"), ("yours", 100, "you")):
        ago(days, name, user, ledger_url, tmp_path)
    listener = Listener()
    now = datetime.now(UTC).timestamp()
    with Ledger.open(ledger_url, tmp_path, keep_s=90 * 86400.0, say=listener) as ledger:
        ledger.submit(journal.Record(1, now, msgspec.structs.replace(started(), user="me")))
        for number in range(2, 30):
            entry = journal.IterationCommitted(epoch=1, outcome=outcome(number), seconds=0.5, predicted_seconds=None)
            ledger.submit(journal.Record(number, now + number, entry))
            assert ledger.flush(60)
            if left(ledger_url)["old"] == 0:
                break
    assert left(ledger_url) == {"old": 0, "new": 241, "yours": 241, "local-1": 0}
    assert listener.heard == []
    with Reader.open(ledger_url) as reader:
        assert len(reader.rows("iterations", reader.job("old")["id"])) == 20, "what there is little of stays"


def test_without_being_asked_nothing_goes(ledger_url: str, tmp_path: Path) -> None:
    ago(4000, "old", "me", ledger_url, tmp_path)
    assert left(ledger_url) == {"old": 241}
    assert prune(ledger_url, datetime.now(UTC) - timedelta(days=5000)) == []
