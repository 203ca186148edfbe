"""What CommandLine does with commands that fail, hang, babble or are not there: programs of our own stand for them."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from resihp.slurm.client import PREFIX
from resihp.slurm.command_call import LIMIT_BYTES
from resihp.slurm.commands import MAX_NAMES_PER_CALL, MAX_SINGLE_CALLS, CommandLine
from resihp.slurm.errors import SlurmError, SlurmOutputError, SlurmRefusedError, SlurmUnavailableError
from resihp.slurm.parsing.fields import FIELD, RECORD
from tests.integration.cluster import Cluster


class Programs:
    """A folder of commands that do what a test says, and note how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()

    def put(self, name: str, script: str = "", *, output: bytes = b"", status: int = 0) -> None:
        (self.folder / f"{name}.output").write_bytes(output)
        note = shlex.quote(str(self.folder / name))
        lines = [
            "#!/bin/sh",
            f'printf "%s\\0" "$@" >> {note}.argv; echo >> {note}.argv',
            f"env -0 > {note}.environment",
            f"pwd > {note}.folder",
            script,
            f"cat {note}.output",
            f"exit {status}",
        ]
        path = self.bin / name
        path.write_text("\n".join(lines) + "\n")
        path.chmod(0o755)

    def calls(self, name: str) -> list[list[str]]:
        lines = (self.folder / f"{name}.argv").read_text().split("\n")[:-1]
        return [line.split("\0")[:-1] for line in lines]

    def environment(self, name: str) -> dict[str, str]:
        text = (self.folder / f"{name}.environment").read_text()
        return dict(item.split("=", 1) for item in text.split("\0") if item)


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path)


def slurm(programs: Programs, timeout_s: float = 10, **environment: str) -> CommandLine:
    inherited = {"PATH": os.environ["PATH"], **environment}
    return CommandLine(bin=programs.bin, timeout_s=timeout_s, environment=inherited)


def running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


CALLS: dict[str, Callable[[CommandLine], object]] = {
    "version": lambda slurm: slurm.version(),
    "cluster": lambda slurm: slurm.cluster(),
    "nodes": lambda slurm: slurm.nodes(["n1"]),
    "job": lambda slurm: slurm.job("7"),
    "jobs": lambda slurm: slurm.jobs(["7", "8"]),
    "request": lambda slurm: slurm.request("7"),
    "batch_script": lambda slurm: slurm.batch_script("7"),
    "expand": lambda slurm: slurm.expand("n[1-2]"),
    "drain": lambda slurm: slurm.drain("n1", "bad"),
    "undrain": lambda slurm: slurm.undrain("n1"),
    "keep_nodes": lambda slurm: slurm.keep_nodes("7", ["n1"]),
    "submit": lambda slurm: slurm.submit(Path("job.sh")),
    "requeue": lambda slurm: slurm.requeue("7"),
    "cancel": lambda slurm: slurm.cancel("7"),
    "runs_again": lambda slurm: slurm.runs_again("7"),
    "end_for_good": lambda slurm: slurm.end_for_good("7"),
}
COMMANDS = ("sinfo", "squeue", "scontrol", "sbatch", "scancel")


@pytest.mark.parametrize("name", CALLS)
def test_commands_that_are_not_there(programs: Programs, name: str) -> None:
    with pytest.raises(SlurmUnavailableError, match="no such command"):
        CALLS[name](slurm(programs))


@pytest.mark.parametrize("name", CALLS)
def test_commands_that_cannot_be_started(programs: Programs, name: str) -> None:
    for command in COMMANDS:
        path = programs.bin / command
        path.write_text("#!/no/such/interpreter\n")
        path.chmod(0o755)
    with pytest.raises(SlurmUnavailableError, match="cannot be started"):
        CALLS[name](slurm(programs))


@pytest.mark.parametrize("name", CALLS)
def test_commands_that_hang_are_ended_with_all_they_started(programs: Programs, name: str) -> None:
    for command in COMMANDS:
        programs.put(command, f"sleep 1000 & echo $! > {programs.folder}/child; wait")
    began = time.monotonic()
    with pytest.raises(SlurmUnavailableError, match=r"no answer within 0\.5 s"):
        CALLS[name](slurm(programs, timeout_s=0.5))
    assert time.monotonic() - began < 5
    child = int((programs.folder / "child").read_text())
    while running(child):
        assert time.monotonic() - began < 5
        time.sleep(0.01)


@pytest.mark.parametrize("name", CALLS)
def test_commands_that_never_end_talking_are_ended(programs: Programs, name: str) -> None:
    for command in COMMANDS:
        programs.put(command, "while :; do echo .; sleep 0.05; done")
    with pytest.raises(SlurmUnavailableError, match="no answer"):
        CALLS[name](slurm(programs, timeout_s=0.3))


