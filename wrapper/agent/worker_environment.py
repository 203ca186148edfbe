"""The environment of a worker: what its agent inherited, what the job adds, and all that torchrun would set.

A script that knows nothing of resihp finds its ranks and its peers there, as `init_process_group("nccl")` does. Where
they meet is the first rank's own to listen on, which then holds the store: its agent keeps the port free for it
(`wrapper.launch.ports.KeptPort`). There is no store of the agent's, and no restart of workers on the same node, so
that TORCHELASTIC_USE_AGENT_STORE is False and TORCHELASTIC_MAX_RESTARTS 0. Pure; called by `wrapper.agent.workers`.
"""

from __future__ import annotations

from collections.abc import Mapping

from resihp.process import OPEN_FILES
from resihp.protocol.messages import Start
from resihp.worker.forkserver import ONE_THREAD
from wrapper.config.run_spec import RunRequest

MEETING_PLACE = ("MASTER_ADDR", "MASTER_PORT")
ROLE = "default"
"""What torchrun calls workers that nobody has given another name."""


def environment_of(
    start: Start,
    request: RunRequest,
    inherited: Mapping[str, str],
    added: Mapping[str, str],
    network: Mapping[str, str],
) -> dict[str, str]:
    """`added` counts more than what is inherited, and that more than `network`, which is left out where `added` says
    how to reach others. A place to meet that was inherited is another job's."""
    environment = {name: value for name, value in inherited.items() if name not in (*MEETING_PLACE, OPEN_FILES)}
    environment.setdefault("OMP_NUM_THREADS", ONE_THREAD["OMP_NUM_THREADS"])
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if request.python_path:
        environment["PYTHONPATH"] = request.python_path
    if "GLOO_SOCKET_IFNAME" not in added:
        environment = {**network, **environment}
    return environment | {**added, **as_torchrun(start, request.job, request.settings.gpus_per_node)}


def as_torchrun(start: Start, job: str, devices: int) -> dict[str, str]:
    """What torch's elastic agent sets (`torch/distributed/elastic/agent/server/local_elastic_agent.py`), but for the
    place to meet. A group is a node; all workers have one role."""
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
        "ROLE_NAME": ROLE,
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
