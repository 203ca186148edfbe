"""The test cluster does what its methods say: what other tests take from it would else prove nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.integration.cluster import Cluster, requires_slurm

REPOSITORY = Path(__file__).parents[2]

MakeCluster = Callable[..., Cluster]

HOLD = "#!/bin/sh\nsrun -v --no-kill --kill-on-bad-exit=0 --wait=0 sleep 1000\n"


def hold(cluster: Cluster, nodes: int, user: str = "nobody") -> str:
    """A job that holds so many nodes and survives the loss of all but the first.

    srun ends the step if a node is lost whose answer it has not had, although the task runs there.
    """
    script = cluster.shared / "hold.sh"
    script.write_text(HOLD)
    options = ["--parsable", "--no-kill", f"--nodes={nodes}", f"--output={cluster.shared}/hold-%j.log", "--chdir=/"]
    job = cluster.run("sbatch", *options, str(script), user=user).stdout.strip()
    told = cluster.shared / f"hold-{job}.log"

    def runs() -> bool:
        heard = told.read_text().count("tasks started") if told.exists() else 0
        return heard == nodes == len(sleepers(cluster))

    cluster.wait(runs, f"job {job} to run on {nodes} nodes")
    return job


def sleepers(cluster: Cluster) -> list[int]:
    """Tasks of `hold`."""
    found = []
    for node in cluster.nodes:
        for pid in cluster.pids(node):
            try:
                if psutil.Process(pid).cmdline()[:2] == ["/usr/bin/sleep", "1000"]:
                    found.append(pid)
            except psutil.NoSuchProcess:
                continue
    return found


def mentions(folder: Path) -> list[int]:
    """Processes with this folder on their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in " ".join(process.cmdline()):
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def running(pid: int) -> bool:
    """Zombies are not: outside of a box, whether somebody collects them is this machine's affair."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_a_job_of_an_ordinary_user_gets_nodes_with_names_and_devices(cluster: MakeCluster) -> None:
    made = cluster(nodes=3, gpus=2, isolate=True)
    script = made.shared / "who.sh"
    script.write_text("#!/bin/sh\nsrun sh -c 'echo $(hostname) $(id -un) $CUDA_VISIBLE_DEVICES'\n")
    output = made.shared / "who.out"
    made.run("sbatch", "--wait", "-N3", "--gpus-per-node=2", f"--output={output}", str(script), user="nobody")
    assert sorted(output.read_text().splitlines()) == ["n1 nobody 0,1", "n2 nobody 0,1", "n3 nobody 0,1"]


def test_a_killed_node_is_noticed_by_slurm_and_comes_back(cluster: MakeCluster) -> None:
    made = cluster(nodes=3)
    hold(made, 3)
    made.kill_node("n2")
    assert made.pids("n2") == []
    assert len(sleepers(made)) == 2
    made.wait_state("n2", "down*", "down", timeout_s=60)
    made.start_node("n2")
    made.wait_state("n2", "idle")


def test_a_stopped_node_runs_no_more_until_it_is_continued(cluster: MakeCluster) -> None:
    made = cluster(nodes=2)

    def states() -> set[str]:
        return {psutil.Process(pid).status() for pid in made.pids("n2")}

    made.stop_node("n2")  # the kernel stops a process when it runs next
    made.wait(lambda: states() == {psutil.STATUS_STOPPED}, "n2 to stop")
    made.cont_node("n2")
    made.wait(lambda: psutil.STATUS_STOPPED not in states(), "n2 to go on")


def test_jobs_outlive_slurmd(cluster: MakeCluster) -> None:
    made = cluster(nodes=2)
    hold(made, 2)
    made.kill_slurmd("n2")
    assert made.slurmd_pid("n2") is None
    assert len(sleepers(made)) == 2
    made.start_node("n2")
    assert made.slurmd_pid("n2") is not None


def test_without_a_controller_commands_fail_and_afterwards_it_knows_its_jobs(cluster: MakeCluster) -> None:
    made = cluster(nodes=2)
    job = hold(made, 2)
    made.stop_controller()
    assert made.run("squeue", check=False).returncode != 0
    made.start_controller()
    made.wait(lambda: made.run("squeue", "-h", "-o", "%i %T").stdout.split() == [job, "RUNNING"], "the job to be known")


def test_health_checks_run_as_root_on_every_node(cluster: MakeCluster, tmp_path: Path) -> None:
    script = tmp_path / "check"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path}/checked.$(id -u).$(hostname)\n")
    script.chmod(0o755)
    made = cluster(nodes=2, isolate=True, health_check=script)
    made.wait(lambda: {p.name for p in tmp_path.glob("checked.*")} == {"checked.0.n1", "checked.0.n2"}, "both checks")


def test_nothing_is_left_behind(cluster: MakeCluster) -> None:
    made = cluster(nodes=2)
    hold(made, 2)
    slurmds = [made.slurmd_pid(node) for node in made.nodes]
    tasks = sleepers(made)
    made.stop_node("n1")
    made.down()
    assert not [pid for pid in [*slurmds, *tasks] if pid is not None and running(pid)]
    assert not made.folder.exists()
    assert not mentions(made.folder)


def test_nothing_outlives_a_test_run_that_is_killed() -> None:
    requires_slurm(isolate=True)
    program = "from tests.integration.cluster import Cluster; c = Cluster(nodes=2).up(); print(c.folder, flush=True)"
    argv = [sys.executable, "-c", program + "; input()"]
    with subprocess.Popen(argv, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        folder = Path(run.stdout.readline().strip())
        try:
            assert mentions(folder)
            run.kill()
            deadline = time.monotonic() + 10
            while mentions(folder):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            shutil.rmtree(folder)


@pytest.mark.soak
def test_a_node_that_is_cut_off_runs_on_alone_and_comes_back(cluster: MakeCluster) -> None:
    made = cluster(nodes=3, network=True)
    hold(made, 3)

    def reaches(node: str, other: str) -> bool:
        port = made.slurmd_port(other)
        argv = ["timeout", "1", "bash", "-c", f"exec 3<>/dev/tcp/{made.address(other)}/{port}"]
        return made.run(*argv, node=node, check=False).returncode == 0

    assert reaches("n1", "n2")
    assert reaches("n2", "n1")
    made.partition("n2")
    assert not reaches("n1", "n2")
    assert not reaches("n2", "n3")
    assert reaches("n1", "n3")
    made.wait_state("n2", "down*", "down")
    assert len(sleepers(made)) == 3
    made.heal("n2")
    assert reaches("n1", "n2")
    made.wait_state("n2", "idle")


def test_a_killed_node_gets_its_network_back(cluster: MakeCluster) -> None:
    made = cluster(nodes=2, network=True)
    made.kill_node("n2")
    made.start_node("n2")
    assert made.run("srun", "-N2", "hostname", user="nobody").stdout.split() in (["n1", "n2"], ["n2", "n1"])
