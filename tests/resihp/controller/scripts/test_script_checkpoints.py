"""The checkpoints of a script that does not use resihp.Trainer: which one it resumes from, which one is distrusted, and
when it is started again on more nodes."""

from __future__ import annotations

import math
from typing import Any

from resihp.controller import Controller
from resihp.controller import interface as api
from resihp.protocol import messages as m
from resihp.record.fold import fold
from resihp.record.journal import (
    CheckpointCommitted,
    CheckpointDistrusted,
    FailureFound,
    RestartDecided,
    WorkersOrdered,
)
from resihp.record.scripts.checkpoints import StoredCheckpoint
from tests.resihp.controller.rounds.test_restarts import Script


class Saving(Script):
    """A script whose checkpoints are on a disk; searches are answered at once."""

    def __init__(self, controller: Controller | None = None, **settings: Any) -> None:
        self.disk: dict[str, StoredCheckpoint] = {}
        self.is_hung = False
        super().__init__(controller, **({"finds_checkpoints": True, "takes_checkpoint": True} | settings))

    def save(self, iteration: int, name: str = "step_{}", *, look: bool = True) -> None:
        path = f"/ckpt/{name.format(iteration)}"
        number = None if name == name.format(iteration) else iteration
        self.disk[path] = StoredCheckpoint(path=path, iteration=number, modified=self.now, bytes=7)
        if look:
            self.look()

    def look(self) -> None:
        for _ in range(16):
            self.wait(1)
            self.obey()

    def prints(self, *iterations: int, loss: float | None = 2.0) -> None:
        for iteration in iterations:
            figures = (m.PrintedFigures(iteration=iteration, seconds=0.5, loss=loss),)
            self.feed(api.WorkerPrinted(printed=m.Printed(rank=0, figures=figures, goal=100_000)), 0.5)
            for node in self.controller.job.nodes.values():
                node.last_beat = self.now
        self.obey()

    def obey_one(self) -> None:
        if not isinstance(self.actions[self.obeyed], api.FindCheckpoints):
            super().obey_one()
            return
        self.obeyed += 1
        if not self.is_hung:
            newest = sorted(self.disk.values(), key=lambda stored: stored.modified, reverse=True)
            self.feed(api.CheckpointsFound(checkpoints=tuple(newest)))

    def kill(self, rank: int) -> None:
        super().kill(rank)
        self.obey()

    def raise_on(self, rank: int, error: str = "ValueError: a bad batch") -> None:
        self.feed(api.WorkerSaid(rank=rank, message=m.Raised(iteration=0, error=error, traceback=error)))
        self.feed(api.WorkerExited(rank=rank, status=1))
        self.wait(4)
        self.obey()

    @property
    def resumed(self) -> list[str]:
        """The checkpoint of each round."""
        return [entry.checkpoint.removeprefix("/ckpt/") for entry in self.all(WorkersOrdered)]

    @property
    def distrusted(self) -> list[str]:
        return [entry.folder.removeprefix("/ckpt/") for entry in self.all(CheckpointDistrusted)]

    @property
    def started_with(self) -> list[tuple[str, int]]:
        starts = [action for action in self.actions if isinstance(action, api.StartWorkers)]
        return [(start.checkpoint, start.checkpoint_iteration) for start in starts]


def saving(**settings: Any) -> Saving:
    job = Saving(**settings)
    job.begin()
    return job


def test_the_script_resumes_from_the_newest_checkpoint() -> None:
    job = saving()
    job.prints(*range(1, 11))
    job.save(5)
    job.save(10)
    job.kill(2)
    assert job.resumed == ["", "step_10"]
    assert job.started_with[-1] == ("/ckpt/step_10", 10)
    assert [entry.iteration for entry in job.all(CheckpointCommitted)] == [5, 10]
    assert any("from /ckpt/step_10 (iteration 10)" in text for text in job.texts)
    record = fold(job.journal)
    assert record.checkpoints.resumed is not None
    assert (record.checkpoints.resumed.iteration, record.checkpointed) == (10, 10)


def test_a_checkpoint_completed_while_the_processes_end_counts() -> None:
    job = saving()
    job.prints(*range(1, 11))
    job.save(5)
    job.save(10, look=False)
    job.kill(2)
    assert job.resumed == ["", "step_10"]


