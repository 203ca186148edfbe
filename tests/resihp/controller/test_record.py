"""One record, one fold: what is durable changes by entries alone, and a new supervisor knows the same.

After every event of every fuzz seed the record is compared with what the journal adds up to (`simulator.world`).
"""

from __future__ import annotations

import ast
import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import resihp
from resihp.controller import Controller
from resihp.controller import interface as api
from resihp.controller.lifecycle import ALLOWED_MOVES, InvalidMoveError, Lifecycle
from resihp.controller.nodes import replacements
from resihp.controller.state.job import Job
from resihp.record.fold import fold
from resihp.record.journal import AnyEntry, JoinRefused, PlanInEffect, WorkersOrdered
from resihp.record.state import JobRecord
from resihp.scheduler import transition_cost
from resihp.simulator.harness import Scenario, Violation, World
from resihp.simulator.scenarios.plain_jobs import draw_plain
from resihp.simulator.scenarios.probed_jobs import draw_sluggish
from resihp.simulator.scenarios.slurm_jobs import draw_allocated
from resihp.simulator.scenarios.stopped_jobs import draw_stopped
from tests.resihp.controller.direct import Direct
from tests.resihp.controller.test_takeover import TakenOver, journal_of

FUZZ_SEEDS = min(125, max(3, int(os.environ.get("RESIHP_FUZZ_SEEDS", "500")) // 40))
"""Of each kind of scenario; each is taken over at every entry of its journal."""
PRODUCT = Path(resihp.__file__).parent


# --- a take-over knows the same -----------------------------------------------------------------------------------


class Remembering(World):
    """Keeps what was on record, and what followed from it, whenever an entry had been written."""

    def __init__(self, scenario: Scenario) -> None:
        self.known: list[tuple[JobRecord, dict[str, Any]]] = []
        super().__init__(scenario)

    def feed(self, event: api.AnyEvent, again: bool = False) -> None:
        before = len(self.entries)
        super().feed(event, again)
        if len(self.entries) > before and not self.controller.job.has_ended:
            self.known += [(copy.deepcopy(self.record), {})] * (len(self.entries) - before - 1)
            self.known.append((copy.deepcopy(self.record), decisions(self.controller.job)))


def decisions(job: Job) -> dict[str, Any]:
    """What follows from the record alone: the next numbers, who gets another process or is kept out, what it costs."""
    record = job.record
    found: dict[str, Any] = {
        "next": (len(record.placements), record.failures + 1, len(record.drains) + 1, len(record.replacements) + 1),
        "dead": sorted(record.dead_devices),
        "kept out": sorted(record.unfit),
        "slow": sorted(record.slow.items(), key=str),
        "price": transition_cost.calibrated(record.costs),
        "unwanted": replacements.unwanted(job),
        "faults": sorted(record.fired),
        "nodes": [(name, node.alive) for name, node in job.nodes.items()],
        "ranks": [(rank, member.alive, member.joins) for rank, member in sorted(job.members.items())],
        "weighed": sorted(record.verdicts),
        "given back": [(name, lost.answers, lost.released) for name, lost in record.lost.items()],
    }
    if record.plan is not None:
        found |= {"lacking": replacements.nodes_lacking(job)}
    return found


@pytest.mark.parametrize(
    "draw", [draw_plain, draw_allocated, draw_sluggish, draw_stopped], ids=lambda draw: draw.__name__
)
def test_a_take_over_at_every_entry_reaches_the_same_record_and_the_same_decisions(draw: Any) -> None:
    taken = 0
    for seed in range(FUZZ_SEEDS):
        world = Remembering(draw(seed))
        try:
            world.run()
        except Violation:
            continue
        entries = [entry for _, entry in world.entries]
        for number, (record, decided) in enumerate(world.known, 1):
            if not decided:
                continue  # in the middle of an answer
            taken += 1
            controller = Controller.recover(world.settings, entries[:number], world.dependencies)
            assert controller.job.record == record, f"seed {seed}, after entry {number}: {entries[number - 1]}"
            assert decisions(controller.job) == decided, f"seed {seed}, after entry {number}: {entries[number - 1]}"
    assert taken > 20 * FUZZ_SEEDS


def test_a_newcomer_that_exits_early_does_not_condemn_its_device_under_a_new_supervisor() -> None:
    """A journal's replay condemned it, where the live controller had trusted it and would go on doing so."""
    before = Direct(come_backs=3).run(2)
    before.crash(3)
    before.park(stepped=2)
    before.run(1)
    before.spawn(4)
    before.crash(4, status=1)
    (refused,) = before.all(JoinRefused)
    assert refused.reason.endswith("before it was ready")
    assert before.job.dead_devices == set()
    heir = TakenOver(before).all_back()
    assert heir.job.dead_devices == before.job.dead_devices


def test_a_rank_that_was_ordered_is_not_given_again_by_a_new_supervisor() -> None:
    """It was known to no journal before: a newcomer of the new supervisor was given the same number."""
    before = Direct().run(2)
    before.crash(3)
    assert [entry.workers for entry in before.all(WorkersOrdered)][-1] == ((4, "n2", 1),)
    heir = TakenOver(before).all_back()
    (again,) = [action for action in heir.actions if isinstance(action, api.StartWorkers)]
    assert (again.node, again.workers) == ("n2", ((4, 1),)), "its agent had not heard of it"


def test_what_changes_have_cost_is_known_to_a_new_supervisor() -> None:
    before = Direct().run(2)
    assert [entry.took_s for entry in before.all(PlanInEffect)] == [
        pytest.approx(cost.seconds) for cost in before.job.record.costs
    ]
    assert TakenOver(before).job.record.costs == before.job.record.costs


# --- who changes what is durable ----------------------------------------------------------------------------------


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for folder in ("controller", "simulator", "record"):
        for path in sorted((PRODUCT / folder).rglob("*.py")):
            yield path, ast.parse(path.read_text())


CHANGES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}


def is_of_record(node: ast.AST) -> bool:
    """Whether an expression is a field of a record, or something in it."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute | ast.Name):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else node.value.id
            if owner in ("record", "known"):
                return True
        node = node.func if isinstance(node, ast.Call) else node.value
    return False


def changes_the_record(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                if any(is_of_record(target) for target in targets):
                    yield node.lineno
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target) if is_of_record(target):
                yield node.lineno
            case ast.Call(func=ast.Attribute(attr=name, value=value)) if name in CHANGES and is_of_record(value):
                yield node.lineno


def test_only_the_fold_changes_what_is_durable() -> None:
    found = {(path.name, line) for path, tree in modules() for line in changes_the_record(tree)}
    assert {name for name, _ in found} == {"fold.py"}, sorted(found)


def test_only_the_lifecycle_changes_the_stage() -> None:
    found = set()
    for path, tree in modules():
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(target, ast.Attribute) and target.attr in ("stage", "phase") for target in targets):
                found.add(path.name)
    assert found == {"lifecycle.py"}


# --- the lifecycle ------------------------------------------------------------------------------------------------


def test_a_move_that_is_not_in_the_table_raises_and_tells_what_was_heard() -> None:
    life = Lifecycle()
    life.hear(1.5, api.Tick())
    life.hear(2.5, api.AgentLost(node="n7", reason="gone"))
    with pytest.raises(
        InvalidMoveError, match=r"gathering cannot be followed by building(.|\n)*2\.500 AgentLost\(node='n7'"
    ):
        life.move("building", 3.0)
    assert life.stage == "gathering"


def test_every_stage_can_end_and_nothing_follows_the_end() -> None:
    assert all("ended" in following for stage, following in ALLOWED_MOVES.items() if stage != "ended")
    assert ALLOWED_MOVES["ended"] == frozenset()


# --- any journal --------------------------------------------------------------------------------------------------


def test_the_record_is_the_same_from_the_bytes_of_a_journal(tmp_path: Path) -> None:
    from resihp.record.journal_file import Journal, read

    job = Direct().run(3)
    job.crash(3)
    job.park(stepped=3)
    job.run(1)
    entries: list[AnyEntry] = journal_of(job)
    journal = Journal(tmp_path / "journal", sync=False)
    for entry in entries:
        journal.append(entry, at=0.0)
    journal.close()
    assert fold(record.entry for record in read(tmp_path / "journal")) == job.job.record
