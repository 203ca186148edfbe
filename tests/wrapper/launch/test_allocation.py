"""What is read off an allocation's environment, which nodes a run gets from it, and under which address it listens."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from resihp.errors import UsageError
from resihp.slurm.client import NodeView
from resihp.wrapper.config.schema import Configuration
from resihp.wrapper.config.shape import Shape, of_allocation, on_this_machine
from resihp.wrapper.config.sources import read
from resihp.wrapper.launch import allocation
from resihp.wrapper.launch.allocation import Allocation, addresses, counts, find, no_kill_seen, own_address
from tests.slurm.fake_slurm import FakeSlurm

BATCH = {
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NODELIST": "n[1-3,7]",
    "SLURMD_NODENAME": "n1",
    "SLURM_JOB_CPUS_PER_NODE": "16(x3),8",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_JOB_ACCOUNT": "project",
    "SLURM_RESTART_COUNT": "2",
}
"""As a batch script of Slurm 22.05.8 sees it, shortened."""


def test_a_batch_scripts_environment_is_read() -> None:
    found = find(BATCH, FakeSlurm())
    assert (found.job_id, found.restart_count, found.batch_node) == ("1234", 2, "n1")
    assert found.nodes == ("n1", "n2", "n3", "n7")
    assert (found.cpus_per_node, found.uneven, found.gpus_per_node) == (8, True, 2)
    assert (found.partition, found.account, found.qos, found.reservation) == ("gpu", "project", "", "")


def test_an_element_of_an_array_is_one_of_several() -> None:
    """As the last of them sees it: SLURM_JOB_ID is what the others have as SLURM_ARRAY_JOB_ID."""
    found = find(BATCH | {"SLURM_ARRAY_JOB_ID": "1234", "SLURM_ARRAY_TASK_ID": "3"}, FakeSlurm())
    assert (found.job_id, found.task, found.number) == ("1234_3", "3", "1234")
    alone = find(BATCH, FakeSlurm())
    assert (alone.job_id, alone.task, alone.number) == ("1234", "", "1234")


@pytest.mark.parametrize(
    ("element", "found"),
    [("1200_3", ("1200_3", "3", "1234")), ("", ("1234", "", "1234"))],
    ids=["an element", "submitted by an element"],
)
def test_what_an_arrays_element_submits_is_not_taken_for_it(element: str, found: tuple[str, str, str]) -> None:
    """sbatch hands SLURM_ARRAY_JOB_ID on to what it submits."""
    environment = BATCH | {"SLURM_ARRAY_JOB_ID": "1200", "SLURM_ARRAY_TASK_ID": "3"}
    slurm = FakeSlurm(("n1", "n2", "n3", "n7"))
    slurm.add_job("n1", "n2", "n3", "n7", id="1234", element=element)
    job = find(environment, slurm)
    assert (job.job_id, job.task, job.number) == found
    slurm.unavailable = True
    job = find(environment, slurm)
    assert (job.job_id, job.task) == ("1234", "3"), "a number that is nobody else's"


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        ({"SLURM_GPUS_ON_NODE": "8"}, 8),
        ({"SLURM_JOB_GPUS": "0,1,5"}, 3),
        ({"SLURM_GPUS_PER_NODE": "4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:4,v100:4"}, None),
        ({}, None),
    ],
)
def test_gpus_are_found_wherever_slurm_tells_them(changes: dict[str, str], gpus: int | None) -> None:
    environment = {name: value for name, value in BATCH.items() if "GPUS" not in name}
    assert find(environment | changes, FakeSlurm()).gpus_per_node == gpus


def with_gpus(job: str, **gpus: int) -> FakeSlurm:
    slurm = FakeSlurm(("n1", "n2", "n3", "n7"))
    slurm.add_job("n1", "n2", "n3", "n7", id=job)
    slurm.job_gpus[job] = gpus
    return slurm


def test_nodes_with_different_numbers_of_gpus_are_refused() -> None:
    """--gpus=7 -N4: the batch script's node does not tell."""
    with pytest.raises(UsageError) as refusal:
        find(BATCH, with_gpus("1234", n1=2, n2=2, n3=2, n7=1))
    assert str(refusal.value) == (
        "job 1234: nodes have different numbers of GPUs: 2 on n1 and 2 more, 1 on n7; resihp needs the same number on "
        "each: sbatch --nodes=4 --gpus-per-node=2, or --gpus-per-node=1, in place of --gpus, --gpus-per-task or --gres"
    )
    with pytest.raises(UsageError, match=r"2 on n1, 0 on n2 and 2 more; .* --gpus-per-node=2 in place of"):
        find(BATCH, with_gpus("1234", n1=2))