def test_a_job_that_is_run_again_begins_with_the_newest_checkpoint_on_disk() -> None:
    job = Saving()
    job.save(40, look=False)
    job.now += 5
    job.save(50, look=False)
    job.begin()
    assert job.resumed == ["step_50"]
    assert [entry.iteration for entry in job.all(CheckpointCommitted)] == [50], "older ones are none of this job's"
    assert job.started_with == [("/ckpt/step_50", 50)] * 2


def test_a_file_system_that_hangs_delays_a_start_by_a_minute_at_most() -> None:
    job = Saving()
    job.is_hung = True
    job.begin()
    job.wait(55)
    assert not job.starts, "the script would begin anew, although it may have checkpoints"
    job.wait(7)
    assert len(job.starts) == 2
    job.obey()
    assert any("has not succeeded within 60 s" in text for text in job.texts)


def test_a_file_system_that_hangs_delays_a_restart_by_ten_seconds_only() -> None:
    job = saving()
    job.save(5)
    job.is_hung = True
    job.kill(2)
    assert len(job.starts) == 2
    job.wait(12)
    job.obey()
    assert job.resumed == ["", "step_5"]


def test_without_a_pattern_and_without_reports_nothing_is_looked_for() -> None:
    job = saving(finds_checkpoints=False)
    job.save(5)
    job.kill(2)
    assert job.resumed == ["", ""]
    assert not [action for action in job.actions if isinstance(action, api.FindCheckpoints)]


def test_a_reported_checkpoint_needs_no_pattern() -> None:
    job = saving(finds_checkpoints=False)
    job.prints(*range(1, 8))
    job.save(7, "any name", look=False)
    job.feed(api.WorkerSaid(rank=0, message=m.ScriptSaved(path="/ckpt/any name", iteration=None)))
    job.obey()
    job.kill(2)
    assert job.started_with[-1] == ("/ckpt/any name", 7), "the last printed iteration"


def test_two_checkpoints_reported_at_once_are_both_found() -> None:
    job = saving(finds_checkpoints=False)
    for iteration in (3, 4):
        job.save(iteration, look=False)
        job.feed(api.WorkerSaid(rank=0, message=m.ScriptSaved(path=f"/ckpt/step_{iteration}", iteration=iteration)))
    job.obey()
    job.kill(2)
    assert job.resumed == ["", "step_4"]


def test_the_last_checkpoint_is_known_when_the_job_ends() -> None:
    job = saving()
    job.prints(*range(1, 11))
    job.save(10, look=False)
    for rank in range(4):
        assert job.end is None
        job.feed(api.WorkerExited(rank=rank, status=0))
    job.obey()
    assert job.end is not None
    assert job.end[0] == 0
    assert [entry.iteration for entry in job.all(CheckpointCommitted)] == [10]


def test_a_hanging_file_system_does_not_keep_a_job_from_ending() -> None:
    job = saving()
    job.is_hung = True
    for rank in range(4):
        job.feed(api.WorkerExited(rank=rank, status=0))
    job.wait(12)
    assert job.end is not None


# --- trust ----------------------------------------------------------------------------------------------------------


def crashing(**settings: Any) -> Saving:
    """A script that has saved three checkpoints, and has failed once in iteration 35."""
    job = saving(**settings)
    for begin in (1, 11, 21):
        job.prints(*range(begin, begin + 10))
        job.save(begin + 9)
    job.prints(*range(31, 35))
    job.raise_on(1)
    return job


def fail_again(job: Saving, begin: int, end: int = 35) -> None:
    job.prints(*range(begin, end))
    job.raise_on(1)


def test_a_checkpoint_that_led_to_the_same_failure_twice_is_not_loaded_a_third_time() -> None:
    job = crashing()
    assert job.resumed[-1] == "step_30"
    fail_again(job, 31)
    assert job.resumed[-1] == "step_30", "once may be bad luck"
    fail_again(job, 31)
    assert job.resumed == ["", "step_30", "step_30", "step_20"]
    assert job.distrusted == ["step_30"]
    assert any("/ckpt/step_30: no longer used to resume from" in text for text in job.texts)


def test_an_older_checkpoint_with_the_same_failure_is_given_up_at_once() -> None:
    job = crashing()
    for begin in (31, 31, 21):
        fail_again(job, begin)
    assert job.resumed[-1] == "step_10"
    assert job.distrusted == ["step_30", "step_20"]


