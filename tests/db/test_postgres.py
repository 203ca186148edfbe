"""The same ledger on PostgreSQL. Runs where RESIHP_TEST_POSTGRES names an empty database and psycopg is installed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from db import migrate, queries
from db.engine import make_engine, resolve
from db.models import Base
from db.queries import TABLES, Reader
from db.writer import Ledger
from resihp import journal

from .conftest import BEGAN, started

URL = os.environ.get("RESIHP_TEST_POSTGRES", "")
pytestmark = pytest.mark.skipif(not URL, reason="RESIHP_TEST_POSTGRES names no database")


def test_schema_journal_and_queries(records: list[journal.Record], tmp_path: Path) -> None:
    pytest.importorskip("psycopg", reason="the PostgreSQL driver is not installed: pip install psycopg[binary]")
    # Jobs of two users that start at once: one of them migrates, both write.
    begun = [journal.Record(1, BEGAN + n, started("pg-1", user)) for n, user in enumerate(("me", "you"))]

    def job(first: journal.Record) -> None:
        with Ledger.open(URL, tmp_path) as ledger:
            for record in (first, *records[1:]):
                ledger.submit(record)
            ledger.telemetry([{"iteration": 1, "epoch": 1, "rank": 0, "seconds": 0.5, "compute_seconds": 0.4}])
            for record in (first, *records[1:]):
                ledger.submit(record)
            assert ledger.flush(30)

    threads = [threading.Thread(target=job, args=(first,)) for first in begun]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine = make_engine(resolve(URL), write=False)
    with engine.connect() as connection:
        options = {"version_table": migrate.VERSION_TABLE, "compare_type": True, "compare_server_default": True}
        assert compare_metadata(MigrationContext.configure(connection, opts=options), Base.metadata) == []
    engine.dispose()
    with Reader.open(URL) as reader:
        assert [row["owner"] for row in reader.jobs() if row["name"] == "pg-1"] == ["you", "me"]
        for row in reader.jobs():
            assert len(reader.rows("iterations", row["id"])) == 20
            lost = reader.summary(row["id"])["lost_seconds"]
            assert lost == pytest.approx({"fail-stop": 0.7, "other": 0.0}, abs=1e-4)
            assert queries.failures(reader, row["id"])["seconds_to_recover"].tolist() == [1.0]
            for table in TABLES:
                queries.frame(reader, table, row["id"])
