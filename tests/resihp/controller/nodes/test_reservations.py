"""Reservations that begin on nodes of a job: a checkpoint before, and no replacement for too short a time."""

from __future__ import annotations

import msgspec
import pytest

from resihp.controller import interface as api
from resihp.protocol import messages as m
from resihp.record.describe import explain
from resihp.record.journal import ChangeDeclined, ReplacementAsked, ReservationSeen
from tests.resihp.controller.direct import Direct
from tests.resihp.controller.nodes.test_drains import trained

AHEAD = api.ReservationAhead(name="maint", nodes=("n2", "n9"), seconds=650.0)
GONE = api.ReservationAhead(name="", nodes=(), seconds=None)


def saves(job: Direct) -> list[tuple[int, ...]]:
    return [ranks for ranks, _ in job.orders(m.SaveNext)]


def notices(job: Direct) -> list[str]:
    """What is said about reservations."""
    said = [action.text for action in job.actions if isinstance(action, api.Say)]
    return [text for text in said if text.startswith("reservation")]


def test_a_checkpoint_is_ordered_some_time_before_and_training_goes_on() -> None:
    job = trained()
    job.feed(AHEAD)
    assert notices(job) == ["reservation maint: begins in 11 min on n2; a checkpoint is written 10 min before"]
    job.train(45)
    assert saves(job) == []
    job.train(10)
    assert len(saves(job)) == 1
    job.train(50)
    assert len(saves(job)) == 1, "once"
    assert job.orders(m.Park) == []
    assert notices(job)[-1] == "reservation maint begins soon: writing a checkpoint; training goes on"


def test_at_short_notice_it_is_saved_at_once_and_again_for_one_that_moves() -> None:
    job = trained()
    job.feed(msgspec.structs.replace(AHEAD, seconds=120.0))
    assert len(saves(job)) == 1
    job.feed(AHEAD)
    job.train(45)
    assert len(saves(job)) == 1


def test_a_job_with_a_warning_of_its_own_saves_as_early_as_that() -> None:
    job = trained(warning_lead_s=630.0)
    job.feed(AHEAD)
    job.train(15)
    assert saves(job) == []
    job.train(10)
    assert len(saves(job)) == 1


def test_a_cancelled_reservation_is_forgotten() -> None:
    job = trained()
    job.feed(AHEAD)
    job.feed(GONE)
    job.feed(GONE)
    job.train(100)
    assert saves(job) == []
    assert notices(job)[1:] == ["reservation maint: no longer ahead of this job"]
    assert [entry.seconds for entry in job.all(ReservationSeen)] == [650.0, None]


def test_reservations_of_other_nodes_are_none_of_its_business() -> None:
    job = trained()
    job.feed(msgspec.structs.replace(AHEAD, nodes=("n9",), seconds=60.0))
    assert saves(job) == []
    assert notices(job) == []


def test_a_job_that_stops_writes_its_last_checkpoint_and_no_other() -> None:
    job = trained()
    job.feed(api.StopAsked(request=1, at_once=False))
    job.feed(msgspec.structs.replace(AHEAD, seconds=60.0))
    assert saves(job) == []


@pytest.mark.parametrize(("begins_s", "asked"), [(4000.0, 1), (1000.0, 0)])
def test_no_node_is_asked_for_shortly_before(begins_s: float, asked: int) -> None:
    job = trained()
    job.feed(api.TimeLeft(seconds=90000.0))
    job.feed(msgspec.structs.replace(AHEAD, seconds=begins_s))
    job.lose("n3")
    job.train(20)
    assert len(job.all(ReplacementAsked)) == asked
    why = "less than 30 min is left until reservation maint of nodes of the job (slurm.replacement_min_left)"
    reasons = [entry.why for entry in job.all(ChangeDeclined) if entry.about == "node"]
    assert reasons == ([] if asked else [why])
    (seen,) = job.all(ReservationSeen)
    assert (seen.reservation, seen.nodes, seen.seconds) == ("maint", ("n2",), begins_s)
    assert explain(seen) == f"reservation maint: begins on n2 in {begins_s / 60:.0f} min"


def test_a_reservation_of_a_node_that_is_lost_does_not_hinder_a_replacement() -> None:
    job = trained()
    job.feed(api.TimeLeft(seconds=90000.0))
    job.feed(msgspec.structs.replace(AHEAD, seconds=1700.0))
    job.lose("n2")
    job.train(20)
    assert len(job.all(ReplacementAsked)) == 1
