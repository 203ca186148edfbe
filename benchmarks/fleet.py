"""A fleet's ledger with its truth: jobs of many users, failures, lemons, repairs, attempts, for as long as one likes.

    python -m benchmarks.fleet make URL [--jobs 300] [--days 182] [--nodes 500] [--seed 1] [--length 400]
    python -m benchmarks.fleet questions URL [--limit 2] [--again 1] [--postgresql]

`make` fills an empty ledger through the projection, as a job's journal does, and writes the truth beside it, as JSON on
stdout. `questions` asks all of docs/questions.md of the ledger with the commands that stand there, and times them, each
`--again` so often, of which the fastest counts; it fails where one takes longer than the limit, or ends with an error.
With `--postgresql` the ledger at URL, a SQLite file, is imported into a private PostgreSQL (tests/db/postgres.py) and
that is asked. A fleet of a year: `--jobs 3000 --days 365`.

A job holds its nodes from its start to its end. Devices fail by their rate, lemons' by `LEMON` times that; the replica
of a device that failed is left out, and a job without a whole replica dies, and is submitted again by its user: it goes
on from its last checkpoint, so that what came after that is done twice.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table
from sqlalchemy.orm import Session

from resihp.db import migrate
from resihp.db.engine import file_of, make_engine, resolve
from resihp.db.exchange import import_from
from resihp.db.projection.applying import apply_all
from resihp.db.projection.jobs import job_of
from resihp.db.reading.reader import Reader
from resihp.parallelism.layout import Layout
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan, spread
from resihp.protocol.messages import Declare, StepOutcome
from resihp.record import journal

if not __package__:  # run as a file, not with -m
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ENDED = datetime(2026, 11, 22, tzinfo=UTC).timestamp()
DEVICES = 8
USERS, ACCOUNTS, PARTITIONS, CLUSTERS = 40, 8, ("h100", "h200"), ("blue", "green")
RATE = 3e-4
"""Failures of a healthy device an hour: 7 in 1,000 GPU-days."""
LEMON = 25.0
LEMONS = 0.02
"""Of all nodes."""
ITERATION_S = 120.0
LENGTH = 400
CHECKPOINT_EVERY = 50
RECOVERY_S = 45.0
SIZES = ((1, 6), (2, 8), (4, 8), (8, 6), (16, 3), (32, 1))
"""Nodes of a job, and how often."""
PROGRAM, START_FAILED, INJECTED, SLOW = 0.08, 0.03, 0.02, 0.1
"""Shares of attempts: that end by an error of the script; before the first iteration; with an injected fault; in which
a device is slow for a while."""
SOFTWARE = (
    journal.Software(torch="2.11.0", megatron_core="0.15.0", cuda="12.8", nccl="2.26.2", script_commit="3f2c1aa"),
    journal.Software(torch="2.13.0", megatron_core="0.16.1", cuda="13.0", nccl="2.28.3", script_commit="9bd07e4"),
)
MICRO_BATCHES = 32
MODEL = ModelSpec(
    layers=32, hidden=4096, heads=32, kv_groups=8, ffn_hidden=14336, vocab=128_000, sequence=4096, precision="bf16"
)
DECLARED = Declare(
    model=MODEL, micro_batches=MICRO_BATCHES, iterations=10**6, resume_from=0, fingerprint="same", device="cuda"
)
UUID_LETTERS = 12
DRIVERS = ("570.86.15", "580.65.06")
"""Before and after the middle of the time."""


@dataclass
class Truth:
    """What the ledger must tell. Hours are GPU-hours; `held`: from each attempt's start to its end."""

    seed: int
    jobs: int = 0
    attempts: int = 0
    iterations: int = 0
    lemons: list[str] = field(default_factory=list)
    held: float = 0.0
    start: float = 0.0
    rolled_back: float = 0.0
    hardware: int = 0
    program: int = 0
    injected: int = 0
    slow: int = 0
    by_owner: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Node:
    cluster: str
    name: str
    """Nodes of the clusters are called alike."""
    rate: float
    """Failures of a device an hour."""


