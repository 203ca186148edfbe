"""Whether looking at a foreign home is safe, whatever is in it.

    python -m tests.hostile_homes [--mutations 1000] [--seed 1] [--each 4] [--jobs 2] [--json FILE]

Plays mutations of a job's home and commands of `resihp` on them, as a user, as root, and what is damage as the owner.
Nothing outside may be made, changed, deleted or connected to; nothing hangs, ends with a traceback, steers the terminal
or shows a file that a link leads to. Prints how many cases of each kind of mutation were played with which commands,
and each failure with the command that plays it again. Exit code 1: there are failures. Needs root.

`--every-command`: each mutation with every way to call every command, which takes hours. `--only NUMBER` with
`--command`, `--person`, `--approach` plays one case; `--keep` leaves its world there. Called by `make soak`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from tests.hostile_homes import runner
from tests.hostile_homes.commands import Invocation, invocations
from tests.hostile_homes.harness import APPROACHES, Case, Failure, Harness
from tests.hostile_homes.mutations import KINDS, Mutation
from tests.hostile_homes.places import World, world

SHOWN_FAILURES = 3
"""Of a kind and a command, in the table's words; all are in the file that --json names."""


@dataclass
class Played:
    """What one process found."""

    cases: int
    counts: Counter[tuple[str, str]]
    failures: list[dict[str, Any]]
    slowest: list[tuple[float, str]]


