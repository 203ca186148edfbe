"""Who keeps the others waiting."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from resihp.controller.fail_stop import silence
from resihp.controller.fail_stop.liveness import blocking_ranks
from resihp.controller.state.members import Member
from resihp.protocol import messages as m
from resihp.record.state import KnownWorker
from resihp.settings import Settings

SETTINGS = Settings(job="local-1", nodes=1, gpus_per_node=4, tp=1, pp=1)


def member(
    rank: int, *, activity: Any = "communication", state: str = "S", age_s: float = 0.1, unanswered_s: float = 0.0
) -> Member:
    found = Member(KnownWorker(rank, "n1", rank, 1000 + rank))
    progress = m.Progress(epoch=1, iteration=1, primitives=1, activity=activity, unanswered_s=unanswered_s)
    found.beat = m.WorkerBeat(rank=rank, age_s=age_s, state=state, progress=progress)
    return found


def test_a_stopped_process_comes_before_a_mute_one_and_that_before_one_that_computes() -> None:
    stopped, mute = member(0, state="T"), member(1, age_s=100.0)
    computes, waits = member(2, activity="compute"), member(3)
    assert blocking_ranks([waits, computes, mute, stopped], 0.0, SETTINGS) == [stopped]
    assert blocking_ranks([waits, computes, mute], 0.0, SETTINGS) == [mute]
    assert blocking_ranks([waits, computes], 0.0, SETTINGS) == [computes]
    assert blocking_ranks([waits], 0.0, SETTINGS) == [], "the communication itself is broken"


def test_a_device_that_does_not_answer_is_given_up_unless_another_one_is_seen_at_its_own_work() -> None:
    silent, computes, waits = member(0, activity="compute", unanswered_s=9.0), member(1, activity="compute"), member(2)
    assert blocking_ranks([silent, waits], 0.0, SETTINGS) == [silent]
    assert blocking_ranks([silent, computes, waits], 0.0, SETTINGS) == [computes]
    assert blocking_ranks([silent, member(4, activity="compute", unanswered_s=9.0), waits], 0.0, SETTINGS) == [], (
        "each may wait for the other: it is the communication"
    )
    assert silence.evidence(SimpleNamespace(now=0.0, settings=SETTINGS), silent) == (  # type: ignore[arg-type]
        "its device has not answered for 9.0 s, no progress for 0.0 s"
    )