def test_what_was_asked_of_each_node_is_used_where_slurm_gave_more() -> None:
    """--exclusive gives all that a node has."""
    exclusive = BATCH | {"SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS_PER_NODE": "a100:2"}
    slurm = with_gpus("1234", n1=4, n2=2, n3=2, n7=2)
    assert find(exclusive, slurm).gpus_per_node == 2
    assert find(exclusive, with_gpus("1234", n1=4, n2=4, n3=4, n7=4)).gpus_per_node == 4


def test_slurm_is_asked_for_gpus_only_where_the_environment_does_not_tell() -> None:
    slurm = with_gpus("1234", n1=2, n2=2, n3=2, n7=1)
    assert find(BATCH | {"SLURM_GPUS_PER_NODE": "2"}, slurm).gpus_per_node == 2
    assert find(BATCH | {"SLURM_JOB_NODELIST": "n1"}, slurm).gpus_per_node == 2
    assert slurm.calls["gpus"] == 0
    slurm.unavailable = True
    assert find(BATCH, slurm).gpus_per_node == 2, "no answer is no refusal"
    salloc = {name: value for name, value in BATCH.items() if name not in ("SLURMD_NODENAME", "SLURM_GPUS_ON_NODE")}
    assert find(salloc, with_gpus("1234", n1=3, n2=3, n3=3, n7=3)).gpus_per_node == 3


def test_a_heterogeneous_job_is_refused() -> None:
    parts = {"SLURM_HET_SIZE": "2", "SLURM_JOB_NUM_NODES_HET_GROUP_0": "4", "SLURM_JOB_NUM_NODES_HET_GROUP_1": "1"}
    with pytest.raises(UsageError, match=r"a heterogeneous job, of 2 .*: sbatch --nodes=5 --gpus-per-node=2$"):
        find(BATCH | parts, FakeSlurm())


def test_on_a_login_node_there_is_no_batch_node() -> None:
    salloc = {name: value for name, value in BATCH.items() if name not in ("SLURMD_NODENAME", "SLURM_RESTART_COUNT")}
    found = find(salloc, FakeSlurm())
    assert (found.batch_node, found.restart_count) == ("", 0)


@pytest.mark.parametrize(("text", "found"), [("16(x3),8", (16, 8)), ("4", (4,)), ("", ()), ("many", ()), ("4,x", ())])
def test_counts(text: str, found: tuple[int, ...]) -> None:
    assert counts(text) == found


def test_outside_of_an_allocation_the_ways_in_are_named() -> None:
    with pytest.raises(UsageError, match=r"not in a Slurm allocation: resihp submit .* sbatch, and --local runs"):
        find({}, FakeSlurm())


def test_started_by_srun_on_every_node_it_refuses() -> None:
    step = BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    with pytest.raises(UsageError, match="job 1234: resihp run was started 4 times by srun; call it in the batch"):
        find(step, FakeSlurm())
    with pytest.raises(UsageError, match="SLURM_JOB_NODELIST is not set"):
        find({"SLURM_JOB_ID": "1234"}, FakeSlurm())


