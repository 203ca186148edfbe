"""Play small jobs with random failures at random moments and check them after every event: 500, and 250 worse ones.

A failure names its seed; `python -m resihp.simulator.harness SEED` (`--storm` for a storm) shows what happened.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise

import pytest

from resihp.controller import interface as api
from resihp.record.journal import (
    DrainAnswered,
    NodeLost,
    NodeReleased,
    Reconfigured,
    ReplacementChanged,
    ReservationSeen,
    WorkerStarted,
)
from resihp.simulator.harness import Scenario, Violation, play
from resihp.simulator.scenarios.mixed_jobs import draw_foreseeing, draw_ramped
from resihp.simulator.scenarios.plain_jobs import draw_plain, draw_stormy
from resihp.simulator.scenarios.probed_jobs import draw_harassed, draw_noisy, draw_sluggish
from resihp.simulator.scenarios.slurm_jobs import draw_allocated
from resihp.simulator.scenarios.troubled_starts import draw_decimated, draw_hindered
from resihp.simulator.world import Result

CHUNK = 25
FUZZ_SEEDS = int(os.environ.get("RESIHP_FUZZ_SEEDS", "500"))
"""Jobs of the plainest kind; of each other kind a fraction. 500 reach what 2,000 do, but for few branches: see
docs/contributing.md. `make soak` plays 50,000."""
LONG_SEEDS = min(FUZZ_SEEDS // 5, max(100, FUZZ_SEEDS // 20))
"""Jobs of the two kinds that take longest to play."""


@pytest.mark.parametrize("first", range(0, FUZZ_SEEDS, CHUNK), ids=lambda first: f"seeds-{first}-{first + CHUNK - 1}")
def test_invariants_hold_and_every_run_ends(first: int) -> None:
    play_chunk(draw_plain, first)


@pytest.mark.parametrize(
    "first", range(0, FUZZ_SEEDS // 2, CHUNK), ids=lambda first: f"storms-{first}-{first + CHUNK - 1}"
)
def test_invariants_hold_in_storms(first: int) -> None:
    play_chunk(draw_stormy, first)


@pytest.mark.parametrize(
    "first", range(0, FUZZ_SEEDS // 4, CHUNK), ids=lambda first: f"slurm-{first}-{first + CHUNK - 1}"
)
def test_invariants_hold_in_an_allocation(first: int) -> None:
    play_chunk(draw_allocated, first)


@pytest.mark.parametrize(
    "first", range(0, FUZZ_SEEDS // 4, CHUNK), ids=lambda first: f"slow-{first}-{first + CHUNK - 1}"
)
def test_invariants_hold_when_devices_are_found_slow(first: int) -> None:
    play_chunk(draw_sluggish, first)


@pytest.mark.parametrize(
    "first", range(0, FUZZ_SEEDS // 4, CHUNK), ids=lambda first: f"early-{first}-{first + CHUNK - 1}"
)
def test_invariants_hold_when_nodes_are_lost_before_training_begins(first: int) -> None:
    play_chunk(draw_decimated, first)


@pytest.mark.parametrize(
    "first", range(0, FUZZ_SEEDS // 4, CHUNK), ids=lambda first: f"starts-{first}-{first + CHUNK - 1}"
)
def test_invariants_hold_when_things_go_wrong_at_the_start(first: int) -> None:
    play_chunk(draw_hindered, first)


@pytest.mark.parametrize(
    "first", range(0, FUZZ_SEEDS // 4, CHUNK), ids=lambda first: f"ramps-{first}-{first + CHUNK - 1}"
)
def test_invariants_hold_when_the_batch_grows(first: int) -> None:
    play_chunk(draw_ramped, first)


@pytest.mark.parametrize(
    "first", range(0, FUZZ_SEEDS // 4, CHUNK), ids=lambda first: f"ahead-{first}-{first + CHUNK - 1}"
)
def test_invariants_hold_when_plans_are_made_ahead(first: int) -> None:
    play_chunk(draw_foreseeing, first)


@pytest.mark.parametrize("first", range(0, LONG_SEEDS, CHUNK), ids=lambda first: f"noisy-{first}-{first + CHUNK - 1}")
def test_invariants_hold_when_healthy_devices_look_slow(first: int) -> None:
    play_chunk(draw_noisy, first)


@pytest.mark.parametrize(
    "first", range(0, LONG_SEEDS, CHUNK), ids=lambda first: f"harassed-{first}-{first + CHUNK - 1}"
)
def test_invariants_hold_while_ranks_are_killed_and_stopped_again_and_again(first: int) -> None:
    play_chunk(draw_harassed, first)


def play_chunk(scenario: Callable[[int], Scenario], first: int) -> None:
    failed: dict[int, Violation] = {}
    for seed in range(first, first + CHUNK):
        try:
            play(scenario(seed), replay=seed % 10 == 0)
        except Violation as violation:
            failed[seed] = violation
    if failed:
        summary = "\n".join(str(violation).splitlines()[0] for violation in failed.values())
        pytest.fail(f"{len(failed)} of {CHUNK} seeds failed:\n{summary}\n\nthe first:\n{next(iter(failed.values()))}")


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        *((draw_sluggish, seed) for seed in (11177, 20285, 41343)),
        *((draw_hindered, seed) for seed in (41460, 41596, 44571)),
        *((draw_ramped, seed) for seed in (165, 1743, 2681)),
    ],
)
def test_a_seed_that_once_broke_a_rule_breaks_none(kind: Callable[[int], Scenario], seed: int) -> None:
    play(kind(seed))


def test_a_seed_is_played_the_same_way_twice() -> None:
    once, again = play(draw_plain(7)), play(draw_plain(7))
    assert once == again


def assert_reached(
    draw: Callable[[int], Scenario], seeds: range, kinds: Callable[[Result], set[str]], wanted: set[str]
) -> None:
    """Play one seed after the other, until everything `wanted` has been among the `kinds` of things that happened."""
    missing = set(wanted)
    for seed in seeds:
        missing -= kinds(play(draw(seed), replay=False))
        if not missing:
            return
    pytest.fail(f"in {len(seeds)} jobs never seen: {', '.join(sorted(missing))}")


def test_the_seeds_reach_what_they_are_for() -> None:
    """A fuzz that never commits on behalf of the dead, never redoes and never fences would prove little."""

    def kinds(result: Result) -> set[str]:
        starts = [a for _, a in result.actions if isinstance(a, api.StartWorkers) and a.joins]
        joined = {rank for start in starts for rank, _ in start.workers}
        return {
            f"exit {result.exit_code}",
            *(type(action).__name__ for _, action in result.actions),
            *(type(entry).__name__ for _, entry in result.entries),
            *(entry.action for entry in result.all(Reconfigured) if entry.bytes_moved),
            *(type(a.order).__name__ for _, a in result.actions if isinstance(a, api.Order)),
            *("newcomer works" for plan in result.plans if joined & {*plan.plan.layout.active}),
            *("newcomer stands by" for plan in result.plans if joined & {*plan.plan.layout.standby}),
            *(plan.action for plan in result.plans),
            *(f"{failure.kind} {failure.component}" for failure in result.failures),
            *("standby" for plan in result.plans if plan.plan.layout.standby),
        }

    wanted = {
        *("exit 0", "exit 1", "exit 5", "exit 93"),
        *("start", "redo", "commit", "standby"),
        *("between", "PlanRefused", "PlanInEffect", "JoinRefused", "StartWorkers"),
        *("newcomer works", "newcomer stands by"),
        *("SignalWorker", "SignalNode", "CutConnection", "DropNode", "Reply", "CommitCheckpoint"),
        *("fail-stop process", "fail-stop device", "fail-stop node", "communication link", "program script"),
    }
    assert_reached(draw_plain, range(2000, 2200), kinds, wanted)


def test_the_seeds_with_a_batch_that_grows_reach_what_they_are_for() -> None:
    """Steps alone, failures right at one, and while the plan for it is made."""

    def kinds(result: Result) -> set[str]:
        found = set()
        for before, after in pairwise(result.plans):
            if after.plan.micro_batches > before.plan.micro_batches:
                same = before.plan.layout.replicas == after.plan.layout.replicas
                found.add(f"{after.action}, {'same' if same else 'another'} layout")
            elif after.next_iteration == before.next_iteration and before.action == "between":
                found.add("again")
        return found

    wanted = {"between, same layout", "between, another layout", "commit, another layout", "again"}
    assert_reached(draw_ramped, range(150), kinds, wanted)


def _says(action: api.AnyAction, words: str) -> bool:
    return isinstance(action, api.Say) and words in action.text


def test_the_seeds_in_an_allocation_reach_what_they_are_for() -> None:
    def kinds(result: Result) -> set[str]:
        replacements = result.all(ReplacementChanged)
        guests = {entry.node for entry in replacements if entry.state == "joined"}
        ranks = {entry.rank for entry in result.all(WorkerStarted) if entry.node in guests}
        return {
            *(type(action).__name__ for _, action in result.actions),
            *(f"drain {entry.outcome}" for entry in result.all(DrainAnswered)),
            *(f"release {entry.outcome}" for entry in result.all(NodeReleased)),
            *(f"replacement {entry.state}" for entry in replacements),
            *("vacated" for entry in result.all(NodeLost) if entry.how == "vacated"),
            *("reserved" for _ in result.all(ReservationSeen)),
            *("saved before" for _, action in result.actions if _says(action, "begins soon: writing a checkpoint")),
            *("its ranks work" for plan in result.plans if ranks & {*plan.plan.layout.active}),
        }

    wanted = {
        *("DrainNode", "ReleaseNode", "AskReplacement", "CancelReplacement", "WatchNode", "its ranks work", "vacated"),
        *("reserved", "saved before"),
        *(f"drain {outcome}" for outcome in ("done", "refused", "unknown")),
        *(f"release {outcome}" for outcome in ("done", "refused", "unknown")),
        *(f"replacement {state}" for state in ("pending", "running", "joined", "refused", "cancelled", "ended")),
    }
    assert_reached(draw_allocated, range(150), kinds, wanted)
