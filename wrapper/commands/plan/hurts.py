"""`resihp plan --hurts`: which single loss would hurt most, as a table and sentences, or as JSON.

The answer is made by `resihp.scheduler.what_if.losses`. Called by `wrapper.commands.plan.command`.
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
from wrapper.commands.plan.tables import described, gigabytes, title
from wrapper.output import tables
from wrapper.output.answers import console, tell
from wrapper.output.render import duration, literal
from wrapper.output.tables import Column

if TYPE_CHECKING:
    from rich.console import Console

MOST_ROWS = 20
BETTER = 1.005
"""Throughput after a loss, in that before it, from which on it is shown as more."""
SHARED = (
    "--zero-1: each part of the optimizer's state has one holder; the planner does not count its loss, after which a "
    "job would have to go back to its last checkpoint"
)


class Row(msgspec.Struct, frozen=True):
    """Losses that are shown as one."""

    worst: LossResult
    devices: int
    nodes: int


def as_json(asked: Question, found: Losses, planning_s: float) -> dict[str, Any]:
    """`resihp plan --hurts --json`."""
    told: dict[str, Any] = losses.as_json(found, planning_s)
    for one, loss in zip(told["losses"], found.after, strict=True):
        one["device"] = None if loss.loss.node else device_of(asked, loss.loss.ranks[0])
        one["node"] = asked.nodes[loss.loss.ranks[0]]
    told["now"]["layout"] = layout_json(found.plan.layout)
    told["now"]["sole_holders"] = [*sole_holders(found.plan.layout, outline(asked.model))]
    return told


def show(asked: Question, model: str, hardware: str, found: Losses, planning_s: float) -> None:
    """On stdout."""
    screen = console()
    idle = len(found.plan.layout.standby)
    tell(screen, title(asked, model, hardware))
    tell(
        screen,
        f"Plan: {described(found.plan.layout)}, {duration(found.seconds)} an iteration. "
        "The loss that hurts most first:",
    )
    shown = rows(found)
    _show(screen, asked, found, shown[:MOST_ROWS])
    for sentence in _sentences(asked, found, shown, idle, planning_s):
        tell(screen, sentence)


def rows(found: Losses) -> list[Row]:
    """The worst first, places that are alike in one row. Where no state moves, or there would be too many rows, so are
    all that come to the same but for what moves."""
    by_place = _together(found, places=True)
    return by_place if len(by_place) <= MOST_ROWS else _together(found, places=False)


def _together(found: Losses, *, places: bool) -> list[Row]:
    groups: dict[object, list[LossResult]] = {}
    for one in found.after:
        same = (bool(one.obstacle), bool(one.state_lost), _percent(one, found), one.idle)
        place = one.loss if places and not (one.obstacle or one.state_lost) else one.loss.node is None
        groups.setdefault((place, *same), []).append(one)
    return [_row(group) for group in groups.values()]


def _row(group: list[LossResult]) -> Row:
    count = sum(1 + len(one.alike) for one in group)
    return Row(group[0], *((count, 0) if group[0].loss.node is None else (0, count)))


def _percent(one: LossResult, found: Losses) -> str:
    """Of the present throughput."""
    return "none" if one.obstacle else f"{found.seconds / one.seconds:.0%}"


def _show(screen: Console, asked: Question, found: Losses, shown: list[Row]) -> None:
    columns = (
        *(Column("lost", wraps=True), Column("iteration", right=True), Column("throughput", right=True, kept=True)),
        *(Column("idle", right=True), Column("to move", right=True)),
    )
    rows = []
    for row in shown:
        one = row.worst
        name = _named(asked, one.loss, row.devices + row.nodes)
        if one.obstacle:
            rows.append((name, "cannot run", "none", "", ""))
        else:
            moved = "checkpoint" if one.state_lost else gigabytes(one.bytes_moved) if one.bytes_moved else "nothing"
            rows.append((name, duration(one.seconds), _percent(one, found), str(one.idle), moved))
    tables.show(screen, columns, rows)


def _named(asked: Question, loss: PossibleLoss, count: int) -> str:
    rank = loss.ranks[0]
    name = loss.node or f"rank {rank} ({asked.nodes[rank]} device {device_of(asked, rank)})"
    if count > 1:
        return literal(f"{count} {'nodes ' if loss.node else ''}like {name}")
    return literal(f"node {name}" if loss.node else name)


def _sentences(asked: Question, found: Losses, shown: list[Row], idle: int, planning_s: float) -> list[str]:
    said: list[str] = []
    left_out = shown[MOST_ROWS:]
    if left_out:
        worst, best = (_percent(row.worst, found) for row in (left_out[0], left_out[-1]))
        said.append(f"Left out: {_counted(left_out)} that hurt less ({worst} to {best}); --json has them all.")
    stopped = next((row.worst for row in shown if row.worst.obstacle), None)
    if stopped is not None:
        said.append(f"Cannot run without {_named(asked, stopped.loss, 1)}: {stopped.obstacle}.")
    if any(row.worst.state_lost and not row.worst.obstacle for row in shown):
        said.append(
            "Checkpoint: nobody else holds that state. The job ends, and begins again from its last checkpoint, with "
            "the devices that are there then."
        )
    if any(found.seconds / row.worst.seconds > BETTER for row in shown):
        said.append("More than 100%: there are better plans than this one; --search, without --hurts, looks for them.")
    if idle:
        who = "The device that stands by is" if idle == 1 else f"The {idle} devices that stand by are"
        said.append(f"{who} not asked about: to lose one changes nothing now.")
    alone = sole_holders(found.plan.layout, outline(asked.model))
    if alone:
        said.append(f"One holder left: {held_alone(alone)}.")
    possible = found.unasked + sum(1 + len(one.alike) for one in found.after)
    asked_about = f"{len(found.after)} were asked about, one of each kind of place"
    said.append(f"Of {possible} losses, {asked_about}, in {duration(planning_s)}.")
    if found.unasked:
        said.append(f"{found.unasked} more are of further kinds: more than {MAX_LOSSES} are not asked about.")
    return said


def _counted(left_out: list[Row]) -> str:
    counts = ((sum(row.devices for row in left_out), "device"), (sum(row.nodes for row in left_out), "node"))
    return " and ".join(f"{count} {name}{'' if count == 1 else 's'}" for count, name in counts if count)
