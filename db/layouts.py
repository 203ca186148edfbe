"""Conversion of a layout to and from JSON, in the form LAYOUT of interface.md. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from resihp.errors import LedgerError
from resihp.parallelism.layout import Layout, Replica, Stage


def to_plain(layout: Layout, mirrors: Sequence[int] = ()) -> dict[str, Any]:
    """Return `{"replicas": [[{"ranks": [..], "layers": [first, last]}]], "standby": [..]}`.

    A stage that does not have exactly one chunk of layers has the key `chunks` instead of `layers`. The key `mirrors`,
    the indices of replicas that are mirrors (`Plan.mirrors`), is present only if there are mirrors.
    """
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
        **({"mirrors": list(mirrors)} if mirrors else {}),
    }


def to_json(layout: Layout, mirrors: Sequence[int] = ()) -> str:
    """Return the result of `to_plain` as JSON text."""
    return json.dumps(to_plain(layout, mirrors), separators=(",", ":"))


def from_json(text: str) -> Layout:
    """Parse a LAYOUT. Raises LedgerError if `text` is not a LAYOUT, as in imported rows, which may be malformed."""
    try:
        return _from_plain(json.loads(text))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise LedgerError(f"ledger: a plan's layout cannot be read: {error}; import the job again") from error


class _Stage(msgspec.Struct):
    ranks: frozenset[int]


class _Ranks(msgspec.Struct):
    replicas: list[list[_Stage]]
    standby: frozenset[int]
    mirrors: frozenset[int] = frozenset()


def ranks_of(text: str) -> tuple[frozenset[int], frozenset[int], frozenset[int]]:
    """Return the ranks that compute, those on standby, and those of mirrors. Much faster than `from_json`. Raises
    LedgerError if `text` is not a LAYOUT."""
    try:
        ranks_in_layout = msgspec.json.decode(text, type=_Ranks)
    except (msgspec.DecodeError, RecursionError, TypeError) as error:
        raise LedgerError(f"ledger: a plan's layout cannot be read: {error}; import the job again") from error
    ranks: dict[bool, set[int]] = {False: set(), True: set()}
    for d, replica in enumerate(ranks_in_layout.replicas):
        ranks[d in ranks_in_layout.mirrors].update(*(stage.ranks for stage in replica))
    return frozenset(ranks[False]), ranks_in_layout.standby, frozenset(ranks[True])


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
