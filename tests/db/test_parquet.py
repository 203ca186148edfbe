"""Folders of Parquet files: months, row groups, what is written anew and what is kept, and none that is not whole."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from resihp.db import migrate
from resihp.db.engine import file_of, resolve
from resihp.db.exchange import export, import_from
from resihp.db.parquet import writing
from resihp.db.parquet.tables import MONTHLY_TABLES
from resihp.db.writer import Ledger
from resihp.errors import LedgerError, UsageError
from resihp.record import journal
from tests.db.conftest import BEGAN, on_sqlite, story, write_journal
from tests.db.exports import files_of, former, sealed, set_column
from tests.db.test_exchange import everything_in
from tests.db.test_migrate import contents, execute

Told = Iterator[tuple[journal.AnyEntry, float]]
Urls = Callable[[], str]
DAY = 86400.0
JUNE, JULY, AUGUST = 0.0, 30 * DAY, 60 * DAY
"""After `BEGAN`, the 15th of June 2025."""


def job(name: str, after: float, ended: bool = True) -> Told:
    for entry, at in story(ended):
        begins = isinstance(entry, journal.JobStarted)
        yield (msgspec.structs.replace(entry, job=name) if begins else entry), at + after


def written(url: str, folder: Path, name: str, after: float, upto: int | None = None) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    with Ledger.open(url, folder) as ledger:
        for record in write_journal(folder / name, job(name, after))[:upto]:
            ledger.submit(record)
        ledger.telemetry([(i, 1, rank, 0.5, 0.4) for i in range(1, 4) for rank in range(12)])
        assert ledger.flush(30)


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger of jobs that began in three months; the one of July is not over."""
    folder = tmp_path_factory.mktemp("year")
    for name, after, upto in (("a", JUNE, None), ("b", JUNE + DAY, None), ("c", JULY, 20), ("d", AUGUST, None)):
        written(f"sqlite:///{folder}/ledger.db", folder / "jobs", name, after, upto)
    return folder / "ledger.db"


@pytest.fixture
def year(ledger_urls: Urls, made_once: Path) -> str:
    """The same, for a test to change."""
    url = ledger_urls()
    file = file_of(resolve(url))
    if file is None:
        import_from(str(made_once), url)
    else:
        with closing(sqlite3.connect(made_once)) as source, closing(sqlite3.connect(file)) as target:
            source.backup(target)
    return url


def inodes(folder: Path) -> dict[str, int]:
    return {
        path.relative_to(folder).as_posix(): path.stat().st_ino for path in sorted(folder.rglob("*")) if path.is_file()
    }


def read(folder: Path, table: str) -> int:
    """Rows, as a user finds them."""
    return int(ds.dataset(folder / table, partitioning="hive").count_rows())


