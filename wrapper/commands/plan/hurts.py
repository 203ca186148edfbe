"""`resihp plan --hurts`: show which single loss would hurt most, as a table and sentences, or as JSON.

`resihp.scheduler.what_if.losses` computes the answer. Called by `resihp.wrapper.commands.plan.command`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from resihp.parallelism.parameter_outline import outline
from resihp.scheduler.losses import MAX_LOSSES, PossibleLoss, held_alone, sole_holders
from resihp.scheduler.what_if import losses
from resihp.scheduler.what_if.answer import layout_json
from resihp.scheduler.what_if.losses import Losses, LossResult
from resihp.scheduler.what_if.question import Question, device_of
from resihp.wrapper.commands.plan.tables import described, gigabytes, title
from resihp.wrapper.output import tables
from resihp.wrapper.output.answers import console, tell
from resihp.wrapper.output.render import duration, literal
from resihp.wrapper.output.tables import Column

if TYPE_CHECKING:
    from rich.console import Console

MAX_ROWS = 20
BETTER_RATIO = 1.005
"""Ratio of the throughput after a loss to the throughput before, above which the throughput counts as higher."""
SHARDED_STATE_REMARK = (
    "--zero-1: each part of the optimizer state has one holder; the planner ignores its loss, after which a job would "
    "have to return to its last checkpoint"
)
"""Remark that is shown for sharded optimizer state."""


class Row(msgspec.Struct, frozen=True):
    """One row of the table: losses that have the same effect."""

    worst: LossResult
    devices: int
    nodes: int


def as_json(query: Question, losses_found: Losses, planning_s: float) -> dict[str, Any]:
    """Return the content of `resihp plan --hurts --json`."""
    result: dict[str, Any] = losses.as_json(losses_found, planning_s)
    for row, loss in zip(result["losses"], losses_found.after, strict=True):
        row["device"] = None if loss.loss.node else device_of(query, loss.loss.ranks[0])
        row["node"] = query.nodes[loss.loss.ranks[0]]
    result["now"]["layout"] = layout_json(losses_found.plan.layout)
    result["now"]["sole_holders"] = [*sole_holders(losses_found.plan.layout, outline(query.model))]
    return result


def show(query: Question, model: str, hardware: str, losses_found: Losses, planning_s: float) -> None:
    """Print the answer on stdout."""
    screen = console()
    idle = len(losses_found.plan.layout.standby)
    tell(screen, title(query, model, hardware))
    tell(
        screen,
        f"Plan: {described(losses_found.plan.layout)}, {duration(losses_found.seconds)} per iteration. "
        "Worst losses first:",
    )
    table_rows = rows(losses_found)
    _show(screen, query, losses_found, table_rows[:MAX_ROWS])
    for sentence in _sentences(query, losses_found, table_rows, idle, planning_s):
        tell(screen, sentence)


def rows(losses_found: Losses) -> list[Row]:
    """Return the rows of the table, worst first. Losses of equivalent places share a row.

    Losses after which the job cannot run, or state is lost, share a row if their effect is equal. If there are too many
    rows, all losses of equal effect share a row, even if different numbers of bytes are moved.
    """
    by_place = _together(losses_found, places=True)
    return by_place if len(by_place) <= MAX_ROWS else _together(losses_found, places=False)


def _together(losses_found: Losses, *, places: bool) -> list[Row]:
    groups: dict[object, list[LossResult]] = {}
    for aftermath in losses_found.after:
        effect = (
            bool(aftermath.obstacle),
            bool(aftermath.state_lost),
            _percent(aftermath, losses_found),
            aftermath.idle,
        )
        place = (
            aftermath.loss
            if places and not (aftermath.obstacle or aftermath.state_lost)
            else aftermath.loss.node is None
        )
        groups.setdefault((place, *effect), []).append(aftermath)
    return [_row(group) for group in groups.values()]


def _row(group: list[LossResult]) -> Row:
    count = sum(1 + len(aftermath.alike) for aftermath in group)
    return Row(group[0], *((count, 0) if group[0].loss.node is None else (0, count)))


def _percent(aftermath: LossResult, losses_found: Losses) -> str:
    """Return the throughput after the loss as a percentage of the present throughput."""
    return "none" if aftermath.obstacle else f"{losses_found.seconds / aftermath.seconds:.0%}"


def _show(screen: Console, query: Question, losses_found: Losses, table_rows: list[Row]) -> None:
    columns = (
        *(Column("lost", wraps=True), Column("iteration", right=True), Column("throughput", right=True, kept=True)),
        *(Column("idle", right=True), Column("to move", right=True)),
    )
    rows = []
    for row in table_rows:
        aftermath = row.worst
        name = _named(query, aftermath.loss, row.devices + row.nodes)
        if aftermath.obstacle:
            rows.append((name, "cannot run", "none", "", ""))
        else:
            moved = (
                "checkpoint"
                if aftermath.state_lost
                else gigabytes(aftermath.bytes_moved)
                if aftermath.bytes_moved
                else "nothing"
            )
            rows.append(
                (name, duration(aftermath.seconds), _percent(aftermath, losses_found), str(aftermath.idle), moved)
            )
    tables.show(screen, columns, rows)


def _named(query: Question, loss: PossibleLoss, count: int) -> str:
    rank = loss.ranks[0]
    name = loss.node or f"rank {rank} ({query.nodes[rank]} device {device_of(query, rank)})"
    if count > 1:
        return literal(f"{count} {'nodes ' if loss.node else ''}like {name}")
    return literal(f"node {name}" if loss.node else name)


def _sentences(query: Question, losses_found: Losses, table_rows: list[Row], idle: int, planning_s: float) -> list[str]:
    lines: list[str] = []
    hidden = table_rows[MAX_ROWS:]
    if hidden:
        worst, best = (_percent(row.worst, losses_found) for row in (hidden[0], hidden[-1]))
        lines.append(f"Not shown: {_counted(hidden)} that hurt less ({worst} to {best}); --json has them all.")
    fatal = next((row.worst for row in table_rows if row.worst.obstacle), None)
    if fatal is not None:
        lines.append(f"Cannot run without {_named(query, fatal.loss, 1)}: {fatal.obstacle}.")
    if any(row.worst.state_lost and not row.worst.obstacle for row in table_rows):
        lines.append(
            "Checkpoint: no other rank holds that state. Training goes back to its last checkpoint, on the remaining "
            "devices."
        )
    if any(losses_found.seconds / row.worst.seconds > BETTER_RATIO for row in table_rows):
        lines.append("More than 100%: there are better plans than this one; find them with --search, without --hurts.")
    if idle:
        standby = "The standby device is" if idle == 1 else f"The {idle} standby devices are"
        lines.append(f"{standby} not counted: losing one changes nothing now.")
    held_once = sole_holders(losses_found.plan.layout, outline(query.model))
    if held_once:
        lines.append(f"One holder left: {held_alone(held_once)}.")
    possible = losses_found.unasked + sum(1 + len(aftermath.alike) for aftermath in losses_found.after)
    planned = f"{len(losses_found.after)} were planned, one of each kind of place"
    lines.append(f"Of {possible} losses, {planned}, in {duration(planning_s)}.")
    if losses_found.unasked:
        lines.append(f"{losses_found.unasked} more are of other kinds; at most {MAX_LOSSES} are planned.")
    return lines


def _counted(left_out: list[Row]) -> str:
    counts = ((sum(row.devices for row in left_out), "device"), (sum(row.nodes for row in left_out), "node"))
    return " and ".join(f"{count} {name}{'' if count == 1 else 's'}" for count, name in counts if count)
