"""Invariants of devices that probes set aside: each is measured again in time.

It notes the devices that are set aside and since when. It never probes anything. Called by `rules` and by the
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
"""Allowed delay, in seconds, until a device that a probe set aside is measured again: it takes a tick, and a second if
a measurement was in progress."""


class SetAside(NamedTuple):
    """A device on standby because of a probe's result."""

    times: int
    """Number of consecutive probes that found it unfit."""
    since: float
    """Time of the last such probe, of the request for the next one, or of the start of training after it."""


def note_verdicts(rules: Rules, entry: AnyEntry) -> None:
    """Note the devices that a probe sets aside, and how often in a row."""
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
    """Check that no live device stands by for a probe beyond the time of the next one: 5 s after the first, twice
    that after the second, and so on up to ten times `recheck_s`."""
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
