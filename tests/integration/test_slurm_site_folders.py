"""A site's folders on a real cluster: two users' jobs write to them, an operator without rights reads them."""

from __future__ import annotations

import json
import os
import pwd
import time
from pathlib import Path
from typing import Any

import pytest

from resihp.record.journal import DrainAnswered, JobEnded, Reconfigured
from tests.integration.cluster import Cluster
from tests.integration.jobs import RESIHP
from tests.integration.slurm_jobs import Desk, MakeCluster, on_node
from tests.integration.test_site_hook import ALICE, BOB
from tests.integration.test_slurm_drains import AGENT

pytestmark = pytest.mark.timeout(300)

OPERATOR = "games"
"""An ordinary user, in the group that the site gives its folders."""


def with_site_file(cluster: Cluster, text: str) -> None:
    """Give all nodes an /etc/resihp.toml, which only their namespaces see."""
    script = 'set -e; mkdir "$1"; mount -t tmpfs tmpfs "$1"; mkdir "$1/upper" "$1/work"; cp /etc/hosts "$1/upper/"; '
    script += 'printf %s "$2" > "$1/upper/resihp.toml"; '
    script += 'mount -t overlay -o "lowerdir=/etc,upperdir=$1/upper,workdir=$1/work" overlay /etc'
    for node in cluster.nodes:
        cluster.run("sh", "-c", script, "sh", str(cluster.folder / f"etc-{node}"), text, node=node)


def site_folder(cluster: Cluster, name: str) -> Path:
    """As docs/administrators.md has it."""
    folder = cluster.folder / name
    folder.mkdir()
    os.chown(folder, 0, pwd.getpwnam(OPERATOR).pw_gid)
    folder.chmod(0o1773)
    return folder


def operator_says(cluster: Cluster, *argv: str, user: str = OPERATOR, check: bool = True) -> str:
    own = ("env", "--unset=XDG_STATE_HOME", "--unset=RESIHP_STATE")  # which are root's here
    done = cluster.run(*own, *argv, user=user, node="n1", check=check, timeout_s=60)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.iterdir()) for line in path.read_text().splitlines()]


def test_an_operator_sees_what_jobs_of_two_users_do(cluster: MakeCluster) -> None:
    made = cluster(nodes=3, gpus=1, isolate=True)
    audit, share = site_folder(made, "audit"), site_folder(made, "share")
    with_site_file(made, f"[site]\naudit = '{audit}'\nshare = '{share}'\n")
    alice = Desk(made, ALICE)
    own = {"RESIHP_HOME": str(made.shared / "home-bob"), "RESIHP_LOCAL": str(made.shared / "local-bob")}
    bob = Desk(made, BOB, **own)
    alice.pace(0.2)
    first = alice.sbatch_training(200, nodes=2, gpus=1, changes={" --pp 2": " --pp 1"})
    second = bob.sbatch_training(0, nodes=1, gpus=1, changes={" --pp 2": " --pp 1", "python train.py": "sleep 600"})
    alice.until_committed(first, 3, timeout_s=150)
    bob.until(lambda: len(list(share.iterdir())) == 2, second)

    listed = operator_says(made, *RESIHP, "jobs", "--all-users")
    print(listed)
    rows = json.loads(operator_says(made, *RESIHP, "jobs", "--all-users", "--json"))["rows"]
    assert {(row["job"], row["user"], row["state"], row["nodes"]) for row in rows} == {
        (first, ALICE, "running", 2),
        (second, BOB, "running", 1),
    }
    denied = operator_says(made, *RESIHP, "jobs", "--all-users", user=BOB, check=False)
    assert "cannot be listed: permission denied" in denied
    for name in (first, str(made.shared / "home" / "jobs" / first)):
        shown = operator_says(made, *RESIHP, "status", name)
        print(shown)
        assert f"user {ALICE}, 2 x 1 GPUs" in shown
        assert "not shown: health of the ranks" in shown
    for argv in (("logs", first), ("stop", str(made.shared / "home" / "jobs" / first))):
        assert "job " in operator_says(made, *RESIHP, *argv, check=False), "one line, no traceback"

    (agent,) = on_node(made, "n2", AGENT)
    agent.kill()
    alice.until(lambda: alice.of(first, Reconfigured), first)
    alice.until(lambda: alice.of(first, DrainAnswered), first)
    alice.pace(0.0)
    alice.until(lambda: alice.of(first, JobEnded), first)
    made.run("scancel", second)
    made.wait(lambda: not list(share.iterdir()), "the summaries to be removed")
    assert sorted(path.name.split("-")[0] for path in audit.iterdir()) == sorted(
        str(pwd.getpwnam(user).pw_uid) for user in (ALICE, BOB)
    )
    read_by_operator = operator_says(made, "sh", "-c", f"cat {audit}/*.jsonl")
    print(read_by_operator)
    assert {path.owner() for path in audit.iterdir()} == {ALICE, BOB}
    lines = [json.loads(line) for line in read_by_operator.splitlines()]
    assert lines == lines_of(audit)
    alices = [(line["decision"], line["outcome"], line["node"]) for line in lines if line["user"] == ALICE]
    assert alices[0] == ("node left out", "agent", "n2")
    assert {("exclusion", "decided", "n2"), ("exclusion", "done", "n2"), ("replacement", "asked", "n2")} < {*alices}
    assert ("end", "completed", None) in alices
    assert [(line["job"], line["decision"], line["outcome"]) for line in lines if line["user"] == BOB] == [
        (second, "end", "cancelled")
    ]


