"""Inventories: a node's hardware and system, as its agent reports on joining, and the training software, as workers
report. The journal keeps both.

The length and number of texts are limited, and a message that exceeds the limits is invalid: texts come from another
machine and end up in a database. Filled in by `wrapper.agent.inventory` and `resihp.executor.versions`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_TEXT_CHARS = 128
"""Largest number of characters of a text."""
MAX_ADAPTERS, MAX_DEVICES = 64, 1024

Word = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]


class DeviceInventory(msgspec.Struct, frozen=True, kw_only=True):
    """The device in a slot. `uuid`, `serial`, `board`: of the device, and of the board it is mounted on; `bus`: its
    address. Empty where not known."""

    device: Annotated[int, msgspec.Meta(ge=0, lt=MAX_DEVICES)]
    name: Word = ""
    uuid: Word = ""
    serial: Word = ""
    board: Word = ""
    vbios: Word = ""
    bus: Word = ""


class NodeInventory(msgspec.Struct, frozen=True, kw_only=True):
    """A node, as its agent found it. `serial`: the machine's; `kernel`, `image`: of the operating system; `driver`: of
    its GPUs; `nic_firmware`: (adapter, version). Empty where it cannot be read."""

    serial: Word = ""
    kernel: Word = ""
    image: Word = ""
    driver: Word = ""
    nic_firmware: Annotated[tuple[tuple[Word, Word], ...], msgspec.Meta(max_length=MAX_ADAPTERS)] = ()
    devices: Annotated[tuple[DeviceInventory, ...], msgspec.Meta(max_length=MAX_DEVICES)] = ()


class Software(msgspec.Struct, frozen=True, kw_only=True):
    """Versions of the training software; empty if not installed. `script_commit`: of the folder that the script is
    in."""

    torch: Word = ""
    megatron_core: Word = ""
    cuda: Word = ""
    nccl: Word = ""
    script_commit: Word = ""
