"""What a job costs its supervisor: a real one over real sockets, against light agents on this machine.

    python benchmarks/supervisor.py [--nodes N ...] [--gpus-per-node 8] [--records R] [--json]

The supervisor is a process of its own (`resihp.wrapper.supervisor.process`), with its journal and its ledger; agents
are light (`light_agents.py`), hundreds in each of a few processes, and answer for workers that there are none of.
Phases:

register     from the first agent to the last one that the journal knows
start        from there to the first plan in effect: workers spawned, devices measured, a plan made, confirmed, built
idle         beats alone
steady       iterations at a fixed pace; `cpu_per_iteration` is the supervisor's, beats included
dead node    from noticing to the next plan decided
herd         all connections break at once, until all agents are back
take-over    the supervisor is killed, another one starts with a journal of R records, until all agents follow it

Seconds of the clock, CPU seconds of the supervisor, its peak memory so far, and how long an agent heard nothing from
it at most. Generators and supervisor share the machine: with two cores, wall times are too long rather than too short.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a file, not with -m
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import light_agents
from resihp.record.journal import IterationCommitted, NodeJoined, NodeLost, PlanDecided, PlanInEffect, Record
from resihp.record.journal_file import Journal, read_packed
from resihp.settings import Settings
from resihp.wrapper.config.run_spec import Program, RunRequest, virtual_nodes
from resihp.wrapper.job_folder import Job, create_local_job
from resihp.wrapper.launch.ports import listen

TP, PP = 8, 8
RANKS_OF_REPLICA = TP * PP
ITERATIONS = 10**8
MOST_AGENTS = 512
"""Of one generator process."""
INTERVAL_S = 10.0
LONELY = str(Path(__file__).with_name("lone_supervisor.py"))
LOOK_EVERY_S = 0.1
PATIENCE_S = 300.0
SETTLE_S = 2.0
LIMITS = {
    "register": lambda row: row["seconds"] <= 60.0,
    "steady": lambda row: row["cpu_per_iteration"] <= 0.25 * INTERVAL_S,
    "dead node": lambda row: row["seconds"] <= 2.0,
    "herd": lambda row: row["seconds"] <= 10.0,
    "take-over": lambda row: row["seconds"] <= 10.0,
}


@dataclass
class Phase:
    """What one phase took; `row` is printed."""

    name: str
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    iterations: int = 0
    ok: bool = True


class Bench:
    """One job with its supervisor and its generators."""

    def __init__(self, job: Job, nodes: int, gpus: int) -> None:
        self.job = job
        self.nodes, self.gpus = nodes, gpus
        self.rows: list[dict[str, Any]] = []
        self.iteration = 0
        self.gone = 0
        self.records = 0
        self._run_file = request_of(job, nodes, gpus).save()
        self._listener = listen("127.0.0.1")
        self.supervisor = self._start()
        self._generators = self._start_generators()

    def _start(self, *options: str) -> psutil.Process:
        listener = self._listener.fileno()
        command = [sys.executable, "-P", LONELY, "--run", str(self._run_file), "--listen", str(listener)]
        with (self.job.logs / "stderr").open("ab") as err:
            child = subprocess.Popen(
                [*command, *options], stdin=subprocess.DEVNULL, stdout=err, stderr=err, pass_fds=[listener]
            )
        return psutil.Process(child.pid)

    def _start_generators(self) -> list[tuple[Any, Any]]:
        spawned = multiprocessing.get_context("spawn")
        count = max(2, -(-self.nodes // MOST_AGENTS))
        named = list(enumerate(virtual_nodes(self.nodes)))
        found = []
        for i in range(count):
            ours, theirs = spawned.Pipe()
            process = spawned.Process(
                target=light_agents.serve,
                args=(
                    theirs,
                    named[i::count],
                    self.gpus,
                    self.nodes * self.gpus,
                    RANKS_OF_REPLICA,
                    ITERATIONS,
                    self._listener.getsockname(),
                    self.job.key,
                ),
            )
            process.start()
            theirs.close()
            found.append((process, ours))
        return found

    def close(self) -> None:
        for process, pipe in self._generators:
            pipe.close()
            process.kill()
            process.join()
        if self.supervisor.is_running():
            self.supervisor.kill()
        self._listener.close()

    # --- what is asked and seen -------------------------------------------------------------------------------

    def tell(self, *order: Any) -> None:
        for _, pipe in self._generators:
            pipe.send(order)

    def tally(self) -> light_agents.Tally:
        self.tell("tally")
        found: list[light_agents.Tally] = [pipe.recv() for _, pipe in self._generators]
        term, epoch = max(each.term for each in found), max(each.epoch for each in found)
        return light_agents.Tally(
            following=sum(each.following for each in found if each.term == term),
            term=term,
            begun=sum(each.begun for each in found if each.epoch == epoch),
            epoch=epoch,
            released=sum(each.released for each in found),
            followed_at=max(each.followed_at for each in found),
            longest_silence_s=max(each.longest_silence_s for each in found),
        )

    def until(self, reached: Callable[[light_agents.Tally], bool]) -> light_agents.Tally:
        """Raises TimeoutError; RuntimeError when the supervisor has ended."""
        deadline = time.monotonic() + PATIENCE_S
        while not reached(now := self.tally()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{PATIENCE_S:g} s: {now}")
            if not self.supervisor.is_running() or self.supervisor.status() == psutil.STATUS_ZOMBIE:
                raise RuntimeError(f"the supervisor has ended: {(self.job.logs / 'stderr').read_text()[-2000:]}")
            time.sleep(LOOK_EVERY_S)
        return now

    @property
    def committed(self) -> int:
        """The last iteration in the journal."""
        last = (
            r.entry for r in reversed(read_packed(self.job.journal_file)) if isinstance(r.entry, IterationCommitted)
        )
        found = next(last, None)
        return 0 if found is None else found.outcome.iteration

    def journal(self) -> list[Record]:
        return list(self.job.records())

    @property
    def cpu_s(self) -> float:
        """Of the supervisor that there is; 0 while there is none."""
        with suppress(psutil.NoSuchProcess):
            used = self.supervisor.cpu_times()
            return used.user + used.system
        return 0.0

    @property
    def peak_mb(self) -> float:
        status = Path(f"/proc/{self.supervisor.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) / 1024

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Measure what is done meanwhile; whoever does may say better how long it took."""
        self.tell("forget")
        phase = Phase(name)
        pid, cpu_s, began = self.supervisor.pid, self.cpu_s, time.monotonic()
        try:
            yield phase
        except (TimeoutError, RuntimeError) as error:
            phase.ok = False
            Console(stderr=True).print(f"{self.nodes} nodes, {name}: {error}")
        seconds = phase.seconds or time.monotonic() - began
        alive = self.supervisor.is_running() and self.supervisor.status() != psutil.STATUS_ZOMBIE
        used_s = self.cpu_s - (cpu_s if pid == self.supervisor.pid else 0.0) if alive else 0.0
        tally = self.tally()
        row = {
            "phase": name,
            "nodes": self.nodes,
            "ranks": self.nodes * self.gpus,
            "records": self.records,
            "seconds": seconds,
            "cpu_seconds": used_s,
            "cpu_per_iteration": used_s / phase.iterations if phase.iterations else None,
            "peak_mb": self.peak_mb if alive else None,
            "longest_silence_s": tally.longest_silence_s,
        }
        expected = phase.ok and alive and tally.following == self.nodes - self.gone and not tally.released
        row["ok"] = bool(expected and LIMITS.get(name, lambda row: True)(row))
        self.rows.append(row)
        if not expected:
            raise RuntimeError(f"{self.nodes} nodes, {name}: {tally}")

    # --- phases -----------------------------------------------------------------------------------------------

    def start_up(self) -> None:
        self.until(lambda now: self.job.supervisor_file.exists())
        with self.phase("register") as phase:
            self.tell("start")
            self.until(lambda now: now.following == self.nodes)
            self.until(lambda now: sum(isinstance(r.entry, NodeJoined) for r in self.journal()) == self.nodes)
            joined = [record.at for record in self.journal() if isinstance(record.entry, NodeJoined)]
            phase.seconds = joined[-1] - joined[0]
        with self.phase("start") as phase:
            self.until(lambda now: now.epoch > 0 and now.begun == self.nodes)
            self.until(lambda now: any(isinstance(record.entry, PlanInEffect) for record in self.journal()))
            effect = next(record for record in self.journal() if isinstance(record.entry, PlanInEffect))
            phase.seconds = effect.at - joined[-1]

    def train(self, iterations: int, interval_s: float) -> None:
        with self.phase("idle"):
            time.sleep(interval_s)
        self.step(interval_s)  # the detector adopts the plan, and compiles it
        with self.phase("steady") as phase:
            for _ in range(iterations):
                self.step(interval_s)
            phase.iterations = iterations

    def step(self, interval_s: float) -> None:
        began = time.monotonic()
        self.iteration += 1
        self.tell("step", self.iteration)
        self.tally()  # all have said it
        time.sleep(max(0.0, began + interval_s - time.monotonic()))

    def lose_a_node(self) -> None:
        epoch = self.tally().epoch
        with self.phase("dead node") as phase:
            self.gone += 1
            self.tell("die", f"n{self.nodes // 2}")
            self.until(lambda now: now.epoch > epoch and now.begun == self.nodes - self.gone)
            records = self.journal()
            lost = next(record for record in records if isinstance(record.entry, NodeLost))
            decided = next(r for r in records if r.seq > lost.seq and isinstance(r.entry, PlanDecided))
            phase.seconds = decided.at - lost.at
        time.sleep(SETTLE_S)

    def herd(self) -> None:
        with self.phase("herd") as phase:
            began, at = time.time(), time.monotonic()
            self.tell("break")
            self.until(lambda now: now.following == self.nodes - self.gone and now.followed_at > began)
            phase.seconds = self.tally().followed_at - began
            time.sleep(max(0.0, at + SETTLE_S - time.monotonic()))

    def take_over(self, records: int) -> None:
        """What was written between the two was written by the first one, as far as anybody knows."""
        self.step(SETTLE_S)
        term = self.tally().term
        self.supervisor.kill()
        self.supervisor.wait()
        last = self._write_on(records)
        self.tell("jump", last.seq, self.iteration)
        self.tally()
        with self.phase("take-over") as phase:
            began = time.time()
            self.supervisor = self._start("--take-over", "was killed by SIGKILL")
            found = self.until(lambda now: now.term > term and now.following == self.nodes - self.gone)
            phase.seconds = found.followed_at - began
            self.step(SETTLE_S)
            self.until(lambda now: self.committed == self.iteration)

    def _write_on(self, records: int) -> Record:
        """Until the journal has so many records: iterations that were committed."""
        written = self.journal()
        last = written[-1]
        epoch = self.tally().epoch
        journal = Journal(self.job.journal_file, sync=False)
        for _ in range(len(written), records):
            self.iteration += 1
            outcome = light_agents.outcome(self.iteration)
            entry = IterationCommitted(epoch=epoch, outcome=outcome, seconds=9.0, predicted_seconds=9.0)
            last = journal.append(entry, time.time())
            if journal.is_to_be_packed:
                journal.pack()
        journal.close()
        self.records = max(records, len(written))
        return last


