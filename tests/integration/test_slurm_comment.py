"""The truth in Slurm's own books: what a job's comment says while it trains, and once it has ended."""

from __future__ import annotations

import json
import signal

import pytest

from resihp.record.journal import DrainDecided, FailureFound, JobEnded, JobSignalled
from tests.integration.slurm_jobs import ITERATIONS, Desk, MakeCluster, Reference, on_node
from tests.integration.test_slurm_succession import assert_one_leader, successor_of

pytestmark = pytest.mark.timeout(300)


def comment(desk: Desk, job: str) -> str:
    shown = desk.run("scontrol", "show", "job", job).stdout
    return next((line.strip()[len("Comment=") :] for line in shown.splitlines() if "Comment=" in line), "")


def test_a_job_that_its_successor_ended_says_that_it_is_completed(cluster: MakeCluster, reference: Reference) -> None:
    # As long as by default: once it has taken the dead node back, 22.05 without slurmdbd lets nobody change the job.
    made = cluster(nodes=4, gpus=1, settings={"SlurmdTimeout": "300"})
    mail = made.shared / "mail"
    command = json.dumps(["/bin/sh", "-c", f"cat >> {mail}"])
    desk = Desk(made, RESIHP_HOOKS__COMMAND=command, RESIHP_HOOKS__EVENTS='["end"]')
    desk.pace(0.1)
    job = desk.sbatch(desk.script(ITERATIONS, gpus=1), "--comment=ablation 3, 'lr' | group a")
    theirs = "ablation 3, 'lr' | group a | resihp: "
    desk.until_committed(job, 3)
    assert comment(desk, job).startswith(f"{theirs}no iteration (")
    assert successor_of(desk, job, "n1").term == 2
    desk.pace(0.0)
    desk.until(lambda: desk.state(job)[0] in ("COMPLETING", "CANCELLED"), job, 120)  # as far as Slurm knows
    assert comment(desk, job).startswith(f"{theirs}completed, iteration {ITERATIONS}, loss "), comment(desk, job)
    assert ", 1 node lost (" in comment(desk, job)
    assert_one_leader(desk, job)
    reference.check(desk.rows("iterations", job))
    assert [(row["component"], row["node"]) for row in desk.rows("failures", job)] == [("node", "n1")]
    assert desk.of(job, DrainDecided) == [], "never the batch host"
    (told,) = map(json.loads, mail.read_text().splitlines())
    assert (told["job"], told["ids"]["state"], told["ids"]["exit_code"]) == (job, "completed", 0)


def test_a_job_that_is_run_again_says_so_and_then_how_it_ended(cluster: MakeCluster) -> None:
    desk = Desk(cluster(nodes=2, gpus=1))
    desk.pace(0.1)
    job = desk.sbatch_training(1000, nodes=2, gpus=1)
    desk.until_committed(job, 3)
    assert desk.run("scancel", "--batch", "--signal=USR2", job).returncode == 0
    desk.until(lambda: "to be run again" in comment(desk, job), job)
    assert comment(desk, job).startswith("resihp: to be run again, iteration ")
    desk.until(lambda: desk.of(job, JobEnded), job)
    assert [entry.meaning for entry in desk.of(job, JobSignalled)] == ["warning"]
    assert [entry.exit_code for entry in desk.of(job, JobEnded)] == [75]
    assert desk.of(job, FailureFound) == []
    desk.start_again(job)
    again = f"{job}-r1"
    desk.until_committed(again, desk.committed(job) + 2)
    assert comment(desk, job).startswith(f"resihp: iteration {desk.committed(job)}, run 2 (")

    (supervisor,) = on_node(desk.cluster, desk.nodes(job)[0], "resihp.wrapper.supervisor.process")
    supervisor.send_signal(signal.SIGTERM)
    desk.wait(job)
    assert ", run 2 (" in comment(desk, job)
    assert comment(desk, job).startswith("resihp: cancelled, iteration "), comment(desk, job)
