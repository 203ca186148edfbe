"""State that one rank alone holds: said when a plan takes effect under which that is newly so, and not again."""

from __future__ import annotations

from dataclasses import replace

from resihp.controller import interface as api
from resihp.record.journal import PlanInEffect
from resihp.simulator.harness import Disturbance, Scenario, World
from resihp.simulator.world import Result

ALONE = "held by rank"


def said(found: Result) -> list[tuple[str, str]]:
    return [
        (action.level, action.text)
        for _, action in found.actions
        if isinstance(action, api.Say) and ALONE in action.text
    ]


def died(rank: int, after_s: float) -> Disturbance:
    return Disturbance("kill", "time", delay=after_s, rank=rank)


def test_a_job_is_warned_when_one_of_two_replicas_is_lost() -> None:
    dies = Scenario(seed=1, nodes=2, gpus_per_node=1, pp=1, iterations=40, disturbances=(died(1, 15.0),))
    held = "layers 0-5, the embedding and the head are held by rank 0 alone: if it is lost, "
    found = World(replace(dies, checkpoint_every=5)).run()
    assert said(found) == [("warning", held + "training goes back to the last checkpoint")]
    found = World(dies).run()
    assert said(found) == [("warning", held + "so is all training: --checkpoint-every N saves it")]
    assert len(found.all(PlanInEffect)) == 3, "who died came back: nothing is said of a plan with two holders"


def test_a_job_of_three_replicas_is_not_warned_when_it_loses_one() -> None:
    found = World(Scenario(seed=1, nodes=3, iterations=40, disturbances=(died(3, 12.0), died(2, 20.0)))).run()
    assert len(found.all(PlanInEffect)) > 1
    assert said(found) == []


def test_a_job_of_one_replica_is_told_at_its_start_alone() -> None:
    grows = Scenario(seed=1, pp=4, iterations=12, ramp=((1, 4), (4, 8)), micro_batches=8)
    found = World(grows).run()
    assert len(found.all(PlanInEffect)) > 1
    [(level, text)] = said(found)
    assert level == "notice"
    assert text.startswith("layers 0-5, the embedding and the head are held by ranks 0-3 alone")
