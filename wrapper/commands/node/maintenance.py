"""`resihp node repaired|maintenance`: write down in a ledger what was repaired, and list it.

What had failed before counts no more for what was repaired (`db.reading.hardware`). Everything that takes time to
import is imported in the functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from resihp.errors import UsageError
from wrapper.output.answers import JsonOption, message, moment, to_json

if TYPE_CHECKING:
    from slurm.client import Slurm

SCHEMA = 1
LONGEST_NOTE, LONGEST_KIND = 2000, 40

RequiredLedger = Annotated[str, typer.Option("--ledger", help="The ledger's URL.", show_default=False)]


def register(nodes: typer.Typer) -> None:
    """Add the commands to `resihp node`."""
    nodes.command("repaired")(repaired)
    nodes.command("maintenance")(maintenance)


def repaired(
    node: Annotated[str, typer.Argument(help="A node's name.")],
    ledger: RequiredLedger,
    device: Annotated[
        str | None, typer.Option(help="A device of it: UUID, or number.", show_default="the whole node")
    ] = None,
    at: Annotated[str | None, typer.Option(help="When: time (ISO, UTC) or age (2h).", show_default="now")] = None,
    kind: Annotated[str, typer.Option(help="repaired, replaced, firmware, or your word.")] = "repaired",
    note: Annotated[str, typer.Option(help="What was done.", show_default=False)] = "",
    as_json: JsonOption = False,
) -> None:
    """Write down that a node, or a device of it, was repaired: its record starts anew.

    Lemons and health count only what fails afterwards. A device that was
    replaced and turns up elsewhere keeps its record there.

    Example: resihp node repaired gpu-17 --device 3 --kind replaced --ledger URL
    """
    from db.maintenance import record

    for what, text, longest in (("kind", kind, LONGEST_KIND), ("note", note, LONGEST_NOTE)):
        if len(text) > longest or not text.isprintable():
            raise UsageError(f"--{what}: at most {longest} characters in one line")
    if not kind.strip():
        raise UsageError("--kind: say repaired, replaced or firmware, or a word of your own")
    row = record(ledger, node, device=device, at=moment(at), kind=kind.strip(), note=note, cluster=_cluster())
    if as_json:
        print(to_json({"schema": SCHEMA, "rows": [row]}))
    else:
        what = f"node {node}" if device is None else f"node {node}: device {row['device_uuid']}"
        message(f"{what}: {row['kind']} at {row['at']:%Y-%m-%d %H:%M} UTC; starts anew in lemons and health")


def maintenance(
    ledger: RequiredLedger,
    node: Annotated[str | None, typer.Argument(metavar="[NODE]", help="Only this node's.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List what was written down as repaired, oldest first.

    Counts: whether it is by somebody whose jobs count as well (`resihp db grant --trusted`).

    Example: resihp node maintenance gpu-17 --ledger URL
    """
    from db.reading.hardware import maintenance_rows
    from db.reading.reader import Reader

    with Reader.open(ledger) as reader:
        rows = maintenance_rows(reader, node)
    if as_json:
        print(to_json({"schema": SCHEMA, "rows": rows}))
    elif rows:
        _show(rows)
    else:
        message(f"nothing was written down{'' if node is None else f' of node {node}'}; try: resihp node repaired")


def connect() -> Slurm:
    """The Slurm of this machine."""
    from slurm.commands import CommandLine

    return CommandLine()


def _cluster() -> str:
    """Empty where there is no Slurm to tell."""
    from slurm.errors import SlurmError

    try:
        return connect().cluster()
    except SlurmError:
        return ""


def _show(rows: list[dict[str, Any]]) -> None:
    from wrapper.output.answers import console
    from wrapper.output.tables import Column, show

    columns = (
        *(Column("at (UTC)"), Column("node", wraps=True, kept=True), Column("device", wraps=True, kept=True)),
        *(Column("what", wraps=True), Column("note", wraps=True), Column("by", wraps=True), Column("counts")),
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
