"""Derives from a plan the programs, groups and buckets that one rank needs, and checks them before anything is built.

Refuses a plan that this rank could not carry out. Never builds state or communicators, and never decides which plan is
better. Called by `resihp.executor.engine`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from resihp.errors import LayoutError, PlanError
from resihp.executor.compute.iteration import Prepared
from resihp.parallelism import ownership, transfers
from resihp.parallelism.batch_sizes import BatchSizes
from resihp.parallelism.layout import validate
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.ownership import ParameterSpec
from resihp.parallelism.plan import Plan
from resihp.parallelism.transfers import Base
from resihp.parallelism.workload import Evaluation
from resihp.pipeline import checker, program
from resihp.scheduler.cost import memory, transition_memory
from resihp.scheduler.cost.device_memory import Overhead


class PlanPreparation:
    """Derives programs from plans, and remembers those of the last plan.

    `specs` are the parameters of the model, without and with sequence parallelism. `longest` is the number of tokens of
    the longest micro-batch.
    """

    def __init__(
        self,
        model: ModelSpec,
        specs: Mapping[bool, tuple[ParameterSpec, ...]],
        batch_sizes: BatchSizes,
        evaluation: Evaluation | None,
        longest: int,
        overhead: Overhead,
    ) -> None:
        self._model, self._specs = model, specs
        self._batch_sizes, self._evaluation = batch_sizes, evaluation
        self._longest, self._overhead = longest, overhead
        self._prepared: Prepared | None = None
        self.evaluates: Prepared | None = None
        """Programs of an evaluation under the plan prepared last; None without evaluation."""

    def prepare(self, plan: Plan, rank: int) -> Prepared:
        """Derive programs, groups and buckets from a plan, and check them. Raises LayoutError or PlanError."""
        if self._prepared is not None and self._prepared.plan == plan:
            return self._prepared
        specs = self._specs[plan.sequence_parallel]
        validate(plan.layout, self._model)
        self._check_assignment(plan)
        buckets = program.buckets(plan.layout, specs)
        programs = program.programs(plan, buckets)
        checker.check(plan, programs, buckets)
        degrees = [stage.tp for replica in plan.layout.replicas for stage in replica.stages if stage.ranks]
        prepared = Prepared(
            plan,
            plan.paths(),
            buckets,
            programs,
            program.memberships(plan, programs, buckets),
            ownership.counted(plan.layout, specs).get(rank, ()),
            math.lcm(*degrees) if plan.sequence_parallel else 1,
        )
        if self._evaluation is not None:
            evaluates = self._forward_only(prepared)
            both = {rank: (*own, *evaluates.programs[rank]) for rank, own in programs.items()}
            prepared = msgspec.structs.replace(prepared, memberships=program.memberships(plan, both, buckets))
            self.evaluates = evaluates
        self._prepared = prepared
        return prepared

    def _forward_only(self, prepared: Prepared) -> Prepared:
        """Return the evaluation's programs under a plan. They cover the full global batch, even during a batch
        ramp-up."""
        plan, programs, number = prepared.plan, prepared.programs, self._batch_sizes.usual
        if plan.micro_batches != number:
            plan = plan.dealing(number)
            programs = program.programs(plan)
        programs = program.forward_only(programs)
        checker.check_forward_only(plan, programs)
        return msgspec.structs.replace(prepared, plan=plan, paths=plan.paths(), programs=programs)

    def check(
        self,
        plan: Plan,
        rank: int,
        base: Base | None,
        nodes: Mapping[int, str],
        memory_bytes: int | None,
        iteration: int = 1,
    ) -> None:
        """Raise PlanError or LayoutError if this rank cannot carry out a plan from `iteration` on."""
        self.prepare(plan, rank)
        self.check_number(plan, iteration)
        if base is not None:
            transfers.moves(base, plan.layout, self._specs[False], nodes)
        if memory_bytes is not None:
            obstacle = memory.obstacle(plan, self._model, memory_bytes, self._longest, overhead=self._overhead)
            if base is not None and obstacle is None:
                obstacle = transition_memory.obstacle(
                    base.layout, base.survivors, plan.layout, self._model, memory_bytes, overhead=self._overhead
                )
            if obstacle:
                raise PlanError(obstacle)

    def _check_assignment(self, plan: Plan) -> None:
        shares, replicas = len(plan.assignment), len(plan.layout.replicas)
        if sorted(m for share in plan.assignment for m in share) != list(range(plan.micro_batches)):
            raise LayoutError(
                f"plan of epoch {plan.epoch}: does not assign each of {plan.micro_batches} micro-batches once"
            )
        if shares != replicas:
            raise LayoutError(f"plan of epoch {plan.epoch}: {shares} shares for {replicas} replicas")

    def check_number(self, plan: Plan, iteration: int) -> None:
        """Raise LayoutError if the plan's number of micro-batches differs from that of the iteration."""
        due = self._batch_sizes.at(iteration)
        if plan.micro_batches != due:
            raise LayoutError(
                f"plan of epoch {plan.epoch}: deals {plan.micro_batches} micro-batches, iteration {iteration} has {due}"
            )