def test_months_are_folders_as_hive_has_them(year: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    exported = export(year, out)
    assert exported.written == ("2025-06", "2025-07", "2025-08")
    found = ds.dataset(out / "iterations", partitioning="hive")
    july = found.to_table(filter=pc.field("month") == "2025-07")
    jobs = {row["uuid"]: row["name"] for row in pq.read_table(out / "jobs.parquet").to_pylist()}
    assert {jobs[uuid] for uuid in july["job_uuid"].to_pylist()} == {"c"}
    assert found.count_rows() == exported.manifest.rows["iterations"]
    assert {Path(path).parent.name for path in found.files} == {f"month={month}" for month in exported.written}


def test_a_job_belongs_to_the_month_in_which_it_began(ledger_urls: Urls, tmp_path: Path) -> None:
    """In UTC, however long it lasts."""

    def across() -> Told:
        for entry, at in job("long", 0.0):
            yield entry, 1751327999.0 if isinstance(entry, journal.JobStarted) else at - BEGAN + 1751328000.0

    url = ledger_urls()
    with Ledger.open(url, tmp_path) as ledger:
        for record in write_journal(tmp_path / "journal", across()):
            ledger.submit(record)
    export(url, tmp_path / "out")
    table = ds.dataset(tmp_path / "out" / "iterations", partitioning="hive").to_table().to_pylist()
    assert {(row["month"], row["finished_at"].month) for row in table} == {("2025-06", 7)}


@on_sqlite
def test_row_groups_are_neither_tiny_nor_without_end(
    year: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "ROWS_IN_GROUP", 10)
    export(year, tmp_path / "out")
    seen = 0
    for path in (tmp_path / "out").rglob("*.parquet"):
        about = pq.read_metadata(path)
        groups = [about.row_group(i).num_rows for i in range(about.num_row_groups)]
        if about.num_rows >= 10:
            assert all(10 <= rows < 20 for rows in groups), path
            seen += len(groups)
        else:
            assert len(groups) <= 1, path
    assert seen > 20


@on_sqlite
def test_what_is_cut_into_row_groups_comes_in_again(
    year: str, ledger_urls: Urls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "ROWS_IN_GROUP", 7)
    export(year, tmp_path / "out")
    other = ledger_urls()
    import_from(str(tmp_path / "out"), other)
    assert everything_in(other) == everything_in(year)


# --- again into the same folder -------------------------------------------------------------------------------------


def test_only_months_that_changed_are_written_anew(year: str, ledger_urls: Urls, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(year, out)
    before = inodes(out)
    again = export(year, out)
    assert (again.written, again.kept) == ((), ("2025-06", "2025-07", "2025-08"))
    written(year, tmp_path / "jobs", "c", JULY)
    then = export(year, out)
    assert (then.written, then.kept) == (("2025-07",), ("2025-06", "2025-08"))
    after = inodes(out)
    split = [path for path in before if "/" in path]
    assert len(split) == 3 * len(MONTHLY_TABLES)
    assert {path for path in split if after[path] != before[path]} == {p for p in split if "2025-07" in p}
    other = ledger_urls()
    import_from(str(out), other)
    assert everything_in(other) == everything_in(year)


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM rank_reports WHERE iteration = 2",
        "DELETE FROM iterations WHERE iteration BETWEEN 3 AND 8",
        "INSERT INTO scores (job_id, iteration, rank, level, evidence) SELECT id, 9, 0, 1.0, 0.5 FROM jobs",
        "INSERT INTO rank_quantiles (job_id, iteration, epoch, ranks) SELECT id, 9, 1, 12 FROM jobs",
    ],
)
@on_sqlite
def test_what_is_no_record_of_the_journal_is_a_change_as_well(year: str, tmp_path: Path, change: str) -> None:
    out = tmp_path / "out"
    export(year, out)
    execute(year, change)
    assert export(year, out).written == ("2025-06", "2025-07", "2025-08")


