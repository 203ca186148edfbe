"""The plan that all ranks agree on: an epoch, a layout, the replica of each micro-batch, and the order of the work.

The controller makes a plan, and every rank confirms it by `Plan.digest` before the first group is built.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from functools import cached_property
from typing import Literal

import msgspec

from resihp.errors import LayoutError, PlanError
from resihp.parallelism.layout import LayerSpan, Layout

Kind = Literal["F", "B", "W"]


class Primitive(msgspec.Struct, frozen=True):
    """One unit of work on one stage: a pass of a micro-batch through one of the stage's layer chunks.

    F is the forward pass, B the backward pass, W the computation of weight gradients. If the order has a W for the same
    micro-batch and chunk, B computes the gradients of the inputs only; otherwise B computes both kinds of gradients.
    `micro_batch` is an index into the global batch, `chunk` an index into `Stage.chunks`.
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0


Order = tuple[Primitive, ...]
"""The primitives that one stage computes in an iteration, in order."""


class Stop(msgspec.Struct, frozen=True):
    """One point on the path of a micro-batch: a chunk of a stage of a replica."""

    replica: int
    stage: int
    chunk: int


class Migration(msgspec.Struct, frozen=True):
    """Micro-batch `micro_batch` passes virtual stage `virtual_stage` on `replica` instead of its home replica.

    F, B and W of the micro-batch move together (the paper's stage-level workload migration). `virtual_stage` is counted
    in the home replica, and `replica` must hold its layers in one chunk.
    """

    micro_batch: int
    virtual_stage: int
    replica: int


