"""`resihp node repaired|maintenance`: record repairs of nodes in a ledger, and list them.

Failures before a repair no longer count against the repaired node or device (`resihp.db.reading.hardware`). Slow
imports are inside the functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from resihp.errors import UsageError
from resihp.wrapper.output.answers import JsonOption, message, moment, to_json

if TYPE_CHECKING:
    from resihp.slurm.client import Slurm

JSON_SCHEMA = 1
MAX_NOTE_CHARACTERS, MAX_KIND_CHARACTERS = 2000, 40

RequiredLedger = Annotated[str, typer.Option("--ledger", help="The ledger's URL.", show_default=False)]


def register(nodes: typer.Typer) -> None:
    """Add the commands to `resihp node`."""
    nodes.command("repaired")(repaired)
    nodes.command("maintenance")(maintenance)


def repaired(
    node: Annotated[str, typer.Argument(help="Node name.")],
    ledger: RequiredLedger,
    device: Annotated[
        str | None, typer.Option(help="One device: UUID or number.", show_default="the whole node")
    ] = None,
    at: Annotated[str | None, typer.Option(help="Time (ISO, UTC) or age (2h).", show_default="now")] = None,
    kind: Annotated[str, typer.Option(help="repaired, replaced, firmware, or another word.")] = "repaired",
    note: Annotated[str, typer.Option(help="Description of the work.", show_default=False)] = "",
    as_json: JsonOption = False,
) -> None:
    """Record that a node, or one of its devices, was repaired: its failure record starts anew.

    Lemons and health count only later failures. A device that was replaced and
    turns up elsewhere keeps its record there.

    Example: resihp node repaired gpu-17 --device 3 --kind replaced --ledger URL
    """
    from resihp.db.maintenance import record

    for option, text, longest in (("kind", kind, MAX_KIND_CHARACTERS), ("note", note, MAX_NOTE_CHARACTERS)):
        if len(text) > longest or not text.isprintable():
            raise UsageError(f"--{option}: at most {longest} characters in one line")
    if not kind.strip():
        raise UsageError("--kind: use repaired, replaced, firmware, or a word of your own")
    row = record(ledger, node, device=device, at=moment(at), kind=kind.strip(), note=note, cluster=_cluster())
    if as_json:
        print(to_json({"schema": JSON_SCHEMA, "rows": [row]}))
    else:
        subject = f"node {node}" if device is None else f"node {node}: device {row['device_uuid']}"
        message(f"{subject}: {row['kind']} at {row['at']:%Y-%m-%d %H:%M} UTC; starts anew in lemons and health")


def maintenance(
    ledger: RequiredLedger,
    node: Annotated[str | None, typer.Argument(metavar="[NODE]", help="Only this node.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List recorded repairs, oldest first.

    Counts: whether its author is trusted (resihp db grant --trusted).

    Example: resihp node maintenance gpu-17 --ledger URL
    """
    from resihp.db.reading.hardware import maintenance_rows
    from resihp.db.reading.reader import Reader

    with Reader.open(ledger) as reader:
        rows = maintenance_rows(reader, node)
    if as_json:
        print(to_json({"schema": JSON_SCHEMA, "rows": rows}))
    elif rows:
        _show(rows)
    else:
        message(f"no repairs recorded{'' if node is None else f' for node {node}'}; try: resihp node repaired")


def connect() -> Slurm:
    """Return the client for this machine's Slurm."""
    from resihp.slurm.commands import CommandLine

    return CommandLine()


def _cluster() -> str:
    """Return the name of this cluster; empty without Slurm."""
    from resihp.slurm.errors import SlurmError

    try:
        return connect().cluster()
    except SlurmError:
        return ""


def _show(rows: list[dict[str, Any]]) -> None:
    from resihp.wrapper.output.answers import console
    from resihp.wrapper.output.tables import Column, show

    columns = (
        *(Column("at (UTC)"), Column("node", wraps=True, kept=True), Column("device", wraps=True, kept=True)),
        *(Column("kind", wraps=True), Column("note", wraps=True), Column("by", wraps=True), Column("counts")),
    )
    cells = [
        (
            f"{row['at']:%Y-%m-%d %H:%M}",
            row["node"],
            row["device_uuid"] or "all",
            row["kind"],
            row["text"] or "-",
            row["written_by"] or "-",
            "yes" if row["counts"] else "no",
        )
        for row in rows
    ]
    show(console(), columns, cells)
