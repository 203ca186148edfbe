"""Attributes past failures and service to the present place of each device, after moves, swaps and repairs. Pure.

`lemons` counts by node and device number. A device with a known UUID takes its record along when it moves: its failures
count at its present node and device number. If a device is no longer on any node, its record is dropped. The record of
its replacement begins anew, even if the UUID of the replaced device is unknown. The record of a repaired node or device
begins anew (`Renewal`), and so does the record of a node name that was given to another machine; devices with a known
UUID that came along keep their records.

Never judges a node. Called by `resihp.db.reading` before `lemons.node_health`. Times in seconds since 1970.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from resihp.detector.lemons import NodeFailure
from resihp.detector.service_hours import Service

START_OF_TIME, END_OF_TIME = float("-inf"), float("inf")
Slot = tuple[str, int]


class SeenDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A sighting of a device: from `since` on, the device `uuid` had number `device` on `node`."""

    node: str
    device: int
    uuid: str
    since: float
    bus: str = ""
    """PCI address of the device on the node; empty if unknown."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A sighting of a machine: from `since` on, the machine with serial number `serial` had the name `node`."""

    node: str
    serial: str
    since: float


class Renewal(msgspec.Struct, frozen=True, kw_only=True):
    """A repair or replacement of a node or device at time `since`; the earlier record no longer counts.

    A device is given by `uuid`, or by its number `device` on `node`; without both, the whole node is meant. `kind`:
    "mended": the node or device was repaired, and its record begins anew wherever it goes. "replaced": the node or
    device at this place was replaced; a device that moved elsewhere keeps its record. "machine": the node name was
    given to another machine.
    """

    node: str
    since: float
    uuid: str | None = None
    device: int | None = None
    kind: Literal["mended", "replaced", "machine"] = "mended"


@dataclass
class _Occupancy:
    """Devices in one slot of a node over time: `uuids[i]` from time `since[i]` on, None for an unknown or no device.

    The first entry begins at `START_OF_TIME`.
    """

    since: list[float] = field(default_factory=lambda: [START_OF_TIME])
    uuids: list[str | None] = field(default_factory=lambda: [None])


class _Places:
    """Past and present slots of all devices.

    Nodes on which device numbers change from job to job are left out; numbers change if jobs share a node.
    """

    def __init__(self, placements: Iterable[SeenDevice]) -> None:
        self._stays: dict[str, list[SeenDevice]] = {}
        slots: dict[Slot, list[SeenDevice]] = {}
        all_sightings = sorted(
            placements, key=lambda sighting: (sighting.since, sighting.node, sighting.device, sighting.uuid)
        )
        buses: dict[Slot, str] = {}
        renumbered = {
            sighting.node
            for sighting in all_sightings
            if sighting.bus and buses.setdefault((sighting.node, sighting.device), sighting.bus) != sighting.bus
        }
        for sighting in all_sightings:
            if sighting.node not in renumbered:
                slots.setdefault((sighting.node, sighting.device), []).append(sighting)
                self._stays.setdefault(sighting.uuid, []).append(sighting)
        self._last = {slot: sightings[-1].uuid for slot, sightings in slots.items()}
        self._slots = {slot: self._occupancy(slot, sightings) for slot, sightings in slots.items()}
        moved = {slot[0] for slot, sightings in slots.items() if len({sighting.uuid for sighting in sightings}) > 1}
        moved |= {sighting.node for stays in self._stays.values() if len(_slots_of(stays)) > 1 for sighting in stays}
        self.moved = moved
        """Names of nodes that a device came to or left."""

    def _occupancy(self, slot: Slot, sightings: Sequence[SeenDevice]) -> _Occupancy:
        first = sightings[0]
        occupancy = _Occupancy()
        if self._stays[first.uuid][0] is first:  # never seen elsewhere before: it was here before its first sighting
            occupancy.uuids[0] = first.uuid
        for i, sighting in enumerate(sightings):
            following = sightings[i + 1].since if i + 1 < len(sightings) else END_OF_TIME
            _add(occupancy, sighting.since, sighting.uuid)
            elsewhere = (later.since for later in self._stays[sighting.uuid] if later.since > sighting.since)
            departure = min((at for at in elsewhere if at < following), default=None)
            if departure is not None:
                _add(occupancy, departure, None)
        return occupancy

    def nodes_of(self, uuid: str) -> set[str]:
        return {sighting.node for sighting in self._stays.get(uuid, ())}

    def occupancy_of(self, slot: Slot) -> _Occupancy:
        return self._slots.get(slot) or _Occupancy()

    def now(self, slot: Slot, i: int) -> Slot | None:
        """Return the present slot of the i-th device in `slot`'s history; None if the device is on no node any more.

        An unknown device is in the slot if it is the last one there; otherwise the result is None.
        """
        occupancy = self.occupancy_of(slot)
        uuid = occupancy.uuids[i]
        if uuid is None:
            return slot if i + 1 == len(occupancy.uuids) else None
        last = self._stays[uuid][-1]
        place = (last.node, last.device)
        return place if self._last[place] == uuid else None


