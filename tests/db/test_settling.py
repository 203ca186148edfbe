"""What later attempts rolled back is kept as they end, is what would be reckoned anew, and counts for nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import delete, select, text, update
from typer.testing import CliRunner

from resihp.db import models
from resihp.db.engine import make_engine, resolve
from resihp.db.exchange import export, import_from
from resihp.db.reading.costs import fleet_costs
from resihp.db.reading.costs.cost_accounts import Account, RolledBack
from resihp.db.reading.reader import Reader
from resihp.db.retention import prune
from resihp.db.settling import settle
from resihp.db.writer import Ledger
from resihp.record import journal
from resihp.wrapper.cli import app
from tests.db.conftest import BEGAN, write_journal
from tests.db.reading.test_costs import attempt, change, commit, sums, write

RUN = "00000000-0000-0000-0000-00000000000a"
PLACES = {"a": (0, 1, 100), "b": (1000, 21, 120), "c": (2000, 51, 60), "d": (3000, 55, 200)}
"""Attempts of one run: seconds after the first, first and last iteration."""
AGAIN = {"a": ((21, 100),), "b": ((51, 120),), "c": ((55, 60),), "d": ()}
LATER = datetime.fromtimestamp(BEGAN, UTC) + timedelta(days=90)


def bring(folder: Path, url: str, *names: str) -> None:
    for name in names:
        began, first, last = PLACES[name]
        write(folder, url, (name, attempt(name, BEGAN + began, first, last, RUN)))


def kept(url: str, name: str) -> RolledBack | None:
    """What stands in the job's row."""
    with Reader.open(url) as reader:
        return msgspec.json.decode(reader.job(name)["account"], type=Account).rolled_back


def put(url: str, name: str, account: str | None) -> None:
    change(url, update(models.JobRow).where(models.JobRow.name == name).values(account=account))


def reckoned(url: str, name: str) -> Account:
    """From the rows alone."""
    with Reader.open(url) as reader:
        return reader.account({**reader.job(name), "account": None})


def told(url: str, name: str) -> Account:
    with Reader.open(url) as reader:
        found = reader.account(reader.job(name))
        assert {job["name"]: one for job, one in fleet_costs.accounts(reader)}[name] == found
        return found


def same(one: Account, other: Account) -> None:
    assert sums([one]) == pytest.approx(sums([other]), rel=1e-9, abs=1e-9)


def unsettled(url: str) -> int:
    with Reader.open(url) as reader:
        return len(reader.unsettled())


