"""Jobs where firewalls stand between nodes, and on nodes of several networks: what listens where, told and measured."""

from __future__ import annotations

import re

import msgspec
import psutil
import pytest

from resihp.record.journal import LeaderChosen
from resihp.wrapper.config.values import MIN_PORTS
from tests.integration.slurm_jobs import ITERATIONS, Desk, MakeCluster, Reference, on_node, training
from tests.wrapper.launch.test_ports import free_range

pytestmark = pytest.mark.timeout(300)

OURS = ("resihp.wrapper.agent.process", "resihp.wrapper.supervisor.process", "wrapper")
"""Modules of our processes that other nodes speak to; the last is the guardian."""


def ports_of(desk: Desk, module: str) -> dict[str, set[int]]:
    """What processes of that module listen on, by node."""
    found: dict[str, set[int]] = {}
    for node in desk.cluster.nodes:
        for process in on_node(desk.cluster, node, module):
            listening = [each for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
            found.setdefault(node, set()).update(each.laddr.port for each in listening)
    return found


def test_all_that_listens_between_nodes_is_inside_the_range_that_is_open(
    cluster: MakeCluster, reference: Reference
) -> None:
    first, last = free_range(MIN_PORTS)
    inside = set(range(first, last + 1))
    desk = Desk(cluster(nodes=4, gpus=1), RESIHP_SLURM__PORTS=f"{first}-{last}")
    desk.pace(0.2)
    job = desk.sbatch_training(ITERATIONS, gpus=1)
    desk.until_committed(job, 2, timeout_s=120)
    found = {module: ports_of(desk, module) for module in OURS}
    assert {node for node, ports in found["resihp.wrapper.agent.process"].items() if ports} == {"n1", "n2", "n3", "n4"}
    assert found["resihp.wrapper.supervisor.process"]["n1"]
    outside = {(module, node): ports - inside for module in OURS for node, ports in found[module].items()}
    assert not any(outside.values()), outside
    workers = ports_of(desk, "resihp.worker.forkserver")
    print(f"gloo listens on {workers}, the kernel's choice")

    desk.cluster.kill_node("n1")
    chosen = desk.until(lambda: desk.of(job, LeaderChosen), job, 90)[-1]
    desk.until_committed(job, desk.committed(job) + 1)
    ports = ports_of(desk, "resihp.wrapper.supervisor.process")[chosen.node]
    assert ports, f"the successor listens on {chosen.node}"
    assert ports <= inside
    desk.pace(0.0)
    desk.wait(job)
    reference.check(desk.rows("iterations", job))


def test_a_range_without_a_free_port_is_told(cluster: MakeCluster) -> None:
    made = cluster(nodes=1, gpus=1)
    first, last = free_range(MIN_PORTS)
    desk = Desk(made, RESIHP_SLURM__PORTS=f"{first}-{last}")
    taker = (
        "import socket, subprocess, sys; "
        f"taken = [socket.create_server((sys.argv[1], port)) for port in range({first}, {last + 1})]; "
        "sys.exit(subprocess.call(sys.argv[2:]))"
    )
    run = f"python -c '{taker}' {made.address('n1')} resihp run -- {' '.join(training(1))}"
    job = desk.sbatch(f"#!/bin/sh\n#SBATCH --no-kill --gpus-per-node=1 --output=%x-%j.out\nexec {run}\n")
    assert desk.wait(job) == ("FAILED", "2:0"), desk.output(job)
    assert f"{made.address('n1')}: no port of {first}-{last} is free here; widen [slurm] ports" in desk.output(job)


def test_configured_interfaces_are_used_and_a_node_that_lacks_one_is_named(cluster: MakeCluster) -> None:
    made = cluster(nodes=2, gpus=1)
    desk = Desk(made, RESIHP_NETWORK__INTERFACE="lo", RESIHP_NETWORK__CONTROL="lo")
    desk.pace(0.1)
    job = desk.sbatch_training(1000, nodes=2, gpus=1)
    desk.until_committed(job, 1)
    address = msgspec.json.decode(desk.job(job).supervisor_file.read_bytes())
    assert address["host"] == "127.0.0.1", "Slurm calls the node 127.0.1.1"
    desk.run("scancel", job)
    desk.wait(job)

    other = Desk(made, RESIHP_NETWORK__INTERFACE="ib9")
    job = other.sbatch_training(10, nodes=2, gpus=1)
    assert other.wait(job) == ("FAILED", "2:0"), other.output(job)
    assert re.search(
        r"node n[12]: cannot start workers: .*no interface ib9 is up .*lo \(127\.0\.0\.1\)", other.output(job)
    )