@pytest.mark.parametrize("name", CALLS)
def test_commands_that_are_killed(programs: Programs, name: str) -> None:
    for command in COMMANDS:
        programs.put(command, "kill -9 $$")
    with pytest.raises(SlurmUnavailableError, match="signal 9"):
        CALLS[name](slurm(programs))


@pytest.mark.parametrize("name", CALLS)
def test_commands_that_fail_in_silence(programs: Programs, name: str) -> None:
    for command in COMMANDS:
        programs.put(command, status=1)
    with pytest.raises(SlurmOutputError, match="failed without a message"):
        CALLS[name](slurm(programs))


@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"drain", "undrain", "keep_nodes", "requeue", "cancel"}))
@pytest.mark.parametrize("said", [b"\xff\xfe\x00\x01" * 100, b"an unexpected banner\n", b"\x1e\x1f" * 9], ids=ascii)
def test_commands_that_talk_nonsense(programs: Programs, name: str, said: bytes) -> None:
    for command in COMMANDS:
        programs.put(command, output=said)
    with pytest.raises(SlurmOutputError):
        CALLS[name](slurm(programs))


def test_commands_that_talk_too_much(programs: Programs) -> None:
    programs.put("sinfo", f"head -c {LIMIT_BYTES + 1000} /dev/zero")
    with pytest.raises(SlurmOutputError, match="printed more than"):
        slurm(programs, timeout_s=60).nodes(["n1"])


@pytest.mark.parametrize(
    ("complaint", "kind"),
    [
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", SlurmUnavailableError),
        ("slurm_update error: Socket timed out on send/recv operation", SlurmUnavailableError),
        ("scontrol: error: Slurm backup controller in standby mode", SlurmUnavailableError),
        ("scontrol: error: Zero Bytes were transmitted or received", SlurmUnavailableError),
        (
            "scontrol: error: Munge encode failed: Failed to access socket: Permission denied\n"
            "slurm_update error: Protocol authentication error",
            SlurmUnavailableError,
        ),
        ("scontrol: fatal: Unable to process configuration file", SlurmUnavailableError),
        ("Unexpected message received for job 7", SlurmUnavailableError),
        ("slurm_update error: Invalid node state specified", SlurmRefusedError),
        ("slurm_update error: Invalid user id", SlurmRefusedError),
        ("Access/permission denied for job 7", SlurmRefusedError),
        ("Job update not available right now, the DB index is being set, try again in a bit", SlurmRefusedError),
        ("a sentence that nobody has seen yet", SlurmRefusedError),
    ],
)
@pytest.mark.parametrize("name", ["drain", "cancel", "submit", "jobs"])
def test_what_complaints_mean(programs: Programs, name: str, complaint: str, kind: type[SlurmError]) -> None:
    for command in COMMANDS:
        programs.put(command, f"echo {shlex.quote(complaint)} >&2", status=1)
    with pytest.raises(kind) as error:
        CALLS[name](slurm(programs))
    assert type(error.value) is kind
    if isinstance(error.value, SlurmRefusedError):
        assert error.value.permission == ("Invalid user" in complaint or "denied" in complaint)
        assert error.value.for_now == ("try again in a bit" in complaint)
    assert "\n" not in str(error.value)


def test_a_reason_is_one_argument_whatever_it_says(programs: Programs) -> None:
    programs.put("scontrol")
    slurm(programs).drain("n1", "a b; $(id) State=RESUME `id`\nNodeName=n2")
    assert programs.calls("scontrol") == [
        ["update", "NodeName=n1", "State=DRAIN", f"Reason={PREFIX}a b (id) State=RESUME id NodeName=n2"]
    ]


def test_impossible_names_never_reach_a_command_line(programs: Programs) -> None:
    for name in ("", "-x", "n1,n2", "n1 n2", "n[1-2]", "ALL", "n1;id", "n1\0"):
        asked = slurm(programs)
        assert asked.nodes([name]) == {}
        assert asked.jobs([name]) == {}
        for change in (asked.undrain, asked.requeue, asked.cancel, asked.batch_script):
            with pytest.raises(SlurmRefusedError):
                change(name)
    assert not list(programs.folder.glob("*.argv"))


def test_many_nodes_are_asked_about_in_portions(programs: Programs) -> None:
    programs.put("sinfo")
    slurm(programs).nodes([f"n{i}" for i in range(MAX_NAMES_PER_CALL + 1)] * 2)
    assert [len(call[call.index("-n") + 1].split(",")) for call in programs.calls("sinfo")] == [MAX_NAMES_PER_CALL, 1]


