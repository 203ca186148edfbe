"""The trainer that users call: under an agent it follows the supervisor's plans, otherwise it trains with one fixed
layout.

Without an agent, this module contains the training loop; under an agent, `supervised.worker` does. `engine.Engine`
computes an iteration. Never decides about failures. Called by the user's script, as `resihp.Trainer`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import torch
from megatron.core.transformer import TransformerConfig

from resihp.errors import LayoutError
from resihp.executor import emulation
from resihp.executor.communicators import COMMUNICATION_TIMEOUT_S
from resihp.executor.compute.rotary import Rotary
from resihp.executor.compute.stage import PositionEmbedding
from resihp.executor.config_support import Layers, ignored, layers_message, refuse_layers
from resihp.executor.engine import Engine
from resihp.executor.group_store import Store, TorchRendezvous
from resihp.executor.state import checkpoint
from resihp.executor.state.optimizer import AdamW
from resihp.executor.supervised.worker import SupervisedWorker
from resihp.executor.tensor_group import dist
from resihp.faults import Phase
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan, spread
from resihp.parallelism.transfers import Base
from resihp.parallelism.workload import Dataset, Evaluation
from resihp.protocol import client as agent
from resihp.worker import checkpoints


class Trainer:
    """Trains a GPT-like model of megatron-core layers under any layout that the job has.

    ==================  =====================================================================================
    `config`            megatron-core's TransformerConfig; a setting that is not supported raises ModelError
    `vocab_size`        number of tokens; tables are padded to a multiple of `make_vocab_size_divisible_by`
    `dataset`           `resihp.Dataset`: `micro_batches(iteration)`, pure
    `optimizer`         `resihp.AdamW(...)`
    `evaluation`        `resihp.Evaluation(dataset, every, iterations)` for a validation loss; None: no evaluation
    `sequence`          length of the longest document; positions restart with each document
    `layers`            "local": megatron-core's own; "transformer_engine" raises a ModelError with the reason
    `tp`, `pp`, ...     the layout without `resihp run` (plain python or torchrun); ignored under `resihp run`
    `checkpoint_*`      checkpoints without `resihp run`; ignored under `resihp run`
    `share_embeddings_and_output_weights`, `position_embedding`, `rotary_base`, `rotary_percent`, `rope_scaling`,
    `rope_scaling_factor`, `seq_len_interpolation_factor`: as in megatron-core's GPTModel
    ==================  =====================================================================================
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        vocab_size: int,
        dataset: Dataset,
        optimizer: AdamW,
        sequence: int,
        seed: int = 1234,
        position_embedding: PositionEmbedding = "rope",
        rotary_base: int = 10000,
        rotary_percent: float = 1.0,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        seq_len_interpolation_factor: float | None = None,
        share_embeddings_and_output_weights: bool = False,
        make_vocab_size_divisible_by: int = 128,
        layers: Layers = "local",
        evaluation: Evaluation | None = None,
        tp: int = 1,
        pp: int = 1,
        schedule: str = "1f1b",
        virtual_stages: int = 1,
        sequence_parallel: bool = False,
        checkpoint_every: int = 0,
        checkpoint_folder: str | os.PathLike[str] = "checkpoints",
        resume: bool = False,
    ) -> None:
        self._client = agent.attach()
        refuse_layers(layers)
        if "OMP_NUM_THREADS" not in os.environ or self._client is not None:
            torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
        self._tp, self._pp, self._chunks = tp, pp, virtual_stages
        self._schedule, self._sequence_parallel = schedule, sequence_parallel
        if self._client is not None:
            start = self._client.start
            checkpoint_every, checkpoint_folder, resume = start.checkpoint_every, start.checkpoint_folder, start.resume
        self._save_every, self._folder, self._resume = checkpoint_every, Path(checkpoint_folder), resume
        self.engine = Engine(
            config,
            vocab_size=vocab_size,
            dataset=dataset,
            optimizer=optimizer,
            seed=seed,
            sequence=sequence,
            position_embedding=position_embedding,
            rotary=Rotary(
                rotary_base=rotary_base,
                rotary_percent=rotary_percent,
                rope_scaling=rope_scaling,
                rope_scaling_factor=rope_scaling_factor,
                seq_len_interpolation_factor=seq_len_interpolation_factor,
            ),
            tied=share_embeddings_and_output_weights,
            vocab_multiple=make_vocab_size_divisible_by,
            evaluation=evaluation,
        )
        self.engine.wires = emulation.wires_of(os.environ, self.engine.device)
        self.engine.pace = emulation.pace_of(os.environ, self.engine.model, self.engine.device)
        self._print_notices(config)

    def _print_notices(self, config: TransformerConfig) -> None:
        """Print a notice if a speed is emulated, and, on rank 0, notices about ignored settings."""
        if self.engine.pace is not None:
            print(f"{emulation.LAYER_MS} is set: sleeps in every chunk, to emulate a device of that speed", flush=True)
        rank = int(os.environ.get("RANK", "0")) if self._client is None else self._client.start.rank
        if rank:
            return
        meaningless = ignored(config)
        if meaningless:
            print(f"transformer config: ignored: {', '.join(meaningless)}", flush=True)
        message = layers_message(config)
        if message:
            print(message, flush=True)

    def train(self, iterations: int) -> None:
        """Train up to and including iteration `iterations`; with `resume`, start from the newest checkpoint.

        Raises a `UsageError` before any communicator is built if the job cannot run as configured. Raises
        torch.OutOfMemoryError with a note about the expected memory.
        """
        try:
            self._train(iterations)
        except torch.OutOfMemoryError as error:
            error.add_note(self.engine.memory_expected())
            raise

    def _train(self, iterations: int) -> None:
        resume_folder = checkpoints.newest_complete(self._folder) if self._resume else None
        resume_from = checkpoints.iteration_of(resume_folder) if resume_folder else 0
        if self._client is not None:
            with self._client.deaf():
                SupervisedWorker(
                    self._client, self.engine, resume_folder, resume_from, iterations, self._folder, self._save_every
                ).run()
        else:
            self._train_alone(resume_folder, resume_from, iterations)

    def _train_alone(self, resume_folder: Path | None, resume_from: int, iterations: int) -> None:
        """Train without an agent: under torchrun, or as a single process."""
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if world % (self._tp * self._pp):
            raise LayoutError(f"tp={self._tp} pp={self._pp} does not divide the {world} processes that were started")
        layout = Layout.uniform(
            tp=self._tp,
            pp=self._pp,
            dp=world // (self._tp * self._pp),
            layers=self.engine.model.layers,
            chunks=self._chunks,
        )
        plan = Plan(
            epoch=1,
            layout=layout,
            assignment=spread(self.engine.batch_sizes.at(resume_from + 1), len(layout.replicas)),
            schedule=self._schedule,
            sequence_parallel=self._sequence_parallel,
        )
        self.engine.adopt(plan, rank)
        if resume_folder is not None:
            checkpoint.load(self.engine, resume_folder)
        rendezvous = TorchRendezvous(_torchrun_store(world))
        self.engine.connect(plan, rank, rendezvous, COMMUNICATION_TIMEOUT_S)
        observer = _NoObserver()
        evaluation = self.engine.evaluation
        for iteration in range(resume_from + 1, iterations + 1):
            began = time.perf_counter()
            outcome = self.engine.run(plan, iteration, observer)
            self.engine.step(outcome)
            if rank == 0:
                print(
                    f"iteration {iteration}/{iterations} | loss {outcome.loss:.6f} | "
                    f"grad norm {outcome.gradient_norm:.4f} | {time.perf_counter() - began:.3f} s",
                    flush=True,
                )
            if checkpoints.is_due(self._save_every, iteration, iterations):
                self._save_alone(plan, rank, iteration)
            if evaluation is not None and evaluation.is_due(iteration, iterations):
                loss, _ = self.engine.evaluate(plan, observer)
                if rank == 0:
                    print(f"iteration {iteration}/{iterations} | validation loss {loss:.6f}", flush=True)
            if outcome.pause and iteration < iterations:
                plan = self._resized(plan, rank, iteration + 1, rendezvous)
        self.engine.disconnect()

    def _resized(self, plan: Plan, rank: int, iteration: int, rendezvous: TorchRendezvous) -> Plan:
        """Switch to a plan with the same layout and the larger number of micro-batches from `iteration` on; return this
        plan."""
        engine, base = self.engine, Base(epoch=plan.epoch, layout=plan.layout, survivors=plan.layout.active)
        plan = msgspec.structs.replace(plan.dealing(engine.batch_sizes.at(iteration)), epoch=plan.epoch + 1)
        engine.disconnect()
        engine.adopt(plan, rank, base)
        engine.connect(plan, rank, rendezvous, COMMUNICATION_TIMEOUT_S)
        engine.move(plan, _NoObserver(), iteration - 1, engine.updates)
        engine.begin(plan.epoch)
        return plan

    def _save_alone(self, plan: Plan, rank: int, iteration: int) -> None:
        folder = checkpoints.folder_of(self._folder, iteration)
        writers = plan.layout.model_copy(0).ranks
        part = checkpoint.save_part(self.engine, plan, folder) if rank in writers else None
        parts = self.engine.gather(part)
        if rank == 0:
            written = [(str(file), int(size)) for file, size in (p for p in parts if p is not None)]
            layout = plan.layout.describe()
            checkpoints.write_manifest(folder, iteration, written, self.engine.fingerprint, layout=layout)


class _NoObserver:
    """Observer that ignores all events, for training without a supervisor."""

    def enter(self, phase: Phase) -> None: ...
    def progressed(self) -> None: ...
    def communicating(self, waits: bool) -> None: ...


def _torchrun_store(world: int) -> Store:
    """Return the store that torchrun's environment variables describe, also if set by hand; for a single process, a
    private store."""
    if world == 1:
        return dist.HashStore()
    try:
        store, _, _ = next(dist.rendezvous("env://"))
    except ValueError as error:
        raise LayoutError(
            f"WORLD_SIZE={world} without a rendezvous ({error}); start with torchrun or resihp run"
        ) from error
    return store
