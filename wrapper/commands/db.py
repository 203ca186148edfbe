"""`resihp db upgrade|export|import|prune|grant`: a ledger's schema; jobs out of it and into another; old rows away;
what a database user needs.

Messages to stderr, with --json what was done to stdout. Everything that takes time to import is imported in the
functions.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from resihp.errors import LedgerError, UsageError
from resihp.words import count_of
from wrapper.output.answers import SCHEMA, JobArgument, JsonOption, LedgerOption, message, moment, to_json

if TYPE_CHECKING:
    from db.parquet.writing import Exported


def register(app: typer.Typer) -> None:
    """Add `resihp db` to the command line."""
    ledger = typer.Typer(help="The ledger: its schema, and jobs in and out of it.", no_args_is_help=True)
    ledger.command()(upgrade)
    ledger.command("export")(export_jobs)
    ledger.command("import")(import_jobs)
    ledger.command()(prune)
    ledger.command()(grant)
    app.add_typer(ledger, name="db")


def upgrade(
    job: JobArgument = None,
    every: Annotated[bool, typer.Option("--all", help="The ledger files of all jobs here.")] = False,
    as_json: JsonOption = False,
    ledger: LedgerOption = None,
) -> None:
    """Bring a ledger to this version's schema; makes it if it is not there.

    On a server nobody else does this to a ledger that is there. Jobs go on meanwhile: it waits for tables in turns.
    Then it keeps what jobs cost that are over, where that has yet to be reckoned.
    """
    if every and (job is not None or ledger is not None):
        raise UsageError("db upgrade: --all is of all jobs of this home; leave JOB and --ledger out")
    if every:
        rows = _upgrade_home()
        if as_json:
            print(to_json({"schema": SCHEMA, "rows": rows}))
        return
    if ledger is None or ledger == "sqlite":
        from db.engine import resolve
        from wrapper.job_folder import find_job, not_ours, ours
        from wrapper.output.ledgers import our_url

        found = find_job(job, acts=True)
        if (own := ours(found)) is None:
            raise not_ours(found, "its ledger is not upgraded")
        ledger = our_url(own) if ledger is None else str(resolve("sqlite", own.folder))
    told = _upgrade(ledger)
    if as_json:
        print(to_json({"schema": SCHEMA, **told}))


def _upgrade(ledger: str) -> dict[str, Any]:
    from db import migrate
    from db.engine import masked
    from db.settling import settle
    from wrapper.output.ledgers import exists

    before = migrate.current(ledger) if exists(ledger) else None
    after = migrate.upgrade(ledger, message)
    what = "is up to date" if before == after else "made" if before is None else f"upgraded from {before}"
    newer, settled = migrate.is_newer(after), 0
    if newer:
        what += ", newer than this resihp" + (", which may only read it" if migrate.only_readable(ledger) else "")
    elif settled := settle(ledger, message):
        what += f"; accounts of {settled} job{'s' * (settled != 1)} settled"
    message(f"ledger {masked(ledger)}: schema {after}, {what}")
    return {"ledger": masked(ledger), "before": before, "after": after, "newer": newer, "settled": settled}


def _upgrade_home() -> list[dict[str, Any]]:
    """The files that jobs of this home write to. A server's is for many, and named by itself."""
    from db.engine import file_of, resolve
    from wrapper.job_folder import all_jobs, no_job_here, our_jobs
    from wrapper.output.ledgers import urls_of

    if not all_jobs():
        raise no_job_here()
    rows: list[dict[str, Any]] = []
    urls, left = urls_of(our_jobs())
    for url in urls:
        if (file := file_of(resolve(url))) is None or not file.exists():
            continue
        try:
            rows.append(_upgrade(url))
        except LedgerError as error:
            message(f"warning: {error}")
            left += 1
    if left:
        raise LedgerError(f"{left} of {left + len(rows)} ledgers are as they were")
    return rows


