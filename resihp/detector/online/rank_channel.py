"""Finds slow ranks by the time of their own work, relative to its prediction and to all other ranks. Pure, no clock.

In a tensor-parallel group all ranks wait for the slowest one, and part of this wait may be measured as a rank's own
work. A slow-down is therefore examined together with the rest of its group. Ranks that slowed down about as much as the
slowest rank cannot be distinguished from it and are suspected as well. Ranks that slowed down less, at the same time,
wait for the slowest one and make no finding. The test is `resihp.detector.sequential.peer_cusum`. Called by
`resihp.detector.online.monitor`; never decides on a reaction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from resihp.detector.findings import Finding, RankStanding
from resihp.detector.observation import Floats
from resihp.detector.online.plan_arrays import Stacked
from resihp.detector.sequential.peer_cusum import Cooldown, PeerTest, Shift

ALIKE_SHARE = 0.6
"""A rank with at least this share of the largest shift in its group cannot be distinguished from the slowest one."""
SAME_CAUSE_ITERATIONS = 8
"""Highest distance of onsets, in iterations, at which two slow-downs may have the same cause."""


class RankTest:
    """Sequential tests of all ranks of a plan.

    `false_alarms_per`, `patience`, `least`: as in `PeerTest`. `wandering`: the estimate from the previous plan.
    """

    def __init__(
        self, stacked: Stacked, false_alarms_per: int, patience: int, least: float, wandering: float = 0.0
    ) -> None:
        self._stacked = stacked
        self._false_alarms_per, self._patience, self._least = false_alarms_per, patience, least
        self._together: dict[int, tuple[int, ...]] = {}
        self.onsets: dict[int, int] = {}
        """First slow iteration of each slow rank."""
        self.well: dict[int, int] = {}
        """First healthy iteration of each rank that recovered."""
        self.test = self._begun({}, {}, wandering)

    def begin(self, known_shifts: Mapping[int, float], cooldowns: Mapping[int, Cooldown]) -> None:
        """Restart the tests and learn levels again; only the estimate of how far healthy ranks wander is kept.

        `known_shifts`: slow-downs that were already reported, log units, by rank. `cooldowns`: cooldowns of ranks that
        a probe found healthy although they looked slow.
        """
        self.test = self._begun(known_shifts, cooldowns, self.test.wandering)

    def _begun(
        self, known_shifts: Mapping[int, float], cooldowns: Mapping[int, Cooldown], wandering: float
    ) -> PeerTest:
        row = self._stacked.row
        return PeerTest(
            self._stacked.group,
            known_shifts={row[rank]: shift for rank, shift in known_shifts.items() if rank in row},
            cooldowns={row[rank]: cooldown for rank, cooldown in cooldowns.items() if rank in row},
            least=self._least,
            false_alarms_per=self._false_alarms_per,
            patience=self._patience,
            wandering=wandering,
        )

    @property
    def slow(self) -> dict[int, float]:
        """Slow-down of each slow rank, log units."""
        ranks = self._stacked.ranks
        return {int(ranks[row]): self.test.shift(row) for row in self.test.slow}

    @property
    def cooldowns(self) -> dict[int, Cooldown]:
        """Cooldown of each rank that a probe found healthy although it looked slow."""
        return {int(self._stacked.ranks[row]): cooldown for row, cooldown in self.test.cooldowns.items()}

    def update(self, iteration: int, ratios: Floats) -> tuple[Finding, ...]:
        """Test an iteration and return the findings.

        `ratios` (R,): measured over predicted seconds of each rank's own work, in the order of `Stacked.ranks`; NaN for
        ranks without a report.
        """
        with np.errstate(invalid="ignore", divide="ignore"):
            shifts = self.test.update(iteration, np.log(ratios))
        by_lane: dict[int, list[Shift]] = {}
        for shift in shifts:
            by_lane.setdefault(int(self._stacked.lane[shift.series]), []).append(shift)
        findings = []
        for lane, of_lane in by_lane.items():
            rows = range(int(self._stacked.first_row[lane]), int(self._stacked.first_row[lane + 1]))
            slow = [shift for shift in of_lane if shift.kind == "slow"]
            recovered = [shift for shift in of_lane if shift.kind == "recovered"]
            findings += self._slower(iteration, rows, slow) if slow else []
            findings += self._recovered(iteration, recovered) if recovered else []
        return tuple(findings)

    def standing(self, row: int, reported: int | None) -> RankStanding:
        """Return the judgement of the rank in `row`. `reported`: latest iteration with measurements of this rank."""
        standing = self.test.standing(row)
        return RankStanding(
            rank=int(self._stacked.ranks[row]),
            reported=reported,
            level=math.exp(standing.level),
            noise=math.expm1(standing.noise),
            evidence=standing.evidence,
            slow=standing.slow,
            pardon=math.expm1(standing.pardon),
            pardoned_until=standing.pardoned_until,
            peers=standing.peers,
        )

    def _slower(self, iteration: int, rows: range, shifts: list[Shift]) -> list[Finding]:
        top = max(shifts, key=lambda shift: shift.after)
        raised = {shift.series: shift for shift in shifts}
        before = [row for row in rows if self.test.is_slow(row) and row not in raised]
        if any(self._echoes(top, row) for row in before):
            for row, shift in raised.items():
                self.test.explain(row, shift.after)
            return []
        since = self.test.mean_since(top.onset)
        named = [top.series]
        for row in rows:
            if row in before or row == top.series:
                continue
            if since[row] >= ALIKE_SHARE * top.after:
                named.append(row)
                self.test.accept(row, float(since[row]), slow=True)
            elif row in raised and raised[row].before < ALIKE_SHARE * raised[row].after:
                self.test.explain(row, raised[row].after)
        named.sort(key=lambda row: (row != top.series, -since[row]))
        for row in named:
            self.onsets[int(self._stacked.ranks[row])] = top.onset
            self.well.pop(int(self._stacked.ranks[row]), None)
            self._together[row] = tuple(named)
        return [self._finding(iteration, top, named)]

    def _echoes(self, shift: Shift, slow_row: int) -> bool:
        """Return whether a shift is smaller than that of a slow row of the same lane, and began at about the same time.

        The rank then only waits for the slow one.
        """
        onset = self.onsets.get(int(self._stacked.ranks[slow_row]))
        return (
            onset is not None
            and abs(onset - shift.onset) <= SAME_CAUSE_ITERATIONS
            and shift.before < ALIKE_SHARE * shift.after < ALIKE_SHARE * ALIKE_SHARE * self.test.shift(slow_row)
        )

    def _recovered(self, iteration: int, shifts: list[Shift]) -> list[Finding]:
        findings = []
        done: set[int] = set()
        for shift in shifts:
            if shift.series in done:
                continue
            since = self.test.mean_since(shift.onset)
            raised = {other_shift.series for other_shift in shifts}
            named = [shift.series]
            for row in self._together.get(shift.series, ()):
                if row in raised and row != shift.series:
                    named.append(row)
                elif self.test.is_slow(row) and since[row] < 0.5 * self.test.shift(row):
                    self.test.accept(row, 0.0, slow=False)
                    named.append(row)
            done.update(named)
            for row in named:
                self._together.pop(row, None)
                self.onsets.pop(int(self._stacked.ranks[row]), None)
                self.well[int(self._stacked.ranks[row])] = shift.onset
            findings.append(self._finding(iteration, shift, named))
        return findings

    def _finding(self, iteration: int, shift: Shift, rows: list[int]) -> Finding:
        stacked = self._stacked
        ranks = tuple(stacked.ranks[rows].tolist())
        subject = (
            f"rank {ranks[0]}"
            if len(ranks) == 1
            else f"ranks {', '.join(map(str, ranks))}, which cannot be distinguished"
        )
        peers = int(np.count_nonzero(stacked.group == stacked.group[shift.series])) - 1
        return Finding(
            kind="fail-slow" if shift.kind == "slow" else "recovered",
            iteration=shift.onset,
            detected=iteration,
            change=math.expm1(shift.after),
            confidence=shift.confidence,
            alarm=shift.alarm,
            ranks=ranks,
            link=None,
            evidence=(
                f"{subject}: own work takes {math.exp(shift.after):.3f} times its healthy time "
                f"since iteration {shift.onset}, before {math.exp(shift.before):.3f} times; "
                f"compared with {stacked.ranks.size - 1} other ranks, {peers} of them with the same work; "
                f"noise {self.test.noise[shift.series]:.1%}"
            ),
        )
