"""What an agent tells of its machine: from files as Linux and NVIDIA's driver write them, or nothing."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.errors import ProtocolError
from resihp.protocol import messages as m
from resihp.protocol.framing import decode, encode
from resihp.protocol.inventory import MAX_TEXT_CHARS, DeviceInventory, NodeInventory
from resihp.wrapper.agent import inventory

INFORMATION = """\
Model: \t\t {model}
IRQ:   \t\t 320
GPU UUID: \t {uuid}
Video BIOS: \t 92.00.45.00.{minor:02}
Bus Type: \t PCIe
DMA Size: \t 47 bits
DMA Mask: \t 0x7fffffffffff
Bus Location: \t 0000:{bus:02x}:00.0
Device Minor: \t {minor}
GPU Firmware: \t 535.104.05
GPU Excluded:\t {excluded}
"""
VERSION = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023
GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)
"""
OPEN_VERSION = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build  (dvs-builder@U16-I1)  Fri Aug 16
GCC version:  gcc version 11.4.0
"""
A100 = "NVIDIA A100-SXM4-40GB"


def uuid(minor: int) -> str:
    return f"GPU-8f1f000{minor}-0000-4000-8000-000000000000"


def put(file: Path, text: str | bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())


def gpu(
    root: Path, minor: int, *, bus: int | None = None, model: str = A100, excluded: str = "No", **told: str
) -> None:
    at = 7 + minor if bus is None else bus
    text = INFORMATION.format(model=model, uuid=told.get("uuid", uuid(minor)), minor=minor, bus=at, excluded=excluded)
    put(root / f"proc/driver/nvidia/gpus/0000:{at:02x}:00.0/information", text)
    put(root / f"dev/nvidia{minor}", "")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of four A100."""
    put(tmp_path / "sys/class/dmi/id/product_serial", "S212345X0123456\n")
    put(
        tmp_path / "etc/os-release",
        'NAME="Rocky Linux"\nVERSION="9.5"\nID=rocky\nPRETTY_NAME="Rocky Linux 9.5 (Blue)"\n',
    )
    put(tmp_path / "proc/driver/nvidia/version", VERSION)
    for minor in range(4):
        gpu(tmp_path, minor)
    put(tmp_path / "sys/class/infiniband/mlx5_0/fw_ver", "28.41.1000\n")
    put(tmp_path / "sys/class/infiniband/mlx5_1/fw_ver", "28.39.1002\n")
    return tmp_path


def numbers(root: Path, devices: int = 4, **environment: str) -> list[str]:
    """The UUIDs' digits by device number, `-` where none is told."""
    found = inventory.read(devices, environment, root).devices
    assert [each.device for each in found] == list(range(len(found)))
    return [each.uuid[11:12] or "-" for each in found]


def test_a_machine_tells_what_it_is_made_of(root: Path) -> None:
    found = inventory.read(2, {}, root)
    assert found == NodeInventory(
        serial="S212345X0123456",
        kernel=os.uname().release,
        image="Rocky Linux 9.5 (Blue)",
        driver="535.104.05",
        nic_firmware=(("mlx5_0", "28.41.1000"), ("mlx5_1", "28.39.1002")),
        devices=(
            DeviceInventory(device=0, name=A100, uuid=uuid(0), vbios="92.00.45.00.00", bus="0000:07:00.0"),
            DeviceInventory(device=1, name=A100, uuid=uuid(1), vbios="92.00.45.00.01", bus="0000:08:00.0"),
        ),
    )


