"""Who is slow and has no work under a layout: devices, links, and what ranks do together."""

from __future__ import annotations

import pytest

from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.record.slowness import unaffecting
from resihp.record.state import Device, JobRecord, Link, Part, Placement, Slow

TWO = 2
"""Devices of each node."""


def record(
    devices: dict[Device, int] | None = None, links: dict[Link, int] | None = None, parts: dict[Part, int] | None = None
) -> JobRecord:
    """Ranks 0 to 7 on four nodes of two; rank 8 was started in the place of rank 7. What is slow, with its failure."""
    placed = [Placement(f"n{rank // TWO + 1}", rank % TWO) for rank in (*range(8), 7)]

    def slow(failure: int) -> Slow:
        return Slow(failure=failure, speed=0.5, since=3)

    return JobRecord(
        placements=placed,
        slow={what: slow(failure) for what, failure in (devices or {}).items()},
        slow_links={what: slow(failure) for what, failure in (links or {}).items()},
        slow_parts={what: slow(failure) for what, failure in (parts or {}).items()},
    )


def layout(*pipelines: tuple[tuple[int, ...], ...], standby: tuple[int, ...] = ()) -> Layout:
    """Replicas, of stages of ranks, of a layer each."""
    replicas = tuple(
        Replica(stages=tuple(Stage(ranks=ranks, chunks=((s, s),)) for s, ranks in enumerate(stages)))
        for stages in pipelines
    )
    return Layout(replicas=replicas, standby=standby)


def test_a_device_without_work_slows_nothing() -> None:
    slow = record({("n1", 1): 4, ("n4", 1): 2})
    assert unaffecting(slow, layout(((0, 1), (2, 3)), ((4, 5), (6, 7)))) == ()
    assert unaffecting(slow, layout(((0,), (2, 3)), ((4, 5), (6,)), standby=(1, 7))) == (2, 4)
    assert unaffecting(slow, layout(((0,), (2, 3)), ((4, 5), (6, 8)), standby=(1,))) == (4,), "another process on it"
    assert unaffecting(record(), layout(((0,),))) == ()


@pytest.mark.parametrize(
    ("link", "stages", "idle"),
    [
        ((0, 2), ((0,), (2,), (4,)), False),
        ((2, 0), ((0,), (2,), (4,)), False),
        ((4, 0), ((0,), (2,), (4,)), False),  # the first and the last
        ((0, 4), ((0,), (2,), (4,), (6,)), True),
        ((0, 2), ((0, 2), (4,), (6,)), False),  # in one stage
        ((0, 7), ((0,), (8,)), False),  # another process at its end
        ((0, 2), ((0,), (4,)), True),
    ],
)
def test_a_link_slows_who_sends_over_it(link: Link, stages: tuple[tuple[int, ...], ...], idle: bool) -> None:
    assert unaffecting(record(links={link: 3}), layout(stages)) == ((3,) if idle else ())


def test_where_a_stage_is_vacant_micro_batches_may_take_any_way() -> None:
    slow = record(links={(0, 6): 3})
    assert unaffecting(slow, layout(((0,), (2,), (1,)), ((4,), (6,), (5,)))) == (3,)
    assert unaffecting(slow, layout(((0,), (), (1,)), ((4,), (6,), (5,)))) == ()
    assert unaffecting(slow, layout(((0,), (), (1,)), ((4,), (2,), (5,)), standby=(6,))) == (3,)


def test_what_ranks_do_together_is_over_when_none_of_them_has_work() -> None:
    slow = record(parts={("collective", (2, 3)): 5})
    assert unaffecting(slow, layout(((0, 1), (2,)), standby=(3,))) == ()
    assert unaffecting(slow, layout(((0, 1),), standby=(2, 3))) == (5,)
