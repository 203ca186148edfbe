"""Properties of the 1F1B order, and one written out by hand."""

from __future__ import annotations

from itertools import accumulate

import pytest

from resihp.pipeline.schedules import Primitive, one_forward_one_backward

SHAPES = [(stages, count) for stages in (1, 2, 3, 4, 8) for count in (1, 2, 3, 4, 7, 16)]
PLACES = [(stage, stages, count) for stages, count in SHAPES for stage in range(stages)]


def written(order: tuple[Primitive, ...]) -> str:
    return " ".join(f"{p.kind}{p.micro_batch}" for p in order)


def test_four_stages_six_micro_batches_by_hand() -> None:
    """PipeDream-flush as in the figure of every paper that shows it."""
    orders = [written(one_forward_one_backward(stage, 4, tuple(range(1, 7)))) for stage in range(4)]
    assert orders == [
        "F1 F2 F3 F4 B1 F5 B2 F6 B3 B4 B5 B6",
        "F1 F2 F3 B1 F4 B2 F5 B3 F6 B4 B5 B6",
        "F1 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 B6",
        "F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6",
    ]


@pytest.mark.parametrize(("stage", "stages", "count"), PLACES)
def test_each_forward_and_backward_once_and_in_order(stage: int, stages: int, count: int) -> None:
    micro_batches = tuple(range(count))
    order = one_forward_one_backward(stage, stages, micro_batches)
    assert tuple(p.micro_batch for p in order if p.kind == "F") == micro_batches
    assert tuple(p.micro_batch for p in order if p.kind == "B") == micro_batches
    at = {p: i for i, p in enumerate(order)}
    assert len(at) == len(order) == 2 * count
    assert all(at[Primitive("F", m)] < at[Primitive("B", m)] for m in micro_batches)


@pytest.mark.parametrize(("stage", "stages", "count"), PLACES)
def test_activations_in_flight_are_bounded_by_the_stages_that_follow(stage: int, stages: int, count: int) -> None:
    order = one_forward_one_backward(stage, stages, tuple(range(count)))
    in_flight = list(accumulate(1 if p.kind == "F" else -1 for p in order))
    assert max(in_flight) == min(stages - stage, count)
    assert in_flight[-1] == 0


@pytest.mark.parametrize(("stages", "count"), SHAPES)
def test_all_stages_together_run_to_the_end(stages: int, count: int) -> None:
    """Played with transfers that arrive at once, no order waits for ever for another's."""
    orders = [list(one_forward_one_backward(stage, stages, tuple(range(count)))) for stage in range(stages)]
    done: set[tuple[int, str, int]] = set()

    def possible(stage: int, p: Primitive) -> bool:
        if p.kind == "F":
            return stage == 0 or (stage - 1, "F", p.micro_batch) in done
        return stage == stages - 1 or (stage + 1, "B", p.micro_batch) in done

    while any(orders):
        moved = False
        for stage, order in enumerate(orders):
            if order and possible(stage, order[0]):
                first = order.pop(0)
                done.add((stage, first.kind, first.micro_batch))
                moved = True
        assert moved, f"deadlock: next are {[written(tuple(order[:1])) for order in orders]}"


def test_micro_batches_keep_their_own_numbers() -> None:
    assert written(one_forward_one_backward(0, 2, (7, 3, 9))) == "F7 F3 B7 F9 B3 B9"


def test_a_replica_without_micro_batches_does_nothing() -> None:
    assert one_forward_one_backward(0, 4, ()) == ()
