"""What becomes of a user's training script when something fails: under torchrun and under `resihp run`, side by side.

python -m benchmarks.scripts --scripts ddp fsdp2_dcp --faults kill raise

Runs the scripts of `examples/scripts` with four ranks, hurts rank 2 after iteration 25 (checkpoints are of each tenth),
and prints a row for each run: seconds to the first iteration; from the fault to the launcher's first line about it, to
the next printed iteration, or to the end; exit code; whether the last loss is the one of an undisturbed run; and the
launcher's line. `node` kills an agent of resihp with all its processes, and goes on with the other node; torchrun,
which has no second node here, loses ranks 2 and 3. `collective` lets rank 2 enter a barrier alone, `loader` lets it
wait for a reader process that never answers, `slow` lets it run for a quarter of the time. The machine must be idle for
the seconds to mean something. `resihp run` imports a script's libraries for the next round from 10 s after the start
on: `--sleep 1` makes a fault come later than that.

`ft_launcher` is the one of nvidia-resiliency-ext, which must be importable. `lm_resiliency` is torchrun with the
rendezvous of that package, which must be installed.

torchrun gets TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. Without it torch 2.13 keeps the store of a round that ended, and
ranks of the next round connect to gloo addresses of dead processes.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parents[1]
SCRIPTS = REPOSITORY / "examples" / "scripts"
OBSERVE = (
    f"import sys; sys.path.append({str(REPOSITORY / 'benchmarks')!r}); import observed_rank; observed_rank.observe()"
)
"""Inserted into the script after its imports."""
TORCHRUN_COMMAND = ["torch.distributed.run", "--standalone", "--nproc-per-node", "4", "--max-restarts", "3"]
FT_COMMAND = ["nvidia_resiliency_ext.fault_tolerance.launcher", "--rdzv-backend", "c10d"]
FT_COMMAND += ["--rdzv-endpoint", "localhost:0", "--nnodes", "1", "--nproc-per-node", "4", "--max-restarts", "3"]
FT_COMMAND += ["--ignore-missing-fault-tol-cfg"]
LM_COMMAND = ["torch.distributed.run", "--rdzv-backend", "lm_resiliency", "--rdzv-endpoint", "localhost:29431"]
LM_COMMAND += ["--rdzv-id", "scripts", "--nnodes", "1", "--nproc-per-node", "4", "--max-restarts", "3", "--rdzv-conf"]
LM_COMMAND += [
    f"store_type=tcp,read_timeout=60,lm_resiliency_restart_context_path={tempfile.gettempdir()}/lm-context.json"
]
RESIHP_COMMAND = ["resihp", "run", "--local", "--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "3"]
LAUNCHERS = {
    "torchrun": TORCHRUN_COMMAND,
    "ft_launcher": FT_COMMAND,
    "lm_resiliency": LM_COMMAND,
    "resihp": RESIHP_COMMAND,
}
SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "raise": signal.SIGUSR1,
    "memory": signal.SIGUSR2,
    "collective": signal.SIGRTMIN + 1,
    "loader": signal.SIGRTMIN + 2,
}
"""Faults of one rank, and the signal that causes each (`benchmarks/observed_rank.py`)."""
FAULTS = ("none", "kill", "node", "stop", "collective", "loader", "slow", "raise", "memory", "interrupt")
NOTICED = re.compile(r"failure \d+: (.*)|(failed \(exitcode: .*?\) local_rank: \d+)|(closing signal)")
"""What a launcher prints first about a failure."""
HANG_LIMIT = "10s"
FOLDER_VARIABLE = "TRIAL_FOLDER"
"""Marks all processes of a trial."""
CHECKPOINT_EVERY, ITERATION_OF_FAULT, ITERATIONS = 10, 25, 40
STEPS_PER_EPOCH = 417
"""Of hf_trainer.py, whose lines have no iteration, but the epoch as a fraction."""
PLAIN = re.compile(r"iteration (\d+)/\d+ .*?loss:? (-?[\d.E+-]+)")
HUGGING_FACE = re.compile(r"'loss': '?([\d.]+)'?,.*'epoch': '?([\d.e-]+)'?")
START_TIMEOUT_S = 120
SLOW_PERIOD_S, SLOW_SHARE = 0.2, 0.25


@dataclass
class Trial:
    """A launched script, and the iterations that it has printed."""

    launcher: str
    script: str
    folder: Path
    sleep_s: float
    iterations: list[tuple[float, int, float]] = field(default_factory=list)
    """(time, iteration, loss) of each printed line."""
    output: list[str] = field(default_factory=list)
    noticed: list[tuple[float, str]] = field(default_factory=list)
    """(time, text) of each line of the launcher about a failure."""

    def start(self) -> Trial:
        (self.folder / "ranks").mkdir(parents=True)
        environment = os.environ | {
            FOLDER_VARIABLE: str(self.folder),
            "RESIHP_HOME": str(self.folder / "home"),
            "RESIHP_LOCAL": str(self.folder / "local"),
            "RES_OPTIONS": "timeout:1 attempts:1",
            "RESIHP_JOB__HANG_LIMIT": HANG_LIMIT,
            "PYTHONWARNINGS": "ignore",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        observed = self.folder / f"{self.script}.py"
        observed.write_text(with_observer((SCRIPTS / f"{self.script}.py").read_text()))
        script = [str(observed)]
        script += ["--iterations", str(ITERATIONS), "--checkpoint-every", str(CHECKPOINT_EVERY)]
        script += ["--folder", str(self.folder / "checkpoints"), "--sleep", str(self.sleep_s)]
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", *LAUNCHERS[self.launcher], *script],
            env=environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            if match := NOTICED.search(line):
                self.noticed.append((time.monotonic(), match[1] or match[2] or ""))
            if match := PLAIN.search(line):
                self.iterations.append((time.monotonic(), int(match[1]), float(match[2])))
            elif match := HUGGING_FACE.search(line):
                iteration = round(float(match[2]) * STEPS_PER_EPOCH)
                self.iterations.append((time.monotonic(), iteration, float(match[1])))

    def wait_for(self, iteration: int, timeout_s: float) -> bool:
        """Wait until the script has printed an iteration; False if it ended or took too long."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if self.iterations and self.iterations[-1][1] >= iteration:
                return True
            if self.process.poll() is not None:
                return False
            time.sleep(0.01)
        return False

    def wait_for_end(self, timeout_s: float) -> float | None:
        """Return the time at which the launcher ended; None if it did not end in time."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        ended = time.monotonic()
        self._reader.join(2)
        return ended

    def pid_of(self, rank: int) -> int:
        return int((self.folder / "ranks" / f"0.{rank}").read_text())

    def rounds(self) -> int:
        return len({path.name.split(".")[0] for path in (self.folder / "ranks").iterdir()})

    def processes(self) -> list[psutil.Process]:
        """All processes of the trial: by their environment, or where it is hidden by a title, by their parents."""
        found = set(self._descendants())
        for process in psutil.process_iter():
            try:
                if process.environ().get(FOLDER_VARIABLE) == str(self.folder):
                    found.add(process)
            except psutil.Error:
                continue
        return list(found)

    def _descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def kill_all(self) -> None:
        for process in self.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait()

    def agent(self) -> int:
        """Return the process id of the agent of node n2, which leads a process group."""
        title = re.compile(r"resihp job \S+ agent n2")
        (agent,) = [process.pid for process in self.processes() if title.match(" ".join(process.cmdline()))]
        return agent


def with_observer(text: str) -> str:
    """Return a script that calls `observed_rank.observe` after the imports at its top."""
    imports = [part for part in ast.parse(text).body if isinstance(part, ast.Import | ast.ImportFrom)]
    lines = text.splitlines()
    lines.insert(imports[-1].end_lineno or 0, OBSERVE)
    return "\n".join([*lines, ""])


def inject(trial: Trial, fault: str) -> None:
    match fault:
        case "node" if trial.launcher == "resihp":
            os.killpg(trial.agent(), signal.SIGKILL)
        case "node":
            for rank in (2, 3):
                os.kill(trial.pid_of(rank), signal.SIGKILL)
        case "slow":
            threading.Thread(target=slow_down, args=(trial.pid_of(2),), daemon=True).start()
        case "interrupt":
            os.killpg(trial.process.pid, signal.SIGINT)  # as a terminal does
        case _ if fault in SIGNALS:
            os.kill(trial.pid_of(2), SIGNALS[fault])


def slow_down(pid: int) -> None:
    """Let a process run for a share of the time, until it ends."""
    try:
        while True:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(SLOW_PERIOD_S * (1 - SLOW_SHARE))
            os.kill(pid, signal.SIGCONT)
            time.sleep(SLOW_PERIOD_S * SLOW_SHARE)
    except ProcessLookupError:
        return


@dataclass(frozen=True)
class Outcome:
    first_iteration_s: float | None = None
    noticed_s: float | None = None
    """From the fault to the first line of the launcher about it."""
    verdict: str = ""
    """What the launcher says of the failure."""
    resumed_s: float | None = None
    """From the fault to the first iteration of the next round."""
    ended_s: float | None = None
    """From the fault to the end of the launcher; None if it did not end in time."""
    rounds: int = 0
    exit_code: int | None = None
    last: tuple[int, float] | None = None
    """The last printed iteration and its loss."""


def outcome_of(launcher: str, script: str, fault: str, sleep_s: float, patience_s: float, keep: Path | None) -> Outcome:
    """Run a script, hurt it, and observe it for `patience_s` seconds after the fault."""
    with tempfile.TemporaryDirectory(prefix="trial-") as temporary:
        trial = Trial(launcher, script, Path(temporary) / "trial", sleep_s).start()
        try:
            alive = trial.wait_for(1 if fault == "none" else ITERATION_OF_FAULT, START_TIMEOUT_S)
            injected = time.monotonic()
            before = len(trial.iterations)
            if alive:
                inject(trial, fault)
            elif fault != "none":
                raise RuntimeError("".join([*trial.output[-20:], f"{launcher}, {script}: ended before the fault"]))
            ended = trial.wait_for_end(patience_s)
        finally:
            trial.kill_all()
        if keep is not None:
            (keep / f"{launcher}-{script}-{fault}.txt").write_text("".join(trial.output))
        lines = trial.iterations
        resumed = [
            time_of_line
            for (_, previous, _), (time_of_line, iteration, _) in itertools.pairwise(lines)
            if iteration <= previous
        ]
        return Outcome(
            first_iteration_s=lines[0][0] - trial.began if lines and before else None,
            noticed_s=trial.noticed[0][0] - injected if trial.noticed else None,
            verdict=next((text for _, text in trial.noticed if text), ""),
            resumed_s=resumed[0] - injected if resumed else None,
            ended_s=None if ended is None else ended - injected,
            rounds=trial.rounds(),
            exit_code=trial.process.returncode if ended is not None else None,
            last=lines[-1][1:] if lines else None,
        )


COLUMN_HEADINGS = (
    "script",
    "fault",
    "launcher",
    "first, s",
    "noticed",
    "resumed",
    "ended",
    "rounds",
    "exit",
    "last",
    "loss",
)
ROW_FORMAT = "{:20} {:10} {:11} {:>8} {:>7} {:>7} {:>6} {:>6} {:>4} {:>4}  {:12}  {}"


def row_of(script: str, fault: str, launcher: str, outcome: Outcome, undisturbed: float | None) -> str:
    iteration, loss = outcome.last or (0, float("nan"))
    last_loss = f"{loss:.4f}"
    if iteration == ITERATIONS and undisturbed is not None:
        last_loss += " equal" if loss == undisturbed else f", not {undisturbed:.4f}"
    return ROW_FORMAT.format(
        script,
        fault,
        launcher,
        _seconds(outcome.first_iteration_s),
        _seconds(outcome.noticed_s),
        _seconds(outcome.resumed_s),
        _seconds(outcome.ended_s),
        outcome.rounds,
        "-" if outcome.exit_code is None else outcome.exit_code,
        iteration,
        last_loss,
        outcome.verdict[:140],
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", nargs="+", default=sorted(path.stem for path in SCRIPTS.glob("*.py")))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS[1:])
    parser.add_argument("--launchers", nargs="+", choices=sorted(LAUNCHERS), default=["torchrun", "resihp"])
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--sleep", type=float, default=0.1, help="seconds to wait in each iteration")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to observe after a fault")
    parser.add_argument("--keep", type=Path, help="folder for the output of each run")
    options = parser.parse_args()
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    print(ROW_FORMAT.format(*COLUMN_HEADINGS, "verdict"), flush=True)
    for script in options.scripts:
        undisturbed: float | None = None
        for fault in dict.fromkeys(["none", *options.faults]):
            for launcher in options.launchers * options.times:
                try:
                    outcome = outcome_of(launcher, script, fault, options.sleep, options.patience, options.keep)
                except (RuntimeError, ProcessLookupError) as error:
                    print(f"{script} {fault} {launcher}: the fault was not injected: {error}", flush=True)
                    continue
                if fault == "none" and outcome.last is not None:
                    undisturbed = outcome.last[1]
                print(row_of(script, fault, launcher, outcome, undisturbed), flush=True)


if __name__ == "__main__":
    main()
