"""A cluster with accounting: what sacct says of jobs, nodes given back in turn, who may drain, what limits refuse."""

from __future__ import annotations

import pytest

from resihp.controller import interface as api
from resihp.record.journal import JobEnded
from tests.integration.cluster import Cluster
from tests.integration.slurm_doctor import ask
from tests.integration.slurm_jobs import Desk, MakeCluster
from tests.integration.test_slurm_desk import Desk as Upkeep
from tests.integration.test_slurm_signals import PREEMPTION

pytestmark = pytest.mark.timeout(600)

LIMITS = {"AccountingStorageEnforce": "associations,limits,qos"}
MODELS = {"n1": "a100", "n2": "a100", "n3": "h100", "n4": "h100"}


def runs(cluster: Cluster, job: str) -> list[tuple[str, str]]:
    """State and exit code of each run of a job, and of each of its sizes, as sacct has them, oldest first."""
    argv = ["sacct", "--duplicates", "--allocations", "--noheader", "--parsable2", "--jobs", job]
    lines = cluster.run(*argv, "--format=start,end,state,exitcode").stdout.splitlines()
    return [(state.split()[0], code) for _, _, state, code in sorted(line.split("|") for line in lines)]


USER = "games"
"""Whose associations are looked at. To slurmctld of 26.05 nobody is no user: it does not find that one's."""


def give(cluster: Cluster, *argv: str) -> None:
    cluster.run("sacctmgr", "--immediate", *argv)


def until_taken(cluster: Cluster, user: str, *options: str) -> None:
    """slurmdbd tells slurmctld of changes after sacctmgr has ended: wait until it would take such a job."""
    argv = ["sbatch", "--test-only", "--nodes=1", "--wrap=true", *options]
    cluster.wait(lambda: cluster.run(*argv, user=user, check=False).returncode == 0, f"{user} to have an association")


@pytest.mark.soak
def test_sacct_has_both_runs_of_a_job_that_was_preempted(cluster: MakeCluster) -> None:
    desk = Desk(cluster(nodes=2, gpus=1, dbd=True, settings=PREEMPTION))
    desk.pace(0.5)
    changes = {"##SBATCH --partition=gpu --account=project": "#SBATCH --partition=low"}
    job = desk.sbatch_training(20, nodes=2, gpus=1, changes=changes)
    desk.until(lambda: desk.committed(job) >= 2, job, timeout_s=180)
    other = desk.run("sbatch", "--parsable", "-N2", "--exclusive", "--output=/dev/null", "--wrap=sleep 600").stdout
    desk.until(lambda: desk.of(job, JobEnded), job)
    desk.until(lambda: desk.state(other.strip())[0] == "RUNNING", job)
    desk.run("scancel", other.strip())
    desk.pace(0.0)
    desk.start_again(job, "TimeLimit=10")
    assert desk.wait(job, timeout_s=240) == ("COMPLETED", "0:0"), desk.output(job)
    desk.until(lambda: len(runs(desk.cluster, job)) == 2, job)
    first, last = runs(desk.cluster, job)
    assert first in (("REQUEUED", "0:0"), ("PREEMPTED", "0:0")), "it asked for that itself, or Slurm did it"
    assert last == ("COMPLETED", "0:0")


def test_sacct_of_a_job_that_shrinks_and_of_one_in_place_of_a_lost_node(cluster: MakeCluster) -> None:
    """Without accounting, Slurm 22.05 lets a job shrink once only."""
    made = cluster(nodes=5, gpus=2, dbd=True)
    desk = Upkeep(made, 4)
    for left in (3, 2, 1):
        release = api.ReleaseNode(node=desk.names[left], keep=desk.names[:left])
        desk.do(release, until=lambda left=left: len(desk.of(api.ReleaseAnswered)) == 4 - left)
        assert desk.view().nodes == desk.names[:left]
    assert [answer.outcome for answer in desk.of(api.ReleaseAnswered)] == ["done"] * 3
    ask = api.AskReplacement(replacement=1, exclude=desk.names)
    desk.do(ask, until=lambda: "running" in desk.state_of(1), timeout_s=90)
    other = desk.of(api.ReplacementNews)[-1].slurm_job
    desk.close()
    made.wait(lambda: desk.view(other).state == "cancelled", "the other one to be cancelled, too")
    made.run("scancel", desk.job)
    made.wait(lambda: [state for state, _ in runs(made, other)] == ["CANCELLED"], f"sacct of job {other}")
    made.wait(lambda: runs(made, desk.job)[-1][0] == "CANCELLED", f"sacct of job {desk.job}")
    assert {state for state, _ in runs(made, desk.job)[:-1]} == {"RESIZING"}


