"""The drain ladder on a real cluster: users without rights, the spool, the site hook run by root, and forged requests.

What files and answers of Slurm can look like is in tests/slurm/test_site_hook.py; here it is that the real slurmctld
says of jobs, nodes and users what the hook takes it to say.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resihp import slurm
from resihp.slurm.client import PREFIX
from resihp.slurm.commands import CommandLine
from resihp.slurm.drains.drain import Step, climb, descend
from resihp.slurm.drains.exclusions import Exclusions
from resihp.slurm.drains.spool import put
from tests.integration.cluster import Cluster, requires_slurm
from tests.integration.test_cluster import hold

HOOK = Path(slurm.__file__).with_name("site") / "hook.py"
ALICE = "nobody"
BOB = next((entry.pw_name for entry in pwd.getpwall() if 0 < entry.pw_uid < 1000), "daemon")


def uid(user: str) -> int:
    return pwd.getpwnam(user).pw_uid


def as_user(user: str, act: Callable[[], list[Step]]) -> list[Step]:
    """What `act` returns when that user runs it, in a process of theirs."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(pwd.getpwnam(user).pw_gid)
            os.setuid(uid(user))
            os.write(writer, msgspec.json.encode(act()))
            status = 0
        except BaseException:  # noqa: BLE001 - this process ends here, whatever it is
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        content = answer.read()
    assert os.waitpid(child, 0)[1] == 0
    return msgspec.json.decode(content, type=list[Step])


class Site:
    """A cluster with the hook installed the way the README says; `resihp.slurm.drains.drain` used as a job's supervisor
    does."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.spool = cluster.folder / "requests"
        self.spool.mkdir()
        self.spool.chmod(0o1733)

    def hook(self, *options: str) -> str:
        """What cron runs."""
        state = self.cluster.folder / "hook-state"
        argv = [HOOK, "--spool", self.spool, "--state", state, "--conf", self.cluster.configuration]
        done = subprocess.run(
            [sys.executable, "-I", *map(str, argv), *(options or ("--all",))],
            env={"PATH": self.cluster.environment["PATH"]} if self.cluster.release else {},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0
        assert "Traceback" not in done.stderr
        return done.stderr

    def climb(self, user: str, node: str, nodes: tuple[str, ...], job: str = "1") -> dict[str, Step]:
        steps = as_user(
            user,
            lambda: list(
                climb(
                    CommandLine(environment=self.cluster.environment),
                    node,
                    "rank 3 died of Xid 79",
                    job_id=job,
                    allowed_nodes=nodes,
                    batch_host="n1",
                    spool=self.spool,
                    exclusions=Exclusions(self.cluster.shared / f"home-{user}", "test"),
                    now=time.time(),
                )
            ),
        )
        return {step.step: step for step in steps}

    def descend(self, user: str, node: str) -> dict[str, Step]:
        steps = as_user(
            user,
            lambda: list(
                descend(
                    CommandLine(environment=self.cluster.environment),
                    node,
                    job_id="1",
                    spool=self.spool,
                    exclusions=Exclusions(self.cluster.shared / f"home-{user}", "test"),
                    now=time.time(),
                    user=user,
                )
            ),
        )
        return {step.step: step for step in steps}

    def ask(self, user: str, kind: Any, node: str) -> Path:
        """A request straight into the spool, whatever the ladder would say of it."""
        path = put(self.spool, kind, node, job_id="1", reason="please", now=time.time())
        os.chown(path, uid(user), uid(user))
        return path

    def hold_on(self, user: str, nodes: str) -> None:
        """A job of the user's on these nodes, which it shares if they are taken."""
        argv = ["sbatch", "--parsable", "-w", nodes, "-N", str(nodes.count(",") + 1), "--output=/dev/null"]
        job = self.cluster.run(*argv, "--wrap", "sleep 1000", user=user).stdout.strip()
        shown = ["squeue", "-h", "-j", job, "-o", "%T"]
        self.cluster.wait(lambda: self.cluster.run(*shown).stdout.strip() == "RUNNING", f"job {job} to run")

    def reason(self, node: str) -> str:
        done = self.cluster.run("sinfo", "-h", "-N", "-n", node, "-o", "%E")
        return done.stdout.strip()

    def state(self, node: str) -> str:
        return self.cluster.states()[node]


@pytest.fixture
def site(cluster: Callable[..., Cluster]) -> Site:
    return Site(cluster(nodes=5))


