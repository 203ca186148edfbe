"""`resihp db upgrade|export|import|prune|grant`: upgrade a ledger's schema, move jobs between ledgers, delete old rows,
grant rights to a database user.

Messages go to stderr; with --json the result goes to stdout. Slow imports are inside the functions.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from resihp.errors import LedgerError, UsageError
from resihp.words import count_of
from resihp.wrapper.output.answers import SCHEMA, JobArgument, JsonOption, LedgerOption, message, moment, to_json

if TYPE_CHECKING:
    from resihp.db.parquet.writing import Exported


def register(app: typer.Typer) -> None:
    """Add `resihp db` to the command line."""
    ledger = typer.Typer(help="Maintain the ledger: schema, export and import, old rows, users.", no_args_is_help=True)
    ledger.command()(upgrade)
    ledger.command("export")(export_jobs)
    ledger.command("import")(import_jobs)
    ledger.command()(prune)
    ledger.command()(grant)
    app.add_typer(ledger, name="db")


def upgrade(
    job: JobArgument = None,
    all_jobs: Annotated[bool, typer.Option("--all", help="Ledger files of all jobs here.")] = False,
    as_json: JsonOption = False,
    ledger: LedgerOption = None,
) -> None:
    """Upgrade a ledger to this version's schema, or create it.

    On a database server, only this command upgrades an existing ledger. Jobs keep
    running meanwhile: tables are locked one after the other. Afterwards the costs
    of finished jobs are computed and stored where they are missing.
    """
    if all_jobs and (job is not None or ledger is not None):
        raise UsageError("db upgrade: --all means all jobs of this home; leave JOB and --ledger out")
    if all_jobs:
        rows = _upgrade_home()
        if as_json:
            print(to_json({"schema": SCHEMA, "rows": rows}))
        return
    if ledger is None or ledger == "sqlite":
        from resihp.db.engine import resolve
        from resihp.wrapper.job_folder import find_job, not_ours, ours
        from resihp.wrapper.output.ledgers import our_url

        job_here = find_job(job, acts=True)
        if (own_job := ours(job_here)) is None:
            raise not_ours(job_here, "its ledger is not upgraded")
        ledger = our_url(own_job) if ledger is None else str(resolve("sqlite", own_job.folder))
    result = _upgrade(ledger)
    if as_json:
        print(to_json({"schema": SCHEMA, **result}))


def _upgrade(ledger: str) -> dict[str, Any]:
    from resihp.db import migrate
    from resihp.db.engine import masked
    from resihp.db.settling import settle
    from resihp.wrapper.output.ledgers import exists

    before = migrate.current(ledger) if exists(ledger) else None
    after = migrate.upgrade(ledger, message)
    state = "up to date" if before == after else "created" if before is None else f"upgraded from {before}"
    newer, settled = migrate.is_newer(after), 0
    if newer:
        state += ", newer than this resihp" + (", which may only read it" if migrate.only_readable(ledger) else "")
    elif settled := settle(ledger, message):
        state += f"; costs of {settled} job{'s' * (settled != 1)} stored"
    message(f"ledger {masked(ledger)}: schema {after}, {state}")
    return {"ledger": masked(ledger), "before": before, "after": after, "newer": newer, "settled": settled}


def _upgrade_home() -> list[dict[str, Any]]:
    """Upgrade the ledger files of this home's jobs. A ledger on a server is shared and is upgraded only by name."""
    from resihp.db.engine import file_of, resolve
    from resihp.wrapper.job_folder import all_jobs, no_job_here, our_jobs
    from resihp.wrapper.output.ledgers import urls_of

    if not all_jobs():
        raise no_job_here()
    rows: list[dict[str, Any]] = []
    urls, failed = urls_of(our_jobs())
    for url in urls:
        if (file := file_of(resolve(url))) is None or not file.exists():
            continue
        try:
            rows.append(_upgrade(url))
        except LedgerError as error:
            message(f"warning: {error}")
            failed += 1
    if failed:
        raise LedgerError(f"{failed} of {failed + len(rows)} ledgers were not upgraded")
    return rows