def test_workers_run_near_their_gpus(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for minor, listed in enumerate(("0-3,8-11", "0-3,8-11", "4-7,12-15")):
        put(root / f"sys/bus/pci/devices/0000:{7 + minor:02x}:00.0/local_cpulist", f"{listed}\n")
    machine = inventory.read(4, {}, root)
    found = inventory.processors(machine, set(range(8)), root)
    assert found == {0: (0, 1, 2, 3), 1: (0, 1, 2, 3), 2: (4, 5, 6, 7)}, "nothing is known of the last one"
    assert capsys.readouterr().out.splitlines()[-1] == "device 2: its worker runs on CPUs 4-7, near its GPU"
    assert inventory.processors(machine, {0, 1}, root) == {0: (0, 1), 1: (0, 1)}
    assert capsys.readouterr().out == "", "they may use no others anyway"
    shared = inventory.read(8, {"RESIHP_SHARE_GPUS": "1"}, root)
    assert inventory.processors(shared, set(range(8)), root) == {}


def test_a_machine_without_gpus_or_any_of_these_files_tells_its_kernel(tmp_path: Path) -> None:
    assert inventory.read(8, {}, tmp_path) == NodeInventory(kernel=os.uname().release)


def test_other_spellings(root: Path) -> None:
    put(root / "proc/driver/nvidia/version", OPEN_VERSION)
    put(root / "etc/os-release", "NAME='Debian GNU/Linux'\n# PRETTY_NAME=no\nVERSION=12\n")
    put(root / "sys/class/dmi/id/product_serial", "To Be Filled By O.E.M.\n")
    found = inventory.read(1, {}, root)
    assert (found.driver, found.image, found.serial) == ("560.35.03", "Debian GNU/Linux 12", "")


def test_a_gpu_that_was_not_used_yet_tells_no_uuid(root: Path) -> None:
    gpu(root, 0, uuid="GPU-????????-????-????-????-????????????")
    assert numbers(root) == ["-", "1", "2", "3"]


def test_gpus_that_nobody_can_open_are_not_counted(root: Path) -> None:
    gpu(root, 0, excluded="Yes")
    (root / "dev/nvidia2").unlink()
    assert numbers(root, 2) == ["1", "3"]


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, ["3", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "3, 1"}, ["3", "1"]),
        ({"CUDA_VISIBLE_DEVICES": f"{uuid(2)},GPU-8f1f0000"}, ["2", "0"]),
        ({"CUDA_VISIBLE_DEVICES": "2,7,1"}, ["2", "-"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["-", "-"]),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ["-", "-"]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-8f1f0000-0000-4000-8000-000000000000"}, ["-", "-"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8f1f"}, ["-", "-"]),
        ({"SLURM_STEP_GPUS": "2,3"}, ["2", "3"]),
        ({"SLURM_STEP_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0,1"}, ["2", "3"]),  # other devices are kept from it
        ({"SLURM_STEP_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"}, ["2", "3"]),  # and here they are not
        ({"SLURM_STEP_GPUS": "1,2,3", "CUDA_VISIBLE_DEVICES": "1,2"}, ["-", "-"]),  # that may be either
        ({"SLURM_STEP_GPUS": "1,2", "CUDA_VISIBLE_DEVICES": uuid(2)}, ["2", "-"]),
        ({"SLURM_STEP_GPUS": "2,9"}, ["-", "-"]),
        ({"SLURM_STEP_GPUS": "0,mig"}, ["-", "-"]),
        ({"RESIHP_SHARE_GPUS": "1", "CUDA_VISIBLE_DEVICES": "3"}, ["3", "3"]),
    ],
    ids=str,
)
def test_devices_are_numbered_as_the_workers_number_them(
    root: Path, environment: dict[str, str], told: list[str]
) -> None:
    assert numbers(root, 2, **environment) == told


def test_where_device_files_and_addresses_disagree_slurms_numbers_tell_nothing(root: Path) -> None:
    for minor in range(4):  # as on a DGX A100
        gpu(root, minor, bus=7 + (minor + 2) % 4)
    assert numbers(root) == ["2", "3", "0", "1"]
    assert numbers(root, 2, SLURM_STEP_GPUS="0,1") == ["-", "-"]


def test_gpus_of_several_kinds_are_told_apart_only_in_order_of_their_addresses(root: Path) -> None:
    gpu(root, 3, model="NVIDIA T4")
    assert numbers(root) == ["-"] * 4
    assert {each.name for each in inventory.read(4, {}, root).devices} == {""}
    assert numbers(root, CUDA_DEVICE_ORDER="PCI_BUS_ID") == ["0", "1", "2", "3"]


def test_what_cannot_be_read_is_empty(root: Path) -> None:
    for name in ("sys/class/dmi/id/product_serial", "etc/os-release", "sys/class/infiniband/mlx5_0/fw_ver"):
        (root / name).unlink()
        (root / name).mkdir()  # read by nobody, not even by root
    (root / "proc/driver/nvidia/version").unlink()
    found = inventory.read(1, {}, root)
    assert (found.serial, found.image, found.driver) == ("", "", "")
    assert found.nic_firmware == (("mlx5_1", "28.39.1002"),)
    assert found.devices[0].uuid == uuid(0)


@given(st.binary(max_size=300), st.integers(0, 9))
def test_whatever_files_hold_it_can_be_told(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, times: int
) -> None:
    root = tmp_path_factory.mktemp("machine")
    for name in (
        *("sys/class/dmi/id/product_serial", "etc/os-release", "proc/driver/nvidia/version"),
        *("sys/class/infiniband/x/fw_ver", "proc/driver/nvidia/gpus/0000:07:00.0/information"),
    ):
        put(root / name, b'NAME="' * (times % 2) + b"Model: " * (times % 3) + content * 4**times)
    found = inventory.read(2, {}, root)
    join = m.Join(node="n1", host="h", pid=1, devices=2, epoch=0, machine=found)
    assert decode(msgspec.msgpack.Decoder(m.Join), encode(join)) == join


@pytest.mark.parametrize(
    "machine",
    [
        NodeInventory(serial="x" * (MAX_TEXT_CHARS + 1)),
        NodeInventory(nic_firmware=(("mlx5_0", "1"),) * 65),
        NodeInventory(devices=(DeviceInventory(device=0, uuid="x" * 1000),)),
        NodeInventory(devices=(DeviceInventory(device=1 << 40),)),
        NodeInventory(devices=tuple(DeviceInventory(device=i % 8) for i in range(2000))),
    ],
    ids=["text", "adapters", "uuid", "number", "devices"],
)
def test_what_is_too_much_is_no_message(machine: NodeInventory) -> None:
    join = m.Join(node="n1", host="h", pid=1, devices=2, epoch=0, machine=machine)
    with pytest.raises(ProtocolError, match="malformed message"):
        decode(msgspec.msgpack.Decoder(m.Join), encode(join))
