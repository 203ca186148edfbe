"""What the supervisor asks of Slurm, and how often; what it makes of answers, refusals, and silence. Virtual time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resihp.controller import interface as api
from resihp.protocol.messages import StepOutcome
from resihp.record import journal
from resihp.slurm import replacement
from resihp.slurm.client import Gres, JobRequest, NodeView, Reservation
from resihp.slurm.drains.exclusions import Exclusions
from resihp.slurm.drains.site_limits import DrainLimits
from resihp.slurm.errors import SlurmRefusedError, SlurmUnavailableError
from resihp.slurm.rate_limited import Polite
from resihp.slurm.replacement import ReplacementJob
from resihp.wrapper import registry
from resihp.wrapper.config.run_spec import Program, SlurmRequest
from resihp.wrapper.site_check import Answer
from resihp.wrapper.slurm_tasks import desk as slurm_desk
from resihp.wrapper.slurm_tasks.desk import SlurmDesk
from resihp.wrapper.slurm_tasks.job_comment import JobComment
from resihp.wrapper.slurm_tasks.nodes import state_of
from resihp.wrapper.slurm_tasks.own_job import LIMIT_EVERY_S, meaning_of
from tests.slurm.fake_slurm import FakeSlurm
from tests.wrapper.run_requests import run_request

NODES = ("n1", "n2", "n3", "n4")


class Desk:
    """A desk, the Slurm that it talks to, and the time. `n5` and `n6` are other nodes of the cluster."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.now = 1000.0
        self.slurm = FakeSlurm((*NODES, "n5", "n6"), **changes)
        self.main = self.slurm.add_job(*NODES, id="77")
        self.ends_at: float | None = self.now + 7200.0
        """When Slurm ends the job."""
        self.events: list[api.AnyEvent] = []
        self.submitted: list[ReplacementJob] = []
        self.trouble: list[Exception] = []
        """What the next submissions raise."""
        self.asked: list[tuple[str, str]] = []
        """Nodes on which the site's check was asked, with the job whose step asked."""
        self.site_answer: Answer | None = None
        self.polite = Polite(self.slurm, clock=self.clock)
        self.home = folder
        self.request = run_request(
            "77",
            folder / "jobs" / "77",
            nodes=4,
            gpus=2,
            settings={"tp": 2, "pp": 2, "node_names": NODES},
            program=Program(kind="script", argv=("train.py",), interpreter="python"),
            command=("train.py",),
            cwd=str(folder),
            slurm=SlurmRequest(
                job_id="77",
                cluster="fake",
                batch_node="n1",
                host_names={},
                cpus=16,
                gpus=2,
                partition="gpu",
                spool=str(folder / "spool"),
                extra=("--licenses=x", "--mail-type=END"),
            ),
        )
        self.another()

    def another(self, end_time: float | None = None) -> None:
        """Another supervisor takes over: nothing is known but what is in the job's folder."""
        self.desk = SlurmDesk(
            self.request,
            self.events.append,
            self.polite,
            end_time=end_time,
            submit=self.submit,
            clock=self.clock,
            now=lambda: 1e9,
            ask_node=self.ask_node,
        )

    def site_checks(self, answer: Answer | None) -> None:
        """The site has a health check, which answers so; None: it never answers."""
        assert self.request.slurm is not None
        slurm = msgspec.structs.replace(self.request.slurm, health_command=("nhc",))
        self.request = msgspec.structs.replace(self.request, slurm=slurm)
        self.site_answer = answer
        self.another()

    def ask_node(self, job_number: str, node: str) -> Answer:
        self.asked.append((job_number, node))
        while self.site_answer is None:
            time.sleep(0.01)
        return self.site_answer

    def clock(self) -> float:
        return self.now

    def submit(self, wanted: ReplacementJob, environment: Mapping[str, str]) -> str:
        if self.trouble:
            raise self.trouble.pop(0)
        self.submitted.append(wanted)
        job = self.slurm.add_job(name=wanted.name, why="Priority")
        Path(wanted.folder).mkdir(parents=True)
        (Path(wanted.folder) / "slurm_job").write_text(job)
        return job

    def wait(self, seconds: float) -> list[api.AnyEvent]:
        """Let time pass; returns what came of it."""
        seen, until = len(self.events), self.now + seconds
        while True:
            left_s = None if self.ends_at is None else self.ends_at - self.now
            if "77" in self.slurm.job_views:
                self.slurm.set_job("77", seconds_left=left_s)
            pause_s = asyncio.run(self.desk.turn())
            if self.now + pause_s > until:
                self.now = until
                return self.events[seen:]
            self.now += max(pause_s, 0.001)

    def do(self, action: Any, seconds: float = 0.0) -> list[api.AnyEvent]:
        self.desk.carry_out(action)
        return self.wait(seconds)

    def carry_out_slowly(self, action: Any) -> None:
        """Carry out, with time for the thread that asks a node."""
        self.desk.carry_out(action)
        asyncio.run(self.desk.turn())
        while self.desk._nodes.checks.is_pending:
            time.sleep(0.01)
        self.wait(1.0)

    def ends(self) -> None:
        """The job ends; time passes by itself, as `close` waits for real."""
        began, at = time.monotonic(), self.now

        async def close() -> None:
            closing = asyncio.ensure_future(self.desk.close())
            while not closing.done():
                self.now = at + time.monotonic() - began
                await asyncio.sleep(0.01)

        asyncio.run(close())

    def ask(self, number: int = 1, seconds: float = 0.0) -> list[api.AnyEvent]:
        return self.do(api.AskReplacement(replacement=number, exclude=(*NODES,)), seconds)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def states(self) -> list[str]:
        """Of requests, as they were told; why one waits may have been told in between."""
        told = [event.state for event in self.of(api.ReplacementNews)]
        return [state for state, before in zip(told, [None, *told], strict=False) if state != before]

    @property
    def calls(self) -> int:
        return sum(self.slurm.calls.values())


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


# --- the job's comment -----------------------------------------------------------------------------------------------