def export_jobs(
    job: JobArgument = None,
    folder: Annotated[
        Path, typer.Option("--output", "-o", help="A new folder, or an export's.", show_default=False)
    ] = Path(),
    every: Annotated[bool, typer.Option("--all", help="All jobs of the ledger, or of all ledgers here.")] = False,
    as_json: JsonOption = False,
    ledger: LedgerOption = None,
) -> None:
    """Write a job, or all of a ledger, to Parquet files, which `resihp db import` and pandas read.

    Example: resihp db export --all --ledger postgresql://me@host/ledger -o october

    Into the folder of an export of before, it writes anew only the months of
    jobs that have changed since. All of a ledger has what was repaired, too.
    """
    if folder == Path():
        raise UsageError("db export: no folder; name a new one with -o FOLDER")
    if every and job is not None:
        raise UsageError(f"db export: JOB {job} and --all exclude each other; choose one")
    from db.exchange import export

    if not every:
        exported = export(*_of_job(job, ledger, folder))
    elif ledger is not None and ledger != "sqlite":
        exported = export(ledger, folder)
    else:
        exported = _export_home(folder)
    manifest = exported.manifest
    if as_json:
        told = {"folder": str(folder), "jobs": list(manifest.jobs), "tables": manifest.rows}
        print(to_json({"schema": SCHEMA, **told, "months": {"written": exported.written, "kept": exported.kept}}))
    counted = (
        f"{len(manifest.jobs)} job{'s' * (len(manifest.jobs) != 1)}, {count_of(sum(manifest.rows.values()), 'row')}"
    )
    message(f"{counted} in {folder} (ledger schema {manifest.schema})")
    for what, months in (("written", exported.written), ("kept as they were", exported.kept)):
        if months:
            message(f"months {what}: {', '.join(months)}")
    if manifest.left_out:
        message(f"warning: left out, newer than this resihp: {', '.join(manifest.left_out)}")


def _of_job(job: str | None, ledger: str | None, folder: Path) -> tuple[str, Path, list[str]]:
    """What `db.exchange.export` is to be asked for one job, whose ledger is brought up to its journal first."""
    from sqlalchemy import select

    from db.engine import default_url
    from db.models import JobRow
    from wrapper.job_folder import find_job
    from wrapper.output.ledgers import opened, pinned, url_of

    job = pinned(job, ledger)
    with opened(job, ledger) as (reader, row):
        uuids = [each["uuid"] for each in reader.fetch(select(JobRow.uuid).where(JobRow.id == row["id"]))]
    if ledger is not None and ledger != "sqlite":
        return ledger, folder, uuids
    found = find_job(job)
    return url_of(found) if ledger is None else default_url(found.folder), folder, uuids


def _export_home(folder: Path) -> Exported:
    """All jobs of the ledgers that the jobs of this home write to."""
    from tempfile import TemporaryDirectory

    from db.engine import file_of, resolve
    from db.exchange import export, import_from
    from wrapper.job_folder import all_jobs
    from wrapper.output.ledgers import exists, from_all, urls_of

    from_all(None, lambda reader: reader.name)  # which brings them up to their journals
    with TemporaryDirectory(prefix="resihp-export-") as kept:
        together = f"sqlite:///{kept}/ledger.db"
        for url in urls_of(all_jobs(), quiet=True)[0]:  # from_all has warned
            if exists(url):
                import_from(str(file_of(resolve(url)) or url), together)
        return export(together, folder)


def import_jobs(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="An export, a journal, a job's folder, or a SQLite ledger.")
    ],
    as_json: JsonOption = False,
    ledger: LedgerOption = None,
) -> None:
    """Bring jobs into a ledger, which is made if need be; importing again changes nothing, an older copy neither.
    What was repaired comes along, in the name of who imports it.

    Example: resihp db import .resihp/jobs/* --ledger postgresql://me@host/ledger

    A journal alone, without --ledger, makes the ledger of its job anew where that is lost or damaged.
    """
    from db.engine import masked
    from db.exchange import import_from

    merged = []
    for path in paths:
        url = _own_ledger(Path(path)) if ledger is None or ledger == "sqlite" else ledger
        for each in import_from(path, url):
            merged.append({"path": path, "ledger": masked(url), **asdict(each)})
            what = (
                each.outcome
                if each.outcome == "unchanged"
                else f"{each.outcome}, {each.rows} row{'s' * (each.rows != 1)}"
            )
            whose = f"job {each.job}" if each.uuid else "maintenance"
            message(f"{whose}: {what}" + (f"; {each.note}" if each.note else ""))
    if as_json:
        print(to_json({"schema": SCHEMA, "rows": merged}))


