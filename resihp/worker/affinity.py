"""CPUs near a GPU: those of the same NUMA node, according to the kernel. Copies from other memory take longer.

The agent starts each worker on the CPUs near its GPU, whatever the worker runs; `resihp doctor` shows them. Only CPUs
that the job may use count, so nothing changes for a job that Slurm or the user has bound to other CPUs. A worker is not
bound where its share of the CPUs near its GPU would be smaller than its share of all: many CPUs would be idle. Source:
`local_cpulist` in the kernel's Documentation/ABI/testing/sysfs-bus-pci.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Set
from contextlib import suppress
from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")


def chosen(buses: Mapping[int, str], allowed: Set[int], pci_devices: Path = PCI_DEVICES) -> dict[int, tuple[int, ...]]:
    """Return the CPUs for each device's worker; `buses` are the PCI addresses of the GPUs, by device. Devices whose
    worker is not bound are left out."""
    cpus_by_device = {device: near(bus, allowed, pci_devices) for device, bus in buses.items()}
    sharing = Counter(cpus_by_device.values())
    return {
        device: cpus
        for device, cpus in cpus_by_device.items()
        if cpus and len(cpus) * len(buses) >= len(allowed) * sharing[cpus]
    }


def near(bus: str, allowed: Set[int], pci_devices: Path = PCI_DEVICES) -> tuple[int, ...]:
    """Return the allowed CPUs near the GPU at a PCI address such as `0000:1b:00.0`, in ascending order.

    Empty if none of them is near it, or if the kernel reports nothing about it.
    """
    if not bus or "/" in bus:
        return ()
    with suppress(OSError, ValueError):
        return tuple(sorted(_processors((pci_devices / bus.lower() / "local_cpulist").read_text()) & allowed))
    return ()


def _processors(ranges: str) -> set[int]:
    """Parse CPU numbers from the kernel's notation `0-15,32-47`. Raises ValueError."""
    numbers = set[int]()
    for part in filter(None, ranges.strip().split(",")):
        first, _, last = part.partition("-")
        numbers |= {*range(int(first), int(last or first) + 1)}
    return numbers


def ranges(processors: Collection[int]) -> str:
    """Return CPU numbers in the kernel's notation, as `0-15,32-47`."""
    numbers = sorted(processors)
    starts = [number for number in numbers if number - 1 not in processors]
    ends = [number for number in numbers if number + 1 not in processors]
    return ",".join(
        str(first) if first == last else f"{first}-{last}" for first, last in zip(starts, ends, strict=True)
    )
