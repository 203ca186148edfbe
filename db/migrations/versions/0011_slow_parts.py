"""Failures of the whole job, of collectives, sums of gradients and data: all of them slow, none of them a device.

SQLite cannot change a constraint: Alembic copies the table, without its CHECK constraints, which are all made here.
"""

from __future__ import annotations

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

BEFORE = "component IN ('process', 'device', 'node', 'link', 'script')"
AFTER = "component IN ('process', 'device', 'node', 'link', 'script', 'job', 'collective', 'reduction', 'data')"
OTHERS = {
    "kind": "kind IN ('fail-stop', 'fail-slow', 'communication', 'program')",
    "speed": "speed > 0 AND speed <= 1",
    "confidence": "confidence >= 0 AND confidence <= 1",
}


def upgrade() -> None:
    _constrain(AFTER)


def downgrade() -> None:
    """What was slow and no device is lost; the journal keeps it."""
    op.execute("DELETE FROM failures WHERE component IN ('job', 'collective', 'reduction', 'data')")
    _constrain(BEFORE)


def _constrain(components: str) -> None:
    with op.batch_alter_table("failures") as batch:
        if op.get_bind().dialect.name == "sqlite":
            for name, condition in OTHERS.items():
                batch.create_check_constraint(op.f(f"ck_failures_{name}"), condition)
        else:
            batch.drop_constraint(op.f("ck_failures_component"), type_="check")
        batch.create_check_constraint(op.f("ck_failures_component"), components)
