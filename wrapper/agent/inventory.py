"""A node's hardware and system software, read from plain files. No program is run, and GPUs are described by their
driver's files.

Unreadable values are empty; nothing here raises. Read once, by `resihp.wrapper.agent.process` when it starts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from resihp.protocol.inventory import MAX_ADAPTERS, MAX_DEVICES, MAX_TEXT_CHARS, DeviceInventory, NodeInventory
from resihp.worker import affinity

MAX_FILE_BYTES = 1 << 16
"""Limit on the bytes that are read from a file."""
NO_SERIAL = frozenset(
    {"", "0", "0123456789", "none", "n/a", "not specified", "not applicable", "default string", "system serial number"}
    | {"to be filled by o.e.m.", "unknown", "invalid"}
)
"""Placeholders that manufacturers write in place of a machine's serial number."""
_DRIVER = re.compile(r"Kernel Module.*?\s(\d+\.\d[\d.]*)(?:\s|$)")
_ASSIGNED = re.compile(r"""\s*(\w+)=(["']?)(.*)\2\s*$""")


@dataclass(frozen=True)
class _Gpu:
    """One GPU of the machine, according to its driver. `minor`: the N of its device file /dev/nvidiaN; None if
    unknown."""

    name: str
    uuid: str
    vbios: str
    bus: str
    minor: int | None


def read(devices: int, environment: Mapping[str, str], root: Path = Path("/")) -> NodeInventory:
    """Return the inventory of a node with `devices` devices for ranks. `environment`: the environment of its
    workers."""
    gpus = [*_gpus(root)]
    serial = _line(root / "sys/class/dmi/id/product_serial")
    driver = _DRIVER.search(_text(root / "proc/driver/nvidia/version"))
    return NodeInventory(
        serial="" if serial.lower() in NO_SERIAL else serial,
        kernel=_word(os.uname().release),
        image=_image(_text(root / "etc/os-release")),
        driver="" if driver is None else _word(driver[1]),
        nic_firmware=tuple(_firmware(root / "sys/class/infiniband")),
        devices=tuple(_of_ranks(gpus, min(devices, MAX_DEVICES), environment)) if gpus else (),
    )


def processors(machine: NodeInventory, allowed: Set[int], root: Path = Path("/")) -> dict[int, tuple[int, ...]]:
    """Return the CPUs for each device's worker (`affinity.chosen`); none if devices share GPUs. Prints the CPUs of each
    device that does not get all allowed ones."""
    buses = [device.bus for device in machine.devices if device.bus]
    if len(set(buses)) < len(buses):
        return {}
    pci_devices = root / affinity.PCI_DEVICES.relative_to("/")
    chosen = affinity.chosen({device.device: device.bus for device in machine.devices}, allowed, pci_devices)
    for device, numbers in chosen.items():
        if len(numbers) < len(allowed):
            print(f"device {device}: its worker runs on CPUs {affinity.ranges(numbers)}, near its GPU", flush=True)
    return chosen


def _image(os_release: str) -> str:
    assignments = [match for line in os_release.splitlines() if (match := _ASSIGNED.match(line))]
    values = {match[1]: match[3] for match in assignments}
    return _word(values.get("PRETTY_NAME") or f"{values.get('NAME', '')} {values.get('VERSION', '')}")


def _firmware(adapters: Path) -> Iterable[tuple[str, str]]:
    for adapter in _folder(adapters)[:MAX_ADAPTERS]:
        if version := _line(adapter / "fw_ver"):
            yield _word(adapter.name), version


# --- GPUs -----------------------------------------------------------------------------------------------------------


def _gpus(root: Path) -> Iterable[_Gpu]:
    """Yield the GPUs that a process can open, in order of their PCI addresses."""
    for folder in _folder(root / "proc/driver/nvidia/gpus"):
        lines = [line.partition(":") for line in _text(folder / "information").splitlines()]
        values = {name.strip(): _unless_unknown(value) for name, _, value in lines}
        minor = _index(values.get("Device Minor", ""))
        excluded = "Yes" in (values.get("GPU Excluded"), values.get("Blacklisted"))
        if excluded or (minor is not None and not (root / f"dev/nvidia{minor}").exists()):
            continue
        yield _Gpu(
            name=values.get("Model", ""),
            uuid=values.get("GPU UUID", ""),
            vbios=values.get("Video BIOS", ""),
            bus=values.get("Bus Location", "") or _word(folder.name),
            minor=minor,
        )


