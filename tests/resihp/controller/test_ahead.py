"""Plans before they are needed: what is asked while training goes on, and when an answer is used."""

from __future__ import annotations

import msgspec

from resihp.controller import interface as api
from resihp.record.journal import PlanDecided
from resihp.scheduler import planner
from resihp.scheduler.questions import QUESTION_ENCODER, answer_for, canonical, key_of
from resihp.simulator.harness import Disturbance, Scenario, World


def test_a_loss_that_was_thought_of_needs_no_planner() -> None:
    death = Disturbance("kill", "time", delay=25.0, rank=3)
    # seed 1: every question is answered
    found = World(Scenario(seed=1, iterations=80, thinks=True, disturbances=(death,))).run()
    asked = {action.why for _, action in found.actions if isinstance(action, api.Think)}
    assert {"the loss of node n1", "the loss of rank 3 (n2 device 1)"} <= asked
    assert "planned ahead" in found.all(PlanDecided)[1].reason


def test_questions_are_the_same_in_any_epoch_and_other_ones_with_another_speed() -> None:
    found = World(Scenario(iterations=12, thinks=True)).run()
    situation = next(action.situation for _, action in found.actions if isinstance(action, api.Think))
    later = msgspec.structs.replace(situation, epoch=7)
    assert key_of(canonical(later)) == key_of(situation)
    slower = msgspec.structs.replace(situation, speeds={situation.available[0]: 0.5})
    assert key_of(canonical(slower)) != key_of(situation)
    decision = planner.decide(situation)
    ready = answer_for(later, QUESTION_ENCODER.encode(decision))
    assert ready is not None
    assert (ready.plan.epoch, ready.plan.layout) == (7, decision.plan.layout)


def test_an_answer_that_is_none_is_not_used() -> None:
    found = World(Scenario(iterations=12, thinks=True)).run()
    asked = [action.situation for _, action in found.actions if isinstance(action, api.Think)]
    assert answer_for(asked[0], b"\xc1") is None
    assert answer_for(asked[0], QUESTION_ENCODER.encode(planner.decide(asked[1]))) is None
