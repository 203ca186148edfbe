"""Which nodes a run has, how many of them its layout uses, and whether that layout can be at all.

From the configuration with `--local`, from the allocation under Slurm. Raises before anything is made or started. Used
by `resihp run` and `resihp submit`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from resihp.errors import ConfigurationError, LayoutError, UsageError
from resihp.faults import LINK_MS, LINKS_NEED_TIMES, Fault
from wrapper.config.run_spec import virtual_nodes
from wrapper.config.schema import Configuration, LayoutSection
from wrapper.launch.allocation import Allocation


@dataclass(frozen=True)
class Shape:
    """Nodes in the order in which ranks fill them; the last `spares` of them are not in the first layout."""

    nodes: tuple[str, ...]
    gpus_per_node: int
    spares: int

    @property
    def laid_out(self) -> int:
        """Nodes of the first layout."""
        return len(self.nodes) - self.spares

    @property
    def devices(self) -> int:
        """Devices of all nodes, spares included."""
        return len(self.nodes) * self.gpus_per_node


def on_this_machine(configuration: Configuration) -> Shape:
    """As configured: virtual nodes for the layout, and as many more as there are spares."""
    job, spares = configuration.job, configuration.slurm.spares
    return Shape(virtual_nodes(job.nodes + spares), job.gpus_per_node, spares)


def devices_of(said: str | None, nodes: int, *, local: bool) -> int | None:
    """What `--gpus-per-node` says; `auto` with --local: the machine's GPUs, shared out over the virtual nodes, and in
    Slurm what it gave, as without the option. Raises UsageError."""
    if said is None or (said == "auto" and not local):
        return None
    if said == "auto":
        there = _gpus_here(os.environ)
        if there % nodes:
            raise UsageError(
                f"--gpus-per-node auto: {there} GPUs cannot be shared out evenly over {nodes} virtual nodes"
            )
        return there // nodes
    if not said.isascii() or not said.isdigit():
        raise UsageError(f"--gpus-per-node {said}: a number, or auto")
    return int(said)


def _gpus_here(environment: Mapping[str, str]) -> int:
    """GPUs of this machine that its user may see. Raises UsageError where there are none."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count = len([one for one in visible.split(",") if one.strip() not in ("", "-1", "NoDevFiles")])
        if not count:
            raise UsageError(f"--gpus-per-node auto: CUDA_VISIBLE_DEVICES={visible} shows no GPU; unset it, or say N")
        return count
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    except OSError:
        raise UsageError(
            "--gpus-per-node auto: no nvidia-smi on this machine, so no GPU to count; --gpus-per-node N runs N workers "
            "on processors"
        ) from None
    except subprocess.TimeoutExpired:
        raise UsageError(
            "--gpus-per-node auto: nvidia-smi -L did not answer within 20 s; say --gpus-per-node N"
        ) from None
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    if listed.returncode or not count:
        said = (listed.stdout.strip() or listed.stderr.strip() or "nothing").splitlines()[0]
        raise UsageError(f"--gpus-per-node auto: nvidia-smi -L lists no GPU ({said[:200]}); say --gpus-per-node N")
    return count


def of_allocation(configuration: Configuration, found: Allocation, notice: Callable[[str], None]) -> Shape:
    """What Slurm gave, in so far as the configuration does not ask for less. Raises UsageError when it asks for more.

    Nodes that the layout does not need are spares.
    """
    job, spares, given = configuration.job, configuration.slurm.spares, len(found.nodes)
    who = f"job {found.job_id}"
    if configuration.origin("job", "nodes") is None:
        if given <= spares:
            raise UsageError(
                f"{who}: Slurm gave {_count(given, 'node')}, and {spares} are to be spares, so that none is left; "
                f"lower [slurm] spares, or sbatch --nodes={spares + 1}"
            )
        laid_out = given - spares
    else:
        laid_out = job.nodes
    if given < laid_out + spares:
        extra = f" and {_count(spares, 'spare')}" if spares else ""
        raise UsageError(
            f"{who}: Slurm gave {_count(given, 'node')}, the layout needs {laid_out}{extra}; "
            f"sbatch --nodes={laid_out + spares}, or lower {'--nodes' if not spares else '[job] nodes or spares'}"
        )
    if given > laid_out + spares:
        more = given - laid_out - spares
        notice(f"{who}: the layout uses {laid_out} of {given} nodes; {more} more than asked for stand by")
    return Shape(found.nodes, _gpus(configuration, found, notice), given - laid_out)


def _gpus(configuration: Configuration, found: Allocation, notice: Callable[[str], None]) -> int:
    asked = configuration.job.gpus_per_node if configuration.origin("job", "gpus_per_node") else None
    given = found.gpus_per_node
    if given is None:
        notice(f"job {found.job_id}: Slurm gave no GPUs; {_count(asked or 1, 'worker')} a node without")
        return asked or 1
    if asked is not None and asked > given:
        raise UsageError(
            f"job {found.job_id}: Slurm gave {_count(given, 'GPU')} a node, {asked} are asked for; "
            f"sbatch --gpus-per-node={asked}, or lower --gpus-per-node"
        )
    if given < 1:
        raise UsageError(f"job {found.job_id}: Slurm gave no GPUs; sbatch --gpus-per-node={asked or 8}")
    return asked or given


def check_layout(layout: LayoutSection, nodes: int, gpus_per_node: int) -> None:
    """What is wrong with a layout over these nodes, whatever the model is. Raises LayoutError."""
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
    """Raises ConfigurationError for a fault that hits nobody. Processes that come back have ranks of their own."""
    devices = shape.devices
    most = devices * (1 + come_backs)
    if fault.rank is not None and fault.rank >= most:
        later = f", {devices} to {most - 1} for processes that come back" if come_backs else ""
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


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
