"""A schema after the newest: what upgrades do is tested with one migration more than the product has."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from alembic import command

from resihp.db import migrate
from resihp.db.engine import make_engine, resolve

LATER = "9000"
MIGRATION = f'''
import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "{LATER}", "{migrate.head()}", None, None


def upgrade() -> None:
    with op.batch_alter_table("failures") as batch:
        batch.add_column(sa.Column("note", sa.Text()))


def downgrade() -> None:
    with op.batch_alter_table("failures") as batch:
        batch.drop_column("note")
'''
"""It adds a column, as most migrations do, and needs the whole table for itself meanwhile."""


def add_later_schema(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have `resihp.db.migrate` know the schema LATER: ledgers made before are older than the newest from now on."""
    shutil.copytree(migrate.MIGRATIONS_FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "versions" / f"{LATER}_later.py").write_text(MIGRATION)
    monkeypatch.setattr(migrate, "MIGRATIONS_FOLDER", folder)
    monkeypatch.setattr(migrate, "_revisions", migrate._revisions.__wrapped__)  # without the cache of the product's own


def moved_to(url: str, revision: str) -> None:
    """Upgrade or downgrade the ledger at `url` to a schema, as `migrate.upgrade` upgrades it to the newest."""
    engine = make_engine(resolve(url), write=True, migrate=True)
    with engine.begin() as connection:
        config = migrate._config()
        config.attributes["connection"] = connection
        (command.upgrade if (migrate.version_of(connection) or "") < revision else command.downgrade)(config, revision)
    engine.dispose()
