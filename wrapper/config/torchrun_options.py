"""torchrun's options under `resihp run`, so that `torchrun OPTIONS train.py` becomes `resihp run OPTIONS train.py`.

Each option of `torch.distributed.run` (torch 2.13) is honoured, accepted as not needed, or refused with its reason.
docs/coming-from.md lists them. Translates and checks only; called by `resihp.wrapper.cli`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from resihp.errors import UsageError

HELP_PANEL = "torchrun's options (all of them: docs/coming-from.md)"

HAS_NODES = "resihp finds the nodes and a free port itself"
HAS_LOGS = "each rank has its own log (resihp logs --rank R -f), and rank 0's output is shown here"
WATCHES_WORKERS = "resihp starts and watches the workers in its own way"

IGNORED_REASONS: Mapping[str, str] = {
    **dict.fromkeys(("rdzv_backend", "rdzv_endpoint", "rdzv_conf", "node_rank", "master_addr"), HAS_NODES),
    **dict.fromkeys(("master_port", "local_addr"), HAS_NODES),
    "rdzv_id": "TORCHELASTIC_RUN_ID is the job's name",
    "role": "ROLE_NAME is default, and each log is named after its node and rank",
    **dict.fromkeys(("log_dir", "redirects", "tee", "local_ranks_filter"), HAS_LOGS),
    **dict.fromkeys(("duplicate_stdout_filters", "duplicate_stderr_filters"), HAS_LOGS),
    **dict.fromkeys(("monitor_interval", "start_method"), WATCHES_WORKERS),
    "event_log_handler": "resihp history events lists what happened",
    "numa_binding": "each worker starts on the CPUs near its GPU",
    "signals_to_handle": "resihp run handles every signal that ends a job",
}
"""Reason for which an option is accepted and ignored. It is printed."""
REFUSAL_REASONS: Mapping[str, str] = {
    "logs_specs": "resihp writes the logs itself and loads no plug-in for them; leave it out",
    "shutdown_timeout": "a worker gets SIGKILL 3 s after SIGTERM, which cannot be changed; leave it out",
    "virtual_local_rank": "LOCAL_RANK is the number of the worker's GPU; leave it out, and let the script call "
    "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))",
}
"""Reason for which an option is an error, and the way out."""


def hyphenated(name: str) -> str:
    """Return the name of an option with hyphens: torchrun accepts both --rdzv-id and --rdzv_id."""
    return name.replace("_", "-")


def _listed(*names: str, text: str, metavar: str | None = None, default: str | None = None) -> Any:
    return typer.Option(*names, help=text, metavar=metavar, show_default=default or False, rich_help_panel=HELP_PANEL)


def _unlisted(*names: str) -> Any:
    return typer.Option(*names, hidden=True)


@dataclass(frozen=True, kw_only=True)
class TorchrunOptions:
    """Options of torchrun given on the command line; None or False for an option that was not given."""

    nnodes: Annotated[
        str | None,
        _listed("--nnodes", metavar="N|MIN:MAX", text="--nodes N, or MAX; down to MIN nodes after failures."),
    ] = None
    nproc_per_node: Annotated[
        str | None, _listed("--nproc-per-node", metavar="N|gpu|auto|cpu", text="Workers per node.")
    ] = None
    max_restarts: Annotated[
        int | None, _listed("--max-restarts", text="How often a script that fails is started again.", default="100")
    ] = None
    standalone: Annotated[bool, _listed("--standalone", text="--local --nodes 1.")] = False
    module: Annotated[bool, _listed("-m", "--module", text="Run a Python module, as python -m does.")] = False
    no_python: Annotated[bool, _listed("--no-python", text="Run train.py itself, without python.")] = False
    run_path: Annotated[bool, _unlisted("--run-path")] = False

    rdzv_backend: Annotated[str | None, _unlisted("--rdzv-backend")] = None
    rdzv_endpoint: Annotated[str | None, _unlisted("--rdzv-endpoint")] = None
    rdzv_id: Annotated[str | None, _unlisted("--rdzv-id")] = None
    rdzv_conf: Annotated[str | None, _unlisted("--rdzv-conf")] = None
    node_rank: Annotated[str | None, _unlisted("--node-rank")] = None
    master_addr: Annotated[str | None, _unlisted("--master-addr")] = None
    master_port: Annotated[str | None, _unlisted("--master-port")] = None
    local_addr: Annotated[str | None, _unlisted("--local-addr")] = None
    role: Annotated[str | None, _unlisted("--role")] = None
    log_dir: Annotated[str | None, _unlisted("--log-dir")] = None
    redirects: Annotated[str | None, _unlisted("-r", "--redirects")] = None
    tee: Annotated[str | None, _unlisted("-t", "--tee")] = None
    local_ranks_filter: Annotated[str | None, _unlisted("--local-ranks-filter")] = None
    duplicate_stdout_filters: Annotated[str | None, _unlisted("--duplicate-stdout-filters")] = None
    duplicate_stderr_filters: Annotated[str | None, _unlisted("--duplicate-stderr-filters")] = None
    monitor_interval: Annotated[str | None, _unlisted("--monitor-interval")] = None
    start_method: Annotated[str | None, _unlisted("--start-method")] = None
    event_log_handler: Annotated[str | None, _unlisted("--event-log-handler")] = None
    numa_binding: Annotated[str | None, _unlisted("--numa-binding")] = None
    signals_to_handle: Annotated[str | None, _unlisted("--signals-to-handle")] = None
    logs_specs: Annotated[str | None, _unlisted("--logs-specs")] = None
    shutdown_timeout: Annotated[str | None, _unlisted("--shutdown-timeout")] = None
    virtual_local_rank: Annotated[bool, _unlisted("--virtual-local-rank")] = False


@dataclass(frozen=True, kw_only=True)
class LaunchShape:
    """How many nodes and devices the command line asks for; None for a number that it leaves open."""

    nodes: int | None
    min_nodes: int | None
    devices: int | None
    local: bool


def shape_of(
    torchrun: TorchrunOptions,
    *,
    nodes: int | None,
    gpus_per_node: str | None,
    local: bool,
    notice: Callable[[str], None],
) -> LaunchShape:
    """Return the shape that torchrun's options and resihp's own (`nodes`, `gpus_per_node`, `local`) ask for.

    torchrun's options for a single node, given outside of a Slurm allocation, mean this machine. Raises UsageError for
    options that contradict each other, and for those that are refused; gives a notice about those that are ignored.
    """
    _check_fates(torchrun, notice)
    if torchrun.nnodes is not None and nodes is not None:
        raise UsageError("--nodes and --nnodes: two names of one number; give one of them")
    if torchrun.nproc_per_node is not None and gpus_per_node is not None:
        raise UsageError("--gpus-per-node and --nproc-per-node: two names of one number; give one of them")
    min_nodes = None
    if torchrun.nnodes is not None:
        min_nodes, nodes = _node_range(torchrun.nnodes)
    if torchrun.standalone and (nodes or 1) > 1:
        raise UsageError(
            f"--standalone: is one node, not {nodes}; for {nodes} virtual nodes on this machine, give --local instead"
        )
    standalone = torchrun.standalone or _is_alone(torchrun, nodes, local=local, notice=notice)
    if standalone:
        nodes, local = 1, True
    return LaunchShape(
        nodes=nodes, min_nodes=min_nodes, devices=_devices(torchrun, gpus_per_node, nodes, local=local), local=local
    )


def _is_alone(torchrun: TorchrunOptions, nodes: int | None, *, local: bool, notice: Callable[[str], None]) -> bool:
    """Return whether torchrun, with these options and outside of an allocation, would run on this machine alone."""
    from resihp.wrapper.launch.allocation import job_id

    has_size = torchrun.nnodes is not None or torchrun.nproc_per_node is not None
    if local or not has_size or (nodes or 1) > 1 or job_id(os.environ):
        return False
    notice(
        "not in a Slurm allocation: runs on this machine, as with --standalone; resihp submit job.toml submits a job "
        "to Slurm"
    )
    return True


def _devices(torchrun: TorchrunOptions, gpus_per_node: str | None, nodes: int | None, *, local: bool) -> int | None:
    from resihp.wrapper.config.shape import devices_of

    if torchrun.nproc_per_node is None:
        return devices_of(gpus_per_node, nodes or 1, local=local)
    return devices_of(torchrun.nproc_per_node, nodes or 1, local=local, option="--nproc-per-node")


def _node_range(nnodes: str) -> tuple[int | None, int]:
    """Return the smallest number of nodes, None if only one number is given, and the number to begin with."""
    numbers = re.fullmatch(r"(?:([0-9]{1,9}):)?([0-9]{1,9})", nnodes)
    if numbers is None or not 0 < int(numbers[1] or numbers[2]) <= int(numbers[2]):
        raise UsageError(f"--nnodes {nnodes}: a number of nodes, as 4, or the smallest and the largest, as 2:4")
    return (int(numbers[1]) if numbers[1] else None), int(numbers[2])


def command_of_script(torchrun: TorchrunOptions, words: Sequence[str]) -> tuple[str, ...]:
    """Return the workers' command for the words after the options: script or module, and its arguments.

    Raises UsageError if -m, --no-python or --run-path has nothing to apply to.
    """
    flags = {"-m": torchrun.module, "--no-python": torchrun.no_python, "--run-path": torchrun.run_path}
    given = [flag for flag, is_given in flags.items() if is_given]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)}: say in different ways how the script is run; give one of them")
    if given and not words:
        raise UsageError(f"{given[0]}: nothing to run; write it after the options, as in resihp run -m package.train")
    if torchrun.module:
        return ("python", "-m", *words)
    if torchrun.run_path:
        return ("python", *words)
    if torchrun.no_python and words[0].endswith(".py"):
        return ("env", *words)
    return tuple(words)


def _check_fates(torchrun: TorchrunOptions, notice: Callable[[str], None]) -> None:
    """Raise UsageError for an option that is refused; name all that are ignored, with the reasons, in one notice."""
    for name, reason in REFUSAL_REASONS.items():
        if value := getattr(torchrun, name):
            shown_value = "" if value is True else f" {value}"
            raise UsageError(f"--{hyphenated(name)}{shown_value}: {reason}")
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in IGNORED_REASONS.items():
        if getattr(torchrun, name) is not None:
            names_by_reason.setdefault(reason, []).append(f"--{hyphenated(name)}")
    if names_by_reason:
        ignored = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in names_by_reason.items())
        notice(f"not needed: {ignored}")