def test_a_folder_that_only_the_login_node_has_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "SLURM_FALLBACK", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"job 1234: the folder .* from, /mine, does not exist on .*--chdir=FOLDER"):
        find(BATCH | {"SLURM_SUBMIT_DIR": "/mine"}, FakeSlurm())
    assert find(BATCH | {"SLURM_SUBMIT_DIR": str(tmp_path)}, FakeSlurm())


@pytest.mark.parametrize(
    ("script", "seen"),
    [
        ("#!/bin/bash\n#SBATCH --nodes=4 --no-kill\nexec x\n", True),
        ("#!/bin/bash\n# text\n\n#SBATCH -k\n", True),
        ("#!/bin/bash\n##SBATCH --no-kill\nexec x\n", False),
        ("#!/bin/bash\n#SBATCH --nodes=4 # --no-kill\n", False),
        ("#!/bin/bash\nexec x\n#SBATCH --no-kill\n", False),
        ("#!/bin/bash\n#SBATCH --comment='\n#SBATCH --no-kill\n", True),
        (None, False),
    ],
)
def test_no_kill_is_looked_for_in_the_batch_script(script: str | None, seen: bool) -> None:
    assert no_kill_seen({}, script) is seen
    assert no_kill_seen({"SBATCH_NO_KILL": "1"}, script)


def test_a_batch_script_that_slurm_does_not_give_is_none() -> None:
    slurm = FakeSlurm()
    slurm.unavailable = True
    assert allocation.batch_script(slurm, "1234") is None


# --- nodes of the run ---------------------------------------------------------------------------------------------


def given(nodes: int = 4, gpus: int | None = 2) -> Allocation:
    found = find(BATCH | {"SLURM_JOB_NODELIST": f"n[1-{nodes}]"}, FakeSlurm())
    return Allocation(**{name: getattr(found, name) for name in found.__struct_fields__} | {"gpus_per_node": gpus})


def configured(job: dict[str, Any] | None = None, spares: str = "0") -> Configuration:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RESIHP_SLURM__SPARES", spares)
        return read({"job": job or {}}, site=())


def shape(configuration: Configuration, found: Allocation) -> tuple[Shape, list[str]]:
    told: list[str] = []
    return of_allocation(configuration, found, told.append), told


def test_nodes_and_gpus_are_what_slurm_gave(fresh_home: object) -> None:
    assert shape(configured(), given()) == (Shape(("n1", "n2", "n3", "n4"), 2, 0), [])
    found, _ = shape(configured(spares="1"), given())
    assert (found.laid_out, found.spares, found.devices) == (3, 1, 8)
    assert shape(configured({"gpus_per_node": 1}), given())[0].gpus_per_node == 1


def test_nodes_beyond_the_layout_stand_by_with_a_notice(fresh_home: object) -> None:
    found, told = shape(configured({"nodes": 3}), given())
    assert (found.laid_out, found.spares) == (3, 1)
    assert told == ["job 1234: the layout uses 3 of 4 nodes; 1 more than requested stand by"]
    found, told = shape(configured({"nodes": 2}, spares="2"), given())
    assert (found.laid_out, found.spares, told) == (2, 2, [])


def test_without_gpus_workers_run_without(fresh_home: object) -> None:
    found, told = shape(configured({"gpus_per_node": 2}), given(gpus=None))
    assert found.gpus_per_node == 2
    assert told == ["job 1234: Slurm gave no GPUs; 2 workers a node without"]


@pytest.mark.parametrize(
    ("job", "spares", "message"),
    [
        ({"nodes": 5}, "0", r"Slurm gave 4 nodes, the layout needs 5; sbatch --nodes=5, or lower --nodes"),
        ({"nodes": 4}, "1", r"the layout needs 4 and 1 spare; sbatch --nodes=5, or lower \[job\] nodes or spares"),
        ({}, "4", r"Slurm gave 4 nodes, and 4 are spares: none is left for the layout"),
        ({"gpus_per_node": 8}, "0", r"Slurm gave 2 GPUs a node, 8 are asked for; sbatch --gpus-per-node=8"),
    ],
)
def test_an_allocation_that_is_too_small_is_refused(
    fresh_home: object, job: dict[str, Any], spares: str, message: str
) -> None:
    with pytest.raises(UsageError, match="job 1234: .*" + message):
        shape(configured(job, spares), given())


