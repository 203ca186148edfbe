"""Decides which nodes a run has, how many of them its layout uses, and whether the layout is possible.

With `--local`, the nodes come from the configuration; under Slurm, from the allocation. Errors are raised before
anything is created or started. Called by `resihp run` and `resihp submit`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from resihp.errors import ConfigurationError, LayoutError, UsageError
from resihp.faults import LINK_MS, LINKS_NEED_TIMES, Fault
from resihp.wrapper.config.run_spec import virtual_nodes
from resihp.wrapper.config.schema import Configuration, LayoutSection
from resihp.wrapper.launch.allocation import Allocation

GPUS_OF_NODE = ("auto", "gpu")
"""Values of an option that mean all GPUs of a node."""


@dataclass(frozen=True)
class Shape:
    """The nodes of a run, in the order in which ranks fill them. The last `spares` nodes are not part of the first
    layout."""

    nodes: tuple[str, ...]
    gpus_per_node: int
    spares: int

    @property
    def laid_out(self) -> int:
        """Number of nodes in the first layout."""
        return len(self.nodes) - self.spares

    @property
    def devices(self) -> int:
        """Number of devices on all nodes, including spares."""
        return len(self.nodes) * self.gpus_per_node


def on_this_machine(configuration: Configuration) -> Shape:
    """Return the configured shape of a run with --local: virtual nodes for the layout, and another one for each
    spare."""
    job, spares = configuration.job, configuration.slurm.spares
    return Shape(virtual_nodes(job.nodes + spares), job.gpus_per_node, spares)


def devices_of(value: str | None, nodes: int, *, local: bool, option: str = "--gpus-per-node") -> int | None:
    """Return the number of devices per node that the value of an option means; None if the option is missing.

    With --local, `auto` divides the machine's GPUs among the virtual nodes. Under Slurm, `auto` is the same as no
    option: the GPUs that Slurm gave. torchrun's `gpu` means `auto`, and `cpu` one worker for each CPU of this machine
    that we may use. Raises UsageError.
    """
    if value is None or (value in GPUS_OF_NODE and not local):
        return None
    if value in GPUS_OF_NODE:
        gpus = _gpus_here(os.environ, f"{option} {value}", option)
        if gpus % nodes:
            raise UsageError(f"{option} {value}: {gpus} GPUs cannot be divided evenly among {nodes} virtual nodes")
        return gpus // nodes
    if value == "cpu":
        return len(os.sched_getaffinity(0))
    if not value.isascii() or not value.isdigit():
        raise UsageError(f"{option} {value}: a number, auto, gpu or cpu")
    return int(value)


def _gpus_here(environment: Mapping[str, str], typed: str, option: str) -> int:
    """Return the number of this machine's GPUs that the user's processes can see. Raises UsageError if there are none.
    `typed`: the option with its value."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count = len([device for device in visible.split(",") if device.strip() not in ("", "-1", "NoDevFiles")])
        if not count:
            raise UsageError(f"{typed}: CUDA_VISIBLE_DEVICES={visible} shows no GPU; unset it, or give N")
        return count
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    except OSError:
        raise UsageError(
            f"{typed}: no nvidia-smi on this machine, so no GPU to count; {option} N runs N workers on processors"
        ) from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"{typed}: nvidia-smi -L did not answer within 20 s; give {option} N") from None
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    if listed.returncode or not count:
        answer = (listed.stdout.strip() or listed.stderr.strip() or "nothing").splitlines()[0]
        raise UsageError(f"{typed}: nvidia-smi -L lists no GPU ({answer[:200]}); give {option} N")
    return count


def of_allocation(configuration: Configuration, allocation: Allocation, notice: Callable[[str], None]) -> Shape:
    """Return the shape of a run in the allocation: all of it, or as much as the configuration requests. Nodes that the
    layout does not need are spares.

    Raises UsageError if the configuration requests more than the allocation has.
    """
    job, spares, given = configuration.job, configuration.slurm.spares, len(allocation.nodes)
    job_name = f"job {allocation.job_id}"
    if configuration.origin("job", "nodes") is None:
        if given <= spares:
            raise UsageError(
                f"{job_name}: Slurm gave {_count(given, 'node')}, and {spares} are spares: none is left for the "
                f"layout; lower [slurm] spares, or sbatch --nodes={spares + 1}"
            )
        laid_out = given - spares
    else:
        laid_out = job.nodes
        if job.min_nodes is not None and spares == 0 and job.min_nodes <= given < laid_out:
            notice(f"{job_name}: Slurm gave {given} of {_count(laid_out, 'node')}; begins with these ([job] min_nodes)")
            laid_out = given
    if given < laid_out + spares:
        extra = f" and {_count(spares, 'spare')}" if spares else ""
        raise UsageError(
            f"{job_name}: Slurm gave {_count(given, 'node')}, the layout needs {laid_out}{extra}; "
            f"sbatch --nodes={laid_out + spares}, or lower {'--nodes' if not spares else '[job] nodes or spares'}"
        )
    if given > laid_out + spares:
        more = given - laid_out - spares
        notice(f"{job_name}: the layout uses {laid_out} of {given} nodes; {more} more than requested stand by")
    return Shape(allocation.nodes, _gpus(configuration, allocation, notice), given - laid_out)


