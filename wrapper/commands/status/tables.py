"""A job's status on a terminal; `--json` has the rest.

Called by `resihp.wrapper.commands.status.command`. Rows in, Rich renderables out; names and reasons are shown
literally, never parsed as markup.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from resihp.db.layouts import from_json
from resihp.record.describe import DETECTORS, rank_list
from resihp.wrapper.exit_codes import REQUEUE_REQUESTED
from resihp.wrapper.job_files.registered import slurm_job_of
from resihp.wrapper.output.progress import NO_ITERATION_KNOWN, ago, of_target
from resihp.wrapper.output.render import count, duration, layout_grid, legend, literal, one_line, percent
from resihp.wrapper.output.shells import line
from resihp.wrapper.output.tables import lines

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_EVENTS_SHOWN = 8
MIN_SLOW_SHARE_SHOWN = 0.01
"""Share of the wall time above which time lost to slowness is shown."""


def goodput_line(figures: dict[str, Any]) -> str:
    """Describe goodput and losses: `goodput 91.6 %, ETTR 78.4 %; lost: fail-stop 0.70 s, idle GPUs 2.00 s, other 0.30
    s`.

    Goodput counts slow iterations in full; the time lost to slowness is shown separately. Without a known
    iteration, losses are unknown.
    """
    if figures["goodput"] is None and figures.get("target") is None and figures.get("epoch") is None:
        return f"goodput and ETTR are unknown: {NO_ITERATION_KNOWN}"
    words = {"idle": "idle GPUs", "capacity": "missing GPUs"}
    losses = ", ".join(
        f"{words.get(cause, cause)} {duration(s)}" for cause, s in figures["lost_seconds"].items() if s >= 0.005
    )
    if figures["goodput"] is None and nothing_left(figures):
        return f"nothing was left to do: it resumed from a checkpoint of iteration {figures['iteration']}"
    if figures["goodput"] is None:
        losses = "all time, no iteration was committed"
    slow_s, wall_s = figures.get("slow_seconds", 0.0), figures.get("wall_seconds", 0.0)
    slow = f", slow: {duration(slow_s)} of it" if slow_s > MIN_SLOW_SHARE_SHOWN * wall_s else ""
    return f"goodput {percent(figures['goodput'])}{slow}, ETTR {percent(figures['ettr'])}; lost: {losses or 'nothing'}"


def nothing_left(figures: Mapping[str, Any]) -> bool:
    """Return whether a completed job had no iteration to run, because it resumed from a checkpoint of the last
    iteration."""
    committed, target = figures.get("committed_iterations"), figures.get("target")
    return figures["state"] == "completed" and committed == 0 and target is not None and figures["iteration"] >= target


def progress_line(state: Mapping[str, Any]) -> str:
    """Describe progress: `last iteration 3 s ago, done in about 4 min 05 s, 18.2k tokens/s`, and `(stuck?)` if it may
    be stuck.

    Empty before the first iteration and after the job's end.
    """
    if state["seconds_since_iteration"] is None:
        return ""
    parts = [f"last iteration {ago(state['seconds_since_iteration'])}{' (stuck?)' if state['stuck'] else ''}"]
    if state.get("redone") is not None:
        parts[0] = f"iteration {state['redone']} is done again"
    if state["eta_seconds"] is not None:
        parts.append(f"done in about {duration(state['eta_seconds'])}")
    if state["tokens_per_second"] is not None:
        parts.append(f"{count(state['tokens_per_second'])} tokens/s")
    return ", ".join(parts)


def again_line(state: Mapping[str, Any]) -> str:
    """Return a hint if the run has ended but Slurm may run its job again; otherwise an empty text."""
    if state["exit_code"] == REQUEUE_REQUESTED:
        return "Slurm was asked to run it again: resihp jobs shows whether it is queued"
    if state["state"] == "abnormal" and slurm_job_of(state["job"]) is not None:
        return "Slurm may run it again: resihp jobs shows whether it is queued"
    return ""


def places_lines(state: dict[str, Any]) -> list[str]:
    """Return the lines with the places of the last checkpoint, the logs and the output."""
    parts = []
    if (last := state["checkpoint"]) is not None:
        where = f" in {last['folder']}" if last["folder"] else ""
        parts.append(f"last checkpoint: iteration {last['iteration']}, {last['committed_at']:%H:%M:%S} UTC{where}")
    if state["logs"]:
        parts.append(f"logs: {state['logs']}")
    if state["output"]:
        parts.append(f"output continues in {state['output']}, as the batch host was lost")
    return parts


def nodes_line(state: dict[str, Any]) -> str:
    """Describe the nodes that were drained, the nodes that were requested, and those that joined: `drained: n3; in use:
    n9 for n3`."""
    by_slurm = [row for row in state["drains"] if (row["step"], row["outcome"]) == ("slurm", "done")]
    drained = [row["node"] for row in by_slurm if row["undrained_at"] is None]
    requested, joined = [], []
    for row in state["replacements"]:
        if row["outcome"] == "joined":
            joined.append(f"{row['node']} for {row['instead']}")
        elif row["outcome"] in ("asked", "pending", "running"):
            job = f"Slurm job {row['slurm_job']}, " if row["slurm_job"] else ""
            requested.append(f"a node for {row['instead']} ({job}{row['outcome']})")
    groups = {"drained": drained, "requested": requested, "in use": joined}
    return "; ".join(f"{label}: {', '.join(nodes)}" for label, nodes in groups.items() if nodes)


def detector_line(state: dict[str, Any]) -> Text:
    """Return the detector's state, and the ranks that it does not watch: a detector without data must not look
    healthy."""
    judging = DETECTORS.get(state["detector"], literal(str(state["detector"])))
    line = Text(f"detector: {judging}", style="" if state["detector"] == "workload" else "yellow")
    if state["unwatched"]:
        line.append(f"; not watched: {rank_list(state['unwatched'])}", style="yellow")
    return line


def render_status(state: dict[str, Any], width: int) -> RenderableType:
    """Return the output of `status` for a terminal of `width` columns."""
    colour = {"running": "green", "completed": "green", "cancelled": "yellow"}.get(state["state"], "bold red")
    head = Text.assemble((f"job {one_line(state['job'])}", "bold"), "  ", (state["state"], colour))
    if state["iteration"] or state["target"]:
        head.append(f"  iteration {of_target(state)}")
    if state["loss"] is not None:
        head.append(f"  loss {state['loss']:.4f}")
    if state["iteration_seconds"] is not None:
        head.append(f"  {duration(state['iteration_seconds'])} an iteration")
    parts = [head]
    if state["state"] not in ("running", "completed") and state["reason"]:
        parts.append(Text(literal(state["reason"]), style=colour))
    if again := again_line(state):
        parts.append(Text(again))
    if moves := progress_line(state):
        parts.append(Text(moves, style="bold yellow" if state["stuck"] else ""))
    parts.append(Text(goodput_line(state)))
    if state["idle_line"]:
        parts.append(Text(literal(state["idle_line"]), style="yellow"))
    parts += [Text(literal(line), style="dim") for line in places_lines(state)]
    if nodes := nodes_line(state):
        parts.append(Text(literal(nodes)))
    if state["state"] == "running" and state["layout"] is not None:
        parts.append(detector_line(state))
    if state["shells"]:
        parts.append(Text(f"shell on a node: {literal(line(state['shells']))}", style="dim"))
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
        parts.append(Text())
        for event in state["events"][-MAX_EVENTS_SHOWN:]:
            clock = f"{event['at'].astimezone(UTC):%H:%M:%S}  "
            for number, text_line in enumerate(lines(Text(literal(event["text"])), max(width - len(clock), 1))):
                parts.append(Text.assemble(("" if number else clock).ljust(len(clock)), text_line))
    return Group(*(line for part in parts for line in lines(part, width)))
