"""Run by Alembic for `resihp.db.migrate`: always online, on the connection and in the transaction that it is given."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

from resihp.db.migrate import VERSION_TABLE
from resihp.db.models import LedgerTable

connection: Connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=LedgerTable.metadata,
    version_table=VERSION_TABLE,
    render_as_batch=connection.dialect.name == "sqlite",
)
with context.begin_transaction():
    context.run_migrations()
