"""What a survey reads off Slurm's answers; and that a real Slurm gives such answers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from resihp.slurm.errors import SlurmError, SlurmOutputError, SlurmRefusedError, SlurmUnavailableError
from resihp.slurm.parsing.parse import settings
from resihp.slurm.survey import FIELD, RECORD, CommandSurvey, PartitionRules, admin_level, partitions, user_of
from tests.integration.cluster import Cluster


def row(*fields: str) -> bytes:
    return (FIELD.join(fields) + RECORD + "\n").encode()


def test_partitions() -> None:
    text = row("gpu*", "up", "2-00:00:00", "1:00:00", "3/5/1/9", "gpu:h100:8(S:0-1),nic:2", "96+", "1031000+")
    text += row("cpu", "down", "infinite", "n/a", "0/0/4/4", "(null)", "64", "256000")
    first, second = partitions(text)
    assert (first.name, first.default, first.up, first.nodes, first.nodes_idle) == ("gpu", True, True, 9, 5)
    assert (first.gpus, first.cpus, first.memory_mb) == (8, 96, 1031000)
    assert (first.seconds, first.default_seconds) == (172800, 3600)
    assert (second.default, second.up, second.gpus, second.seconds, second.default_seconds) == (
        False,
        False,
        0,
        None,
        None,
    )


def test_no_partition_is_an_answer() -> None:
    assert partitions(b"") == []


@pytest.mark.parametrize(
    "output",
    [
        b"gpu*\x1fup",
        row("gpu", "up"),
        row("gpu", "up", "infinite", "n/a", "1/2/3", "(null)", "1", "1"),
        row("gpu", "up", "tomorrow", "n/a", "0/0/4/4", "(null)", "1", "1"),
    ],
)
def test_what_is_no_answer_about_partitions(output: bytes) -> None:
    with pytest.raises(SlurmOutputError):
        partitions(output)


def test_one_odd_record_takes_no_partition_with_it() -> None:
    usual = row("gpu", "up", "infinite", "n/a", "0/4/0/4", "gpu:a100:no_consume:4", "1", "1")
    odd = row("old", "up", "tomorrow", "n/a", "0/0/4/4", "gpu:a:b:c", "1", "1")
    (view,) = partitions(odd + usual)
    assert (view.name, view.gpus, view.gpu_types) == ("gpu", 4, ("a100",))


def test_a_partition_whose_gpus_cannot_be_read_is_there_and_says_so() -> None:
    """It was told as `there is none of that name`."""
    (view,) = partitions(row("h100", "up", "infinite", "n/a", "0/4/0/4", "gpu:h100:8:shared", "1", "1"))
    assert (view.name, view.nodes, view.gpus) == ("h100", 4, 0)
    assert "gpu:h100:8:shared" in view.unreadable


def test_settings() -> None:
    text = b"Configuration data as of x\nClusterName             = c1\nProlog = (null)\nKillWait   = 30 sec\n"
    text += b"AuthInfo = socket=/run/m,ttl=5\n\nSlurmctld(primary) at x is UP\n"
    found = settings(text)
    assert (found["ClusterName"], found["Prolog"], found["KillWait"]) == ("c1", "", "30 sec")
    assert found["AuthInfo"] == "socket=/run/m,ttl=5"
    with pytest.raises(SlurmOutputError):
        settings(b"nothing")


def test_users() -> None:
    assert user_of("slurm(64030)") == "slurm"
    assert user_of("root") == "root"
    assert [admin_level(text) for text in (b"None\n", b"Operator\n", b"Administrator\n", b"\n", b"")] == [
        *("none", "operator", "administrator", "", "")
    ]


def test_without_slurm_there_is_no_answer(tmp_path: object) -> None:
    with pytest.raises(SlurmUnavailableError, match="no such command"):
        CommandSurvey(environment={"PATH": str(tmp_path)}).settings()


def surveyed(folder: Path, **scripts: str) -> CommandSurvey:
    """With commands of our own, which are these shell scripts."""
    for name, script in scripts.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    return CommandSurvey(environment={"PATH": f"{folder}:/usr/bin:/bin"})


ACCOUNTS = r"""
case "$*" in
*"show user name=me format=defaultaccount") echo lab ;;
*"assoc cluster=c1 account=lab user=me "*) echo 'lab||me|cpu|other|||||1||'; echo 'lab||me||normal|||||5||' ;;
*"assoc cluster=c1 account=lab user= "*) echo 'lab|top|||||7|||||' ;;
*"assoc cluster=c1 account=top user= "*) echo 'top|||||gres/gpu=6||||||' ;;
*"show qos "*) echo 'normal||||node=2|||||'; echo 'gate|||||||||01:00:00'; echo 'long||||node=9|||||' ;;
esac
"""
RULES = PartitionRules(name="gpu", max_nodes=None, max_seconds=None, seconds_of_grace=0, preempt_mode="off", qos="gate")


def test_limits_are_those_of_the_user_of_all_accounts_above_and_of_both_qos(tmp_path: Path) -> None:
    survey = surveyed(tmp_path, sacctmgr=ACCOUNTS)
    found = survey.limits("me", "", "", RULES, "c1")
    assert (found.account, found.qos, found.unseen) == ("lab", "normal", "")
    assert [(limit.whose, limit.kind, limit.most) for limit in found.found] == [
        ("user me in account lab", "jobs", 5),
        ("account lab", "jobs", 7),
        ("account top", "gpus", 6),
        ("QOS gate", "time", 3600),
        ("QOS normal", "nodes", 2),
    ]
    asked = survey.limits("me", "lab", "long", RULES, "c1")
    assert (asked.qos, asked.found[-1].whose) == ("long", "QOS long")
    of_partition = survey.limits("me", "lab", "", msgspec.structs.replace(RULES, name="cpu", qos=""), "c1")
    assert (of_partition.qos, of_partition.found[0].most) == ("other", 1), "one for this partition goes first"


def test_limits_that_cannot_be_seen_are_no_limits_that_are_not_there(tmp_path: Path) -> None:
    hidden = surveyed(tmp_path, sacctmgr=ACCOUNTS.replace("account=top", "account=hidden"))
    assert hidden.limits("me", "", "", RULES, "c1").unseen == "top"
    assert hidden.limits("stranger", "lab", "", RULES, "c1").found == ()
    for script in ("echo 'Unable to connect to slurmdbd' >&2", "echo 'Connection refused' >&2; exit 1", "kill -9 $$"):
        with pytest.raises(SlurmError, match=r"sacctmgr|slurmdbd|refused"):
            surveyed(tmp_path, sacctmgr=script).limits("me", "", "", RULES, "c1")


def test_who_may_drain_is_asked_of_accounting_where_there_is_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getuid", lambda: 1000)
    settings = {"SlurmUser": "slurm(64030)", "AccountingStorageType": "accounting_storage/slurmdbd"}
    for level, operates in (("Operator", True), ("Administrator", True), ("None", False), ("", False)):
        survey = surveyed(tmp_path, sacctmgr=f"echo {level}")
        assert survey.is_operator("me", settings) == operates
        assert not survey.is_operator("me", settings | {"AccountingStorageType": "accounting_storage/none"})
    assert survey.is_operator("slurm", settings)


def test_a_controller_that_fails_has_told_nothing(tmp_path: Path) -> None:
    output = "echo 'ClusterName = c1'"
    assert surveyed(tmp_path, scontrol=output).settings()["ClusterName"] == "c1"
    for end in ("echo 'Unable to contact slurm controller' >&2; exit 1", "kill -9 $$"):
        with pytest.raises(SlurmUnavailableError, match="scontrol"):
            surveyed(tmp_path, scontrol=f"{output}; {end}").settings()


def test_a_job_that_is_only_tried(tmp_path: Path) -> None:
    words = "sbatch: Job 7 to start at 2030-01-01T00:00:00  using 8 processors on nodes n1 in partition gpu"
    survey = surveyed(tmp_path, sbatch=f'echo "$@" > {tmp_path}/argv; echo "{words}" >&2')
    assert survey.would_start(["--nodes=2"]) == (
        "to start at 2030-01-01T00:00:00 using 8 processors on nodes n1 in partition gpu"
    )
    assert (tmp_path / "argv").read_text().split() == ["--test-only", "--wrap=true", "--nodes=2"]
    refusing = surveyed(tmp_path, sbatch="echo 'allocation failure: Invalid qos specification' >&2; exit 1")
    with pytest.raises(SlurmRefusedError, match=r"would not take a job: .*Invalid qos specification"):
        refusing.would_start([])


def test_munge_checks_what_it_has_made(tmp_path: Path) -> None:
    note = f'echo "$0 $*" >> {tmp_path}/argv'
    unmunge = f'{note}; for last; do :; done; test "$(cat "$last")" = MUNGE:x'
    survey = surveyed(tmp_path, munge=f"{note}; echo MUNGE:x", unmunge=unmunge)
    survey.munge({"AuthInfo": "socket=/run/other,ttl=5"})
    made, checked = (tmp_path / "argv").read_text().splitlines()
    assert made == f"{tmp_path}/munge -S /run/other -n"
    assert checked.startswith(f"{tmp_path}/unmunge -S /run/other -i /proc/")
    with pytest.raises(SlurmRefusedError, match="its own credential is refused: rewound"):
        surveyed(tmp_path, unmunge="echo rewound >&2; exit 1").munge({})
    with pytest.raises(SlurmUnavailableError, match="no credential can be made: no socket"):
        surveyed(tmp_path, munge="echo no socket >&2; exit 1").munge({})


def test_a_command_on_the_nodes_of_a_running_job_runs_beside_it(tmp_path: Path) -> None:
    """It takes nothing of the job's, and a node that cannot start it ends nothing on the others."""
    survey = surveyed(tmp_path, srun=f'echo "$@" > {tmp_path}/argv; echo n1 fine; exit 1')
    assert survey.on_nodes("7", ("n1", "n2"), ["look", "--here"], timeout_s=20) == "n1 fine\n"
    *options, program, argument = (tmp_path / "argv").read_text().split()
    assert (program, argument) == ("look", "--here")
    assert {"--jobid=7", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=n1,n2"} < set(options)
    assert {"--overlap", "--mem=0", "--no-kill", "--kill-on-bad-exit=0"} < set(options)
    refusing = surveyed(tmp_path, srun="echo 'Invalid job id specified' >&2; exit 1")
    with pytest.raises(SlurmError, match=r"job 7: nothing could be started on its nodes: .*Invalid job id"):
        refusing.on_nodes("7", ("n1",), ["look"], timeout_s=20)


def test_rules_of_a_partition(tmp_path: Path) -> None:
    text = "PartitionName=gpu MaxNodes=4 MaxTime=1-00:00:00 GraceTime=30 PreemptMode=REQUEUE QoS=gate State=UP"
    survey = surveyed(tmp_path, scontrol=f"echo '{text}'")
    assert survey.rules("gpu") == PartitionRules(
        name="gpu", max_nodes=4, max_seconds=86400.0, seconds_of_grace=30, preempt_mode="requeue", qos="gate"
    )
    with pytest.raises(SlurmOutputError, match="show partition cpu returned another partition"):
        survey.rules("cpu")
    unbound = surveyed(tmp_path, scontrol="echo 'PartitionName=gpu MaxNodes=UNLIMITED MaxTime=UNLIMITED QoS=N/A'")
    assert unbound.rules("gpu") == PartitionRules(
        name="gpu", max_nodes=None, max_seconds=None, seconds_of_grace=0, preempt_mode="", qos=""
    )


def test_a_real_cluster(real_cluster: Cluster) -> None:
    survey = CommandSurvey(environment=real_cluster.environment)
    found = survey.settings()
    assert found["ClusterName"] == "resihp-test"
    (view,) = survey.partitions()
    assert (view.nodes, view.gpus, view.cpus, view.up, view.default) == (4, 2, 16, True, True)
    assert survey.is_operator("root", found)
    survey.munge(found)
