"""A layout as JSON, the LAYOUT of interface.md, and back. Pure."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from resihp.errors import LedgerError
from resihp.parallelism.layout import Layout, Replica, Stage


def to_plain(layout: Layout) -> dict[str, Any]:
    """`{"replicas": [[{"ranks": [..], "layers": [first, last]}]], "standby": [..]}`; `chunks` where not exactly one."""
    return {
        "replicas": [
            [
                {"ranks": list(stage.ranks), "layers": list(stage.chunks[0])}
                if len(stage.chunks) == 1
                else {"ranks": list(stage.ranks), "chunks": [list(chunk) for chunk in stage.chunks]}
                for stage in replica.stages
            ]
            for replica in layout.replicas
        ],
        "standby": list(layout.standby),
    }


def to_json(layout: Layout) -> str:
    return json.dumps(to_plain(layout), separators=(",", ":"))


def from_json(text: str) -> Layout:
    """Raises LedgerError if `text` is no LAYOUT: what was imported may hold anything."""
    try:
        return _from_plain(json.loads(text))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise LedgerError(f"ledger: a plan's layout is none: {error}; import the job again") from error


class _Stage(msgspec.Struct):
    ranks: frozenset[int]


class _Ranks(msgspec.Struct):
    replicas: list[list[_Stage]]
    standby: frozenset[int]


def ranks_of(text: str) -> tuple[frozenset[int], frozenset[int]]:
    """Ranks that work, and those that stand by: much sooner than all of a layout. Raises LedgerError as `from_json`."""
    try:
        found = msgspec.json.decode(text, type=_Ranks)
    except (msgspec.DecodeError, RecursionError) as error:
        raise LedgerError(f"ledger: a plan's layout is none: {error}; import the job again") from error
    return frozenset().union(*(stage.ranks for replica in found.replicas for stage in replica)), found.standby


def _from_plain(plain: dict[str, Any]) -> Layout:
    return Layout(
        replicas=tuple(
            Replica(
                stages=tuple(
                    Stage(
                        ranks=tuple(stage["ranks"]),
                        chunks=tuple((first, last) for first, last in stage.get("chunks") or [stage["layers"]]),
                    )
                    for stage in replica
                )
            )
            for replica in plain["replicas"]
        ),
        standby=tuple(plain["standby"]),
    )
