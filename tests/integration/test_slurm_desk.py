"""The supervisor's dealings with a real Slurm: a node drained and given back, another one asked for, why a job ends."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import psutil
import pytest

from resihp.controller import interface as api
from resihp.slurm import replacement
from resihp.slurm.commands import CommandLine
from resihp.slurm.rate_limited import JOBS_FRESH_S, Polite
from resihp.slurm.replacement import ReplacementJob
from resihp.slurm.survey import CommandSurvey
from resihp.wrapper.config.run_spec import Program, SlurmRequest
from resihp.wrapper.slurm_tasks import desk as slurm_desk
from resihp.wrapper.slurm_tasks import nodes, own_job, replacements
from resihp.wrapper.slurm_tasks.desk import SlurmDesk
from resihp.wrapper.slurm_tasks.node_checks import in_step
from tests.integration.cluster import Cluster
from tests.wrapper.run_requests import run_request

MakeCluster = Callable[..., Cluster]

HOLD = "#!/bin/sh\ntrap : TERM\nwhile true; do sleep 0.2; done\n"
HIGH = "Nodes=ALL PriorityTier=10 MaxTime=INFINITE"
LOW = "Nodes=ALL Default=YES PriorityTier=1 PreemptMode=CANCEL GraceTime=20 MaxTime=INFINITE"


class Desk:
    """A desk for a real job on the first nodes of a cluster. Replacements sleep instead of joining."""

    def __init__(
        self,
        cluster: Cluster,
        nodes: int,
        options: tuple[str, ...] = (),
        jobs_fresh_s: float = JOBS_FRESH_S,
        **asked: Any,
    ) -> None:
        """`asked`: more of what the run's configuration says about Slurm."""
        self.cluster = cluster
        script = cluster.shared / "hold.sh"
        script.write_text(HOLD)
        given = ["--parsable", "--no-kill", f"--nodes={nodes}", "--exclusive", "--output=/dev/null", *options]
        self.job = cluster.run("sbatch", *given, str(script)).stdout.strip()
        self.slurm = Polite(CommandLine(environment=cluster.environment), jobs_fresh_s=jobs_fresh_s)
        cluster.wait(lambda: self.view().state == "running", f"job {self.job} to run")
        self.names = self.view().nodes
        request = run_request(
            self.job,
            cluster.shared / "home" / "jobs" / self.job,
            nodes=nodes,
            gpus=2,
            settings={"node_names": self.names},
            program=Program(kind="script", argv=("train.py",), interpreter="python"),
            command=("train.py",),
            cwd=str(cluster.shared),
            slurm=SlurmRequest(
                job_id=self.job,
                cluster="resihp-test",
                batch_node=self.names[0],
                host_names={},
                cpus=None,
                gpus=2,
                **asked,
            ),
        )
        assert request.slurm is not None
        ask_node = in_step(request.slurm, CommandSurvey(environment=cluster.environment))
        self.events: list[api.AnyEvent] = []
        self.desk = SlurmDesk(request, self.events.append, self.slurm, submit=self.submit, ask_node=ask_node)
        self.loop = asyncio.Runner()

    def view(self, job: str | None = None) -> Any:
        return self.slurm.job(job or self.job, fresh_s=0.0)

    def submit(self, wanted: ReplacementJob, environment: Mapping[str, str]) -> str:
        sleeps = msgspec.structs.replace(wanted, command=("/bin/sleep", "1000"))
        return replacement.submit(sleeps, environment={**self.cluster.environment, "SLURM_JOB_ID": self.job})

    def do(self, *actions: Any, until: Callable[[], Any], timeout_s: float = 30) -> Any:
        """Carry these out, and go on until something is so."""

        async def play() -> Any:
            running = asyncio.create_task(self.desk.run())
            for action in actions:
                self.desk.carry_out(action)
            deadline = time.monotonic() + timeout_s
            while not (found := until()):
                assert time.monotonic() < deadline, f"waited {timeout_s} s in vain; so far {self.events}"
                await asyncio.sleep(0.02)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            return found

        return self.loop.run(play())

    def close(self) -> None:
        self.loop.run(self.desk.close())
        self.loop.close()

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def state_of(self, number: int) -> list[str]:
        return [event.state for event in self.of(api.ReplacementNews) if event.replacement == number]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at everything more often than would be polite."""
    for module, name in (
        (slurm_desk, "WATCH_PAUSES_S"),
        (nodes, "WATCH_PAUSES_S"),
        (replacements, "REQUEST_PAUSES_S"),
        (replacements, "RUNNING_PAUSES_S"),
    ):
        monkeypatch.setattr(module, name, (0.5,) * 40)


@pytest.mark.every_slurm
def test_a_bad_node_is_drained_given_back_and_replaced(cluster: MakeCluster, impatient: None) -> None:
    made = cluster(nodes=5, gpus=2)
    desk = Desk(made, 3)
    bad = desk.names[2]
    drained = api.DrainNode(drain=1, node=bad, reason="job lost rank 4: silent for 6.0 s; rm -rf 'x'")
    desk.do(drained, until=lambda: len(desk.of(api.DrainStep)) == 2)
    assert [(step.step, step.outcome) for step in desk.of(api.DrainStep)] == [("slurm", "done"), ("exclusion", "done")]
    seen = desk.slurm.nodes([bad], fresh_s=0.0)[bad]
    assert (seen.draining, seen.reason) == (True, "resihp: job lost rank 4: silent for 6.0 s rm -rf x")

    desk.do(api.ReleaseNode(node=bad, keep=desk.names[:2]), until=lambda: desk.of(api.ReleaseAnswered))
    assert [event.outcome for event in desk.of(api.ReleaseAnswered)] == ["done"]
    assert desk.view().nodes == desk.names[:2]
    made.wait_state(bad, "drained")

    ask = api.AskReplacement(replacement=1, exclude=desk.names)
    desk.do(ask, until=lambda: "running" in desk.state_of(1))
    news = desk.of(api.ReplacementNews)[-1]
    assert news.node not in desk.names
    other = desk.view(news.slurm_job)
    assert (other.name, other.nodes) == (f"resihp-{desk.job}-r1", (news.node,))
    assert desk.view().seconds_left - other.seconds_left < 120

    again = api.AskReplacement(replacement=2, exclude=(*desk.names, news.node))
    desk.do(again, until=lambda: "running" in desk.state_of(2))
    desk.do(
        api.CancelReplacement(replacement=1, reason="done"),
        until=lambda: desk.view(news.slurm_job).state == "cancelled",
    )
    desk.close()
    left = desk.of(api.ReplacementNews)[-1].slurm_job
    made.wait(lambda: desk.view(left).state == "cancelled", "the other one to be cancelled, too")
    assert desk.view().state == "running"


@pytest.mark.every_slurm
def test_the_sites_check_is_asked_on_the_node_before_it_is_drained(cluster: MakeCluster) -> None:
    """n2 is healthy, the check hangs on n3, n4 is dead: only the healthy one is spared."""
    made = cluster(nodes=4, gpus=2)
    check = made.shared / "check"
    check.write_text(
        "#!/bin/sh\n[ $SLURMD_NODENAME != n2 ] || { echo all $SLURM_JOB_ID fine; exit 0; }\nsleep 4321 & sleep 4321\n"
    )
    check.chmod(0o755)
    desk = Desk(made, 4, health_command=(str(check),), health_timeout_s=2.0)
    made.kill_node("n4")
    orders = [
        api.DrainNode(drain=number, node=f"n{number}", reason="silent for 6.0 s", grounds="died again")
        for number in (2, 3, 4)
    ]
    desk.do(*orders, until=lambda: len(desk.of(api.DrainStep)) == 6, timeout_s=60)
    steps = {(step.node, step.step): (step.outcome, step.text) for step in desk.of(api.DrainStep)}
    for step in steps.items():
        print(step)
    spared = f"node n2: not drained: the site's health check passes there (exit status 0: all {desk.job} fine)"
    assert steps["n2", "slurm"] == ("refused", spared)
    assert steps["n3", "slurm"][0] == "done"
    assert "gave no answer: not finished within 2 s, killed" in steps["n3", "slurm"][1]
    assert steps["n4", "slurm"][0] == "done"
    assert "gave no answer" in steps["n4", "slurm"][1]
    views = desk.slurm.nodes(["n2", "n3", "n4"], fresh_s=0.0)
    assert [views[name].draining for name in ("n2", "n3", "n4")] == [False, True, True]
    assert "4321" not in " ".join(" ".join(psutil.Process(pid).cmdline()) for pid in made.pids("n3"))
    desk.close()


def test_a_request_waits_for_a_node_and_a_dead_node_is_seen(cluster: MakeCluster, impatient: None) -> None:
    made = cluster(nodes=3, gpus=2)
    other = made.run("sbatch", "--parsable", "-N1", "--exclusive", "--output=/dev/null", "--wrap=sleep 1000")
    desk = Desk(made, 2)
    bad = desk.names[1]
    made.kill_node(bad)
    desk.do(
        api.WatchNode(node=bad),
        api.AskReplacement(replacement=1, exclude=desk.names),
        until=lambda: any(e.node == bad and e.state.startswith("down") for e in desk.of(api.SlurmSees)),
        timeout_s=60,
    )
    assert set(desk.state_of(1)) == {"pending"}
    asked = desk.of(api.ReplacementNews)[-1].slurm_job
    for change, told in (("hold", "JobHeldAdmin"), ("release", "Resources")):
        made.run("scontrol", change, asked)
        desk.do(until=lambda told=told: told in {event.text for event in desk.of(api.ReplacementNews)})
    assert len(desk.state_of(1)) == len({event.text for event in desk.of(api.ReplacementNews)}), "each reason once"
    made.run("scancel", other.stdout.strip())
    desk.do(until=lambda: "running" in desk.state_of(1))
    # Slurm has taken the dead node out of the job by itself.
    desk.do(api.ReleaseNode(node=bad, keep=desk.names[:1]), until=lambda: desk.of(api.ReleaseAnswered))
    assert [event.outcome for event in desk.of(api.ReleaseAnswered)] == ["done"]
    made.run("scancel", desk.of(api.ReplacementNews)[-1].slurm_job)
    desk.do(until=lambda: "withdrawn" in desk.state_of(1))
    desk.close()


def test_nothing_comes_of_what_slurm_refuses_or_does_not_answer(cluster: MakeCluster) -> None:
    made = cluster(nodes=2, gpus=2)
    desk = Desk(made, 2)
    desk.do(api.AskReplacement(replacement=1, exclude=desk.names), until=lambda: desk.state_of(1))
    assert desk.state_of(1) == ["refused"], "no node of the cluster is left"
    made.stop_controller()
    asked = (
        api.ReleaseNode(node=desk.names[1], keep=desk.names[:1]),
        api.DrainNode(drain=1, node=desk.names[1], reason="silent"),
        api.AskWhy(),
    )
    desk.do(*asked, until=lambda: len(desk.events) >= 6, timeout_s=60)
    assert [event.outcome for event in desk.of(api.ReleaseAnswered)] == ["unknown"]
    assert [(e.step, e.outcome) for e in desk.of(api.DrainStep)] == [("slurm", "unknown"), ("exclusion", "done")]
    assert [event.meaning for event in desk.of(api.StopMeaning)] == ["unknown"]
    made.start_controller()
    desk.close()


@pytest.mark.every_slurm
def test_a_time_limit_that_is_changed_is_seen(cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself after a while, and at once where something hangs on it."""
    made = cluster(nodes=1)
    desk = Desk(made, 1, ("--time=02:00:00",), jobs_fresh_s=1.0)
    monkeypatch.setattr(own_job, "LIMIT_EVERY_S", 1.0)
    (first,) = desk.do(until=lambda: desk.of(api.TimeLeft))
    assert 7000 < first.seconds <= 7200
    made.run("scontrol", "update", f"JobId={desk.job}", "TimeLimit=30")
    _, cut = desk.do(until=lambda: desk.of(api.TimeLeft)[:2] if len(desk.of(api.TimeLeft)) > 1 else None)
    assert 1600 < cut.seconds <= 1800
    monkeypatch.setattr(own_job, "LIMIT_EVERY_S", 1000.0)
    made.run("scontrol", "update", f"JobId={desk.job}", "TimeLimit=600")
    *_, extended = desk.do(
        api.AskTimeLeft(), until=lambda: desk.of(api.TimeLeft) if len(desk.of(api.TimeLeft)) > 2 else None
    )
    assert 35000 < extended.seconds <= 36000
    desk.close()


