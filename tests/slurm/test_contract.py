"""What `resihp.slurm.client.Slurm` promises, kept alike by the fake, by the real commands on a real cluster, and by
`Polite`.

A test that passes with the fake alone would prove nothing about Slurm: every behaviour that other tests take from
FakeSlurm is asserted here against both.
"""

from __future__ import annotations

import random
import string
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import pytest

from resihp.slurm.client import PREFIX, Gres, JobRequest, JobView, NodeChoice, NodeView, Reservation, Slurm, commented
from resihp.slurm.commands import CommandLine
from resihp.slurm.errors import SlurmOutputError, SlurmRefusedError, SlurmUnavailableError
from resihp.slurm.rate_limited import Polite
from tests.integration.cluster import Cluster
from tests.slurm.fake_slurm import FakeSlurm, expand

NODES = ("n1", "n2", "n3", "n4")
SCRIPT = "#!/bin/sh\n# é\nsleep 1000\n"
BAD_NAMES = ("", "-x", "n1,n2", "n[1-2]", "n1 n2", "n1\n", "n1;id", "ALL", "all", "a" * 300, "né", "n1\0")


class Scene(Protocol):
    """Four idle nodes of two GPUs, an operator and an ordinary user."""

    user_name: str
    folder: Path

    @property
    def operator(self) -> Slurm: ...

    @property
    def user(self) -> Slurm: ...

    def submit(self, nodes: int, *, by_operator: bool = False) -> str:
        """A batch job that runs on so many nodes."""

    def submit_with_gpus(self, gpus: int) -> str:
        """A job of the user on two nodes, which have so many together."""

    def submit_array(self) -> tuple[str, str]:
        """The user's array of two elements that run on two nodes each; the last one's number is the array's."""

    def allocate(self) -> str:
        """A job of the user without a batch script."""

    def reserve(self, name: str, begins_in_s: int, nodes: str) -> None:
        """An administrator reserves a list of nodes for an hour of maintenance."""

    def outage(self) -> None: ...


class FakeScene:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.user_name = "trainer"
        self.fake = FakeSlurm(
            NodeView(name=name, state="idle", address=f"127.0.1.{name[1]}", cpus=16, memory_mb=16000, gpus=2)
            for name in NODES
        )

    @property
    def operator(self) -> Slurm:
        self.fake.user, self.fake.operator = "root", True
        return self.fake

    @property
    def user(self) -> Slurm:
        self.fake.user, self.fake.operator = self.user_name, False
        return self.fake

    def submit(self, nodes: int, *, by_operator: bool = False) -> str:
        script = self.folder / "job.sh"
        script.write_text(SCRIPT)
        slurm = self.operator if by_operator else self.user
        job = slurm.submit(script, [f"--nodes={nodes}", "--job-name=a b|c"])
        free = [name for name, view in self.fake.node_views.items() if view.usable and view.state == "idle"]
        self.fake.start(job, *free[:nodes])
        self.fake.set_job(job, seconds_left=600.0)
        return job

    def submit_with_gpus(self, gpus: int) -> str:
        job = self.submit(2)
        first, second = self.fake.job_views[job].nodes
        self.fake.job_gpus[job] = {first: min(gpus, 2), second: gpus - min(gpus, 2)}
        return job

    def submit_array(self) -> tuple[str, str]:
        for number, nodes in enumerate((NODES[:2], NODES[2:]), start=1):
            self.fake.add_job(*nodes, id=f"7_{number}", element=f"7_{number}", user=self.user_name, script=SCRIPT)
        return "7_1", "7_2"

    def allocate(self) -> str:
        return self.fake.add_job("n1", user=self.user_name)

    def reserve(self, name: str, begins_in_s: int, nodes: str) -> None:
        begins_at = time.time() + begins_in_s
        times = {"begins_at": begins_at, "ends_at": begins_at + 3600}
        self.fake.reserved.append(Reservation(name=name, nodes=expand(nodes), flags=frozenset({"MAINT"}), **times))

    def outage(self) -> None:
        self.fake.unavailable = True


