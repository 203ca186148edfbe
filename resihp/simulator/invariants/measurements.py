"""Invariants of devices on standby because of a probe: each is measured again in time.

Records these devices, with the time since which each is on standby. Never probes a device. Called by `rules` and by the
invariants of orders.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from resihp.record.journal import AnyEntry, PlanInEffect, ProbesTaken
from resihp.record.state import Device
from resihp.simulator.invariants.violations import expect

if TYPE_CHECKING:
    from resihp.simulator.rules import Rules

RECHECK_S = 2.0
"""Tolerance, in seconds, for the time of the next probe of a device on standby: a tick, and a second if another
measurement was in progress."""


class SetAside(NamedTuple):
    """A device on standby because of the result of a probe."""

    times: int
    """Number of consecutive probes that found the device unfit."""
    since: float
    """Time from which the wait for the next probe counts: the last probe, the request for the next probe, or a later
    start of training."""


def note_verdicts(rules: Rules, entry: AnyEntry) -> None:
    """Record the devices that a probe puts on standby, and the number of consecutive times."""
    if isinstance(entry, PlanInEffect):
        wait_anew(rules, rules.set_aside)
    if not isinstance(entry, ProbesTaken) or entry.occasion == "suspicion":
        return
    for probe in entry.devices:
        device = probe.node, probe.device
        before = rules.set_aside.pop(device, None)
        if not probe.fit and (before is not None or entry.occasion != "standby"):
            times = 1 if before is None else before.times + 1
            rules.set_aside[device] = SetAside(times, rules.world.now)


def wait_anew(rules: Rules, devices: Iterable[Device]) -> None:
    """Restart the waiting time of devices that are being measured, or could not have been measured."""
    for device in devices:
        if device in rules.set_aside:
            rules.set_aside[device] = rules.set_aside[device]._replace(since=rules.world.now)


def check_set_aside(rules: Rules) -> None:
    """Check that each live device on standby because of a probe is probed again in time.

    The next probe is due after 5 s, then after twice the previous time, up to ten times `recheck_s`.
    """
    job = rules.world.controller.job
    if not job.training or rules.taking_over or rules.world.leaderless or rules.world.stopping.is_on:
        return
    busy = {rank for examination in job.examinations.values() for rank in examination.asked}
    busy |= {rank for looks in job.rechecks.second_looks.values() for rank in looks.doubted}
    for rank in set(job.ready) - set(job.record.computing) - busy - job.unmeasured:
        aside = rules.set_aside.get(job.device_of(rank))
        if aside is None:
            continue
        due_s = min(5.0 * 2 ** (aside.times - 1), 10 * job.settings.recheck_s)
        idle_s = rules.world.now - aside.since
        expect(idle_s <= due_s + RECHECK_S, f"rank {rank}: stands by for {idle_s:.1f} s, to be measured in {due_s} s")
