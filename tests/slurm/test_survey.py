"""What a survey reads off Slurm's answers; and that a real Slurm gives such answers."""

from __future__ import annotations

import pytest

from slurm.errors import SlurmOutputError, SlurmUnavailableError
from slurm.parse import settings
from slurm.survey import FIELD, RECORD, CommandSurvey, admin_level, partitions, user_of
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


def test_a_real_cluster(real_cluster: Cluster) -> None:
    survey = CommandSurvey(environment=real_cluster.environment)
    found = survey.settings()
    assert found["ClusterName"] == "resihp-test"
    (view,) = survey.partitions()
    assert (view.nodes, view.gpus, view.cpus, view.up, view.default) == (4, 2, 16, True, True)
    assert survey.is_operator("root", found)
    survey.munge(found)
