"""Which job a name means in a ledger of many users, and which attempts belong together."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resihp.db.reading import naming
from resihp.db.reading.queries import Reader
from resihp.db.writer import Ledger
from resihp.errors import JobNotFoundError, UsageError
from resihp.record import journal
from tests.db.conftest import BEGAN, started, write_journal

DAY = 86400.0


@pytest.fixture(autouse=True)
def me(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(naming.getpass, "getuser", lambda: "ann")


@pytest.fixture
def ledger(tmp_path: Path, ledger_url: str) -> Callable[..., str]:
    """Brings in jobs, each one record, by day."""
    days = iter(range(1000))

    def with_jobs(*jobs: journal.JobStarted) -> str:
        for job in jobs:
            day = next(days)
            with Ledger.open(ledger_url, tmp_path) as open_ledger:
                told = [(job, BEGAN + day * DAY)]
                for record in write_journal(tmp_path / f"journal-{day}", iter(told)):
                    open_ledger.submit(record)
                assert open_ledger.flush(30)
        return ledger_url

    return with_jobs


def job(name: str, user: str, **changes: Any) -> journal.JobStarted:
    return msgspec.structs.replace(started(name, user), **changes)


def slurm(number: int, cluster: str = "blue", **more: Any) -> journal.SlurmIdentity:
    return journal.SlurmIdentity(cluster=cluster, job=number, **more)


def test_my_job_is_meant_and_others_are_named_by_their_user(ledger: Callable[..., str]) -> None:
    url = ledger(job("local-1", "ann"), job("local-1", "bob"), job("local-2", "bob"))
    with Reader.open(url) as reader:
        assert reader.job("local-1")["owner"] == "ann"
        assert reader.job("bob/local-1")["owner"] == "bob"
        assert reader.job("local-2")["owner"] == "bob"
        assert reader.job()["owner"] == "ann", "mine, though another is newer"


def test_a_name_of_several_others_is_refused_with_the_choices(ledger: Callable[..., str]) -> None:
    url = ledger(job("local-1", "bob"), job("local-1", "eve"))
    with Reader.open(url) as reader:
        with pytest.raises(UsageError, match=r"2 jobs have that name; name one by eve/local-1 or its id: ") as refused:
            reader.job("local-1")
        for each in reader.jobs():
            assert each["uuid"][:8] in str(refused.value)
            assert reader.job(each["uuid"][:8])["uuid"] == each["uuid"]


def test_a_job_of_another_user_is_never_answered_with_ones_own(ledger: Callable[..., str]) -> None:
    """Not by its name, nor by its number or the beginning of its id, and not where one of mine has a slash in its."""
    url = ledger(
        job("4711", "ann", slurm=slurm(4711)),
        job("4711-r1", "bob", slurm=slurm(12)),
        job("bob/local-1", "ann"),
        job("bob/local-1", "eve"),
    )
    with Reader.open(url) as reader:
        assert reader.job("bob/4711")["owner"] == "bob"
        mine = reader.job("4711")
        assert mine["owner"] == "ann"
        for name in (f"bob/{mine['uuid'][:8]}", "eve/4711", "bob/local-2"):
            with pytest.raises(JobNotFoundError):
                reader.job(name)
        with pytest.raises(UsageError, match="2 jobs have that name"):
            reader.job("bob/local-1")


def test_a_slurm_number_that_was_used_again_is_refused_and_both_are_reachable(ledger: Callable[..., str]) -> None:
    url = ledger(
        job("4711", "ann", run="a" * 36, slurm=slurm(4711, submitted_at=BEGAN)),
        job("4711", "ann", run="b" * 36, slurm=slurm(4711, submitted_at=BEGAN + DAY / 2)),
    )
    with Reader.open(url) as reader:
        with pytest.raises(UsageError, match=r"job 4711: 2 jobs have that name; name one by its id: \w{8} \(ann, blue"):
            reader.job("4711")
        assert len({reader.job(each["uuid"][:8])["id"] for each in reader.jobs()}) == 2


def test_digits_that_are_no_number_are_a_name_like_others(ledger: Callable[..., str]) -> None:
    with Reader.open(ledger(job("4711", "ann", slurm=slurm(4711)))) as reader, pytest.raises(JobNotFoundError):
        reader.job("47\u00b9\u00b9")


def test_attempts_of_one_run_are_one_job_the_newest(ledger: Callable[..., str]) -> None:
    both: dict[str, Any] = {"run": "a" * 36, "slurm": slurm(4711)}
    url = ledger(job("4711", "ann", **both), job("4711-r1", "ann", restart_count=1, **both))
    with Reader.open(url) as reader:
        assert reader.job("4711")["name"] == "4711"
        assert reader.job("4711-r1")["restart_count"] == 1
        assert len({each["run"] for each in reader.jobs()}) == 1
    url = ledger(job("4800-r2", "ann", run="c" * 36, slurm=slurm(4800)))
    with Reader.open(url) as reader:
        assert reader.job("4800")["name"] == "4800-r2"


def test_an_element_of_an_array_is_found_by_its_name_and_by_sacct_s_number(ledger: Callable[..., str]) -> None:
    url = ledger(job("12_3", "ann", slurm=slurm(15, array_job=12, array_task=3, account="ml", partition="h100")))
    with Reader.open(url) as reader:
        assert reader.job("12_3")["slurm_job"] == reader.job("15")["slurm_job"] == 15
        found = reader.job("15")
    assert (found["cluster"], found["array_job"], found["array_task"]) == ("blue", 12, 3)
    assert (found["slurm_account"], found["partition"], found["qos"], found["submitted_at"]) == ("ml", "h100", "", None)


def test_when_it_was_submitted_is_a_time(ledger: Callable[..., str]) -> None:
    url = ledger(job("1", "ann", slurm=slurm(1, submitted_at=BEGAN - 60)))
    with Reader.open(url) as reader:
        assert reader.job("1")["submitted_at"] == datetime.fromtimestamp(BEGAN - 60, UTC)


@pytest.mark.parametrize("name", ["nobody/local-1", "local-7", "%", "_ocal-1", "local-1\\", "9" * 30, "dead", "/", ""])
def test_what_names_no_job_is_told_with_near_ones(ledger: Callable[..., str], name: str) -> None:
    url = ledger(job("local-1", "ann"))
    with Reader.open(url) as reader, pytest.raises(JobNotFoundError, match="not in ledger"):
        reader.job(name)


def test_a_job_that_stands_alone_is_a_run_of_its_own(ledger: Callable[..., str]) -> None:
    url = ledger(job("local-1", "ann"))
    with Reader.open(url) as reader:
        found = reader.job()
    assert found["run"] == found["uuid"]
