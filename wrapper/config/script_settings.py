"""The controller's settings for a script that does not use `resihp.Trainer`. Called by `resihp run`."""

from __future__ import annotations

from typing import Any

from resihp.wrapper.config.program import may_declare_model, takes_checkpoint
from resihp.wrapper.config.run_spec import Program
from resihp.wrapper.config.schema import Configuration


def script_settings(configuration: Configuration, program: Program, cwd: str) -> dict[str, Any]:
    """Return the values of these settings, by name. `cwd`: the working directory of the script."""
    return {
        "declares": program.kind != "command",
        "spares_wait": not may_declare_model(program, cwd),
        "finds_checkpoints": bool(configuration.checkpoint.latest),
        "takes_checkpoint": takes_checkpoint(program, cwd),
        "idle_limit_s": configuration.job.idle_limit,
        "script_hang_s": configuration.job.hang_limit,
        "max_restarts": configuration.adapt.max_restarts,
        "min_nodes": configuration.job.min_nodes or 0,
    }