class RealScene:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.folder = cluster.shared
        self.user_name = "nobody"
        environment = cluster.environment
        self._operator = CommandLine(bin=cluster.commands(), environment=environment)
        self._user = CommandLine(bin=cluster.commands("nobody"), environment=environment)

    @property
    def operator(self) -> Slurm:
        return self._operator

    @property
    def user(self) -> Slurm:
        return self._user

    def submit(self, nodes: int, *, by_operator: bool = False) -> str:
        script = self.folder / "job.sh"
        script.write_text(SCRIPT)
        slurm = self._operator if by_operator else self._user
        options = [f"--nodes={nodes}", "--no-kill", "--output=/dev/null", "--time=10", "--job-name=a b|c"]
        job = slurm.submit(script, options)
        eventually(lambda: viewed(slurm, job).state == "running")
        return job

    def submit_with_gpus(self, gpus: int) -> str:
        script = self.folder / "job.sh"
        script.write_text(SCRIPT)
        job = self._user.submit(script, ["--nodes=2", f"--gpus={gpus}", "--output=/dev/null", "--time=10"])
        eventually(lambda: viewed(self._user, job).state == "running")
        return job

    def submit_array(self) -> tuple[str, str]:
        script = self.folder / "job.sh"
        script.write_text(SCRIPT)
        options = ["--array=1-2", "--nodes=2", "--exclusive", "--no-kill", "--output=/dev/null", "--time=10"]
        array = self._user.submit(script, options)
        elements = (f"{array}_1", f"{array}_2")
        eventually(lambda: all(viewed(self._user, element).state == "running" for element in elements))
        return elements

    def allocate(self) -> str:
        done = self.cluster.run("salloc", "--no-shell", "--nodes=1", user="nobody")
        return next(word for word in reversed(done.stderr.split()) if word.isdigit())

    def reserve(self, name: str, begins_in_s: int, nodes: str) -> None:
        asked = (f"ReservationName={name}", f"StartTime=now+{begins_in_s}", "Duration=60", "User=root", "Flags=MAINT")
        self.cluster.run("scontrol", "create", "reservation", *asked, f"Nodes={nodes}")

    def outage(self) -> None:
        self.cluster.stop_controller()

    def restore(self) -> None:
        """As it was, for the next test."""
        self.cluster.start_controller()
        # One by one: for scancel of 26.05 there is no user "nobody".
        if jobs := self.cluster.run("squeue", "-h", "-o", "%i").stdout.split():
            self.cluster.run("scancel", *jobs)
        for reservation in self._operator.reservations():
            self.cluster.run("scontrol", "delete", f"ReservationName={reservation.name}")
        for name, view in self._operator.nodes(NODES).items():
            if view.draining or view.state == "down":
                self._operator.undrain(name)
        self.cluster.wait(lambda: set(self.cluster.states().values()) == {"idle"}, "an idle cluster")


