"""Runs for tests: all that must be said of one, each part of which a test may say otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from resihp.settings import Settings
from resihp.wrapper.config.run_spec import Program, RunRequest, virtual_nodes


def run_request(
    job: str, folder: Path | str, *, nodes: int = 1, gpus: int = 1, settings: dict[str, Any] | None = None, **given: Any
) -> RunRequest:
    """`settings`: what the controller goes by; the rest is `RunRequest`'s."""
    laid_out: dict[str, Any] = {
        "nodes": nodes,
        "node_names": virtual_nodes(nodes),
        "gpus_per_node": gpus,
        "tp": 1,
        "pp": 1,
        "examine": False,
        "plans_ahead": False,
        "search_s": 0.0,
        "max_restarts": 0,
    }
    fields: dict[str, Any] = {
        "program": Program(kind="command", argv=("true",), interpreter="python"),
        "command": ("true",),
        "cwd": "/",
        "python_path": "",
        "checkpoint_folder": "",
        "checkpoint_keep": 2,
        "resume": False,
        "ledger_url": "sqlite",
        "restart_count": 0,
        "configuration": {},
    }
    return RunRequest(
        settings=Settings(job=job, **(laid_out | (settings or {}))), folder=str(folder), **(fields | given)
    )
