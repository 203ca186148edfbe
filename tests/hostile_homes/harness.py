"""Mutated homes, commands on them, and what is wrong with what came of it.

`Harness.run` plays mutations by number. Each is looked at by a reader and by root, on three ways to come upon a foreign
home (`APPROACHES`), and damage also by its owner. A deck of all ways to call `resihp` is dealt out over the mutations,
so that each has its turn with each kind. After every command the world is compared with what it was.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from resihp.wrapper.exit_codes import EXIT_CODES, OUTPUT_CLOSED, REQUEUE_REQUESTED, TRAINING_BROKEN
from tests.hostile_homes.commands import NO_JOB, Invocation, invocations
from tests.hostile_homes.mutations import CHANGES_WHAT_JOURNALS_SAY, Mutation, Target
from tests.hostile_homes.places import Person, Snapshot, World, differences
from tests.hostile_homes.runner import Main, Outcome, Session, resihp

APPROACHES = ("named", "cwd", "path")
"""RESIHP_HOME names the home; it is `./.resihp` of the folder that one has changed into; the job's folder is given."""
DOCUMENTED = frozenset({0, 3, 130, 143, TRAINING_BROKEN, OUTPUT_CLOSED, REQUEUE_REQUESTED, *EXIT_CODES.values()})
STEERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
SLURM = frozenset({"scontrol", "sinfo", "squeue", "sacct", "sacctmgr", "sbatch", "scancel", "srun", "sdiag", "sshare"})
RARELY = 10
"""A command that looks at no home is called in one of so many turns."""
HISTORY_TURNS = 4
"""That `history` has more than another command."""
BESIDE_A_LEDGER = ("-wal", "-shm")
"""What SQLite makes beside a ledger of one's own while it is open."""
MAY_BE_WRITTEN = re.compile(r"/dev/(null|tty|ptmx|pts/\d+)|/proc/self/.*|/memfd:.*")


@dataclass(frozen=True)
class Case:
    """One command, by one person, on one mutated home."""

    mutation: Mutation
    person: str
    approach: str
    invocation: Invocation
    terminal: bool

    @property
    def again(self) -> str:
        """The command that plays it once more."""
        flag = " --terminal" if self.terminal else ""
        return (
            f"python -m tests.hostile_homes --seed {self.mutation.seed} --only {self.mutation.number} "
            f"--person {self.person} --approach {self.approach} --command '{self.invocation}'{flag}"
        )


@dataclass(frozen=True)
class Failure:
    """What was wrong with a case; `kind` is one of few words, for tables."""

    case: Case
    kind: str
    words: str
    done: tuple[str, ...]
    """What the mutation did."""


