"""Agents, fork servers, supervisor and guardian as real processes: who starts, who is watched, who dies with whom."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest

from resihp.controller.fail_slow.standings import RankAnswer
from resihp.errors import UsageError
from resihp.protocol.messages import AskStanding
from resihp.record.journal import FaultInjected, JobEnded, LeaderChosen, NodeLost, WorkerEnded, WorkerStarted, first_seq
from resihp.wrapper.commands.operate import inject, request
from resihp.wrapper.exit_codes import CANNOT_LEAD, INTERNAL_ERROR
from resihp.wrapper.job_files.dead_jobs import finish_dead_job
from resihp.wrapper.job_folder import all_jobs, hold_lock
from resihp.wrapper.launch.ports import listen
from resihp.wrapper.supervisor.guardian import supervisor_command
from resihp.wrapper.supervisor.shell import SAME_SIGNAL_S
from tests.wrapper.conftest import SOON, StubJob

FOREVER = "import time\nprint('here', flush=True)\ntime.sleep(3600)\n"
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FOREVER


def running(job: StubJob, workers: int = 1) -> list[WorkerStarted]:
    """Wait until that many workers are in their script."""

    def started() -> list[WorkerStarted]:
        found = [entry for entry in job.entries() if isinstance(entry, WorkerStarted)]
        here = [entry for entry in found if "here" in job.log(f"{entry.node}.rank{entry.rank}.log")]
        return here if len(here) == workers else []

    return list(job.until(started))


def ended(job: StubJob) -> JobEnded:
    (entry,) = [entry for entry in job.entries() if isinstance(entry, JobEnded)]
    return entry


def exits(job: StubJob) -> dict[int, int | None]:
    return {entry.rank: entry.exit for entry in job.entries() if isinstance(entry, WorkerEnded)}


# --- starting -----------------------------------------------------------------------------------------------------


def test_script_runs_to_its_end_on_every_device(stub_job: StubJob) -> None:
    script = (
        "import os, sys\n"
        "print(*[os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'GLOO_SOCKET_IFNAME')])\n"
        "assert 'RESIHP_AGENT_FD' in os.environ and os.environ['MASTER_ADDR'] == '127.0.0.1'\n"
        "print(sys.argv[1:], __name__)\n"
        "open('here' + os.environ['RANK'], 'w').close()\n"
        "while not all(os.path.exists(f'here{rank}') for rank in range(4)): pass\n"
    )
    stub_job.start(script, nodes=2, gpus=2, arguments=("--lr", "1"), environment={"MASTER_ADDR": "elsewhere"})
    assert stub_job.wait() == 0, stub_job.stderr
    assert stub_job.log("n2.rank3.log") == "3 1 4 lo\n['--lr', '1'] __main__\n"
    assert exits(stub_job) == {0: 0, 1: 0, 2: 0, 3: 0}
    assert (ended(stub_job).exit_code, ended(stub_job).state) == (0, "completed")
    assert (stub_job.job.folder / "exit_code").read_text() == "0\n"
    assert (stub_job.job.folder / "journal").read_bytes() == stub_job.job.journal_file.read_bytes()


def test_users_modules_win_over_ours_and_their_python_path_is_theirs(stub_job: StubJob) -> None:
    for name in ("db", "wrapper", "resihp_config"):
        (stub_job.folder / f"{name}.py").write_text(f"OWNER = 'user {name}'\n")
    (stub_job.folder / "slurm").mkdir()
    (stub_job.folder / "slurm" / "__init__.py").write_text("OWNER = 'user slurm'\n")
    libraries = stub_job.folder / "libraries"
    libraries.mkdir()
    (libraries / "asyncio.py").write_text("raise SystemExit('the PYTHONPATH of the user is in our processes')\n")
    (libraries / "tokens.py").write_text("OWNER = 'user tokens'\n")
    script = (
        "import sys\n"
        "assert not {'db', 'wrapper', 'slurm'} & set(sys.modules)\n"
        "import db, slurm, wrapper, resihp_config, tokens\n"
        "print([module.OWNER for module in (db, slurm, wrapper, resihp_config, tokens)])\n"
        "print(sys.path[:2])\n"
    )
    stub_job.start(script, python_path=str(libraries))
    assert stub_job.wait() == 0, stub_job.stderr + stub_job.log("n1.rank0.log")
    assert stub_job.log("n1.rank0.log").splitlines() == [
        "['user db', 'user slurm', 'user wrapper', 'user resihp_config', 'user tokens']",
        str([str(stub_job.folder), str(libraries)]),
    ]


def test_module_and_plain_command(stub_job: StubJob) -> None:
    stub_job.start("import sys\nprint(__name__, sys.argv, sys.path[0])\n", kind="module", arguments=("a",))
    assert stub_job.wait() == 0, stub_job.stderr
    path = stub_job.folder / "train.py"
    assert stub_job.log("n1.rank0.log") == f"__main__ {[str(path), 'a']} {stub_job.folder}\n"


def test_plain_command_gets_its_rank_and_is_watched(stub_job: StubJob) -> None:
    stub_job.start("echo rank $RANK of $WORLD_SIZE; exit $RANK", kind="command", gpus=2)
    assert stub_job.wait() == 1, stub_job.stderr
    assert stub_job.log("n1.rank1.log") == "rank 1 of 2\n"
    assert exits(stub_job)[1] == 1
    assert "rank 1 (n1 device 1)" in stub_job.stderr


def test_preload_that_cannot_be_imported_is_a_usage_error(stub_job: StubJob) -> None:
    stub_job.start(FOREVER, preload="no_such_library")
    assert stub_job.wait() == 2
    assert "cannot import no_such_library" in stub_job.stderr


# --- watching -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("death", "status", "code"), [("os._exit(3)", 3, 93), ("os.kill(os.getpid(), 9)", -9, 1)])
def test_exit_is_known_within_a_fifth_of_a_second(stub_job: StubJob, death: str, status: int, code: int) -> None:
    script = f"import os, time\ntime.sleep(0.5)\nprint(time.time(), flush=True)\n{death}\n"
    stub_job.start(script)
    assert stub_job.wait() == code
    (record,) = [record for record in stub_job.job.records() if isinstance(record.entry, WorkerEnded)]
    assert exits(stub_job) == {0: status}
    assert record.at - float(stub_job.log("n1.rank0.log")) < 0.2


def test_last_words_come_before_the_exit(stub_job: StubJob) -> None:
    """`Refuse`, sent right before the end, decides the exit code: had the exit come first, it would be 1."""
    script = (
        "import os, socket\n"
        "from resihp.protocol.channels import LocalChannel\n"
        "from resihp.protocol import messages as m\n"
        "channel = LocalChannel(socket.socket(fileno=int(os.environ['RESIHP_AGENT_FD'])))\n"
        "start = channel.recv(m.WorkerOrder)\n"
        "for i in range(2000):\n"
        "    channel.send(m.Finished(iteration=i))\n"
        "channel.send(m.Refuse(reason=f'rank {start.rank} has no data'))\n"
        "os._exit(7)\n"
    )
    stub_job.start(script)
    assert stub_job.wait() == 2, stub_job.stderr
    assert "rank 0 has no data" in stub_job.stderr


def test_exception_is_in_the_log_without_our_frames_and_reported(stub_job: StubJob) -> None:
    script = "def train():\n    raise KeyError('no such tokenizer')\ntrain()\n"
    stub_job.start(script, gpus=2, preload="resihp.protocol.client")
    assert stub_job.wait() == 93, stub_job.stderr
    log = stub_job.log("n1.rank1.log")
    assert log.startswith("Traceback (most recent call last):\n")
    assert log.endswith("KeyError: 'no such tokenizer'\n")
    assert "runpy" not in log
    assert "forkserver" not in log


def test_operator_injects_a_fault(stub_job: StubJob) -> None:
    stub_job.start(FOREVER)
    running(stub_job)
    assert "injected" in inject.inject(stub_job.job.name, "kill", 0, None)["text"]
    assert stub_job.wait() == 1
    assert exits(stub_job) == {0: -9}


def test_dead_agent_is_a_lost_node_at_once(stub_job: StubJob) -> None:
    stub_job.start(FOREVER, nodes=2, environment=SOON)
    running(stub_job, 2)
    (agent,) = stub_job.processes("--node n2")
    begun = time.monotonic()
    agent.kill()
    assert stub_job.wait() == 5
    assert time.monotonic() - begun < 5
    assert "node n2: its agent was killed by SIGKILL" in stub_job.stderr


def test_key_is_in_no_environment_and_no_command_line(stub_job: StubJob) -> None:
    stub_job.start(FOREVER)
    running(stub_job)
    key = stub_job.job.key
    processes = stub_job.processes()
    assert len(processes) >= 5  # guardian, supervisor, agent, fork server, worker
    for process in processes:
        for file in ("environ", "cmdline"):
            with open(f"/proc/{process.pid}/{file}", "rb") as proc:
                content = proc.read()
            assert key not in content
            assert key.hex().encode() not in content
    assert stub_job.job.key_file.stat().st_mode & 0o777 == 0o600
    assert stub_job.job.folder.stat().st_mode & 0o777 == 0o700
    assert stub_job.process is not None
    stub_job.process.send_signal(signal.SIGTERM)
    assert stub_job.wait() == 143


# --- ending -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 75), (signal.SIGUSR2, 75)]
)
def test_signal_ends_the_job_in_order(stub_job: StubJob, number: signal.Signals, status: int) -> None:
    stub_job.start(FOREVER, gpus=2)
    running(stub_job, 2)
    assert stub_job.process is not None
    stub_job.process.send_signal(number)
    assert stub_job.wait(10) == status
    assert stub_job.processes() == []
    assert ended(stub_job).state == "cancelled"
    assert exits(stub_job) == {0: -15, 1: -15}


def test_worker_that_ignores_term_is_killed(stub_job: StubJob) -> None:
    stub_job.start(STUBBORN)
    running(stub_job)
    assert stub_job.process is not None
    stub_job.process.send_signal(signal.SIGTERM)
    assert stub_job.wait(10) == 143
    assert exits(stub_job) == {0: -9}


def test_second_interrupt_ends_at_once(stub_job: StubJob) -> None:
    stub_job.start(STUBBORN)
    running(stub_job)
    assert stub_job.process is not None
    stub_job.process.send_signal(signal.SIGINT)
    stub_job.until(lambda: any(isinstance(entry, JobEnded) for entry in stub_job.entries()))
    time.sleep(SAME_SIGNAL_S)  # what comes sooner is the same signal, sent to a whole process group
    begun = time.monotonic()
    stub_job.process.send_signal(signal.SIGINT)
    assert stub_job.wait(10) == 130
    assert time.monotonic() - begun < 1.5


def test_processes_say_whose_they_are(stub_job: StubJob) -> None:
    stub_job.start(FOREVER, gpus=2)
    running(stub_job, 2)
    name = stub_job.job.name
    titles = {process.cmdline()[0]: process.name() for process in stub_job.processes()}
    assert (
        titles.items()
        >= {
            f"resihp job {name} guardian": "resihp-guardian",
            f"resihp job {name} agent n1": "resihp-agent-n1",
            f"resihp job {name} fork server": "resihp-fork-ser",
            f"resihp job {name} fork server n1": "resihp-fork-ser",
            f"resihp job {name} rank 0": "resihp-rank-0",
            f"resihp job {name} rank 1": "resihp-rank-1",
        }.items()
    )
    workers = [process for process in stub_job.processes() if " rank " in process.cmdline()[0]]
    assert all(process.environ()["HOME"] == os.environ["HOME"] for process in workers)
    assert stub_job.process is not None
    stub_job.process.send_signal(signal.SIGTERM)
    assert stub_job.wait(10) == 143


def test_what_workers_started_ends_with_them(stub_job: StubJob) -> None:
    script = "import subprocess\nsubprocess.Popen(['sleep', '3600'], start_new_session=True)\nprint('here')\n" + FOREVER
    stub_job.start(script)
    running(stub_job)
    stub_job.until(lambda: stub_job.processes("sleep 3600"))
    assert stub_job.process is not None
    stub_job.process.send_signal(signal.SIGTERM)
    assert stub_job.wait(10) == 143
    assert stub_job.processes() == []


def test_nothing_outlives_guardian_and_supervisor(stub_job: StubJob) -> None:
    stub_job.start(STUBBORN, nodes=2, gpus=2)
    running(stub_job, 4)
    assert stub_job.process is not None
    (supervisor,) = stub_job.processes("supervise ")
    stub_job.process.kill()
    supervisor.kill()
    stub_job.wait()
    begun = time.monotonic()
    stub_job.until(lambda: not stub_job.processes(), 10)
    print(f"gone after {time.monotonic() - begun:.1f} s")
    assert finish_dead_job(stub_job.job)
    assert (ended(stub_job).state, ended(stub_job).exit_code) == ("abnormal", 1)
    assert not finish_dead_job(stub_job.job), "a job ends once"


def test_supervisor_ends_the_job_when_the_guardian_is_killed(stub_job: StubJob) -> None:
    stub_job.start(FOREVER)
    running(stub_job)
    assert stub_job.process is not None
    stub_job.process.kill()
    stub_job.until(lambda: not stub_job.processes(), 10)
    assert ended(stub_job).state == "cancelled"


# --- supervisors that die -----------------------------------------------------------------------------------------

UNTIL_TOLD = """
import os, time
print('here', flush=True)
while not os.path.exists('go'):
    time.sleep(0.02)
