"""Jobs that are not plain: what resihp cannot run in is refused at once; what would lose a job is said at its start."""

from __future__ import annotations

import json

import pytest

from tests.integration.slurm_jobs import Desk, MakeCluster, job_file

pytestmark = pytest.mark.timeout(300)

LOOKS = "#!/bin/bash\nresihp doctor --json > doctor.json\nexec resihp run -- true\n"
PLAIN = ("--output=out", "--no-kill", "--time=5")


def nodes_finding(desk: Desk) -> tuple[str, str]:
    """What doctor says of the allocation."""
    (row,) = [row for row in json.loads((desk.folder / "doctor.json").read_text())["rows"] if row["check"] == "nodes"]
    return row["outcome"], row["text"]


@pytest.mark.every_slurm
def test_heterogeneous_jobs_and_uneven_gpus_are_refused(cluster: MakeCluster) -> None:
    desk = Desk(cluster(nodes=2, gpus=2, node_gpus={"n1": 4}))
    parts = "#!/bin/bash\n#SBATCH --nodes=1 --gpus-per-node=2\n#SBATCH hetjob\n#SBATCH --nodes=1\n"
    refusals = {
        parts + LOOKS.removeprefix("#!/bin/bash\n"): (
            (),
            "a heterogeneous job, of 2 parts",
            "sbatch --nodes=2 --gpus-per-node=2",
        ),
        LOOKS: (
            ("--nodes=2", "--gpus=3"),
            "nodes have different numbers of GPUs: 2 on n1, 1 on n2",
            "sbatch --nodes=2 --gpus-per-node=2, or --gpus-per-node=1, in place of --gpus",
        ),
    }
    for script, (options, what, mend) in refusals.items():
        job = desk.sbatch(script, *PLAIN, *options)
        assert desk.wait(job) == ("FAILED", "2:0")
        said = (desk.folder / "out").read_text()
        assert said.startswith(f"resihp: job {job}: {what}"), said
        assert mend in said
        assert len(said.splitlines()) == 1
        assert nodes_finding(desk) == ("failed", said.strip().removeprefix("resihp: "))
        (desk.folder / "out").unlink()
    assert not (desk.folder / "home" / "jobs").exists(), "no job was made"


def test_whole_nodes_of_different_size_have_what_was_asked_for(cluster: MakeCluster) -> None:
    desk = Desk(cluster(nodes=2, gpus=2, node_gpus={"n1": 4}))
    script = "#!/bin/bash\nexec resihp run -- true\n"
    job = desk.sbatch(script, *PLAIN, "--nodes=2", "--gpus-per-node=2", "--exclusive")
    desk.wait(job)
    assert f"job {job}: 2 nodes of 2," in (desk.folder / "out").read_text()


def test_a_shell_that_would_keep_the_warning_to_itself_is_told(cluster: MakeCluster) -> None:
    desk = Desk(cluster(nodes=1, gpus=1))
    warned = "#!/bin/bash\n#SBATCH --signal=B:USR2@60\n"
    scripts = {
        f"{warned}resihp run -- true\n": True,
        f"{warned}resihp doctor --json > doctor.json\nbash -c 'resihp run -- true; true'\n": True,
        f"{warned}exec resihp run -- true\n": False,
        f"{warned}trap 'kill -USR2 $child' USR2\nresihp run -- true & child=$!\nwait\n": False,
        "#!/bin/bash\nresihp run -- true\n": False,
    }
    for script, lost in scripts.items():
        job = desk.sbatch(script, *PLAIN, "--nodes=1", "--gpus-per-node=1")
        desk.wait(job)
        said = (desk.folder / "out").read_text()
        text = (
            f"job {job}: Slurm's warning, --signal=B:USR2, goes to the batch script's shell, which dies of it, and the "
            "job with it, unsaved and not requeued; write exec before resihp run in the script"
        )
        assert (f"resihp: {text}\n" in said) is lost, said
        (desk.folder / "out").unlink()
    rows = json.loads((desk.folder / "doctor.json").read_text())["rows"]
    assert [row["outcome"] for row in rows if "write exec before resihp run" in row["text"]] == ["warning"]


def test_chains_of_one_name_do_not_wait_for_each_other(cluster: MakeCluster) -> None:
    """And each job of a chain waits for the one before it, however often Slurm runs that again."""
    desk = Desk(cluster(nodes=2, gpus=1))
    desk.pace(0.05)
    chains = []
    for folder in ("one", "other"):
        sections = {"job": {"nodes": 1, "gpus_per_node": 1}, "checkpoint": {"folder": folder}}
        done = desk.submit(job_file(desk.training(1000), **sections), "--chain", "2")
        assert done.returncode == 0, done.stderr
        chains.append(done.stdout.split())
    (one, next_one), (other, next_other) = chains
    desk.until(lambda: desk.state(one)[0] == desk.state(other)[0] == "RUNNING", one)
    assert desk.run("scontrol", "requeue", one).returncode == 0
    desk.until(lambda: desk.state(one)[0] == "PENDING" and desk.shown(one)["Restarts"] == "1", one)
    assert desk.state(next_one)[0] == desk.state(next_other)[0] == "PENDING"
    assert desk.run("scancel", other).returncode == 0
    desk.until(lambda: desk.state(next_other)[0] == "RUNNING", next_other)
    assert desk.state(next_one)[0] == "PENDING"
    desk.run("scancel", one, next_one, next_other)


def test_a_chain_ends_with_its_training_program(cluster: MakeCluster) -> None:
    desk = Desk(cluster(nodes=1, gpus=2))
    (desk.folder / "train.py").write_text("raise ZeroDivisionError('of course')\n")
    sections = {"job": {"nodes": 1, "gpus_per_node": 2}, "checkpoint": {"folder": "saved"}}
    description = job_file(["python", "train.py"], **sections)
    done = desk.submit(description, "--chain", "3")
    assert done.returncode == 0, done.stderr
    first, *others = done.stdout.split()
    assert desk.wait(first) == ("FAILED", "93:0"), desk.output(first)
    for other in others:
        assert desk.wait(other) == ("FAILED", "93:0"), desk.output(other)
        said = desk.output(other)
        assert f"resihp: job {other}: not started: job {first} of this chain found the training program broken" in said
        assert "jobs submitted from now on start" in said
        assert not desk.job(other).folder.exists()
    again = desk.submit(description, "--chain", "2").stdout.split()[0]
    assert desk.wait(again) == ("FAILED", "93:0")
    assert "logs in" in desk.output(again), "it was started"
