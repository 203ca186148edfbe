"""Settings of a site that would break or cheat a job: the doctor names each, and Slurm does what it says."""

from __future__ import annotations

import pytest

from tests.integration.slurm_doctor import ask, findings
from tests.integration.slurm_jobs import Desk, MakeCluster

pytestmark = pytest.mark.timeout(400)

JOB = "[job]\nnodes = 2\ngpus_per_node = 2\ntime = '2h'\n"


def test_a_plain_cluster_is_not_complained_of(cluster: MakeCluster) -> None:
    made = cluster(nodes=2, gpus=2, isolate=True, settings={"KillWait": "30"})
    for job in ("", JOB):
        found = findings(Desk(made), job)
        assert {finding.outcome for finding in found} <= {"ok", "skipped"}, found


def test_exit_codes_that_slurm_runs_again(cluster: MakeCluster) -> None:
    made = cluster(nodes=1, isolate=True, settings={"RequeueExit": "75,90-93", "RequeueExitHold": "4"})
    texts = [finding.text for finding in findings(Desk(made)) if finding.check == "requeue"]
    assert any("Slurm requeues a job that resihp ended for good with 93, over and over" in text for text in texts), (
        texts
    )
    assert any("ends with 4 stays in the queue, held" in text for text in texts), texts
    desk = Desk(made)
    job = desk.sbatch("#!/bin/sh\n#SBATCH --output=/dev/null --requeue\nexit 93\n")
    desk.until(lambda: desk.shown(job)["Restarts"] == "1", job)
    job = desk.sbatch("#!/bin/sh\n#SBATCH --output=/dev/null\nexit 4\n")
    desk.until(lambda: desk.state(job)[0] == "SPECIAL_EXIT", job)


def test_a_partition_that_the_job_does_not_fit(cluster: MakeCluster) -> None:
    partitions = "small Nodes=ALL MaxNodes=1 MaxTime=60\nPartitionName=brief Nodes=ALL DefaultTime=5"
    made = cluster(
        nodes=3,
        isolate=True,
        gpus=2,
        node_gpus={"n3": 1},
        gpu_type={"n1": "a100", "n2": "h100", "n3": "h100"},
        settings={"PartitionName": partitions},
    )
    desk = Desk(made)

    def told(job: str, check: str = "partition") -> str:
        return " ".join(
            f"{finding.text} -> {finding.advice}" for finding in findings(desk, job) if finding.check == check
        )

    text = told(JOB)
    assert "GPUs of different types (a100, h100)" in text
    assert "set gpu_type or constraint in [slurm]" in text
    assert "different types" not in told(JOB + "[slurm]\nextra = ['--nodelist=n1,n2']\n")
    assert "2 of its 3 nodes have 2 GPUs, but the job requests 3 nodes" in told(JOB + "[slurm]\nspares = 1\n")
    text = told(JOB + "[slurm]\npartition = 'small'\n")
    assert "MaxNodes" in text
    assert "at most 60 min (MaxTime)" in text
    slow = desk.sbatch("#!/bin/sh\n", "--partition=small", "--time=120")
    desk.until(lambda: desk.shown(slow).get("Reason") == "PartitionTimeLimit", slow)
    text = told("[job]\n[slurm]\npartition = 'brief'\n")
    assert "gets 5 min (DefaultTime), and is warned 300 s before its end" in text


def test_what_a_user_cannot_see_is_no_failure(cluster: MakeCluster) -> None:
    """Such a site runs our jobs; the doctor said that it could not."""
    made = cluster(nodes=2, gpus=2, isolate=True, settings={"PrivateData": "jobs,nodes"})
    found = ask(Desk(made, "nobody"))
    assert found["visibility"].outcome == "warning"
    assert "hides node states from you" in found["visibility"].text
    assert found["partition"].outcome == "skipped", found["partition"].text
    assert not [finding for finding in found.values() if finding.outcome in ("failed", "unknown")], found
    assert "visibility" not in ask(Desk(made)), "root sees all"


def test_limits_that_a_job_inherits(cluster: MakeCluster) -> None:
    made = cluster(nodes=1, isolate=True, settings={"PropagateResourceLimits": "ALL"})
    desk = Desk(made)
    found = ask(desk, before="ulimit -S -t 1800")
    assert found["inherited limits"].outcome == "warning"
    assert "ulimit -t is 1800" in found["inherited limits"].text
    assert "inherited limits" not in ask(desk)
    script = "ulimit -S -t 1800; sbatch --wait --output=said --wrap='ulimit -t'"
    assert desk.run("sh", "-c", script).returncode == 0
    assert (desk.folder / "said").read_text() == "1800\n"


def test_a_site_without_requeues_by_itself_takes_jobs_that_ask(cluster: MakeCluster) -> None:
    made = cluster(nodes=1, isolate=True, settings={"JobRequeue": "0"})
    desk = Desk(made)
    assert ask(desk)["requeue"].outcome == "ok"
    job = desk.sbatch("#!/bin/sh\n#SBATCH --output=/dev/null --requeue\nsleep 100\n")
    desk.until(lambda: desk.state(job)[0] == "RUNNING", job)
    assert desk.run("scontrol", "requeue", job).returncode == 0
    desk.until(lambda: desk.shown(job)["Restarts"] == "1", job)
    desk.run("scancel", job)


@pytest.mark.every_slurm
def test_what_newer_releases_offer(cluster: MakeCluster, slurm_release: str) -> None:
    made = cluster(nodes=1, isolate=True)
    found = ask(Desk(made))
    offers = found["newer Slurm"].text if "newer Slurm" in found else ""
    assert ("SLURM_JOB_END_TIME" in offers) == (slurm_release != "")
    assert ("--requeue=expedite" in offers) == (slurm_release == "26.05")
    out = made.shared / "end"
    made.run("sbatch", "--wait", f"--output={out}", "--wrap=echo ${SLURM_JOB_END_TIME-none}")
    assert (out.read_text() != "none\n") == (slurm_release != "")
    assert found["slurm"].outcome == "ok"


def test_a_cluster_without_munge(cluster: MakeCluster) -> None:
    own = {"AuthType": "auth/slurm", "CredType": "cred/slurm", "AuthInfo": "cred_expire=120"}
    found = ask(Desk(cluster(nodes=1, isolate=True, release="26.05", settings=own)))
    assert (found["munge"].outcome, found["submission"].outcome) == ("skipped", "ok")
    assert "auth/slurm in place of munge" in found["newer Slurm"].text
    assert not [finding for finding in found.values() if finding.outcome in ("failed", "unknown")], found