"""


def supervisor_of(job: StubJob) -> psutil.Process:
    """A child that it has forked, for a hook's command, looks like itself until it runs that command."""
    found: list[psutil.Process] = job.until(lambda: found if len(found := job.processes("supervise ")) == 1 else [])
    return found[0]


def leaders(job: StubJob) -> list[LeaderChosen]:
    return [entry for entry in job.entries() if isinstance(entry, LeaderChosen)]


def led_by(job: StubJob, term: int) -> bool:
    return any(leader.term == term for leader in leaders(job))


def inventories(job: StubJob) -> int:
    """How often agents have accepted a later supervisor."""
    logs = [job.log(path.name) for path in job.job.logs.glob("*.agent.log")]
    return sum(log.count("leads term") for log in logs) - len(logs)


def dying(event: str, nth: int, lives: int) -> dict[str, str]:
    """Environment of supervisors that are killed at the nth such event, in so many lives."""
    return {"STUB_CONTROLLER": "dying", "STUB_DIES": f"{event} {nth} {lives}"}


def test_killed_supervisor_is_replaced_and_nothing_else_is(stub_job: StubJob) -> None:
    stub_job.start(UNTIL_TOLD, nodes=2, gpus=2)
    workers = {worker.rank: worker.pid for worker in running(stub_job, 4)}
    agents = {process.pid for process in stub_job.processes("resihp.wrapper.agent.process")}
    guardian = stub_job.processes("guard ")
    first = supervisor_of(stub_job)
    first.kill()
    killed_at = time.time()
    (chosen,) = stub_job.until(lambda: leaders(stub_job))
    assert (chosen.term, chosen.how, chosen.node) == (2, "restarted", "")
    (record,) = [record for record in stub_job.job.records() if isinstance(record.entry, LeaderChosen)]
    assert record.seq == first_seq(2)
    assert chosen.after == len(stub_job.entries()) - 1
    print(f"led again {record.at - killed_at:.2f} s after the kill")
    stub_job.until(lambda: inventories(stub_job) == 2)
    assert {process.pid for process in stub_job.processes("resihp.wrapper.agent.process")} == agents
    assert stub_job.processes("guard ") == guardian
    assert inject.inject(None, "disconnect", None, "n2"), "it is found where commands look for it"
    assert all(psutil.pid_exists(pid) for pid in workers.values())
    (stub_job.folder / "go").touch()
    assert stub_job.wait() == 0, stub_job.stderr
    assert exits(stub_job) == dict.fromkeys(workers, 0)
    started = {entry.rank: entry.pid for entry in stub_job.entries() if isinstance(entry, WorkerStarted)}
    assert started == workers
    assert len([entry for entry in stub_job.entries() if isinstance(entry, WorkerStarted)]) == 4
    assert (ended(stub_job).exit_code, ended(stub_job).state) == (0, "completed")
    assert "the supervisor was killed by SIGKILL; starting another" in stub_job.stderr


