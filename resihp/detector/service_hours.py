"""Adds up the hours that nodes and devices were in service, in windows of the last 30, 90 and 180 days. Pure.

Service before a repair, or after the present, is left out. Never counts failures. Called by `resihp.detector.lemons`,
which gets the periods of service from its callers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from resihp.detector.excess import Floats, Whole

DAY_S = 86_400.0

WINDOW_ERROR_SHARES: Mapping[int, float] = {30: 0.04, 90: 0.06, 180: 0.9}
"""Length of each window in days, and its share of the accepted error probability. The longest window finds most nodes
that were lemons from the start; a node that became a lemon recently stands out in a short window even with a small
share."""


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """A period in which consecutive devices of a node were in service."""

    node: str
    since: float
    """Beginning of the period, in seconds since 1970, like `until`."""
    until: float
    devices: int = 1
    """Number of devices in service."""
    first: int | None = None
    """Number of the first of these devices; None: device 0, and the node had no other devices in service."""


class Served(msgspec.Struct):
    """Periods of service as arrays, sorted by node; each node is a row.

    `rows`: the node's row for each service; services of row i are those from `first[i]` to `first[i + 1]`. `since`,
    `until`: limits of each service, cut to the period that counts. `devices`: number of devices of each service;
    `lowest`: number of the first of them. `hours`: device-hours, (nodes, windows). `wall`: hours, (nodes, windows),
    that each of a node's devices below number `fewest` was in service, whether or not it was replaced since.
    """

    rows: Whole
    first: Whole
    since: Floats
    until: Floats
    devices: Floats
    lowest: Floats
    hours: Floats
    wall: Floats
    fewest: Floats


def part(node: str, device: int) -> str:
    """Return the name of a device as a key of `mended` and `fresh`, which hold repaired nodes and devices."""
    return f"{node}:{device}"


def served_by_node(services: Sequence[Service], names: Sequence[str], now: float, fresh: Mapping[str, float]) -> Served:
    """Return the services of the nodes `names` as arrays, without service before a repair or after `now`.

    `fresh`: time of the repair or replacement of a node or of a device (named by `part`).
    """
    row = {name: i for i, name in enumerate(names)}
    node_rows = np.array([row[service.node] for service in services], dtype=np.intp)
    numbers = [
        (service.since, service.until, service.devices, -1 if service.first is None else service.first)
        for service in services
    ]
    given = np.array(numbers, dtype=np.float64).reshape(-1, 4)
    order = np.lexsort((*given.T, node_rows))
    node_rows, (since, until, devices, lowest) = node_rows[order], given[order].T
    renewed = np.array([fresh.get(name, -np.inf) for name in names], dtype=np.float64)
    since, until = np.maximum(since, renewed[node_rows]), np.minimum(until, now)
    over = overlap_h(since, until, now)
    wall, hours = np.zeros((2, len(names), len(WINDOW_ERROR_SHARES)))
    fewest = np.full(len(names), np.inf)
    np.add.at(wall, node_rows, over)
    np.add.at(hours, node_rows, devices[:, None] * over)
    np.minimum.at(fewest, node_rows, np.where(lowest < 0.0, devices, 0.0))
    served = Served(
        rows=node_rows,
        first=np.searchsorted(node_rows, np.arange(len(names) + 1)),
        since=since,
        until=np.maximum(since, until),
        devices=devices,
        lowest=np.maximum(lowest, 0.0),
        hours=hours,
        wall=wall,
        fewest=fewest,
    )
    for name, at in fresh.items():
        node, _, device = name.rpartition(":")
        if node in row and device.isdecimal():  # remove the service before the device was replaced
            hours[row[node]] -= hours_of_device(served, row[node], int(device), now, until=at)
    np.maximum(hours, 0.0, out=hours)
    return served


def hours_of_device(
    served: Served, row: int, device: int, now: float, since: float = -np.inf, until: float = np.inf
) -> Floats:
    """Return the hours, (windows,), that `device` of the node in `row` was in service between `since` and `until`."""
    own = slice(served.first[row], served.first[row + 1])
    number = device - served.lowest[own]
    in_service = (number >= 0.0) & (number < served.devices[own])
    begun, over = served.since[own][in_service], served.until[own][in_service]
    hours = overlap_h(np.maximum(begun, since), np.minimum(over, until), now).sum(axis=0)
    return np.asarray(hours, dtype=np.float64)


def overlap_h(since: Floats, until: Floats, now: float) -> Floats:
    """Return the hours of each period from `since` to `until` that lie in each window, (n, windows)."""
    starts = now - DAY_S * np.array(list(WINDOW_ERROR_SHARES), dtype=np.float64)
    return np.asarray(np.maximum(until[:, None] - np.maximum(since[:, None], starts), 0.0) / 3600.0, dtype=np.float64)
