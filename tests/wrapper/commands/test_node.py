"""`resihp node ...`: only nodes of one's own jobs, other owners' reasons stand, data on stdout in a stable shape."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from resihp.errors import ResihpError, UsageError
from resihp.record import journal, journal_file
from resihp.slurm.client import PREFIX
from resihp.slurm.drains.exclusions import Exclusions
from resihp.slurm.errors import SlurmRefusedError
from resihp.wrapper.cli import app
from resihp.wrapper.commands.node import command as node_commands
from resihp.wrapper.commands.submit import submit
from resihp.wrapper.job_files.contents import JobFile
from resihp.wrapper.job_folder import create_slurm_job, home, write_private
from resihp.wrapper.slurm_tasks.exclusion_lists import given_all_the_same
from tests.slurm.fake_slurm import FakeSlurm

ME = pwd.getpwuid(os.getuid()).pw_name


@pytest.fixture
def slurm(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Job 17 is ours, on n1 (its batch host) to n3; 18 is Bob's, on n4."""
    fake = FakeSlurm(("n1", "n2", "n3", "n4"), user=ME, cluster="vc")
    fake.add_job("n1", "n2", "n3", id="17")
    fake.add_job("n4", id="18", user="bob")
    monkeypatch.setattr(node_commands, "connect", lambda: fake)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr("resihp.slurm.drains.spool.DEFAULT_FOLDER", fresh_home / "no-spool")
    return fake


def known_job(name: str, *nodes: str) -> None:
    """A job of this home, whose journal says that these nodes joined."""
    folder = home() / "jobs" / name
    folder.mkdir(parents=True)
    path = folder / "journal"
    file = JobFile(name=name, host="here", created_at=time.time(), journal=str(path))
    write_private(folder / "job.json", json.dumps({f: getattr(file, f) for f in file.__struct_fields__}).encode())
    writer = journal_file.Journal(path, sync=False)
    for node in nodes:
        writer.append(journal.NodeJoined(node=node, host=node, devices=2), time.time())


def run(*argv: str) -> Result:
    return CliRunner().invoke(app, ["node", *argv])


def rows(*argv: str) -> list[dict[str, Any]]:
    result = run(*argv, "--json")
    assert result.exit_code == 0, result.exception
    content = json.loads(result.stdout)
    assert content["schema"] == 1
    return list(content["rows"])


def refused(kind: type[ResihpError], *argv: str) -> str:
    result = run(*argv)
    assert type(result.exception) is kind, result.exception
    return str(result.exception)


def test_an_operator_drains_a_node_of_a_job_of_this_home(slurm: FakeSlurm) -> None:
    slurm.operator = True
    known_job("17")
    steps = rows("drain", "n3", "--reason", "Xid 79")
    assert [(step["step"], step["outcome"]) for step in steps] == [("slurm", "done"), ("exclusion", "done")]
    assert slurm.node_views["n3"].reason == f"{PREFIX}Xid 79"


def test_others_ask_the_sites_hook(slurm: FakeSlurm, tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    spool.mkdir()
    result = run("drain", "n3", "--job", "17", "--spool", str(spool))
    assert result.exit_code == 0
    assert "asked for in" in result.stdout.replace("\n", " ")
    assert len(os.listdir(spool)) == 1


def test_the_spool_comes_from_the_configuration(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spool").mkdir()
    monkeypatch.setenv("RESIHP_SLURM__SPOOL", str(tmp_path / "spool"))
    rows("drain", "n3", "--job", "17")
    assert len(os.listdir(tmp_path / "spool")) == 1


def test_where_nobody_can_be_asked_it_says_so(slurm: FakeSlurm) -> None:
    text = refused(SlurmRefusedError, "drain", "n3", "--job", "17")
    assert text.startswith("node n3: not drained, only excluded from your jobs")
    assert [item.node for item in Exclusions(home(), "vc").current(time.time())] == ["n3"]


def test_an_answer_that_did_not_come_is_not_called_a_refusal(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm.operator = True
    monkeypatch.setattr(slurm, "jobs", lambda ids: {"17": slurm.job_views["17"]})
    monkeypatch.setattr(slurm, "cluster", lambda: "vc")
    slurm.unavailable = True
    assert "it may be drained; check: sinfo -R -n n3" in refused(SlurmRefusedError, "drain", "n3", "--job", "17")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["n4", "--job", "17"], "node 'n4': job 17 does not hold it and never has"),
        (["n4", "--job", "18"], "job 18: is bob's, not yours"),
        (["n4", "--job", "99"], "job 99: Slurm does not know it"),
        (["n4"], "node 'n4': none of your jobs known here holds it; name the job"),
        (["n[1-3]", "--job", "17"], "node 'n[1-3]': job 17 does not hold it"),
    ],
)
def test_a_node_of_none_of_ones_jobs_is_refused(slurm: FakeSlurm, argv: list[str], message: str) -> None:
    slurm.operator = True
    known_job("17")
    assert refused(UsageError, "drain", *argv).startswith(message)
    assert slurm.calls["drain"] == 0
    assert Exclusions(home(), "vc").known() == ()