@pytest.mark.every_slurm
def test_an_ordinary_users_drain_is_asked_for_and_applied(site: Site) -> None:
    hold(site.cluster, 3, ALICE)
    steps = site.climb(ALICE, "n3", ("n1", "n2", "n3"))
    assert {name: step.outcome for name, step in steps.items()} == {
        "slurm": "refused",
        "spool": "done",
        "exclusion": "done",
    }
    assert "Invalid user id" in steps["slurm"].text
    assert site.state("n3") in ("mixed", "allocated")
    assert f"drained node n3: {PREFIX}rank 3 died of Xid 79" in site.hook()
    assert site.state("n3") == "draining"
    assert site.reason("n3") == f"{PREFIX}rank 3 died of Xid 79 (asked by uid {uid(ALICE)}, job 1)"
    assert os.listdir(site.spool) == []

    steps = site.descend(BOB, "n3")  # nor can others undo it
    assert steps["slurm"].outcome == "refused"
    assert "spool" not in steps
    steps = site.descend(ALICE, "n3")
    assert steps["spool"].outcome == "done"
    assert "undrained node n3" in site.hook()
    site.cluster.wait_state("n3", "mixed", "allocated")  # after slurmd has registered anew
    assert site.reason("n3") == "none"


def test_nodes_that_were_given_back_or_have_died_are_still_drained(site: Site) -> None:
    job = hold(site.cluster, 4, ALICE)
    site.cluster.run("scontrol", "update", f"JobId={job}", "NodeList=n1,n2,n3", user=ALICE)
    site.cluster.wait_state("n4", "idle")
    site.climb(ALICE, "n4", ("n1", "n2", "n3", "n4"))
    site.hook()
    assert site.state("n4") == "drained"

    site.cluster.kill_node("n3")
    site.cluster.wait_state("n3", "down*")
    assert site.reason("n3") == "Not responding"
    site.climb(ALICE, "n3", ("n1", "n2", "n3"))
    said = site.hook()
    assert "drained node n3" in said, said
    assert site.state("n3") == "drained*"
    site.cluster.start_node("n3")
    site.cluster.wait_state("n3", "drained")
    assert site.reason("n3").startswith(PREFIX)


def test_a_job_that_has_ended_a_moment_ago(site: Site) -> None:
    job = hold(site.cluster, 2, ALICE)
    site.cluster.run("scancel", job)
    site.cluster.wait_state("n2", "idle")
    site.climb(ALICE, "n2", ("n1", "n2"))
    site.hook()
    assert site.state("n2") == "drained"


def test_neither_shared_nodes_nor_those_of_others_are_drained(site: Site) -> None:
    site.hold_on(ALICE, "n1,n2")
    site.hold_on(BOB, "n2,n3")
    shared = site.ask(BOB, "drain", "n2")
    said = site.hook()
    assert f"refused {shared.name}" in said
    assert "other users' jobs were on it together with" in said
    for node in ("n1", "n5"):
        site.ask(BOB, "drain", node)
        assert "no job of this user holds it" in site.hook()
    assert site.state("n1") == "mixed"
    assert set(site.cluster.states().values()) <= {"idle", "mixed"}


def test_another_users_node_a_link_and_ten_thousand_files(site: Site) -> None:
    hold(site.cluster, 3, ALICE)
    site.ask(BOB, "drain", "n2")
    said = site.hook()
    assert "refused 1 more (no requests, too many, or users without nodes)" in said
    original = site.ask(ALICE, "drain", "n2")
    aside = site.cluster.folder / "aside"
    original.rename(aside)
    link = site.spool / original.name
    link.symlink_to(aside)
    os.lchown(link, uid(BOB), uid(BOB))
    os.link(aside, site.spool / ("f" * 32 + ".json"))
    for number in range(10_000):
        (site.spool / f"{number:032x}.json").touch()
        os.chown(site.spool / f"{number:032x}.json", uid(BOB), uid(BOB))
    site.ask(ALICE, "drain", "n3")
    began = time.monotonic()
    said = site.hook()
    assert time.monotonic() - began < 30
    assert "has 2 links" in said
    assert site.state("n2") in ("mixed", "allocated")
    assert site.state("n3") == "draining"
    assert os.listdir(site.spool) == []


def test_reasons_of_others_stand(site: Site) -> None:
    hold(site.cluster, 3, ALICE)
    site.cluster.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=bad disk | ticket 17")
    steps = site.climb(ALICE, "n2", ("n1", "n2", "n3"))
    assert steps["slurm"].outcome == "done"
    assert "bad disk" in steps["slurm"].text
    assert "spool" not in steps
    site.ask(ALICE, "drain", "n2")
    site.ask(ALICE, "undrain", "n2")
    assert site.hook().count("left alone") == 2
    assert site.state("n2") == "draining"
    assert site.reason("n2") == "bad disk | ticket 17"
    assert site.descend(ALICE, "n2")["slurm"].outcome == "refused"


