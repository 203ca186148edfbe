"""How far plans are from the best known, on random jobs: `python -m benchmarks.planner anneal`.

Each job of `benchmarks.random_jobs` is answered at once (`decide`), after a second of search on one core (`Anytime`)
and by an independent planner in a minute (`benchmarks.reference_planner`). Best known is the least that any of them
found, or an earlier run (`--known`), whose plans are priced again. Seconds are of processor time. A job that has a
legal plan and is refused counts as missed; so does a plan that is not legal. One that does not take what it says is
told.

One line of JSON for each job, as it comes: `--resume FILE` goes on with a run that was cut.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.random_jobs import kinds, large_question, random_question, told
from benchmarks.reference_planner import ReferencePlanner, legal_seconds
from resihp.errors import LayoutError
from resihp.parallelism.plan import Plan
from resihp.scheduler import decide
from resihp.scheduler.anytime import Anytime
from resihp.scheduler.situation import Decision, Situation
from resihp.scheduler.what_if.question import Question, first_plan, pose

SEARCH_S = 1.0
"""Of the anytime answer."""
TRIALS = 20
"""Between two looks at the clock."""
SAME = 1e-6
"""Relative difference between what a decision says and what its plan is priced at."""
WORST = 10


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One job. Seconds of an iteration: None where there was no answer, or none that is legal."""

    seed: int
    large: bool
    job: str
    kinds: tuple[str, ...]
    instant_s: float | None
    instant_ms: float
    anytime_s: float | None
    reference_s: float | None
    plain_s: float | None = None
    """Of the reference, before its plan got orders of its own."""
    start: str = ""
    trials: int = 0
    model_off: float = 0.0
    won: dict[str, tuple[int, float]] = {}
    """Of the reference's moves: how often each found a best that the anytime answer does not reach, and the gain."""
    faults: tuple[str, ...] = ()
    """Why answers were refused or not legal."""
    known: Plan | None = None
    """The best plan that was found."""
    known_s: float | None = None

    @property
    def best_s(self) -> float:
        found = (self.instant_s, self.anytime_s, self.reference_s, self.known_s)
        return min((one for one in found if one is not None), default=math.inf)

    def gap(self, answer: str) -> float:
        """Relative, of "instant" or "anytime"; infinite for a miss. Nobody has a plan: 0."""
        seconds = self.instant_s if answer == "instant" else self.anytime_s
        if math.isinf(self.best_s):
            return 0.0
        return math.inf if seconds is None else seconds / self.best_s - 1.0


def question_of(seed: int, large: bool) -> Question:
    return large_question(seed) if large else random_question(seed)


def measured(seed: int, seconds: float, large: bool = False, known: Plan | None = None) -> Measured:
    """All answers to one job; `seconds` for the reference, which 0 leaves out."""
    question = question_of(seed, large)
    case = pose(question, first_plan(question))
    faults: list[str] = []
    plans: dict[float, Plan] = {}

    def judged(name: str, answer: Callable[[], Decision]) -> tuple[Decision | None, float | None]:
        try:
            decision = answer()
            at = legal_seconds(decision.plan, case)
        except LayoutError as error:
            faults.append(f"{name}: {error}")
            return None, None
        if not math.isclose(at, decision.seconds, rel_tol=SAME):
            faults.append(f"{name}: says {decision.seconds:.6g} s, its plan takes {at:.6g} s")
        plans.setdefault(at, decision.plan)
        return decision, at

    began = time.process_time()
    try:
        first: Decision | None = decide(case)
    except LayoutError as error:
        first = None
        faults.append(f"instant: {error}")
    instant_ms = 1000.0 * (time.process_time() - began)
    instant_s = anytime_s = None
    if first is not None:
        decision = first
        _, instant_s = judged("instant", lambda: decision)
        _, anytime_s = judged("anytime", lambda: searched(case, decision))
    found = None
    if seconds:
        reference = ReferencePlanner(case, seed=seed, instant=first.plan if first and instant_s else None)
        found = reference.search(seconds, bound=math.inf if anytime_s is None else anytime_s)
        if found is not None:
            plans.setdefault(found.seconds, found.plan)
    known_s = None
    if known is not None:
        try:
            known_s = legal_seconds(known, case)
            plans.setdefault(known_s, known)
        except LayoutError as error:
            faults.append(f"known: {error}")
    return Measured(
        seed=seed,
        large=large,
        job=told(question),
        kinds=kinds(question),
        instant_s=instant_s,
        instant_ms=instant_ms,
        anytime_s=anytime_s,
        reference_s=None if found is None else found.seconds,
        plain_s=None if found is None else found.plain_s,
        start="" if found is None else found.start,
        trials=0 if found is None else found.trials,
        model_off=0.0 if found is None else found.model_off,
        won={} if found is None else {name: one for name, one in found.won.items() if one[0]},
        faults=tuple(faults),
        known=plans[min(plans)] if plans else None,
        known_s=known_s,
    )


