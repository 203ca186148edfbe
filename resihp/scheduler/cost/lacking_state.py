"""Bytes that ranks would have to receive to hold the state of a layout. Pure.

The module compares the state that a rank needs with the state that it holds. It never lists transfers
(`resihp.parallelism.transfers`), and does not notice lost state. Called by the planner and its searches, to compare
layouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import msgspec
import numpy as np
import numpy.typing as npt

from resihp.parallelism.layout import Layout
from resihp.parallelism.ownership import ParameterSpec
from resihp.parallelism.parameter_outline import layer_outline, outline
from resihp.parallelism.transfers import STATE_TENSORS
from resihp.scheduler.cost.held_state import HeldState, holdings
from resihp.scheduler.layouts.tp_groups import overlap
from resihp.scheduler.situation import Situation


class Lacking:
    """Computes the bytes that ranks would have to receive to hold given states; each case is computed once.

    It never raises for lost state, which it does not notice (`resihp.parallelism.transfers.missing`).
    """

    def __init__(self, situation: Situation, element: int = 4) -> None:
        self._inside = layer_outline(situation.model, 0)
        self._outside = outline(msgspec.structs.replace(situation.model, layers=0))
        self._each = STATE_TENSORS * element
        survivors = set(situation.available).difference(situation.stale)
        self._before = {rank: state for rank, state in holdings(situation.holding.replicas) if rank in survivors}
        self._known: dict[tuple[HeldState | None, HeldState], Fraction] = {}
        self._layers = situation.model.layers

    def table(self, ranks: Sequence[int], seats: Sequence[HeldState]) -> npt.NDArray[np.int64]:
        """Return the bytes, (ranks, seats), that each rank would have to receive to hold the state of each seat."""
        no_state = HeldState((), frozenset(), 0, 1)
        old_states = [self._before.get(rank, no_state) for rank in ranks]
        scale = math.lcm(*(state.tp for state in (*old_states, *seats)))
        part = np.array([scale // state.tp for state in seats])
        low, high = (np.array([(state.t + i) * scale // state.tp for state in seats]) for i in (0, 1))
        first, last = (np.array([(state.t + i) * scale // state.tp for state in old_states])[:, None] for i in (0, 1))
        missing_part = part - np.maximum(0, np.minimum(last, high) - np.maximum(first, low))  # of cut parameters
        wanted = self._spans(seats)
        kept = self._spans(old_states) @ wanted.T
        whole_elements, cut_elements = (
            sum(spec.elements for spec in self._inside if (spec.axis is None) is uncut) for uncut in (True, False)
        )
        total = (wanted.sum(axis=1) - kept) * (
            whole_elements * scale + cut_elements * part
        ) + kept * cut_elements * missing_part
        for spec in self._outside:
            needs_it = np.array([bool(state.units.intersection(spec.units)) for state in seats])
            has_it = np.array([bool(state.units.intersection(spec.units)) for state in old_states])[:, None]
            elements = np.where(has_it, 0, scale) if spec.axis is None else np.where(has_it, missing_part, part)
            total += spec.elements * needs_it * elements
        bytes_of: npt.NDArray[np.int64] = total // scale * self._each
        return bytes_of

    def _spans(self, holdings: Sequence[HeldState]) -> npt.NDArray[np.int64]:
        """Return a table (holdings, layers) with 1 for each layer that a holding contains, else 0."""
        table = np.zeros((len(holdings), self._layers), np.int64)
        for row, state in zip(table, holdings, strict=True):
            for first, last in state.chunks:
                row[first : last + 1] = 1
        return table

    def total(self, layout: Layout) -> int:
        """Return the bytes that all ranks of a layout together would have to receive."""
        parts: dict[int, int] = {}  # numerators by denominator: nearly all are whole numbers, which add up fast
        for rank, now in holdings(layout.replicas):
            lacking = self._of(rank, now)
            parts[lacking.denominator] = parts.get(lacking.denominator, 0) + lacking.numerator
        return int(sum(Fraction(n, d) for d, n in parts.items())) * self._each

    def _of(self, rank: int, now: HeldState) -> Fraction:
        """Return the elements that a rank would have to receive, counting one tensor (value or moment) per
        parameter."""
        case = self._before.get(rank), now
        elements = self._known.get(case)
        if elements is None:
            elements = self._known[case] = self._work_out(*case)
        return elements

    def _work_out(self, old: HeldState | None, now: HeldState) -> Fraction:
        total = Fraction(0)
        if old == now:
            return total
        shared = Fraction(0) if old is None else overlap(now.t, now.tp, old.t, old.tp)
        kept = 0 if old is None else len(now.layers & old.layers)
        for spec in self._inside:
            total += (len(now.layers) - kept) * _lacking(spec, now, None) + kept * _lacking(spec, now, shared)
        for spec in self._outside:
            if now.units.intersection(spec.units):
                has = old is not None and bool(old.units.intersection(spec.units))
                total += _lacking(spec, now, shared if has else None)
        return total


def bytes_to_move(situation: Situation, layout: Layout, element: int = 4) -> int:
    """Return the bytes of state that the ranks of `layout` need and do not hold, in total.

    The result equals the bytes of `resihp.parallelism.transfers.moves`, which this function does not list.
    """
    return Lacking(situation, element).total(layout)


def _lacking(spec: ParameterSpec, now: HeldState, shared: Fraction | None) -> Fraction:
    """Return the elements of a parameter that a rank needs and does not hold.

    `shared` is the part of the parameter that the rank holds already; None if it holds none.
    """
    if spec.axis is None:
        return Fraction(spec.elements if shared is None else 0)
    return spec.elements * (Fraction(1, now.tp) - (shared or 0))
