"""Trouble that was over again is told as such, if a later line says so of the same port, server or disk."""

from __future__ import annotations

import pytest

from resihp.detector.diagnosis.clues import read_log
from tests.resihp.detector.lines import EXAMPLES

PAIRS = [
    pair.split("\n") for kind in ("link recovered", "storage recovered", "pcie recovered") for pair in EXAMPLES[kind]
]
OTHERS = [
    ("bnxt_en 0000:5e:00.0 eth0: NIC Link is Down", "bnxt_en 0000:5f:00.0 eth1: NIC Link is Up, 1000 Mbps full duplex"),
    ("mlx5_core 0000:5e:00.0 ens1f0: Link down", "mlx5_core 0000:5f:00.0 ens2f0: Link up"),
    ("mlx5_core 0000:5e:00.0: Port module event: module 0, Cable unplugged", "mlx5_core 0000:5f:00.0 ens2f0: Link up"),
    (
        "bond0: (slave eth0): link status definitely down, disabling slave",
        "bond0: (slave eth1): link status definitely up",
    ),
    ("nfs: server fs1 not responding, still trying", "nfs: server fs2 OK"),
    (
        "LustreError: 11-0: scratch-OST0004-osc-ffff9: operation ost_read to node 10.0.0.4@o2ib failed: rc = -107",
        "Lustre: scratch-OST0005-osc-ffff9: Connection restored to 10.0.0.5@o2ib (at 10.0.0.5@o2ib)",
    ),
    ("nvme nvme0: controller is down; will reset: CSTS=0x3", "nvme nvme1: 16/0/0 default/read/poll queues"),
    (
        "NCCL WARN NET/IB : mlx5_0:1 Got non-fatal async event: port error(10)",
        "NCCL WARN NET/IB : mlx5_1:1 Got non-fatal async event: port active(9)",
    ),
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0][:60])
def test_only_what_comes_later_counts(pair: list[str]) -> None:
    down, up = pair[0], pair[-1]
    [kind] = {clue.kind for clue in read_log(f"{down}\niteration 17\n{up}")}
    assert kind.endswith(" recovered")
    assert not any(clue.kind == kind for clue in read_log(f"{up}\niteration 17\n{down}"))
    again = [clue.kind for clue in read_log(f"{down}\n{up}\n{down}")]
    assert again[0] == kind
    assert again[-1] != kind


@pytest.mark.parametrize(("down", "up"), OTHERS, ids=lambda line: line[:40])
def test_another_part_that_works_says_nothing(down: str, up: str) -> None:
    assert [clue.kind for clue in read_log(f"{down}\n{up}")] == [clue.kind for clue in read_log(down)]
