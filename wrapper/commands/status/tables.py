"""A job's status on a terminal; `--json` has what is not told there.

Called by `wrapper.commands.status.command`. Rows in, Rich renderables out; names and reasons are shown literally, never
read as markup.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from db.layouts import from_json
from resihp.record.describe import DETECTORS, rank_list
from wrapper.exit_codes import REQUEUE
from wrapper.job_files import slurm_job_of
from wrapper.output.progress import ago, of_target
from wrapper.output.render import count, duration, layout_grid, legend, literal, one_line, percent
from wrapper.output.shells import line
from wrapper.output.tables import lines

if TYPE_CHECKING:
    from rich.console import RenderableType

EVENTS_SHOWN = 8
WORTH_A_WORD = 0.01
"""Of the wall time: what was slow by less needs no word."""


def goodput_line(figures: dict[str, Any]) -> str:
    """`goodput 91.6 %, ETTR 78.4 %; lost: fail-stop 0.70 s, idle GPUs 2.00 s, other 0.30 s`. Goodput counts slow
    iterations in full: by how much they were slow is told beside it. Of a script that is launched and watched, nothing
    is lost that anybody knows of."""
    if figures["goodput"] is None and figures.get("target") is None and figures.get("epoch") is None:
        told = "has not said" if figures["state"] == "running" else "did not say"
        return f"goodput and ETTR are not known: its script {told} what it trains (resihp.Trainer does)"
    words = {"idle": "idle GPUs", "capacity": "missing GPUs"}
    lost = ", ".join(
        f"{words.get(cause, cause)} {duration(s)}" for cause, s in figures["lost_seconds"].items() if s >= 0.005
    )
    if figures["goodput"] is None and nothing_left(figures):
        return f"nothing was left to do: iteration {figures['iteration']} was in the checkpoint that it went on from"
    if figures["goodput"] is None:
        lost = "all of it, no iteration is committed"
    slow_s, wall_s = figures.get("slow_seconds", 0.0), figures.get("wall_seconds", 0.0)
    slow = f", slow: {duration(slow_s)} of it" if slow_s > WORTH_A_WORD * wall_s else ""
    return f"goodput {percent(figures['goodput'])}{slow}, ETTR {percent(figures['ettr'])}; lost: {lost or 'nothing'}"


def nothing_left(figures: Mapping[str, Any]) -> bool:
    """Whether a job that is completed went on from a checkpoint of the last iteration."""
    committed, target = figures.get("committed_iterations"), figures.get("target")
    return figures["state"] == "completed" and committed == 0 and target is not None and figures["iteration"] >= target


def progress_line(state: Mapping[str, Any]) -> str:
    """`last iteration 3 s ago, done in about 4 min 05 s, 18.2k tokens/s`; whether it may be stuck, asked.
    Empty before the first iteration, and of a job that is over."""
    if state["seconds_since_iteration"] is None:
        return ""
    told = [f"last iteration {ago(state['seconds_since_iteration'])}{' (stuck?)' if state['stuck'] else ''}"]
    if state["eta_seconds"] is not None:
        told.append(f"done in about {duration(state['eta_seconds'])}")
    if state["tokens_per_second"] is not None:
        told.append(f"{count(state['tokens_per_second'])} tokens/s")
    return ", ".join(told)


def again_line(state: Mapping[str, Any]) -> str:
    """Of a job that has ended and whose Slurm job may not have."""
    if state["exit_code"] == REQUEUE:
        return "Slurm was asked to run it again: resihp jobs tells whether it waits"
    if state["state"] == "abnormal" and slurm_job_of(state["job"]) is not None:
        return "Slurm may run it again: resihp jobs tells whether it waits"
    return ""


def places_lines(state: dict[str, Any]) -> list[str]:
    """Where the last checkpoint is, and where the logs are."""
    found = []
    if (last := state["checkpoint"]) is not None:
        where = f" in {last['folder']}" if last["folder"] else ""
        found.append(f"last checkpoint: iteration {last['iteration']}, {last['committed_at']:%H:%M:%S} UTC{where}")
    if state["logs"]:
        found.append(f"logs: {state['logs']}")
    if state["output"]:
        found.append(f"its output goes on in {state['output']}, since the batch host was lost")
    return found


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


def detector_line(state: dict[str, Any]) -> Text:
    """Whether it looks at all, and at whom not: a blind watcher must not look healthy."""
    line = Text(f"detector: {DETECTORS[state['detector']]}", style="" if state["detector"] == "workload" else "yellow")
    if state["unwatched"]:
        line.append(f"; not watched: {rank_list(state['unwatched'])}", style="yellow")
    return line


def render_status(state: dict[str, Any], width: int) -> RenderableType:
    """What `status` prints on a terminal of `width` columns."""
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
        parts.append(Text(f"a shell there: {literal(line(state['shells']))}", style="dim"))
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
        for event in state["events"][-EVENTS_SHOWN:]:
            clock = f"{event['at'].astimezone(UTC):%H:%M:%S}  "
            for number, told in enumerate(lines(Text(literal(event["text"])), max(width - len(clock), 1))):
                parts.append(Text.assemble(("" if number else clock).ljust(len(clock)), told))
    return Group(*(line for part in parts for line in lines(part, width)))