@dataclass
class Harness:
    """Plays mutations in a world. `main`: what the commands are, for tests of the harness itself."""

    world: World
    seed: int
    main: Main = resihp
    every: list[Invocation] = field(default_factory=invocations)
    cases: int = 0
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    """Cases by kind of mutation and command."""
    slowest: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._belongings = self.world.belongings()
        self._decks = {name: self._deck(name) for name in ("reader", "root", "owner")}

    def _deck(self, name: str) -> Iterator[Invocation]:
        """Commands in turn, `history` with its many views more often; each goes through all ways to call it."""
        rng = random.Random(f"{self.seed}/{name}/deck")
        ways: dict[str, list[Invocation]] = {}
        for invocation in self.every:
            ways.setdefault(invocation.command, []).append(invocation)
        turns = {command: itertools.cycle(rng.sample(found, len(found))) for command, found in ways.items()}
        rarely = {" ".join(words) for words in NO_JOB}
        while True:
            commands = [*ways, *("history",) * HISTORY_TURNS]
            for command in rng.sample(commands, len(commands)):
                if command not in rarely or not rng.randrange(RARELY):
                    yield next(turns[command])

    def dealt(self, mutation: Mutation, each: int) -> list[Case]:
        """So many cases of the mutation for each who looks, on any of the ways."""
        rng = random.Random(f"{mutation.seed}/{mutation.number}/cases")
        cases = []
        for person in ("reader", "root", *(("owner",) if mutation.is_damage else ())):
            approach = "named" if person == "owner" else rng.choice(APPROACHES)
            for _ in range(each):
                invocation = next(self._decks[person])
                cases.append(Case(mutation, person, approach, invocation, rng.random() < 0.5))
        return cases

    def run(self, mutation: Mutation, cases: list[Case]) -> Iterator[Failure]:
        """Play the cases, those of one person in one process."""
        for person in dict.fromkeys((case.person, case.approach) for case in cases):
            yield from self._run([case for case in cases if (case.person, case.approach) == person])

    def _run(self, cases: list[Case]) -> Iterator[Failure]:
        target, done = self._renewed(cases[0].mutation)
        session = self._session(cases[0], target)
        before = self.world.hostile()
        try:
            for case in cases:
                self._count(case)
                connections = self.world.listeners.connections
                with _led(target):
                    outcome = session.run(
                        words_of(case, target), terminal=case.terminal, endless=case.invocation.endless
                    )
                self.slowest = sorted([*self.slowest, (outcome.seconds, case.again)], reverse=True)[:5]
                seen = _Seen(
                    self.world,
                    target,
                    case,
                    outcome,
                    connections=self.world.listeners.connections - connections,
                    foreign=(before, self.world.hostile()),
                    belongings=(self._belongings, self.world.belongings()),
                )
                failures = list(seen.failures())
                yield from (Failure(case, kind, words, tuple(done)) for kind, words in failures)
                if seen.belongings[0] != seen.belongings[1]:
                    session.close()
                    self.world.renew_readers()
                    self._belongings = self.world.belongings()
                if seen.foreign[0] != seen.foreign[1] or seen.belongings[0] != seen.belongings[1]:
                    session.close()
                    target, done = self._renewed(case.mutation)
                    before = self.world.hostile()
                for person in (*self.world.readers, self.world.attacker):
                    self.world.empty(person)
        finally:
            session.close()

    def _renewed(self, mutation: Mutation) -> tuple[Target, list[str]]:
        self.world.renew_hostile()
        return mutation.apply(self.world)

    def _session(self, case: Case, target: Target) -> Session:
        person = person_of(self.world, case)
        homes = {"named": self.world.home, "path": person.home}
        environment = dict(person.environment)
        if case.approach in homes:
            environment["RESIHP_HOME"] = str(homes[case.approach])
        cwd = self.world.lure if case.approach == "cwd" else person.cwd
        return Session(person, environment, cwd, self.main)

    def _count(self, case: Case) -> None:
        self.cases += 1
        for kind in case.mutation.kinds[:1]:
            at = (kind, case.invocation.command.split()[0])
            self.counts[at] = self.counts.get(at, 0) + 1


def person_of(world: World, case: Case) -> Person:
    return {"reader": world.reader, "root": world.root, "owner": world.attacker}[case.person]


def words_of(case: Case, target: Target) -> list[str]:
    """What is typed."""
    folder = target.folder
    try:
        journal = target.local / "journal"
    except StopIteration:
        journal = target.world.local / "journal"
    names = {
        "folder": folder,
        "job": folder if case.approach == "path" else target.name,
        "journal": journal,
        "journal_here": folder / "journal",
        "ledger": f"sqlite:///{folder}/ledger.db",
        "ledger_file": folder / "ledger.db",
        "log": folder / "logs" / "n1.rank0.log",
        "mine": person_of(target.world, case).job if case.person != "owner" else folder,
        "output": "output",
        "run_file": folder / "run.json",
    }
    return [
        re.sub(r"\{(\w+)\}", lambda match: str(names[match[1]]), word) if "{" in word else word
        for word in case.invocation.words
    ]