def test_spares_are_rehearsed_on_this_machine_too(fresh_home: object) -> None:
    assert on_this_machine(configured({"nodes": 2}, spares="1")) == Shape(("n1", "n2", "n3"), 1, 1)


# --- addresses ----------------------------------------------------------------------------------------------------


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What names lead to; this machine has 10.0.0.1, from where packets to 10.* start."""
    known: dict[str, list[str]] = {}
    monkeypatch.setattr(allocation, "_resolve", lambda name: known.get(name, [name] if name[0].isdigit() else []))
    monkeypatch.setattr(allocation, "_is_ours", lambda address: address in ("10.0.0.1", "127.0.0.1", "127.0.1.1"))
    monkeypatch.setattr(
        allocation, "_source_of_packets_to", lambda address: "10.0.0.1" if address.startswith("10.") else None
    )
    return known


def test_a_nodes_own_address_is_what_slurm_calls_it_by(names: dict[str, list[str]]) -> None:
    names.update(n1=["10.0.0.1"], n2=["10.0.0.2"])
    assert own_address("n1", ["n2"]) == "10.0.0.1"
    assert own_address("n1", []) == "10.0.0.1"


def test_a_name_that_leads_to_the_machine_itself_is_no_address_for_others(names: dict[str, list[str]]) -> None:
    names.update(n1=["127.0.1.1"], n2=["10.0.0.2"])
    assert own_address("n1", ["n2"]) == "10.0.0.1", "as /etc/hosts often has it"
    names["n2"] = ["127.0.1.2"]
    assert own_address("n1", ["n2"]) == "127.0.1.1", "all nodes are on one machine"


def test_an_address_that_is_not_this_machines_is_not_taken(names: dict[str, list[str]]) -> None:
    names.update(n1=["192.168.7.1"], n2=["10.0.0.2"])
    assert own_address("n1", ["n2"]) == "10.0.0.1"
    names.update(n2=["172.16.0.2"])
    with pytest.raises(
        UsageError, match=r"n1: this machine has no address that n2 could connect to; check that getent"
    ):
        own_address("n1", ["n2"])
    names.pop("n2")
    with pytest.raises(UsageError, match=r"n2 could connect to"):
        own_address("127.0.0.1", ["n2"])
    names.pop("n1")
    assert own_address("n1", []) == "127.0.0.1", "nobody else has to connect"


def test_this_machine_finds_an_address_of_its_own() -> None:
    with socket.create_server((own_address("127.0.0.1", ["127.0.0.1"]), 0)) as server:
        assert server.getsockname()[0] == "127.0.0.1"


def test_slurm_need_not_answer_for_addresses() -> None:
    slurm = FakeSlurm([NodeView(name="n1", state="allocated", address="10.0.0.1")])
    assert addresses(slurm, ["n1", "n2"]) == {"n1": "10.0.0.1", "n2": "n2"}
    slurm.unavailable = True
    assert addresses(slurm, ["n1"]) == {"n1": "n1"}


@pytest.mark.parametrize(
    ("said", "expected"),
    [("1600", 1600.0), ("", None), ("Unknown", None), ("900", None), (str(1000 + 365 * 86400), None)],
)
def test_until_when_a_job_may_run_is_said_by_newer_slurms(said: str, expected: float | None) -> None:
    """A job without a limit is said to end in a year, one whose limit is over has been given more time since."""
    assert allocation.end_time({"SLURM_JOB_END_TIME": said} if said else {}, 1000.0) == expected
