"""`resihp status` of a job whose folder we cannot read: the summary that the job shares with its site, if it does.

Called by `resihp.wrapper.commands.status.command` when no job of that name can be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from resihp.wrapper.output.progress import ago, of_target
from resihp.wrapper.output.render import literal

Row = dict[str, Any]


def shared_lines(row: Row, now: datetime) -> Sequence[str]:
    """Return the lines for a shared job, without control characters."""
    from resihp.wrapper.commands.status.tables import progress_line

    head = f"job {row['job']}  {row['state']}"
    if row["iteration"] or row["target"]:
        head += f"  iteration {of_target(row)}"
    if row["loss"] is not None:
        head += f"  loss {row['loss']:.4f}"
    where = f"user {row['user']}, {row['nodes']} x {row['gpus_per_node']} GPUs, cluster {row['cluster']}, "
    event = f"{row['event_at'].astimezone(UTC):%m-%d %H:%M:%S}  {row['event']}" if row["event"] else ""
    shared_s = max((now - row["shared_at"]).total_seconds(), 0.0)
    lines = [
        head,
        progress_line(row),
        f"{where}supervised on {row['host']}",
        row["layout"] or "",
        event,
        f"shared by the job {ago(shared_s)}; not shown: health of the ranks, goodput, logs, other events: they are in "
        f"the job's folder, which is {row['user']}'s",
    ]
    return [literal(line) for line in lines if line]
