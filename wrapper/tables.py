"""The ledger's tables and a job's status on a terminal of 80 columns; `--json` has what does not fit.

Used by `wrapper.ledger_commands`. Rows in, Rich renderables out; cells are shown literally, never read as markup.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from db.explain import size
from db.layouts import from_json
from wrapper.render import duration, layout_grid, legend, literal, percent

if TYPE_CHECKING:
    from rich.console import RenderableType

EVENTS_SHOWN = 8


@dataclass(frozen=True)
class Column:
    """A column of a table on the terminal: heading, and the cell's text from the row."""

    heading: str
    cell: Callable[[dict[str, Any]], str]
    right: bool = False
    wraps: bool = False


def _words(name: str, heading: str | None = None, *, wraps: bool = False) -> Column:
    return Column(heading or name, lambda row: "-" if row[name] is None else str(row[name]), wraps=wraps)


def _number(name: str, heading: str | None = None, form: str = "{}") -> Column:
    return Column(heading or name, lambda row: "-" if row[name] is None else form.format(row[name]), right=True)


def _seconds(name: str, heading: str) -> Column:
    return Column(heading, lambda row: duration(row[name]), right=True)


def _bytes(name: str, heading: str) -> Column:
    return Column(heading, lambda row: size(row[name]), right=True)


def _time(name: str, heading: str) -> Column:
    return Column(heading, lambda row: "-" if row[name] is None else f"{row[name].astimezone(UTC):%m-%d %H:%M:%S}")


def _device(row: dict[str, Any]) -> str:
    return "-" if row["node"] is None else row["node"] if row["device"] is None else f"{row['node']} {row['device']}"


def _effect(row: dict[str, Any]) -> str:
    """When a plan took effect, or what became of it instead."""
    return f"{row['in_effect_at'].astimezone(UTC):%m-%d %H:%M:%S}" if row["in_effect_at"] else str(row["outcome"])


def _plan_reason(row: dict[str, Any]) -> str:
    if row["refused_reason"] is None:
        return str(row["reason"])
    who = "our own check" if row["refused_by"] is None else f"rank {row['refused_by']}"
    return f"{row['reason']}; {who}: {row['refused_reason']}"


def _rung(row: dict[str, Any]) -> str:
    """Which rung of the drain ladder holds; of one that does not, what became of it."""
    step = {"slurm": "Slurm", "spool": "site", "exclusion": "our jobs"}.get(row["step"], "-")
    return step if row["outcome"] in ("done", None) else f"{step} {row['outcome']}"


def _last_words(row: dict[str, Any]) -> str:
    """Why a request came to nothing, or else why it was made."""
    return str(row["text"] or row["reason"])


def _terminal_columns(table: str) -> list[Column]:
    """What fits 80 columns; `--json` has the rest."""
    return {
        "failures": [
            _number("failure", "#"),
            _words("cause", wraps=True),
            Column("node, device", _device),
            _number("iteration"),
            _time("noticed_at", "noticed (UTC)"),
            _seconds("seconds_to_recover", "recovered in"),
        ],
        "nodes": [
            _words("node"),
            _words("host", wraps=True),
            _number("devices"),
            _time("joined_at", "joined (UTC)"),
            _time("lost_at", "lost (UTC)"),
            _words("lost_reason", "reason", wraps=True),
        ],
        "workers": [
            _number("rank"),
            _words("node", wraps=True),
            _number("device"),
            _number("pid"),
            _number("epoch_joined", "joined in"),
            _number("epoch_left", "left in"),
            _number("exit"),
        ],
        "iterations": [
            _number("iteration"),
            _number("epoch"),
            _number("seconds", form="{:.3f}"),
            _number("predicted_seconds", "predicted", form="{:.3f}"),
            _number("tokens"),
            _number("loss", form="{:.4f}"),
            _time("finished_at", "finished (UTC)"),
        ],
        "plans": [
            _number("epoch"),
            _words("description", "layout", wraps=True),
            _number("next_iteration", "from"),
            _words("action"),
            Column("in effect (UTC)", _effect),
            Column("reason", _plan_reason, wraps=True),
        ],
        "probes": [
            _number("probe", "#"),
            _words("occasion"),
            _words("kind"),
            _number("rank"),
            Column("node, device", _device),
            _number("peer"),
            _number("speed", form="{:.2f}"),
            Column("fit", lambda row: "yes" if row["passed"] else "no"),
            _words("evidence", wraps=True),
        ],
        "reconfigurations": [
            _number("epoch"),
            _words("action"),
            _number("attempts", "tries"),
            *(_number(f"{name}_seconds", name, form="{:.2f}") for name in ("park", "plan", "groups", "state")),
            _number("first_iteration_seconds", "first", form="{:.2f}"),
            _number("seconds", "total s", form="{:.2f}"),
            _bytes("bytes_moved", "moved"),
        ],
        "drains": [
            _number("drain", "#"),
            _words("node", wraps=True),
            Column("by", _rung),
            _time("drained_at", "decided (UTC)"),
            _time("undrained_at", "undrained (UTC)"),
            _words("reason", wraps=True),
        ],
        "replacements": [
            _number("replacement", "#"),
            _words("instead", "for", wraps=True),
            _words("slurm_job", "job"),
            _words("node", wraps=True),
            _words("outcome"),
            _time("asked_at", "asked (UTC)"),
            _time("joined_at", "joined (UTC)"),
            Column("reason", _last_words, wraps=True),
        ],
    }[table]