def export_jobs(
    job: JobArgument = None,
    folder: Annotated[
        Path, typer.Option("--output", "-o", help="New folder, or one of an earlier export.", show_default=False)
    ] = Path(),
    all_jobs: Annotated[bool, typer.Option("--all", help="All jobs of the ledger, or of all ledgers here.")] = False,
    as_json: JsonOption = False,
    ledger: LedgerOption = None,
) -> None:
    """Export a job, or a whole ledger, to Parquet files that `resihp db import` and pandas read.

    Example: resihp db export --all --ledger postgresql://me@host/ledger -o october

    In the folder of an earlier export, only months with changed jobs are written
    again. An export of a whole ledger includes the repairs of nodes.
    """
    if folder == Path():
        raise UsageError("db export: no folder; name a new one with -o FOLDER")
    if all_jobs and job is not None:
        raise UsageError(f"db export: JOB {job} and --all exclude each other; choose one")
    from resihp.db.exchange import export

    if not all_jobs:
        exported = export(*_of_job(job, ledger, folder))
    elif ledger is not None and ledger != "sqlite":
        exported = export(ledger, folder)
    else:
        exported = _export_home(folder)
    manifest = exported.manifest
    if as_json:
        result = {"folder": str(folder), "jobs": list(manifest.jobs), "tables": manifest.rows}
        print(to_json({"schema": SCHEMA, **result, "months": {"written": exported.written, "kept": exported.kept}}))
    counted = (
        f"{len(manifest.jobs)} job{'s' * (len(manifest.jobs) != 1)}, {count_of(sum(manifest.rows.values()), 'row')}"
    )
    message(f"{counted} in {folder} (ledger schema {manifest.schema})")
    for action, months in (("written", exported.written), ("unchanged", exported.kept)):
        if months:
            message(f"months {action}: {', '.join(months)}")
    if manifest.left_out:
        message(f"warning: left out, newer than this resihp: {', '.join(manifest.left_out)}")


def _of_job(job: str | None, ledger: str | None, folder: Path) -> tuple[str, Path, list[str]]:
    """Return the arguments of `resihp.db.exchange.export` for one job; first bring its ledger up to date with its
    journal."""
    from sqlalchemy import select

    from resihp.db.engine import default_url
    from resihp.db.models import JobRow
    from resihp.wrapper.job_folder import find_job
    from resihp.wrapper.output.ledgers import opened, pinned, url_of

    job = pinned(job, ledger)
    with opened(job, ledger) as (reader, row):
        uuids = [job_row["uuid"] for job_row in reader.fetch(select(JobRow.uuid).where(JobRow.id == row["id"]))]
    if ledger is not None and ledger != "sqlite":
        return ledger, folder, uuids
    job_here = find_job(job)
    return url_of(job_here) if ledger is None else default_url(job_here.folder), folder, uuids


def _export_home(folder: Path) -> Exported:
    """Export all jobs of all ledgers that the jobs of this home write to."""
    from tempfile import TemporaryDirectory

    from resihp.db.engine import file_of, resolve
    from resihp.db.exchange import export, import_from
    from resihp.wrapper.job_folder import all_jobs
    from resihp.wrapper.output.ledgers import exists, from_all, urls_of

    from_all(None, lambda reader: reader.name)  # brings the ledgers up to date with their journals
    with TemporaryDirectory(prefix="resihp-export-") as temporary:
        together = f"sqlite:///{temporary}/ledger.db"
        for url in urls_of(all_jobs(), quiet=True)[0]:  # from_all has warned
            if exists(url):
                import_from(str(file_of(resolve(url)) or url), together)
        return export(together, folder)


def import_jobs(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Export, journal, job folder or SQLite ledger.")
    ],
    as_json: JsonOption = False,
    ledger: LedgerOption = None,
) -> None:
    """Import jobs into a ledger; the ledger is created if necessary.

    Importing a job again, or an older copy of it, changes nothing. Repairs of
    nodes are imported as well, under the name of the importing user.

    Example: resihp db import .resihp/jobs/* --ledger postgresql://me@host/ledger

    A journal without --ledger rebuilds its job's lost or damaged ledger.
    """
    from resihp.db.engine import masked
    from resihp.db.exchange import import_from

    merged = []
    for path in paths:
        url = _own_ledger(Path(path)) if ledger is None or ledger == "sqlite" else ledger
        for imported in import_from(path, url):
            merged.append({"path": path, "ledger": masked(url), **asdict(imported)})
            result = (
                imported.outcome
                if imported.outcome == "unchanged"
                else f"{imported.outcome}, {imported.rows} row{'s' * (imported.rows != 1)}"
            )
            subject = f"job {imported.job}" if imported.uuid else "maintenance"
            message(f"{subject}: {result}" + (f"; {imported.note}" if imported.note else ""))
    if as_json:
        print(to_json({"schema": SCHEMA, "rows": merged}))