def test_supervisor_is_replaced_five_times_and_then_the_job_is_over(stub_job: StubJob) -> None:
    stub_job.start(FOREVER, gpus=2, environment=dying("AgentBeat", 1, 100))
    assert stub_job.wait(60) == 1
    assert stub_job.processes() == []
    assert [leader.term for leader in leaders(stub_job)] == [2, 3, 4, 5, 6]
    assert (ended(stub_job).state, ended(stub_job).exit_code) == ("abnormal", 1)
    assert ended(stub_job).reason == "the supervisor was killed by SIGKILL"
    assert (stub_job.job.folder / "exit_code").read_text() == "1\n"
    assert "the job ended abnormally, logs in" in stub_job.stderr
    assert "still there, killing it" not in stub_job.stderr, "agents end by themselves once nobody can come any more"


def test_supervisors_that_die_while_agents_come_back_are_replaced(stub_job: StubJob) -> None:
    stub_job.start(UNTIL_TOLD, nodes=2)
    workers = running(stub_job, 2)
    for term in (2, 3, 4):
        supervisor_of(stub_job).kill()
        stub_job.until(partial(led_by, stub_job, term))
    (stub_job.folder / "go").touch()
    assert stub_job.wait() == 0, stub_job.stderr
    assert [leader.term for leader in leaders(stub_job)] == [2, 3, 4]
    assert exits(stub_job) == {worker.rank: 0 for worker in workers}


