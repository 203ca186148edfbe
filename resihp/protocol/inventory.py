"""What a node is made of, as its agent tells as it joins; what trains there, as workers tell. The journal keeps both.

Texts and their number are bounded, and what exceeds them is no message: they come from another machine and end in a
database. Filled in by `wrapper.agent.inventory` and `resihp.executor.versions`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

LONGEST = 128
"""Characters of a text."""
MOST_ADAPTERS, MOST_DEVICES = 64, 1024

Word = Annotated[str, msgspec.Meta(max_length=LONGEST)]


class DeviceInventory(msgspec.Struct, frozen=True, kw_only=True):
    """What is in a slot. `uuid`, `serial`, `board`: of the device, and of what it is mounted on; `bus`: its address.
    Empty where nobody can tell."""

    device: Annotated[int, msgspec.Meta(ge=0, lt=MOST_DEVICES)]
    name: Word = ""
    uuid: Word = ""
    serial: Word = ""
    board: Word = ""
    vbios: Word = ""
    bus: Word = ""


class NodeInventory(msgspec.Struct, frozen=True, kw_only=True):
    """What a node is, as its agent found it. `serial`: the machine's; `kernel`, `image`: of the operating system;
    `driver`: of its GPUs; `nic_firmware`: (adapter, version). Empty where it cannot be read."""

    serial: Word = ""
    kernel: Word = ""
    image: Word = ""
    driver: Word = ""
    nic_firmware: Annotated[tuple[tuple[Word, Word], ...], msgspec.Meta(max_length=MOST_ADAPTERS)] = ()
    devices: Annotated[tuple[DeviceInventory, ...], msgspec.Meta(max_length=MOST_DEVICES)] = ()


class Software(msgspec.Struct, frozen=True, kw_only=True):
    """Versions of what trains; empty where it is not there. `script_commit`: of the folder that the script is in."""

    torch: Word = ""
    megatron_core: Word = ""
    cuda: Word = ""
    nccl: Word = ""
    script_commit: Word = ""