def searched(case: Situation, instant: Decision, seconds: float = SEARCH_S) -> Decision:
    """The anytime answer."""
    began = time.process_time()
    anytime = Anytime(case, instant)
    while time.process_time() - began < seconds:
        anytime.run(TRIALS)
    return anytime.decision()


# --- many of them ---------------------------------------------------------------------------------------------------


def run(
    seeds: Sequence[int],
    seconds: float,
    *,
    large: bool = False,
    workers: int = 1,
    out: Path | None = None,
    known: Path | None = None,
) -> list[Measured]:
    """Measures what `out` does not have yet, and appends it there; all of `seeds` that are there in the end."""
    wanted = set(seeds)
    done = {one.seed: one for one in read(out) if one.seed in wanted and one.large == large}
    plans = {one.seed: one.known for one in read(known) if one.large == large}
    left = [seed for seed in seeds if seed not in done]
    if out is not None and out.exists() and not out.read_bytes().endswith(b"\n"):
        with out.open("ab") as file:
            file.write(b"\n")  # after a line that was cut
    with ProcessPoolExecutor(max_workers=workers, initializer=_warm) as pool:
        waiting = [pool.submit(measured, seed, seconds, large, plans.get(seed)) for seed in left]
        for future in as_completed(waiting):
            one = future.result()
            done[one.seed] = one
            if out is not None:
                with out.open("ab") as file:
                    file.write(msgspec.json.encode(one) + b"\n")
            print(_line(one), flush=True)
    return [done[seed] for seed in sorted(done)]


def read(path: Path | None) -> list[Measured]:
    """Lines of an earlier run; one that was cut short is left out."""
    found: list[Measured] = []
    if path is not None and path.exists():
        for line in path.read_bytes().splitlines():
            try:
                found.append(msgspec.json.decode(line, type=Measured))
            except msgspec.DecodeError:
                print(f"{path}: a line cannot be read; that job is measured again")
    return found


def _warm() -> None:
    """What a first decision imports and compiles is not any job's."""
    question = random_question(0)
    case = pose(question, first_plan(question))
    searched(case, decide(case), 0.01)


def _line(one: Measured) -> str:
    times = ", ".join(f"{name} {one.gap(name):+.2%}" for name in ("instant", "anytime"))
    return f"seed {one.seed}: best {one.best_s:.4g} s; {times}; {one.instant_ms:.0f} ms; {one.job}"


def report(found: Sequence[Measured]) -> None:
    """Tables: all of them, by kind, the worst, what was refused or wrong, which moves of the reference found more."""
    console = Console(width=160)
    table = Table("jobs of", "", "answer", "within 1 %", "within 3 %", "median", "worst", "missed")
    rows = {"all": list(found)}
    for kind in sorted({kind for one in found for kind in one.kinds}):
        rows[kind] = [one for one in found if kind in one.kinds]
    for name, ones in rows.items():
        for answer in ("instant", "anytime"):
            first = answer == "instant"
            table.add_row(name if first else "", str(len(ones)) if first else "", answer, *_cells(ones, answer))
    console.print(table)
    for one in sorted(found, key=lambda one: -one.gap("anytime"))[:WORST]:
        print(_line(one))
    for one in found:
        for fault in one.faults:
            print(f"seed {one.seed}: {fault}")
    times = sorted(one.instant_ms for one in found)
    beaten = [
        one for one in found if one.reference_s is not None and one.reference_s < (one.anytime_s or math.inf) * 0.999
    ]
    print(f"instant: median {statistics.median(times):.1f} ms, worst {times[-1]:.1f} ms of processor time")
    print(f"the reference is better than the anytime answer by 0.1 % on {len(beaten)} of {len(found)}")
    print(f"most that its model is off the product's: {max(abs(one.model_off) for one in found):.1e}")
    for name, (times_won, gain) in _moves(found):
        print(f"  {name}: {times_won} bests beyond the anytime answer, {gain:.1%} together")


def _cells(ones: Sequence[Measured], answer: str) -> tuple[str, ...]:
    gaps = [one.gap(answer) for one in ones]
    there = [gap for gap in gaps if math.isfinite(gap)]
    return (
        f"{sum(gap <= 0.01 for gap in gaps) / len(gaps):.0%}",
        f"{sum(gap <= 0.03 for gap in gaps) / len(gaps):.0%}",
        f"{statistics.median(gaps):+.2%}",
        f"{max(there, default=0.0):+.2%}",
        str(len(gaps) - len(there)),
    )


def _moves(found: Iterable[Measured]) -> list[tuple[str, tuple[int, float]]]:
    total: dict[str, tuple[int, float]] = {}
    for one in found:
        for name, (times, gain) in one.won.items():
            before = total.get(name, (0, 0.0))
            total[name] = (before[0] + times, before[1] + gain)
    return sorted(total.items(), key=lambda item: -item[1][1])