def request_of(job: Job, nodes: int, gpus: int) -> RunRequest:
    settings = Settings(
        job=job.name,
        nodes=nodes,
        node_names=virtual_nodes(nodes),
        gpus_per_node=gpus,
        tp=TP,
        pp=PP,
        plans_ahead=False,
        search_s=0.0,
    )
    return RunRequest(
        settings=settings,
        folder=str(job.folder),
        program=Program(kind="command", argv=("true",), interpreter=sys.executable),
        command=("true",),
        cwd="/",
        python_path="",
        checkpoint_folder=str(job.checkpoints),
        checkpoint_keep=1,
        resume=False,
        ledger_url="sqlite",
        restart_count=0,
        succession=True,
        configuration={},
    )


def measure(nodes: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All phases, or those up to the one that did not come to its end."""
    home = Path(tempfile.mkdtemp(prefix="supervisor"))
    os.environ |= {
        "RESIHP_HOME": str(home / "home"),
        "RESIHP_STATE": str(home / "state"),
        "RESIHP_LOCAL": str(home / "local"),
    }
    bench = Bench(create_local_job(), nodes, options.gpus_per_node)
    try:
        bench.start_up()
        bench.train(options.iterations, options.interval)
        bench.lose_a_node()
        bench.herd()
        bench.take_over(options.records)
    except RuntimeError as error:
        Console(stderr=True).print(str(error))
    finally:
        bench.close()
        if options.keep:
            print(f"kept: {home}", file=sys.stderr)
        else:
            shutil.rmtree(home, ignore_errors=True)
    return bench.rows


def shown(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="A supervisor and its agents on one machine")
    for name in ("phase", "nodes", "ranks", "records", "s", "CPU s", "CPU s/iteration", "peak MB", "silence s", "ok"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for row in rows:
        cells = [
            "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
            for value in row.values()
        ]
        table.add_row(*cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 64, 128, 256, 512])
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--records", type=int, default=20_000, help="of the journal at the take-over")
    parser.add_argument("--iterations", type=int, default=3, help="of the steady phase")
    parser.add_argument("--interval", type=float, default=INTERVAL_S, help="seconds of an iteration")
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    parser.add_argument("--keep", action="store_true", help="keep the job's folder, and say where it is")
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rows = [row for nodes in options.nodes for row in measure(nodes, options)]
    if options.json:
        print(json.dumps({"schema": 1, "rows": rows}))
    else:
        Console(width=120).print(shown(rows))


if __name__ == "__main__":
    main()
