"""Reservations as `scontrol show reservation --oneliner` prints them: recorded outputs, and damaged ones."""

from __future__ import annotations

import pytest

from resihp.slurm.client import Reservation
from resihp.slurm.errors import SlurmOutputError
from resihp.slurm.parsing.reservations import reservations

TAIL = "Users=root Groups=(null) Accounts=(null) Licenses=(null) State=INACTIVE BurstBuffer=(null)"
RECORDED = {
    "22.05": f"""ReservationName=maint1 StartTime=1795851309 EndTime=1795854909 Duration=01:00:00 Nodes=n[2-3] \
NodeCnt=2 CoreCnt=32 Features=(null) PartitionName=(null) Flags=MAINT,IGNORE_JOBS,SPEC_NODES TRES=cpu=32 {TAIL} \
Watts=n/a MaxStartDelay=(null)
ReservationName=root_2 StartTime=1795862109 EndTime=1795865709 Duration=01:00:00 Nodes=n[1-4] NodeCnt=4 CoreCnt=64 \
Features=(null) PartitionName=(null) Flags=MAINT,SPEC_NODES,ALL_NODES TRES=cpu=64 {TAIL} Watts=n/a MaxStartDelay=(null)
ReservationName=class StartTime=1795847709 EndTime=1795851309 Duration=01:00:00 Nodes=n1 NodeCnt=1 CoreCnt=16 \
Features=(null) PartitionName=main Flags=DAILY TRES=cpu=16 {TAIL} Watts=n/a MaxStartDelay=(null)

""",
    "24.11": f"""ReservationName=maint1 StartTime=1795851309 EndTime=1795854909 Duration=01:00:00 Nodes=n[2-3] \
NodeCnt=2 CoreCnt=32 Features=(null) PartitionName=(null) Flags=MAINT,IGNORE_JOBS,SPEC_NODES TRES=cpu=32 {TAIL} \
MaxStartDelay=(null)
ReservationName=root_2 StartTime=1795862109 EndTime=1795865709 Duration=01:00:00 Nodes=n[1-4] NodeCnt=4 CoreCnt=64 \
Features=(null) PartitionName=(null) Flags=MAINT,SPEC_NODES,ALL_NODES TRES=cpu=64 {TAIL} MaxStartDelay=(null)
ReservationName=class StartTime=1795847709 EndTime=1795851309 Duration=01:00:00 Nodes=n1 NodeCnt=1 CoreCnt=16 \
Features=(null) PartitionName=main Flags=DAILY TRES=cpu=16 {TAIL} MaxStartDelay=(null)

""",
}
MAINTENANCE = Reservation(
    name="maint1",
    begins_at=1795851309.0,
    ends_at=1795854909.0,
    flags=frozenset({"MAINT", "IGNORE_JOBS", "SPEC_NODES"}),
)


@pytest.mark.parametrize("release", RECORDED)
def test_what_slurm_prints(release: str) -> None:
    (first, first_nodes), second, (third, third_nodes) = reservations(RECORDED[release].encode())
    assert (first, first_nodes) == (MAINTENANCE, "n[2-3]")
    assert (second[0].name, second[1]) == ("root_2", "n[1-4]")
    assert (third.name, third.flags, third_nodes) == ("class", frozenset({"DAILY"}), "n1")


def test_no_reservations() -> None:
    assert reservations(b"No reservations in the system\n") == []
    assert reservations(b"") == []


def test_a_reservation_of_licenses_has_no_nodes() -> None:
    line = b"ReservationName=lic StartTime=1795851309 EndTime=1795854909 Nodes=(null) NodeCnt=0 Flags=ANY_NODES"
    assert [nodelist for _, nodelist in reservations(line)] == [""]


@pytest.mark.parametrize(
    "line",
    [
        "ReservationName=x",
        "ReservationName=x StartTime=2026-11-28T07:00:00 EndTime=1795854909 Nodes=n1",
        "ReservationName=x StartTime=1795851309 EndTime=1795854909 Nodes=$(id)",
        "ReservationName=x\x1b[2J StartTime=1795851309 EndTime=1795854909 Nodes=n1",
        "slurm_load_reservations error",
    ],
)
def test_what_cannot_be_read_does_not_affect_the_others(line: str) -> None:
    with pytest.raises(SlurmOutputError):
        reservations(line.encode())
    good = RECORDED["22.05"].splitlines()[0]
    assert [view for view, _ in reservations(f"{line}\n{good}\n".encode())] == [MAINTENANCE]
