"""The environment of a worker: the agent's environment, the job's additions, and all variables that torchrun would set.

A script that does not use resihp finds its rank and its peers in these variables, as `init_process_group("nccl")` does.
Rank 0 listens at the address in MASTER_ADDR and MASTER_PORT and runs the torch store there; its agent keeps the port
free for it (`resihp.wrapper.launch.ports.KeptPort`). The agent runs no torch store, so TORCHELASTIC_USE_AGENT_STORE is
False: all processes of a script are started again together, at another port. Pure; called by
`resihp.wrapper.agent.workers`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from resihp.process import OPEN_FILES
from resihp.protocol.messages import Start
from resihp.worker.forkserver import ONE_THREAD
from resihp.wrapper.config.run_spec import (
    CHECKPOINT_PLACE,
    ITERATION_PLACE,
    RESUME_ITERATION_VARIABLE,
    RESUME_VARIABLE,
    RunRequest,
)

MEETING_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
OF_ANOTHER_JOB = (*MEETING_VARIABLES, OPEN_FILES, RESUME_VARIABLE, RESUME_ITERATION_VARIABLE)
"""Variables that are never inherited."""
PLACEHOLDER_FORM = re.compile(r"\{\w+\}")
DEFAULT_ROLE = "default"
"""torchrun's default name for the role of workers."""


def environment_of(
    start: Start,
    request: RunRequest,
    inherited: Mapping[str, str],
    added: Mapping[str, str],
    network: Mapping[str, str],
) -> dict[str, str]:
    """Return a worker's environment. `added` overrides inherited variables, which override `network`; `network` is
    ignored if `added` sets the interface. Inherited variables that belong to another job are dropped."""
    environment = {name: value for name, value in inherited.items() if name not in OF_ANOTHER_JOB}
    environment.setdefault("OMP_NUM_THREADS", ONE_THREAD["OMP_NUM_THREADS"])
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if request.python_path:
        environment["PYTHONPATH"] = request.python_path
    if "GLOO_SOCKET_IFNAME" not in added:
        environment = {**network, **environment}
    return environment | {**added, **as_torchrun(start, request), **of_layout(start, request), **_resumption(start)}


def arguments_of(start: Start, request: RunRequest) -> tuple[str, ...]:
    """Return the arguments of a worker: those of the command, with present values in place of `{tp}`, `{pp}`, `{dp}`,
    `{nodes}`, `{checkpoint}` and `{checkpoint_iteration}`. They may change when the script is started again.

    An argument with a place for a checkpoint, as `--resume={checkpoint}`, is left out while there is none.
    """
    values = {f"{{{name}}}": value for name, value in _layout(start, request).items()}
    of_checkpoint = {CHECKPOINT_PLACE: start.resume_from, ITERATION_PLACE: str(start.resume_iteration)}
    return tuple(
        _filled(argument, values | of_checkpoint)
        for argument in request.program.argv
        if start.resume_from or not any(place in argument for place in of_checkpoint)
    )


def _filled(argument: str, values: Mapping[str, str]) -> str:
    return PLACEHOLDER_FORM.sub(lambda match: values.get(match[0], match[0]), argument)


def of_layout(start: Start, request: RunRequest) -> dict[str, str]:
    """Return the layout as variables, for a script that creates its own process groups: `RESIHP_TP`, `RESIHP_PP`,
    `RESIHP_DP`, `RESIHP_NODES`."""
    return {f"RESIHP_{name.upper()}": value for name, value in _layout(start, request).items()}


def _resumption(start: Start) -> dict[str, str]:
    """Return the variables that name the checkpoint from which a script is to resume; none if there is none."""
    if not start.resume_from:
        return {}
    return {RESUME_VARIABLE: start.resume_from, RESUME_ITERATION_VARIABLE: str(start.resume_iteration)}


def _layout(start: Start, request: RunRequest) -> dict[str, str]:
    """Return the degrees of parallelism: the configured ones, and the data-parallel degree of the ranks that are
    there."""
    settings = request.settings
    replicas = max(1, start.world_size // (settings.tp * settings.pp))
    nodes = max(1, len(dict.fromkeys(start.nodes)))
    return {"tp": str(settings.tp), "pp": str(settings.pp), "dp": str(replicas), "nodes": str(nodes)}


def as_torchrun(start: Start, request: RunRequest) -> dict[str, str]:
    """Return the variables of torch's elastic agent (`torch/distributed/elastic/agent/server/local_elastic_agent.py`),
    except for MASTER_ADDR and MASTER_PORT. A group is a node; all workers have one role."""
    nodes = list(dict.fromkeys(start.nodes))
    return {
        "RANK": str(start.rank),
        "LOCAL_RANK": str(start.device),
        "WORLD_SIZE": str(start.world_size),
        "LOCAL_WORLD_SIZE": str(request.settings.gpus_per_node),
        "GROUP_RANK": str(nodes.index(start.node) if start.node in nodes else 0),
        "GROUP_WORLD_SIZE": str(max(1, len(nodes))),
        "ROLE_RANK": str(start.rank),
        "ROLE_WORLD_SIZE": str(start.world_size),
        "ROLE_NAME": DEFAULT_ROLE,
        "TORCHELASTIC_RUN_ID": request.job,
        "TORCHELASTIC_RESTART_COUNT": str(start.round),
        "TORCHELASTIC_MAX_RESTARTS": str(request.settings.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