class Plan(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The layout and the work of one epoch.

    `assignment[d]` lists, in order, the micro-batches of home replica d, by their index in the global batch. A replica
    without micro-batches is a mirror (`mirrors`). `orders[d][s]` is the order of work of stage s of replica d; if
    `orders` is empty, the orders follow from `schedule` (`resihp.pipeline.schedules.orders_of`). All communication and
    its order follow from the plan (`resihp.pipeline.program`).
    """

    epoch: int
    layout: Layout
    assignment: tuple[tuple[int, ...], ...]
    schedule: str = "1f1b"
    migrations: tuple[Migration, ...] = ()
    orders: tuple[tuple[Order, ...], ...] = ()
    sequence_parallel: bool = False
    """Whether the ranks of a tensor-parallel group split the activations between layers along the sequence."""

    @cached_property
    def micro_batches(self) -> int:
        """Number of micro-batches of the global batch."""
        return sum(len(share) for share in self.assignment)

    @cached_property
    def mirrors(self) -> tuple[int, ...]:
        """Replicas that no micro-batch passes, by index, in ascending order.

        The ranks of a mirror hold a copy of the state of their stages, take part in the sums of gradients, and take
        each optimizer step. They compute no passes, and neither send nor receive activations.
        """
        if not any(self.assignment):
            return ()  # nothing was dealt out yet
        hosts = {migration.replica for migration in self.migrations}
        return tuple(d for d, share in enumerate(self.assignment) if not share and d not in hosts)

    @cached_property
    def mirroring(self) -> frozenset[int]:
        """Ranks of all mirrors."""
        return frozenset(rank for d in self.mirrors for rank in self.layout.replicas[d].ranks)

    @cached_property
    def computing(self) -> tuple[int, ...]:
        """Ranks that have micro-batches, in ascending order."""
        return tuple(rank for rank in self.layout.active if rank not in self.mirroring)

    def without_mirrors(self) -> Plan:
        """Return the plan with the ranks of mirrors on standby."""
        if not self.mirrors:
            return self
        kept = [d for d in range(len(self.layout.replicas)) if d not in self.mirrors]
        position = {d: i for i, d in enumerate(kept)}
        replicas = tuple(self.layout.replicas[d] for d in kept)
        return msgspec.structs.replace(
            self,
            layout=Layout(replicas, tuple(sorted({*self.layout.standby, *self.mirroring}))),
            assignment=tuple(self.assignment[d] for d in kept),
            migrations=tuple(
                msgspec.structs.replace(migration, replica=position[migration.replica]) for migration in self.migrations
            ),
            orders=tuple(self.orders[d] for d in kept) if self.orders else (),
        )

    def describe(self) -> str:
        """Describe the layout of the replicas that compute (`Layout.describe`) and the number of ranks of mirrors: `DP1
        x PP2 x TP2 + 1 mirror`.
        """
        if not self.mirrors:
            return self.layout.describe()
        bare = self.without_mirrors().layout
        shapes = Layout(bare.replicas, self.layout.standby).describe()
        ranks = len(self.mirroring)
        return f"{shapes} + {ranks} mirror{'' if ranks == 1 else 's'}"

    def dealing(self, micro_batches: int) -> Plan:
        """Return a plan with the same layout and schedule that deals `micro_batches` in even shares; mirrors get none.

        Passes through a vacant stage are distributed among the replicas that hold its layers. Raises LayoutError if a
        replica that is not a mirror would get no micro-batch.
        """
        mirrors = set(self.mirrors)
        dealt = iter(spread(micro_batches, len(self.layout.replicas) - len(mirrors)))
        shares = tuple(() if d in mirrors else next(dealt) for d in range(len(self.layout.replicas)))
        migrations = _from_vacant(self.layout, shares, mirrors)
        return msgspec.structs.replace(self, assignment=shares, migrations=migrations, orders=())

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical encoding; every rank confirms the plan by this digest."""
        return hashlib.sha256(msgspec.msgpack.encode(self, order="deterministic")).hexdigest()

    def paths(self) -> dict[int, tuple[Stop, ...]]:
        """Return the path of each micro-batch, from the embedding to the head: one stop for each virtual stage.

        Raises PlanError if a migration leads to a replica that does not hold the layers of the virtual stage in one
        chunk.
        """
        moved = {(migration.micro_batch, migration.virtual_stage): migration.replica for migration in self.migrations}
        paths = {}
        for home, share in enumerate(self.assignment):
            own = [Stop(home, s, c) for s, c in self.layout.replicas[home].virtual_stages]
            for m in share:
                stops = [self._stop(stop, m, moved.get((m, v), home)) for v, stop in enumerate(own)]
                paths[m] = tuple(stops)
        return paths

    def _stop(self, stop: Stop, micro_batch: int, replica: int) -> Stop:
        if replica == stop.replica:
            return stop
        first, last = self.layout.replicas[stop.replica].stages[stop.stage].chunks[stop.chunk]
        host = self.layout.replicas[replica]
        for s, c in host.virtual_stages:
            if host.stages[s].chunks[c] == (first, last):
                return Stop(replica, s, c)
        raise PlanError(
            f"plan of epoch {self.epoch}: micro-batch {micro_batch} cannot pass layers {first} to {last} on "
            f"replica {replica}, which does not hold them in one chunk"
        )


def _from_vacant(
    layout: Layout, assignment: tuple[tuple[int, ...], ...], mirrors: Collection[int]
) -> tuple[Migration, ...]:
    """Return the migrations that vacant stages require, each to the least loaded replica that holds the layers."""
    migrations: list[Migration] = []
    loads: dict[LayerSpan, dict[int, int]] = {}
    for d in dict.fromkeys(d for d, _ in layout.vacant):
        replica = layout.replicas[d]
        for v, (s, c) in enumerate(replica.virtual_stages):
            if not replica.stages[s].ranks:
                span = replica.stages[s].chunks[c]
                hosts = [host for host in layout.hosts(span) if host not in mirrors]
                load = loads.setdefault(span, {host: len(assignment[host]) for host in hosts})
                for m in assignment[d]:
                    host = min(load, key=lambda h: (load[h], h))
                    load[host] += 1
                    migrations.append(Migration(m, v, host))
    return tuple(migrations)


def spread(micro_batches: int, replicas: int) -> tuple[tuple[int, ...], ...]:
    """Return each replica's share of the global batch: contiguous, as even as possible, the remainder to the first
    replicas.

    Raises LayoutError if a replica would get no micro-batch.
    """
    if micro_batches < replicas:
        raise LayoutError(
            f"{micro_batches} micro-batches an iteration cannot feed {replicas} replicas; "
            f"raise --micro-batches to {replicas} or more, or lower the data-parallel degree"
        )
    shares: list[tuple[int, ...]] = []
    first = 0
    for d in range(replicas):
        count = micro_batches // replicas + (d < micro_batches % replicas)
        shares.append(tuple(range(first, first + count)))
        first += count
    return tuple(shares)
