"""The environment of a worker: the agent's environment, the job's additions, and all variables that torchrun would set.

A script that does not use resihp finds its rank and its peers in these variables, as `init_process_group("nccl")` does.
Rank 0 listens at the address in MASTER_ADDR and MASTER_PORT and runs the torch store there; its agent keeps the port
free for it (`resihp.wrapper.launch.ports.KeptPort`). The agent runs no torch store, and workers are not restarted on
the same node, so TORCHELASTIC_USE_AGENT_STORE is False and TORCHELASTIC_MAX_RESTARTS is 0. Pure; called by
`resihp.wrapper.agent.workers`.
"""

from __future__ import annotations

from collections.abc import Mapping

from resihp.process import OPEN_FILES
from resihp.protocol.messages import Start
from resihp.worker.forkserver import ONE_THREAD
from resihp.wrapper.config.run_spec import RunRequest

MEETING_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
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
    ignored if `added` sets the interface. An inherited MASTER_ADDR or MASTER_PORT belongs to another job, and is
    dropped."""
    environment = {name: value for name, value in inherited.items() if name not in (*MEETING_VARIABLES, OPEN_FILES)}
    environment.setdefault("OMP_NUM_THREADS", ONE_THREAD["OMP_NUM_THREADS"])
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if request.python_path:
        environment["PYTHONPATH"] = request.python_path
    if "GLOO_SOCKET_IFNAME" not in added:
        environment = {**network, **environment}
    return environment | {**added, **as_torchrun(start, request.job, request.settings.gpus_per_node)}


def as_torchrun(start: Start, job: str, devices: int) -> dict[str, str]:
    """Return the variables of torch's elastic agent (`torch/distributed/elastic/agent/server/local_elastic_agent.py`),
    except for MASTER_ADDR and MASTER_PORT. A group is a node; all workers have one role."""
    nodes = list(dict.fromkeys(start.nodes))
    return {
        "RANK": str(start.rank),
        "LOCAL_RANK": str(start.device),
        "WORLD_SIZE": str(start.world_size),
        "LOCAL_WORLD_SIZE": str(devices),
        "GROUP_RANK": str(nodes.index(start.node) if start.node in nodes else 0),
        "GROUP_WORLD_SIZE": str(max(1, len(nodes))),
        "ROLE_RANK": str(start.rank),
        "ROLE_WORLD_SIZE": str(start.world_size),
        "ROLE_NAME": DEFAULT_ROLE,
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
