"""Plans keep what the planner promises of them: predicted against measured iteration times, in a real job.

Eight workers emulate a device each (`resihp.executor.emulation`): chunks take what the planner takes them to take, by
sleeping, which cores that are shared do not distort. All else is real: the detector finds the slow device, the planner
is told its speed by the verdict, plans are carried out with transfers, synchronisation and everybody's waiting.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence

import msgspec
import pytest

from resihp.executor.emulation import LAYER_MS
from resihp.parallelism.plan import Plan
from resihp.record import journal, journal_file
from resihp.scheduler.cost.prices import iteration_seconds
from resihp.scheduler.situation import Situation
from tests.integration.jobs import Job

SLOW, SPEED, KILLED = 5, 0.5, 1
ONSET, DEATH, ITERATIONS = 9, 22, 28
LAYER_S = 0.025
"""An iteration of the healthy job then takes 0.7 s, of which its real work is a small part, even on a busy machine."""
SETTLING = 2
"""First iterations of the job, and under each plan, that do not count."""
FEWEST = 3
"""Iterations that a median is taken of, at least."""
TOLERANCE = 0.15


class Ran(msgspec.Struct, frozen=True):
    """A plan that took effect, with seconds by iteration: measured ones, and what the detector expected beforehand."""

    plan: Plan
    reason: str
    measured: dict[int, float] = {}
    expected: dict[int, float] = {}

    def seconds(self, first: int = 0, last: int = ITERATIONS) -> float:
        """Median of the settled iterations from `first` to `last`."""
        settled = [self.measured[i] for i in sorted(self.measured)[SETTLING:] if first <= i <= last]
        assert len(settled) >= FEWEST, f"epoch {self.plan.epoch}: {len(settled)} iterations from {first} to {last}"
        return statistics.median(settled)


@pytest.mark.alone
def test_measured_iteration_times_are_those_that_the_planner_predicts(job: Job) -> None:
    """A device becomes half as fast, then another one dies: each time it goes on with the plan for what is left."""
    job.environment |= {"RESIHP_ADAPT__DETECT": "true", LAYER_MS: f"{LAYER_S * 1e3:g}"}
    faults = (f"slow:rank={SLOW},speed={SPEED}@iteration={ONSET}", f"kill:rank={KILLED}@iteration={DEATH}")
    options = [option for fault in faults for option in ("--fault", fault)]
    job.train(*options, script=("--layers", "6"), iterations=ITERATIONS, nodes=4, gpus=2, tp=2, pp=2).wait()
    assert job.status == 0, job.stderr

    (file,) = (job.folder / "home").rglob("journal")
    entries = [record.entry for record in journal_file.read(file)]
    injected = [entry for entry in entries if isinstance(entry, journal.FaultInjected)]
    assert [(entry.rank, entry.iteration) for entry in injected] == [(SLOW, ONSET), (KILLED, DEATH)]
    found = [entry for entry in entries if isinstance(entry, journal.FailureFound) and entry.component != "link"]
    assert [(entry.kind, entry.ranks) for entry in found] == [("fail-slow", (SLOW,)), ("fail-stop", (KILLED,))]
    assert found[0].speed == pytest.approx(SPEED, rel=0.1)
    ran = plans_that_ran(entries)
    assert len(ran) == 3, f"one plan for each state of affairs: {[one.reason for one in ran]}"
    healthy, relieved, bereft = ran
    assert KILLED in relieved.plan.layout.active
    assert KILLED not in bereft.plan.layout.ranks
    assert max(healthy.measured) + SETTLING + FEWEST < DEATH == min(bereft.measured)

    well = situation(entries, healthy.plan)
    slow = msgspec.structs.replace(well, speeds={SLOW: found[0].speed})
    base = iteration_seconds(healthy.plan, well)
    base_s = healthy.seconds(last=ONSET - 1)
    print(f"healthy: {base:g} layer times, {base * LAYER_S:.3f} s; measured {base_s:.3f} s")
    compared = {
        "slow, the plan as before": (healthy.plan, healthy.seconds(first=ONSET)),
        "slow, the plan for it": (relieved.plan, relieved.seconds(last=DEATH - 1)),
        "slow and killed, the plan for it": (bereft.plan, bereft.seconds()),
    }
    off = {}
    for name, (plan, seconds) in compared.items():
        predicted = iteration_seconds(plan, slow)
        ratio, promised = seconds / base_s, predicted / base
        off[name] = ratio / promised - 1.0
        print(
            f"{name}: {predicted:g} layer times, {predicted * LAYER_S:.3f} s; measured {seconds:.3f} s; "
            f"ratio predicted {promised:.3f}, measured {ratio:.3f}, {off[name]:+.1%}"
        )
    for one in (relieved, bereft):
        told = re.search(r"predicted ([\d.]+) layer times per iteration", one.reason)
        assert told is not None, one.reason
        assert float(told[1]) == pytest.approx(iteration_seconds(one.plan, slow), rel=0.01), "what the job was told"
        expected = one.expected[min(one.measured)]
        print(f"epoch {one.plan.epoch}: the detector expected {expected:.3f} s, measured {one.seconds():.3f} s")
    assert all(abs(share) <= TOLERANCE for share in off.values()), off


def plans_that_ran(entries: Sequence[journal.AnyEntry]) -> list[Ran]:
    """In the order of their epochs."""
    ran: dict[int, Ran] = {}
    for entry in entries:
        if isinstance(entry, journal.PlanDecided):
            ran[entry.plan.epoch] = Ran(plan=entry.plan, reason=entry.reason)
        elif isinstance(entry, journal.IterationCommitted):
            one, iteration = ran[entry.epoch], entry.outcome.iteration
            assert entry.seconds is not None, f"iteration {iteration}: nobody reported it"
            one.measured[iteration] = entry.seconds
            if entry.predicted_seconds is not None:
                one.expected[iteration] = entry.predicted_seconds
    return [one for one in ran.values() if one.measured]


def situation(entries: Sequence[journal.AnyEntry], plan: Plan) -> Situation:
    """What the planner knows while nothing has gone wrong."""
    (declared,) = (entry.declare for entry in entries if isinstance(entry, journal.ModelDeclared))
    return Situation(
        epoch=plan.epoch,
        base=plan.layout,
        available=plan.layout.ranks,
        nodes={entry.rank: entry.node for entry in entries if isinstance(entry, journal.WorkerStarted)},
        model=declared.model,
        micro_batches=declared.micro_batches,
        tp=2,
        pp=2,
    )
