"""Follows failures and service to the place where a device is now, after moves, swaps and repairs. Pure.

`lemons` counts by node and device number. A device with a known UUID takes its record along: its failures count where
it is now, under the number that it has there. The record of a device that is no longer anywhere is dropped, and its
replacement begins anew, even if the predecessor is unknown. A repaired part begins anew (`Renewal`). So does a node
name that was given to other hardware; devices with a known UUID that came along keep their record.

Called by `db.reading` before `lemons.node_health`. Times in seconds since 1970.
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
    """A sighting: from `since` on, this device had that number on the node, and `bus` as its address there."""

    node: str
    device: int
    uuid: str
    since: float
    bus: str = ""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """From `since` on, this machine was seen under that node name."""

    node: str
    serial: str
    since: float


class Renewal(msgspec.Struct, frozen=True, kw_only=True):
    """The record before `since` no longer counts: of a node, or of a device, given by its UUID or its number there.

    `mended`: for the part that is named, wherever it goes. `replaced`: for the place; a device that has left it keeps
    its record. `machine`: the node name was given to other hardware.
    """

    node: str
    since: float
    uuid: str | None = None
    device: int | None = None
    kind: Literal["mended", "replaced", "machine"] = "mended"


@dataclass
class _Occupancy:
    """Occupants of a slot: `uuids[i]` from `since[i]` on, None if unknown. The first entry has no beginning."""

    since: list[float] = field(default_factory=lambda: [START_OF_TIME])
    uuids: list[str | None] = field(default_factory=lambda: [None])


class _Places:
    """Past and present places of devices. Nodes whose device numbers change from job to job are left out; that happens
    where jobs share a node."""

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
        """Return the present place of a slot's i-th occupant; None if it is nowhere, or if the occupant is unknown."""
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
        """Return the time from which the record counts for a part that was at `node` and is at node `place` now."""
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
    """Return the verdicts and services that still count, each with the present place of its node or device."""
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
    """Return the verdict with its present place; None if it no longer counts."""
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
    """Return the service of each device as far as it counts; devices that stayed together stay in one piece."""
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
