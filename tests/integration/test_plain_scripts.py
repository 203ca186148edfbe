"""A script that knows nothing of resihp: what it finds in its environment, what is shown, and what its failures are."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.integration.jobs import Job
from tests.integration.slurm_jobs import Desk, MakeCluster

pytest.importorskip("torch")

SCRIPT = '''\
"""Data parallelism as torch has it."""
import json, os, signal, sys, time, urllib.request
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

how, bad = sys.argv[1], int(sys.argv[2])
if how == "before" and os.environ["RANK"] == str(bad):
    raise ValueError("no such token: 17")
dist.init_process_group("gloo")
rank = dist.get_rank()
print(f"rank {rank} of {dist.get_world_size()}", flush=True)
names = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "TORCH_NCCL_ASYNC", "OMP_")
with open(f"environment{rank}.json", "w") as file:
    json.dump({name: value for name, value in os.environ.items() if name.startswith(names)}, file)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 9 if how == "well" else 10_000):
    if rank == 0 and step % 4 == 0:
        print(f"step {step}", file=sys.stderr, flush=True)
    if rank == bad and step == 100:
        if how == "raise":
            raise ValueError("no such token: 17")
        if how == "exit":
            os._exit(3)
        if how == "refused":
            urllib.request.urlopen("http://127.0.0.1:1/graphql")
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()
    time.sleep(0.02)
dist.destroy_process_group()
'''
ENDS_AT_ONCE = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""
NOT_RESTARTED = 'not started again: [adapt] max_restarts is 0; see docs/interface.md, "Scripts that do not use resihp"'
TOO_FEW_NODES = (
    "not started again: the script needs 2 nodes ([job] min_nodes), 1 can be used; see docs/interface.md, "
    '"Scripts that do not use resihp"'
)
ERROR = "ValueError: no such token: 17"
REFUSED = "URLError: <urlopen error [Errno 111] Connection refused>"
LOG = "; see its log, n2.rank3.log"
THEN = "; ([23] others then lost their|another then lost its) peer"
"""On a busy machine not all have noticed within three seconds."""


def run(job: Job, how: str, bad: int = -1, nodes: int = 2, gpus: int = 2) -> Job:
    """`resihp run --local --nodes 2 --gpus-per-node 2 -- python train.py`."""
    script = job.folder / "train.py"
    job.folder.mkdir(parents=True, exist_ok=True)
    script.write_text(SCRIPT)
    command = (sys.executable, str(script), how, str(bad))
    return job.start(command=command, nodes=nodes, gpus=gpus, tp=1, pp=1).wait(120)


def messages(job: Job) -> list[str]:
    """What was said, without its times."""
    return [re.sub(r"^\d\d-\d\d \d\d:\d\d:\d\d ", "", line) for line in job.stderr.splitlines()]


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 2), (2, 2)])
def test_it_runs_as_under_torchrun_and_its_first_rank_is_heard(job: Job, nodes: int, gpus: int) -> None:
    job.environment |= {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "29500"}
    run(job, "well", nodes=nodes, gpus=gpus)
    world = nodes * gpus
    assert job.status == 0, job.stderr
    assert job.stdout.splitlines() == [f"rank 0 of {world}", "step 4", "step 8"], "of all others nothing"
    found = [json.loads((job.folder / f"environment{rank}.json").read_text()) for rank in range(world)]
    (port,) = {each.pop("MASTER_PORT") for each in found}
    assert port != "29500"
    for rank, environment in enumerate(found):
        assert environment == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % gpus),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(gpus),
            "GROUP_RANK": str(rank // gpus),
            "GROUP_WORLD_SIZE": str(nodes),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(world),
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RUN_ID": "local-1",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "100",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
    assert messages(job)[-1] == "done"
    for rank in range(1, world):
        assert log_of(job, rank).read_text() == f"rank {rank} of {world}\n"


def test_a_script_whose_last_line_destroys_its_process_group_ends(job: Job) -> None:
    """Its model, in `__main__`, holds the last reference to gloo: freed before the interpreter ends, it hung in one
    of two runs with four ranks."""
    job.folder.mkdir(parents=True)
    (job.folder / "train.py").write_text(ENDS_AT_ONCE)
    job.start(command=(sys.executable, str(job.folder / "train.py")), nodes=2, gpus=4, tp=1, pp=1).wait(180)
    assert job.status == 0, job.stderr
    assert messages(job)[-1] == "done"


@pytest.mark.parametrize(
    ("how", "said", "cause", "kind"),
    [
        ("kill", f"killed by signal 9 (SIGKILL){LOG}", "killed by signal 9 (SIGKILL)", "fail-stop"),
        ("exit", f"exited with status 3{LOG}", "exited with status 3", "fail-stop"),
        ("raise", f"{ERROR}; other ranks did not raise it", f"raised {ERROR}", "program"),
        ("refused", f"{REFUSED}; other ranks did not raise it", f"raised {REFUSED}", "program"),
    ],
)
def test_the_first_rank_that_fails_is_the_failure_and_its_peers_follow(
    job: Job, how: str, said: str, cause: str, kind: str
) -> None:
    job.environment["RESIHP_ADAPT__MAX_RESTARTS"] = "0"
    run(job, how, bad=3)
    assert job.status == 1, job.stderr
    told = messages(job)
    raises = kind == "program"
    place = "rank 3 (n2 device 1)"
    log = log_of(job, 3)
    where = f"resihp: job local-1: log of rank 3: {log}"
    last = [where] if raises else [f"{where}; it ends with", "    rank 3 of 4"]
    assert told[-3 - len(last) : -1 - len(last)] == [f"failure 1: {place} {cause}", NOT_RESTARTED]
    assert re.fullmatch(re.escape(f"{place}: {said}") + THEN, told[-1 - len(last)])
    assert told[-len(last) :] == last
    assert "before training began" not in job.stderr
    if raises:
        line = 'raise ValueError("no such token: 17")' if how == "raise" else "raise URLError(err)"
        assert line in [line.strip() for line in told], "its traceback"
    (failure,) = job.history("failures")
    assert 3 in failure["ranks"], "with those of its peers that had ended by then"
    assert failure["kind"] == kind
    if raises:
        assert failure["cause"] == f"{place} {cause}"
        assert (failure["node"], failure["component"]) == (None, "script"), "no node is to blame"
    else:
        assert failure["cause"] == f"rank 3 {cause}"
        assert (failure["node"], failure["device"], failure["component"]) == ("n2", 1, "process")
    assert re.search(r"then rank \d raised RuntimeError", failure["evidence"])
    assert job.ask("status")["exit_code"] == 1


@pytest.mark.parametrize("bad", [0, 1])
def test_nobody_waits_for_a_rank_that_failed_before_they_met(job: Job, bad: int) -> None:
    """torch's store would wait for half an hour."""
    job.environment["RESIHP_ADAPT__MAX_RESTARTS"] = "0"
    began = time.monotonic()
    run(job, "before", bad=bad, nodes=1)
    assert time.monotonic() - began < 60
    assert job.status == 1, job.stderr
    (failure,) = job.history("failures")
    assert failure["cause"] == f"rank {bad} (n1 device {bad}) raised {ERROR}"


