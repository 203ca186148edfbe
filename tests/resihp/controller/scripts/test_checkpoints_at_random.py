"""A script with checkpoints under failures, take-overs, joining nodes, and searches that are late, hang or fail, all in
random order."""

from __future__ import annotations

import math
import random

import pytest

from resihp.controller import Controller
from resihp.controller import interface as api
from resihp.protocol import messages as m
from resihp.record.fold import fold
from resihp.record.journal import WorkersOrdered
from resihp.record.scripts.checkpoints import StoredCheckpoint, version_of
from tests.resihp.controller.rounds.test_restarts import Script


class World:
    """Four nodes, their processes, a disk with checkpoints, and the present supervisor."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.job = Script(
            nodes=4,
            min_nodes=self.draw.choice([1, 2]),
            slurm=True,
            replacements=3,
            max_restarts=12,
            finds_checkpoints=self.draw.random() < 0.7,
            takes_checkpoint=True,
        )
        self.running: dict[int, str] = {}
        self.ended: dict[str, int] = {}
        self.pending: list[api.AnyAction] = []
        self.answers: list[api.AnyEvent] = []
        self.disk: dict[str, StoredCheckpoint] = {}
        self.iteration = self.joined = 0
        self.job.join(*self.job.settings.node_names)

    @property
    def alive(self) -> list[str]:
        return [name for name, node in self.job.controller.job.nodes.items() if node.alive]

    def take_orders(self) -> None:
        for action in self.job.actions[self.job.obeyed :]:
            if isinstance(action, api.Log) and isinstance(action.entry, WorkersOrdered):
                self.check_choice(action.entry)
        self.pending += self.job.actions[self.job.obeyed :]
        self.job.obeyed = len(self.job.actions)

    def check_choice(self, order: WorkersOrdered) -> None:
        stored = self.job.controller.job.search.stored
        checkpoints = fold(self.job.journal).checkpoints
        distrusted, on_disk = checkpoints.distrusted, {checkpoint.version for checkpoint in self.disk.values()}
        trusted = [checkpoint for checkpoint in stored if checkpoint.version not in distrusted]
        assert bool(order.checkpoint) == bool(stored), "begins anew only without a checkpoint"
        known = {version_of(checkpoint) for checkpoint in checkpoints.by_path.values()}
        assert order.checkpoint or not known & on_disk, "none that was known before is forgotten"
        if trusted:
            assert order.checkpoint == trusted[0].path, "the newest that is trusted"

    def carry_out(self, action: api.AnyAction) -> None:
        job = self.job
        if isinstance(action, api.StartWorkers) and job.controller.job.nodes[action.node].alive:
            for rank, device in action.workers:
                assert rank not in self.running, "two processes of one rank"
                self.running[rank] = action.node
                job.feed(api.WorkerSpawned(rank=rank, node=action.node, device=device, pid=100 + rank))
        elif isinstance(action, api.EndProcesses) and job.controller.job.nodes[action.node].alive:
            self.answers.append(api.ProcessesEnded(node=action.node, round=action.round))
            if action.round > self.ended.get(action.node, -1):
                self.ended[action.node] = action.round
                for rank in self.end_on(action.node):
                    job.feed(api.WorkerExited(rank=rank, status=-15))
        elif isinstance(action, api.DropNode):
            self.end_on(action.node)
        elif isinstance(action, api.FindCheckpoints):
            newest = sorted(self.disk.values(), key=lambda stored: stored.modified, reverse=True)
            paths = set(action.reported) if not job.settings.finds_checkpoints else self.disk.keys()
            error = "" if self.draw.random() < 0.8 else "Input/output error"
            found = () if error else tuple(stored for stored in newest if stored.path in paths)
            self.answers.append(api.CheckpointsFound(checkpoints=found, error=error))

    def end_on(self, node: str) -> list[int]:
        ranks = [rank for rank, at in self.running.items() if at == node]
        for rank in ranks:
            del self.running[rank]
        return ranks

    def save(self) -> None:
        path = f"/ckpt/step_{self.iteration}"
        self.disk[path] = StoredCheckpoint(path=path, iteration=self.iteration, modified=self.job.now, bytes=1)
        if self.running and self.draw.random() < 0.8:
            report = m.ScriptSaved(path=path, iteration=self.iteration)
            self.job.feed(api.WorkerSaid(rank=min(self.running), message=report))
        if len(self.disk) > 3:  # the script keeps few
            del self.disk[next(iter(self.disk))]

    def print_iterations(self) -> None:
        loss, number = (2.0, 5) if self.draw.random() < 0.8 else (math.nan, 21)
        for _ in range(number):
            self.iteration += 1
            figures = (m.PrintedFigures(iteration=self.iteration, seconds=0.5, loss=loss),)
            self.job.feed(api.WorkerPrinted(printed=m.Printed(rank=0, figures=figures)), 0.5)

    def change_supervisor(self) -> None:
        before, alive = self.job, self.alive
        for name in before.controller.job.nodes.keys() - set(alive):
            self.end_on(name)  # its agent has no supervisor any more
        self.pending.clear()
        self.answers = [answer for answer in self.answers if not isinstance(answer, api.CheckpointsFound)]
        self.job = Script(controller=Controller.recover(before.settings, before.journal), nodes=4)
        self.job.settings, self.job.now = before.settings, before.now
        self.job.actions = [api.Log(entry=entry) for entry in before.journal]
        self.job.obeyed = len(self.job.actions)
        for name in alive:
            here = [rank for rank, node in self.running.items() if node == name]
            workers = tuple(m.RunningWorker(rank=rank, device=rank % 2, pid=100 + rank) for rank in here)
            inventory = m.Inventory(workers=workers)
            self.job.feed(api.AgentJoined(node=name, host=name, devices=2, inventory=inventory))

    def happen(self) -> None:
        """Let something happen."""
        event = self.draw.random()
        if event < 0.12 and self.running:
            rank = self.draw.choice(sorted(self.running))
            del self.running[rank]
            self.job.feed(api.WorkerExited(rank=rank, status=self.draw.choice([-9, 1])))
        elif event < 0.16 and len(self.alive) > 1:
            name = self.draw.choice(self.alive)
            self.end_on(name)
            self.job.lose(name)
        elif event < 0.22:
            self.change_supervisor()
        elif event < 0.26 and self.joined < 3:
            self.joined += 1
            name = f"n{90 + self.joined}"
            self.job.feed(api.AgentJoined(node=name, host=name, devices=2, lease=self.joined))
        elif event < 0.4 and 0 in self.running:
            self.print_iterations()
        elif event < 0.5 and self.running:
            self.save()
        elif event < 0.55 and self.alive:
            self.job.feed(api.AgentBeat(node=self.alive[0], beat=m.Beat(workers=(), met=True)))
        else:
            self.job.wait(self.draw.choice([1, 5, 16]))

    def step(self) -> None:
        self.take_orders()
        if self.pending and self.draw.random() < 0.7:
            self.carry_out(self.pending.pop(0))
        elif self.answers and self.draw.random() < 0.5:
            self.job.feed(self.answers.pop(0))
        elif self.job.end is None:
            self.happen()
        self.job.controller.check()

    def finish(self) -> None:
        """Let all processes end well, with nodes that obey at once. Some searches are never answered."""
        hangs = self.draw.random() < 0.5
        for _ in range(200):
            self.take_orders()
            while self.pending and self.job.end is None:
                self.carry_out(self.pending.pop(0))
                self.take_orders()
            answers, self.answers = self.answers, []
            for answer in answers:
                if not (hangs and isinstance(answer, api.CheckpointsFound)):
                    self.job.feed(answer)
            if self.job.controller.job.stage == "gathering" and not self.pending:
                for rank in sorted(self.running):
                    del self.running[rank]
                    self.job.feed(api.WorkerExited(rank=rank, status=0))
            if self.job.end is not None:
                return
            self.job.wait(5)


@pytest.mark.parametrize("seed", range(150))
def test_rounds_resume_from_the_newest_trusted_checkpoint_and_the_job_ends(seed: int) -> None:
    world = World(seed)
    for _ in range(200):
        if world.job.end is not None:
            break
        world.step()
    record, folded = world.job.controller.job.record, fold(world.job.journal)
    assert (folded.round, folded.restart, folded.fruitless) == (record.round, record.restart, record.fruitless)
    assert folded.checkpoints == record.checkpoints
    world.finish()
    assert world.job.end is not None, "the job hangs"
    assert world.job.end[0] in (0, 1, 5, 75, 93)
