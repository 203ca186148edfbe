"""The thresholds for declaring devices, parts and jobs slow: a value, its unit and its reason each.

Makes no decision itself. The probability and the probe speeds that a verdict needs are configuration keys and not
listed here (`resihp.settings.Detection`). Read by `slow_devices`, `device_verdicts`, `slow_parts`, `suspicions`,
`slowness`, `probe_results` and `second_looks`.

A verdict on a device adds up log odds: those of its probe, plus those of the detector's finding, less a penalty for the
number of suspects. A change is relative: +0.25 means that an iteration, or a rank's own work, takes 1.25 times as long.
"""

from __future__ import annotations

# --- weight of a probe and of a finding (log odds) ------------------------------------------------------------------

MAX_DETECTOR_LOG_ODDS = 4.0
"""Log odds. Largest contribution of a finding to a verdict, because the finding's confidence assumes that noise is as
modelled. For a large change it is up to twice as much (`LARGE_CHANGE_RANGE`)."""
LARGE_CHANGE_RANGE = (0.10, 0.35)
"""Relative change. From the first value on, noise becomes ever less likely as the cause of a change, so the limit above
rises. From the second value on, noise cannot explain the change, and the limit is doubled."""
MIN_PROBE_LOG_ODDS = 1.0
"""Log odds. The probe alone must reach this value before a device is declared slow on the basis of its probe, however
confident the finding is."""
GROUP_MEMBER_PENALTY_LOG_ODDS = 2.0
"""Log odds. Subtracted for a device that is measured only because it shares a tensor-parallel group with a suspect."""
MIN_SLOWDOWN_SHARE_IN_PROBE = 2 / 3
"""Share of the slowdown seen in training. If another slow device may be the cause, the finding counts only if the probe
shows at least this share of the slowdown."""

RECOVERED_SPEED = 0.95
"""Share of the peers' speed. If the probe of a slow standby device shows at least this share, the device has
recovered."""

# --- verdicts from training alone -----------------------------------------------------------------------------------

MIN_CHANGE_WITHOUT_PROBE = 0.04
"""Relative change. Smallest change in training that leads to a verdict without confirmation by a probe; healthy devices
differ and drift by less."""
CLEARED_ITERATIONS = 200
"""Smallest number of iterations for which a device counts as cleared after its probe found nothing. A second finding
within this time means that the device is slow in training though not in its probe. Also the largest distance between
the onset of a device and the onset of the slow peer for which it may be waiting."""

# --- victims: devices that only suffer from another cause ------------------------------------------------------------

MAX_VICTIM_SLOWDOWN = 0.2
"""Relative change. Largest slowdown of a device's own work that may be a mere consequence of longer iterations:
transfer kernels that run longer take processors from its own kernels, and clocks fall while a device waits."""
MAX_VICTIM_DELAY_ITERATIONS = 20
"""Iterations. A device that suffers from a slow job becomes slower within this time after the job's onset."""
MIN_PEER_SLOWDOWN_SHARE = 0.9
"""Share of a device's own slowdown. A device may be waiting for a slow peer of its tensor-parallel group if the peer's
slowdown is at least this share of the device's own."""

# --- onsets, speeds and the excess of iterations ---------------------------------------------------------------------

SAME_CAUSE_ITERATIONS = 8
"""Iterations. Two onsets at most this far apart may have the same cause."""
MIN_SPEED_CHANGE = 0.05
"""Relative change of speed. If the speed of a known slow device or part changes by at least this much, it gets a new
verdict."""
MIN_EXCESS_SAMPLES = 3
"""Iterations. At least this many before an onset, and after it, are needed to measure the excess iteration time."""
MIN_EXCESS_SHARE = 0.10
"""Share of an iteration. An excess iteration time below this needs no explanation."""

# --- slowness that no device explains --------------------------------------------------------------------------------

MIN_LASTING_ITERATIONS = 20
"""Iterations. This many iterations must be slower, although every device is healthy, before the job as a whole is
declared slow."""
SEVERE_CHANGE = 1.0
"""Relative change. From this value on (iterations take twice as long), `MIN_SEVERE_ITERATIONS` iterations are
enough."""
MIN_SEVERE_ITERATIONS = 5
"""Iterations. Replaces `MIN_LASTING_ITERATIONS` for a severe change."""