def test_a_script_that_fails_from_every_checkpoint_ends() -> None:
    job = crashing()
    for begin in (31, 31, 21, 11, 11, 11):
        if job.end is None:
            fail_again(job, begin)
    assert job.end is not None
    assert job.end[0] == 93
    assert "step_10" not in job.distrusted, "the last one: without a checkpoint the script would begin anew"


def test_other_failures_do_not_make_a_checkpoint_bad() -> None:
    job = crashing()
    fail_again(job, 31, end=50)  # much further than before
    job.raise_on(1, "OSError: another one")
    for iteration in (31, 40):
        job.prints(iteration)
        job.kill(2)
    assert job.resumed == ["", *["step_30"] * 5]
    assert not job.distrusted


def test_failures_of_hardware_do_not_make_a_checkpoint_bad() -> None:
    job = saving(nodes=4, min_nodes=1, slurm=False)
    job.prints(*range(1, 11))
    job.save(5)
    job.save(10)
    for name in ("n4", "n3", "n2"):
        job.lose(name)
        job.obey()
    assert job.resumed == ["", *["step_10"] * 3]


def test_a_checkpoint_saved_again_at_the_same_path_is_another_one() -> None:
    job = crashing()
    for begin in (31, 31):
        fail_again(job, begin)
    job.prints(*range(21, 31))
    job.save(30)
    job.prints(*range(31, 60))
    job.save(60)
    job.kill(2)
    assert job.resumed[-1] == "step_60"
    assert job.distrusted == ["step_30"]


def test_a_script_that_finds_its_checkpoints_by_itself_is_not_given_an_older_one() -> None:
    job = crashing(takes_checkpoint=False)
    for begin in (31, 31):
        fail_again(job, begin)
    assert not job.distrusted


def test_trust_survives_a_take_over() -> None:
    job = crashing()
    for begin in (31, 31):
        fail_again(job, begin)
    record = fold(job.journal)
    assert [path for path, _ in record.checkpoints.distrusted] == ["/ckpt/step_30"]
    assert record.checkpoints.resumed is not None
    assert record.checkpoints.resumed.folder == "/ckpt/step_20"


# --- losses ---------------------------------------------------------------------------------------------------------


def test_losses_that_stay_not_finite_lead_back_to_the_checkpoint() -> None:
    job = saving()
    job.prints(*range(1, 31))
    job.save(30)
    job.prints(*range(31, 45))
    job.prints(*range(45, 65), loss=math.nan)
    assert job.resumed == ["", "step_30"]
    (failure,) = job.all(FailureFound)
    assert (failure.component, failure.cause) == ("script", "the loss is not finite since iteration 45")
    assert job.all(RestartDecided)[0].progressed is False


def test_a_checkpoint_with_bad_losses_is_not_taken() -> None:
    job = saving()
    job.prints(*range(1, 31))
    job.save(30)
    job.prints(*range(31, 41), loss=math.nan)
    job.save(40)
    job.prints(*range(41, 51), loss=math.nan)
    assert job.distrusted == ["step_40"]
    assert job.resumed == ["", "step_30"]


def test_a_loss_that_recovers_is_left_alone() -> None:
    job = saving()
    job.prints(*range(1, 31))
    job.save(30)
    for begin in range(31, 231, 20):
        job.prints(*range(begin, begin + 19), loss=math.inf)
        job.prints(begin + 19)
    assert job.resumed == [""]


def test_a_rank_that_always_prints_nan_says_nothing() -> None:
    job = saving()
    job.save(30)
    job.prints(*range(1, 231), loss=math.nan)
    job.kill(2)
    job.prints(*range(31, 231), loss=math.nan)
    assert job.resumed == ["", "step_30"]


def test_one_bad_loss_does_not_make_a_checkpoint_bad() -> None:
    job = saving()
    job.prints(*range(1, 30))
    job.prints(30, loss=math.inf)
    job.save(30)
    job.prints(*range(31, 60))
    job.kill(2)
    assert job.resumed == ["", "step_30"]
    assert not job.distrusted


def test_a_checkpoint_that_is_found_after_the_bad_losses_is_still_older() -> None:
    job = saving()
    job.prints(*range(1, 31))
    job.save(30, look=False)
    job.prints(*range(31, 56), loss=math.nan)
    job.prints(56, loss=math.nan)
    assert job.resumed == ["", "step_30"]


