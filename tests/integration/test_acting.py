"""Operators act on a real job: a checkpoint now, what there is to resume from, and a stop that loses nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resihp.record import journal, journal_file
from tests.integration import reading
from tests.integration.jobs import Job
from tests.integration.test_departure import committed, newest_checkpoint

SMALL = {"nodes": 2, "gpus": 2, "tp": 1, "pp": 2}
ENDLESS = 100_000


def say(job: Job, *arguments: str) -> tuple[int, str, str]:
    return reading.ask(*arguments, environment=job.environment, folder=job.folder)


def test_a_checkpoint_now_a_list_of_them_and_a_stop(job: Job) -> None:
    job.train(iterations=ENDLESS, **SMALL)
    job.until(lambda: committed(job) >= 3)
    titles = {process.cmdline()[0] for process in job.processes()}
    assert titles >= {
        "resihp job local-1 guardian",
        "resihp job local-1 supervisor",
        *(f"resihp job local-1 fork server {node}" for node in ("n1", "n2")),
        *(f"resihp job local-1 agent {node}" for node in ("n1", "n2")),
        *(f"resihp job local-1 rank {rank}" for rank in range(4)),
    }

    status, out, err = say(job, "checkpoint", "now", "local-1")
    assert status == 0, err
    folder = job.folder / "home" / "jobs" / "local-1" / "checkpoints"
    first = newest_checkpoint(job)
    assert err == f"resihp: job local-1: checkpoint of iteration {first} is complete\n"
    assert Path(out.strip()) == folder / f"iteration-{first:06d}"

    answer = job.ask("checkpoint", "now", "local-1")
    second = answer["checkpoint"]
    assert second["iteration"] > first
    assert second["complete"]
    assert second["layout"] == "DP2 x PP2 x TP1"
    assert second["seconds"] > 0
    before = committed(job)
    job.until(lambda: committed(job) > before)  # training goes on

    listed = job.ask("checkpoint", "list", "local-1")["rows"]
    assert [row["iteration"] for row in listed] == [second["iteration"], first]
    assert [row["resumes"] for row in listed] == [True, False]
    assert all(row["complete"] and row["bytes"] > 0 for row in listed)
    (folder / f"iteration-{second['iteration']:06d}" / "manifest.json").rename(folder / "kept")
    status, out, _ = say(job, "checkpoint", "list", "local-1", "--verify")
    assert status == 0
    rows = [line for line in out.splitlines() if "DP2" in line or "manifest" in line]
    assert rows[0].split()[0] == str(second["iteration"])
    assert rows[1].split()[:2] == [">", str(first)]
    assert "complete" in rows[1]
    assert f"in {folder}" in out
    (folder / "kept").rename(folder / f"iteration-{second['iteration']:06d}" / "manifest.json")

    status, out, err = say(job, "stop", "local-1", "--json")
    assert status == 0, err
    done = newest_checkpoint(job)
    became = json.loads(out)
    assert (became["exit_code"], became["state"], became["iteration"], became["target"]) == (
        143,
        "cancelled",
        done,
        ENDLESS,
    )
    assert (became["checkpoint"]["iteration"], became["checkpoint"]["complete"]) == (done, True)
    assert became["go_on"].startswith("resihp run --local ")
    assert became["folder"] == str(job.folder / "home" / "jobs" / "local-1")
    assert done > second["iteration"]
    told = err.splitlines()
    assert told[0] == "resihp: job local-1: stopping after the iteration under way, with a checkpoint"
    assert any(f"stopped after iteration {done}; its checkpoint is written" in line for line in told)
    assert f"resihp: job local-1: checkpoint of iteration {done}: {folder / f'iteration-{done:06d}'}" in told
    assert "to resume from it, type: resihp run --local" in told[-1]
    assert "--resume local-1 -- " in told[-1]
    assert job.wait(20).status == 143, job.stderr
    entries = [record.entry for file in (job.folder / "local").rglob("journal") for record in journal_file.read(file)]
    signalled = [entry for entry in entries if isinstance(entry, journal.JobSignalled)]
    assert signalled == [journal.JobSignalled(signal=0, nodes=(), meaning="operator")]
    assert job.history("failures") == []
    assert job.ask("status")["state"] == "cancelled"

    status, _, err = say(job, "stop", "local-1")
    assert (status, err) == (
        2,
        "resihp: job local-1: is not running; see resihp status local-1\n",
    )


@pytest.mark.parametrize("hangs", [True, False])
def test_stop_now_waits_for_no_checkpoint(job: Job, hangs: bool) -> None:
    faults = ("--fault", "hang:rank=1@iteration=4,phase=forward") if hangs else ()
    job.train(*faults, iterations=ENDLESS, **SMALL)
    job.until(lambda: committed(job) >= 3)
    status, _, err = say(job, "stop", "--now", "local-1")
    assert status == 0, err
    assert "stopped by an operator, at once; did not wait for a checkpoint of iteration" in err
    assert "to go on" not in err
    assert job.wait(20).status == 143, job.stderr
    assert list((job.folder / "home" / "jobs" / "local-1" / "checkpoints").glob("iteration-*")) == []