class _Fleet:
    def __init__(self, jobs: int, days: float, nodes: int, seed: int, length: int) -> None:
        self._length = length
        self._rng = random.Random(seed)
        self._jobs, self._began, self._days = jobs, ENDED - days * 86400.0, days
        lemons = set(self._rng.sample(range(nodes), max(1, round(LEMONS * nodes))))
        nodes_of = [(CLUSTERS[n % len(CLUSTERS)], f"gpu{n // len(CLUSTERS) + 1:04}") for n in range(nodes)]
        self.nodes = [_Node(*of, RATE * (LEMON if n in lemons else 1.0)) for n, of in enumerate(nodes_of)]
        self.truth = Truth(seed, lemons=["/".join(nodes_of[n]) for n in sorted(lemons)])

    def nodes_of(self, cluster: str) -> list[_Node]:
        return [node for node in self.nodes if node.cluster == cluster]

    def attempts(self) -> Iterator[list[journal.Record]]:
        """Journals, one attempt after the other."""
        starts = sorted(self._rng.random() * 0.98 for _ in range(self._jobs))
        for number, start in enumerate(starts):
            yield from self._job(number, self._began + start * self._days * 86400.0)

    def _job(self, number: int, at: float) -> Iterator[list[journal.Record]]:
        """A job until it is done: attempts in a row. Slurm's numbers wrap round, so that some are used twice."""
        rng = self._rng
        self.truth.jobs += 1
        size = rng.choices([n for n, _ in SIZES], [share for _, share in SIZES])[0]
        user, cluster = f"user{rng.randrange(USERS):02}", rng.choice(CLUSTERS)
        run = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        target = max(20, round(rng.lognormvariate(math.log(self._length), 0.7)))
        done, restarts = 0, 0
        hours: dict[int, float] = {}
        while done < target and at < ENDED and restarts < 4:
            slurm = journal.SlurmIdentity(
                cluster=cluster,
                job=1000 + (7 * number + restarts) % (5 * self._jobs // 6 * 7),
                submitted_at=at - rng.expovariate(1 / 1800.0),
                account=f"team{int(user[4:]) % ACCOUNTS}",
                partition=PARTITIONS[number % 2],
                qos="normal",
            )
            attempt = _Attempt(self, rng, size, user, run, slurm, restarts)
            records, done, at = attempt.play(at, done, target)
            self.truth.rolled_back += sum(hours[i] for i in attempt.hours.keys() & hours.keys())
            hours |= attempt.hours
            yield records
            at += rng.expovariate(1 / 3600.0)
            restarts += 1

    def late(self, at: float) -> int:
        """1 in the second half of the time, 0 before."""
        return int(at > ENDED - self._days * 43200.0)


class _Attempt:
    """One start of a job: its journal."""

    def __init__(
        self,
        fleet: _Fleet,
        rng: random.Random,
        size: int,
        user: str,
        run: str,
        slurm: journal.SlurmIdentity,
        restarts: int,
    ) -> None:
        self._fleet, self._rng, self._run, self._slurm, self._user = fleet, rng, run, slurm, user
        self._nodes = rng.sample(fleet.nodes_of(slurm.cluster), size)
        self._pp = 2 if size > 1 else 1
        self._restarts = restarts
        self._recovering: tuple[int, int] | None = None
        self._usual = ITERATION_S
        """Seconds of an iteration while all is well."""
        self._records: list[journal.Record] = []
        self.hours: dict[int, float] = {}
        """GPU-hours of each iteration, of those that worked."""

    def play(self, at: float, done: int, target: int) -> tuple[list[journal.Record], int, float]:
        """The journal from `at` on, the iteration of the last checkpoint or of the end, and when it ended."""
        rng, truth = self._rng, self._fleet.truth
        devices, began = len(self._nodes) * DEVICES, at
        truth.attempts += 1
        self._write(at, self._started())
        for n, node in enumerate(self._nodes):
            self._write(at + 20.0, self._joined(node))
            for d in range(DEVICES):
                rank = n * DEVICES + d
                self._write(at + 40, journal.WorkerStarted(rank=rank, node=node.name, device=d, pid=9 + rank, epoch=1))
        self._write(at + 60.0, journal.ModelDeclared(declare=DECLARED))
        ready = at + rng.uniform(120.0, 900.0)
        fate = rng.random()
        if fate < START_FAILED:
            ended = ready + rng.uniform(600.0, 2400.0)
            self._write(ended, journal.JobEnded(exit_code=1, state="failed", reason="did not start"))
            self._account(began, ended, devices, ended - began)
            return self._records, done, ended
        pipes = len(self._nodes) // self._pp
        layout = Layout.uniform(tp=DEVICES, pp=self._pp, dp=pipes, layers=32)
        program = done + rng.randrange(1, target) if fate < START_FAILED + PROGRAM else None
        injected = fate > 1.0 - INJECTED
        slow = rng.random() < SLOW
        dead: set[int] = set()
        rank, failing = self._next_failure(ready, dead, injected)
        i, at, epoch, failures, saved = done, ready, 1, 0, done
        self._usual = usual = ITERATION_S * rng.lognormvariate(0.0, 0.3)
        self._plan(ready, 1, layout, "start", done + 1)
        slow_from, slow_to = (i + 10, i + 10 + rng.randrange(5, 60)) if slow else (0, 0)
        while i < target:
            seconds = usual * rng.lognormvariate(0.0, 0.05) * pipes / (pipes - len(dead) / self._pp)
            if i + 1 == program or at + seconds > ENDED:
                break
            if at + seconds > failing:
                self._recovering = None
                failures += 1
                gone = self._failed(failing, rank, i + 1, epoch, failures, injected)
                if injected:
                    truth.injected += 1
                    injected = False
                else:
                    truth.hardware += 1
                replica = rank // DEVICES // self._pp
                lost = {replica * self._pp + s for s in range(self._pp)}
                at = gone
                dead |= lost
                if len(dead) == len(self._nodes):
                    break
                epoch += 1
                self._recovered(at, epoch, layout, dead, failures, i + 1)
                at += RECOVERY_S
                rank, failing = self._next_failure(at, dead, injected)
                continue
            i += 1
            if slow and slow_from <= i < slow_to:
                seconds *= 1.4
            at += seconds
            self.hours[i] = seconds * (len(self._nodes) - len(dead)) * DEVICES / 3600.0
            self._committed(at, i, epoch, seconds, usual)
            self._reconfigured(at, seconds)
            if slow and i == slow_from:
                failures += 1
                truth.slow += 1
                self._slow(at, i, epoch, failures)
                slow_failure = failures
            if slow and i == slow_to:
                self._write(
                    at,
                    journal.FailureEnded(
                        failure=slow_failure, node=self._nodes[0].name, device=0, iteration=i, evidence="as before"
                    ),
                )
            if i % CHECKPOINT_EVERY == 0:
                saved = i
                self._write(at, journal.CheckpointCommitted(iteration=i, folder="/saved", bytes=10**11, seconds=9.0))
        ended = at + 5.0
        self._end(ended, i, target, program, failures, epoch)
        self._account(began, ended, devices, ready - began)
        truth.iterations += i - done
        if i >= target:
            return self._records, target, ended
        return self._records, saved, ended

    # --- entries ------------------------------------------------------------------------------------------------------

    def _write(self, at: float, entry: journal.AnyEntry) -> None:
        self._records.append(journal.Record(len(self._records) + 1, at, entry))

    def _started(self) -> journal.JobStarted:
        again = f"-r{self._restarts}" if self._restarts else ""
        return journal.JobStarted(
            job=f"{self._slurm.job}{again}",
            command=("python", "train.py"),
            nodes=len(self._nodes),
            gpus_per_node=DEVICES,
            tp=DEVICES,
            pp=self._pp,
            schedule="1f1b",
            host=self._nodes[0].name,
            user=self._user,
            restart_count=self._restarts,
            version="0.1.0",
            configuration={},
            run=self._run,
            slurm=self._slurm,
        )

    def _joined(self, node: _Node) -> journal.NodeJoined:
        devices = tuple(
            journal.DeviceInventory(
                device=d, name="NVIDIA H100", uuid=f"GPU-{node.cluster}-{node.name}-{d}", vbios="96.00.89"
            )
            for d in range(DEVICES)
        )
        found = journal.NodeInventory(
            serial=f"S-{node.cluster}-{node.name}",
            kernel="5.14.0-503",
            image="Rocky Linux 9.5",
            driver=DRIVERS[self._fleet.late(self._records[0].at)],
            devices=devices,
        )
        return journal.NodeJoined(node=node.name, host=node.name, devices=DEVICES, inventory=found)

    def _plan(self, at: float, epoch: int, layout: Layout, action: str, following: int) -> None:
        plan = Plan(epoch=epoch, layout=layout, assignment=spread(MICRO_BATCHES, len(layout.replicas)))
        reason = "first plan" if epoch == 1 else "a device failed"
        seconds = self._usual * len(self._nodes) / self._pp / len(layout.replicas)
        decided = journal.PlanDecided(
            plan=plan,
            next_iteration=following,
            action=action,  # type: ignore[arg-type]
            finish=None,
            reason=reason,
            predicted=seconds,
            unit="s",
            basis=journal.PlanBasis(kept_out=layout.standby, times=self._times()),
            considered=(journal.OtherPlan(name="narrower replicas", predicted=1.2 * seconds),) if epoch > 1 else (),
        )
        self._write(at, decided)
        self._write(at, journal.PlanInEffect(epoch=epoch))

    def _times(self) -> journal.LearnedTimes:
        """Of a micro-batch in a layer, by which all of them take as long as iterations do."""
        each = self._usual / MICRO_BATCHES / MODEL.layers / 3.0
        return journal.LearnedTimes(layers=((each,) * 3,), embedding=(0.0,) * 3, head=(each,) * 3)

    def _next_failure(self, at: float, dead: set[int], injected: bool) -> tuple[int, float]:
        """The rank that fails next, and when."""
        alive = [n for n in range(len(self._nodes)) if n not in dead]
        rates = [self._nodes[n].rate * DEVICES for n in alive]
        when = at + self._rng.expovariate(sum(rates)) * 3600.0
        n = self._rng.choices(alive, rates)[0]
        if injected:
            when = min(when, at + 7200.0)
        return n * DEVICES + self._rng.randrange(DEVICES), when

    def _failed(self, at: float, rank: int, i: int, epoch: int, failure: int, injected: bool) -> float:
        node, device = self._nodes[rank // DEVICES].name, rank % DEVICES
        self._write(at + 3.0, journal.WorkerEnded(rank=rank, exit=-6, epoch=epoch))
        found = journal.FailureFound(
            failure=failure,
            kind="fail-stop",
            component="device",
            cause=f"rank {rank} lost its device: Xid 79",
            ranks=(rank,),
            node=node,
            device=device,
            iteration=i,
            epoch=epoch,
            evidence="NVRM: Xid 79, GPU has fallen off the bus",
            detect_s=3.0 if injected else None,
            noticed_s=1.0,
            failed_s=4.0,
            hardware=True,
            diagnosed=journal.Diagnosed(code="xid 79", category="device", ranks=(rank,), node=node, device=device),
        )
        self._write(at + 4.0, found)
        if not injected:
            self._write(at + 5.0, journal.DrainDecided(drain=failure, node=node, failure=failure, reason="Xid 79"))
            answer = journal.DrainAnswered(drain=failure, node=node, step="slurm", outcome="done", text="drained")
            self._write(at + 6.0, answer)
        return at + 6.0

    def _recovered(self, at: float, epoch: int, layout: Layout, dead: set[int], failure: int, following: int) -> None:
        left = tuple(
            replica
            for r, replica in enumerate(layout.replicas)
            if not dead & {r * self._pp + s for s in range(self._pp)}
        )
        standby = tuple(rank for n in sorted(dead) for rank in range(n * DEVICES, (n + 1) * DEVICES))
        self._plan(at + 1.0, epoch, Layout(left, standby), "redo", following)
        self._recovering = (epoch, failure)

    def _reconfigured(self, at: float, seconds: float) -> None:
        """With the first iteration that is committed after it."""
        if self._recovering is None:
            return
        (epoch, failure), self._recovering = self._recovering, None
        done = journal.Reconfigured(
            epoch=epoch,
            failures=(failure,),
            attempts=1,
            action="redo",
            park_s=2.0,
            plan_s=0.5,
            groups_s=12.0,
            state_s=RECOVERY_S - 14.5,
            first_iteration_s=seconds,
            seconds=RECOVERY_S + seconds,
            bytes_moved=10**10,
        )
        self._write(at, done)

    def _committed(self, at: float, i: int, epoch: int, seconds: float, usual: float) -> None:
        outcome = StepOutcome(
            iteration=i,
            clip=1.0,
            skip=False,
            learning_rate=1e-4,
            gradient_norm=1.0,
            loss=2.0,
            tokens=2**22,
            sum_squared_lengths=2**40,
            samples=512,
            samples_digest="0" * 16,
        )
        entry = journal.IterationCommitted(epoch=epoch, outcome=outcome, seconds=seconds, predicted_seconds=usual)
        self._write(at, entry)

    def _slow(self, at: float, i: int, epoch: int, failure: int) -> None:
        node = self._nodes[0].name
        found = journal.FailureFound(
            failure=failure,
            kind="fail-slow",
            component="device",
            cause=f"device 0 of {node} at 71 % of its speed",
            ranks=(0,),
            node=node,
            device=0,
            iteration=i,
            epoch=epoch,
            evidence="probe: 71 % of its peers",
            detect_s=None,
            speed=0.71,
            confidence=0.97,
        )
        suspected = journal.Suspected(
            rank=0,
            node=node,
            evidence="probe: 71 % of its peers",
            kind="slow",
            suspicion=1,
            ranks=(0,),
            iteration=i,
            detected=i,
            change=0.4,
            confidence=0.97,
            test="log evidence",
            statistic=14.9,
            threshold=12.1,
        )
        self._write(at - 1.0, suspected)
        declined = journal.ChangeDeclined(
            about="plan",
            reason=found.cause,
            why="would save 0.8 % per iteration",
            iteration=i,
            failures=(failure,),
            layout="without replica 0",
            predicted=1.39 * self._usual,
            present=1.4 * self._usual,
            unit="s",
        )
        self._write(at, found)
        self._write(at + 1.0, declined)

    def _end(self, at: float, i: int, target: int, program: int | None, failures: int, epoch: int) -> None:
        if i >= target:
            ended = journal.JobEnded(exit_code=0, state="completed", reason="trained to its end")
        elif i + 1 == program:
            self._fleet.truth.program += 1
            found = journal.FailureFound(
                failure=failures + 1,
                kind="program",
                component="script",
                cause="ValueError: loss is not finite",
                ranks=(0,),
                node=None,
                device=None,
                iteration=i + 1,
                epoch=epoch,
                evidence="Traceback",
                detect_s=None,
                hardware=False,
            )
            self._write(at - 1.0, found)
            ended = journal.JobEnded(exit_code=1, state="failed", reason="the script failed")
        elif at > ENDED - 2 * ITERATION_S:
            ended = journal.JobEnded(exit_code=None, state="cancelled", reason="the end of time")
        else:
            ended = journal.JobEnded(exit_code=75, state="failed", reason="no complete replica is left")
        self._write(at, ended)

    def _account(self, began: float, ended: float, devices: int, start_s: float) -> None:
        truth = self._fleet.truth
        hours = (ended - began) * devices / 3600.0
        truth.held += hours
        truth.start += start_s * devices / 3600.0
        truth.by_owner[self._user] = truth.by_owner.get(self._user, 0.0) + hours


def make(url: str, jobs: int, days: float, nodes: int, seed: int, length: int = LENGTH) -> Truth:
    """Fill the ledger at `url`, which must be empty or not there. `length`: iterations of half of the jobs, at most."""
    migrate.upgrade(url)
    engine = make_engine(resolve(url), write=True)
    fleet = _Fleet(jobs, days, nodes, seed, length)
    for records in fleet.attempts():
        with Session(engine) as session, session.begin():
            apply_all(session, job_of(session, records[0]), records)
    engine.dispose()
    return fleet.truth


# --- questions ------------------------------------------------------------------------------------------------------

QUESTIONS = Path(__file__).parents[1] / "docs" / "questions.md"
_ROW = re.compile(r"^\| (?P<number>\d+) \| (?P<question>[^|]+) \| `(?P<command>[^`]+)` \|")


def questions() -> list[tuple[int, str, list[str]]]:
    """Number, question and command of each row of docs/questions.md."""
    rows = [_ROW.match(line) for line in QUESTIONS.read_text().splitlines()]
    return [(int(row["number"]), row["question"], shlex.split(row["command"])) for row in rows if row is not None]


def names_in(url: str) -> dict[str, str]:
    """What stands for JOB, OTHER, NODE and the rest: newest jobs that ended well, the last failure."""
    with Reader.open(url) as reader:
        done = [job for job in reader.jobs(last=200) if job["state"] == "completed" and not job["restart_count"]]
        failures = reader.rows("failures", None, last=1)
        node = failures[0]["node"] or "gpu0001"
        cluster = next((name.split("/")[0] for name in reader.nodes(None) if name.endswith(f"/{node}")), CLUSTERS[0])
    middle = done[len(done) // 2]["started_at"]
    return {
        "JOB": done[0]["uuid"][:UUID_LETTERS],
        "OTHER": done[1]["uuid"][:UUID_LETTERS],
        "USER": done[0]["owner"],
        "NODE": node,
        "CLUSTER": cluster,
        "DRIVER": DRIVERS[1],
        "DAY": f"{middle:%Y-%m-%d}",
    }


@contextmanager
def on_postgresql(url: str) -> Iterator[str]:
    """The URL of a copy of the SQLite ledger at `url` in a PostgreSQL of its own."""
    from tests.db.postgres import Server

    with Server() as server:
        copy = server.new_database()
        import_from(str(file_of(resolve(url))), copy)
        with make_engine(resolve(copy), write=True).connect().execution_options(isolation_level="AUTOCOMMIT") as to:
            to.exec_driver_sql("VACUUM ANALYZE")  # as a server does by itself after a while
        yield copy


@dataclass(frozen=True)
class Answer:
    number: int
    question: str
    seconds: float
    right: bool
    """It ended well."""
    begins: str


def answers(url: str, again: int) -> Iterator[Answer]:
    """Each question, as somebody types it, and the fastest of so many times."""
    names = names_in(url)
    for number, question, command in questions():
        words = [re.sub("|".join(names), lambda found: names[found[0]], word) for word in command[1:]]
        times = []
        for _ in range(again):
            began = time.monotonic()
            done = subprocess.run(
                [sys.executable, "-m", "resihp", *words, "--ledger", url], capture_output=True, text=True, check=False
            )
            times.append(time.monotonic() - began)
        lines = [line.strip() for line in (done.stdout or done.stderr).splitlines() if line.strip(" ─")]
        yield Answer(number, question, min(times), done.returncode == 0, " / ".join(lines[:2])[:90])


def ask(url: str, limit_s: float, again: int) -> bool:
    """Print what is answered, and in what time; whether all were in time."""
    table = Table("", "question", "s", f"over {limit_s:g} s", "answer begins")
    fine = True
    for answer in answers(url, again):
        late = answer.seconds > limit_s
        fine &= answer.right and not late
        seconds = f"[{'green' if answer.right and not late else 'red'}]{answer.seconds:.2f}"
        table.add_row(str(answer.number), answer.question, seconds, "yes" if late else "no", answer.begins)
    Console(width=200).print(table)
    return fine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("url")
    making.add_argument("--jobs", type=int, default=300)
    making.add_argument("--days", type=float, default=182.0)
    making.add_argument("--nodes", type=int, default=500)
    making.add_argument("--seed", type=int, default=1)
    making.add_argument("--length", type=int, default=LENGTH, help="iterations of half of the jobs, at most")
    asking = commands.add_parser("questions")
    asking.add_argument("url")
    asking.add_argument("--limit", type=float, default=2.0)
    asking.add_argument("--again", type=int, default=1)
    asking.add_argument("--postgresql", action="store_true")
    given = parser.parse_args()
    if given.command == "make":
        print(
            json.dumps(asdict(make(given.url, given.jobs, given.days, given.nodes, given.seed, given.length)), indent=1)
        )
        return
    with on_postgresql(given.url) if given.postgresql else nullcontext(given.url) as url:
        fine = ask(url, given.limit, max(given.again, 1))
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
