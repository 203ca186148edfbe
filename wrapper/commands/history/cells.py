"""Text for cells of `resihp history` that combine several fields of a row, or choose between fields.

A row of the ledger in, text out. `tables` decides which column uses which function.
"""

from __future__ import annotations

from datetime import UTC

from resihp.wrapper.commands.history.query import Row
from resihp.wrapper.output.render import duration


def amount(number: float) -> str:
    """Return an amount such as GPU-hours as text: `0.0333`, `41.8`, `12,345`."""
    if number == 0:
        return "0"
    if number >= 1000:
        return f"{number:,.0f}"
    return f"{number:.4g}" if number >= 1 else f"{number:.4f}"


def device(row: Row) -> str:
    if row["node"] is None:
        return "-"
    return str(row["node"]) if row["device"] is None else f"{row['node']} {row['device']}"


def outcome(row: Row) -> str:
    """Return the outcome of a suspicion; with the number of the failure, if it led to one."""
    if row["outcome"] is None:
        return "open"
    return f"{row['outcome']}, {row['failure']}" if row["failure"] else str(row["outcome"])


def statistic(row: Row) -> str:
    """Return a test's statistic and its threshold, as `14.9 / 12.1 log evidence`."""
    if row["statistic"] is None or row["threshold"] is None:
        return "-"
    return f"{row['statistic']:.3g} / {row['threshold']:.3g} {row['test']}"


def recovery(row: Row) -> str:
    """Return the time from the failure to the recovery, and the part of it for detection, as `11.0 s, noticed after
    10.3 s`."""
    recovery_s, detection_s = row["seconds_to_recover"], row["noticed_after_seconds"]
    if recovery_s is None or detection_s is None:
        return duration(recovery_s)
    return f"{duration(recovery_s)}, noticed after {duration(detection_s)}"


def arrival(row: Row) -> str:
    return f"{row['joined_at'].astimezone(UTC):%m-%d %H:%M:%S}" if row["joined_at"] else "never joined"


def effect(row: Row) -> str:
    """Return the time when a plan took effect, or else the plan's outcome."""
    return f"{row['in_effect_at'].astimezone(UTC):%m-%d %H:%M:%S}" if row["in_effect_at"] else str(row["outcome"])


def plan_reason(row: Row) -> str:
    if row["refused_reason"] is None:
        return str(row["reason"])
    refuser = "own check" if row["refused_by"] is None else f"rank {row['refused_by']}"
    return f"{row['reason']}; {refuser}: {row['refused_reason']}"


def rejected_candidates(row: Row) -> str:
    """Return the rejected candidates of a decision with reasons, as `without replica 1 0.61 s (12.0% slower)`."""
    unit = "" if row["unit"] is None else f" {row['unit']}"

    def described(candidate: Row) -> str:
        predicted = "-" if candidate["predicted"] is None else format(candidate["predicted"], ".3g")
        return f"{candidate['name']} {predicted}{unit} ({candidate['why']})"

    return "; ".join(map(described, row["refused"])) or "-"


def prediction(row: Row) -> str:
    """Return the predicted and the measured time of an iteration under a plan."""
    words = "-" if row["predicted"] is None else f"{row['predicted']:.3g} {row['unit']}"
    return words if row["measured"] is None else f"{words}, {row['measured']:.3g} s"


def drain_step(row: Row) -> str:
    """Return the step of the drain ladder; with its outcome, unless that is `done`."""
    step = {"slurm": "Slurm", "spool": "site", "exclusion": "our jobs"}.get(row["step"], "-")
    return step if row["outcome"] in ("done", None) else f"{step} {row['outcome']}"


def request_reason(row: Row) -> str:
    """Return the reason why a request failed, or else the reason why it was made."""
    return str(row["text"] or row["reason"])