@pytest.fixture(params=["fake", "real"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    if request.param == "fake":
        yield FakeScene(tmp_path)
        return
    real = RealScene(request.getfixturevalue("real_cluster"))
    try:
        yield real
    finally:
        real.restore()


def eventually(happens: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not happens():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def viewed(slurm: Slurm, job: str) -> JobView:
    view = slurm.job(job)
    assert view is not None
    return view


def refused(change: Callable[..., object], *arguments: object, permission: bool = False) -> None:
    """Slurm says no, and whether it is because of who asks."""
    with pytest.raises(SlurmRefusedError) as refusal:
        change(*arguments)
    assert refusal.value.permission is permission, refusal.value


def node(scene: Scene, name: str) -> NodeView:
    return scene.operator.nodes([name])[name]


def test_a_cluster_has_a_name_and_a_version(scene: Scene) -> None:
    assert scene.user.version() >= (20, 11, 0)
    assert scene.user.cluster() in ("fake", "resihp-test")


def test_nodes_are_seen_as_they_are(scene: Scene) -> None:
    found = scene.user.nodes(["n2", "n1", "nowhere", "-x", "n3;id", "all"])
    assert set(found) == {"n1", "n2"}
    view = found["n2"]
    assert view == NodeView(name="n2", state="idle", address="127.0.1.2", cpus=16, memory_mb=16000, gpus=2)
    assert view.usable
    assert scene.user.nodes([]) == {}


def test_all_nodes_of_a_partition_are_seen(scene: Scene) -> None:
    scene.operator.drain("n3", "bad")
    found = scene.user.partition_nodes("main")
    assert set(found) == set(NODES)
    assert found["n2"] == NodeView(name="n2", state="idle", cpus=16, memory_mb=16000, gpus=2)
    assert found["n3"].draining
    for partition in ("", "-p", "a b", "x;id"):
        with pytest.raises(SlurmRefusedError):
            scene.user.partition_nodes(partition)


def test_an_operator_drains_and_undrains(scene: Scene) -> None:
    scene.operator.drain("n3", "resihp: rank 5; it's | dead \n é")
    view = node(scene, "n3")
    assert view.draining
    assert not view.usable
    assert view.reason == f"{PREFIX}rank 5 it s dead é"
    assert view.reason_by == "root"
    assert view.reason_at is not None
    assert abs(view.reason_at - time.time()) < 60
    assert not node(scene, "n2").draining
    scene.operator.undrain("n3")
    view = node(scene, "n3")
    assert not view.draining
    assert (view.reason, view.reason_by, view.reason_at) == ("", "", None)
    # Until slurmd has answered, Slurm says not_responding.
    eventually(lambda: node(scene, "n3").usable)


def test_all_drained_nodes_of_the_cluster_are_found(scene: Scene) -> None:
    assert scene.user.drained() == {}
    scene.operator.drain("n3", "resihp: rank 5 died")
    scene.operator.drain("n1", "disk")
    found = scene.user.drained()
    assert sorted(found) == ["n1", "n3"]
    assert found["n3"] == node(scene, "n3")


def test_reservations_are_listed_with_their_nodes(scene: Scene) -> None:
    assert list(scene.user.reservations()) == []
    scene.reserve("maint", 7200, "n[2-3]")
    scene.reserve("later", 90000, "n4")
    views = {view.name: view for view in scene.user.reservations()}
    assert {name: view.nodes for name, view in views.items()} == {"maint": ("n2", "n3"), "later": ("n4",)}
    maintenance = views["maint"]
    assert abs(maintenance.begins_at - time.time() - 7200) < 30
    assert maintenance.ends_at - maintenance.begins_at == 3600
    assert "MAINT" in maintenance.flags


def test_draining_twice_keeps_the_last_reason(scene: Scene) -> None:
    scene.operator.drain("n3", "first")
    scene.operator.drain("n3", "second")
    assert node(scene, "n3").reason == f"{PREFIX}second"


def test_jobs_run_on_on_a_drained_node(scene: Scene) -> None:
    job = scene.submit(2)
    drained = viewed(scene.user, job).nodes[1]
    scene.operator.drain(drained, "bad")
    view = node(scene, drained)
    assert view.draining
    assert view.state in ("allocated", "mixed")
    assert viewed(scene.user, job).state == "running"


def test_an_ordinary_user_may_neither_drain_nor_undrain(scene: Scene) -> None:
    refused(scene.user.drain, "n3", "bad", permission=True)
    assert not node(scene, "n3").draining
    scene.operator.drain("n3", "bad")
    refused(scene.user.undrain, "n3", permission=True)
    assert node(scene, "n3").draining


def test_undraining_what_is_not_drained_does_no_harm(scene: Scene) -> None:
    scene.operator.undrain("n3")
    assert not scene.operator.nodes(["n3"])["n3"].draining


def test_unknown_and_impossible_nodes_are_refused(scene: Scene) -> None:
    job = scene.submit(1)
    for name in ("nowhere", *BAD_NAMES):
        refused(scene.operator.drain, name, "bad")
        refused(scene.operator.undrain, name)
        refused(scene.operator.keep_nodes, job, [name])
    assert not any(view.draining for view in scene.operator.nodes(NODES).values())
    assert viewed(scene.user, job).state == "running"


def test_a_job_is_seen_from_its_submission_to_its_end(scene: Scene) -> None:
    assert scene.user.job("4000") is None
    assert scene.user.job("local-1; id") is None
    job = scene.submit(2)
    view = viewed(scene.user, job)
    assert (view.id, view.name, view.user, view.state) == (job, "a b|c", scene.user_name, "running")
    assert len(view.nodes) == 2
    assert view.batch_host == view.nodes[0]
    assert view.restarts == 0
    assert view.seconds_left is not None
    assert 590 < view.seconds_left <= 600
    assert view.active
    assert not view.preempted
    assert set(scene.user.jobs([job, "4000", "x y", job])) == {job}
    assert scene.user.jobs([]) == {}
    scene.user.cancel(job)
    eventually(lambda: viewed(scene.user, job).state == "cancelled")
    assert not viewed(scene.user, job).active
    scene.user.cancel(job)


def test_a_pending_job_holds_nothing(scene: Scene) -> None:
    script = scene.folder / "wait.sh"
    script.write_text(SCRIPT)
    job = scene.user.submit(script, ["--nodes=4", "--hold", "--output=/dev/null"])
    view = viewed(scene.user, job)
    assert (view.state, view.nodes, view.batch_host) == ("pending", (), "")
    assert view.active
    assert view.why


def test_several_jobs_in_one_question(scene: Scene) -> None:
    jobs = [scene.submit(1), scene.submit(1, by_operator=True)]
    found = scene.user.jobs(jobs)
    assert {job: view.user for job, view in found.items()} == dict(zip(jobs, [scene.user_name, "root"], strict=True))


def test_a_script_that_is_not_there_is_refused(scene: Scene) -> None:
    with pytest.raises(SlurmRefusedError, match=r"none\.sh"):
        scene.user.submit(scene.folder / "none.sh")


def test_a_script_may_be_called_like_an_option(scene: Scene) -> None:
    script = scene.folder / "--help"
    script.write_text(SCRIPT)
    job = scene.user.submit(script, ["--output=/dev/null", "--job-name=x"])
    assert viewed(scene.user, job).name == "x"


def test_a_job_gives_back_all_nodes_but_some(scene: Scene) -> None:
    job = scene.submit(3)
    first, second, third = viewed(scene.user, job).nodes
    scene.user.keep_nodes(job, [first, third])
    eventually(lambda: viewed(scene.user, job).nodes == (first, third))
    assert viewed(scene.user, job).state == "running"
    eventually(lambda: node(scene, second).state == "idle")


def test_the_batch_host_and_foreign_nodes_cannot_be_chosen(scene: Scene) -> None:
    job = scene.submit(2)
    nodes = viewed(scene.user, job).nodes
    other = next(name for name in NODES if name not in nodes)
    for keep in ([nodes[1]], [nodes[0], other], []):
        refused(scene.user.keep_nodes, job, keep)
    assert viewed(scene.user, job).nodes == nodes


def test_requeued_jobs_wait_for_their_next_start(scene: Scene) -> None:
    job = scene.submit(2)
    scene.user.requeue(job)
    eventually(lambda: viewed(scene.user, job).state == "pending")
    view = viewed(scene.user, job)
    assert (view.restarts, view.nodes) == (1, ())
    assert view.active


def test_asking_for_a_job_again_that_waits_already_changes_nothing(scene: Scene) -> None:
    job = scene.submit(2)
    scene.user.requeue(job)
    scene.user.requeue(job)
    eventually(lambda: viewed(scene.user, job).state == "pending")
    scene.user.requeue(job)
    assert viewed(scene.user, job).restarts == 1


def test_a_requeued_job_is_kept_from_some_nodes(scene: Scene) -> None:
    job = scene.submit(2)
    assert scene.user.node_choice(job) == NodeChoice(partition="main")
    refused(scene.user.exclude_nodes, job, ["n1"])
    scene.user.requeue(job)
    scene.user.exclude_nodes(job, ["n2", "n3"])  # at once: its processes may still be ending
    assert scene.user.node_choice(job) == NodeChoice(partition="main", excluded=("n2", "n3"))
    scene.user.exclude_nodes(job, ["n1"])
    assert scene.user.node_choice(job).excluded == ("n1",)
    for name in ("nowhere", *BAD_NAMES):
        refused(scene.user.exclude_nodes, job, [name])
    refused(scene.user.exclude_nodes, "4000", ["n1"])
    refused(scene.user.node_choice, "4000")
    others = scene.submit(2, by_operator=True)
    scene.operator.requeue(others)
    refused(scene.user.exclude_nodes, others, ["n1"], permission=True)


def test_nodes_that_a_job_chooses_by_name_are_told(scene: Scene) -> None:
    script = scene.folder / "named.sh"
    script.write_text(SCRIPT)
    options = ["--nodes=2", "--hold", "--output=/dev/null"]
    job = scene.user.submit(script, [*options, "--nodelist=n[1-2]", "--exclude=n3,n4", "--contiguous"])
    named = NodeChoice(partition="main", requested=("n1", "n2"), excluded=("n3", "n4"), contiguous=True)
    assert scene.user.node_choice(job) == named


def test_jobs_of_others_are_refused(scene: Scene) -> None:
    job = scene.submit(2, by_operator=True)
    first = viewed(scene.user, job).nodes[0]
    refused(scene.user.keep_nodes, job, [first], permission=True)
    refused(scene.user.requeue, job, permission=True)
    refused(scene.user.cancel, job, permission=True)
    refused(scene.user.batch_script, job, permission=True)
    assert viewed(scene.user, job).state == "running"


def test_unknown_and_impossible_jobs_are_refused(scene: Scene) -> None:
    for job in ("4000", "-1", "", "1 2", "x", "1;id", "1,2"):
        refused(scene.user.keep_nodes, job, ["n1"])
        refused(scene.user.requeue, job)
        refused(scene.user.batch_script, job)
        if job != "4000":
            refused(scene.user.cancel, job)


def test_a_jobs_comment_is_its_owners_to_change_while_it_runs(scene: Scene) -> None:
    job = scene.submit(1)
    assert viewed(scene.user, job).comment == ""
    theirs = "my 'own' | \"x\" é; $HOME `id` =3"
    scene.user.comment(job, theirs)
    assert viewed(scene.user, job).comment == theirs
    for iteration in (5, 6):
        scene.user.comment(job, commented(viewed(scene.user, job).comment, f"iteration {iteration}, loss 2.5\nx"))
    assert viewed(scene.user, job).comment == f"{theirs} | {PREFIX}iteration 6, loss 2.5 x"
    others = scene.submit(1, by_operator=True)
    refused(scene.user.comment, others, "x", permission=True)
    for nobodys in ("4000", "", "-1", "1;id"):
        refused(scene.user.comment, nobodys, "x")
    scene.user.cancel(job)
    refused(scene.user.comment, job, "too late")


def test_cancelling_what_is_not_there_is_no_error(scene: Scene) -> None:
    scene.user.cancel("4000")


def test_what_a_job_asked_for_is_told(scene: Scene) -> None:
    def asked(*options: str) -> JobRequest:
        script = scene.folder / "ask.sh"
        script.write_text(SCRIPT)
        return scene.user.request(scene.user.submit(script, ["--hold", "--output=/dev/null", *options]))

    assert asked() == JobRequest(partition="main")
    whole = ("--exclusive", "--wckey=run", "--account=project", "--network=Instances=2", "--mem=4000")
    assert asked(*whole) == JobRequest(
        partition="main", exclusive="node", wckey="run", account="project", network="Instances=2", memory_mb=4000
    )
    assert asked("--gpus-per-node=2", "--exclusive=user").gres == (Gres("gpu", "", 2),)
    assert asked("--exclusive=user").exclusive == "user"
    assert asked("--oversubscribe") == JobRequest(partition="main", oversubscribe=True)
    assert asked("--gpus-per-node=1", "--mem-per-gpu=500").memory_per_gpu_mb == 500
    refused(scene.user.request, "4000")
    refused(scene.user.request, "1;id")


def test_a_batch_script_comes_back_as_it_was(scene: Scene) -> None:
    assert scene.user.batch_script(scene.submit(1)) == SCRIPT


def test_an_allocation_has_no_batch_script(scene: Scene) -> None:
    job = scene.allocate()
    refused(scene.user.batch_script, job)


def test_node_lists(scene: Scene) -> None:
    assert scene.user.expand("n[08-11,3],gpu-a7,x.y[1]") == ("n08", "n09", "n10", "n11", "n3", "gpu-a7", "x.y1")
    assert scene.user.expand("n[08-09,3], gpu-a7") == ("n08", "n09", "n3", "gpu-a7")


def test_what_is_no_node_list_is_an_error(scene: Scene) -> None:
    for text in ("", "n[1-", "n[3-1]", "n[]", "[", "-n", "n1 n2", "$(id)", "n[1-99999999]", "n[a-c]"):
        with pytest.raises(SlurmOutputError):
            scene.user.expand(text)


def test_an_outage_is_no_answer(scene: Scene) -> None:
    job = scene.submit(1)
    script = scene.folder / "job.sh"
    scene.outage()
    questions: list[Callable[[], object]] = [
        lambda: scene.user.nodes(["n1"]),
        lambda: scene.user.job(job),
        lambda: scene.user.jobs([job, "4000"]),
        scene.user.cluster,
        lambda: scene.user.request(job),
        lambda: scene.user.batch_script(job),
        lambda: scene.operator.drain("n1", "bad"),
        lambda: scene.operator.undrain("n1"),
        lambda: scene.user.keep_nodes(job, ["n1"]),
        lambda: scene.user.requeue(job),
        lambda: scene.user.cancel(job),
        lambda: scene.user.submit(script),
    ]
    # All at once: each takes the real commands some seconds.
    with ThreadPoolExecutor(len(questions)) as threads:
        for asked in [threads.submit(question) for question in questions]:
            assert isinstance(asked.exception(), SlurmUnavailableError), asked
    assert scene.user.expand("n[1-2]") == ("n1", "n2")
    assert scene.user.version() >= (20, 11, 0)


def test_polite_keeps_the_same_promises(scene: Scene) -> None:
    job = scene.submit(2)
    slurm: Slurm = Polite(scene.user)
    view = viewed(slurm, job)
    assert slurm.expand("n[1-2]") == ("n1", "n2")
    assert set(slurm.nodes([*NODES, "nowhere"])) == set(NODES)
    assert slurm.cluster() == scene.user.cluster()
    assert slurm.batch_script(job) == SCRIPT
    assert slurm.request(job) == scene.user.request(job)
    slurm.keep_nodes(job, view.nodes[:1])
    eventually(lambda: viewed(scene.user, job).nodes == view.nodes[:1])
    with pytest.raises(SlurmRefusedError):
        slurm.drain("n1", "bad")
    slurm.cancel(job)
    assert not viewed(slurm, job).active or viewed(slurm, job).state == "completing"


def test_the_fake_reads_node_lists_as_slurm_does(real_cluster: Cluster) -> None:
    """Lists made by chance, some of them wrong: both read the same, or both refuse."""
    chance = random.Random(4)
    slurm = CommandLine(bin=real_cluster.commands(), environment=real_cluster.environment)
    for _ in range(60):
        parts = []
        for _ in range(chance.randint(1, 4)):
            prefix = "".join(chance.choices(string.ascii_lowercase + "-", k=chance.randint(1, 3))) + "x"
            width = chance.randint(1, 4)
            first = chance.randint(0, 10**width - 1)
            last = first + chance.choice([0, 1, 12])
            text = chance.choice(["", f"{first:0{width}}", f"[{first:0{width}}-{last:0{width}},7]", f"[{first}]"])
            parts.append(prefix.lstrip("-") + text)
        nodelist = ",".join(parts)
        assert expand(nodelist) == slurm.expand(nodelist), nodelist


def test_an_element_of_an_array_is_asked_about_and_changed_alone(scene: Scene) -> None:
    slurm = scene.user
    first, last = scene.submit_array()
    views = slurm.jobs([first, last])
    assert {view.id for view in views.values()} == {first, last}
    assert (views[last].element, views[first].element) == (last, first)
    assert slurm.batch_script(last) == SCRIPT
    slurm.keep_nodes(last, [views[last].batch_host])
    assert viewed(slurm, last).nodes == (views[last].batch_host,)
    slurm.requeue(last)
    slurm.requeue(last)
    eventually(lambda: viewed(slurm, last).state == "pending")
    slurm.cancel(last)
    eventually(lambda: viewed(slurm, last).state == "cancelled")
    now = viewed(slurm, first)
    assert (now.state, now.restarts, now.nodes) == ("running", 0, views[first].nodes)


def test_when_a_job_was_submitted(scene: Scene) -> None:
    before = int(time.time())
    view = viewed(scene.user, scene.submit(1))
    assert view.submitted_at is not None
    assert before <= view.submitted_at <= time.time()


def test_gpus_of_each_node(scene: Scene) -> None:
    job = scene.submit_with_gpus(3)
    given = scene.user.gpus(job)
    assert sorted(given.values()) == [1, 2]
    assert set(given) == set(viewed(scene.user, job).nodes)
    assert scene.user.gpus(scene.submit(1)) == {}
    refused(scene.user.gpus, "99999")