def _own_ledger(path: Path) -> str:
    """Of the job whose journal it is, in this home. Raises UsageError if it is none."""
    from resihp.record import journal_file
    from wrapper.job_folder import our_jobs
    from wrapper.output.ledgers import our_url

    journals = [path, path / "journal"]
    found = next((each for each in journals if each.is_file() and _begins_as_journal(each)), None)
    records = journal_file.read_packed(found) if found is not None else []
    if records:
        for job in our_jobs():
            own = job.records()
            if own and own[0] == records[0]:
                return our_url(job)
    raise UsageError(f"{path}: not the journal of a job here; name the ledger with --ledger URL")


def _begins_as_journal(path: Path) -> bool:
    from resihp.record import journal_file

    try:
        with path.open("rb") as file:
            return file.read(len(journal_file.MAGIC)) == journal_file.MAGIC
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


def prune(
    older_than: Annotated[str, typer.Option(help="Age (90d, 12h) or time (ISO, UTC).", show_default=False)],
    keep_every: Annotated[int | None, typer.Option(help="Keep every N-th iteration.", show_default=False)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    as_json: JsonOption = False,
    ledger: LedgerOption = None,
) -> None:
    """Remove old iteration rows and rank reports; jobs, failures, plans and events stay.

    Example: resihp db prune --older-than 90d --keep-every 100 --ledger postgresql://me@host/ledger
    """
    from db.engine import masked
    from db.retention import prune as prune_rows
    from wrapper.job_folder import our_jobs
    from wrapper.output.ledgers import exists, urls_of

    before = moment(older_than)
    assert before is not None
    if ledger is not None and ledger != "sqlite":
        urls = [ledger]
    else:
        urls = [url for url in urls_of(our_jobs())[0] if exists(url)]
    rows = [
        {"ledger": masked(url), **asdict(each)}
        for url in urls
        for each in prune_rows(url, before, keep_every, dry_run=dry_run)
    ]
    if as_json:
        print(to_json({"schema": SCHEMA, "dry_run": dry_run, "rows": rows}))
    done = "would be removed" if dry_run else "removed"
    for row in rows:
        reports = count_of(row["rank_reports"], "rank report")
        message(f"job {row['job']}: {count_of(row['iterations'], 'iteration')} and {reports} {done}")
    if not rows:
        message(f"nothing older than {before:%Y-%m-%d %H:%M} UTC to remove")


def grant(
    role: Annotated[str, typer.Argument(help="A database user (role) of PostgreSQL.")],
    kind: Annotated[
        str,
        typer.Option("--as", metavar="KIND", help="owner (of the tables), writer (of its own jobs), reader."),
    ] = "writer",
    trusted: Annotated[
        bool, typer.Option("--trusted", help="What its jobs tell of nodes counts for everybody's.")
    ] = False,
    as_json: JsonOption = False,
    ledger: LedgerOption = None,
) -> None:
    """Print what gives a database user the use of a shared ledger: to read all of it, and to write jobs of his own.

    Example: resihp db grant alice --ledger postgresql://admin@host/ledger | psql postgresql://admin@host/ledger

    Who owns the tables runs it, after resihp db upgrade. Nobody but him can change what another user wrote. A reader,
    for dashboards, writes nothing; an owner upgrades the ledger and prunes it. What the role had before is taken.
    """
    from db.engine import masked, resolve
    from db.grants import statements
    from wrapper.output.ledgers import our_url

    if ledger is None:
        from wrapper.job_folder import find_job, not_ours, ours

        found = find_job()
        if (own := ours(found)) is None:
            raise not_ours(found, "its ledger setting is not trusted")
        ledger = our_url(own)
    parsed = resolve(ledger)
    if parsed.get_backend_name() != "postgresql" or not parsed.database:
        raise UsageError(f"ledger {masked(ledger)}: has no users of its own; chmod says who may read a SQLite file")
    lines = ["BEGIN;", *statements(role, parsed.database, kind=kind, trusted=trusted), "COMMIT;"]
    if as_json:
        told = {"ledger": masked(parsed), "role": role, "kind": kind, "trusted": trusted, "statements": lines}
        print(to_json({"schema": SCHEMA, **told}))
        return
    print("\n".join(lines))