def test_an_operators_own_resihp_drains_by_itself(site: Site) -> None:
    slurm = CommandLine(environment=site.cluster.environment)
    exclusions = Exclusions(site.cluster.folder / "home", slurm.cluster())
    given: dict[str, Any] = {"job_id": "1", "spool": site.spool, "exclusions": exclusions, "now": time.time()}
    steps = list(climb(slurm, "n3", "slow", allowed_nodes=("n3",), batch_host="n1", **given))
    assert [(step.step, step.outcome) for step in steps] == [("slurm", "done"), ("exclusion", "done")]
    assert site.reason("n3") == f"{PREFIX}slow"
    site.ask(ALICE, "undrain", "n3")
    assert "refused" in site.hook()
    assert site.state("n3") == "drained"
    assert [step.outcome for step in descend(slurm, "n3", user="root", uid=0, **given)] == ["done", "done"]
    site.cluster.wait_state("n3", "idle")


@pytest.mark.every_slurm
def test_by_hand(site: Site) -> None:
    """`resihp node` with the rights of an operator, on a job of one's own."""
    script = site.cluster.shared / "hold.sh"
    script.write_text("#!/bin/sh\nsleep 1000\n")
    job = site.cluster.run("sbatch", "--parsable", "-N2", "--output=/dev/null", str(script)).stdout.strip()
    site.cluster.wait(lambda: site.state("n2") == "mixed", "the job to run")

    def node(*argv: str) -> list[dict[str, Any]]:
        home = f"RESIHP_HOME={site.cluster.folder}/home"
        command = [sys.executable, "-m", "resihp", "node", *argv, "--json"]
        done = site.cluster.run("env", home, f"PYTHONPATH={HOOK.parents[2]}", *command)
        return list(msgspec.json.decode(done.stdout)["rows"])

    node("drain", "n2", "--job", job, "--reason", "Xid 79")
    assert site.reason("n2") == f"{PREFIX}Xid 79"
    (row,) = node("list")
    assert (row["node"], row["drained_by_us"]) == ("n2", True)
    assert row["state"].endswith("+drain")
    node("undrain", "n2")
    site.cluster.wait_state("n2", "mixed")
    assert site.reason("n2") == "none"
    assert node("list") == []

    # An operator's own undrain may leave our reason there: it counts for nothing.
    node("drain", "n2", "--job", job, "--reason", "Xid 79")
    site.cluster.run("scontrol", "update", "NodeName=n2", "State=UNDRAIN")
    site.cluster.wait_state("n2", "mixed")
    assert [row["drained_by_us"] for row in node("list")] == [False]
    node("drain", "n2", "--job", job, "--reason", "Xid 94")
    assert (site.state("n2"), site.reason("n2")) == ("draining", f"{PREFIX}Xid 94")


def test_as_health_check_each_node_answers_for_itself(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """The script that the README shows, run by slurmd: no PATH, no SLURM_CONF, no arguments."""
    requires_slurm(isolate=True)
    script = tmp_path / "health-check"
    folder = tmp_path / "site"
    folder.mkdir()
    script.write_text(
        f"#!/bin/sh\nexec {sys.executable} -I {HOOK} --spool {folder}/requests --state {folder}/state-$SLURMD_NODENAME"
        f" --conf $(cat {folder}/conf) 2>>{folder}/log-$SLURMD_NODENAME\n"
    )
    script.chmod(0o755)
    made = cluster(nodes=3, isolate=True, health_check=script)
    (folder / "conf").write_text(str(made.configuration))
    spool = folder / "requests"
    spool.mkdir()
    spool.chmod(0o1733)
    hold(made, 3, ALICE)
    path = put(spool, "drain", "n3", job_id="1", reason="rank 3 died", now=time.time())
    os.chown(path, uid(ALICE), uid(ALICE))
    made.wait_state("n3", "draining", timeout_s=20)
    made.wait(lambda: not path.exists(), "the request to be removed")
    log = (folder / "log-n3").read_text()
    assert "drained node n3" in log
    for node in ("n1", "n2"):
        assert "drained node" not in (folder / f"log-{node}").read_text()


def test_node_lists_are_read_as_slurm_reads_them(site: Site) -> None:
    spec = importlib.util.spec_from_file_location("hook_on_a_cluster", HOOK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    for nodes in ("n1", "n[1-3]", "n[08-11,20],login", "r[1-2]n[1-2]", "n[001-003],m[9-11]"):
        found = site.cluster.run("scontrol", "show", "hostnames", nodes).stdout.split()
        assert list(module.expanded(nodes)) == found