def test_who_may_drain_by_accounting_and_who_may_not_submit(cluster: MakeCluster) -> None:
    made = cluster(nodes=1, isolate=True, dbd=True, settings={"AccountingStorageEnforce": "associations"})
    give(made, "add", "account", "lab")
    give(made, "add", "user", "games", "account=lab", "adminlevel=operator")
    give(made, "add", "user", "daemon", "account=lab", "adminlevel=admin")
    give(made, "add", "user", "bin", "account=lab")
    for user in ("games", "daemon", "bin"):
        until_taken(made, user)
    found = {user: ask(Desk(made, user)) for user in ("games", "daemon", "bin", "nobody")}
    assert {user: of["drain"].outcome for user, of in found.items()} == {
        "games": "ok",
        "daemon": "ok",
        "bin": "warning",
        "nobody": "warning",
    }
    assert [of["submission"].outcome for of in found.values()] == ["ok", "ok", "ok", "failed"]
    assert "Invalid account" in found["nobody"]["submission"].text
    assert "set account in [slurm]" in found["nobody"]["submission"].advice


def test_limits_that_a_job_is_beyond_are_named_before_it_waits_for_ever(cluster: MakeCluster) -> None:
    made = cluster(nodes=4, gpus=2, isolate=True, dbd=True, settings=LIMITS, gpu_type=MODELS)
    give(made, "add", "account", "top", "grptres=gres/gpu=6")
    give(made, "add", "account", "lab", "parent=top")
    for name, limit in {
        "small": "maxtresperjob=node=2",
        "short": "maxwall=01:00:00",
        "one": "maxjobsperuser=1",
    }.items():
        give(made, "add", "qos", name, limit)
    give(made, "add", "user", USER, "account=lab", "qos=normal,small,short,one", "defaultqos=normal")
    for name in ("normal", "small", "short", "one"):
        until_taken(made, USER, f"--qos={name}", "--time=30")
    desk = Desk(made, USER)

    def job(nodes: int, slurm: str = "", time: str = "30m") -> str:
        slurm = f"{slurm}\nconstraint = ''\nexclusive = false"
        return f"[job]\nnodes = {nodes}\ngpus_per_node = 2\ntime = '{time}'\n[slurm]\n{slurm}\n"

    def waits(*options: str) -> str:
        """Slurm takes such a job; and why it waits."""
        argv = ["sbatch", "--parsable", "--output=/dev/null", "--gpus-per-node=2", "--wrap=sleep 60", *options]
        number = made.run(*argv, user=USER).stdout.strip()
        view = desk.until(lambda: made.run("squeue", "-h", "-j", number, "-o", "%r").stdout.strip(), number)
        desk.until(lambda: made.run("squeue", "-h", "-j", number, "-o", "%r").stdout.strip() != "None", number)
        view = made.run("squeue", "-h", "-j", number, "-o", "%r").stdout.strip()
        made.run("scancel", number)
        return view

    well = ask(desk, job(2, "qos = 'normal'"))
    assert well["limits"].outcome == "ok", well["limits"].text
    assert well["submission"].outcome == "ok", well["submission"].text

    beyond = ask(desk, job(4))["limits"]
    assert beyond.outcome == "failed", beyond.text
    assert "8 GPUs, but account top allows 6 GPUs to all its jobs together (grptres=gres/gpu=6)" in beyond.text
    assert waits("-N4") == "AssocGrpGRES"

    beyond = ask(desk, job(3, "qos = 'small'"))["limits"]
    assert "3 nodes, but QOS small allows 2 nodes per job" in beyond.text
    assert "sacctmgr show qos small" in beyond.advice
    assert waits("-N3", "--qos=small") == "QOSMaxNodePerJobLimit"

    beyond = ask(desk, job(1, "qos = 'short'", "5h"))["limits"]
    assert "5 h, but QOS short allows 60 min per job" in beyond.text
    assert waits("-N1", "--qos=short", "--time=5:00:00") == "QOSMaxWallDurationPerJobLimit"

    found = ask(desk, job(2, "qos = 'one'\nreplacements = 1"))
    assert found["limits"].outcome == "warning"
    assert "QOS one allows 1 running job per user" in found["limits"].text
    assert found["submission"].outcome == "ok", "a job of its own size starts"
