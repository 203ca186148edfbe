"""The probes of a simulated worker: of its device at any time, of its links between two iterations.

Draws the results. Never decides about a device: the controller does. Called by `worker`, and by training between two
iterations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resihp.protocol import messages as m

if TYPE_CHECKING:
    from resihp.simulator.machines.worker import Worker


class WorkerProbes:
    """The probes of one worker's device and links."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.world = worker, worker.world
        self.announced: list[m.Probe] = []
        """Link probes announced for the end of an iteration."""
        self.slow = False
        """Whether the device was slow in its last probe."""

    def obey(self, order: m.Probe) -> None:
        """Schedule a measurement, or record a probe that is announced for the end of an iteration."""
        rng = self.world.rng
        if order.after_iteration is None:
            self.worker.later(rng.choice([0.01, rng.uniform(0, 0.5)]), self.measure, order)
            return
        self.announced.append(order)
        if self.worker.activity in ("parked", "idle"):
            self.decline()

    def measure(self, order: m.Probe) -> None:
        """Draw and report the speeds of the device and its links. Some probes are never answered."""
        worker = self.worker
        rng, unfit = self.world.rng, self.world.scenario.unfit
        if rng.random() < unfit / 4:
            return
        bad = self.slow = rng.random() < (0.9 if self.slow else unfit)  # most slow devices stay slow
        flops = rng.uniform(0.2, 0.8) if bad else rng.uniform(0.97, 1.03)
        memory_bytes = 1.0
        if self.world.scenario.noise and self.world.record.plan is not None:
            disturbed = rng.random() < self.world.scenario.noise
            memory_bytes = rng.uniform(0.54, 0.8) if disturbed else rng.uniform(0.9, 1.0)
        peers = [pair[pair[0] == worker.rank] for round_ in order.pairs for pair in round_ if worker.rank in pair]
        worker.say(
            m.Probed(
                probe=order.probe,
                speed=m.Speed(flops=flops, memory_bytes=memory_bytes),
                transfers=tuple(m.Transfer(peer=peer, seconds=rng.uniform(0.9, 1.1)) for peer in peers),
                seconds=0.1,
                error="the device fails" if rng.random() < unfit / 4 else "",
                shared=self.world.scenario.shared,
            )
        )

    def decline(self) -> None:
        """Report that the announced probes are not carried out."""
        for order in self.announced:
            self.worker.say(m.Probed(probe=order.probe, missed="does not train now"))
        self.announced.clear()

    def meet(self) -> None:
        """Between two iterations, enter an announced link probe and wait for the peer, or begin the next iteration."""
        worker = self.worker
        due = [order for order in self.announced if (order.after_iteration or 0) <= worker.stepped]
        if not due:
            worker.training.begin()
            return
        order = due[0]
        self.announced.remove(order)
        assert worker.outcome is not None
        if order.after_iteration != worker.stepped or worker.outcome.pause:
            worker.say(m.Probed(probe=order.probe, missed="order received too late"))
            self.meet()
            return
        worker.activity = "communication"
        self.world.collectives.come(worker, order)

    def met(self, order: m.Probe, came: bool) -> None:
        """Report the measured links, or that a peer has not arrived."""
        worker = self.worker
        self.world.collectives.measuring[order.probe].pop(worker.rank, None)
        peers = [a + b - worker.rank for round_ in order.pairs for a, b in round_ if worker.rank in (a, b)]
        share = 3.0 if self.world.rng.random() < self.world.scenario.unfit else 1.0
        transfers = tuple(m.Transfer(peer=peer, seconds=share * self.world.rng.uniform(0.9, 1.1)) for peer in peers)
        result: dict[str, Any] = {"transfers": transfers} if came else {"missed": "not all came in time"}
        worker.say(m.Probed(probe=order.probe, seconds=0.1, shared=self.world.scenario.shared, **result))
        self.meet()
