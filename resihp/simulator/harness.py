"""Play simulated jobs around the real controller; `python -m resihp.simulator.harness SEED` shows one.

`Scenario` (scenarios) describes the job and its disturbances. `World` (world.py, machines) plays the job on a virtual
clock. `Rules` (rules.py, invariants) checks after every event the promises of architecture.md and interface.md.

    .venv/bin/python -m resihp.simulator.harness 4711            the log of one seed
    .venv/bin/python -m resihp.simulator.harness 4711 --beats    with the agents' heartbeats
    .venv/bin/python -m resihp.simulator.harness 0 5000          many seeds: violations by kind, exit codes
    ... --storm, --orphan, --slurm, --slow       jobs of another family (scenarios)
    ... --stop, --start, --ramp, --noise         jobs of four more families
    ... --single                                 jobs that go back to checkpoints
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable

from resihp.simulator.invariants.violations import Violation
from resihp.simulator.log import log_tail
from resihp.simulator.scenarios.mixed_jobs import draw_ramped, draw_unreplicated
from resihp.simulator.scenarios.plain_jobs import draw_orphaned, draw_plain, draw_stormy
from resihp.simulator.scenarios.probed_jobs import draw_harassed, draw_noisy, draw_sluggish
from resihp.simulator.scenarios.scenario import Disturbance, Scenario
from resihp.simulator.scenarios.slurm_jobs import draw_allocated
from resihp.simulator.scenarios.stopped_jobs import draw_stopped
from resihp.simulator.scenarios.troubled_starts import draw_hindered
from resihp.simulator.world import Result, World

__all__ = ["Disturbance", "Result", "Scenario", "Violation", "World", "main", "play", "show", "sweep"]


def play(scenario: Scenario, replay: bool = True) -> Result:
    """Run a scenario to its end, then replay its events with a second controller. Raises Violation."""
    world = World(scenario)
    result = world.run()
    if replay:
        world.replay()
    return result


def show(scenario: Scenario, beats: bool) -> int:
    """Run one scenario and print its log. Return 0, or 1 after a violation."""
    world = World(scenario)
    verdict = "ended"
    try:
        world.run()
        world.replay()
    except Violation as violation:
        verdict = f"VIOLATION: {str(violation).splitlines()[0]}"
    print(scenario)
    print(log_tail(world.log, lines=len(world.log), beats=beats))
    print(verdict)
    return 0 if verdict == "ended" else 1


def sweep(draw: Callable[[int], Scenario], first: int, last: int) -> int:
    """Run the seeds from `first` to `last`, both inclusive; print the violations by kind and the number of each exit
    code.

    Return 0, or 1 after any violation.
    """
    codes: Counter[int] = Counter()
    kinds: dict[str, list[int]] = {}
    for seed in range(first, last + 1):
        try:
            codes[play(draw(seed)).exit_code] += 1
        except Violation as violation:
            line = str(violation).splitlines()[0].partition(" s: ")[2]
            kinds.setdefault(re.sub(r"[\d.]+", "#", line), []).append(seed)
    for kind, seeds in sorted(kinds.items(), key=lambda item: -len(item[1])):
        print(f"{len(seeds):6d}  {kind[:140]}  seeds {seeds[:8]}")
    print(
        f"{last - first + 1} runs, exit codes {dict(sorted(codes.items()))}, {sum(map(len, kinds.values()))} violations"
    )
    return 1 if kinds else 0


def main(arguments: list[str]) -> int:
    kinds = {
        "--storm": draw_stormy,
        "--stop": draw_stopped,
        "--orphan": draw_orphaned,
        "--slurm": draw_allocated,
        "--slow": draw_sluggish,
        "--start": draw_hindered,
        "--ramp": draw_ramped,
        "--harassed": draw_harassed,
        "--noise": draw_noisy,
        "--single": draw_unreplicated,
    }
    draw = next((kinds[argument] for argument in arguments if argument in kinds), draw_plain)
    numbers = [int(argument) for argument in arguments if argument.isdigit()]
    if len(numbers) == 2:
        return sweep(draw, *numbers)
    return show(draw(numbers[0]), "--beats" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