class Told:
    """A desk that tells Slurm of the job, whose records a test makes up."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.comment = JobComment(desk.request)
        desk.desk = SlurmDesk(
            *(desk.request, desk.events.append, desk.polite),
            clock=desk.clock,
            now=lambda: 1e9,
            comment=self.comment,
        )

    def happens(self, *entries: journal.AnyEntry) -> None:
        for entry in entries:
            self.comment.submit(journal.Record(seq=1, at=0.0, entry=entry))

    def says(self) -> str:
        return self.desk.slurm.job_views["77"].comment

    @property
    def written(self) -> int:
        return self.desk.slurm.calls["comment"]


def committed(iteration: int) -> journal.IterationCommitted:
    outcome = StepOutcome(
        iteration=iteration,
        clip=1.0,
        skip=False,
        learning_rate=1.0,
        gradient_norm=1.0,
        loss=2.5,
        tokens=10,
        sum_squared_lengths=10,
        samples=1,
        samples_digest="",
    )
    return journal.IterationCommitted(epoch=1, outcome=outcome, seconds=1.0, predicted_seconds=None)


def lost(node: str) -> journal.NodeLost:
    return journal.NodeLost(node=node, reason="silent")


COMPLETED = journal.JobEnded(exit_code=0, state="completed", reason="training is complete")


@pytest.fixture
def told(desk: Desk) -> Told:
    return Told(desk)


def test_the_comment_tells_how_far_the_job_is_at_a_low_rate(told: Told) -> None:
    told.desk.wait(1)
    assert told.says() == "resihp: no iteration (2001-09-09 01:46 UTC)"
    for iteration in range(1, 600):
        told.happens(committed(iteration))
        told.desk.wait(1)
    assert told.desk.calls <= 10
    assert told.says() == "resihp: iteration 59, loss 2.5000 (2001-09-09 01:46 UTC)", "a minute after the start"
    told.desk.wait(61)
    assert told.says() == "resihp: iteration 599, loss 2.5000 (2001-09-09 01:46 UTC)", "and every ten minutes"
    assert told.written == 3


def test_lost_nodes_are_told_once_a_minute_at_most_and_the_end_at_once(told: Told) -> None:
    told.desk.slurm.set_job("77", comment="ablation 3 | 'lr'")
    told.desk.wait(30)
    told.happens(committed(7), lost("n3"))
    told.desk.wait(29)
    assert told.written == 1
    told.happens(lost("n4"))
    told.desk.wait(2)
    assert told.says() == "ablation 3 | 'lr' | resihp: iteration 7, loss 2.5000, 2 nodes lost (2001-09-09 01:46 UTC)"
    assert told.written == 2
    told.happens(COMPLETED)
    asyncio.run(told.desk.desk.close())
    assert told.says().startswith("ablation 3 | 'lr' | resihp: completed, iteration 7, loss 2.5000, 2 nodes lost (")
    assert told.written == 3


def test_the_last_word_is_written_once_even_where_the_desk_got_to_it_before_the_end(told: Told) -> None:
    told.happens(COMPLETED)
    told.desk.wait(1)
    asyncio.run(told.desk.desk.close())
    assert told.written == 1


def test_what_somebody_else_writes_meanwhile_stays(told: Told) -> None:
    told.desk.wait(1)
    told.desk.slurm.set_job("77", comment="kept for billing")
    told.desk.wait(601)
    assert told.says().startswith("kept for billing | resihp: ")


def test_a_refused_comment_is_not_tried_again(told: Told) -> None:
    told.desk.slurm.refuse["comment"] = "Invalid user id"
    told.desk.wait(2000)
    told.happens(lost("n3"), COMPLETED)
    asyncio.run(told.desk.desk.close())
    assert told.written == 1
    assert told.desk.of(api.TimeLeft), "all else goes on"


def test_without_an_answer_nobodys_comment_is_overwritten_and_the_end_does_not_wait(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    told.desk.slurm.set_job("77", comment="ablation 3")
    told.desk.slurm.unavailable = True
    told.desk.wait(100)
    told.desk.slurm.unavailable = False
    told.desk.wait(600)
    assert told.says().startswith("ablation 3 | resihp: no iteration")
    hung, let_go = threading.Event(), threading.Event()

    def hangs(job_id: str, text: str) -> None:
        hung.set()
        let_go.wait(20)

    monkeypatch.setattr(told.desk.slurm, "comment", hangs)
    monkeypatch.setattr(slurm_desk, "LAST_COMMENT_TIMEOUT_S", 0.05)
    told.happens(COMPLETED)

    async def end() -> None:
        closing = asyncio.create_task(told.desk.desk.close())
        async with asyncio.timeout(10):
            await closing
        assert hung.is_set()
        let_go.set()

    asyncio.run(end())


def test_a_job_that_asks_for_none_has_no_comment(desk: Desk) -> None:
    assert desk.request.slurm is not None
    slurm = msgspec.structs.replace(desk.request.slurm, comment=False)
    desk.request = msgspec.structs.replace(desk.request, slurm=slurm)
    told = Told(desk)
    desk.wait(700)
    told.happens(lost("n1"), COMPLETED)
    asyncio.run(desk.desk.close())
    assert told.written == 0


# --- politeness ---------------------------------------------------------------------------------------------------


def test_a_healthy_job_hardly_asks_anything(desk: Desk) -> None:
    desk.wait(600)
    assert desk.calls <= 7
    assert desk.slurm.calls["nodes"] <= 1
    assert desk.of(api.TimeLeft) == [api.TimeLeft(seconds=7200.0)]


def test_the_more_jobs_a_user_has_the_less_each_of_them_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESIHP_STATE", str(tmp_path / "state"))

    def known(number: int, state: str = "running", cluster: str = "fake", began_at: float = 1e9) -> None:
        name = str(number)
        where = {"folder": f"/{name}", "host": "h", "user": "me", "cluster": cluster}
        entry = registry.KnownJob(name=name, slurm_job=name, state=state, began_at=began_at, **where)
        assert registry.save(entry) == ""

    def calls_in_a_day() -> int:
        desk = Desk(tmp_path / "home")
        desk.ends_at = None
        desk.wait(86400.0)
        return desk.calls

    alone = calls_in_a_day()
    for number in range(40):
        known(1000 + number, state="completed")
        known(2000 + number, cluster="another")
        known(3000 + number, began_at=1e9 - 30 * 86400.0)
    assert calls_in_a_day() == alone
    for number in range(40):
        known(number)
    assert calls_in_a_day() == pytest.approx(alone / 4, rel=0.05)
    for number in range(2000):
        known(number)
    assert calls_in_a_day() == pytest.approx(alone / 10, rel=0.1), "however many there are"


def test_a_registry_that_hangs_changes_nothing(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(registry, "ANSWER_TIMEOUT_S", 0.01)
    monkeypatch.setattr(registry, "entries", lambda: ([], hangs.wait(60)))
    desk.wait(LIMIT_EVERY_S + 1)
    hangs.set()
    assert desk.slurm.calls["jobs"] == 2


def test_nodes_are_asked_for_all_together_and_only_changes_are_told(desk: Desk) -> None:
    desk.wait(300)
    assert [(e.node, e.state) for e in desk.of(api.SlurmSees)] == [(node, "allocated") for node in NODES]
    flags = frozenset({"drain", "planned"})
    desk.slurm.set_node("n2", state="mixed", flags=flags, reason="somebody's", reason_by="admin")
    events = [event for event in desk.wait(900) if isinstance(event, api.SlurmSees)]
    assert events == [api.SlurmSees(node="n2", state="mixed+drain", reason="somebody's")]


def test_a_job_that_leaves_drained_nodes_looks_for_them_more_often(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    settings = msgspec.structs.replace(desk.request.settings, on_drain="vacate")
    desk.request = msgspec.structs.replace(desk.request, settings=settings)
    desk.another()
    desk.wait(100)
    desk.slurm.set_node("n2", flags=frozenset({"drain"}), reason="somebody's")
    assert desk.wait(180) == [api.SlurmSees(node="n2", state="allocated+drain", reason="somebody's")]


def test_a_time_limit_that_slurm_does_not_tell_is_asked_for_again(desk: Desk) -> None:
    desk.slurm.unavailable = True
    desk.wait(100)
    assert desk.events == []
    assert desk.slurm.calls["jobs"] <= 6
    desk.slurm.unavailable = False
    desk.wait(300)
    (told,) = desk.of(api.TimeLeft)
    assert 6800 <= told.seconds < 7200
    asked = desk.slurm.calls["jobs"]
    desk.wait(1800)
    assert desk.slurm.calls["jobs"] <= asked + 6


def test_a_time_limit_that_somebody_changes_is_seen(desk: Desk) -> None:
    desk.wait(10)
    desk.ends_at = desk.now + 600
    assert desk.wait(20) == []
    assert [e.seconds for e in desk.wait(LIMIT_EVERY_S) if isinstance(e, api.TimeLeft)] == [610.0 - LIMIT_EVERY_S]
    desk.ends_at = None
    asked = desk.do(api.AskTimeLeft())
    assert asked == [api.TimeLeft(seconds=None)], "at once where something hangs on it"
    assert desk.do(api.AskTimeLeft()) == [], "nothing new"


def test_a_time_limit_that_was_said_at_the_start_is_not_asked_for(desk: Desk) -> None:
    desk.another(end_time=1e9 + 7200.0)
    assert desk.wait(LIMIT_EVERY_S - 1)[:1] == [api.TimeLeft(seconds=7200.0)]
    assert desk.slurm.calls["jobs"] == 0
    desk.ends_at = desk.now + 60
    assert [event.seconds for event in desk.wait(10) if isinstance(event, api.TimeLeft)] == [59.0]


def test_no_limit_is_told_as_none(desk: Desk) -> None:
    desk.ends_at = None
    desk.wait(1)
    assert desk.of(api.TimeLeft) == [api.TimeLeft(seconds=None)]


def test_slurm_that_is_away_is_not_asked_without_end(desk: Desk) -> None:
    desk.slurm.unavailable = True
    desk.ask()
    desk.do(api.WatchNode(node="n3"))
    desk.wait(600)
    assert desk.calls <= 30
    assert desk.of(api.SlurmSees) == []


def test_a_bug_in_dealing_with_slurm_does_not_end_the_job(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.trouble = [KeyError("a bug")]
    desk.ask()
    assert "a bug" in caplog.text
    assert desk.ask(2) == [api.ReplacementNews(replacement=2, state="pending", slurm_job="1", node=None, text="")]


# --- reservations -------------------------------------------------------------------------------------------------


def reserved(name: str, begins_s: float, *nodes: str, lasts_s: float = 3600.0) -> Reservation:
    begins_at = 1e9 + begins_s
    return Reservation(
        name=name, begins_at=begins_at, ends_at=begins_at + lasts_s, nodes=nodes, flags=frozenset({"MAINT"})
    )


def in_partition_main(desk: Desk) -> None:
    """The partition of all nodes of the cluster."""
    assert desk.request.slurm is not None
    slurm = msgspec.structs.replace(desk.request.slurm, partition="main")
    desk.request = msgspec.structs.replace(desk.request, slurm=slurm)
    desk.another()


def test_the_next_reservation_of_a_node_is_told_once(desk: Desk) -> None:
    desk.slurm.reserved = [
        reserved("later", 6000, "n1", "n2"),
        reserved("maint", 5000, "n2", "n6"),
        reserved("elsewhere", 100, "n6"),
        reserved("now", -100, "n1"),
        reserved("after", 9000, "n1"),
    ]
    desk.wait(70)
    (ahead,) = desk.of(api.ReservationAhead)
    assert (ahead.name, ahead.nodes, ahead.seconds) == ("maint", ("n2",), 5000)
    desk.wait(1300)
    assert len(desk.of(api.ReservationAhead)) == 1
    assert desk.slurm.calls["reservations"] == 3
    desk.slurm.reserved = []
    desk.wait(700)
    assert desk.of(api.ReservationAhead)[-1].seconds is None


def test_a_reservation_of_a_lost_node_does_not_hide_a_later_one(desk: Desk) -> None:
    desk.slurm.reserved = [reserved("repair", 3000, "n2"), reserved("maint", 5000, "n1")]
    desk.do(api.WatchNode(node="n2"))
    desk.wait(70)
    assert [event.name for event in desk.of(api.ReservationAhead)] == ["maint"]


def test_reservations_after_the_jobs_time_limit_or_its_own_are_not_told(desk: Desk) -> None:
    assert desk.request.slurm is not None
    slurm = msgspec.structs.replace(desk.request.slurm, reservation="ours")
    desk.request = msgspec.structs.replace(desk.request, slurm=slurm)
    desk.another()
    desk.slurm.reserved = [reserved("after", 7300, "n1"), reserved("ours", 100, "n1")]
    desk.wait(2000)
    assert desk.of(api.ReservationAhead) == []


def test_a_short_job_does_not_ask_for_reservations(desk: Desk) -> None:
    desk.ends_at = desk.now + 500
    desk.wait(400)
    assert desk.slurm.calls["reservations"] == 0


@pytest.mark.parametrize(
    ("begins_s", "nodes", "seconds"),
    [
        (3720, ("n5", "n6"), 3600),
        (3720, ("n5",), 7200),  # n6 is free for longer
        (9000, ("n5", "n6"), 7200),
    ],
)
def test_a_replacement_ends_before_a_reservation_of_all_nodes(
    desk: Desk, begins_s: float, nodes: tuple[str, ...], seconds: float
) -> None:
    in_partition_main(desk)
    desk.slurm.reserved = [reserved("maint", begins_s, *nodes)]
    desk.ask()
    (wanted,) = desk.submitted
    assert wanted.seconds == seconds


def test_no_replacement_is_asked_for_where_all_nodes_are_reserved_soon(desk: Desk) -> None:
    in_partition_main(desk)
    desk.slurm.reserved = [reserved("now", -60, "n5", lasts_s=7000), reserved("maint", 1200, "n6", lasts_s=7000)]
    desk.ask()
    assert desk.submitted == []
    (news,) = desk.of(api.ReplacementNews)
    assert news.state == "refused"
    assert news.text == "reservation maint begins in 18 min, and no node of the partition is free after it"


def test_a_replacement_may_start_after_a_reservation_that_is_over_long_before_the_jobs_end(desk: Desk) -> None:
    in_partition_main(desk)
    desk.slurm.reserved = [reserved("now", -60, "n5", lasts_s=3600), reserved("maint", 1200, "n6", lasts_s=7000)]
    desk.ask()
    (wanted,) = desk.submitted
    assert wanted.seconds == 7200


def test_after_a_stop_the_time_limit_and_a_reservation_are_told_again(desk: Desk) -> None:
    """The controller's clock stood still, so that both are nearer than it knows."""
    desk.slurm.reserved = [reserved("maint", 5000, "n2")]
    desk.wait(100)
    desk.now += 1000
    desk.desk.ask_anew()
    told = desk.wait(1)
    assert [event.seconds for event in told if isinstance(event, api.TimeLeft)] == [6100.0]
    assert [event.name for event in told if isinstance(event, api.ReservationAhead)] == ["maint"]


