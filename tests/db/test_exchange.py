"""Jobs in and out of ledgers: nothing twice, nothing older over something newer, clear words about what is wrong."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
import pytest
from sqlalchemy import text

from resihp.db import migrate
from resihp.db.engine import file_of, make_engine, resolve
from resihp.db.exchange import export, import_from
from resihp.db.parquet.tables import JOBS, MONTHLY_TABLES, OF_JOBS
from resihp.db.reading.queries import TABLES, Reader
from resihp.db.writer import Ledger
from resihp.db.writing.catch_up import catch_up
from resihp.errors import JobNotFoundError, LedgerError, ResihpError, UsageError
from resihp.record import journal, journal_file
from tests.db.conftest import (
    BEGAN,
    any_layout_story,
    node_story,
    on_sqlite,
    outcome,
    rank_reports,
    started,
    story,
    write_journal,
)
from tests.db.exports import former
from tests.db.later_schema import add_later_schema
from tests.db.reading.test_decisions import decided_story
from tests.db.test_migrate import NEWER, development_ledger, execute, full_ledger
from tests.db.test_projection import slow_story
from tests.db.test_suspicions import suspicious_story

Told = Iterator[tuple[journal.AnyEntry, float]]
Urls = Callable[[], str]


def told_by(user: str, told: Told, name: str = "local-1") -> Told:
    """The same, of another user's job."""
    for entry, at in told:
        begins = isinstance(entry, journal.JobStarted)
        yield (msgspec.structs.replace(entry, user=user, job=name) if begins else entry), at


def ledger_with(url: str, folder: Path, *stories: Told, reports: bool = True) -> str:
    for number, told in enumerate(stories):
        folder.mkdir(exist_ok=True)
        with Ledger.open(url, folder) as ledger:
            for record in write_journal(folder / f"journal-{number}", told):
                ledger.submit(record)
            if reports:
                ledger.telemetry([(i, 1, rank, 0.5, None if rank else 0.4) for i in (1, 2) for rank in range(12)])
                ledger.scores(10, [(rank, None if rank else 1.02, 0.1 * rank) for rank in range(12)])
            assert ledger.flush(30)
    return url


def everything_in(url: str) -> list[dict[str, Any]]:
    """Each job's rows of every table, without the numbers that a ledger gives them."""
    engine = make_engine(resolve(url), write=False)
    with engine.connect() as connection:
        jobs = []
        for job in connection.execute(text("SELECT id, uuid FROM jobs ORDER BY uuid")).all():
            found: dict[str, Any] = {}
            for table in (JOBS, *OF_JOBS):
                own = table.c.id == job.id if table.name == "jobs" else table.c.job_id == job.id
                columns = [column for column in table.columns if column.name not in ("id", "job_id")]
                query = table.select().with_only_columns(*columns).where(own).order_by(*table.primary_key)
                found[table.name] = [dict(row) for row in connection.execute(query).mappings()]
            jobs.append(found)
    engine.dispose()
    return jobs


@pytest.fixture
def full(ledger_urls: Urls, tmp_path: Path) -> str:
    """A ledger of six jobs, among which are rows of every table."""
    told = (story(), any_layout_story(), node_story(), slow_story(), suspicious_story(), decided_story())
    stories = (told_by(f"user {n}", each) for n, each in enumerate(told))
    url = ledger_with(ledger_urls(), tmp_path / "full", *stories)
    execute(
        url,
        "INSERT INTO rank_quantiles (job_id, iteration, epoch, ranks, seconds_p50) SELECT id, 7, 1, 9, 0.5 FROM jobs",
    )
    return url


def test_every_table_is_in_the_full_ledger(full: str) -> None:
    found = everything_in(full)
    assert len(found) == 6
    assert [table.name for table in OF_JOBS if not any(job[table.name] for job in found)] == []


def test_out_and_in_again_is_the_same_ledger(full: str, ledger_urls: Urls, tmp_path: Path) -> None:
    manifest = export(full, tmp_path / "out").manifest
    assert manifest.rows["jobs"] == 6
    other = ledger_urls()
    assert [each.outcome for each in import_from(str(tmp_path / "out"), other)] == ["new"] * 6
    assert everything_in(other) == everything_in(full)
    again = import_from(str(tmp_path / "out"), other)
    assert [(each.outcome, each.rows) for each in again] == [("unchanged", 0)] * 6
    assert everything_in(other) == everything_in(full)