@on_sqlite
def test_tables_that_are_not_split_are_of_today(year: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(year, out)
    execute(year, "UPDATE jobs SET account = '{}'")
    assert export(year, out).written == ()
    assert {row["account"] for row in pq.read_table(out / "jobs.parquet").to_pylist()} == {"{}"}


@on_sqlite
def test_a_month_whose_files_are_not_as_they_were_is_written_anew(year: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(year, out)
    file = out / "iterations" / "month=2025-06" / "part-0.parquet"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    (out / "events" / "month=2025-08" / "part-0.parquet").unlink()
    again = export(year, out)
    assert (again.written, again.kept) == (("2025-06", "2025-08"), ("2025-07",))


@on_sqlite
def test_a_folder_of_before_becomes_one_of_months(year: str, ledger_urls: Urls, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(year, out)
    former(out)
    assert export(year, out).kept == ()
    assert not (out / "iterations.parquet").exists()
    other = ledger_urls()
    import_from(str(out), other)
    assert everything_in(other) == everything_in(year)


@on_sqlite
def test_without_links_files_are_copied(year: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    out = tmp_path / "out"
    export(year, out)
    monkeypatch.setattr(os, "link", refuse)
    assert len(export(year, out).kept) == 3
    assert import_from(str(out), f"sqlite:///{tmp_path}/other.db")[0].outcome == "new"


@on_sqlite
def test_nothing_is_lost_to_an_export(year: str, ledger_urls: Urls, tmp_path: Path) -> None:
    """Neither jobs of another export, nor files that are none of an export's."""
    out = tmp_path / "out"
    export(year, out)
    before = inodes(out)
    one = contents(year)["jobs"][0]["uuid"]
    with pytest.raises(UsageError, match="has 3 jobs that would not be in it any more; name a new folder"):
        export(year, out, [one])
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"has 'notes\.txt', which is not a file of an export; name a new folder"):
        export(year, out)
    (out / "notes.txt").unlink()
    assert inodes(out) == before
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


@on_sqlite
@pytest.mark.parametrize("when", [1, 6, 20])
def test_an_export_that_fails_halfway_leaves_the_one_before(
    year: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    """The disk is full at some file."""
    out = tmp_path / "out"
    export(year, out)
    before = inodes(out)
    written(year, tmp_path / "jobs", "c", JULY)
    real, count = writing._file, [0]

    def full(*words: object) -> object:
        count[0] += 1
        if count[0] == when:
            raise OSError(28, "No space left on device")
        return real(*words)  # type: ignore[arg-type]

    monkeypatch.setattr(writing, "_file", full)
    with pytest.raises(UsageError, match="No space left on device"):
        export(year, out)
    assert count[0] == when
    assert inodes(out) == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@on_sqlite
def test_a_folder_that_cannot_be_put_in_place_leaves_the_one_before(
    year: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    export(year, out)
    before = inodes(out)
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if target == out and not self.name.endswith(".old"):
            raise OSError(5, "Input/output error")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(UsageError, match="Input/output error"):
        export(year, out)
    assert inodes(out) == before


@on_sqlite
def test_an_export_that_is_killed_between_its_renames_loses_nothing(year: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(year, out)
    before = inodes(out)
    out.rename(tmp_path / ".out.4711.old")  # as it stands after the first of the two
    export(year, out)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    after = inodes(out)
    assert {name for name in before if after.get(name) == before[name]}, "unchanged months are those of before"


# --- what is refused ------------------------------------------------------------------------------------------------

JULYS = "iterations/month=2025-07/part-0.parquet"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def other_bytes(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def in_place_of_june(path: Path) -> None:
    path.write_bytes((path.parents[1] / "month=2025-06" / path.name).read_bytes())


def without_month(path: Path) -> None:
    path.unlink()
    path.parent.rmdir()


def one_more(path: Path) -> None:
    (path.parent / "part-1.parquet").write_bytes(path.read_bytes())


def forgot_month(path: Path) -> None:
    without_month(path)
    sealed(path.parents[2])


def wrong_rows(path: Path) -> None:
    folder = path.parents[2]
    rows = json.loads((folder / "manifest.json").read_text())["rows"]
    sealed(folder, rows=rows | {"iterations": rows["iterations"] + 1})


def another_job(path: Path) -> None:
    sealed(path.parents[2], jobs=["00000000-0000-0000-0000-000000000000"])


def outside(path: Path) -> None:
    manifest = path.parents[2] / "manifest.json"
    manifest.write_text(manifest.read_text().replace(JULYS, "../../secret.parquet"))


def scattered(path: Path) -> None:
    table = pq.read_table(path.parents[1] / "month=2025-06" / path.name, partitioning=None)
    order = sorted(range(len(table)), key=lambda i: i % 20)
    pq.write_table(table.take(order), path.parents[1] / "month=2025-06" / path.name)
    sealed(path.parents[2])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (cut, rf"{JULYS} has \d+ bytes, its manifest says \d+"),
        (other_bytes, rf"{JULYS} was changed since the export"),
        (in_place_of_june, rf"{JULYS} has \d+ bytes, its manifest says"),
        (without_month, rf"{JULYS} is missing"),
        (one_more, r"'iterations/month=2025-07/part-1.parquet' is not in its manifest"),
        (forgot_month, r"manifest.json has no iterations of '2025-07'"),
        (wrong_rows, r"manifest.json says \d+ rows of iterations, and \d+ in its files"),
        (another_job, r"jobs.parquet has other jobs than manifest.json"),
        (outside, r"manifest.json names '../../secret.parquet'"),
    ],
)
@on_sqlite
def test_a_folder_that_is_not_as_it_was_is_refused_by_name(
    year: str, tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    out = tmp_path / "out"
    export(year, out)
    spoil(out / JULYS)
    target = f"sqlite:///{tmp_path}/target.db"
    with pytest.raises(LedgerError, match=said):
        import_from(str(out), target)
    file = file_of(resolve(target))
    assert file is not None
    assert not file.exists(), "nothing is imported"


@on_sqlite
def test_rows_of_a_job_in_several_places_are_not_searched_for(year: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(year, out)
    scattered(out / JULYS)
    with pytest.raises(LedgerError, match=r"month=2025-06/part-0.parquet has rows of a job in several places"):
        import_from(str(out), f"sqlite:///{tmp_path}/target.db")


@on_sqlite
@pytest.mark.parametrize("table", ["iterations", "jobs", "maintenance"])
def test_times_that_no_calendar_has_are_refused(year: str, tmp_path: Path, table: str) -> None:
    repaired(year)
    out = tmp_path / "out"
    export(year, out)
    for path in files_of(out, table):
        found = pq.read_table(path, partitioning=None)
        for number, field in enumerate(found.schema):
            if pa.types.is_timestamp(field.type) and field.name != "ended_at":
                far = pa.array([2**62] * len(found), pa.int64()).cast(field.type)
                found = found.set_column(number, field, far)
        pq.write_table(found, path)
    sealed(out)
    with pytest.raises(LedgerError, match=rf"{table}.*\.parquet cannot be read"):
        import_from(str(out), f"sqlite:///{tmp_path}/target.db")


@on_sqlite
def test_scores_of_no_rank_are_left_out(year: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    execute(year, "INSERT INTO scores (job_id, iteration, rank, level, evidence) SELECT id, 9, 0, 1.0, 0.5 FROM jobs")
    export(year, out)
    for path in files_of(out, "scores"):
        set_column(path, "rank", None)
    sealed(out)
    target = f"sqlite:///{tmp_path}/target.db"
    import_from(str(out), target)
    assert contents(target)["scores"] == []


@on_sqlite
def test_former_folders_with_too_few_rows_are_refused(year: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(year, out)
    former(out)
    table = pq.read_table(out / "iterations.parquet")
    pq.write_table(table.slice(0, 5), out / "iterations.parquet")
    with pytest.raises(LedgerError, match=r"iterations.parquet has 5 rows, its manifest says \d+"):
        import_from(str(out), f"sqlite:///{tmp_path}/target.db")
    assert not (tmp_path / "target.db").exists()


@on_sqlite
def test_a_note_beside_the_files_is_no_reason_to_refuse(year: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(year, out)
    (out / "README").write_text("October")
    assert len(import_from(str(out), f"sqlite:///{tmp_path}/target.db")) == 4


# --- what was repaired ----------------------------------------------------------------------------------------------

REPAIRED = (
    "INSERT INTO maintenance (cluster, node, device_uuid, kind, text, at, recorded_at) VALUES "
    "('', '{node}', {device}, 'repaired', 'RMA 17', '2025-07-01 10:00:00.000001+00:00', '2025-07-02 00:00:00+00:00')"
)


def repaired(url: str, node: str = "n1", device: str = "NULL") -> None:
    text = REPAIRED.format(node=node, device=device)
    execute(url, text.replace("+00:00", "") if resolve(url).get_backend_name() == "sqlite" else text)


def repairs(url: str) -> list[dict[str, object]]:
    return [{name: row[name] for name in row if name not in ("id",)} for row in contents(url)["maintenance"]]


def test_what_was_repaired_comes_along_and_twice_is_once(year: str, ledger_urls: Urls, tmp_path: Path) -> None:
    repaired(year)
    repaired(year, "n2", "'GPU-n2-1'")
    out = tmp_path / "out"
    assert export(year, out).manifest.rows["maintenance"] == 2
    other = ledger_urls()
    [*_, last] = import_from(str(out), other)
    assert (last.uuid, last.outcome, last.rows) == ("", "new", 2)
    told = repairs(other)
    assert [(row["node"], row["device_uuid"], row["text"]) for row in told] == [
        ("n1", None, "RMA 17"),
        ("n2", "GPU-n2-1", "RMA 17"),
    ]
    assert all(each.uuid for each in import_from(str(out), other)), "nothing is new"
    assert repairs(other) == told
    repaired(year, "n3")
    assert export(year, out).kept == ("2025-06", "2025-07", "2025-08")
    assert import_from(str(out), other)[-1].rows == 1
    assert [row["node"] for row in repairs(other)] == ["n1", "n2", "n3"]


def test_what_was_repaired_comes_from_a_ledger_too(year: str, ledger_urls: Urls, tmp_path: Path) -> None:
    repaired(year)
    other = ledger_urls()
    source = str(file_of(resolve(year)) or year)
    for _ in range(2):
        import_from(source, other)
    assert [row["node"] for row in repairs(other)] == ["n1"]


@on_sqlite
def test_one_job_takes_no_repairs_along(year: str, tmp_path: Path) -> None:
    repaired(year)
    uuid = contents(year)["jobs"][0]["uuid"]
    assert export(year, tmp_path / "out", [uuid]).manifest.rows["maintenance"] == 0


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("at", "2999-01-01T00:00:00+00:00", "is in the future"),
        ("node", None, "lacks its kind, node or time"),
        ("node", "n1\x1b[31m", "has invalid texts"),
        ("text", "x" * 5000, "has invalid texts"),
    ],
)
@on_sqlite
def test_a_forged_repair_is_refused_and_nothing_imported(
    year: str, tmp_path: Path, column: str, value: str | None, said: str
) -> None:
    repaired(year)
    out = tmp_path / "out"
    export(year, out)
    set_column(out / "maintenance.parquet", column, datetime.fromisoformat(str(value)) if column == "at" else value)
    sealed(out)
    with pytest.raises(LedgerError, match=said):
        import_from(str(out), f"sqlite:///{tmp_path}/target.db")
    assert not (tmp_path / "target.db").exists()


@on_sqlite
def test_an_export_holds_all_that_its_manifest_says(year: str, tmp_path: Path) -> None:
    exported = export(year, tmp_path / "out")
    assert exported.manifest.schema == migrate.head()
    for table in MONTHLY_TABLES:
        assert read(tmp_path / "out", table.name) == exported.manifest.rows[table.name]
