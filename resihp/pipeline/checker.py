"""Plays programs under NCCL's rules before any rank acts on them. Pure; refuses programs, never repairs them.

Computation: every micro-batch passes each of its stops once forward and once backward (only forward in an evaluation),
in an order that respects the dependencies. Communication: every parcel is sent once, after its computation and before
its use; every bucket is summed once, after its gradients are complete. Termination: the programs finish under the
strictest reading of NCCL's rules (`resihp.pipeline.rendezvous`), including the collectives inside tensor-parallel
computations.

Called by the controller before it proposes a plan, and by each rank before it confirms one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from resihp.errors import PlanError
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan
from resihp.pipeline import program as compiled
from resihp.pipeline.communication_rules import CommunicationRules
from resihp.pipeline.computation_rules import PlanFacts, difference
from resihp.pipeline.program import Bucket, Program
from resihp.pipeline.schedules import orders_of


def check(plan: Plan, programs: Mapping[int, Program] | None = None, buckets: Sequence[Bucket] = ()) -> None:
    """Raise PlanError if `programs` must not be carried out. By default, they are the programs that follow from the
    plan.

    The message names the rank, instruction and fault, or the ranks that wait for each other. The time is linear in the
    number of instructions. Of replicas that do the same work and exchange nothing, only one is played.
    """
    _shares(plan)
    if programs is None and not buckets and not plan.migrations:
        try:
            _judge(_one_of_each(plan), None, ())
            return
        except PlanError:
            pass  # the error is raised below, with the numbers of the whole plan
    _judge(plan, programs, buckets)


def check_forward_only(plan: Plan, programs: Mapping[int, Program]) -> None:
    """Raise PlanError as `check` does, for the evaluation programs (`program.forward_only`) of a valid plan."""
    _judge(plan, programs, (), kinds="F")


def _one_of_each(plan: Plan) -> Plan:
    """Return the plan with one replica of each kind. Replicas are of one kind if only their rank and micro-batch
    numbers differ.

    The replicas left out need no check: without migrations and without gradient sums, nothing passes between replicas,
    and the work of a replica follows from its own stages, share and orders.
    """
    orders = orders_of(plan)
    if len(set(plan.layout.active)) < len(plan.layout.active):
        return plan
    kinds: dict[object, int] = {}
    for d, (replica, share) in enumerate(zip(plan.layout.replicas, plan.assignment, strict=True)):
        place = {m: i for i, m in enumerate(sorted(share))}
        ascending = {rank: i for i, rank in enumerate(sorted(replica.ranks))}
        stages = tuple((tuple(ascending[rank] for rank in stage.ranks), stage.chunks) for stage in replica.stages)
        work = tuple(tuple((p.kind, place.get(p.micro_batch, p), p.chunk) for p in order) for order in orders[d])
        kinds.setdefault((stages, tuple(place[m] for m in share), work), d)
    kept = sorted(kinds.values())
    return msgspec.structs.replace(
        plan,
        layout=Layout(tuple(plan.layout.replicas[d] for d in kept)),
        assignment=tuple(plan.assignment[d] for d in kept),
        orders=tuple(orders[d] for d in kept),
    )


def _judge(plan: Plan, programs: Mapping[int, Program] | None, buckets: Sequence[Bucket], kinds: str = "FBW") -> None:
    facts = PlanFacts(plan, buckets, kinds)
    if programs is None:
        facts.orders(orders_of(plan))
        programs = compiled.programs(plan, buckets)
    else:
        orders = facts.orders_in(programs)
        facts.orders(orders)
        for replica, due, shape in zip(orders, orders_of(plan), plan.layout.replicas, strict=True):
            for order, planned_order, stage in zip(replica, due, shape.stages, strict=True):
                expected = tuple(p for p in planned_order if p.kind in kinds)
                if order != expected:
                    k, mine, planned = difference(order, expected)
                    rank_name = f"rank {stage.ranks[0]}" if stage.ranks else "no rank"
                    facts.refuse(f"computation {k} is {mine} on {rank_name}, but {planned} in the plan")
    CommunicationRules(facts, programs).judge()


def _shares(plan: Plan) -> None:
    """Check that each micro-batch has one home, and migrates at most once at each virtual stage, to an existing
    replica.
    """
    subject = f"plan of epoch {plan.epoch}: "
    replicas = plan.layout.replicas
    if len(plan.assignment) != len(replicas):
        raise PlanError(f"{subject}{len(plan.assignment)} shares of micro-batches for {len(replicas)} replicas")
    homes = {m: d for d, share in enumerate(plan.assignment) for m in share}
    if sorted(m for share in plan.assignment for m in share) != list(range(len(homes))):
        raise PlanError(f"{subject}shares {list(map(list, plan.assignment))} do not give each micro-batch one home")
    migrated: set[tuple[int, int]] = set()
    for migration in plan.migrations:
        m, v = migration.micro_batch, migration.virtual_stage
        if m not in homes or not 0 <= v < len(replicas[homes[m]].virtual_stages):
            raise PlanError(f"{subject}micro-batch {m} has no virtual stage {v} that could migrate")
        if not 0 <= migration.replica < len(replicas):
            raise PlanError(f"{subject}micro-batch {m} migrates to replica {migration.replica}, which does not exist")
        if (m, v) in migrated:
            raise PlanError(f"{subject}micro-batch {m} migrates twice at virtual stage {v}")
        migrated.add((m, v))
