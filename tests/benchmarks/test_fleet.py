"""What the ledger says of a fleet is what happened in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from scipy import stats
from sqlalchemy import insert

from benchmarks import fleet as made
from benchmarks import fleet_numbers
from resihp.db.engine import make_engine, resolve
from resihp.db.models import MaintenanceRow
from resihp.db.reading import fleet, queries, rates
from resihp.db.reading.comparison import compare
from resihp.db.reading.reader import Reader
from resihp.db.reading.tables import Row
from tests.db.conftest import postgres_server, postgres_url  # noqa: F401 - fixtures

NOW = datetime.fromtimestamp(made.ENDED, UTC)
DAYS = 60.0


JOBS, NODES, SEED = 20, 64, 3


@pytest.fixture(scope="module")
def fleet_of_20(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, made.Truth]:
    url = f"sqlite:///{tmp_path_factory.mktemp('fleet')}/ledger.db"
    return url, made.make(url, JOBS, DAYS, NODES, SEED)


@pytest.fixture
def truth(fleet_of_20: tuple[str, made.Truth]) -> made.Truth:
    return fleet_of_20[1]


@pytest.fixture
def reader(fleet_of_20: tuple[str, made.Truth]) -> Iterator[Reader]:
    with Reader.open(fleet_of_20[0]) as found:
        yield found


def test_postgresql_tells_the_same(reader: Reader, postgres_url: str) -> None:  # noqa: F811
    made.make(postgres_url, JOBS, DAYS, NODES, SEED)

    def answers(of: Reader) -> list[object]:
        jobs = [job["uuid"] for job in of.jobs(since=NOW - timedelta(days=50), last=3)]
        first, second = (of.job(uuid) for uuid in jobs[:2])
        return [
            jobs,
            [_rounded(fleet.joined(by, fleet.failures_by(of, by))) for by in fleet.GROUPS],
            _rounded(rates.rate_around(of, NOW - timedelta(days=30))),
            _rounded(rates.rate_with(of, "vbios", "96.00.89", 100.0, NOW)),
            rates.repairs(of, NOW - timedelta(days=200)),
            compare(of, first, of, second),
        ]

    with Reader.open(postgres_url) as other:
        assert answers(other) == answers(reader)


def _rounded(rows: list[Row]) -> list[Row]:
    return [{name: round(v, 3) if isinstance(v, float) else v for name, v in row.items()} for row in rows]


def test_the_fleet_is_told_as_it_was_made(reader: Reader, truth: made.Truth) -> None:
    jobs = reader.jobs()
    assert (len(jobs), len({job["run"] for job in jobs})) == (truth.attempts, truth.jobs)
    assert truth.hardware >= 3
    assert truth.program > 0
    counted = [fleet.joined(by, fleet.failures_by(reader, by)) for by in fleet.GROUPS]
    assert {sum(row["failures"] for row in rows) for rows in counted} == {
        truth.hardware + truth.injected + truth.slow + truth.program
    }
    by_hardware = {row["hardware"]: row["failures"] for row in counted[fleet.GROUPS.index("hardware")]}
    assert by_hardware["hardware"] == truth.hardware + truth.injected
    mine = [row for owner in truth.by_owner for row in fleet.failures_by(reader, "kind", user=owner)]
    assert sum(row["failures"] for row in mine) == sum(row["failures"] for row in counted[0])


def test_months_and_weeks_are_those_of_the_calendar(reader: Reader, truth: made.Truth) -> None:
    noticed = [row["noticed_at"] for row in reader.rows("failures", None)]
    weeks = fleet.joined("week", fleet.failures_by(reader, "week"))
    assert {row["week"] for row in weeks} == {
        (at - timedelta(days=at.weekday())).strftime("%Y-%m-%d") for at in noticed
    }
    assert [row["week"] for row in weeks] == sorted((row["week"] for row in weeks), reverse=True)
    months = fleet.joined("month", fleet.failures_by(reader, "month"))
    assert {row["month"] for row in months} == {at.strftime("%Y-%m") for at in noticed}


def test_rates_before_and_after_a_date_count_every_failure_and_every_device_day(
    reader: Reader, truth: made.Truth
) -> None:
    middle = NOW - timedelta(days=DAYS / 2)
    rows = {(row["which"], row["when"]): row for row in rates.rate_around(reader, middle, DAYS)}
    hardware = [rows["hardware", when] for when in ("before", "after")]
    assert sum(row["failures"] for row in hardware) == truth.hardware + truth.slow
    served = sum(rows["all", when]["device_days"] for when in ("before", "after")) * 24.0
    assert served == pytest.approx(truth.held, rel=0.01)
    assert rows["all", "before"]["ratio"] is None
    after = rows["all", "after"]
    share = after["device_days"] / (after["device_days"] + rows["all", "before"]["device_days"])
    both = after["failures"] + rows["all", "before"]["failures"]
    assert after["p"] == pytest.approx(stats.binomtest(after["failures"], both, share).pvalue, rel=1e-9)
    assert 0.0 < after["p"] <= 1.0


@pytest.mark.parametrize("chance", [0.0, 0.03, 0.5, 0.97, 1.0])
@pytest.mark.parametrize("of", [1, 10, 700])
def test_how_probable_counts_are_is_what_the_exact_test_says(of: int, chance: float) -> None:
    for count in {0, 1, of // 3, of // 2, of - 1, of}:
        expected = stats.binomtest(count, of, chance).pvalue
        assert rates.two_sided(count, of, chance) == pytest.approx(expected, rel=1e-9, abs=1e-300), count


def test_a_driver_is_compared_with_all_others(reader: Reader, truth: made.Truth) -> None:
    rows = {(row["which"], row["when"]): row for row in rates.rate_with(reader, "driver", made.DRIVERS[1], 200.0, NOW)}
    both = [rows["hardware", when] for when in ("without", "with")]
    assert sum(row["failures"] for row in both) == truth.hardware + truth.slow
    assert all(row["device_days"] > 0.0 for row in both)


def test_what_failed_is_to_be_repaired_until_somebody_has_done_so(
    reader: Reader, truth: made.Truth, fleet_of_20: tuple[str, made.Truth], tmp_path: Path
) -> None:
    since = NOW - timedelta(days=200)
    found = rates.repairs(reader, since)
    assert sum(row["failures"] for row in found) == truth.hardware + truth.slow
    worst = found[0]
    cluster, node = worst["node"].split("/")
    assert worst["uuid"] == f"GPU-{cluster}-{node}-{worst['device']}"
    own = shutil.copy(fleet_of_20[0].removeprefix("sqlite:///"), tmp_path)
    engine = make_engine(resolve(f"sqlite:///{own}"), write=True)
    with engine.begin() as connection:
        done = {"cluster": cluster, "node": node, "device_uuid": worst["uuid"], "kind": "replaced", "text": ""}
        connection.execute(insert(MaintenanceRow).values(**done, at=NOW, recorded_at=NOW))
    engine.dispose()
    with Reader.open(f"sqlite:///{own}") as after:
        left = rates.repairs(after, since)
    assert left == [row for row in found if (row["node"], row["device"]) != (worst["node"], worst["device"])]


def test_two_jobs_are_compared_at_equal_work(reader: Reader) -> None:
    whole = [job for job in reader.jobs() if job["state"] == "completed"][:2]
    first, second = (reader.job(job["uuid"]) for job in whole)
    rows = {row["what"]: row for row in compare(reader, first, reader, second)}
    [verdict] = [row for what, row in rows.items() if what.startswith("device-seconds")]
    assert verdict["difference"] == "no difference" or "give or take" in verdict["difference"]
    same = compare(reader, first, reader, first)
    assert [row["what"] for row in same] == [
        *("iterations compared", "tokens of an iteration", "seconds of an iteration"),
        "device-seconds for a million tokens",
    ]
    assert same[-1]["difference"] == "no difference"


def test_frames_have_the_columns_that_are_told_of_them(reader: Reader) -> None:
    assert tuple(queries.jobs(reader).columns) == queries.COLUMNS["jobs"]
    assert tuple(queries.rate_around(reader, NOW - timedelta(days=20)).columns) == queries.COLUMNS["rate"]
    assert tuple(queries.repairs(reader).columns) == queries.COLUMNS["repairs"]


@pytest.mark.parametrize(
    ("question", "heavy"),
    [
        ("cost --all", ("scipy", "alembic", "pandas")),
        ("jobs", ("scipy", "alembic", "pandas")),
        ("lemons", ("scipy.stats", "alembic", "pandas")),
        ("rate --around 2026-11-01", ("scipy.optimize", "scipy.stats", "alembic", "pandas")),
    ],
)
def test_a_question_loads_no_library_that_its_answer_has_no_need_of(
    fleet_of_20: tuple[str, made.Truth], question: str, heavy: tuple[str, ...]
) -> None:
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print('loaded', [each for each in {heavy!r} if each in sys.modules]))\n"
        "from resihp.__main__ import main\n"
        "main()"
    )
    words = ["history", *question.split(), "--ledger", fleet_of_20[0]]
    asked = subprocess.run([sys.executable, "-P", "-c", code, *words], capture_output=True, text=True, check=False)
    assert (asked.returncode, asked.stdout.splitlines()[-1:]) == (0, ["loaded []"]), asked.stderr


@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_the_cost_of_a_fleet_is_what_happened(reader: Reader, truth: made.Truth, which: int) -> None:
    number = list(fleet_numbers.costs(reader, truth))[which]
    assert number.fine, number