def test_an_export_is_plain_parquet(full: str, tmp_path: Path) -> None:
    export(full, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    split = {table.name for table in MONTHLY_TABLES}
    whole = {f"{table.name}.parquet" for table in (JOBS, *OF_JOBS)} - {f"{name}.parquet" for name in split}
    assert names == {"manifest.json", "maintenance.parquet"} | split | whole
    iterations = pd.read_parquet(tmp_path / "out" / "iterations")
    jobs = pd.read_parquet(tmp_path / "out" / "jobs.parquet")
    assert set(iterations["job_uuid"]) <= set(jobs["uuid"])
    assert str(iterations["finished_at"].dt.tz) == "UTC"
    assert set(iterations["month"]) == {"2025-06"}
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["format"], manifest["schema"]) == ("resihp ledger", migrate.head())
    assert manifest["rows"]["iterations"] == len(iterations)


def test_an_export_of_before_is_still_brought_in(full: str, ledger_urls: Urls, tmp_path: Path) -> None:
    """One file for each table, in a folder without others."""
    export(full, tmp_path / "out")
    other = ledger_urls()
    assert [each.outcome for each in import_from(str(former(tmp_path / "out")), other)] == ["new"] * 6
    assert everything_in(other) == everything_in(full)


def test_one_job_of_many(full: str, ledger_urls: Urls, tmp_path: Path) -> None:
    wanted = everything_in(full)[2]
    export(full, tmp_path / "out", [wanted["jobs"][0]["uuid"]])
    other = ledger_urls()
    import_from(str(tmp_path / "out"), other)
    assert everything_in(other) == [wanted]
    with pytest.raises(JobNotFoundError, match="holds no such job"):
        export(full, tmp_path / "none", ["00000000-0000-0000-0000-000000000000"])
    assert not (tmp_path / "none").exists()


def test_an_older_copy_is_brought_forward_and_a_newer_never_overwritten(ledger_urls: Urls, tmp_path: Path) -> None:
    records = write_journal(tmp_path / "journal", story())
    source, target = ledger_urls(), ledger_urls()
    outs = []
    for number, upto in enumerate((20, 30, len(records))):
        with Ledger.open(source, tmp_path) as ledger:
            for record in records[:upto]:
                ledger.submit(record)
            ledger.telemetry([(number, 1, 0, 0.5, 0.4)])
            assert ledger.flush(30)
        outs.append(tmp_path / f"out-{number}")
        export(source, outs[-1])
    found = [import_from(str(outs[number]), target)[0].outcome for number in (1, 0, 2, 1, 0)]
    assert found == ["new", "unchanged", "brought forward", "unchanged", "unchanged"]
    assert everything_in(target) == everything_in(source)


def test_rank_reports_of_two_copies_are_put_together(ledger_urls: Urls, tmp_path: Path) -> None:
    """Each leader has written those of its own time."""
    urls = [ledger_urls(), ledger_urls()]
    records = write_journal(tmp_path / "journal", story())
    for number, url in enumerate(urls):
        with Ledger.open(url, tmp_path) as ledger:
            for record in records:
                ledger.submit(record)
            ledger.telemetry([(i, 1, 0, 0.5, None) for i in range(3 * number, 3 * number + 5)])
            assert ledger.flush(30)
    export(urls[1], tmp_path / "out")
    [merged] = import_from(str(tmp_path / "out"), urls[0])
    assert (merged.outcome, merged.rows) == ("brought forward", 3)
    assert [row["iteration"] for row in rank_reports(urls[0])] == list(range(8))


def test_jobs_of_several_users_into_one_ledger(ledger_urls: Urls, tmp_path: Path) -> None:
    """Under one name, each from its own SQLite file."""
    for user in ("me", "you"):
        (tmp_path / user).mkdir()
        ledger_with(f"sqlite:///{tmp_path / user / 'ledger.db'}", tmp_path / user, told_by(user, story()))
    url = ledger_urls()
    for _ in range(2):
        for user in ("me", "you"):
            import_from(str(tmp_path / user / "ledger.db"), url)
    with Reader.open(url) as reader:
        assert sorted(row["owner"] for row in reader.jobs()) == ["me", "you"]
    assert len(rank_reports(url)) == 48


def test_a_job_s_folder_gives_its_journal_and_its_rank_reports(ledger_urls: Urls, tmp_path: Path) -> None:
    folder = tmp_path / "local-1"
    folder.mkdir()
    records = write_journal(folder / "journal", story())
    with Ledger.open("sqlite", folder) as ledger:  # which lags behind
        for record in records[:20]:
            ledger.submit(record)
        ledger.telemetry([(1, 1, 0, 0.5, 0.4)])
        assert ledger.flush(30)
    url = ledger_urls()
    [merged] = import_from(str(folder), url)
    assert merged.outcome == "brought forward"
    assert len(rank_reports(url)) == 1
    whole = ledger_urls()
    catch_up(whole, tmp_path, folder / "journal")
    assert [job["events"] for job in everything_in(url)] == [job["events"] for job in everything_in(whole)]
    assert [each.outcome for each in import_from(str(folder), url)] == ["unchanged"]