def test_few_nodes_and_jobs_are_asked_about_one_by_one(programs: Programs) -> None:
    """For several at once, slurmctld sends all nodes of the cluster, and all jobs."""
    programs.put("sinfo")
    programs.put("squeue")
    names = [f"n{i}" for i in range(MAX_SINGLE_CALLS)]
    slurm(programs).nodes(names)
    slurm(programs).jobs(["7", "8", "7"])
    assert [call[call.index("-n") + 1] for call in programs.calls("sinfo")] == names
    assert [call[call.index("-j") + 1] for call in programs.calls("squeue")] == ["7", "8"]
    slurm(programs).nodes([*names, "another"])
    (all_at_once,) = programs.calls("sinfo")[MAX_SINGLE_CALLS:]
    assert len(all_at_once[all_at_once.index("-n") + 1].split(",")) == MAX_SINGLE_CALLS + 1


def test_a_job_is_found_by_either_of_its_ids(programs: Programs) -> None:
    fields = ("57", "55_2", "me", "RUNNING", "n[1-2]", "n1", "None", "0", "UNLIMITED", "N/A", "0", "(null)", "x")
    programs.put("squeue", output=(FIELD.join(fields) + RECORD + "\n").encode())
    programs.put("scontrol", output=b"n1\nn2\n")
    found = slurm(programs).jobs(["57", "55_2", "58"])
    assert {job: view.id for job, view in found.items()} == {"57": "57", "55_2": "55_2"}
    assert found["57"].nodes == ("n1", "n2")
    assert len(programs.calls("scontrol")) == 1


def preempted(
    programs: Programs,
    *,
    version: str = "24.11.5",
    when: str = "now",
    tries: str = "1",
    config: str = "",
    mode: str = "",
) -> CommandLine:
    """A job that is preempted, on a cluster of this release with these lines of its configuration."""
    programs.put("sinfo", output=f"slurm-wlm {version}\n".encode())
    programs.put("squeue", output=(FIELD.join((when, "low", "spare", tries)) + RECORD + "\n").encode())
    programs.put("scontrol", output=f"ClusterName = x\nMaxBatchRequeue = 5\n{config}\n{mode}\n".encode())
    return slurm(programs)


PARTITION = "PreemptType = preempt/partition_prio\nPreemptMode = CANCEL"
QOS = "PreemptType = preempt/qos\nPreemptMode = GANG,REQUEUE"


@pytest.mark.parametrize(
    ("said", "again"),
    [
        ({"config": PARTITION, "mode": "PartitionName=low PreemptMode=REQUEUE State=UP"}, True),
        ({"config": PARTITION, "mode": "PartitionName=low PreemptMode=CANCEL State=UP"}, False),
        ({"config": PARTITION, "mode": "PartitionName=low PreemptMode=REQUEUE State=UP", "when": "N/A"}, False),
        # The next time Slurm would hold the job.
        ({"config": PARTITION, "mode": "PartitionName=low PreemptMode=REQUEUE State=UP", "tries": "5"}, False),
        ({"config": PARTITION, "mode": "PartitionName=low PreemptMode=REQUEUE State=UP", "version": "22.05.8"}, False),
        ({"config": PARTITION, "mode": "PartitionName=low PreemptMode=REQUEUE State=UP", "version": "26.05.5"}, False),
    ],
)
def test_when_slurm_runs_a_preempted_job_again_by_itself(programs: Programs, said: dict[str, str], again: bool) -> None:
    assert preempted(programs, **said).runs_again("7") == again


@pytest.mark.parametrize(("own", "again"), [("cluster", True), ("requeue", True), ("cancel", False)])
def test_a_qos_says_how_its_jobs_are_preempted(programs: Programs, own: str, again: bool) -> None:
    programs.put("sacctmgr", output=f"{own}\n".encode())
    assert preempted(programs, config=QOS).runs_again("7") == again
    assert programs.calls("sacctmgr") == [["-nP", "show", "qos", "name=spare", "format=preemptmode"]]


@pytest.mark.parametrize(
    "said", [{"config": PARTITION, "mode": "no mode"}, {"tries": "many"}, {"version": "the newest"}, {"config": QOS}]
)
def test_what_cannot_be_read_of_a_preemption_is_not_guessed(programs: Programs, said: dict[str, str]) -> None:
    programs.put("sacctmgr", output=b"spare|requeue|\n")
    with pytest.raises(SlurmOutputError):
        preempted(programs, **said).runs_again("7")