def _unless_unknown(value: str) -> str:
    """Return a value of the driver's file, or an empty text if it has question marks, as for a GPU that was never
    used."""
    return "" if "??" in value else _word(value)


def _of_ranks(gpus: Sequence[_Gpu], devices: int, environment: Mapping[str, str]) -> Iterable[DeviceInventory]:
    """Yield the device of each device number, as CUDA counts in a worker. If the order of the GPUs is unknown, yield at
    most their model."""
    visible = _visible(gpus, environment)
    if environment.get("RESIHP_SHARE_GPUS") == "1" and visible:
        visible = [visible[device % len(visible)] for device in range(devices)]
    models = {gpu.name for gpu in gpus}
    for device in range(devices):
        if device < len(visible):
            gpu = visible[device]
            yield DeviceInventory(device=device, name=gpu.name, uuid=gpu.uuid, vbios=gpu.vbios, bus=gpu.bus)
        else:
            yield DeviceInventory(device=device, name=next(iter(models)) if len(models) == 1 else "")


def _visible(gpus: Sequence[_Gpu], environment: Mapping[str, str]) -> list[_Gpu]:
    """Return the GPUs in CUDA's order; empty if the order is unknown.

    GPUs of one model are in order of their PCI addresses. With several models the fastest is first, unless the
    environment says otherwise. Slurm reports the GPUs of a job step by their numbers in the machine (SLURM_STEP_GPUS).
    CUDA_VISIBLE_DEVICES counts within the step's GPUs if the step cannot access other GPUs, else within all GPUs of the
    machine; if both are possible and differ, the order is unknown.
    """
    if len({gpu.name for gpu in gpus}) > 1 and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return []
    requested = environment.get("CUDA_VISIBLE_DEVICES")
    step = environment.get("SLURM_STEP_GPUS")
    if step is None:
        return [*gpus] if requested is None else _chosen(gpus, requested)
    within = _of_step(gpus, step)
    if requested is None or not within:
        return within
    chosen = [_chosen(within, requested), [gpu for gpu in _chosen(gpus, requested) if gpu in within]]
    longest = max(map(len, chosen))
    possible = [devices_seen for devices_seen in chosen if len(devices_seen) == longest]
    return possible[0] if all(devices_seen == possible[0] for devices_seen in possible) else []


def _of_step(gpus: Sequence[_Gpu], step: str) -> list[_Gpu]:
    """Return the GPUs of a Slurm step; empty if it is unclear, as it depends on the site, whether the step numbers its
    GPUs by device file or by PCI address."""
    numbers = [_index(text) for text in step.split(",")]
    given = sorted(number for number in numbers if number is not None and number < len(gpus))
    if len(given) < len(numbers) or any(gpus[number].minor != number for number in given):
        return []
    return [gpus[number] for number in given]


def _chosen(gpus: Sequence[_Gpu], requested: str) -> list[_Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects by numbers or by beginnings of UUIDs. The first unknown item
    ends the list."""
    chosen: list[_Gpu] = []
    for item in requested.split(","):
        number, word = _index(item), item.strip()
        if number is not None:
            named = [*gpus[number : number + 1]]
        else:
            named = [gpu for gpu in gpus if word.startswith("GPU-") and gpu.uuid.startswith(word)]
        if len(named) != 1 or named[0] in chosen:
            break
        chosen += named
    return chosen


# --- files ----------------------------------------------------------------------------------------------------------


def _index(text: str) -> int | None:
    word = text.strip()
    return int(word) if word.isascii() and word.isdecimal() and len(word) < 5 else None


def _folder(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return sorted(Path(entry.path) for entry in islice(entries, MAX_DEVICES))
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _line(path: Path) -> str:
    return _word(_text(path))


def _word(text: str) -> str:
    """Return `text` on one line, without unprintable characters, and cut to the permitted length."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text[: 8 * MAX_TEXT_CHARS])
    return " ".join(printable.split())[:MAX_TEXT_CHARS]