def history_table(table: str, rows: list[dict[str, Any]]) -> Table:
    """Rows of one of `History` as a Rich table; cells are shown literally."""
    columns = _terminal_columns(table)
    tight = table in ("plans", "reconfigurations")
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0) if tight else (0, 1))
    for column in columns:
        shown.add_column(
            Text(column.heading),
            justify="right" if column.right else "left",
            no_wrap=not column.wraps,
            overflow="fold",
        )
    for row in rows:
        shown.add_row(*(Text(literal(column.cell(row))) for column in columns))
    return shown


def goodput_line(figures: dict[str, Any]) -> str:
    """`goodput 91.6 %, ETTR 78.4 %; lost: fail-stop 0.70 s, other 0.30 s`."""
    lost = ", ".join(f"{cause} {duration(s)}" for cause, s in figures["lost_seconds"].items() if s >= 0.005)
    return f"goodput {percent(figures['goodput'])}, ETTR {percent(figures['ettr'])}; lost: {lost or 'nothing'}"


def nodes_line(state: dict[str, Any]) -> str:
    """Which nodes were drained, which are asked for, and which came: `drained: n3; in use: n9 for n3`."""
    by_slurm = [row for row in state["drains"] if (row["step"], row["outcome"]) == ("slurm", "done")]
    drained = [row["node"] for row in by_slurm if row["undrained_at"] is None]
    asked, came = [], []
    for row in state["replacements"]:
        if row["outcome"] == "joined":
            came.append(f"{row['node']} for {row['instead']}")
        elif row["outcome"] in ("asked", "pending", "running"):
            job = f"Slurm job {row['slurm_job']}, " if row["slurm_job"] else ""
            asked.append(f"a node for {row['instead']} ({job}{row['outcome']})")
    found = {"drained": drained, "asked for": asked, "in use": came}
    return "; ".join(f"{what}: {', '.join(nodes)}" for what, nodes in found.items() if nodes)


def render_status(state: dict[str, Any], width: int) -> RenderableType:
    """What `status` prints on a terminal of `width` columns."""
    colour = {"running": "green", "completed": "green", "cancelled": "yellow"}.get(state["state"], "bold red")
    head = Text.assemble((f"job {literal(state['job'])}", "bold"), "  ", (state["state"], colour))
    head.append(f"  iteration {state['iteration']}")
    if state["loss"] is not None:
        head.append(f"  loss {state['loss']:.4f}")
    if state["iteration_seconds"] is not None:
        head.append(f"  {duration(state['iteration_seconds'])} an iteration")
    parts: list[RenderableType] = [head]
    if state["state"] not in ("running", "completed") and state["reason"]:
        parts.append(Text(literal(state["reason"]), style=colour))
    parts.append(Text(goodput_line(state)))
    if nodes := nodes_line(state):
        parts.append(Text(literal(nodes)))
    if state["layout"] is not None:
        health = {int(rank): value for rank, value in state["health"].items()}
        parts += [
            Text(f"epoch {state['epoch']}: {state['description']}"),
            Text(),
            layout_grid(from_json(json.dumps(state["layout"])), health, width),
        ]
        if meaning := legend(health.values()):
            parts.append(Text(meaning, style="dim"))
    if state["events"]:
        events = Table.grid(padding=(0, 2, 0, 0))
        for event in state["events"][-EVENTS_SHOWN:]:
            clock = Text(f"{event['at'].astimezone(UTC):%H:%M:%S}", style="dim")
            events.add_row(clock, Text(literal(event["text"]), overflow="fold"))
        parts += [Text(), events]
    return Group(*parts)
