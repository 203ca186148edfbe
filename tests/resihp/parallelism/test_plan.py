"""Plans: shares of the global batch, and a digest that all ranks can compare."""

from __future__ import annotations

import msgspec
import pytest

from resihp.errors import LayoutError
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan, spread


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("micro_batches", [7, 8, 9, 64])
def test_spread_gives_each_micro_batch_once_in_contiguous_even_shares(micro_batches: int, replicas: int) -> None:
    shares = spread(micro_batches, replicas)
    assert [m for share in shares for m in share] == list(range(micro_batches))
    counts = [len(share) for share in shares]
    assert len(counts) == replicas
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


def test_spread_by_hand() -> None:
    assert spread(8, 3) == ((0, 1, 2), (3, 4, 5), (6, 7))


def test_spread_refuses_an_empty_share_and_says_what_to_type() -> None:
    with pytest.raises(LayoutError, match=r"3 micro-batches.*4 replicas.*--micro-batches to 4"):
        spread(3, 4)


def test_digest_survives_the_wire_and_tells_plans_apart() -> None:
    layout = Layout.uniform(tp=1, pp=2, dp=2, layers=4)
    plan = Plan(epoch=3, layout=layout, assignment=spread(8, 2))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=Plan)
    assert again == plan
    assert again.digest == plan.digest
    assert plan.digest is plan.digest, "every rank's confirmation is compared with it"
    others = [
        msgspec.structs.replace(plan, epoch=4),
        msgspec.structs.replace(plan, layout=layout.without(frozenset({0}))),
        msgspec.structs.replace(plan, assignment=((0, 1, 2, 3, 4), (5, 6, 7))),
        msgspec.structs.replace(plan, assignment=((1, 0, 2, 3), (4, 5, 6, 7))),
        msgspec.structs.replace(plan, schedule="other"),
    ]
    assert len({plan.digest, *(other.digest for other in others)}) == len(others) + 1
    assert plan.micro_batches == 8