def test_a_journal_makes_a_lost_ledger_anew(ledger_urls: Urls, tmp_path: Path) -> None:
    first, anew = ledger_urls(), ledger_urls()
    ledger_with(first, tmp_path / "job", story(), reports=False)
    [merged] = import_from(str(tmp_path / "job" / "journal-0"), anew)
    assert (merged.job, merged.outcome, merged.note) == ("local-1", "new", "")
    assert everything_in(anew) == everything_in(first)
    [merged] = import_from(str(tmp_path / "job" / "journal-0"), anew)
    assert (merged.outcome, merged.rows) == ("unchanged", 0)


@pytest.mark.parametrize("cut", [1, 5, 9, 40])
def test_a_torn_tail_is_passed_over_and_said(ledger_url: str, tmp_path: Path, cut: int) -> None:
    records = write_journal(tmp_path / "journal", story())
    whole = (tmp_path / "journal").read_bytes()
    (tmp_path / "journal").write_bytes(whole[:-cut])
    [merged] = import_from(str(tmp_path / "journal"), ledger_url)
    assert merged.rows == len(records) - 1
    assert "an unfinished record" in merged.note
    (tmp_path / "journal").write_bytes(whole)
    [merged] = import_from(str(tmp_path / "journal"), ledger_url)
    assert (merged.outcome, merged.rows, merged.note) == ("brought forward", 1, "")