def _own_ledger(path: Path) -> str:
    """Return the ledger of the job in this home that wrote this journal. Raises UsageError if there is none."""
    from resihp.record import journal_file
    from resihp.wrapper.job_folder import our_jobs
    from resihp.wrapper.output.ledgers import our_url

    journals = [path, path / "journal"]
    journal = next((candidate for candidate in journals if candidate.is_file() and _begins_as_journal(candidate)), None)
    records = journal_file.read_packed(journal) if journal is not None else []
    if records:
        for job in our_jobs():
            records_here = job.records()
            if records_here and records_here[0] == records[0]:
                return our_url(job)
    raise UsageError(f"{path}: not the journal of a job in this home; name the ledger with --ledger URL")


def _begins_as_journal(path: Path) -> bool:
    from resihp.record import journal_format

    try:
        with path.open("rb") as file:
            return file.read(len(journal_format.MAGIC)) == journal_format.MAGIC
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


def prune(
    older_than: Annotated[str, typer.Option(help="Age (90d, 12h) or time (ISO, UTC).", show_default=False)],
    keep_every: Annotated[int | None, typer.Option(help="Keep every N-th iteration.", show_default=False)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the rows to remove; remove nothing.")] = False,
    as_json: JsonOption = False,
    ledger: LedgerOption = None,
) -> None:
    """Delete old iteration rows and rank reports; jobs, failures, plans and events stay.

    Example: resihp db prune --older-than 90d --keep-every 100 --ledger postgresql://me@host/ledger
    """
    from resihp.db.engine import masked
    from resihp.db.retention import prune as prune_rows
    from resihp.wrapper.job_folder import our_jobs
    from resihp.wrapper.output.ledgers import exists, urls_of

    before = moment(older_than)
    assert before is not None
    if ledger is not None and ledger != "sqlite":
        urls = [ledger]
    else:
        urls = [url for url in urls_of(our_jobs())[0] if exists(url)]
    rows = [
        {"ledger": masked(url), **asdict(removed)}
        for url in urls
        for removed in prune_rows(url, before, keep_every, dry_run=dry_run)
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
        bool, typer.Option("--trusted", help="Reports of its jobs on nodes count for all users.")
    ] = False,
    as_json: JsonOption = False,
    ledger: LedgerOption = None,
) -> None:
    """Print the SQL that lets a database user read a shared ledger and write jobs of their own.

    Example: resihp db grant alice --ledger postgresql://admin@host/ledger | psql postgresql://admin@host/ledger

    The owner of the tables runs it, after resihp db upgrade. Only the owner can
    change rows that another user wrote. A reader, for dashboards, writes nothing;
    an owner upgrades and prunes the ledger. Earlier rights of the role are
    revoked.
    """
    from resihp.db.engine import masked, resolve
    from resihp.db.grants import statements
    from resihp.wrapper.output.ledgers import our_url

    if ledger is None:
        from resihp.wrapper.job_folder import find_job, not_ours, ours

        job_here = find_job()
        if (own_job := ours(job_here)) is None:
            raise not_ours(job_here, "its ledger setting is not trusted")
        ledger = our_url(own_job)
    parsed = resolve(ledger)
    if parsed.get_backend_name() != "postgresql" or not parsed.database:
        raise UsageError(f"ledger {masked(ledger)}: SQLite has no users; set access to the file with chmod")
    lines = ["BEGIN;", *statements(role, parsed.database, kind=kind, trusted=trusted), "COMMIT;"]
    if as_json:
        result = {"ledger": masked(parsed), "role": role, "kind": kind, "trusted": trusted, "statements": lines}
        print(to_json({"schema": SCHEMA, **result}))
        return
    print("\n".join(lines))