def test_a_site_without_its_folders_delays_no_job(cluster: MakeCluster) -> None:
    made = cluster(nodes=2, gpus=1, isolate=True)
    careless = site_folder(made, "share")
    careless.chmod(0o777)
    with_site_file(made, f"[site]\naudit = '{made.folder}/none'\nshare = '{careless}'\n")
    desk = Desk(made, ALICE)
    job = desk.sbatch_training(5, nodes=2, gpus=1)
    assert desk.wait(job) == ("COMPLETED", "0:0"), desk.output(job)
    output = desk.output(job)
    assert output.count("[site] audit") == output.count("[site] share") == 1, output
    assert "/none: no such file or directory; ask the administrator for it" in output
    assert "others may write there and it is not sticky" in output


def test_all_drains_of_a_user_count(cluster: MakeCluster) -> None:
    """What Slurm says of its nodes is enough: no job knows of the others."""
    made = cluster(nodes=4, gpus=1, isolate=True)
    audit = site_folder(made, "audit")
    with_site_file(made, f"[site]\nuser_drains_per_hour = 1\naudit = '{audit}'\n")
    made.run("sbatch", "--exclusive", "--nodes=4", "--output=/dev/null", "--wrap=sleep 600")
    made.wait(lambda: made.states()["n4"] == "allocated", "the job to run")

    def drain(node: str) -> str:
        done = made.run(*RESIHP, "node", "drain", node, "--job", "1", node="n1", check=False, timeout_s=60)
        return " ".join((done.stdout + done.stderr).split())

    assert "drained: resihp: drained by hand" in drain("n2")
    refused = drain("n3")
    print(refused)
    assert "jobs of root had 1 node drained in the last hour, and the site allows 1" in refused
    assert "drain" not in made.states()["n3"]
    made.run("scontrol", "update", "NodeName=n2", "State=UNDRAIN")
    made.wait(lambda: "drain" not in made.states()["n2"], "n2 to be undrained")
    assert "drained: resihp: drained by hand" in drain("n3")
    outcomes = [(line["node"], line["outcome"]) for line in lines_of(audit) if line["decision"] == "drain"]
    assert outcomes == [("n2", "done"), ("n3", "refused"), ("n3", "done")]
    assert time.time() - max(path.stat().st_mtime for path in audit.iterdir()) < 60


def test_a_share_of_the_partition(cluster: MakeCluster) -> None:
    made = cluster(nodes=5, gpus=1, isolate=True)
    with_site_file(made, "[site]\ndrained = '25%'\n")
    made.run("sbatch", "--exclusive", "--nodes=5", "--output=/dev/null", "--wrap=sleep 600")
    made.wait(lambda: made.states()["n5"] == "allocated", "the job to run")
    made.run(*RESIHP, "node", "drain", "n2", "--job", "1", node="n1", timeout_s=60)
    done = made.run(*RESIHP, "node", "drain", "n3", "--job", "1", node="n1", check=False, timeout_s=60)
    text = " ".join((done.stdout + done.stderr).split())
    assert "1 node of partition main is drained with our reason, and the site allows 25 % of its 5 nodes" in text, text
    assert "drain" not in made.states()["n3"]