@pytest.mark.parametrize(
    ("event", "nth"), [("AgentJoined", 1), ("AgentJoined", 2), ("WorkerSpawned", 1), ("WorkerSpawned", 4)]
)
def test_supervisor_that_dies_during_the_start_is_replaced(stub_job: StubJob, event: str, nth: int) -> None:
    """Whatever of the start was not done is done, and nothing twice."""
    stub_job.start(UNTIL_TOLD, nodes=2, gpus=2, environment=dying(event, nth, 1))
    workers = running(stub_job, 4)
    (stub_job.folder / "go").touch()
    assert stub_job.wait() == 0, stub_job.stderr
    assert exits(stub_job) == {worker.rank: 0 for worker in workers} == dict.fromkeys(range(4), 0)
    assert len(leaders(stub_job)) == 1


def test_supervisor_that_dies_before_it_has_started_every_agent_ends_the_job(stub_job: StubJob) -> None:
    """None of them has joined, and one of the two is gone: who is left would be waited for in vain."""
    stub_job.start(FOREVER, nodes=2)
    first = stub_job.until(lambda: next(iter(stub_job.processes("resihp.wrapper.agent.process")), None))
    supervisor = supervisor_of(stub_job)
    first.suspend()
    supervisor.suspend()
    first.kill()
    supervisor.kill()
    assert stub_job.wait() == 1
    assert "cannot be taken over: no agent had joined it, and not all were started" in stub_job.stderr
    assert (ended(stub_job).state, ended(stub_job).exit_code) == ("abnormal", 1)
    assert stub_job.processes() == []


