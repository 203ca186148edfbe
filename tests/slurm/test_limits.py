"""What accounting allows, read off sacctmgr's answers."""

from __future__ import annotations

import pytest

from resihp.slurm.errors import SlurmOutputError
from resihp.slurm.limits import Limit, associations, qos


def test_associations() -> None:
    output = b"lab||nobody|gpu|normal|||||5||2-01:30:00\n"
    output += b"top|root||||cpu=100,gres/gpu=6,gres/gpu:a100=4,mem=62.50G|7||node=2|5||\n"
    user, account = associations(output)
    assert (user.account, user.user, user.partition, user.qos, user.parent) == ("lab", "nobody", "gpu", "normal", "")
    assert [(limit.kind, limit.per, limit.most) for limit in user.limits] == [
        ("jobs", "user", 5),
        ("time", "job", 178200),
    ]
    assert (account.user, account.parent) == ("", "root")
    assert [(limit.kind, limit.per, limit.most) for limit in account.limits] == [
        ("cpus", "group", 100),
        ("gpus", "group", 6),
        ("jobs", "group", 7),
    ], "users' rows repeat what an account allows each of them"


def test_qos() -> None:
    found = qos(b"normal|||||||||\nsmall||||node=2|gres/gpu=8||1|3|01:00:00\n")
    assert found["normal"] == ()
    whose = "QOS small"
    assert found["small"] == (
        Limit(whose=whose, setting="maxtres=node=2", kind="nodes", per="job", most=2),
        Limit(whose=whose, setting="maxtrespu=gres/gpu=8", kind="gpus", per="user", most=8),
        Limit(whose=whose, setting="maxjobspu=1", kind="jobs", per="user", most=1),
        Limit(whose=whose, setting="maxsubmitpu=3", kind="submitted", per="user", most=3),
        Limit(whose=whose, setting="maxwall=01:00:00", kind="time", per="job", most=3600),
    )


@pytest.mark.parametrize(
    "output",
    [
        b"normal|||",
        b"small||||node=many||||||\n",
        b"small||||node||||||\n",
        b"small||||cpu=2K||||||\n",
        b"small|||||||||soon\n",
        b"small|||||||few|||\n",
    ],
)
def test_what_is_no_answer(output: bytes) -> None:
    with pytest.raises(SlurmOutputError):
        qos(output)