# --- drains and releases ------------------------------------------------------------------------------------------


def test_an_operators_drain_is_slurms(tmp_path: Path) -> None:
    desk = Desk(tmp_path, operator=True)
    events = desk.do(api.DrainNode(drain=1, node="n3", reason="job 77 lost rank 4, 5: silent for 6.0 s"))
    assert [(e.drain, e.node, e.step, e.outcome) for e in desk.of(api.DrainStep)] == [
        (1, "n3", "slurm", "done"),
        (1, "n3", "exclusion", "done"),
    ]
    assert len(events) == len(desk.of(api.DrainStep)) + len(desk.of(api.TimeLeft))
    view = desk.slurm.node_views["n3"]
    assert view.draining
    assert view.reason == "resihp: job 77 lost rank 4, 5: silent for 6.0 s"
    assert [each.node for each in Exclusions(tmp_path, "fake").current(1e9)] == ["n3"]


@pytest.mark.parametrize(("grounds", "days"), [("agent", 1 / 24), ("died", 1)])
def test_a_node_that_is_only_left_out_is_so_for_as_long_as_its_grounds_ask(
    tmp_path: Path, grounds: Any, days: float
) -> None:
    desk = Desk(tmp_path, operator=True)
    desk.do(api.DrainNode(drain=1, node="n3", reason="silent", measure="exclude", grounds=grounds))
    assert [(e.step, e.outcome) for e in desk.of(api.DrainStep)] == [("exclusion", "done")]
    assert not desk.slurm.node_views["n3"].draining
    (exclusion,) = Exclusions(tmp_path, "fake").current(1e9)
    assert (exclusion.measure, exclusion.expires_at) == ("exclude", 1e9 + days * 86400)


