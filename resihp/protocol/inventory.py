"""Inventories: a node's hardware and operating system, as reported by its agent when it joins, and the training
software, as reported by workers. The journal records both.

The length and number of texts are limited, because texts come from another machine and are written to a database. A
message that exceeds the limits is invalid. This module reads no hardware: `resihp.wrapper.agent.inventory` and
`resihp.executor.versions` fill in the fields.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_TEXT_CHARS = 128
"""Length limit of a text, in characters."""
MAX_ADAPTERS, MAX_DEVICES = 64, 1024

Word = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]


class DeviceInventory(msgspec.Struct, frozen=True, kw_only=True):
    """The device in slot `device` of a node. Texts are empty where unknown.

    `uuid` and `serial` identify the device, `board` the board it is mounted on; `bus` is its PCI address.
    """

    device: Annotated[int, msgspec.Meta(ge=0, lt=MAX_DEVICES)]
    name: Word = ""
    uuid: Word = ""
    serial: Word = ""
    board: Word = ""
    vbios: Word = ""
    bus: Word = ""


class NodeInventory(msgspec.Struct, frozen=True, kw_only=True):
    """A node's hardware and operating system, as found by its agent. Texts are empty where they cannot be read.

    `serial` is the machine's serial number. `kernel` and `image` are versions of the operating system, `driver` that of
    the GPU driver. `nic_firmware` has (adapter, version).
    """

    serial: Word = ""
    kernel: Word = ""
    image: Word = ""
    driver: Word = ""
    nic_firmware: Annotated[tuple[tuple[Word, Word], ...], msgspec.Meta(max_length=MAX_ADAPTERS)] = ()
    devices: Annotated[tuple[DeviceInventory, ...], msgspec.Meta(max_length=MAX_DEVICES)] = ()


class Software(msgspec.Struct, frozen=True, kw_only=True):
    """Versions of the training software; a text is empty if the software is not installed. `script_commit` is the git
    commit of the script's folder."""

    torch: Word = ""
    megatron_core: Word = ""
    cuda: Word = ""
    nccl: Word = ""
    script_commit: Word = ""
