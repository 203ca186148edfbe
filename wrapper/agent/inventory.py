"""What this node is made of, read from plain files: no program is run, and no driver is asked by more than its files.

Whatever cannot be read is empty; nothing here raises. Asked once, by `wrapper.agent.process` as it joins.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from resihp.protocol.inventory import MAX_ADAPTERS, MAX_DEVICES, MAX_TEXT_CHARS, DeviceInventory, NodeInventory

MOST_BYTES = 1 << 16
"""Read of a file."""
NO_SERIAL = frozenset(
    {"", "0", "0123456789", "none", "n/a", "not specified", "not applicable", "default string", "system serial number"}
    | {"to be filled by o.e.m.", "unknown", "invalid"}
)
"""What makers leave in a machine's serial number."""
_DRIVER = re.compile(r"Kernel Module.*?\s(\d+\.\d[\d.]*)(?:\s|$)")
_ASSIGNED = re.compile(r"""\s*(\w+)=(["']?)(.*)\2\s*$""")


@dataclass(frozen=True)
class _Gpu:
    """One of the machine's, as its driver tells. `minor`: N of /dev/nvidiaN."""

    name: str
    uuid: str
    vbios: str
    bus: str
    minor: int | None


def read(devices: int, environment: Mapping[str, str], root: Path = Path("/")) -> NodeInventory:
    """The inventory of a node that gives so many devices to ranks; `environment`: of its workers."""
    gpus = [*_gpus(root)]
    serial = _line(root / "sys/class/dmi/id/product_serial")
    found = _DRIVER.search(_text(root / "proc/driver/nvidia/version"))
    return NodeInventory(
        serial="" if serial.lower() in NO_SERIAL else serial,
        kernel=_word(os.uname().release),
        image=_image(_text(root / "etc/os-release")),
        driver="" if found is None else _word(found[1]),
        nic_firmware=tuple(_firmware(root / "sys/class/infiniband")),
        devices=tuple(_of_ranks(gpus, min(devices, MAX_DEVICES), environment)) if gpus else (),
    )


def _image(os_release: str) -> str:
    found = [match for line in os_release.splitlines() if (match := _ASSIGNED.match(line))]
    values = {match[1]: match[3] for match in found}
    return _word(values.get("PRETTY_NAME") or f"{values.get('NAME', '')} {values.get('VERSION', '')}")


def _firmware(adapters: Path) -> Iterable[tuple[str, str]]:
    for adapter in _folder(adapters)[:MAX_ADAPTERS]:
        if version := _line(adapter / "fw_ver"):
            yield _word(adapter.name), version


# --- GPUs -----------------------------------------------------------------------------------------------------------


def _gpus(root: Path) -> Iterable[_Gpu]:
    """Those that a process can open, in order of their addresses."""
    for folder in _folder(root / "proc/driver/nvidia/gpus"):
        lines = [line.partition(":") for line in _text(folder / "information").splitlines()]
        told = {name.strip(): _known(value) for name, _, value in lines}
        minor = _index(told.get("Device Minor", ""))
        excluded = "Yes" in (told.get("GPU Excluded"), told.get("Blacklisted"))
        if excluded or (minor is not None and not (root / f"dev/nvidia{minor}").exists()):
            continue
        yield _Gpu(
            name=told.get("Model", ""),
            uuid=told.get("GPU UUID", ""),
            vbios=told.get("Video BIOS", ""),
            bus=told.get("Bus Location", "") or _word(folder.name),
            minor=minor,
        )


def _known(value: str) -> str:
    """A GPU that nobody has used yet tells question marks."""
    return "" if "??" in value else _word(value)


def _of_ranks(gpus: Sequence[_Gpu], devices: int, environment: Mapping[str, str]) -> Iterable[DeviceInventory]:
    """What is behind each device number, as CUDA will count in a worker; where nobody can tell, the model at most."""
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
    """GPUs in CUDA's order; empty where that cannot be told.

    Of one model they are in order of their addresses, of several with the fastest first, unless the environment says
    otherwise. What a Slurm step was given, Slurm tells by numbers of the machine's (SLURM_STEP_GPUS), and
    CUDA_VISIBLE_DEVICES counts within that where other devices are kept from the step, else in the machine: where both
    could be, nobody can tell. Slurm's numbers are those of device files or of addresses, as the site has it.
    """
    if len({gpu.name for gpu in gpus}) > 1 and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return []
    asked = environment.get("CUDA_VISIBLE_DEVICES")
    step = environment.get("SLURM_STEP_GPUS")
    if step is None:
        return [*gpus] if asked is None else _chosen(gpus, asked)
    numbers = [_index(each) for each in step.split(",")]
    given = sorted(number for number in numbers if number is not None and number < len(gpus))
    if len(given) < len(numbers) or any(gpus[number].minor != number for number in given):
        return []
    within = [gpus[number] for number in given]
    if asked is None:
        return within
    chosen = [_chosen(within, asked), [gpu for gpu in _chosen(gpus, asked) if gpu in within]]
    longest = max(map(len, chosen))
    possible = [each for each in chosen if len(each) == longest]
    return possible[0] if all(each == possible[0] for each in possible) else []


def _chosen(gpus: Sequence[_Gpu], asked: str) -> list[_Gpu]:
    """CUDA_VISIBLE_DEVICES: numbers, or beginnings of UUIDs; what it does not know ends the list."""
    found: list[_Gpu] = []
    for each in asked.split(","):
        number, word = _index(each), each.strip()
        if number is not None:
            named = [*gpus[number : number + 1]]
        else:
            named = [gpu for gpu in gpus if word.startswith("GPU-") and gpu.uuid.startswith(word)]
        if len(named) != 1 or named[0] in found:
            break
        found += named
    return found


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
            return file.read(MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _line(path: Path) -> str:
    return _word(_text(path))


def _word(text: str) -> str:
    """In one line, without what no terminal shows, and not too long."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text[: 8 * MAX_TEXT_CHARS])
    return " ".join(shown.split())[:MAX_TEXT_CHARS]