def test_a_node_that_the_job_has_lost_is_still_its(slurm: FakeSlurm) -> None:
    slurm.operator = True
    slurm.set_job("17", nodes=("n1", "n2"))
    known_job("17", "n1", "n2", "n3")
    rows("drain", "n3")
    assert slurm.node_views["n3"].draining
    assert refused(UsageError, "drain", "n4")


def test_the_job_that_we_are_in_counts(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm.operator = True
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    rows("drain", "n2")
    assert slurm.node_views["n2"].draining


def test_the_element_of_an_array_that_we_are_in_counts(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm.operator = True
    slurm.add_job("n1", "n2", "n3", "n4", id="18_2")
    for name, value in {"JOB_ID": "18", "ARRAY_JOB_ID": "18", "ARRAY_TASK_ID": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    rows("drain", "n4")
    assert slurm.node_views["n4"].draining


def test_the_batch_host_is_refused(slurm: FakeSlurm) -> None:
    slurm.operator = True
    assert refused(SlurmRefusedError, "drain", "n1", "--job", "17").endswith("drain it when job 17 has ended")
    assert slurm.calls["drain"] == 0


@pytest.fixture
def elsewhere(slurm: FakeSlurm, fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another home, in which our job 17 runs; this one has none."""
    there, here = fresh_home / "there", home()
    monkeypatch.setenv("RESIHP_HOME", str(there))
    create_slurm_job("17", 0)
    monkeypatch.setenv("RESIHP_HOME", str(here))
    slurm.operator = True
    return there


def test_a_job_of_another_folder_is_found_by_its_node(slurm: FakeSlurm, elsewhere: Path) -> None:
    """`resihp node drain n3` from a folder without jobs; the list that is kept is the job's own."""
    steps = rows("drain", "n3")
    assert [(step["step"], step["outcome"]) for step in steps] == [("slurm", "done"), ("exclusion", "done")]
    assert [item.node for item in Exclusions(elsewhere, "vc").current(time.time())] == ["n3"]
    assert Exclusions(home(), "vc").known() == ()
    result = run("undrain", "n3")
    assert result.exit_code == 0, result.exception
    assert f"the exclusion list is in {elsewhere}" in result.stderr
    assert Exclusions(elsewhere, "vc").current(time.time()) == ()
    assert slurm.node_views["n3"].usable


def test_where_several_of_ones_jobs_hold_a_node_one_is_to_be_named(
    slurm: FakeSlurm, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.add_job("n2", "n3", id="21")
    here = home()
    create_slurm_job("21", 0)
    text = refused(UsageError, "drain", "n3")
    assert text.splitlines() == [
        "node 'n3': 2 of your jobs hold it; name one: resihp node drain n3 --job ID",
        f"21 (in {here})",
        f"17 (in {elsewhere})",
    ]
    assert slurm.calls["drain"] == 0
    rows("drain", "n3", "--job", "17")
    assert [item.node for item in Exclusions(elsewhere, "vc").current(time.time())] == ["n3"]
    monkeypatch.setenv("SLURM_JOB_ID", "21")
    rows("drain", "n3")
    assert [item.node for item in Exclusions(here, "vc").current(time.time())] == ["n3"]


def test_a_node_that_two_other_folders_keep_out_is_given_back_to_one_that_is_named(
    slurm: FakeSlurm, elsewhere: Path, fresh_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    third, here = fresh_home / "third", home()
    monkeypatch.setenv("RESIHP_HOME", str(third))
    create_slurm_job("22", 0)
    monkeypatch.setenv("RESIHP_HOME", str(here))
    for each in (elsewhere, third):
        Exclusions(each, "vc").add("n2", "slow", time.time() + 60)
    text = refused(UsageError, "undrain", "n2")
    assert "2 of your homes exclude it; name a job of one, resihp node undrain n2 --job ID" in text
    assert f"RESIHP_HOME={third}" in text
    run("undrain", "n2", "--job", "22")
    assert Exclusions(third, "vc").current(time.time()) == ()
    assert [item.node for item in Exclusions(elsewhere, "vc").current(time.time())] == ["n2"]


def test_a_job_of_another_cluster_or_whose_folder_is_gone_holds_nothing_here(
    slurm: FakeSlurm, elsewhere: Path, fresh_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(elsewhere)
    rows("drain", "n3")
    assert [item.node for item in Exclusions(home(), "vc").current(time.time())] == ["n3"], "Slurm knows that job still"
    slurm.add_job("n4", id="23")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "another")
    create_slurm_job("23", 0)
    shutil.rmtree(home() / "jobs")
    assert "none of your jobs known here holds it" in refused(UsageError, "drain", "n4")


def test_undrain_takes_back_what_drain_did(slurm: FakeSlurm) -> None:
    slurm.operator = True
    rows("drain", "n3", "--job", "17")
    rows("undrain", "n3")
    assert slurm.node_views["n3"].usable
    assert rows("list") == []


@pytest.mark.parametrize(("who", "reason"), [("root", "bad disk"), ("bob", f"{PREFIX}his"), (ME, "not by resihp")])
def test_undrain_leaves_other_owners_drains(slurm: FakeSlurm, who: str, reason: str) -> None:
    slurm.operator = True
    slurm.set_node("n3", flags=frozenset({"drain"}), reason=reason, reason_by=who)
    assert "still drained" in refused(SlurmRefusedError, "undrain", "n3")
    assert slurm.calls["undrain"] == 0


def test_undrain_of_what_the_hook_drained_asks_the_hook(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = tmp_path / "spool"
    spool.mkdir()
    reason = f"{PREFIX}x (asked by uid {os.getuid()}, job 17)"
    slurm.set_node("n3", flags=frozenset({"drain"}), reason=reason, reason_by="root" if ME != "root" else "slurm")
    steps = rows("undrain", "n3", "--spool", str(spool))
    assert [(step["step"], step["outcome"]) for step in steps] == [
        ("slurm", "refused"),
        ("spool", "done"),
        ("exclusion", "done"),
    ]
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    for number, named in enumerate(((), ("--job", "18")), 2):
        rows("undrain", "n3", "--spool", str(spool), *named)
        assert len(os.listdir(spool)) == number
    jobs = Counter(json.loads(path.read_bytes())["job"] for path in spool.iterdir())
    assert jobs == {"": 1, "17": 1, "18": 1}, "the job that is named, or that we are in"


def test_exclude_and_list(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    run("exclude", "n2", "--reason", "slow link", "--for", "1h")
    slurm.set_node("n2", flags=frozenset({"drain"}), reason=f"{PREFIX}slow link", reason_by="root")
    excluded = rows("exclude", "n4")
    assert [(row["node"], row["excluded_because"]) for row in excluded] == [
        ("n2", "slow link"),
        ("n4", "excluded by hand"),
    ]
    (first, second) = rows("list")
    assert first == {
        "cluster": "vc",
        "node": "n2",
        "excluded_until": first["excluded_until"],
        "excluded_because": "slow link",
        "measure": "exclude",
        "job": None,
        "drained_by_us": True,
        "state": "allocated+drain",
        "reason": f"{PREFIX}slow link",
        "reason_by": "root",
        "checked_at": None,
        "check": None,
    }
    assert second["node"] == "n4"
    assert second["drained_by_us"] is False
    monkeypatch.setenv("COLUMNS", "80")  # else as wide as it takes, where nobody looks at a terminal
    result = run("list")
    assert result.exit_code == 0
    assert "n2" in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= 80


def test_what_is_kept_out_is_so_from_any_folder(
    slurm: FakeSlurm, elsewhere: Path, fresh_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand in a folder without jobs, by a job of another: both are listed and heeded in a third."""
    assert run("exclude", "n4", "--reason", "slow link").exit_code == 0
    rows("drain", "n3")
    assert not home().exists(), "nothing is left in a folder that one happened to be in"
    monkeypatch.setenv("RESIHP_HOME", str(fresh_home / "third"))
    assert [(row["node"], row["measure"]) for row in rows("list")] == [("n3", "drain"), ("n4", "exclude")]
    told: list[str] = []
    job_file = fresh_home / "job.toml"
    job_file.write_text('[job]\ncommand = ["true"]\n')
    submit(job_file, dry_run=False, chain=1, slurm=lambda: slurm, notice=told.append)
    assert slurm.submissions[-1][2] == ("--exclude=n3,n4",)
    assert [one.node for one in given_all_the_same("vc", ("n1", "n4"), time.time())] == ["n4"]
    for node in ("n3", "n4"):
        assert run("exclude", node, "--remove").exit_code == 0
        assert "is not excluded" in refused(UsageError, "exclude", node, "--remove")
    submit(job_file, dry_run=False, chain=1, slurm=lambda: slurm, notice=told.append)
    assert not slurm.submissions[-1][2]
    assert given_all_the_same("vc", ("n1", "n4"), time.time()) == []


def test_what_was_excluded_by_hand_is_heeded_by_jobs_of_this_home_that_run(slurm: FakeSlurm) -> None:
    create_slurm_job("17", 0)
    run("exclude", "n4")
    assert [item.node for item in Exclusions(home(), "vc").current(time.time())] == ["n4"]
    assert [row["node"] for row in rows("list")] == ["n4"]
    slurm.operator = True
    rows("undrain", "n4", "--job", "17")
    assert rows("list") == [], "of no list"


def test_what_is_used_again_but_still_drained_is_listed(slurm: FakeSlurm) -> None:
    slurm.operator = True
    rows("drain", "n3", "--job", "17")
    assert run("exclude", "n3", "--remove").exit_code == 0
    (row,) = rows("list")
    assert (row["node"], row["excluded_until"], row["drained_by_us"]) == ("n3", None, True)
    slurm.undrain("n3")
    assert rows("list") == []


def test_exclude_refuses_what_is_no_node_or_no_time(slurm: FakeSlurm) -> None:
    assert "not a valid node name" in refused(UsageError, "exclude", "n[1-3]")
    assert "--for 'long'" in refused(UsageError, "exclude", "n3", "--for", "long")
    assert "is not excluded" in refused(UsageError, "exclude", "n3", "--remove")


def test_list_without_slurm_shows_what_is_here(slurm: FakeSlurm) -> None:
    run("exclude", "n2")
    slurm.unavailable = True
    result = run("list", "--json")
    assert [row["node"] for row in json.loads(result.stdout)["rows"]] == ["n2"]
    assert "drains in Slurm are not shown" in result.stderr


def test_markup_and_control_characters_are_shown_as_they_are(slurm: FakeSlurm) -> None:
    run("exclude", "n2", "--reason", "[red]x[/red] \x1b[2J")
    assert "[red]x[/red]" in run("list").stdout
    assert "\x1b" not in run("list").stdout


@pytest.mark.parametrize(
    ("option", "text"), [("--kind", "x" * 500), ("--note", "x" * 5000), ("--note", "two\nlines"), ("--kind", " ")]
)
def test_what_was_repaired_is_told_in_one_short_line(fresh_home: Path, option: str, text: str) -> None:
    ledger = fresh_home / "ledger.db"
    said = refused(UsageError, "repaired", "n1", "--ledger", f"sqlite:///{ledger}", option, text)
    assert said.startswith(f"{option}: ")
    assert not ledger.exists()