@pytest.mark.parametrize(
    ("version", "shown", "changed"),
    [("26.05.5", "ExpeditedRequeue=Yes", True), ("26.05.5", "Requeue=1", False), ("24.11.5", "", False)],
)
def test_only_a_job_with_an_expedited_requeue_is_told_to_end(
    programs: Programs, version: str, shown: str, changed: bool
) -> None:
    asked = preempted(programs, version=version, config=shown)
    asked.end_for_good("7")
    calls = programs.calls("scontrol") if (programs.folder / "scontrol.argv").exists() else []
    assert (["update", "JobId=7", "Requeue=0"] in calls) == changed


def test_queries_see_nothing_of_the_users_formats_or_our_job(programs: Programs) -> None:
    programs.put("squeue")
    slurm(
        programs,
        SLURM_CONF="/etc/other.conf",
        SLURM_JOB_ID="7",
        SLURM_CLUSTERS="b",
        SLURM_TIME_FORMAT="relative",
        SQUEUE_FORMAT="%i",
        SQUEUE_STATES="PENDING",
        SINFO_FORMAT="%N",
        SCANCEL_INTERACTIVE="1",
        LC_ALL="de_DE.UTF-8",
        HOME="/home/me",
    ).job("7")
    seen = programs.environment("squeue")
    assert {key: value for key, value in seen.items() if key.startswith("S")} == {
        "SLURM_CONF": "/etc/other.conf",
        "SLURM_TIME_FORMAT": "%s",
    }
    assert (seen["LC_ALL"], seen["HOME"]) == ("C", "/home/me")


def test_new_jobs_inherit_the_users_environment_without_our_jobs(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.put("sbatch", output=b"8\n")
    monkeypatch.chdir(programs.folder)
    asked = slurm(
        programs,
        SLURM_CONF="/etc/other.conf",
        SLURM_JOB_ID="7",
        SLURM_NTASKS="8",
        SLURMD_NODENAME="n1",
        SRUN_DEBUG="3",
        SBATCH_ACCOUNT="physics",
        SBATCH_CONSTRAINT="h100",
        SBATCH_TIMELIMIT="60",
        SBATCH_CLUSTERS="other",
        SLURM_CLUSTERS="other",
        SBATCH_WAIT="1",
        SBATCH_CPU_BIND_LIST="0x1",
        LC_ALL="de_DE.UTF-8",
    )
    assert asked.submit(Path("-x.sh"), ["--nodes=1", "--exclude", "n3"]) == "8"
    seen = programs.environment("sbatch")
    kept = {"SLURM_CONF", "SBATCH_ACCOUNT", "SBATCH_CONSTRAINT", "SBATCH_TIMELIMIT"}
    assert {key for key in seen if key.startswith("S")} == kept
    assert seen["LC_ALL"] == "de_DE.UTF-8"
    script = str(programs.folder / "-x.sh")
    assert programs.calls("sbatch") == [["--parsable", "--nodes=1", "--exclude", "n3", "--", script]]
    assert (programs.folder / "sbatch.folder").read_text().strip() == str(programs.folder)


def test_messages_say_who_and_what(programs: Programs) -> None:
    programs.put("scontrol", "echo 'slurm_update error: Invalid user id' >&2", status=1)
    with pytest.raises(SlurmRefusedError) as error:
        slurm(programs).drain("n3", "bad")
    assert str(error.value).startswith("node n3: not drained: scontrol: slurm_update error: Invalid user id")


def test_a_controller_that_hangs_is_no_answer_and_what_was_asked_happens(
    cluster: Callable[..., Cluster],
) -> None:
    made = cluster(nodes=1, settings={"MessageTimeout": "30"})
    asked = CommandLine(bin=made.commands(), environment=made.environment, timeout_s=1)
    made.stop_controller("freeze")
    with pytest.raises(SlurmUnavailableError, match="within 1 s"):
        asked.drain("n1", "bad")
    with pytest.raises(SlurmUnavailableError, match="within 1 s"):
        asked.nodes(["n1"])
    made.start_controller()
    made.wait(lambda: asked.nodes(["n1"])["n1"].draining, "the drain that was asked for")


def test_a_node_that_does_not_answer_slurm(cluster: Callable[..., Cluster]) -> None:
    made = cluster(nodes=2)
    asked = CommandLine(bin=made.commands(), environment=made.environment)
    made.kill_node("n2")
    made.wait(lambda: asked.nodes(["n2"])["n2"].state == "down", "n2 to be down", timeout_s=60)
    view = asked.nodes(["n2"])["n2"]
    assert "not_responding" in view.flags
    assert not view.draining
    assert not view.usable
    assert view.reason == "Not responding"