def main() -> int:
    options = _options()
    if os.geteuid() != 0:
        print("tests.hostile_homes: needs root, to be two users; nothing was tried", file=sys.stderr)
        return 2
    began = time.monotonic()
    os.environ["NUMBA_DISABLE_JIT"] = "1"  # to compile the planner's search takes longer than all that is tried here
    numbers = options.only or list(range(options.first, options.first + options.mutations))
    jobs = min(options.jobs, len(numbers))
    parts = [numbers[start::jobs] for start in range(jobs)]
    if jobs == 1:
        played = [_play(options, parts[0])]
    else:
        with multiprocessing.get_context("fork").Pool(jobs) as pool:
            played = pool.starmap(_play, [(options, part) for part in parts])
    failures = [failure for part in played for failure in part.failures]
    _print_table(played)
    _print_failures(failures)
    cases = sum(part.cases for part in played)
    seconds = time.monotonic() - began
    print(f"{len(numbers)} mutations, {cases} cases, {len(failures)} failures in {seconds:.0f} s; seed {options.seed}")
    for took, again in sorted((slow for part in played for slow in part.slowest), reverse=True)[:3]:
        print(f"  {took:.1f} s: {again}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"cases": cases, "seconds": seconds, "failures": failures}, file, indent=1)
    return 1 if failures else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile_homes", description=__doc__)
    parser.add_argument("--mutations", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first mutation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--each", type=int, default=4, help="commands for each mutation and person")
    parser.add_argument("--every-command", action="store_true")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--kind", help="only mutations that begin with this kind")
    parser.add_argument("--only", type=int, nargs="+", help="only the mutations of these numbers")
    parser.add_argument("--command", help="only this command, with its words as they are printed")
    parser.add_argument("--person", choices=("reader", "root", "owner"))
    parser.add_argument("--approach", choices=APPROACHES)
    parser.add_argument("--terminal", action="store_true")
    parser.add_argument("--keep", action="store_true", help="with --only: leave the world there, to be looked at")
    parser.add_argument("--json", help="write all failures to this file")
    return parser.parse_args()


def _play(options: argparse.Namespace, numbers: list[int]) -> Played:
    failures: list[dict[str, Any]] = []
    with world(keep=options.keep) as made:
        runner.preload(lambda: _modules_of_all_commands(made))
        harness = Harness(made, options.seed + (numbers[0] if numbers else 0) * 1_000_003)
        for number in numbers:
            mutation = Mutation.drawn(options.seed, number)
            if options.kind and mutation.kinds[0] != options.kind:
                continue
            for failure in harness.run(mutation, _cases(options, harness, mutation)):
                failures.append(_row(failure))
                print(_told(failures[-1]), file=sys.stderr, flush=True)
        return Played(harness.cases, Counter(harness.counts), failures, harness.slowest)


def _cases(options: argparse.Namespace, harness: Harness, mutation: Mutation) -> list[Case]:
    people = [options.person] if options.person else ["reader", "root", *(["owner"] if mutation.is_damage else [])]
    if options.command:
        words = tuple(shlex.split(options.command))
        named = [each for each in harness.every if each.words == words] or [Invocation(words[0], words)]
        approaches = [options.approach] if options.approach else APPROACHES
        return [
            Case(mutation, who, how, each, options.terminal) for who in people for how in approaches for each in named
        ]
    if options.every_command:
        dealt = []
        for who in people:
            for index, each in enumerate(harness.every):
                how = "named" if who == "owner" else APPROACHES[(mutation.number + index) % len(APPROACHES)]
                dealt.append(Case(mutation, who, how, each, bool(index % 2)))
        return dealt
    return [case for case in harness.dealt(mutation, options.each) if case.person in people]


def _modules_of_all_commands(made: World) -> list[str]:
    """What a process has imported that carried out one of each command on the reader's own job, as root."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            os.environ.update(made.root.environment | {"RESIHP_HOME": str(made.root.home)})
            os.chdir(made.root.cwd)
            nothing = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(nothing, number)
            tried = set()
            for each in invocations():
                head = (each.command, each.words[1] if each.command == "history" else "")
                if head in tried or each.endless or each.command in ("doctor", "submit", "init", "stop"):
                    continue
                tried.add(head)
                runner.carried_out_quietly([word.replace("{job}", "local-1") for word in each.words])
            os.write(writing, json.dumps(sorted(sys.modules)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        names: list[str] = json.loads(file.read() or "[]")
    os.waitpid(pid, 0)
    made.renew_readers()
    return [name for name in names if name.partition(".")[0] not in ("tests", "__main__")]


def _row(failure: Failure) -> dict[str, Any]:
    case = failure.case
    return {
        "kind": failure.kind,
        "command": case.invocation.command,
        "mutation": "+".join(case.mutation.kinds),
        "person": case.person,
        "approach": case.approach,
        "words": failure.words,
        "done": list(failure.done),
        "again": case.again,
    }


def _told(row: dict[str, Any]) -> str:
    done = "; ".join(row["done"]).encode("ascii", "backslashreplace").decode()[:300]
    words = str(row["words"]).encode("ascii", "backslashreplace").decode()
    return f"{row['kind']}: {words}\n    {done}\n    {row['again']}"


def _print_table(played: list[Played]) -> None:
    counts: Counter[tuple[str, str]] = Counter()
    failed: Counter[tuple[str, str]] = Counter()
    for part in played:
        counts += part.counts
        failed += Counter(
            (row["mutation"].partition("+")[0], row["command"].split()[0])
            for row in {row["again"]: row for row in part.failures}.values()
        )
    commands = sorted({command for _, command in counts})
    width = max((len(kind) for kind in KINDS), default=0)
    print("failures/cases, by the mutation's first kind and the command")
    print(" " * width, *(f"{command[:9]:>9}" for command in commands), "      all")
    for kind in dict.fromkeys(kind for kind in KINDS for played_kind, _ in counts if kind == played_kind):
        cells = [_cell(failed[kind, command], counts[kind, command]) for command in commands]
        whole = _cell(sum(failed[kind, c] for c in commands), sum(counts[kind, c] for c in commands))
        print(f"{kind:{width}}", *(f"{cell:>9}" for cell in cells), f"{whole:>9}")


def _cell(failed: int, cases: int) -> str:
    return f"{failed}/{cases}" if cases else "-"


def _print_failures(failures: list[dict[str, Any]]) -> None:
    for kind, number in Counter(row["kind"] for row in failures).most_common():
        print(f"\n{kind}: {number}")
        rows = [row for row in failures if row["kind"] == kind]
        for command, of_command in Counter(row["command"] for row in rows).most_common():
            print(f"  {command}: {of_command}")
            for row in [row for row in rows if row["command"] == command][:SHOWN_FAILURES]:
                print("    " + _told(row).replace("\n", "\n    "))


if __name__ == "__main__":
    sys.exit(main())