def test_the_sites_own_cap_holds_for_what_a_job_drains(tmp_path: Path) -> None:
    desk = Desk(tmp_path, operator=True)
    assert desk.request.slurm is not None
    slurm = msgspec.structs.replace(desk.request.slurm, limits=DrainLimits(drained=1))
    desk.request = msgspec.structs.replace(desk.request, slurm=slurm)
    desk.another()
    desk.slurm.set_node("n6", flags=frozenset({"drain"}), reason="resihp: job 5 lost rank 1: Xid 79")
    desk.do(api.DrainNode(drain=1, node="n3", reason="Xid 79"))
    assert [(e.step, e.outcome) for e in desk.of(api.DrainStep)] == [("slurm", "refused"), ("exclusion", "done")]
    assert not desk.slurm.node_views["n3"].draining


PASSED = Answer(outcome="passed", text="exit status 0")
FAILED = Answer(outcome="failed", text="exit status 1: GPU 3 ECC")
HUNG = Answer(outcome="silent", text="not finished within 30 s, killed")
MISSING = Answer(outcome="not asked", text="nhc: there is no such command, or it is not executable")


def drained(desk: Desk, grounds: Any) -> list[tuple[str, str, str]]:
    desk.carry_out_slowly(api.DrainNode(drain=1, node="n3", reason="silent for 6.0 s", grounds=grounds))
    return [(step.step, step.outcome, step.text) for step in desk.of(api.DrainStep)]


def test_a_node_that_only_died_again_is_not_drained_if_the_sites_check_passes(tmp_path: Path) -> None:
    desk = Desk(tmp_path, operator=True)
    desk.site_checks(PASSED)
    first, last = drained(desk, "died again")
    text = "node n3: not drained: the site's health check passes there (exit status 0)"
    assert (first, last[:2]) == (("slurm", "refused", text), ("exclusion", "done"))
    assert desk.asked == [("77", "n3")]
    assert not desk.slurm.node_views["n3"].draining
    assert desk.slurm.calls["drain"] == 0
    (exclusion,) = Exclusions(tmp_path, "fake").current(1e9)
    assert exclusion.measure == "exclude"


@pytest.mark.parametrize(
    ("answer", "grounds", "reason"),
    [
        (PASSED, "hardware", "resihp: silent for 6.0 s, site check passed: exit status 0"),
        (FAILED, "hardware", "resihp: silent for 6.0 s, site check failed: exit status 1: GPU 3 ECC"),
        (FAILED, "died again", "resihp: silent for 6.0 s, site check failed: exit status 1: GPU 3 ECC"),
        (HUNG, "died again", "resihp: silent for 6.0 s"),
        (MISSING, "hardware", "resihp: silent for 6.0 s"),
    ],
)
def test_any_other_answer_leaves_the_drain_as_decided(
    tmp_path: Path, answer: Answer, grounds: Any, reason: str
) -> None:
    desk = Desk(tmp_path, operator=True)
    desk.site_checks(answer)
    steps = drained(desk, grounds)
    assert [step[:2] for step in steps] == [("slurm", "done"), ("exclusion", "done")]
    assert answer.text in steps[0][2]
    assert desk.slurm.node_views["n3"].reason == reason


