"""The load of many small jobs on slurmctld: RPCs by type and their time in slurmctld, from sdiag, while the jobs are
healthy and after a node has died.

    python -m benchmarks.slurm_load [--nodes 8 200 5000] [--jobs 20] [--seconds 300] [--release 26.05]

Real Slurm on this machine, as root. Eight nodes are real; the others are only in slurm.conf, down, and each has a
record that slurmctld sends like any other. Each job trains a tiny model on two nodes. RPCs of the daemons themselves
and of srun are left out. The last column is the time of the answers that list all nodes of the cluster or all jobs.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from resihp.record.journal import NodeLost

if not __package__:  # run as a file, not with -m
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.integration.cluster import Cluster
from tests.integration.slurm_jobs import Desk

REAL_NODES = 8
ROW = re.compile(r"\s+((?:REQUEST|MESSAGE)_\w+)\s*\(\s*\d+\) count:(\d+)\s+ave_time:\d+\s+total_time:(\d+)")
QUERIES = {
    *("REQUEST_NODE_INFO", "REQUEST_NODE_INFO_SINGLE", "REQUEST_PARTITION_INFO", "REQUEST_JOB_INFO"),
    *("REQUEST_JOB_INFO_SINGLE", "REQUEST_FED_INFO", "REQUEST_BUILD_INFO", "REQUEST_UPDATE_JOB", "REQUEST_PING"),
}
WHOLE_TABLES = {"REQUEST_NODE_INFO", "REQUEST_JOB_INFO"}


class LargeCluster(Cluster):
    """A cluster of many nodes, of which only the first ones exist."""

    def __init__(self, records: int, release: str) -> None:
        super().__init__(nodes=REAL_NODES, gpus=8, release=release)
        self._absent = records - REAL_NODES

    def states(self) -> dict[str, str]:
        return {node: state for node, state in super().states().items() if node in self.nodes}

    def _write_configuration(self) -> None:
        super()._write_configuration()
        if self._absent:
            described = f"NodeName=x[1-{self._absent}] NodeHostname=localhost NodeAddr=127.0.0.9 Port=1 CPUs=16"
            lines = self.configuration.read_text().splitlines()
            lines.insert(-1, f"{described} RealMemory=16000 State=DOWN")
            self.configuration.write_text("\n".join(lines) + "\n")


def rpcs(cluster: Cluster) -> dict[str, tuple[int, int]]:
    """Return (count, microseconds) by type since the last `sdiag -r`."""
    rows = map(ROW.match, cluster.run("sdiag").stdout.splitlines())
    return {row[1]: (int(row[2]), int(row[3])) for row in rows if row and row[1] in QUERIES}


def show(title: str, answers: Mapping[str, tuple[int, int]], seconds: float, jobs: int) -> None:
    total_us = sum(time_us for _, time_us in answers.values())
    whole_us = sum(time_us for kind, (_, time_us) in answers.items() if kind in WHOLE_TABLES)
    minutes = seconds / 60
    print(f"{title}: {seconds:.0f} s, {jobs} jobs")
    for kind, (count, time_us) in sorted(answers.items(), key=lambda item: -item[1][1]):
        print(f"  {kind:28s} {count:6d}  {count / minutes / jobs:6.2f} a job and minute  {time_us / 1000:8.1f} ms")
    count = sum(number for number, _ in answers.values())
    share = whole_us / total_us if total_us else 0.0
    rate = count / minutes / jobs
    print(f"  {'all':28s} {count:6d}  {rate:6.2f} a job and minute  {total_us / 1000:8.1f} ms", end="")
    print(f"  of that whole tables: {share:.0%}", flush=True)


def measure(records: int, jobs: int, seconds: float, release: str) -> None:
    with LargeCluster(records, release) as cluster:
        desk = Desk(cluster)
        desk.pace(2.0)
        script = desk.script(
            100_000,
            nodes=2,
            gpus=1,
            changes={"#SBATCH --exclusive\n": "", "--nodes 4 --tp 4 --pp 2 --checkpoint-every 100": "--pp 2"},
        )
        numbers = [desk.sbatch(script, "--cpus-per-task=1") for _ in range(jobs)]
        for number in numbers:
            desk.until_committed(number, 1, timeout_s=600)
        title = f"{records} nodes"
        observe(cluster, f"{title}, healthy", seconds, numbers)
        node = desk.nodes(numbers[0])[-1]
        cluster.kill_node(node)
        observe(cluster, f"{title}, {node} has died", 120.0, numbers)
        print(f"  {sum(bool(desk.of(number, NodeLost)) for number in numbers)} jobs had lost a node", flush=True)


def observe(cluster: Cluster, title: str, seconds: float, numbers: Iterable[str]) -> None:
    cluster.run("sdiag", "-r")
    began = time.monotonic()
    time.sleep(seconds)
    show(title, rpcs(cluster), time.monotonic() - began, len(list(numbers)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 200, 5000])
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--release", default="")
    args = parser.parse_args()
    for records in args.nodes:
        measure(records, args.jobs, args.seconds, args.release)


if __name__ == "__main__":
    main()