def test_each_attempt_that_ends_settles_those_before_it(
    tmp_path: Path, ledger_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring(tmp_path, ledger_url, "a")
    assert kept(ledger_url, "a") is None
    bring(tmp_path, ledger_url, "b")
    seconds = pytest.approx(160.0, abs=1e-3)
    hours = pytest.approx(160.0 * 12 / 3600, abs=1e-5)
    assert kept(ledger_url, "a") == RolledBack(again=((21, 100),), seconds=seconds, gpu_hours=hours)
    bring(tmp_path, ledger_url, "c", "d")
    assert unsettled(ledger_url) == 0
    for name, again in AGAIN.items():
        found = kept(ledger_url, name)
        assert (() if found is None else found.again) == again
        assert told(ledger_url, name).lost_s["rollback"] == pytest.approx(
            2.0 * sum(last - first + 1 for first, last in again)
        )
        same(told(ledger_url, name), reckoned(ledger_url, name))
    with Reader.open(ledger_url) as reader:
        monkeypatch.setattr(Reader, "narrow", None)  # nobody looks at the rows
        assert len(fleet_costs.accounts(reader)) == len(PLACES)


def test_attempts_may_come_in_any_order(tmp_path: Path, ledger_url: str) -> None:
    bring(tmp_path, ledger_url, "c", "a", "d", "b")
    assert unsettled(ledger_url) == 0
    for name, again in AGAIN.items():
        found = kept(ledger_url, name)
        assert (() if found is None else found.again) == again
        same(told(ledger_url, name), reckoned(ledger_url, name))


def test_what_an_attempt_that_runs_commits_again_counts_at_once(tmp_path: Path, ledger_url: str) -> None:
    """What was kept is of fewer iterations by then."""
    bring(tmp_path, ledger_url, "a", "b")
    running = [*attempt("c", BEGAN + 2000, 11, 15, RUN)]
    path = tmp_path / "running"
    path.mkdir()
    with Ledger.open(ledger_url, path) as ledger:
        for record in write_journal(path / "journal", iter(running[:-1])):
            ledger.submit(record)
        assert ledger.flush(30)
        found = told(ledger_url, "a")
        assert found.lost_s["rollback"] == pytest.approx(2.0 * (80 + 5))
        same(found, reckoned(ledger_url, "a"))
        assert unsettled(ledger_url) == 1
    assert settle(ledger_url) == 1
    same(told(ledger_url, "a"), found)
    assert unsettled(ledger_url) == 0


@pytest.mark.parametrize("how", ["upgrade", "prune", "prune, dry run"])
def test_what_was_left_is_settled_once(tmp_path: Path, ledger_url: str, how: str) -> None:
    """Accounts of an older version, and one that there is none of."""
    bring(tmp_path, ledger_url, *PLACES)
    before = {name: told(ledger_url, name) for name in PLACES}
    for name in ("a", "b"):
        old = msgspec.to_builtins(msgspec.structs.replace(before[name], rolled_back=None))
        alone = {"useful_s": before[name].useful_s + before[name].lost_s["rollback"]}
        alone["useful_gpu_hours"] = before[name].useful_gpu_hours + before[name].lost_gpu_hours["rollback"]
        for lost in ("lost_s", "lost_gpu_hours"):
            old[lost]["rollback"] = 0.0
        del old["rolled_back"]
        put(ledger_url, name, msgspec.json.encode(old | alone).decode())
    put(ledger_url, "c", None)
    assert unsettled(ledger_url) == 3
    for name, account in before.items():
        same(told(ledger_url, name), account)
    if how == "upgrade":
        assert (settle(ledger_url), settle(ledger_url)) == (3, 0)
    else:
        assert prune(ledger_url, datetime.fromtimestamp(BEGAN, UTC), dry_run=how != "prune") == []
    assert unsettled(ledger_url) == (3 if how == "prune, dry run" else 0)
    for name, account in before.items():
        same(told(ledger_url, name), account)


def test_db_upgrade_says_how_many_it_settled(tmp_path: Path, ledger_url: str) -> None:
    bring(tmp_path, ledger_url, "a", "b")
    put(ledger_url, "a", None)
    words = ["db", "upgrade", "--ledger", ledger_url]
    told = [CliRunner().invoke(app, words).stderr for _ in range(2)]
    assert told[0].endswith("up to date; costs of 1 job stored\n")
    assert told[1].endswith("up to date\n")


def test_attempts_of_two_ledgers_are_settled_where_they_meet(tmp_path: Path, ledger_urls: Callable[[], str]) -> None:
    whole, one, other = ledger_urls(), ledger_urls(), ledger_urls()
    bring(tmp_path, whole, *PLACES)
    places = [tmp_path / name for name in ("one", "other")]
    for place in places:
        place.mkdir()
    bring(places[0], one, "a", "c")
    bring(places[1], other, "b", "d")
    export(other, tmp_path / "out")
    import_from(str(tmp_path / "out"), one)
    for name in PLACES:
        same(told(one, name), told(whole, name))
    for name in PLACES:
        assert kept(one, name) == kept(whole, name)
    assert settle(one) == 0


def test_of_a_job_whose_rows_were_thinned_the_parts_still_add_up(tmp_path: Path, ledger_url: str) -> None:
    """Its iterations took 1 s at first and 3 s later, when they were committed again: what is left does not tell."""

    def uneven() -> Iterator[tuple[journal.AnyEntry, float]]:
        behind = 0.0
        for entry, at in attempt("a", BEGAN, 1, 100, RUN):
            if isinstance(entry, journal.IterationCommitted):
                seconds = 1.0 if entry.outcome.iteration <= 50 else 3.0
                behind += seconds - 2.0
                entry = commit(entry.outcome.iteration, seconds)
            yield entry, at + behind

    write(tmp_path, ledger_url, ("a", uneven()))
    write(tmp_path, ledger_url, ("b", attempt("b", BEGAN + 1000, 61, 120, RUN)))
    before = told(ledger_url, "a")
    assert before.lost_s["rollback"] == pytest.approx(120.0, abs=1e-3)
    [removed, _] = prune(ledger_url, LATER)
    assert removed.iterations > 90
    same(told(ledger_url, "a"), before)
    began = datetime.fromtimestamp(BEGAN, UTC)
    cuts = [began + timedelta(seconds=at) for at in (0, 120, 250, 1000)]
    with Reader.open(ledger_url) as reader:
        parts = [
            one
            for since, until in pairwise(cuts)
            for job, one in fleet_costs.accounts(reader, since=since, until=until)
            if job["name"] == "a"
        ]
    assert len(parts) > 1
    found, expected = sums(parts), sums([before])
    for name in ("rollback, s", "rollback, h", "useful_s", "useful_gpu_hours", "held_s", "gpu_hours"):
        assert found[name] == pytest.approx(expected[name], rel=1e-6), name


def test_a_later_attempt_settles_one_whose_rows_were_thinned(tmp_path: Path, ledger_url: str) -> None:
    bring(tmp_path, ledger_url, "a")
    prune(ledger_url, LATER)
    bring(tmp_path, ledger_url, "b")
    found = told(ledger_url, "a")
    assert kept(ledger_url, "a") is not None
    assert found.lost_s["rollback"] == pytest.approx(160.0, abs=1e-3)
    change(ledger_url, delete(models.IterationRow).where(models.IterationRow.iteration.between(2, 99),
                                                         models.IterationRow.job_id == 1))  # fmt: skip
    same(told(ledger_url, "a"), found)


ODD: list[Any] = [
    {"again": [[21, 100]], "seconds": -1.0, "gpu_hours": 0.0},
    {"again": [[21, 100]], "seconds": 1e300, "gpu_hours": 0.0},
    {"again": [[21, 100]], "seconds": 0.0, "gpu_hours": 1e9},
    {"again": [[1, 100]], "seconds": 1.0, "gpu_hours": 0.1},
    {"again": [], "seconds": 100.0, "gpu_hours": 0.1},
    {"again": [["x"]], "seconds": 1.0, "gpu_hours": 0.1},
    {"again": [[21, 1 << 80]], "seconds": 1.0, "gpu_hours": 0.1},
    {"seconds": 1.0},
    "much",
    [[]],
]
"""Rolled-back iterations of an attempt, in forms that no export of ours has."""


def test_what_an_export_says_was_rolled_back_counts_only_where_it_can_be(
    tmp_path: Path, ledger_urls: Callable[[], str]
) -> None:
    source = ledger_urls()
    bring(tmp_path, source, "a", "b")
    with Reader.open(source) as reader:
        account = msgspec.json.decode(reader.job("a")["account"])
    for n, odd in enumerate(ODD):
        print(odd)
        url, folder = ledger_urls(), tmp_path / f"out-{n}"
        forged = msgspec.json.encode({**account, "rolled_back": odd}).decode()
        put(source, "a", forged)
        export(source, folder)
        import_from(str(folder), url)
        assert unsettled(url) == 0
        for name in "ab":
            same(told(url, name), reckoned(url, name))
        put(url, "a", forged)
        same(told(url, "a"), reckoned(url, "a"))
        assert unsettled(url) == 1
        assert settle(url) == 1
        same(told(url, "a"), reckoned(url, "a"))
        assert kept(url, "a") is not None


def cannot_be_reckoned(monkeypatch: pytest.MonkeyPatch, url: str, name: str) -> None:
    """From now on, the rows of that job of the ledger."""
    with Reader.open(url) as reader:
        odd = reader.job(name)["id"]
    usual = Reader.settled

    def settled(self: Reader, job_id: int) -> str:
        if job_id == odd:
            raise OverflowError("an iteration's number")
        return usual(self, job_id)

    monkeypatch.setattr(Reader, "settled", settled)


def test_rows_that_cannot_be_reckoned_with_hold_up_nobodys_end(
    tmp_path: Path, ledger_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring(tmp_path, ledger_url, "a")
    cannot_be_reckoned(monkeypatch, ledger_url, "a")
    bring(tmp_path, ledger_url, "b")
    with Reader.open(ledger_url) as reader:
        second = reader.job("b")
        assert (second["state"], second["account"] is None) == ("cancelled", False)
        assert not [row for row in reader.rows("events", second["id"]) if row["kind"].startswith("Unprojected")]
    assert unsettled(ledger_url) == 1


def test_an_end_waits_for_nobody_who_has_the_row_of_an_earlier_attempt(tmp_path: Path, postgres_url: str) -> None:
    bring(tmp_path, postgres_url, "a")
    engine = make_engine(resolve(postgres_url), write=True)
    with engine.connect() as other:
        other.execute(select(models.JobRow.id).with_for_update()).all()
        ended = threading.Thread(target=bring, args=(tmp_path, postgres_url, "b"))
        ended.start()
        ended.join(30.0)
        waits = ended.is_alive()
        other.rollback()
        ended.join()
    engine.dispose()
    assert not waits
    assert (kept(postgres_url, "a"), unsettled(postgres_url)) == (None, 1)
    assert settle(postgres_url) == 1


def test_a_job_that_goes_on_after_all_is_settled_anew(tmp_path: Path, ledger_url: str) -> None:
    """A leader who did not know of its end takes it back: nothing is kept then."""
    bring(tmp_path, ledger_url, "a", "b")
    change(ledger_url, text("UPDATE jobs SET state = 'running', account = NULL, ended_at = NULL WHERE name = 'a'"))
    assert (settle(ledger_url), unsettled(ledger_url)) == (0, 0)
    found: Any = told(ledger_url, "a")
    assert found.lost_s["rollback"] == pytest.approx(160.0, abs=1e-3)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_an_import_settles_attempts_that_come_from_several_ledgers(
    tmp_path: Path, ledger_urls: Callable[[], str], order: str
) -> None:
    url = ledger_urls()
    for name in order:
        own = f"sqlite:///{tmp_path / f'{name}.db'}"
        bring(tmp_path, own, name)
        import_from(str(tmp_path / f"{name}.db"), url)
    assert unsettled(url) == 0
    assert kept(url, "a") is not None
    same(told(url, "a"), reckoned(url, "a"))


def test_an_import_goes_on_where_what_is_there_cannot_be_reckoned_with(
    tmp_path: Path, ledger_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring(tmp_path, ledger_url, "a")
    bring(tmp_path, f"sqlite:///{tmp_path / 'b.db'}", "b")
    cannot_be_reckoned(monkeypatch, ledger_url, "a")
    assert [one.outcome for one in import_from(str(tmp_path / "b.db"), ledger_url)] == ["new"]
    assert unsettled(ledger_url) == 1
    said: list[str] = []
    assert settle(ledger_url, said.append) == 0
    assert [text.partition("its rows")[2] for text in said] == [": an iteration's number; import it again"]


@pytest.mark.parametrize("odd", ["{", "[]", '{"wall_s": 1.0}', None], ids=str)
def test_a_kept_figure_that_is_none_is_named_with_what_mends_it(tmp_path: Path, odd: str | None) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    bring(tmp_path, url, "a", "b")
    with Reader.open(url) as reader:
        account = msgspec.json.decode(reader.job("a")["account"])
    beyond = {**account, "rolled_back": {"again": [[21, 100]], "seconds": -1.0, "gpu_hours": 0.0}}
    put(url, "a", odd or msgspec.json.encode(beyond).decode())
    for words in (["a"], ["--all"], ["--all", "--by", "owner", "--json"]):
        said = CliRunner().invoke(app, ["history", "cost", *words, "--ledger", url])
        assert said.exit_code == 0
        assert "job a: stored costs are malformed" in " ".join(said.stderr.split())
        assert f"resihp db upgrade --ledger {url}" in " ".join(said.stderr.split())
    assert settle(url) == 1
    assert CliRunner().invoke(app, ["history", "cost", "--all", "--ledger", url]).stderr == ""