def test_nobody_is_asked_about_a_node_that_is_not_to_be_drained(tmp_path: Path) -> None:
    desk = Desk(tmp_path, operator=True)
    desk.site_checks(PASSED)
    desk.do(api.DrainNode(drain=1, node="n3", reason="silent", measure="exclude", grounds="died"))
    desk.do(api.DrainNode(drain=2, node="n1", reason="Xid 79"))  # the batch host
    assert desk.asked == []
    assert next((e.step, e.outcome) for e in desk.of(api.DrainStep)) == ("exclusion", "done")


def test_other_requests_do_not_wait_for_the_sites_check(tmp_path: Path) -> None:
    desk = Desk(tmp_path, operator=True)
    desk.site_checks(None)
    desk.do(api.DrainNode(drain=1, node="n3", reason="silent", grounds="died again"), 5.0)
    desk.ask(seconds=1.0)
    assert desk.submitted
    assert not desk.of(api.DrainStep)
    desk.site_answer = FAILED


def test_a_job_that_ends_waits_for_the_sites_check_only_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resihp.wrapper.slurm_tasks.desk.LAST_CHECK_TIMEOUT_S", 0.2)
    desk = Desk(tmp_path, operator=True)
    desk.site_checks(None)
    desk.desk.carry_out(api.DrainNode(drain=1, node="n3", reason="Xid 79", grounds="hardware"))
    desk.ends()
    assert desk.slurm.node_views["n3"].reason == "resihp: Xid 79"
    desk.site_answer = PASSED
    again = Desk(tmp_path / "again", operator=True)
    again.site_checks(PASSED)
    again.desk.carry_out(api.DrainNode(drain=1, node="n3", reason="silent", grounds="died again"))
    again.ends()
    assert not again.slurm.node_views["n3"].draining


def test_without_rights_the_site_is_asked(desk: Desk) -> None:
    (desk.home / "spool").mkdir()
    desk.do(api.DrainNode(drain=1, node="n3", reason="silent"))
    assert [(e.step, e.outcome) for e in desk.of(api.DrainStep)] == [
        ("slurm", "refused"),
        ("spool", "done"),
        ("exclusion", "done"),
    ]
    assert len(list((desk.home / "spool").iterdir())) == 1


def test_no_answer_to_a_drain_is_unknown(desk: Desk) -> None:
    desk.slurm.unavailable = True
    desk.do(api.DrainNode(drain=1, node="n3", reason="silent"))
    assert [(e.step, e.outcome) for e in desk.of(api.DrainStep)][:1] == [("slurm", "unknown")]


def test_a_node_of_somebody_elses_job_is_never_drained(tmp_path: Path) -> None:
    desk = Desk(tmp_path, operator=True)
    desk.do(api.DrainNode(drain=1, node="n5", reason="silent"))
    assert [(e.step, e.outcome) for e in desk.of(api.DrainStep)] == [("slurm", "refused")]
    assert not desk.slurm.node_views["n5"].draining


def test_a_node_is_given_back_and_the_others_are_kept(desk: Desk) -> None:
    desk.do(api.ReleaseNode(node="n3", keep=("n1", "n2", "n4")))
    assert desk.of(api.ReleaseAnswered) == [api.ReleaseAnswered(node="n3", outcome="done", text="")]
    assert desk.slurm.job_views["77"].nodes == ("n1", "n2", "n4")


def test_what_slurm_has_taken_back_already_is_neither_kept_nor_released(desk: Desk) -> None:
    desk.slurm.set_job("77", nodes=("n1", "n3", "n4"))
    desk.do(api.ReleaseNode(node="n2", keep=("n1", "n3", "n4")))
    desk.do(api.ReleaseNode(node="n3", keep=("n1", "n2", "n4")))
    assert [(e.node, e.outcome) for e in desk.of(api.ReleaseAnswered)] == [("n2", "done"), ("n3", "done")]
    assert desk.slurm.calls["keep_nodes"] == 1
    assert desk.slurm.job_views["77"].nodes == ("n1", "n4")


@pytest.mark.parametrize(("how", "outcome"), [("refuse", "refused"), ("unavailable", "unknown")])
def test_a_release_that_does_not_happen_is_told(desk: Desk, how: str, outcome: str) -> None:
    desk.wait(20)
    if how == "refuse":
        desk.slurm.refuse["keep_nodes"] = "Requested operation is presently disabled"
    else:
        desk.slurm.unavailable = True
    desk.do(api.ReleaseNode(node="n3", keep=("n1", "n2", "n4")))
    assert [event.outcome for event in desk.of(api.ReleaseAnswered)] == [outcome]


# --- Slurm's view -------------------------------------------------------------------------------------------------


