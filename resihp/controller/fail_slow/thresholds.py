"""The thresholds that decide which devices, parts and jobs are declared slow: a value, its unit and its reason each.

Decides nothing itself. The probability and the probe speeds that a verdict needs are configuration keys and not here
(`resihp.settings.Thresholds`). Read by `slow_devices`, `measured_suspects`, `slow_parts`,
`suspicions`, `slowness`, `probe_results` and `second_looks`.

A verdict on a device adds up log odds: those of its probe, plus those of the detector's finding, less a penalty for the
number of suspects. A change is relative: +0.25 is an iteration, or a rank's own work, that takes 1.25 times as long.
"""

from __future__ import annotations

# --- weight of a probe and of a finding (log odds) ------------------------------------------------------------------

MAX_DETECTOR_LOG_ODDS = 4.0
"""Log odds. Cap on the share of a finding in a verdict, because the finding's confidence assumes that noise is as
modelled; up to twice as much for a large change (`LARGE_CHANGE_RANGE`)."""
LARGE_CHANGE_RANGE = (0.10, 0.35)
"""Relative change. From the first value on, noise becomes ever less likely as the cause of a change, so the cap above
rises; from the second value on no noise explains the change, and the cap is doubled."""
MIN_PROBE_LOG_ODDS = 1.0
"""Log odds. The probe alone must reach this before a device is declared slow by its probe, however sure the finding
is."""
GROUP_MEMBER_PENALTY_LOG_ODDS = 2.0
"""Log odds. Subtracted for a device that is measured only because it shares a tensor-parallel group with a suspect."""
MIN_SLOWDOWN_SHARE_IN_PROBE = 2 / 3
"""Share of the slowdown seen in training. Where another slow device may be the cause, the finding counts only if the
probe shows at least this share of it."""

RECOVERED_SPEED = 0.95
"""Share of its peers' speed from which the probe of a slow standby device shows that it has recovered."""

# --- verdicts from training alone -----------------------------------------------------------------------------------

MIN_CHANGE_WITHOUT_PROBE = 0.04
"""Relative change. Smallest one that training shows without a probe: healthy devices differ, and drift, by less."""
CLEARED_ITERATIONS = 200
"""Iterations for which a device counts as cleared after its probe found nothing, at least: a second finding within them
means that it is slow in training though not in its probe. Also the largest distance between the onset of a device and
that of the slow peer that it may be waiting for."""

# --- victims: devices that only suffer from another cause ------------------------------------------------------------

MAX_VICTIM_SLOWDOWN = 0.2
"""Relative change. Largest one that a device shows in its own work when it only suffers from the cause of longer
iterations: transfer kernels that last longer take processors from its own, and clocks fall while a device waits."""
MAX_VICTIM_DELAY_ITERATIONS = 20
"""Iterations. A device that suffers from a slow job becomes slower within this time of the job's onset."""
MIN_PEER_SLOWDOWN_SHARE = 0.9
"""Share of a device's own slowdown. A device may just be waiting for a slow peer of its tensor-parallel group if the
peer's slowdown is at least this share of its own."""

# --- onsets, speeds and the excess of iterations ---------------------------------------------------------------------

SAME_CAUSE_ITERATIONS = 8
"""Iterations. Two onsets that are at most this far apart may have one cause."""
MIN_SPEED_CHANGE = 0.05
"""Relative change of speed. From this on, a known slow device or part counts as having another speed, which is a new
verdict."""
MIN_EXCESS_SAMPLES = 3
"""Iterations. So many are needed before an onset, and as many after it, to measure how much longer iterations take."""
MIN_EXCESS_SHARE = 0.10
"""Share of an iteration. A smaller excess needs no explanation."""

# --- slowness that no device explains --------------------------------------------------------------------------------

MIN_LASTING_ITERATIONS = 20
"""Iterations. For this long all iterations must be slower although every device is healthy, before the job as a whole
is declared slow."""
SEVERE_CHANGE = 1.0
"""Relative change. From here on, where iterations take twice as long, `MIN_SEVERE_ITERATIONS` are enough."""
MIN_SEVERE_ITERATIONS = 5
"""Iterations. Takes the place of `MIN_LASTING_ITERATIONS` for a severe change."""
