"""A layout as JSON, the LAYOUT of interface.md, and back. Pure."""

from __future__ import annotations

import json
from typing import Any

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
    """Raises KeyError, TypeError or ValueError if `text` is no LAYOUT."""
    plain = json.loads(text)
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