@pytest.mark.every_slurm
def test_a_maintenance_reservation_is_seen_and_a_replacement_ends_before_it(
    cluster: MakeCluster, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = cluster(nodes=4, gpus=2)
    monkeypatch.setattr(slurm_desk, "FIRST_LOOK_S", 0.5)
    monkeypatch.setattr(slurm_desk, "RESERVATIONS_EVERY_S", 1.0)
    desk = Desk(made, 2, ("--time=08:00:00",), partition="main")
    asked = ("ReservationName=maint", "StartTime=now+2hours", "Duration=60", "User=root", "Nodes=ALL")
    made.run("scontrol", "create", "reservation", *asked, "Flags=MAINT,IGNORE_JOBS")
    made.run("scontrol", "create", "reservation", "StartTime=now+1hour", "Duration=9", "User=root", "Nodes=n4")
    (ahead,) = desk.do(until=lambda: desk.of(api.ReservationAhead))
    assert (ahead.name, ahead.nodes) == ("maint", desk.names)
    assert 7000 < ahead.seconds <= 7200
    ask = api.AskReplacement(replacement=1, exclude=desk.names)
    desk.do(ask, until=lambda: "running" in desk.state_of(1))
    news = desk.of(api.ReplacementNews)[-1]
    print(f"runs on {news.node} with {desk.view(news.slurm_job).seconds_left} s left, maintenance in {ahead.seconds} s")
    assert news.node == "n3", "n4 is reserved sooner"
    assert 6500 < desk.view(news.slurm_job).seconds_left < 7100
    made.run("scontrol", "delete", "ReservationName=maint")
    desk.do(until=lambda: desk.of(api.ReservationAhead)[-1].seconds is None)
    desk.close()


@pytest.mark.parametrize("how", ["scancel", "time", "preemption"])
def test_why_a_job_is_signalled(cluster: MakeCluster, how: str) -> None:
    if how == "time" and "RESIHP_SOAK" not in os.environ:
        pytest.skip("a time limit takes Slurm a minute and a half; set RESIHP_SOAK=1 to wait for it")
    settings = {"KillWait": "10"}
    if how == "preemption":
        partitions = {"PartitionName": f"low {LOW}\nPartitionName=high {HIGH}"}
        settings |= {"PreemptType": "preempt/partition_prio", "PreemptMode": "CANCEL", **partitions}
    made = cluster(nodes=2, gpus=2, settings=settings)
    desk = Desk(made, 2, ("--partition=low",) if how == "preemption" else ())
    if how == "scancel":
        made.run("scancel", desk.job)
    elif how == "time":
        made.run("scontrol", "update", f"JobId={desk.job}", "TimeLimit=1")
        made.wait(lambda: desk.view().state != "running", "the time to be up", timeout_s=150)
    else:
        made.run("sbatch", "--partition=high", "-N2", "--exclusive", "--output=/dev/null", "--wrap=sleep 60")
        made.wait(lambda: desk.view().preempted, "the job to be preempted")
        assert desk.view().state == "running"
    desk.do(api.AskWhy(), until=lambda: desk.of(api.StopMeaning))
    expected = {"scancel": "cancelled", "time": "time-limit", "preemption": "preempted"}[how]
    assert [event.meaning for event in desk.of(api.StopMeaning)] == [expected]
    desk.close()
