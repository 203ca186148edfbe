"""The ten numbers of a fleet's ledger, each asked of a fleet whose truth is known, or of a small case made for it.

    python -m benchmarks.fleet_numbers [--jobs 300] [--days 182] [--nodes 500] [--seed 1] [--length 630] [--json FILE]

`before`: what the ledger of 2026-11-22 answered to the same, on a fleet of the same size; `now`: what it answers;
`wanted`: what happened, or the limit. Servers are private ones (tests/db/postgres.py). Questions are asked of SQLite
(`benchmarks.fleet questions --postgresql` asks the other). Takes a few minutes; exits with 1 where one is not as
wanted.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table
from scipy import stats
from sqlalchemy.exc import DBAPIError

if not __package__:  # run as a file, not with -m
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import fleet as made
from benchmarks import ledger_size, ledger_writers
from resihp.db import migrate
from resihp.db.engine import resolve
from resihp.db.grants import statements
from resihp.db.reading import queries
from resihp.db.reading.reader import Reader
from resihp.db.settling import settle
from resihp.db.writing.catch_up import catch_up
from resihp.errors import ResihpError
from tests.db.conftest import BEGAN, story, write_journal
from tests.db.postgres import FAST, Server
from tests.db.reading.test_hardware import BAD, job, machine
from tests.db.test_facts import lost_and_back
from tests.db.test_migrate import execute
from tests.db.test_two_versions import iterations, job_in, newer

NOW = datetime.fromtimestamp(made.ENDED, UTC)
RANKS, ITERATIONS = 16_384, 400
TOLERANCE = 0.001
PART_SLOW = 0.005
"""Of an iteration that was slow and is done again, what it took too long has been put down to that."""
BY_CHANCE = 1 / 2000


@dataclass(frozen=True)
class Number:
    what: str
    before: str
    now: str
    wanted: str
    fine: bool


def writers_refused() -> Number:
    load = ledger_writers.Load(writers=101, seconds=10.0, iterations=20, begin_within_s=2.0, processes=4)
    lacking = ledger_writers.measure(load)["jobs that lack something"]
    return Number("101 jobs on a default PostgreSQL, without their records", "1", str(lacking), "0", lacking == 0)


def older_clients(folder: Path) -> Number:
    url = newer(f"sqlite:///{folder / 'newer.db'}")
    job_in(url, folder / "older")
    found = iterations(url)
    return Number("an older client on an upgraded ledger, of 20 iterations", "fails", str(found), "20", found == 20)


def lemons(reader: Reader, truth: made.Truth) -> Number:
    """Wanted are those that failed so often, by the rate of the others, as one of 2,000 nodes does by chance: nodes of
    a fleet that is idle most of the time fail seldom, lemons too. (`benchmarks.lemons`: one that is not.)"""
    found = queries.lemons(reader, NOW)
    are = found["node"].isin(truth.lemons)
    chance = stats.poisson.sf(found["observed"] - 1, made.RATE * found["device_hours"])
    tellable = int((are & (chance <= BY_CHANCE)).sum())
    right, wrong = int((are & found["lemon"]).sum()), int((~are & found["lemon"]).sum())
    what = f"of {len(truth.lemons)} lemons, of {made.LEMON:g} times the rate, found"
    return Number(what, "0", f"{right}, {wrong} falsely", f"{tellable}, 0", right >= tellable and not wrong)


def costs(reader: Reader, truth: made.Truth) -> Iterator[Number]:
    whole = queries.cost(reader).set_index("cause")["gpu_hours"]
    weeks = queries.cost_by(reader, "week")["gpu_hours"].sum()
    for what, told, true, before, off in (
        ("GPU-hours of starts, failed ones too", whole["start"], truth.start, "0.0 of failed ones", TOLERANCE),
        ("GPU-hours of iterations done again", whole["rollback"], truth.rolled_back, "0 of later attempts'", PART_SLOW),
        ("GPU-hours of all weeks", weeks, whole.sum(), "111 % of the whole", TOLERANCE),
    ):
        yield Number(what, before, f"{told:,.0f}", f"{true:,.0f}", bool(abs(told / true - 1.0) <= off))
    found = int(queries.reliability(reader)["hardware_failures"].sum())
    true = truth.hardware + truth.slow
    before = f"{true + truth.program + truth.injected}, with errors of scripts and injected faults"
    yield Number("failures that count as hardware's", before, str(found), str(true), found == true)


def reused_names(reader: Reader) -> Number:
    """Jobs whose Slurm id another one had, too."""
    jobs = reader.jobs()
    often = Counter(row["name"] for row in jobs)
    shared = [row for row in jobs if often[row["name"]] > 1]
    reached = sum(reader.job(row["uuid"][: made.UUID_LETTERS])["id"] == row["id"] for row in shared)
    told = 0
    for name in {row["name"] for row in shared}:
        try:
            reader.job(name)
        except ResihpError as error:
            told += "jobs have that name" in str(error)
    ambiguous = len({row["name"] for row in shared})
    now = f"{reached}, and {told} of {ambiguous} names refused with the choices"
    before = f"{ambiguous}, the newest of each name"
    fine = reached == len(shared) and told == ambiguous
    return Number("jobs of a name used twice that can be asked for", before, now, str(len(shared)), fine)


def facts(reader: Reader, folder: Path) -> Number:
    url = f"sqlite:///{folder / 'facts.db'}"
    write_journal(folder / "facts", lost_and_back())
    catch_up(url, folder, folder / "facts")
    with Reader.open(url) as lost:
        stays = [row for row in lost.rows("memberships", lost.job()["id"]) if row["node"] == "n2"]
    saved = reader.rows("checkpoints", reader.jobs(last=1)[0]["id"])
    known = [
        [row["lost_at"] is not None for row in stays] == [True, False],
        bool(saved) and all(row["bytes"] and row["seconds"] for row in saved),
    ]
    now = "both" if all(known) else f"{sum(known)} of 2"
    return Number("losses of a node that came back, checkpoints' bytes and seconds", "prose", now, "both", all(known))


def tenancy(folder: Path) -> Number:
    """Rows of one user's job that another user's role can take away or change."""
    with Server(FAST) as server:
        url = server.new_database()
        migrate.upgrade(url)
        urls = []
        for role in ("alice", "mallory"):
            execute(url, f"CREATE ROLE {role} LOGIN", *statements(role, str(resolve(url).database), kind="writer"))
            urls.append(resolve(url).set(username=role).render_as_string(hide_password=False))
        write_journal(folder / "hers", story())
        catch_up(urls[0], folder, folder / "hers")
        before = iterations(url)
        for statement in ("DELETE FROM jobs", "DELETE FROM iterations", "UPDATE iterations SET seconds = 0"):
            with suppress(DBAPIError):
                execute(urls[1], statement)
        with Reader.open(url) as reader:
            rows = reader.rows("iterations", reader.job()["id"])
        gone = before - sum(row["seconds"] > 0 for row in rows)
    return Number(f"of {before} rows of a job, changed or removed by another user", "all", str(gone), "0", gone == 0)


def size() -> Number:
    """Condensed, without findings: each of those is some MB more (`benchmarks.ledger_size`)."""
    with Server(FAST) as server:
        found = ledger_size.written(server.new_database(), RANKS, ITERATIONS, finding=False)
    a_day = sum(found[name] for name in ledger_size.TABLES) * ledger_size.A_DAY / ITERATIONS / 1e9
    return Number(f"GB a day of {RANKS:,} ranks", "15.4", f"{a_day:.2f}", "1", a_day <= 1.0)


def slowest_question(url: str) -> Number:
    took = {answer.number: answer.seconds for answer in made.answers(url, again=2)}
    number = max(took, key=lambda each: took[each])
    what = f"slowest of {len(took)} questions, s"
    return Number(what, "scans of whole tables", f"{took[number]:.2f} (question {number})", "2", took[number] <= 2.0)


def swapped_board(folder: Path) -> Number:
    """A device that failed four times, and now is in another node."""
    url = f"sqlite:///{folder / 'board.db'}"
    moved = {"n2": machine("n2", d1="GPU-new"), "n3": machine("n3", d0="GPU-n2-1")}
    for number, told in enumerate((*(job(day, ("n2", 1)) for day in BAD), job(80, machines=moved))):
        write_journal(folder / f"board-{number}", told)
        catch_up(url, folder, folder / f"board-{number}")
    with Reader.open(url) as reader:
        found = queries.lemons(reader, datetime.fromtimestamp(BEGAN + 100 * 86_400.0, UTC))
    named: dict[str, str] = dict(found[found["lemon"]][["node", "lemon_devices"]].itertuples(index=False))
    now = ", ".join(f"{node} device {device}" for node, device in named.items()) or "nobody"
    return Number("a board that failed, now in n3 as device 0, is distrusted as", "n2 device 1", now, "n3 device 0",
                  named == {"n3": "0"})  # fmt: skip


def numbers(jobs: int, days: float, nodes: int, seed: int, length: int) -> Iterator[tuple[int, Number]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        url = f"sqlite:///{folder / 'fleet.db'}"
        truth = made.make(url, jobs, days, nodes, seed, length)
        settle(url)
        yield 1, writers_refused()
        yield 2, older_clients(folder)
        with Reader.open(url) as reader:
            yield 3, lemons(reader, truth)
            for number in costs(reader, truth):
                yield 4, number
            yield 5, reused_names(reader)
            yield 6, facts(reader, folder)
        yield 7, tenancy(folder)
        yield 8, size()
        yield 9, slowest_question(url)
        yield 10, swapped_board(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--days", type=float, default=182.0)
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--length", type=int, default=630, help="iterations of half of the jobs, at most")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    table = Table("", "number", "before", "now", "wanted")
    found = []
    for place, number in numbers(given.jobs, given.days, given.nodes, given.seed, given.length):
        now = f"[{'green' if number.fine else 'red'}]{number.now}"
        table.add_row(str(place), number.what, number.before, now, number.wanted)
        found.append({"number": place, **asdict(number)})
    Console(width=160).print(table)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    return int(not all(number["fine"] for number in found))


if __name__ == "__main__":
    sys.exit(main())
