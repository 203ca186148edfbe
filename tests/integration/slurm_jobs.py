"""Jobs in a test's own Slurm cluster: somebody who submits them and looks what becomes of them.

`Desk` speaks to the cluster as its user would, by commands; what a job has done is read off its journals and ledger.
Faults are `Cluster`'s. Training jobs run the tiny example, as fast as they can or at a pace that the test sets.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from resihp.datasets import ByteFiles, PackedDataset
from resihp.parallelism.workload import samples_digest
from resihp.record.journal import IterationCommitted, Record
from resihp.slurm.render import template
from resihp.wrapper.job_files.job import OurJob
from resihp.wrapper.job_folder import Job
from resihp.wrapper.launch.preloading import FOR_TESTS
from tests.integration import reading
from tests.integration.cluster import Cluster
from tests.integration.fork_server import fork_server
from tests.integration.jobs import EXAMPLE, REPOSITORY, RESIHP, TINY, UNWATCHED

MakeCluster = Callable[..., Cluster]
_Entry = TypeVar("_Entry")

ITERATIONS = 40
"""Of the jobs that are compared with an undisturbed one."""
PACED = Path(__file__).with_name("paced.py")
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


class Desk:
    """Somebody who submits jobs to a cluster, from its shared folder: root, or an ordinary user.

    With `forks`, the agents of root's jobs fork from what the run of tests has imported, instead of importing torch on
    each node: that saves three seconds of CPU time a node. Without it Slurm starts each process of a job, so that
    Slurm's own signals and limits reach the workers too.
    """

    def __init__(self, cluster: Cluster, user: str | None = None, *, forks: bool = True, **environment: str) -> None:
        self.cluster = cluster
        self.user = user
        self.folder = cluster.shared
        self.local = (cluster.shared if user else cluster.folder) / "local"
        self.environment = {
            **{name: value for name, value in cluster.environment.items() if not name.startswith("RESIHP_")},
            "PATH": f"{Path(sys.executable).parent}:{cluster.environment['PATH']}",
            "RESIHP_HOME": str(self.folder / "home"),
            "RESIHP_LOCAL": str(self.local),
            "RESIHP_SLURM__REPLACEMENT_WAIT": "1s",
            "XDG_CONFIG_HOME": str(cluster.folder),
            "RES_OPTIONS": "timeout:1 attempts:1",
            **({FOR_TESTS: fork_server()} if forks and user is None and cluster.isolated else {}),
            **UNWATCHED,
            **environment,
        }
        if user is not None:
            let_users_read(cluster, REPOSITORY, Path(sys.prefix), Path(sys.base_prefix))

    def run(self, *argv: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.cluster.on(), *(self.cluster.as_user(self.user) if self.user else []), *argv],
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def sbatch(self, script: str, *options: str) -> str:
        path = self.folder / "job.sbatch"
        path.write_text(script)
        done = self.run("sbatch", "--parsable", *options, str(path))
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def submit(self, job: str, *options: str) -> subprocess.CompletedProcess[str]:
        (self.folder / "job.toml").write_text(job)
        return self.run(*RESIHP, "submit", "job.toml", *options)

    def output(self, job: str) -> str:
        texts = [path.read_text() for path in self.folder.glob(f"*-{job}.out")]
        logs = (self.folder / "home" / "jobs" / job / "logs").glob("*.agent.log")
        return "\n".join([*texts, *(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(logs))])

    def until(self, what: Callable[[], Any], job: str, timeout_s: float = 60) -> Any:
        """Wait for something that the job does; the message of a failure tells what the job said."""
        found: list[Any] = []

        def there() -> bool:
            found[:] = [what()]
            return bool(found[0])

        try:
            self.cluster.wait(there, f"job {job}", timeout_s)
        except Exception as error:
            raise AssertionError(f"{error}\n{self.output(job)}") from error
        return found[0]

    def sbatch_training(
        self, iterations: int, *, nodes: int = 4, gpus: int = 2, changes: dict[str, str] | None = None
    ) -> str:
        """Submit the shipped template with spares, edited to train the tiny example in two stages on all nodes."""
        return self.sbatch(self.script(iterations, nodes=nodes, gpus=gpus, changes=changes))

    def script(self, iterations: int, *, nodes: int = 4, gpus: int = 2, changes: dict[str, str] | None = None) -> str:
        """The same, not submitted yet."""
        return edited(
            "spares",
            {
                "--nodes=5": f"--nodes={nodes}",
                "--gpus-per-node=8": f"--gpus-per-node={gpus}",
                "--time=24:00:00": "--time=02:00:00",
                "--nodes 4 --tp 4 --pp 2 --checkpoint-every 100": f"--nodes {nodes} --tp {gpus} --pp 2",
                "python train.py": " ".join(self.training(iterations)),
                **(changes or {}),
            },
        )

    def training(self, iterations: int) -> list[str]:
        """The tiny example, at our pace."""
        return [sys.executable, str(PACED), str(self.folder / "pace"), *TINY, "--iterations", str(iterations)]

    def pace(self, seconds: float) -> None:
        """How long a micro-batch takes to load from now on."""
        (self.folder / "pace").write_text(f"{seconds}\n")

    # --- what Slurm says --------------------------------------------------------------------------------------

    def shown(self, job: str) -> dict[str, str]:
        """Slurm's own view of a job, by scontrol's names."""
        words = self.run("scontrol", "show", "job", job).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def slurm_says(self, job: str, field: str) -> str:
        """One of squeue's fields of a job."""
        return self.run("squeue", "-h", "-t", "all", "-j", job, "-O", f"{field}:|").stdout.strip().rstrip("|")

    def state(self, job: str) -> tuple[str, str]:
        """Slurm's own view: state and exit code."""
        fields = self.shown(job)
        return fields["JobState"], fields["ExitCode"]

    def start_again(self, job: str, *changes: str) -> None:
        """Have a requeued job run at once, where Slurm would wait two minutes.

        Not within the second of the requeue: a job's credentials are revoked to the second, and slurmd would refuse
        those of the next run with them ("already killed, do not launch"; the job fails with 1 and without a word).
        """
        self.until(lambda: self.shown(job)["Restarts"] != "0" and self.state(job)[0] == "PENDING", job)
        requeued = int(time.time())
        self.until(lambda: int(time.time()) > requeued, job)
        update = ("scontrol", "update", f"JobId={job}", "StartTime=now", *changes)
        self.until(lambda: self.run(*update).returncode == 0, job)  # not while Slurm waits for a node that has died

    def nodes(self, job: str) -> list[str]:
        """The nodes that the job has, for Slurm."""
        return self.run("scontrol", "show", "hostnames", self.shown(job)["NodeList"]).stdout.split()

    def reason(self, node: str) -> str:
        """Why a node is drained or down, for Slurm."""
        return self.run("sinfo", "-h", "-N", "-n", node, "-o", "%E").stdout.strip()

    def wait(self, job: str, timeout_s: float = 120) -> tuple[str, str]:
        self.until(lambda: self.state(job)[0] in OVER, job, timeout_s)
        return self.state(job)

    # --- what the job says ------------------------------------------------------------------------------------

    def job(self, name: str) -> Job:
        return Job(name, self.folder / "home" / "jobs" / name)

    def records(self, name: str) -> list[Record]:
        job = OurJob(name, self.job(name).folder)  # also a user's: the test made it, and believes what it says
        return job.records() if (job.folder / "job.json").exists() else []

    def entries(self, name: str) -> list[Any]:
        return [record.entry for record in self.records(name)]

    def of(self, name: str, kind: type[_Entry]) -> list[_Entry]:
        """The entries of one kind."""
        return [entry for entry in self.entries(name) if isinstance(entry, kind)]

    def committed(self, name: str) -> int:
        """The last committed iteration."""
        return max((entry.outcome.iteration for entry in self.of(name, IterationCommitted)), default=0)

    def until_committed(self, name: str, iteration: int, timeout_s: float = 60) -> None:
        self.until(lambda: self.committed(name) >= iteration, name, timeout_s)

    def rows(self, table: str, job: str) -> list[dict[str, Any]]:
        """What `resihp history` tells."""
        rows: list[dict[str, Any]] = self._ask("history", table, "--job", job)["rows"]
        return rows

    def status(self, job: str) -> dict[str, Any]:
        """What `resihp status` tells."""
        found: dict[str, Any] = self._ask("status", job)
        return found

    def kill(self, job: str, rank: int) -> None:
        """Inject a fault: the rank's process is killed, and its device counts as dead."""
        self._resihp("inject", "kill", job, "--rank", str(rank))

    def _ask(self, *argv: str) -> Any:
        status, out, err = reading.ask(*argv, "--json", environment=self.environment, folder=self.folder)
        assert status == 0 or (argv[0] == "status" and out), err  # which tells so of a job that has failed
        return json.loads(out)

    def _resihp(self, *argv: str) -> str:
        done = subprocess.run(
            [*RESIHP, *argv],
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def let_users_read(cluster: Cluster, *needed: Path) -> None:
    """On the nodes, as on real ones, ordinary users can read what is installed, in whose home it may lie here."""
    closed: dict[Path, list[Path]] = {}
    for path in map(Path.absolute, needed):
        above = next((each for each in reversed(path.parents) if not each.stat().st_mode & 0o001), None)
        if above is not None:
            closed.setdefault(above, []).append(path.relative_to(above))
    if closed and not cluster.isolated:
        pytest.skip(f"ordinary users cannot read {', '.join(map(str, closed))} here, and namespaces are not allowed")
    for above, paths in closed.items():
        script = 'set -e; aside=$(mktemp -d -p "$1"); mount -t tmpfs -o mode=755 tmpfs "$aside"; above=$2; shift 2; '
        script += 'for path; do mkdir -p "$aside/$path"; mount --bind "$above/$path" "$aside/$path"; done; '
        script += 'mount --rbind "$aside" "$above"'
        for node in cluster.nodes:
            cluster.run("sh", "-c", script, "sh", str(cluster.folder), str(above), *map(str, paths), node=node)


def edited(name: str, changes: dict[str, str]) -> str:
    """A template as a user has edited it."""
    text = template(name)
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def training(iterations: int) -> list[str]:
    """The tiny example, as fast as it goes."""
    return [sys.executable, str(EXAMPLE), *TINY, "--iterations", str(iterations)]


def job_file(command: list[str], **sections: Any) -> str:
    job = {"time": "10m", "command": command, **sections.pop("job", {})}
    slurm = {"warning": "1m", **sections.pop("slurm", {})}
    lines = []
    for section, keys in {"job": job, "slurm": slurm, **sections}.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


def on_node(cluster: Cluster, node: str, module: str) -> list[psutil.Process]:
    """Processes on a node that run one of our modules."""
    found = []
    for pid in cluster.pids(node):
        try:
            process = psutil.Process(pid)
            command = process.cmdline()
            if module in command and command[0] != "srun":  # which has the agent's in its own
                found.append(process)
        except psutil.Error:
            continue
    return found


@dataclass(frozen=True)
class Reference:
    """What training must come to, by iteration, whatever happens to it."""

    losses: dict[int, float]
    digests: dict[int, str]

    def check(self, rows: list[dict[str, Any]], first: int = 1, last: int = ITERATIONS) -> None:
        """`rows` of `resihp history iterations`: each iteration once, with these losses and samples."""
        assert [row["iteration"] for row in rows] == list(range(first, last + 1))
        for row in rows:
            iteration = row["iteration"]
            assert row["samples_digest"] == self.digests[iteration], f"iteration {iteration}"
            assert row["loss"] == pytest.approx(self.losses[iteration], rel=1e-6), f"iteration {iteration}"


def expected_digests(iterations: int) -> dict[int, str]:
    """What each iteration of the tiny example must have consumed, computed from the data set itself."""
    source = ByteFiles(sysconfig.get_paths()["stdlib"], ".py")
    data = PackedDataset(source, budget=64, micro_batches_per_iteration=8, seed=1234)
    return {
        i: f"{samples_digest(s for batch in data.micro_batches(i) for s in batch.samples):016x}"
        for i in range(1, iterations + 1)
    }
