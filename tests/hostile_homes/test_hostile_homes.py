"""Looking at a foreign home is safe whatever is in it; and the harness that says so would notice if it were not.

`python -m tests.hostile_homes` plays a thousand mutations; here are some of each kind.
"""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import psycopg
import pytest

from tests.hostile_homes import places, runner
from tests.hostile_homes.commands import Invocation, invocations, leaves
from tests.hostile_homes.harness import Case, Failure, Harness
from tests.hostile_homes.mutations import KINDS, OFTEN, Mutation
from tests.hostile_homes.places import World, world

ROOT = Path(__file__).parents[2]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="to be two users needs root")
NUMBER = len(KINDS) + len(OFTEN)
"""Of mutations, so that each kind has a turn."""
NOTHING = Invocation("status", ("status",))


def test_every_command_is_called_in_some_way() -> None:
    called = {invocation.command for invocation in invocations()}
    assert called == {" ".join(words) for words, _ in leaves()}
    assert sum(invocation.command == "history" for invocation in invocations()) > 40, "each of its views"


@needs_root
@pytest.mark.timeout(600)
def test_foreign_homes_are_safe_to_look_at() -> None:
    """Mutations of each kind, by a user and by root."""
    command = [sys.executable, "-m", "tests.hostile_homes", "--mutations", str(NUMBER), "--each", "1"]
    played = subprocess.run([*command, "--jobs", "1"], cwd=ROOT, capture_output=True, text=True, timeout=590)
    assert played.returncode == 0, played.stdout[-20_000:] + played.stderr[-2_000:]
    cases = int(played.stdout.rpartition(" mutations, ")[2].partition(" ")[0])
    assert cases >= 2 * NUMBER


# --- the harness notices ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world() as made:
        yield made


def failures_of(
    world: World, main: Callable[[World], None], person: str = "reader", terminal: bool = False, kind: str = "times"
) -> list[Failure]:
    """What is found wrong with a command that does what `main` does."""
    harness = Harness(world, seed=1, main=lambda: main(world))
    case = Case(Mutation(1, 0, (kind,)), person, "named", NOTHING, terminal)
    return list(harness.run(case.mutation, [case]))


def appends_to_keys(world: World) -> None:
    with (world.reader.folder / ".ssh" / "authorized_keys").open("a") as file:
        file.write("ssh-ed25519 BBBB attacker\n")


def makes_a_file(world: World) -> None:
    (world.reader.folder / ".ssh" / "authorized_keys2").touch()


def deletes_a_ledger(world: World) -> None:
    (world.reader.job / "ledger.db").unlink()


def writes_elsewhere(world: World) -> None:
    path = Path(f"/tmp/resihp-hostile-{os.getpid()}")
    path.write_text("")
    path.unlink()


def changes_the_foreign_home(world: World) -> None:
    (world.home / "jobs" / "local-1" / "exit_code").write_text("1\n")


def connects(world: World) -> None:
    with socket.socket() as connection:
        connection.connect(("127.0.0.1", world.listeners.port))


def connects_unheard_by_python(world: World) -> None:
    """As libpq does; its sockets are none of Python's."""
    with pytest.raises(psycopg.Error):
        psycopg.connect(f"postgresql://me@/ledger?host={world.listeners.folder}", connect_timeout=2)


def raises(_: World) -> None:
    raise ValueError("unexpected")


def leaves_with_an_exit_code_of_its_own(_: World) -> None:
    sys.exit(42)


def starts_a_program(_: World) -> None:
    subprocess.run(["/bin/true"], check=True)


def shows_a_secret(world: World) -> None:
    print((world.reader.folder / "notes.txt").read_text())


def dies(_: World) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@needs_root
@pytest.mark.parametrize(
    ("main", "person", "kind"),
    [
        (appends_to_keys, "reader", "outside"),
        (makes_a_file, "root", "outside"),
        (deletes_a_ledger, "reader", "outside"),
        (writes_elsewhere, "reader", "outside"),
        (changes_the_foreign_home, "root", "foreign home"),
        (changes_the_foreign_home, "owner", "end of a job"),
        (connects, "reader", "connected"),
        (connects_unheard_by_python, "reader", "connected"),
        (raises, "reader", "traceback"),
        (leaves_with_an_exit_code_of_its_own, "reader", "exit code"),
        (starts_a_program, "reader", "starts"),
        (shows_a_secret, "reader", "shows a secret"),
        (dies, "reader", "exit code"),
    ],
)
def test_harness_sees(made: World, main: Callable[[World], None], person: str, kind: str) -> None:
    found = failures_of(made, main, person)
    assert kind in {failure.kind for failure in found}, found
    assert not failures_of(made, lambda _: None, person), "what was changed is as it was"


@needs_root
def test_harness_sees_what_steers_a_terminal(made: World) -> None:
    assert [failure.kind for failure in failures_of(made, lambda _: print("\x1b[2J"), terminal=True)] == [
        "steers the terminal"
    ]


@needs_root
def test_harness_ends_what_hangs_and_says_where(made: World) -> None:
    session = runner.Session(made.reader, made.reader.environment, made.reader.cwd, lambda: time.sleep(60))
    outcome = session.run(["status"], limit_s=0.3)
    assert outcome.hung
    assert "sleep(60)" in outcome.err
    assert session.pid == 0


@needs_root
def test_a_reader_is_that_user_and_nobody_else(made: World) -> None:
    def main() -> None:
        print(os.getresuid(), os.getresgid(), os.getgroups(), os.environ["HOME"])
        (made.root.folder / "work" / "x").touch()

    session = runner.Session(made.reader, made.reader.environment, made.reader.cwd, main)
    outcome = session.run([])
    session.close()
    uid = places.READER_UID
    assert outcome.out == f"{(uid,) * 3} {(uid,) * 3} [] {made.reader.folder}\n"
    assert "PermissionError" in outcome.err


@needs_root
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_mutation_changes_the_home_and_is_the_same_for_the_same_number(made: World, kind: str) -> None:
    """One that changed nothing would be a fault that did not fire."""
    seen = []
    for _ in range(2):
        made.renew_hostile()
        before = made.hostile() | places.snapshot(made.lure)
        _, words = Mutation(1, sorted(KINDS).index(kind), (kind,)).apply(made)
        after = made.hostile() | places.snapshot(made.lure)
        assert before != after
        seen.append(words)
    assert seen[0] == seen[1]
    made.renew_hostile()


@needs_root
def test_hot_journal_deletes_a_file_of_whoever_lets_sqlite_write(made: World) -> None:
    """Else the harness would look for what cannot happen."""
    deleted = []
    for number in range(12):
        made.renew_hostile()
        target, _ = Mutation(1, number, ("ledger hot journal",)).apply(made)
        before = made.belongings()
        with closing(sqlite3.connect(target.folder / "ledger.db")) as connection, suppress(sqlite3.DatabaseError):
            connection.execute("SELECT count(*) FROM jobs").fetchone()
        deleted += places.differences(before, made.belongings())
        made.renew_readers()
    made.renew_hostile()
    assert [words for words in deleted if words.startswith("deleted ")]