def test_bad_losses_with_no_restart_left_are_no_failure_in_the_record() -> None:
    job = saving(max_restarts=0)
    job.prints(*range(1, 31))
    job.save(30)
    job.prints(*range(31, 65), loss=math.nan)
    assert not job.all(FailureFound)
    assert job.resumed == [""]


def test_without_an_older_checkpoint_the_script_goes_on_with_its_bad_losses() -> None:
    job = saving()
    job.prints(*range(1, 31))
    job.prints(*range(31, 231), loss=math.nan)
    assert job.resumed == [""]
    assert job.end is None


def test_a_loss_far_above_its_history_after_a_restart_leads_to_an_older_checkpoint() -> None:
    job = saving()
    job.prints(*range(1, 31), loss=2.1)
    job.save(30)
    job.prints(*range(31, 61), loss=2.0)
    job.save(60)
    job.prints(*range(61, 100), loss=2.0)
    job.kill(2)
    for _ in range(2):
        job.prints(*range(61, 81), loss=9.0)
    assert job.resumed == ["", "step_60", "step_60", "step_30"]
    job.prints(*range(31, 90), loss=2.2)
    assert job.resumed[-1] == "step_30"
    assert len(job.resumed) == 4


def test_a_script_that_begins_anew_may_have_any_loss() -> None:
    job = saving()
    job.prints(*range(1, 100), loss=2.0)
    job.kill(2)
    job.prints(*range(1, 40), loss=11.0)
    assert job.resumed == ["", ""]


# --- growth ---------------------------------------------------------------------------------------------------------


def shrunk(**settings: Any) -> Saving:
    """A script of four nodes that goes on with three."""
    job = saving(**({"nodes": 4, "min_nodes": 2, "slurm": True, "replacements": 2} | settings))
    job.prints(*range(1, 11))
    job.save(10)
    job.lose("n4")
    job.obey()
    assert len(set(job.rounds[-1][1])) == 3
    return job


def rejoin(job: Saving) -> None:
    for _ in range(3):
        job.look()
    job.feed(api.AgentJoined(node="n9", host="n9", devices=2, lease=1))
    job.obey()


def test_the_script_grows_back_at_a_checkpoint() -> None:
    job = shrunk()
    rejoin(job)
    job.prints(*range(11, 15))
    assert len(job.rounds) == 2, "no iteration is lost for a node that joins"
    job.save(14)
    assert job.resumed[-1] == "step_14"
    assert set(job.rounds[-1][1]) == {"n1", "n2", "n3", "n9"}
    decision = job.all(RestartDecided)[-1]
    assert decision.is_planned
    assert "n9 joined" in decision.reason
    assert len(job.all(FailureFound)) == 1


def test_growth_does_not_count_as_a_restart_of_the_user() -> None:
    job = shrunk(max_restarts=2)
    rejoin(job)
    job.prints(*range(11, 15))
    job.save(14)
    job.kill(0)
    assert len(job.rounds) == 4
    assert job.end is None


def test_the_script_does_not_grow_shortly_before_its_end() -> None:
    job = shrunk()
    rejoin(job)
    figures = (m.PrintedFigures(iteration=99_990, seconds=0.5, loss=2.0),)
    job.feed(api.WorkerPrinted(printed=m.Printed(rank=0, figures=figures, goal=100_000)), 0.5)
    job.save(99_990)
    assert len(job.rounds) == 2


def test_a_script_that_cannot_be_told_its_checkpoint_does_not_grow() -> None:
    job = shrunk(takes_checkpoint=False)
    rejoin(job)
    job.prints(*range(11, 15))
    job.save(14)
    assert len(job.rounds) == 2


def test_a_finished_script_does_not_grow() -> None:
    job = shrunk()
    rejoin(job)
    job.prints(*range(11, 15))
    job.controller.job.record.goal = 0  # it prints no last iteration
    job.save(14, look=False)
    for rank in range(6):
        job.feed(api.WorkerExited(rank=rank, status=0))
    job.obey()
    assert job.end is not None
    assert job.end[0] == 0
    assert len(job.rounds) == 2


# --- take-over, slow searches ---------------------------------------------------------------------------------------