def test_a_ledger_of_an_older_schema_is_brought_in_and_left_as_it_is(
    ledger_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source.db"
    full_ledger(f"sqlite:///{source}", tmp_path)
    before = source.read_bytes()
    add_later_schema(monkeypatch, tmp_path / "migrations")
    [merged] = import_from(str(source), ledger_url)
    assert merged.outcome == "new"
    assert source.read_bytes() == before
    with Reader.open(ledger_url) as reader:
        assert len(reader.rows("iterations", reader.job()["id"])) == 20


def test_a_ledger_of_a_development_version_is_not_brought_in(ledger_url: str, tmp_path: Path) -> None:
    source = tmp_path / "old.db"
    development_ledger(source)
    before = source.read_bytes()
    with pytest.raises(LedgerError, match=r"schema 0001 was made by a development version .* resihp db import JOURNAL"):
        import_from(str(source), ledger_url)
    assert source.read_bytes() == before


def odd_story() -> Told:
    """Names that databases, pages and shells dislike, and a clock that goes back by an hour."""
    name = "it's \"n1\"; DROP TABLE jobs; --\x00<script>alert('ü')</script>\u2028"
    yield started("<b>job</b> 'x' \"y\"", "o'user\u202e"), BEGAN
    yield journal.NodeJoined(node=name, host="hôte", devices=4), BEGAN + 1
    for i in range(1, 6):
        at = BEGAN + 2 + i - (3600 if i > 3 else 0)
        yield journal.IterationCommitted(epoch=1, outcome=outcome(i), seconds=1.0, predicted_seconds=None), at
    yield journal.NodeLost(node=name, reason="lost \x1b[2J"), BEGAN - 3599
    yield journal.JobEnded(exit_code=1, state="failed", reason="%s {0} \\N \t\n"), BEGAN - 3598


def test_odd_names_and_a_clock_that_went_back(ledger_urls: Urls, tmp_path: Path) -> None:
    source, target = ledger_urls(), ledger_urls()
    ledger_with(source, tmp_path / "job", odd_story())
    export(source, tmp_path / 'it\'s an "export" %s ü')
    import_from(str(tmp_path / 'it\'s an "export" %s ü'), target)
    assert everything_in(target) == everything_in(source)
    with Reader.open(target) as reader:
        job = reader.job("<b>job</b> 'x' \"y\"")
        assert [row["iteration"] for row in reader.rows("iterations", job["id"])] == [1, 2, 3, 4, 5]
        assert job["reason"] == "%s {0} \\N \t\n"


# --- refusals -----------------------------------------------------------------------------------------------------


def refused(path: Path | str, url: str) -> str:
    with pytest.raises(ResihpError) as caught:
        import_from(str(path), url)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_no_source(ledger_url: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    journal_file.Journal(tmp_path / "begun", sync=False).close()
    writer = journal_file.Journal(tmp_path / "headless", sync=False)
    writer.append(journal.NodeLost(node="n1", reason="x"), BEGAN)
    writer.close()
    assert "No such file" in refused(tmp_path / "nothing", ledger_url)
    assert "neither a journal nor a SQLite ledger" in refused(tmp_path / "notes.txt", ledger_url)
    assert "holds no record" in refused(tmp_path / "empty", ledger_url)
    assert "holds no record" in refused(tmp_path / "begun", ledger_url)
    assert "begins with record 1, not with a job's start" in refused(tmp_path / "headless", ledger_url)
    assert "holds no manifest.json, no journal and no ledger.db" in refused(tmp_path / "folder", ledger_url)


def test_a_corrupt_sqlite_file_names_the_way_out(ledger_url: str, tmp_path: Path) -> None:
    file = tmp_path / "source.db"
    ledger_with(f"sqlite:///{file}", tmp_path / "job", story())
    content = bytearray(file.read_bytes())
    content[100:] = bytes(len(content) - 100)
    file.write_bytes(content)
    text = refused(file, ledger_url)
    assert "resihp db import JOURNAL" in text
    assert text.startswith("ledger sqlite:")


def test_exports_of_other_schemas_say_which_command(
    ledger_urls: Urls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = ledger_urls(), ledger_urls()
    ledger_with(source, tmp_path / "job", story())
    export(source, tmp_path / "out")
    file = tmp_path / "out" / "manifest.json"
    manifest = json.loads(file.read_text())
    for schema, words in (
        ("9999", "newer than .*upgrade resihp"),
        ("0006", r"before 0\.1\.0 .* resihp db import JOURNAL"),
    ):
        file.write_text(json.dumps(manifest | {"schema": schema, "min_reader": schema}))
        with pytest.raises(LedgerError, match=words):
            import_from(str(tmp_path / "out"), target)
    file.write_text("{}")
    assert "cannot be read" in refused(tmp_path / "out", target)
    file.write_text(json.dumps(manifest))
    with monkeypatch.context() as later:
        add_later_schema(later, tmp_path / "migrations")
        assert "run resihp db upgrade on the ledger" in refused(tmp_path / "out", ledger_urls())
    former(tmp_path / "out")
    (tmp_path / "out" / "plans.parquet").write_bytes(b"PAR1 not really")
    assert "plans.parquet cannot be read" in refused(tmp_path / "out", target)
    (tmp_path / "out" / "plans.parquet").unlink()
    assert "plans.parquet cannot be read" in refused(tmp_path / "out", target)
    assert not made(target), "a job comes as a whole or not at all"


def made(url: str) -> bool:
    """Whether there is a ledger."""
    file = file_of(resolve(url))
    return (file is None or file.exists()) and migrate.current(url) is not None


def test_a_newer_source_and_one_that_is_no_ledger(ledger_url: str, tmp_path: Path) -> None:
    file = tmp_path / "source.db"
    ledger_with(f"sqlite:///{file}", tmp_path / "job", story())
    execute(f"sqlite:///{file}", *NEWER)
    assert "newer than" in refused(file, ledger_url)
    sqlite3.connect(tmp_path / "other.db").execute("CREATE TABLE x (y)").connection.close()
    assert "holds no ledger of resihp" in refused(tmp_path / "other.db", ledger_url)


@on_sqlite
def test_a_folder_that_is_there_is_not_overwritten(full: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(UsageError, match="exists; name a new folder"):
        export(full, tmp_path / "out")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="cannot be written"):
        export(full, tmp_path / "file" / "out")


@on_sqlite
def test_a_ledger_is_no_source_of_itself(full: str) -> None:
    assert "is the ledger itself" in refused(full.removeprefix("sqlite:///"), full)


def test_a_job_that_writes_meanwhile(ledger_urls: Urls, tmp_path: Path) -> None:
    """An export is of one moment; what the importer brought forward does not disturb the job's own writer."""
    records = write_journal(tmp_path / "journal", story())
    url, ahead = ledger_urls(), ledger_urls()
    catch_up(ahead, tmp_path, tmp_path / "journal")
    export(ahead, tmp_path / "ahead")
    with Ledger.open(url, tmp_path) as ledger:
        for record in records[:20]:
            ledger.submit(record)
        assert ledger.flush(30)
        export(url, tmp_path / "out")
        import_from(str(tmp_path / "ahead"), url)
        for record in records[20:]:
            ledger.submit(record)
        assert ledger.flush(30)
    assert everything_in(url) == everything_in(ahead)
    assert set(TABLES) <= {table.name for table in OF_JOBS}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives links away")
def test_an_export_follows_the_users_own_link_and_no_other(tmp_path: Path) -> None:
    url = ledger_with(f"sqlite:///{tmp_path / 'ledger.db'}", tmp_path / "job", story(), reports=False)
    (tmp_path / "disk").mkdir()
    link = tmp_path / "out"
    link.symlink_to("disk/october")
    export(url, link)
    assert (tmp_path / "disk" / "october" / "manifest.json").is_file()
    os.chown(link, 54321, -1, follow_symlinks=False)
    with pytest.raises(UsageError, match="out: is another user's link, which is not followed"):
        export(url, link)