@contextlib.contextmanager
def _led(target: Target) -> Iterator[None]:
    """Hold the lock of the job that looks as if it ran, as the attacker's own process may; of others where they say
    so."""
    import fcntl

    descriptors = []
    for folder in {target.world.home / "jobs" / "local-2", target.folder}:
        if folder != target.folder or "supervisor.json" in os.listdir(folder) if folder.is_dir() else False:
            with contextlib.suppress(OSError):
                flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
                descriptors.append(os.open(folder / "supervisor.lock", flags))
                fcntl.flock(descriptors[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@dataclass(frozen=True)
class _Seen:
    """A case, and the world before and after it."""

    world: World
    target: Target
    case: Case
    outcome: Outcome
    connections: int
    foreign: tuple[Snapshot, Snapshot]
    belongings: tuple[Snapshot, Snapshot]

    def failures(self) -> Iterator[tuple[str, str]]:
        """(kind, words) of everything that must not be."""
        checks: tuple[Callable[[], Iterator[tuple[str, str]]], ...] = (
            self._how_it_ended,
            self._outside,
            self._foreign,
            self._own,
            self._network,
            self._events,
            self._output,
        )
        for check in checks:
            yield from check()

    def _how_it_ended(self) -> Iterator[tuple[str, str]]:
        outcome = self.outcome
        if outcome.hung:
            yield "hangs", f"no end after {outcome.seconds:.1f} s; {_tail(outcome.err)}"
            return
        for text in (outcome.err, outcome.out):
            if "Traceback (most recent call last)" in text:
                yield "traceback", _tail(text[text.index("Traceback (most recent call last)") :])
                return
        if outcome.status not in DOCUMENTED:
            yield "exit code", f"{outcome.status}; {_tail(outcome.err)}"

    def _outside(self) -> Iterator[tuple[str, str]]:
        for words in differences(*self.belongings):
            if words.endswith(BESIDE_A_LEDGER):
                continue
            if not (self._prunes_its_own and words.endswith("/home/jobs/local-1/ledger.db")):
                yield "outside", words

    @property
    def _prunes_its_own(self) -> bool:
        """Whether it is asked to remove old rows of the home that RESIHP_HOME names, which is the reader's own."""
        return self.case.invocation.command == "db prune" and self.case.approach == "path"

    def _foreign(self) -> Iterator[tuple[str, str]]:
        """A foreign home stays as it is, also where everybody may write it; but for a ledger that one was told to."""
        if self.case.person == "owner":
            return
        named = f"{self.target.folder}/ledger.db" if self.case.invocation.writes_the_ledger else None
        for words in differences(*self.foreign):
            path = Path(words.partition(" ")[2])
            is_beside_own = words.endswith(BESIDE_A_LEDGER) and self._was_given(path.parent)
            if not is_beside_own and (named is None or not str(path).startswith(named)):
                yield "foreign home", words

    def _was_given(self, folder: Path) -> bool:
        """Whether the mutation has made a folder that of whoever looks, whose ledgers are read where they lie."""
        owner = next(person.uid for person in self.world.readers if person.name == self.case.person)
        return folder in self.target.given_away and folder.lstat().st_uid == owner

    def _own(self) -> Iterator[tuple[str, str]]:
        """What tells how a job has ended outlives damage elsewhere, whoever looks."""
        if self.case.person != "owner" or CHANGES_WHAT_JOURNALS_SAY.intersection(self.case.mutation.kinds):
            return
        if self.case.invocation.command.startswith(("db import", "db prune", "run")):
            return
        before, after = self.foreign
        for job in ("local-1", "4711-r1"):
            for name in ("exit_code", "journal"):
                path = str(self.world.home / "jobs" / job / name)
                if path in before and before[path] != after.get(path):
                    yield "end of a job", f"{path} is another"

    def _network(self) -> Iterator[tuple[str, str]]:
        if self.connections and not self._may_speak:
            yield "connected", f"{self.connections} times"

    @property
    def _may_speak(self) -> bool:
        """Whether a supervisor may be asked: by root, who may stop anybody's job, and by the owner."""
        return self.case.invocation.speaks and self.case.person in ("root", "owner")

    def _events(self) -> Iterator[tuple[str, str]]:
        for what, where in dict.fromkeys(self.outcome.events):
            if what == "writes":
                if not where.startswith(f"{self.world.base}/") and not MAY_BE_WRITTEN.fullmatch(where):
                    yield "outside", f"opens {where} to write"
            elif what == "connects":
                if not self._may_speak:
                    yield "connected", f"to {where}"
            elif what == "kills" or Path(where).name not in SLURM:
                yield what, where

    def _output(self) -> Iterator[tuple[str, str]]:
        text = self.outcome.out + self.outcome.err
        if self.case.terminal and not self.case.invocation.endless and (found := STEERS.search(text)):
            yield "steers the terminal", ascii(text[max(found.start() - 60, 0) : found.end() + 20])
        if self.world.secret in text and not self.case.invocation.names_a_file:
            at = text.index(self.world.secret)
            yield "shows a secret", ascii(text[max(at - 60, 0) : at + 20])


def _tail(text: str, lines: int = 6) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])[-900:]
