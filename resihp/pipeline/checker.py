"""Plays programs under NCCL's rules, before anyone acts on them. Pure; it refuses programs, it never repairs them.

Computation: every micro-batch passes each of its stops once forward and, unless the programs are an evaluation's, once
backward, in an order that respects the dependencies. Communication: every parcel is sent once, after it is computed and
before it is used; every bucket is summed once, after its gradients are complete. Termination: the programs finish under
the strictest reading of NCCL's rules (`resihp.pipeline.rendezvous`), computations of a tensor-parallel group included.

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
    """Raise PlanError if `programs` (by default the programs that follow from the plan) must not be carried out.

    The message names rank, instruction and fault, or the ranks that wait for each other. Linear in the number of
    instructions; of several replicas that share nothing and do the same work, only one is played.
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
    """Raise PlanError as `check` does, for the programs of an evaluation (`program.forward_only`) of a valid plan."""
    _judge(plan, programs, (), kinds="F")


def _one_of_each(plan: Plan) -> Plan:
    """Return the plan without replicas that repeat another replica's work under other rank and micro-batch numbers.

    Nothing passes between replicas if nothing migrates and no gradients are summed, and the work of each follows from
    its stages, its share and its orders alone.
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
    """Check that each micro-batch has one home, and migrates to existing replicas, at most once at each virtual
    stage."""
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