def test_a_watched_node_is_looked_at_until_slurm_knows(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.wait(100)
    asked: list[tuple[str, ...]] = []
    original = desk.slurm.nodes

    def noted(names: Sequence[str]) -> Mapping[str, NodeView]:
        asked.append(tuple(names))
        return original(names)

    monkeypatch.setattr(desk.slurm, "nodes", noted)
    before = desk.slurm.calls["nodes"]
    desk.do(api.WatchNode(node="n3"), 60)
    assert 2 <= desk.slurm.calls["nodes"] - before <= 5
    assert set(asked) == {("n3",)}, "only about this one"
    desk.slurm.set_node("n3", flags=frozenset({"not_responding"}))
    assert desk.wait(65) == [api.SlurmSees(node="n3", state="allocated+not_responding", reason="")]
    desk.slurm.set_node("n3", state="down", flags=frozenset({"not_responding"}), reason="Not responding")
    events = desk.wait(65)
    assert events == [api.SlurmSees(node="n3", state="down+not_responding", reason="Not responding")]
    before = desk.slurm.calls["nodes"]
    desk.wait(600)
    assert desk.slurm.calls["nodes"] - before <= 4
    desk.slurm.set_node("n3", state="idle", flags=frozenset(), reason="")
    events = [event for event in desk.wait(900) if isinstance(event, api.SlurmSees)]
    assert events == [api.SlurmSees(node="n3", state="idle", reason="")]


def test_a_node_that_slurm_never_loses_is_not_watched_for_ever(desk: Desk) -> None:
    desk.do(api.WatchNode(node="n3"), 900)
    before = desk.slurm.calls["nodes"]
    desk.wait(1800)
    assert desk.slurm.calls["nodes"] - before <= 11


@pytest.mark.parametrize(
    ("view", "meaning"),
    [
        ({"state": "completing"}, "cancelled"),
        ({"state": "cancelled"}, "cancelled"),
        ({"state": "completing", "why": "TimeLimit", "seconds_left": 0.0}, "time-limit"),
        ({"state": "running", "seconds_left": 0.0}, "time-limit"),
        ({"state": "timeout"}, "time-limit"),
        ({"state": "running", "preempted": True}, "preempted"),
        ({"state": "completing", "preempted": True}, "preempted"),
        ({"state": "running"}, "unknown"),
    ],
)
def test_why_a_job_is_signalled(desk: Desk, view: dict[str, Any], meaning: str) -> None:
    desk.wait(1)
    desk.slurm.set_job("77", **view)
    if "seconds_left" in view:
        desk.ends_at = desk.now + view["seconds_left"]
    desk.do(api.AskWhy(), 1.5)
    assert [event.meaning for event in desk.of(api.StopMeaning)] == [meaning]
    assert meaning_of(desk.slurm.job_views["77"]) == meaning


def test_slurms_view_may_be_older_than_its_signal(desk: Desk) -> None:
    desk.wait(1)
    assert desk.do(api.AskWhy(), 0.5) == []
    desk.slurm.set_job("77", state="completing")
    assert desk.wait(1) == [api.StopMeaning(meaning="cancelled")]


def test_no_answer_to_why_is_unknown(desk: Desk) -> None:
    desk.slurm.unavailable = True
    desk.do(api.AskWhy(), 1.5)
    assert desk.of(api.StopMeaning) == [api.StopMeaning(meaning="unknown")]


def test_why_comes_before_everything_else(desk: Desk) -> None:
    for number in range(3):
        desk.desk.carry_out(api.AskReplacement(replacement=number, exclude=NODES))
    desk.slurm.set_job("77", state="completing")
    events = desk.do(api.AskWhy())
    assert isinstance(events[0], api.StopMeaning)


# --- replacements -------------------------------------------------------------------------------------------------


def test_a_replacement_is_one_node_like_those_of_the_main_job(desk: Desk) -> None:
    assert desk.ask()[-2] == api.ReplacementNews(replacement=1, state="pending", slurm_job="1", node=None, text="")
    (wanted,) = desk.submitted
    assert wanted.name == "resihp-77-r1"
    assert "job 77" in wanted.comment
    assert wanted.folder == str(desk.home / "jobs/77/replacements/r1")
    assert wanted.command[1:4] == ("-P", "-m", "resihp.wrapper.agent.process")
    assert wanted.command[-2:] == ("--lease", "1")
    assert (wanted.exclude, wanted.gpus, wanted.seconds, wanted.wait_s) == (NODES, 2, 7200.0, 5400.0)
    assert wanted.extra == ("--licenses=x", "--mail-type=END")


def test_a_replacement_is_like_what_the_job_asked_for_unless_its_user_says_otherwise(desk: Desk) -> None:
    asked = JobRequest(
        partition="main", licenses="matlab:2", constraint="a100", gres=(Gres("gpu", "a100", 2),), memory_mb=4000
    )
    desk.slurm.job_requests["77"] = asked
    desk.ask(1)
    desk.ask(2)
    assert [wanted.asked for wanted in desk.submitted] == [msgspec.structs.replace(asked, partition="gpu")] * 2
    assert desk.slurm.calls["request"] == 1


def test_nothing_is_asked_for_while_nobody_knows_what_the_job_has(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """An answer that cannot be read is none: another node than the job's could be of no use to it."""
    desk.slurm.refuse["request"] = "cannot read Exclusive"
    desk.ask(1, seconds=1200)
    assert not desk.submitted
    assert not desk.of(api.ReplacementNews)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "replacement 1: not requested until Slurm reports the job's own request" in line
    del desk.slurm.refuse["request"]
    desk.wait(600)
    assert [wanted.name for wanted in desk.submitted] == ["resihp-77-r1"]


def test_the_request_of_a_job_without_a_time_limit_ends_some_day(desk: Desk) -> None:
    desk.ends_at = None
    desk.wait(0)
    desk.ask()
    assert (desk.submitted[0].seconds, desk.submitted[0].wait_s) == (30 * 86400.0, 7 * 86400.0)


def test_nodes_that_our_jobs_stay_away_from_are_left_out_as_far_as_slurm_knows_them(desk: Desk) -> None:
    exclusions = Exclusions(desk.home, "fake")
    for node, until in (("n5", 2e9), ("n6", 1.0), ("gone", 2e9), ("n1", 2e9)):
        exclusions.add(node, "bad", until)
    desk.ask()
    assert desk.submitted[0].exclude == (*NODES, "n5")


def test_what_is_kept_out_of_any_folders_jobs_is_so_of_replacements(desk: Desk, tmp_path: Path) -> None:
    """What jobs of another folder found, and what `resihp node exclude` was told there."""
    place, other = registry.place(), tmp_path / "other"
    assert place is not None
    folder = str(other / "jobs" / "5")
    registry.save(registry.KnownJob(name="5", folder=folder, host="h", user="u", began_at=1.0, slurm_job="5"))
    for root, node in ((other, "n5"), (place.parent, "n6")):
        Exclusions(root, "fake").add(node, "bad", 2e9)
    desk.ask()
    assert desk.submitted[0].exclude == (*NODES, "n5", "n6")


def test_lists_that_do_not_answer_hold_up_no_replacement(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Exclusions(desk.home, "fake").add("n5", "bad", 2e9)
    monkeypatch.setattr(registry, "ANSWER_TIMEOUT_S", 0.0)
    hangs = threading.Event()
    monkeypatch.setattr(registry, "entries", lambda: ([], hangs.wait(60)))
    desk.ask()
    hangs.set()
    assert desk.submitted[0].exclude == (*NODES, "n5")
    assert f"no answer for 0 s; only the list of {desk.home} is used" in caplog.text


def test_a_request_is_followed_until_its_job_has_ended(desk: Desk) -> None:
    desk.ask()
    desk.wait(60)
    asked = desk.slurm.calls["jobs"]
    assert 8 <= asked <= 14, "every five seconds at first"
    desk.wait(150)
    assert desk.slurm.calls["jobs"] - asked <= 11, "then every fifteen"
    desk.slurm.start("1", "n5")
    (running,) = [e for e in desk.wait(20) if isinstance(e, api.ReplacementNews)]
    assert (running.state, running.node, running.slurm_job) == ("running", "n5", "1")
    asked = desk.slurm.calls["jobs"]
    desk.wait(600)
    assert desk.slurm.calls["jobs"] - asked <= 8
    desk.slurm.finish("1", "failed")
    (ended,) = [e for e in desk.wait(200) if isinstance(e, api.ReplacementNews)]
    assert (ended.state, ended.text) == ("ended", "the job is failed")
    asked = desk.slurm.calls["jobs"]
    desk.wait(600)
    assert desk.slurm.calls["jobs"] <= asked + 2, "for the time limit"


def test_why_a_request_waits_is_told_when_that_changes_and_each_reason_once(desk: Desk) -> None:
    desk.ask()
    for why in ("Priority", "Resources", "Priority", "ReqNodeNotAvail,_UnavailableNodes:n6", "", "Resources"):
        desk.slurm.set_job("1", why=why)
        desk.wait(15)
    desk.slurm.set_job("1", why="ReqNodeNotAvail,_UnavailableNodes:n[5-6]")
    desk.wait(15)
    told = [(event.state, event.text) for event in desk.of(api.ReplacementNews)]
    assert told == [
        ("pending", ""),
        ("pending", "Priority"),
        ("pending", "Resources"),
        ("pending", "ReqNodeNotAvail,_UnavailableNodes:n6"),
    ]


@pytest.mark.parametrize(
    "state", ["signaling", "stopped", "stage_out", "suspended", "resizing", "completing", "new_one"]
)
def test_a_request_that_runs_is_not_over_in_between(desk: Desk, state: str) -> None:
    """Whatever Slurm calls it, also if only a later one does."""
    desk.ask()
    desk.slurm.start("1", "n5")
    desk.wait(20)
    desk.slurm.set_job("1", state=state)
    desk.wait(300)
    assert desk.states == ["pending", "running"]


@pytest.mark.parametrize("state", ["configuring", "requeue_hold", "requeue_fed", "special_exit", "resv_del_hold"])
def test_a_request_that_will_run_is_not_over_yet(desk: Desk, state: str) -> None:
    desk.ask()
    desk.slurm.set_job("1", state=state, nodes=("n5",), why="")
    desk.wait(300)
    assert desk.states == ["pending"]


@pytest.mark.parametrize("state", ["deadline", "boot_fail", "out_of_memory", "revoked", "node_fail"])
def test_a_request_that_slurm_has_ended_is_over(desk: Desk, state: str) -> None:
    desk.ask()
    desk.slurm.set_job("1", state=state)
    desk.wait(30)
    assert [(e.state, e.text) for e in desk.of(api.ReplacementNews)][-1] == ("ended", f"the job is {state}")


@pytest.mark.parametrize(
    ("state", "by_slurm"), [("timeout", True), ("preempted", True), ("cancelled", True), ("node_fail", False)]
)
def test_whether_slurm_took_a_replacement_away_is_told(desk: Desk, state: str, by_slurm: bool) -> None:
    desk.ask()
    desk.slurm.start("1", "n5")
    desk.wait(20)
    desk.slurm.finish("1", state)
    desk.do(api.WatchReplacements())
    (ended,) = [e for e in desk.of(api.ReplacementNews) if e.state in ("ended", "withdrawn")]
    assert ended.by_slurm == by_slurm
    assert (ended.state == "withdrawn") == (state == "cancelled")


def test_a_replacement_that_slurm_suspends_and_resumes_is_told_at_once(desk: Desk) -> None:
    desk.ask()
    desk.slurm.start("1", "n5")
    desk.wait(20)
    for state in ("suspended", "suspended", "running"):
        desk.slurm.set_job("1", state=state)
        desk.wait(2)
        desk.do(api.WatchReplacements())
    told = [event.by_slurm for event in desk.of(api.ReplacementNews) if event.state == "running"]
    assert told == [False, True, False]


def test_a_node_that_came_is_looked_at_with_the_others_and_may_be_drained(tmp_path: Path) -> None:
    desk = Desk(tmp_path, operator=True)
    desk.ask()
    desk.slurm.start("1", "n5")
    desk.wait(300)
    assert "n5" in {event.node for event in desk.of(api.SlurmSees)}
    desk.do(api.DrainNode(drain=1, node="n5", reason="silent"))
    assert desk.slurm.node_views["n5"].draining


def test_a_replacement_may_be_asked_for_in_another_partition(desk: Desk) -> None:
    assert desk.request.slurm is not None
    slurm = msgspec.structs.replace(desk.request.slurm, replacement_partition="single", replacement_qos="short")
    desk.request = msgspec.structs.replace(desk.request, slurm=slurm)
    desk.another()
    desk.ask()
    (wanted,) = desk.submitted
    assert (wanted.asked.partition, wanted.asked.qos) == ("single", "short")


def test_a_refused_submission_is_told(desk: Desk) -> None:
    desk.trouble = [SlurmRefusedError("invalid partition")]
    assert desk.ask()[-1] == api.ReplacementNews(
        replacement=1, state="refused", slurm_job=None, node=None, text="invalid partition"
    )
    desk.wait(1000)
    assert desk.submitted == []


def test_a_submission_without_an_answer_is_tried_again_some_times(desk: Desk) -> None:
    desk.trouble = [SlurmUnavailableError("no answer")] * 2
    desk.ask(seconds=100)
    assert desk.states == ["pending"]
    desk.trouble = [SlurmUnavailableError("no answer")] * 9
    desk.ask(2, seconds=1000)
    assert [(e.replacement, e.state) for e in desk.of(api.ReplacementNews)][-1] == (2, "refused")
    assert len(desk.trouble) == 5


def test_silence_about_a_request_is_no_end_of_it(desk: Desk) -> None:
    desk.ask(seconds=20)
    desk.slurm.unavailable = True
    assert desk.wait(600) == []
    desk.slurm.unavailable = False
    desk.slurm.start("1", "n5")
    assert [e.state for e in desk.wait(400) if isinstance(e, api.ReplacementNews)] == ["running"]


def test_a_request_that_is_not_wanted_any_more_is_cancelled(desk: Desk) -> None:
    desk.ask(seconds=20)
    desk.do(api.CancelReplacement(replacement=1, reason="the first layout is back"), 30)
    assert desk.slurm.job_views["1"].state == "cancelled"
    assert desk.states == ["pending"]


def test_a_cancellation_without_an_answer_is_tried_again(desk: Desk) -> None:
    desk.ask(seconds=20)
    desk.slurm.unavailable = True
    desk.do(api.CancelReplacement(replacement=1, reason="done"), 30)
    desk.slurm.unavailable = False
    desk.wait(60)
    assert desk.slurm.job_views["1"].state == "cancelled"


def test_a_request_that_is_cancelled_before_it_was_submitted_never_is(desk: Desk) -> None:
    desk.trouble = [SlurmUnavailableError("no answer")]
    desk.ask()
    desk.do(api.CancelReplacement(replacement=1, reason="done"), 600)
    assert desk.submitted == []


def test_bad_nodes_are_excluded_first_when_the_job_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm may need longer for the drains than a job that ends can wait, and the next run reads the list."""
    desk = Desk(tmp_path, operator=True)
    seen: list[list[str]] = []

    def hang(node: str, reason: str) -> None:
        seen.append([each.node for each in Exclusions(tmp_path, "fake").current(desk.now)])

    monkeypatch.setattr(desk.slurm, "drain", hang)
    for number, node in ((1, "n2"), (2, "n3")):
        desk.desk.carry_out(api.DrainNode(drain=number, node=node, reason="Xid 79", measure="drain"))
    asyncio.run(desk.desk.close())
    assert seen == [["n2", "n3"], ["n2", "n3"]]


def test_all_requests_are_cancelled_when_the_job_has_ended(desk: Desk) -> None:
    desk.ask(1)
    desk.ask(2)
    desk.slurm.start("1", "n5")
    desk.wait(20)
    other = desk.slurm.add_job("n6")
    earlier = desk.home / "jobs/77/replacements/r9"
    earlier.mkdir(parents=True)
    by_another_supervisor = desk.slurm.add_job()
    (earlier / "slurm_job").write_text(by_another_supervisor)
    asyncio.run(desk.desk.close())
    states = {job: view.state for job, view in desk.slurm.job_views.items()}
    assert states == {
        "77": "running",
        "1": "cancelled",
        "2": "cancelled",
        by_another_supervisor: "cancelled",
        other: "running",
    }


def test_what_is_left_when_slurm_gives_no_answer_is_named(
    desk: Desk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what the job has asked for: a user may have other jobs."""
    desk.ask(1)
    desk.ask(2)
    desk.trouble = [SlurmUnavailableError("no answer")]
    desk.ask(3)
    go_on = threading.Event()

    def hangs(job: str) -> None:
        go_on.wait(10)

    monkeypatch.setattr(desk.slurm, "cancel", hangs)
    monkeypatch.setattr(slurm_desk, "CLOSE_TIMEOUT_S", 0.1)

    async def close() -> None:
        try:
            await desk.desk.close()
        finally:
            go_on.set()

    asyncio.run(close())
    (line,) = [text for record in caplog.records if "in time" in (text := record.getMessage())]
    assert line == (
        "Slurm gave no answer in time; to end what it may have left: scancel 1 2; "
        "squeue --me --name=resihp-77-r3 lists what may have been submitted"
    )


def test_a_cancellation_that_slurm_does_not_answer_is_named(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.ask(1)
    desk.slurm.unavailable = True
    asyncio.run(desk.desk.close())
    (line,) = [text for record in caplog.records if "could not be cancelled" in (text := record.getMessage())]
    assert line.endswith("; to cancel it: scancel 1")


def test_a_drain_that_was_decided_last_is_still_carried_out(tmp_path: Path) -> None:
    desk = Desk(tmp_path, operator=True)
    desk.desk.carry_out(api.DrainNode(drain=1, node="n3", reason="silent"))
    desk.desk.carry_out(api.AskReplacement(replacement=1, exclude=NODES))
    asyncio.run(desk.desk.close())
    assert desk.slurm.node_views["n3"].draining
    assert desk.submitted == []


def test_another_supervisor_knows_the_nodes_that_came(tmp_path: Path) -> None:
    desk = Desk(tmp_path, operator=True)
    desk.ask(1)
    desk.ask(2)
    desk.slurm.start("1", "n5")
    desk.slurm.finish("2", "failed")
    desk.wait(1)
    desk.another()
    news = [event for event in desk.wait(100) if isinstance(event, api.ReplacementNews)]
    assert [(e.replacement, e.state, e.slurm_job, e.node) for e in news] == [
        (1, "running", "1", "n5"),
        (2, "ended", "2", None),
    ]
    assert "n5" in {event.node for event in desk.of(api.SlurmSees)}
    desk.do(api.DrainNode(drain=1, node="n5", reason="silent"))
    assert desk.slurm.node_views["n5"].draining
    desk.do(api.CancelReplacement(replacement=1, reason="its node was lost"))
    assert desk.slurm.job_views["1"].state == "cancelled"


def test_why_is_asked_even_when_there_was_no_answer_a_moment_ago(desk: Desk) -> None:
    desk.slurm.unavailable = True
    desk.wait(60)
    desk.slurm.unavailable = False
    desk.slurm.set_job("77", state="completing")
    assert desk.do(api.AskWhy())[:1] == [api.StopMeaning(meaning="cancelled")]


def test_run_wakes_up_for_what_comes_in(desk: Desk) -> None:
    async def play() -> None:
        running = asyncio.create_task(desk.desk.run())
        await asyncio.sleep(0)
        desk.desk.carry_out(api.AskWhy())
        desk.slurm.set_job("77", state="completing")
        while not desk.of(api.StopMeaning):
            await asyncio.sleep(0.001)
        running.cancel()

    asyncio.run(asyncio.wait_for(play(), 10))


def test_what_follows_from_a_call_under_way_is_not_lost_when_the_job_ends(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm refuses to drain the node; what is tried instead is still to come."""
    began, go_on = threading.Event(), threading.Event()
    drain = desk.slurm.drain

    def slowly(*arguments: Any, **named: Any) -> Any:
        began.set()
        assert go_on.wait(10)
        return drain(*arguments, **named)

    monkeypatch.setattr(desk.slurm, "drain", slowly)

    async def play() -> None:
        running = asyncio.create_task(desk.desk.run())
        desk.desk.carry_out(api.DrainNode(drain=1, node="n3", reason="job 77 lost rank 4"))
        while not began.is_set():
            await asyncio.sleep(0.001)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        go_on.set()
        await desk.desk.close()

    asyncio.run(asyncio.wait_for(play(), 20))
    steps = [(step.step, step.outcome) for step in desk.of(api.DrainStep)]
    assert steps == [("slurm", "refused"), ("spool", "refused"), ("exclusion", "done")]


def test_a_job_that_was_submitted_is_found_again(tmp_path: Path) -> None:
    """By a supervisor that asks again for what the last one decided."""
    assert replacement.submitted(tmp_path) is None
    (tmp_path / "slurm_job").write_text("41\n")
    wanted = ReplacementJob(
        folder=str(tmp_path), name="r1", comment="", command=("true",), seconds=60, wait_s=60, asked=JobRequest()
    )
    assert replacement.submit(wanted, environment={}) == "41"


def test_states_are_told_with_the_flags_that_count() -> None:
    view = NodeView(name="n1", state="down", flags=frozenset({"not_responding", "completing", "drain"}))
    assert state_of(view) == "down+drain+not_responding"