def _slots_of(stays: Iterable[SeenDevice]) -> set[Slot]:
    return {(sighting.node, sighting.device) for sighting in stays}


def _add(occupancy: _Occupancy, since: float, uuid: str | None) -> None:
    if occupancy.uuids[-1] != uuid:
        occupancy.since.append(since)
        occupancy.uuids.append(uuid)


class _Renewals:
    def __init__(self, renewals: Iterable[Renewal]) -> None:
        self.of_nodes: dict[str, list[Renewal]] = {}
        self.of_devices: dict[str, list[Renewal]] = {}
        for renewal in renewals:
            if renewal.uuid is None:
                self.of_nodes.setdefault(renewal.node, []).append(renewal)
            else:
                self.of_devices.setdefault(renewal.uuid, []).append(renewal)

    def since(self, node: str, device: int | None, uuid: str | None, place: str) -> float:
        """Return the time from which the record of a node or device counts; it was on `node` and is on node `place`
        now."""
        start = START_OF_TIME
        for renewal in self.of_nodes.get(node, ()):
            stays = {"mended": False, "replaced": uuid is not None and place != node, "machine": uuid is not None}
            if renewal.device in (None, device) and not stays[renewal.kind]:
                start = max(start, renewal.since)
        for renewal in self.of_devices.get(uuid, ()) if uuid is not None else ():
            if renewal.kind == "mended" or place == renewal.node:
                start = max(start, renewal.since)
        return start


def follow(
    verdicts: Iterable[NodeFailure],
    services: Iterable[Service],
    placements: Iterable[SeenDevice] = (),
    renewals: Iterable[Renewal] = (),
    machines: Iterable[Machine] = (),
) -> tuple[list[NodeFailure], list[Service]]:
    """Return the verdicts and services that still count, with the present node and number of each device."""
    places, fresh = _Places(placements), _Renewals([*renewals, *_renamed(machines)])
    touched = places.moved | fresh.of_nodes.keys()
    for uuid in fresh.of_devices:
        touched |= places.nodes_of(uuid)
    verdicts_now = []
    for verdict in verdicts:
        current = verdict if verdict.node not in touched else _now(verdict, places, fresh)
        verdicts_now += [] if current is None else [current]
    served: list[Service] = []
    for service in services:
        served += [service] if service.node not in touched else _pieces(service, places, fresh)
    return verdicts_now, served


def _renamed(machines: Iterable[Machine]) -> Iterable[Renewal]:
    serials: dict[str, str] = {}
    for machine in sorted(machines, key=lambda machine: (machine.since, machine.node)):
        if serials.setdefault(machine.node, machine.serial) != machine.serial:
            yield Renewal(node=machine.node, since=machine.since, kind="machine")
        serials[machine.node] = machine.serial


def _now(verdict: NodeFailure, places: _Places, fresh: _Renewals) -> NodeFailure | None:
    """Return the verdict with the present node and number of its device; None if the verdict no longer counts."""
    if verdict.device is None:
        return verdict if verdict.at >= fresh.since(verdict.node, None, None, verdict.node) else None
    slot = (verdict.node, verdict.device)
    occupancy = places.occupancy_of(slot)
    i = bisect_right(occupancy.since, verdict.at) - 1
    place = places.now(slot, i)
    if place is None or verdict.at < fresh.since(*slot, occupancy.uuids[i], place[0]):
        return None
    if place == slot:
        return verdict
    cause = f"{verdict.cause} (on {verdict.node} device {verdict.device}, where the device was then)"
    return msgspec.structs.replace(verdict, node=place[0], device=place[1], cause=cause)


def _pieces(service: Service, places: _Places, fresh: _Renewals) -> list[Service]:
    """Return the part of a service that still counts, with the present place of each device.

    Neighbouring devices with the same period are joined into one service.
    """
    pieces: list[Service] = []
    for device in range(service.devices):
        slot = (service.node, device)
        occupancy = places.occupancy_of(slot)
        for i, begin in enumerate(occupancy.since):
            end = occupancy.since[i + 1] if i + 1 < len(occupancy.since) else END_OF_TIME
            place = places.now(slot, i)
            if place is None:
                continue
            renewed = fresh.since(*slot, occupancy.uuids[i], place[0])
            since, until = max(service.since, begin, renewed), min(service.until, end)
            if since < until:
                pieces.append(Service(node=place[0], first=place[1], devices=1, since=since, until=until))
    joined: list[Service] = []
    for piece in sorted(pieces, key=lambda piece: (piece.node, piece.since, piece.until, piece.first or 0)):
        last = joined[-1] if joined else None
        if last is not None and _adjoin(last, piece):
            joined[-1] = msgspec.structs.replace(last, devices=last.devices + 1)
        else:
            joined.append(piece)
    if not any(piece.node == service.node for piece in joined):  # keep the node listed, with a service of zero length
        joined.append(msgspec.structs.replace(service, since=service.until))
    whole = msgspec.structs.replace(service, first=0)
    return [service] if joined == [whole] else joined


def _adjoin(last: Service, piece: Service) -> bool:
    together = (last.node, last.since, last.until) == (piece.node, piece.since, piece.until)
    return together and piece.first == (last.first or 0) + last.devices
