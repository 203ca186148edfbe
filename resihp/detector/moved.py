"""Whose failures and service are whose, once devices were moved, swapped or repaired. Pure.

`lemons` counts by node and number of device. A device that is known by its UUID takes its record along: what it did
counts where it is now, at the number that it has there. One that is nowhere any more counts for nobody, and what comes
into its place begins anew, also where its predecessor is not known. What was repaired begins anew (`Renewal`), and so
does a node whose name other hardware has got: then devices that are known by their UUID and came along keep theirs.

Called by `db.reading` before `lemons.node_health`. Times in seconds since 1970.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from resihp.detector.lemons import NodeFailure, Service

ALWAYS, NEVER = float("-inf"), float("inf")
Slot = tuple[str, int]


class SeenDevice(msgspec.Struct, frozen=True, kw_only=True):
    """From `since` on, this device was seen at that number of the node, and at `bus`, its address there."""

    node: str
    device: int
    uuid: str
    since: float
    bus: str = ""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """From `since` on, this machine was seen under that name."""

    node: str
    serial: str
    since: float


class Renewal(msgspec.Struct, frozen=True, kw_only=True):
    """What happened before `since` says nothing any more: of a node, of a device by its UUID, or by its number there.

    `mended`: of whatever was meant. `replaced`: of the place; a device that has left it keeps its record. `machine`:
    the name was given to other hardware.
    """

    node: str
    since: float
    uuid: str | None = None
    device: int | None = None
    kind: Literal["mended", "replaced", "machine"] = "mended"


@dataclass
class _Occupancy:
    """Who was in a slot: `uuids[i]` from `since[i]` on, None where nobody knows. The first is from ever on."""

    since: list[float] = field(default_factory=lambda: [ALWAYS])
    uuids: list[str | None] = field(default_factory=lambda: [None])


class _Places:
    """Where devices were, and are; nothing of nodes that number them otherwise from job to job, as where jobs share a
    node."""

    def __init__(self, placements: Iterable[SeenDevice]) -> None:
        self._stays: dict[str, list[SeenDevice]] = {}
        slots: dict[Slot, list[SeenDevice]] = {}
        given = sorted(placements, key=lambda one: (one.since, one.node, one.device, one.uuid))
        buses: dict[Slot, str] = {}
        renumbered = {
            one.node for one in given if one.bus and buses.setdefault((one.node, one.device), one.bus) != one.bus
        }
        for one in given:
            if one.node not in renumbered:
                slots.setdefault((one.node, one.device), []).append(one)
                self._stays.setdefault(one.uuid, []).append(one)
        self._last = {slot: seen[-1].uuid for slot, seen in slots.items()}
        self._slots = {slot: self._occupancy(slot, seen) for slot, seen in slots.items()}
        moved = {slot[0] for slot, seen in slots.items() if len({one.uuid for one in seen}) > 1}
        moved |= {one.node for stays in self._stays.values() if len(_slots_of(stays)) > 1 for one in stays}
        self.moved = moved
        """Names of nodes where something came or went."""

    def _occupancy(self, slot: Slot, seen: Sequence[SeenDevice]) -> _Occupancy:
        first = seen[0]
        found = _Occupancy()
        if self._stays[first.uuid][0] is first:  # it was nowhere else before: it was here before it was seen
            found.uuids[0] = first.uuid
        for i, one in enumerate(seen):
            following = seen[i + 1].since if i + 1 < len(seen) else NEVER
            _add(found, one.since, one.uuid)
            elsewhere = (each.since for each in self._stays[one.uuid] if each.since > one.since)
            left = min((at for at in elsewhere if at < following), default=None)
            if left is not None:
                _add(found, left, None)
        return found

    def nodes_of(self, uuid: str) -> set[str]:
        return {one.node for one in self._stays.get(uuid, ())}

    def known(self, slot: Slot) -> _Occupancy:
        return self._slots.get(slot) or _Occupancy()

    def now(self, slot: Slot, i: int) -> Slot | None:
        """Where the i-th occupant of a slot is now; None if it is nowhere, or nobody knows who it was."""
        there = self.known(slot)
        uuid = there.uuids[i]
        if uuid is None:
            return slot if i + 1 == len(there.uuids) else None
        last = self._stays[uuid][-1]
        place = (last.node, last.device)
        return place if self._last[place] == uuid else None


def _slots_of(stays: Iterable[SeenDevice]) -> set[Slot]:
    return {(one.node, one.device) for one in stays}


def _add(found: _Occupancy, since: float, uuid: str | None) -> None:
    if found.uuids[-1] != uuid:
        found.since.append(since)
        found.uuids.append(uuid)


class _Renewals:
    def __init__(self, renewals: Iterable[Renewal]) -> None:
        self.of_nodes: dict[str, list[Renewal]] = {}
        self.of_devices: dict[str, list[Renewal]] = {}
        for one in renewals:
            if one.uuid is None:
                self.of_nodes.setdefault(one.node, []).append(one)
            else:
                self.of_devices.setdefault(one.uuid, []).append(one)

    def since(self, node: str, device: int | None, uuid: str | None, place: str) -> float:
        """From when on the record counts of what was at `node` then and is at node `place` now."""
        found = ALWAYS
        for one in self.of_nodes.get(node, ()):
            stays = {"mended": False, "replaced": uuid is not None and place != node, "machine": uuid is not None}
            if one.device in (None, device) and not stays[one.kind]:
                found = max(found, one.since)
        for one in self.of_devices.get(uuid, ()) if uuid is not None else ():
            if one.kind == "mended" or place == one.node:
                found = max(found, one.since)
        return found


def follow(
    verdicts: Iterable[NodeFailure],
    services: Iterable[Service],
    placements: Iterable[SeenDevice] = (),
    renewals: Iterable[Renewal] = (),
    machines: Iterable[Machine] = (),
) -> tuple[list[NodeFailure], list[Service]]:
    """The same verdicts and services, where what they are about is now; without those that no longer count."""
    places, fresh = _Places(placements), _Renewals([*renewals, *_renamed(machines)])
    touched = places.moved | fresh.of_nodes.keys()
    for uuid in fresh.of_devices:
        touched |= places.nodes_of(uuid)
    found = []
    for verdict in verdicts:
        one = verdict if verdict.node not in touched else _now(verdict, places, fresh)
        found += [] if one is None else [one]
    served: list[Service] = []
    for service in services:
        served += [service] if service.node not in touched else _pieces(service, places, fresh)
    return found, served


def _renamed(machines: Iterable[Machine]) -> Iterable[Renewal]:
    serials: dict[str, str] = {}
    for one in sorted(machines, key=lambda one: (one.since, one.node)):
        if serials.setdefault(one.node, one.serial) != one.serial:
            yield Renewal(node=one.node, since=one.since, kind="machine")
        serials[one.node] = one.serial


def _now(verdict: NodeFailure, places: _Places, fresh: _Renewals) -> NodeFailure | None:
    """None for one that no longer counts."""
    if verdict.device is None:
        return verdict if verdict.at >= fresh.since(verdict.node, None, None, verdict.node) else None
    slot = (verdict.node, verdict.device)
    there = places.known(slot)
    i = bisect_right(there.since, verdict.at) - 1
    place = places.now(slot, i)
    if place is None or verdict.at < fresh.since(*slot, there.uuids[i], place[0]):
        return None
    if place == slot:
        return verdict
    cause = f"{verdict.cause} (on {verdict.node} device {verdict.device}, where the device was then)"
    return msgspec.structs.replace(verdict, node=place[0], device=place[1], cause=cause)


def _pieces(service: Service, places: _Places, fresh: _Renewals) -> list[Service]:
    """What each of its devices served, as far as it counts, those together that stayed together."""
    found: list[Service] = []
    for device in range(service.devices):
        slot = (service.node, device)
        there = places.known(slot)
        for i, begin in enumerate(there.since):
            end = there.since[i + 1] if i + 1 < len(there.since) else NEVER
            place = places.now(slot, i)
            if place is None:
                continue
            renewed = fresh.since(*slot, there.uuids[i], place[0])
            since, until = max(service.since, begin, renewed), min(service.until, end)
            if since < until:
                found.append(Service(node=place[0], first=place[1], devices=1, since=since, until=until))
    joined: list[Service] = []
    for one in sorted(found, key=lambda one: (one.node, one.since, one.until, one.first or 0)):
        last = joined[-1] if joined else None
        if last is not None and _adjoin(last, one):
            joined[-1] = msgspec.structs.replace(last, devices=last.devices + 1)
        else:
            joined.append(one)
    if not any(one.node == service.node for one in joined):  # it is known, though it has served for nothing
        joined.append(msgspec.structs.replace(service, since=service.until))
    whole = msgspec.structs.replace(service, first=0)
    return [service] if joined == [whole] else joined


def _adjoin(last: Service, one: Service) -> bool:
    together = (last.node, last.since, last.until) == (one.node, one.since, one.until)
    return together and one.first == (last.first or 0) + last.devices
