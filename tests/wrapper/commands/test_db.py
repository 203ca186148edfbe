"""`resihp db export`, `import` and `prune`: what they print, and where they find ledgers that nobody named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from resihp.db.maintenance import record
from resihp.db.migrate import head
from resihp.db.reading.queries import Reader
from resihp.db.writer import Ledger
from resihp.db.writing.catch_up import catch_up
from resihp.wrapper.cli import app
from resihp.wrapper.job_folder import Job, create_local_job
from tests.db.conftest import story, write_journal
from tests.db.later_schema import LATER, add_later_schema

Resihp = Callable[..., Result]


@pytest.fixture
def resihp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Resihp:
    monkeypatch.setenv("RESIHP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RESIHP_LOCAL", str(tmp_path / "local"))
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Result:
        return CliRunner().invoke(app, ["db", *words])

    return run


@pytest.fixture
def job(resihp: Resihp) -> Job:
    """A job that is over, with its journal and its ledger."""
    made = create_local_job()
    write_journal(made.journal_file, story())
    made.exit_code_file.write_text("0")
    catch_up("sqlite", made.folder, made.journal_file)
    return made


def answer(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refusal(result: Result) -> str:
    assert result.exit_code == 2 or result.exception is not None
    return str(result.exception) if result.exception else result.output


def test_out_of_one_ledger_and_into_another(resihp: Resihp, job: Job, tmp_path: Path) -> None:
    out = answer(resihp("export", job.name, "-o", "out", "--json"))
    assert out["schema"] == 1
    assert (out["tables"]["jobs"], out["tables"]["iterations"]) == (1, 20)
    url = f"sqlite:///{tmp_path / 'other.db'}"
    [row] = answer(resihp("import", "out", "--ledger", url, "--json"))["rows"]
    assert (row["job"], row["outcome"]) == ("local-1", "new")
    result = resihp("import", "out", str(job.folder), str(job.journal_file), "--ledger", url)
    assert result.stderr.splitlines() == ["resihp: job local-1: unchanged"] * 3
    with Reader.open(url) as reader:
        assert len(reader.jobs()) == 1


def test_an_export_again_says_what_was_kept(resihp: Resihp, job: Job) -> None:
    first = resihp("export", job.name, "-o", "out").stderr
    assert "months written: 2025-06\n" in first
    assert "kept" not in first
    again = resihp("export", job.name, "-o", "out", "--json")
    assert answer(again)["months"] == {"written": [], "kept": ["2025-06"]}
    assert "months unchanged: 2025-06\n" in again.stderr
    assert "written" not in again.stderr


def test_what_was_repaired_is_said_beside_the_jobs(resihp: Resihp, job: Job, tmp_path: Path) -> None:
    source, target = f"sqlite:///{job.folder}/ledger.db", f"sqlite:///{tmp_path}/other.db"
    record(source, "n1", at=datetime(2025, 7, 1, tzinfo=UTC))
    assert resihp("export", "--all", "-o", "out").exit_code == 0
    said = resihp("import", "out", "--ledger", target).stderr.splitlines()
    assert said[1:] == ["resihp: maintenance: new, 1 row"]
    assert resihp("import", "out", "--ledger", target).stderr.splitlines() == ["resihp: job local-1: unchanged"]


def test_all_jobs_of_this_home(resihp: Resihp, job: Job) -> None:
    other = create_local_job()
    write_journal(other.journal_file, story())
    other.exit_code_file.write_text("0")  # its ledger is made from its journal first
    out = answer(resihp("export", "--all", "-o", "out", "--json"))
    assert out["tables"]["jobs"] == 1, "both journals are of one job: same name, host, user and time"
    assert head() in resihp("export", "--all", "-o", "again").stderr


def test_a_journal_alone_makes_its_job_s_ledger_anew(resihp: Resihp, job: Job) -> None:
    (job.folder / "ledger.db").unlink()
    result = resihp("import", str(job.journal_file))
    assert result.exit_code == 0, result.output
    with Reader.open(f"sqlite:///{job.folder}/ledger.db") as reader:
        assert len(reader.rows("iterations", reader.job()["id"])) == 20


def test_a_corrupt_ledger_leads_to_that_command(resihp: Resihp, job: Job) -> None:
    file = job.folder / "ledger.db"
    content = bytearray(file.read_bytes())
    content[100:] = bytes(len(content) - 100)
    file.write_bytes(content)
    assert "resihp db import JOURNAL" in refusal(resihp("import", str(job.journal_file)))
    file.rename(job.folder / "damaged.db")
    assert resihp("import", str(job.journal_file)).exit_code == 0


def test_prune_says_what_it_removes(resihp: Resihp, job: Job) -> None:
    text = resihp("prune", "--older-than", "30d", "--dry-run").stderr
    assert text == "resihp: job local-1: 16 iterations and 0 rank reports would be removed\n"
    [row] = answer(resihp("prune", "--older-than", "30d", "--keep-every", "10", "--json"))["rows"]
    assert row["iterations"] == 15
    assert "nothing older than" in resihp("prune", "--older-than", "30d", "--keep-every", "10").stderr


def test_old_rows_of_a_named_ledger(resihp: Resihp, tmp_path: Path) -> None:
    with Ledger.open("sqlite", tmp_path) as ledger:
        for record in write_journal(tmp_path / "journal", story()):
            ledger.submit(record)
    rows = answer(resihp("prune", "--older-than", "2025-06-01", "--ledger", ledger.url, "--json"))["rows"]
    assert rows == [], "all of it is younger"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("export", "-o", "x"), "no job in"),
        (("export",), "name a new one with -o FOLDER"),
        (("export", "a", "--all", "-o", "x"), "exclude each other"),
        (("import", "nothing"), "name the ledger with --ledger URL"),
        (("import", "nothing", "--ledger", "sqlite:///x.db"), "No such file"),
        (("prune", "--older-than", "yesterday"), "not a time; examples"),
        (("prune", "--older-than", "1d", "--ledger", "sqlite:///none.db"), "no such file"),
        (("grant", "alice"), "no job in"),
        (("grant", "alice", "--ledger", "sqlite:///x.db"), "set access to the file with chmod"),
    ],
)
def test_refusals(resihp: Resihp, words: tuple[str, ...], said: str) -> None:
    assert said in refusal(resihp(*words))


def test_grant_prints_what_a_user_needs_for_psql(resihp: Resihp) -> None:
    url = "postgresql://admin:secret@host/ledger"
    result = resihp("grant", 'o"hara', "--ledger", url)
    assert result.exit_code == 0, result.output
    begin, *lines, commit = result.stdout.splitlines()
    assert (begin, commit) == ("BEGIN;", "COMMIT;"), "a job that writes meanwhile misses nothing"
    assert all(line.startswith(("GRANT ", "REVOKE ALL ON ")) and line.endswith(' "o""hara";') for line in lines)
    assert "secret" not in result.output
    assert "resihp_trusted" not in result.stdout
    reader = resihp("grant", "o", "--as", "reader", "--ledger", url).stdout
    assert "GRANT SELECT ON" in reader
    assert "INSERT" not in reader
    told = json.loads(resihp("grant", "o", "--as", "reader", "--ledger", url, "--json").stdout)
    assert (told["schema"], told["role"], told["kind"], told["trusted"]) == (1, "o", "reader", False)
    assert "\n".join(told["statements"]) + "\n" == reader
    king = refusal(resihp("grant", "o", "--as", "king", "--ledger", url))
    assert "--as king: not one of owner, writer, reader" in king
    assert "GRANT resihp_trusted TO" in resihp("grant", "o", "--trusted", "--ledger", url).stdout


def test_grant_of_a_file_says_that_it_has_no_users(resihp: Resihp, tmp_path: Path) -> None:
    assert "chmod" in refusal(resihp("grant", "alice", "--ledger", f"sqlite:///{tmp_path}/ledger.db"))


def test_after_an_update_the_ledgers_of_all_jobs_of_a_folder_are_upgraded_at_once(
    resihp: Resihp, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, third, never_began = create_local_job(), create_local_job(), create_local_job()
    for each in (second, third):
        write_journal(each.journal_file, story())
        each.exit_code_file.write_text("0")
    catch_up("sqlite", second.folder, second.journal_file)
    add_later_schema(monkeypatch, tmp_path / "migrations")
    catch_up("sqlite", third.folder, third.journal_file)
    all_jobs = ["history", "failures", "--all", "--json"]
    before = CliRunner().invoke(app, all_jobs)
    assert before.stderr.count("or resihp db upgrade --all for those of all jobs of a folder") == 2
    told = answer(resihp("upgrade", "--all", "--json"))
    assert {Path(row["ledger"]).parent.name: row["before"] == row["after"] for row in told["rows"]} == {
        job.name: False,
        second.name: False,
        third.name: True,
    }
    assert not (never_began.folder / "ledger.db").exists(), "none is made for a job that never began"
    assert "older" not in CliRunner().invoke(app, all_jobs).stderr
    (second.folder / "ledger.db").write_bytes(b"this is no database" * 100)
    broken = resihp("upgrade", "--all")
    assert "1 of 3 ledgers were not upgraded" in refusal(broken)
    assert "--all means all jobs of this home" in refusal(resihp("upgrade", job.name, "--all"))


def test_an_upgrade_of_all_jobs_leaves_servers_to_those_who_name_them(resihp: Resihp, job: Job) -> None:
    job.set_ledger("postgresql+psycopg://me@127.0.0.1:1/history")  # nobody listens there
    assert answer(resihp("upgrade", "--all", "--json"))["rows"] == []
    shutil.rmtree(job.folder)
    assert "no job" in refusal(resihp("upgrade", "--all"))


def test_a_job_whose_ledger_is_not_looked_at_blocks_no_other(
    resihp: Resihp, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = create_local_job()
    write_journal(other.journal_file, story())
    other.exit_code_file.write_text("0")
    other.set_ledger("mysql://db.example.org/ledger")
    add_later_schema(monkeypatch, tmp_path / "migrations")
    upgraded = resihp("upgrade", "--all")
    assert f"warning: job {other.name}: left out: ledger mysql://db.example.org/ledger: driver mysql" in upgraded.stderr
    assert f"{job.name}/ledger.db: schema {LATER}, upgraded from" in upgraded.stderr
    assert "1 of 2 ledgers were not upgraded" in refusal(upgraded)
    exported = resihp("export", "--all", "-o", "out", "--json")
    assert len(answer(exported)["jobs"]) == 1
    assert exported.stderr.count("left out: ") == 1
    pruned = resihp("prune", "--older-than", "30d", "--json")
    assert [row["job"] for row in answer(pruned)["rows"]] == [job.name]
    assert f"warning: job {other.name}: left out" in pruned.stderr


def test_a_user_is_given_the_ledger_that_the_newest_job_here_writes_to(
    resihp: Resihp, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "ledger sqlite:" in refusal(resihp("grant", "alice"))
    monkeypatch.setattr("resihp.wrapper.output.ledgers.our_url", lambda own: "postgresql://me:secret@host/history")
    content = answer(resihp("grant", "alice", "--as", "reader", "--json"))
    assert (content["ledger"], content["role"], content["kind"]) == (
        *("postgresql+psycopg://me:***@host/history", "alice", "reader"),
    )
    statements = resihp("grant", "alice", "--as", "reader").stdout.splitlines()
    assert statements == content["statements"]
    assert (statements[0], statements[-1]) == ("BEGIN;", "COMMIT;")
    assert any("alice" in statement and "history" in statement for statement in statements)