def _gpus(configuration: Configuration, allocation: Allocation, notice: Callable[[str], None]) -> int:
    requested = configuration.job.gpus_per_node if configuration.origin("job", "gpus_per_node") else None
    given = allocation.gpus_per_node
    if given is None:
        notice(f"job {allocation.job_id}: Slurm gave no GPUs; {_count(requested or 1, 'worker')} a node without")
        return requested or 1
    if requested is not None and requested > given:
        raise UsageError(
            f"job {allocation.job_id}: Slurm gave {_count(given, 'GPU')} a node, {requested} are asked for; "
            f"sbatch --gpus-per-node={requested}, or lower --gpus-per-node"
        )
    if given < 1:
        raise UsageError(f"job {allocation.job_id}: Slurm gave no GPUs; sbatch --gpus-per-node={requested or 8}")
    return requested or given


def check_layout(layout: LayoutSection, nodes: int, gpus_per_node: int) -> None:
    """Raise LayoutError for a layout that is impossible on these nodes, for any model."""
    devices = nodes * gpus_per_node
    if layout.tp > gpus_per_node:
        raise LayoutError(
            f"layout tp={layout.tp}: a tensor-parallel group stays inside a node, which has {gpus_per_node} "
            f"devices; choose --tp {gpus_per_node} or less"
        )
    if devices < layout.tp * layout.pp:
        raise LayoutError(
            f"layout tp={layout.tp} pp={layout.pp}: needs {layout.tp * layout.pp} devices, the job has {devices}; "
            "raise --nodes or --gpus-per-node, or lower a degree"
        )
    if devices % (layout.tp * layout.pp):
        raise LayoutError(
            f"layout tp={layout.tp} pp={layout.pp}: a replica needs {layout.tp * layout.pp} devices, and the job's "
            f"{devices} ({nodes} nodes of {gpus_per_node}) are not a multiple of that"
        )
    if gpus_per_node % layout.tp:
        raise LayoutError(
            f"layout tp={layout.tp}: {gpus_per_node} devices a node are not a multiple of it, so a "
            "tensor-parallel group would cross nodes"
        )
    if layout.schedule == "interleaved" and layout.virtual_stages == 1:
        raise LayoutError(
            "layout schedule=interleaved: interleaves the virtual stages of each stage, and there is one; "
            "choose --virtual-stages 2 or more, or --schedule 1f1b"
        )
    if layout.schedule != "interleaved" and layout.virtual_stages > 1:
        raise LayoutError(
            f"layout schedule={layout.schedule}: has one virtual stage a stage, not {layout.virtual_stages}; "
            "choose --schedule interleaved, or --virtual-stages 1"
        )


def check_target(fault: Fault, shape: Shape, come_backs: int) -> None:
    """Raise ConfigurationError if the fault's target does not exist. Processes that are started again get new ranks, so
    higher ranks than those of the first layout may exist."""
    devices = shape.devices
    most = devices * (1 + come_backs)
    if fault.rank is not None and fault.rank >= most:
        later = f", {devices} to {most - 1} for respawned processes" if come_backs else ""
        raise ConfigurationError(
            f"fault {fault}: there is no rank {fault.rank}; ranks are 0 to {devices - 1} at the start{later}"
        )
    for node in fault.link or (fault.node,):
        if node is not None and node not in shape.nodes:
            raise ConfigurationError(
                f"fault {fault}: there is no node {node}; nodes are {shape.nodes[0]} to {shape.nodes[-1]}"
            )
    if fault.link is not None and LINK_MS not in os.environ:
        raise ConfigurationError(f"fault {fault}: {LINKS_NEED_TIMES}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