def test_a_node_that_dies_is_the_failure(job: Job) -> None:
    script = job.folder / "train.py"
    job.folder.mkdir(parents=True)
    script.write_text(SCRIPT)
    job.start(command=(sys.executable, str(script), "endless", "-1"), nodes=2, gpus=2, tp=1, pp=1)
    job.until(lambda: "step 4" in (job.folder / "stdout").read_text())
    (agent,) = [process for process in job.processes() if process.cmdline()[0] == "resihp job local-1 agent n2"]
    os.killpg(agent.pid, signal.SIGKILL)
    job.wait(60)
    assert job.status == 5, job.stderr
    (failure,) = job.history("failures")
    assert (failure["component"], failure["node"]) == ("node", "n2")
    assert "before training began" not in job.stderr
    assert TOO_FEW_NODES in messages(job)


def test_it_runs_on_the_nodes_of_an_allocation_and_fails_there(cluster: MakeCluster) -> None:
    """Logs are on the nodes' own disks then, and come to the job's folder once a second."""
    desk = Desk(cluster(nodes=2, gpus=2))
    (desk.folder / "train.py").write_text(SCRIPT)
    script = "#!/bin/bash\n#SBATCH --no-kill\nexec resihp run --max-restarts 0 -- python train.py kill 3\n"
    options = ["--nodes=2", "--gpus-per-node=2", "--exclusive", "--output=%x-%j.out", "--time=5"]
    job = desk.sbatch(script, *options)
    assert desk.wait(job) == ("FAILED", "1:0"), desk.output(job)
    told = desk.output(job)
    assert "\nrank 0 of 4\n" in told
    assert "\nstep 4\n" in told
    assert "rank 3 (n2 device 1): killed by signal 9 (SIGKILL)" in told
    assert "before training began" not in told
    found = [json.loads((desk.folder / f"environment{rank}.json").read_text()) for rank in range(4)]
    assert {each["TORCHELASTIC_RUN_ID"] for each in found} == {job}
    assert len({(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in found}) == 1
    assert [each["GROUP_RANK"] for each in found] == ["0", "0", "1", "1"]
    (failure,) = desk.rows("failures", job)
    assert (failure["cause"], failure["node"]) == ("rank 3 killed by signal 9 (SIGKILL)", "n2")


def log_of(job: Job, rank: int) -> Path:
    (log,) = job.folder.glob(f"home/jobs/local-1/logs/*.rank{rank}.log")
    return log


@pytest.mark.parametrize("as_json", [False, True])
def test_a_program_that_is_no_python_script_is_heard_as_well(job: Job, as_json: bool) -> None:
    command, options = ("/bin/sh", "-c", "echo rank $RANK at $MASTER_ADDR"), ("--json",) if as_json else ()
    job.start(*options, command=command, nodes=1, gpus=2, tp=1, pp=1).wait(60)
    assert job.status == 0, job.stderr
    if as_json:
        assert json.loads(job.stdout)["exit_code"] == 0, "one document"
        assert "\nrank 0 at 127.0.0.1\n" in job.stderr
    else:
        assert job.stdout == "rank 0 at 127.0.0.1\n"