def test_supervisor_killed_before_it_has_begun_ends_the_job(stub_job: StubJob) -> None:
    """Neither a journal nor an agent is there: nothing can be taken over."""
    stub_job.start(FOREVER)
    supervisor_of(stub_job).kill()
    assert stub_job.wait() == 1
    assert "cannot be taken over" in stub_job.stderr
    assert stub_job.processes() == []


def test_a_successor_that_cannot_begin_leaves_the_job_alone(stub_job: StubJob, tmp_path: Path) -> None:
    """A damaged copy on one node: its agent, and the job's end, are not its business."""
    stub_job.start(UNTIL_TOLD, nodes=2)
    running(stub_job, 2)
    before = (stub_job.job.folder / "job.json").read_bytes()
    copy = tmp_path / "n1.copy"
    whole = stub_job.job.journal_file.read_bytes()
    copy.write_bytes(whole[:40] + b"?" + whole[41:])
    with listen("127.0.0.1") as listener:
        os.set_inheritable(listener.fileno(), True)
        tried = subprocess.run(
            supervisor_command(
                stub_job.job.run_file,
                ["--listen", str(listener.fileno()), "--successor", "n1", "--copy", str(copy), "--term", "2"],
            ),
            pass_fds=[listener.fileno()],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert tried.returncode == CANNOT_LEAD, tried.stderr
    assert "cannot be taken over: journal" in tried.stderr
    assert "damaged at byte 8, and whole records follow" in tried.stderr
    assert len(stub_job.processes("resihp.wrapper.agent.process")) == 2
    assert (stub_job.job.folder / "job.json").read_bytes() == before
    (stub_job.folder / "go").touch()
    assert stub_job.wait() == 0, stub_job.stderr


def test_supervisor_killed_while_the_job_ends_leaves_its_exit_code(stub_job: StubJob) -> None:
    stub_job.start(STUBBORN, gpus=2)
    running(stub_job, 2)
    assert stub_job.process is not None
    stub_job.process.send_signal(signal.SIGTERM)
    stub_job.until(lambda: any(isinstance(entry, JobEnded) for entry in stub_job.entries()))
    supervisor_of(stub_job).kill()
    assert stub_job.wait() == 143
    assert stub_job.processes() == []
    assert (ended(stub_job).exit_code, ended(stub_job).state) == (143, "cancelled")
    assert (stub_job.job.folder / "exit_code").read_text() == "143\n"
    assert "the job had ended: received SIGTERM" in stub_job.stderr


def test_agent_that_died_with_the_supervisor_is_a_lost_node(stub_job: StubJob) -> None:
    stub_job.start(UNTIL_TOLD, nodes=2, environment=SOON)
    running(stub_job, 2)
    (agent,) = stub_job.processes("--node n2")
    supervisor = supervisor_of(stub_job)
    agent.kill()
    supervisor.kill()
    assert stub_job.wait() == 5, stub_job.stderr
    lost = [entry for entry in stub_job.entries() if isinstance(entry, NodeLost)]
    assert [(entry.node, entry.reason) for entry in lost] in (
        [("n2", "its agent did not reconnect to the new supervisor")],
        [("n2", "its agent was killed by SIGKILL")],  # the first one had time to notice
    )


def test_lock_and_socket_are_the_guardians(stub_job: StubJob) -> None:
    """While nobody leads, nobody else can take the job, and agents wait where the next one will be."""
    stub_job.start(UNTIL_TOLD)
    running(stub_job)
    address = stub_job.job.supervisor()
    assert address is not None
    assert stub_job.process is not None
    supervisor = supervisor_of(stub_job)
    supervisor.suspend()
    guardian = psutil.Process(stub_job.process.pid)
    guardian.suspend()
    supervisor.kill()
    assert not finish_dead_job(stub_job.job)
    with pytest.raises(UsageError, match="another supervisor holds"):
        hold_lock(stub_job.job)
    with socket.create_connection((address.host, address.port), timeout=5):
        pass
    guardian.resume()
    stub_job.until(lambda: leaders(stub_job))
    stub_job.until(lambda: inventories(stub_job) == 1)
    again = stub_job.job.supervisor()
    assert again is not None
    assert (again.host, again.port) == (address.host, address.port)
    assert again.pid != address.pid
    (stub_job.folder / "go").touch()
    assert stub_job.wait() == 0, stub_job.stderr


def test_agents_wait_for_a_supervisor_that_is_slow_to_start(stub_job: StubJob) -> None:
    """As long as the guardian holds the socket, somebody is about to come."""
    stub_job.start(UNTIL_TOLD)
    running(stub_job)
    (agent,) = stub_job.processes("resihp.wrapper.agent.process")
    supervisor_of(stub_job).kill()
    (slow,) = stub_job.until(lambda: [it for it in stub_job.processes("supervise ") if "--take-over" in it.cmdline()])
    slow.suspend()
    attempts: set[int] = set()

    def tried_thrice() -> bool:
        attempts.update(each.laddr.port for each in agent.net_connections() if each.raddr)
        return len(attempts) >= 3

    stub_job.until(tried_thrice)
    assert leaders(stub_job) == []
    slow.resume()
    stub_job.until(lambda: inventories(stub_job) == 1)
    (stub_job.folder / "go").touch()
    assert stub_job.wait() == 0, stub_job.stderr


def test_bug_in_the_supervisor_ends_the_job_with_its_traceback_in_the_log(stub_job: StubJob) -> None:
    stub_job.start(FOREVER, environment={"STUB_CONTROLLER": "broken"})
    assert stub_job.wait() == INTERNAL_ERROR, "1 says that training failed"
    assert "internal error" in stub_job.stderr
    assert "Traceback" not in stub_job.stderr
    assert "ZeroDivisionError: a bug" in stub_job.log("supervisor.log")
    assert ended(stub_job).state == "failed"


def test_dead_fork_server_takes_its_workers_and_is_told(stub_job: StubJob) -> None:
    stub_job.start(FOREVER)
    (worker,) = running(stub_job)
    server = psutil.Process(worker.pid).parent()
    assert server is not None
    os.kill(server.pid, signal.SIGKILL)
    assert stub_job.wait() != 0
    assert exits(stub_job) == {0: -9}


ASKING = """
import os, socket
from resihp.process import AGENT_FD
from resihp.protocol import messages as m
from resihp.protocol.channels import LocalChannel
agent = LocalChannel(socket.socket(fileno=int(os.environ[AGENT_FD])))
start = agent.recv(m.WorkerOrder)
for n in range(200):
    agent.send(m.FaultDue(fault=1000 * start.rank + n))
    answer = agent.recv(m.WorkerOrder)
    assert answer == m.FaultGo(fault=1000 * start.rank + n, fire=False), (n, answer)
print("all answered")
"""


def test_nothing_is_lost_when_connections_are_cut_all_the_time(stub_job: StubJob) -> None:
    """Each answer is asked for once, and must come once, though every seventh goes down with its connection."""
    stub_job.start(ASKING, gpus=2, environment={"STUB_CONTROLLER": "cutting"})
    assert stub_job.wait(60) == 0, stub_job.stderr
    assert exits(stub_job) == {0: 0, 1: 0}, stub_job.stderr
    assert stub_job.log("n1.agent.log").count("connecting again") > 20
    assert [stub_job.log(f"n1.rank{rank}.log") for rank in (0, 1)] == ["all answered\n"] * 2
    assert len([entry for entry in stub_job.entries() if isinstance(entry, WorkerStarted)]) == 2
    assert not [entry for entry in stub_job.entries() if isinstance(entry, NodeLost)]


def test_disconnect_fault_costs_nothing(stub_job: StubJob) -> None:
    stub_job.start("import time\nprint('here', flush=True)\ntime.sleep(2)\n", nodes=2)
    running(stub_job, 2)
    assert "disconnect:node=n2 injected" in inject.inject(None, "disconnect", None, "n2")["text"]
    assert stub_job.wait() == 0, stub_job.stderr
    assert exits(stub_job) == {0: 0, 1: 0}
    assert not [entry for entry in stub_job.entries() if isinstance(entry, NodeLost)]
    assert [entry.text for entry in stub_job.entries() if isinstance(entry, FaultInjected)] == ["disconnect:node=n2"]


def test_how_a_rank_stands_is_answered_while_the_job_runs(stub_job: StubJob) -> None:
    stub_job.start("import time\nprint('here', flush=True)\ntime.sleep(2)\n", nodes=2)
    running(stub_job, 2)
    [job] = all_jobs()
    reply = asyncio.run(request.ask(job, AskStanding(rank=1)))
    assert reply.ok, reply.text
    answer = msgspec.json.decode(reply.text, type=RankAnswer)
    assert (answer.rank, answer.node, answer.working, answer.level) == (1, "n2", False, None)
    assert asyncio.run(request.ask(job, AskStanding(rank=9))).text == "there is no rank 9; the job has ranks 0 to 1"
    assert stub_job.wait() == 0, stub_job.stderr