def taken_over(before: Saving) -> Saving:
    """The same job under another supervisor, to which all nodes have reconnected."""
    after = Saving(Controller.recover(before.settings, before.journal))
    after.disk, after.is_hung, after.now = dict(before.disk), before.is_hung, before.now
    for number, name in enumerate(before.settings.node_names):
        workers = tuple(m.RunningWorker(rank=2 * number + d, device=d, pid=10 + d) for d in (0, 1))
        after.feed(api.AgentJoined(node=name, host=name, devices=2, inventory=m.Inventory(workers=workers)))
    after.feed(api.AgentBeat(node="n1", beat=m.Beat(workers=(), met=True)))
    after.obey()
    return after


def test_a_new_supervisor_knows_the_checkpoints_that_the_script_has_reported() -> None:
    before = saving(finds_checkpoints=False)
    before.save(7, look=False)
    before.feed(api.WorkerSaid(rank=0, message=m.ScriptSaved(path="/ckpt/step_7", iteration=7)))
    before.obey()
    after = taken_over(before)
    after.kill(2)
    assert after.resumed == ["step_7"]
    assert after.all(WorkersOrdered)[0].round == 1


def test_a_new_supervisor_with_a_hanging_file_system_uses_the_checkpoints_in_the_journal() -> None:
    before = saving()
    before.save(7)
    before.is_hung = True
    after = taken_over(before)
    after.kill(2)
    after.wait(12)
    after.obey()
    assert after.resumed == ["step_7"]


def test_a_search_that_fails_for_a_while_is_repeated_before_the_start() -> None:
    job = Saving()
    job.save(50, look=False)
    job.is_hung = True
    job.begin()
    job.feed(api.CheckpointsFound(checkpoints=(), error="Input/output error"))
    job.wait(3)
    assert not job.starts, "it would begin anew"
    job.feed(api.CheckpointsFound(checkpoints=tuple(job.disk.values())))
    assert job.resumed == ["step_50"]


def test_checkpoints_of_an_earlier_job_are_none_of_this_job_after_a_failed_search() -> None:
    job = Saving()
    for iteration in (30, 40, 50):
        job.now += 1.0
        job.save(iteration, look=False)
    job.is_hung = True
    job.begin()
    job.feed(api.CheckpointsFound(checkpoints=(), error="Input/output error"))
    job.is_hung = False
    job.wait(2)
    job.obey()
    assert [entry.iteration for entry in job.all(CheckpointCommitted)] == [50]


def test_the_answer_to_a_search_that_began_earlier_is_not_taken_for_a_later_one() -> None:
    job = saving()
    job.save(10)
    job.is_hung = True
    old = tuple(job.disk.values())
    job.wait(16)  # the search hangs
    job.wait(12)
    job.kill(2)
    job.save(20, look=False)
    report = m.ScriptSaved(path="/ckpt/step_20", iteration=20)
    job.feed(api.WorkerSaid(rank=0, message=report))
    job.feed(api.CheckpointsFound(checkpoints=old))
    job.is_hung = False
    job.wait(2)
    job.obey()
    assert job.resumed == ["", "step_20"]


def test_a_slow_search_is_seldom_repeated() -> None:
    job = saving()
    job.is_hung = True
    job.obeyed = len(job.actions)
    for _ in range(10):
        job.wait(20)
        if any(isinstance(action, api.FindCheckpoints) for action in job.actions[job.obeyed :]):
            job.feed(api.CheckpointsFound(checkpoints=()))
        job.obey()
    searches = [action for action in job.actions if isinstance(action, api.FindCheckpoints)]
    assert len(searches) <= 4


def test_all_ranks_may_report_a_checkpoint() -> None:
    job = saving(finds_checkpoints=False)
    job.save(7, look=False)
    for rank in range(4):
        job.feed(api.WorkerSaid(rank=rank, message=m.ScriptSaved(path="/ckpt/step_7", iteration=7)))
    job.obey()
    assert len([action for action in job.actions if isinstance(action, api.FindCheckpoints)]) == 2


def test_checkpoints_completed_just_before_the_failures_are_progress() -> None:
    job = saving(declares=False)
    for iteration in range(10, 80, 10):
        job.wait(5)
        job.save(iteration, look=False)
        job.kill(2)
        job.wait(4)
        job.obey()
    assert job.end is None
    assert job.resumed[-1] == "step_70"


def test_the_user_is_told_that_all_checkpoints_are_gone() -> None:
    job = saving()
    job.save(10)
    job.disk.clear()
    job.kill(2)
    assert job.resumed == ["", ""]
    assert any("no checkpoint is left: /ckpt/step_10" in text for text in job.texts)
