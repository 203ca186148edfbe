"""Derives the dependencies between the operations of a trace, and their durations without waiting. Pure.

Computation follows the order of each rank. A transfer between stages has two ends: the send follows the computation
that produced its data; the receive is launched after the previous computation of its kind, and precedes the computation
that needs the data. The gathering of parameters precedes the first forward pass. The tail of a step (gradient
reduction, clipping, optimizer) follows the last backward pass. Both ends of a transfer, and all participants of a
collective, begin together; their duration without waiting counts from the start of the last one. The rules and optypes
are those of ByteDance's StragglerAnalysis. Called by `resihp.detector.offline.what_if`, which simulates steps; judges
no rank."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pandas as pd

from resihp.detector.offline.traces import OPTYPE_CODES, Floats, Ints, Trace

_TAIL = (
    "gc",
    "layernorm-grads-all-reduce",
    "embedding-grads-all-reduce",
    "grads-reduce-scatter",
    "separate-grads-all-reduce",
    "optimizer-clip-main-grad",
    "optimizer",
)
"""Optypes of the operations after the last backward pass, in their order."""

_F, _B = OPTYPE_CODES["forward-compute"], OPTYPE_CODES["backward-compute"]
_GATHER, _SCATTER, _SEPARATE = (
    OPTYPE_CODES[name] for name in ("params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce")
)
_EMBEDDING, _CLIP = OPTYPE_CODES["embedding-grads-all-reduce"], OPTYPE_CODES["optimizer-clip-main-grad"]
_TRANSFERS = {  # kind of computation, sends?, in which direction of the model its peer lies
    OPTYPE_CODES["forward-send"]: (_F, True, 1),
    OPTYPE_CODES["forward-recv"]: (_F, False, -1),
    OPTYPE_CODES["backward-send"]: (_B, True, -1),
    OPTYPE_CODES["backward-recv"]: (_B, False, 1),
}
_CLOCK_TOLERANCE_S = 5e-5
"""Largest difference, in seconds, between a start and an end that count as equal."""


def dependencies(trace: Trace) -> tuple[Ints, Floats, Ints]:
    """Return the dependencies of a folded trace with n rows, as three arrays.

    Node, (n,): operations with the same node begin together. Seconds, (n,): durations without waiting. Edges, (2, E):
    an operation, and an operation that cannot begin before the end of the first.
    """
    rows = pd.DataFrame(
        {
            "op": np.arange(trace.size),
            "step": trace.step,
            "dp": trace.dp,
            "stage": trace.stage,
            "lane": (trace.step * len(trace.dps) + trace.dp) * len(trace.stages) + trace.stage,
            "kind": trace.kind,
            "sequence": trace.sequence,
            "chunk": trace.chunk,
            "micro_batch": trace.micro_batch,
            "start": trace.start,
            "end": trace.end,
        }
    )
    compute = rows[trace.is_compute]
    transfers = _matched(rows[np.isin(trace.kind, list(_TRANSFERS))], compute)
    edges = [
        _chain(compute),
        *(_chain(rows[trace.kind == code].sort_values(["lane", "sequence"])) for code in _TRANSFERS),
        _handed_on(compute),
        _around_transfers(transfers, compute),
        _gathered(rows, compute),
        _finished(rows, compute),
    ]
    node = _nodes(rows, transfers)
    return node, _transferred(trace, node, transfers), np.concatenate(edges, axis=1)


def _pairs(sources: npt.ArrayLike, targets: npt.ArrayLike) -> Ints:
    return np.stack([np.asarray(sources, dtype=np.int64), np.asarray(targets, dtype=np.int64)])


def _chain(rows: pd.DataFrame) -> Ints:
    """Return edges from each operation to the next one of the same lane. `rows` are ordered by lane."""
    op, lane = rows["op"].to_numpy(), rows["lane"].to_numpy()
    same = lane[1:] == lane[:-1]
    return _pairs(op[:-1][same], op[1:][same])


def _handed_on(compute: pd.DataFrame) -> Ints:
    """Return edges between the chunks of a micro-batch, even if the transfer between them has no rows.

    A forward pass needs that of the previous chunk, a backward pass that of the next chunk.
    """
    keys = ["step", "dp", "kind", "micro_batch", "chunk"]
    source = compute[[*keys, "op"]].copy()
    source["chunk"] += np.where(source["kind"] == _F, 1, -1)
    both = source.merge(compute[[*keys, "op"]], on=keys, suffixes=("_from", "_to"))
    return _pairs(both["op_from"], both["op_to"])


def _matched(transfers: pd.DataFrame, compute: pd.DataFrame) -> pd.DataFrame:
    """Match each transfer with the computation that it serves; add the columns `compute`, `turn` and `idle`.

    The n-th send follows the n-th computation of its kind, and the n-th receive precedes it. Some profilers record
    transfers that were never carried out: at both ends of a step, or where the model begins and ends (`idle`). Others
    omit these.
    """
    last = int(compute["chunk"].max())
    turns = compute.sort_values(["lane", "kind", "sequence"]).copy()
    turns["turn"] = turns.groupby(["lane", "kind"]).cumcount()
    bounds = turns.groupby(["lane", "kind"]).agg(
        computations=("op", "size"), last_start=("start", "max"), first_end=("end", "min")
    )
    matches = []
    for code, (kind, sends, ahead) in _TRANSFERS.items():
        own = transfers[transfers["kind"] == code].sort_values(["lane", "sequence"])
        served = turns[turns["kind"] == kind]
        needed = served[(served["chunk"] + ahead).between(0, last)].copy()
        needed["needed_turn"] = needed.groupby("lane").cumcount()
        limits = bounds.xs(kind, level="kind").reindex(own["lane"]) if len(served) else None
        if limits is None:
            continue
        launched = (
            own["end"].to_numpy() >= limits["first_end"].to_numpy() - _CLOCK_TOLERANCE_S
            if sends
            else own["start"].to_numpy() <= limits["last_start"].to_numpy() + _CLOCK_TOLERANCE_S
        )
        own = own[launched].copy()
        own["needed"] = own["lane"].map(needed.groupby("lane").size()).fillna(0).astype(np.int64)
        own["computations"] = limits["computations"].to_numpy()[launched].astype(np.int64)
        own["count"] = own.groupby("lane")["op"].transform("size")
        own["nth"] = own.groupby("lane").cumcount()
        of_needed = own["count"] == own["needed"]
        of_all = ~of_needed & (own["count"] == own["computations"])
        of_later = ~of_needed & ~of_all & (own["count"] == own["computations"] - 1) & (not sends)
        own["turn"] = np.where(of_later, own["nth"] + 1, own["nth"])
        partial = ~of_needed & ~of_all & ~of_later  # rows are missing: the sequence numbers identify the others
        own["needed_turn"] = np.where(partial, own["sequence"], np.where(of_needed, own["nth"], -1))
        carried = ["lane", "op", "turn", "micro_batch", "chunk"]
        names = {"op": "compute", "micro_batch": "of_micro_batch", "chunk": "of_chunk"}
        listed = (of_all | of_later).to_numpy()
        plain = (
            own[listed].drop(columns="needed_turn").merge(served[carried].rename(columns=names), on=["lane", "turn"])
        )
        indexed = own[~listed].drop(columns="turn")
        indexed = indexed.merge(needed[[*carried, "needed_turn"]].rename(columns=names), on=["lane", "needed_turn"])
        both = pd.concat([plain, indexed]) if len(plain) and len(indexed) else plain if len(plain) else indexed
        matches.append(both.assign(ahead=ahead, sends=sends, compute_kind=kind))
    matched = pd.concat(matches, ignore_index=True)
    matched["idle"] = ~(matched["of_chunk"] + matched["ahead"]).between(0, last)
    return matched


def _around_transfers(transfers: pd.DataFrame, compute: pd.DataFrame) -> Ints:
    """Return the edges of transfers: from a computation to its send, from a receive to its computation, and from the
    previous computation to the receive.

    The first transfers of gradients are launched with the second-to-last forward pass of the pipeline's warm-up.
    """
    sends = transfers[transfers["sends"].astype(bool)]
    receives = transfers[~transfers["sends"].astype(bool)]
    turns = compute.sort_values(["lane", "kind", "sequence"]).copy()
    turns["turn"] = turns.groupby(["lane", "kind"]).cumcount() + 1
    previous = receives[["lane", "compute_kind", "turn", "op"]].merge(
        turns[["lane", "kind", "turn", "op"]],
        left_on=["lane", "compute_kind", "turn"],
        right_on=["lane", "kind", "turn"],
        suffixes=("", "_before"),
    )
    order = compute.assign(position=compute.groupby("lane").cumcount())
    first = order[order["kind"] == _B].groupby("lane")["position"].min() - 2
    launch = order[order["position"] == order["lane"].map(first)].set_index("lane")["op"]
    earliest = transfers[(transfers["compute_kind"] == _B) & (transfers["sequence"] == 0)]
    earliest = earliest[earliest["lane"].isin(launch.index)]
    return np.concatenate(
        [
            _pairs(sends["compute"], sends["op"]),
            _pairs(receives["op"], receives["compute"]),
            _pairs(previous["op_before"], previous["op"]),
            _pairs(earliest["lane"].map(launch), earliest["op"]),
        ],
        axis=1,
    )


def _gathered(rows: pd.DataFrame, compute: pd.DataFrame) -> Ints:
    """Return edges from the gathering of a chunk's parameters to its first forward pass.

    Gathering and scattering share a stream and follow each other.
    """
    stream = rows[rows["kind"].isin([_GATHER, _SCATTER])]
    gathers = stream[stream["kind"] == _GATHER].drop_duplicates(["lane", "chunk"], keep="last")
    firsts = compute[compute["kind"] == _F].drop_duplicates(["lane", "chunk"])
    of_chunk = gathers[gathers["chunk"] >= 0].merge(firsts, on=["lane", "chunk"], suffixes=("", "_first"))
    of_all = gathers[gathers["chunk"] < 0].merge(compute.drop_duplicates("lane"), on="lane", suffixes=("", "_first"))
    return np.concatenate(
        [_chain(stream), *(_pairs(part["op"], part["op_first"]) for part in (of_chunk, of_all))], axis=1
    )


def _finished(rows: pd.DataFrame, compute: pd.DataFrame) -> Ints:
    """Return the edges of the operations after the last computation.

    If gradients are reduced while backward passes continue, the reduction of a chunk follows the chunk's last backward
    pass, and the remaining operations follow the last reduction.
    """
    overlapped = bool((rows["kind"] == _SEPARATE).any())
    places = {
        OPTYPE_CODES[name]: i for i, name in enumerate(_TAIL) if not (overlapped and OPTYPE_CODES[name] == _SCATTER)
    }
    tail = rows[rows["kind"].isin(places)].assign(place=lambda some: some["kind"].map(places))
    tail = tail.sort_values(["lane", "place", "sequence"])
    last = compute.sort_values(["lane", "end"]).drop_duplicates("lane", keep="last").set_index("lane")["op"]
    heads = tail.drop_duplicates("lane")
    heads = heads[heads["lane"].isin(last.index)]
    edges = [_chain(tail), _pairs(heads["lane"].map(last), heads["op"])]
    if overlapped:
        scatters = rows[rows["kind"] == _SCATTER].drop_duplicates(["lane", "chunk"])
        backwards = compute[compute["kind"] == _B].sort_values("end").drop_duplicates(["lane", "chunk"], keep="last")
        both = backwards.merge(scatters, on=["lane", "chunk"], suffixes=("", "_scatter"))
        edges.append(_pairs(both["op"], both["op_scatter"]))
        reduced = rows[rows["kind"] == _SCATTER].drop_duplicates("lane", keep="last").set_index("lane")["op"]
        after = tail[tail["place"] > 0].drop_duplicates("lane")
        after = after[after["lane"].isin(reduced.index)]
        edges.append(_pairs(after["lane"].map(reduced), after["op"]))
    return np.concatenate(edges, axis=1)


def _nodes(rows: pd.DataFrame, transfers: pd.DataFrame) -> Ints:
    """Return (n,): equal numbers for operations that begin together: ends of a transfer, participants of a
    collective."""
    node = np.arange(len(rows))

    def join(some: pd.DataFrame, keys: Iterable[str]) -> None:
        ops = some["op"].to_numpy()
        node[ops] = some.groupby(list(keys), sort=False)["op"].transform("min").to_numpy()

    for code in (_GATHER, _SCATTER, _SEPARATE):
        join(rows[rows["kind"] == code], ["step", "stage", "sequence"])
    join(rows[rows["kind"] == _EMBEDDING], ["step", "dp", "sequence"])
    join(rows[rows["kind"] == _CLIP], ["step", "sequence"])
    real = transfers[~transfers["idle"].astype(bool)].copy()
    real["from_chunk"] = real["of_chunk"] - np.where(real["sends"].astype(bool), 0, -real["ahead"])
    join(real, ["step", "dp", "compute_kind", "of_micro_batch", "from_chunk"])
    return node


def _transferred(trace: Trace, node: Ints, transfers: pd.DataFrame) -> Floats:
    """Return (n,): durations without waiting, from the start of the last participant.

    A transfer with only one known end gets the median duration of its kind.
    """
    latest = np.full(trace.size, -np.inf)
    np.maximum.at(latest, node, trace.start)
    waits = np.isin(trace.kind, [*_TRANSFERS, _GATHER, _SCATTER, _SEPARATE, _EMBEDDING, _CLIP]) & trace.known
    seconds = np.where(waits, np.maximum(trace.end - latest[node], 0.0), trace.seconds)
    alone = np.bincount(node, minlength=trace.size)[node] < 2
    expected = np.zeros(trace.size, dtype=np.bool_)
    expected[transfers.loc[~transfers["idle"].astype(bool), "op"].to_numpy(np.int64)] = True
    for code in _TRANSFERS:
        own = trace.kind == code
        blind = own & ((alone & expected) | ~trace.known)
        if blind.any():
            sound = seconds[own & ~blind]
            seconds[blind] = np.median(sound) if sound.size else 0.0
    return seconds
