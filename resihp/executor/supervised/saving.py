"""Writes a rank's part of checkpoints while training continues, and reports it to the supervisor.

Decides when this rank writes: after a step that is due, or on an order of the supervisor. Never decides whether a
checkpoint is complete. Called by `worker`.
"""

from __future__ import annotations

import time
from pathlib import Path

from resihp.executor.engine import Engine
from resihp.executor.state import checkpoint
from resihp.executor.supervised.activities import during
from resihp.parallelism.plan import Plan
from resihp.protocol import client as agent
from resihp.protocol import messages as m
from resihp.worker import checkpoints


class PartSaver:
    """Writes this rank's part of each checkpoint: one every `interval` iterations, and one after the last of
    `iterations`."""

    def __init__(self, client: agent.AgentClient, engine: Engine, iterations: int, folder: Path, interval: int) -> None:
        self._client = client
        self._engine = engine
        self._rank = client.start.rank
        self._iterations = iterations
        self._folder = folder
        self._interval = interval
        self._writer = checkpoint.Writer()
        self._requested = self._completed = 0
        """Number of the last checkpoint order passed on to other ranks, and number of the last one completed."""

    def is_busy(self) -> bool:
        """Return whether the previous checkpoint is still being written."""
        return self._writer.busy

    def is_asked(self) -> bool:
        """Return whether this rank must tell the other ranks to write a checkpoint of the current iteration."""
        self._requested = self._client.save_number
        return self._requested > self._completed

    def after_step(self, plan: Plan, iteration: int, outcome: m.StepOutcome) -> None:
        """Start writing a checkpoint of `iteration`, if it is due or was ordered on any rank."""
        if outcome.save or checkpoints.is_due(self._interval, iteration, self._iterations):
            self._save(plan, iteration, outcome.saving)
        if outcome.save and not outcome.saving:
            self._completed = self._requested

    def save_parked(self, plan: Plan, replica: int) -> None:
        """Write this rank's part of the checkpoint by `replica`, while all ranks are parked."""
        engine, began = self._engine, time.perf_counter()
        with during(self._client, "checkpoint"):
            self._writer.wait()
            folder = checkpoints.folder_of(self._folder, engine.stepped)
            file, size = checkpoint.save_part(engine, plan, folder, replica)
        self._report(plan, engine.stepped, file, size, began)

    def _save(self, plan: Plan, iteration: int, saving: bool) -> None:
        """Start writing this rank's part of a checkpoint while training continues; after the last iteration, write it
        at once.

        `saving` means that some rank is still writing the previous checkpoint; all ranks then skip this one.
        """
        if self._rank not in plan.layout.model_copy(0).ranks:
            return
        last = iteration == self._iterations
        if saving and not last:
            print(f"checkpoint of iteration {iteration}: skipped, the previous one is still being written", flush=True)
            return
        began = time.perf_counter()
        folder = checkpoints.folder_of(self._folder, iteration)
        with during(self._client, "checkpoint"):
            self._writer.wait()
            part = checkpoint.part_of(self._engine, plan)
            if last:
                self._report(plan, iteration, part.file, checkpoint.write_part(part, folder), began)
                return
        self._writer.begin(
            part,
            folder,
            lambda size: self._report(plan, iteration, part.file, size, began),
            lambda error: self._report(plan, iteration, part.file, 0, began, error),
        )

    def _report(
        self, plan: Plan, iteration: int, file: str, size: int, began: float, error: Exception | None = None
    ) -> None:
        self._client.send(
            m.CheckpointPart(
                epoch=plan.epoch,
                iteration=iteration,
                folder=str(checkpoints.folder_of(self._folder, iteration)),
                file=file,
                bytes=size,
                seconds=time.perf_counter() - began,
                error="" if error is None else f"{type(error).__name__}: {error}",
            )
        )
