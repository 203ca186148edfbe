"""The detector that the controller asks after each committed iteration: its expected time, and the slow parts.

Five channels examine an iteration:

===================  ==================================================================================================
`iteration_channel`  its seconds against Eq. 2 over Eq. 1 (`pipeline.compiled`, `predictor`), change points of the log
                     ratio (`changes`). Sees everything, including common slow-downs, but cannot localise
`rank_channel`       each rank's own work against its prediction, relative to all others
`link_channel`       transfers against the link's own past, relative to all others
`between_nodes`      the common part of all links between nodes
`beside`             ranks that are slow now and then; collectives, gradient sums and data (`lane_channel`)
===================  ==================================================================================================

All but the first see milder changes, earlier, and name the slow part. Their findings become part of the expectation
that the first one compares with, so that one failure makes one finding. Without measurements of chunks only plain
iteration times are left: the first channel then tests their logarithm.

This module measures nothing, starts no probes, and leaves reactions to the controller. Pure, no clock.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping
from itertools import islice

import msgspec
import numpy as np
import numpy.typing as npt

from resihp.detector.findings import Assessment, Finding, Known, RankStanding
from resihp.detector.observation import Floats, Observation
from resihp.detector.online.beside import Beside
from resihp.detector.online.between_nodes import BetweenNodes
from resihp.detector.online.frame import Frame
from resihp.detector.online.iteration_channel import WholeTest
from resihp.detector.online.link_channel import Links, LinkTest
from resihp.detector.online.plan_arrays import MAX_CHUNK_S, Stacked, Sums
from resihp.detector.online.predictor import Predictor
from resihp.detector.online.rank_channel import RankTest
from resihp.detector.sequential.shifts import Cooldown
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan
from resihp.pipeline.timeline import Orders

__all__ = ["Assessment", "Finding", "Monitor"]

MIN_RANK_SHIFT = 0.03
"""Smallest shift of a rank that counts, log units."""
MAX_BESIDE_SAMPLES = 60
"""Number of iterations from which the time outside of chunks (synchronisation, optimizer step) is learnt."""
MIN_WHOLE_SHIFT = 0.04
"""Smallest change of whole iterations that counts while ranks and links are tested as well; log units."""
FOREIGN_ITERATIONS, FOREIGN_FADING = 3.0, 0.9
"""Iterations in a row, with a workload outside of the learnt range, after which that workload is learnt as well; each
iteration within the range multiplies the count by the second number."""
MAX_LEVEL = 0.2
"""A healthy level of iterations this far from the sum of their parts is not credible; log units."""
MIN_UNEXPLAINED = 0.15
"""Excess of iterations over everything known to be slow, from which on there must be another cause; log units."""
RECENT_ITERATIONS = 3
"""Number of latest iterations that show this excess: a single one may be long by chance."""
MIN_PLAIN_SHIFT = 0.03
"""Smallest change that counts if only plain iteration times are known, log units."""


class Monitor:
    """Judges iterations of the plan adopted last; its knowledge of healthy times survives a change of plan.

    `false_alarms_per`: lower bound of the mean number of iterations between false alarms, over all channels, ranks and
    links. `patience`: iterations for which a cleared suspicion is not raised again on the same evidence; doubled each
    time that it is, up to four times. `least`: smallest slow-down of a rank that counts, log units; coarser channels
    keep their own.
    """

    def __init__(
        self,
        *,
        predictor: Predictor | None = None,
        false_alarms_per: int = 10_000,
        patience: int = 500,
        least: float = MIN_RANK_SHIFT,
    ) -> None:
        self.predictor = Predictor() if predictor is None else predictor
        """Healthy times of chunks. Kinds: F, B and W, and BW for a B that does the work of both."""
        self._false_alarms_per, self._patience, self._least = false_alarms_per, patience, least
        self._frame: Frame | None = None
        self._job_slow: float | None = None
        """Approximate healthy level of whole iterations while the job as a whole is slow, NaN if unknown; else None."""
        self._ranks: RankTest
        self._between: BetweenNodes
        self._whole: WholeTest
        self._beside: Beside | None = None
        self._before = -math.inf
        """Level of whole iterations before the present slowness was found; as that ends, a lower one may be learnt."""
        self._slow: dict[int, float] = {}
        """Log shifts of slow ranks, including those without work."""
        self._slow_links: dict[tuple[int, int], float] = {}
        self._confirmed: dict[int, float] = {}
        self._expected = True
        """Whether the expected iteration time includes everything known of slow ranks and links."""
        self._cooldowns: dict[int, Cooldown] = {}
        """Cooldowns of ranks that a probe found healthy; expired ones keep their patience."""

    # --- plans ------------------------------------------------------------------------------------------------------

    def adopt(self, plan: Plan, model: ModelSpec, orders: Orders, nodes: Mapping[int, Hashable] | None = None) -> None:
        """Switch to a plan that takes effect. Statistics restart; knowledge of chunks and of slow ranks and links
        stays.

        `nodes`: node of each rank, if known: links within and between nodes can then be compared from the start.
        Iterations may begin at any number. Raises PlanError for orders that cannot be carried out.
        """
        self._remember()
        frame = Frame(plan, orders, nodes)
        wandering: float = 0.0 if self._frame is None else self._ranks.test.wandering
        if self._frame is not None:
            self._job_slow = self._whole.level if self._whole.slow else None
        self._frame = frame
        self._slow = {rank: shift for rank, shift in self._slow.items() if rank in frame.present}
        self._confirmed = {rank: speed for rank, speed in self._confirmed.items() if rank in self._slow}
        self._cooldowns = {rank: cooldown for rank, cooldown in self._cooldowns.items() if rank in frame.present}
        self._slow_links = {link: shift for link, shift in self._slow_links.items() if frame.present.issuperset(link)}
        self._ranks = RankTest(frame.stacked, self._false_alarms_per, self._patience, self._least, wandering)
        self._ranks.begin(self._slow, self._cooldowns)
        self._links = LinkTest(frame.links, self._slow_links, self._false_alarms_per, self._patience, self._least)
        self._between = BetweenNodes(self._links, false_alarms_per=self._false_alarms_per, patience=self._patience)
        self._beside = Beside(
            frame.stacked, self._beside, false_alarms_per=self._false_alarms_per, patience=self._patience
        )
        self._before = -math.inf
        self._whole = WholeTest(
            "iterations against the predicted time, no rank or link stands out",
            least=max(MIN_WHOLE_SHIFT, self._least),
            floor=MIN_WHOLE_SHIFT / 2,
            false_alarms_per=2 * self._false_alarms_per,
        )
        if self._job_slow is not None:
            self._whole.slow_before(self._job_slow)
        self._plain = WholeTest(
            "plain iteration times, workload not known",
            least=max(MIN_PLAIN_SHIFT, self._least),
            floor=MIN_PLAIN_SHIFT / 10,
            false_alarms_per=self._false_alarms_per,
        )

    @property
    def stacked(self) -> Stacked | None:
        """The adopted plan as arrays; defines the rows of `observe_stacked`."""
        return None if self._frame is None else self._frame.stacked

    @property
    def links(self) -> Links | None:
        """Links of the adopted plan, in the order of `observe_stacked`."""
        return None if self._frame is None else self._frame.links

    @property
    def settled(self) -> bool:
        """Whether learning is complete: all kinds of chunks of the adopted plan are learnt, and their times stay."""
        return self._frame is not None and self._frame.fitted and not self.predictor.learning

    @property
    def beside_s(self) -> float:
        """Seconds of an iteration outside of its chunks, under the adopted plan: synchronisation and optimizer step."""
        return 0.0 if self._frame is None else self._frame.beside_s

    def healthy_transfers(self) -> tuple[float | None, float | None]:
        """Return median seconds of a mean healthy transfer, between nodes and within a node; None if there is no such
        link.

        If the ranks' nodes are unknown, all links count as between nodes.
        """
        if self._frame is None:
            return None, None
        seconds, kind = self._links.seconds(healthy=True), self._frame.links.kind
        between_s, within_s = (seconds[(kind == kind_code) & (seconds > 0.0)] for kind_code in (0, 1))
        between_and_within = [
            float(np.median(seconds_of_kind)) if seconds_of_kind.size else None
            for seconds_of_kind in (between_s, within_s)
        ]
        return between_and_within[0], between_and_within[1]

    # --- iterations -------------------------------------------------------------------------------------------------

    def observe(self, observation: Observation) -> Assessment:
        """Judge a committed iteration. Ignores one of another epoch, repeated or out of order.

        Ranks that did not report, and impossible measurements, are left out.
        """
        frame = self._next(observation.iteration, observation.epoch)
        if frame is None:
            return Assessment(predicted_s=None, known=self._known())
        if not observation.times:
            return self._judge_plain(frame, observation.iteration, observation.seconds)
        columns = frame.stacked.columns(observation.times)
        self._teach(frame, observation.iteration, columns)
        tokens, squares = frame.stacked.workload(columns)
        delays, delay_tokens, delay_counts = frame.links.measured(columns)
        sums = Sums(
            tokens=tokens,
            squares=squares,
            compute=frame.stacked.compute(columns),
            delays=delays,
            delay_tokens=delay_tokens,
            delay_counts=delay_counts,
            busy_s=frame.stacked.busy_s(columns),
            lanes=frame.stacked.lane_times(columns, observation.times),
        )
        return self._judge(frame, observation.iteration, observation.seconds, sums)

    def observe_stacked(self, iteration: int, epoch: int, seconds: float, sums: Sums) -> Assessment:
        """Judge an iteration from sums that the ranks computed; until `settled`, pass chunk times to `learn` as well.

        Rows of ranks are those of `plan_arrays`, of links those of `link_channel`. Raises ValueError for arrays of
        other shapes.
        """
        frame = self._next(iteration, epoch)
        if frame is None:
            return Assessment(predicted_s=None, known=self._known())
        batch, ranks, links = frame.stacked.compiled.micro_batches, frame.stacked.ranks.size, frame.links.size
        of_links = (sums.delays, sums.delay_tokens, sums.delay_counts)
        lanes, lane_times = len(frame.stacked.places), sums.lanes
        of_lanes = () if lane_times is None else (lane_times.collective, lane_times.reduction, lane_times.data)
        shapes = [
            np.shape(sums_array) for sums_array in (sums.tokens, sums.squares, sums.compute, *of_links, *of_lanes)
        ]
        if shapes != [(batch,), (batch,), (ranks,), *[(links,)] * 3, *[(lanes,)] * len(of_lanes)]:
            expected_shapes = f"{batch} micro-batches, {ranks} ranks, {links} links, {lanes} lanes"
            raise ValueError(f"iteration {iteration}: sums of shapes {shapes} for {expected_shapes}")
        with np.errstate(invalid="ignore"):
            compute = np.where((sums.compute > 0.0) & (sums.compute < MAX_CHUNK_S), sums.compute, np.nan)
        return self._judge(frame, iteration, seconds, msgspec.structs.replace(sums, compute=compute))

    def learn(self, observation: Observation) -> None:
        """Learn healthy chunk times from the ranks in it without judging; a few ranks of each kind of stage suffice."""
        if self._frame is not None and observation.epoch == self._frame.epoch:
            columns = self._frame.stacked.columns(observation.times)
            self._teach(self._frame, observation.iteration, columns)

    def forecast(self, tokens: npt.ArrayLike, squares: npt.ArrayLike) -> float | None:
        """Return the seconds that an iteration of the adopted plan should take, from N and S (M,) of its micro-batches.

        Slow parts are assumed to stay slow. None while too little is known, or for another number of micro-batches.
        """
        workload = [np.asarray(values, dtype=np.float64) for values in (tokens, squares)]
        if self._frame is None or any(len(values) != self._frame.stacked.compiled.micro_batches for values in workload):
            return None
        expected = self._frame.stacked.seconds(self.predictor, *workload)
        seconds = 0.0
        if expected is not None:
            seconds = _levelled(self._now_and_healthy(self._frame, expected)[0], self._whole.now)
        return seconds if 0.0 < seconds < MAX_CHUNK_S else None

    # --- slow ranks, links and job ----------------------------------------------------------------------------------

    def speeds(self) -> dict[int, float]:
        """Return the present speed of each rank that was found slow, 1 is healthy: as confirmed, else as estimated."""
        self._remember()
        return {rank: self._confirmed.get(rank, math.exp(-shift)) for rank, shift in sorted(self._slow.items())}

    def standing(self, rank: int) -> RankStanding | None:
        """Return why `rank` is considered slow or healthy; None for a rank without work in the adopted plan."""
        frame = self._frame
        row = None if frame is None else frame.stacked.row.get(rank)
        if frame is None or row is None:
            return None
        return self._ranks.standing(row, frame.reported(row))

    def scores(self) -> tuple[npt.NDArray[np.int64], Floats, Floats] | None:
        """Return (R,) each: ranks with work, their levels (1 healthy, NaN unknown) and evidence, as in `standing`.

        None while no rank can be judged.
        """
        frame = self._frame
        if frame is None or frame.revision is None:
            return None
        levels, evidence = self._ranks.test.scores()
        busy = frame.stacked.lengths > 0
        return frame.stacked.ranks[busy], np.exp(levels[busy]), evidence[busy]

    def coverage(self) -> dict[int, int]:
        """Return, for each rank of the adopted plan with work, the iteration of its last usable measurements.

        For ranks that never had any, the iteration before the plan's first: they are not watched.
        """
        return {} if self._frame is None else self._frame.coverage()

    def confirmed(self, rank: int, speed: float) -> None:
        """Record the speed at which a rank was declared slow.

        It holds until the rank is cleared, recovers or becomes slower.
        Raises ValueError for a speed that is not positive.
        """
        if not (math.isfinite(speed) and speed > 0.0):
            raise ValueError(f"rank {rank}: speed {speed} is not a positive number; 1 is healthy, 0.5 is half as fast")
        row = None if self._frame is None else self._frame.stacked.row.get(rank)
        if rank not in self._slow if row is None else not self._ranks.test.is_slow(row):
            self._slow[rank] = max(-math.log(speed), 0.0)
            if row is not None:
                self._ranks.test.accept(row, self._slow[rank], slow=True)
        self._confirmed[rank] = speed
        self._expected = False

    def cleared(self, rank: int) -> None:
        """Record that a probe cleared `rank`: for some hundred iterations, the same evidence raises no suspicion."""
        self._slow.pop(rank, None)
        self._confirmed.pop(rank, None)
        if self._frame is not None and (row := self._frame.stacked.row.get(rank)) is not None:
            self._ranks.test.clear(row, self._frame.last or 0)
            self._ranks.onsets.pop(rank, None)
            assert self._beside is not None
            self._beside.cleared(rank)
        self._expected = False

    def job_is_slow(self) -> None:
        """Record that the job as a whole has been slow since before the first plan that is adopted."""
        self._job_slow = math.nan

    def cleared_link(self, sender: int, receiver: int) -> None:
        """Record that a probe found the link healthy in this direction."""
        self._remember()
        if self._slow_links.pop((sender, receiver), None) is not None and self._frame is not None:
            link, last = (sender, receiver), self._frame.last or 0
            if not self._between.cleared(link, last):
                self._links.clear(link, last)
            assert self._beside is not None
            self._beside.cleared_link(sender, receiver)
        self._expected = False

    # --- one iteration ----------------------------------------------------------------------------------------------

    def _next(self, iteration: int, epoch: int) -> Frame | None:
        """Return the frame of an iteration if the iteration is later than all before; else None."""
        frame = self._frame
        if frame is None or epoch != frame.epoch or (frame.last is not None and iteration <= frame.last):
            return None
        frame.last = iteration
        return frame

    def _known(self) -> Known:
        if self._frame is None:
            return "warming up"
        if self._frame.measured:
            return "warming up" if self._frame.revision is None else "workload"
        return "plain times" if self._plain.ready else "warming up"

    def _teach(self, frame: Frame, iteration: int, columns: Floats) -> None:
        if not frame.fitted:
            frame.fitted = all(self.predictor.ready(key, kind) for key, kind in frame.stacked.work)
        if not frame.fitted or self.predictor.learning:
            frame.stacked.teach(self.predictor, iteration, columns, frame.teachers(self._slow))

    def _judge_plain(self, frame: Frame, iteration: int, seconds: float) -> Assessment:
        """Judge by the iteration's seconds alone: robust statistics of their logarithm."""
        if frame.measured or not 0.0 < seconds < MAX_CHUNK_S:
            return Assessment(predicted_s=None, known=self._known())
        findings = self._plain.update(iteration, math.log(seconds))
        predicted = math.exp(self._plain.level) if self._plain.ready else None
        return Assessment(predicted_s=predicted, findings=findings, known=self._known())

    def _judge(self, frame: Frame, iteration: int, seconds: float, sums: Sums) -> Assessment:
        frame.measured = True
        frame.report(iteration, sums.compute)
        beside = seconds - sums.busy_s
        if 0.0 <= beside < MAX_CHUNK_S and len(frame.beside) < MAX_BESIDE_SAMPLES:
            frame.beside.append(beside)
        findings = self._links.update(iteration, sums.delays, sums.delay_tokens, sums.delay_counts, self._ranks.onsets)
        expected = frame.stacked.seconds(self.predictor, sums.tokens, sums.squares)
        predicted: float | None = None
        if expected is not None and self._foreign(frame, sums):
            if findings:
                self._account_for(findings)
                self._whole.begin()
                assert self._beside is not None
                self._beside.note_findings(findings, self._links.slow)
            return Assessment(predicted_s=None, findings=findings, known="warming up")
        if expected is not None:
            if frame.revision != self.predictor.revision:
                findings += self._begin_anew(frame)
            ratios = sums.compute / frame.stacked.totals(expected)
            findings += self._ranks.update(iteration, ratios)
            findings += self._between.update(iteration, ratios)
            if findings:
                self._account_for_findings(frame, seconds, expected, findings)
            elif iteration % 16 == 0 and (self._slow or self._slow_links):
                self._expect()
            predicted, more = self._judge_whole(frame, iteration, seconds, expected)
            findings += more
            findings += self._judge_beside(frame, iteration, seconds, sums, ratios, findings)
        frame.kept.append((iteration, seconds, sums, frame.present_s))
        return Assessment(predicted_s=predicted, findings=findings, known=self._known())

    def _foreign(self, frame: Frame, sums: Sums) -> bool:
        """Whether this workload is outside of the learnt range: then it is learnt, and nothing is judged by it."""
        if frame.stacked.covered(self.predictor, sums.tokens, sums.squares):
            frame.foreign *= FOREIGN_FADING
            return False
        frame.foreign += 1.0
        frame.kept.clear()
        if frame.foreign >= FOREIGN_ITERATIONS and not self.predictor.learning:
            self.predictor.refit(union=True)
            frame.fitted, frame.foreign = False, 0.0
        return True

    def _begin_anew(self, frame: Frame) -> tuple[Finding, ...]:
        """Learn levels anew after a change of predictions, from the iterations that are still kept.

        For a rank that is or was slow, only iterations since that change count: earlier ones would be taken for its
        level now.
        """
        self._remember()
        frame.revision = self.predictor.revision
        frame.beside_s = float(np.median(frame.beside)) if frame.beside else 0.0
        self._ranks.begin(self._slow, self._cooldowns)
        self._expect()
        self._whole.begin(self._carried_over(frame))
        self._before = -math.inf
        onsets = {rank: onset for rank, onset in self._ranks.onsets.items() if rank in self._slow} | self._ranks.well
        findings: tuple[Finding, ...] = ()
        for iteration, seconds, sums, _ in frame.kept:
            expected = frame.stacked.seconds(self.predictor, sums.tokens, sums.squares)
            if expected is not None:
                ratios = sums.compute / frame.stacked.totals(expected)
                ratios[[frame.stacked.row[rank] for rank, onset in onsets.items() if iteration < onset]] = np.nan
                findings += self._ranks.update(iteration, ratios)
                findings += self._judge_whole(frame, iteration, seconds, expected)[1]
        return tuple(msgspec.structs.replace(finding, detected=frame.last or 0) for finding in findings)

    def _carried_over(self, frame: Frame) -> float | None:
        """Return the approximate level of healthy iterations against changed predictions; None if it was not known.

        The former level is corrected by the difference between old and new predictions of the same iterations.
        """
        level, differences = self._whole.expected, []
        for _, _, sums, former in frame.kept:
            expected = frame.stacked.seconds(self.predictor, sums.tokens, sums.squares)
            if expected is not None and former is not None:
                differences.append(math.log(former / self._now_and_healthy(frame, expected)[0]))
        return level + float(np.median(differences)) if level is not None and differences else None

    def _judge_whole(
        self, frame: Frame, iteration: int, seconds: float, expected: Floats
    ) -> tuple[float | None, tuple[Finding, ...]]:
        """Return the iteration's healthy seconds, and findings about the whole job; `expected` (V,): of its chunks."""
        present, healthy = self._now_and_healthy(frame, expected)
        frame.present_s, frame.healthy_s = None, healthy
        if not 0.0 < healthy < MAX_CHUNK_S:
            return None, ()
        frame.present_s = present
        predicted = _levelled(healthy, self._whole.level, MAX_LEVEL)
        if not 0.0 < seconds < MAX_CHUNK_S:
            return predicted, ()
        assert self._beside is not None
        hold = self._ranks.test.suspects or self._links.test.suspects or self._beside.suspects
        findings = self._whole.update(iteration, math.log(seconds / present), hold=hold)
        return predicted, tuple(self._with_transfers(finding) for finding in findings)

    def _with_transfers(self, finding: Finding) -> Finding:
        longer = self._between.longer_since(finding.iteration) if finding.kind == "fail-slow" else None
        if longer is None:
            return finding
        evidence = f"{finding.evidence}; transfers between nodes take {longer:.1f} times as long"
        return msgspec.structs.replace(finding, transfers=longer, evidence=evidence)

    def _judge_beside(
        self,
        frame: Frame,
        iteration: int,
        seconds: float,
        sums: Sums,
        ratios: Floats,
        findings: tuple[Finding, ...],
    ) -> tuple[Finding, ...]:
        """Return findings of the tests beside ranks, links and job; `findings`: those of the others so far."""
        assert self._beside is not None
        self._beside.note_findings(findings, self._links.slow)
        before, added_s = self._beside.lanes.slow.keys(), self._beside.added_s
        more = self._beside.update(iteration, sums, ratios, frame.healthy_s, self._ranks.test)
        after = self._beside.lanes.slow.keys()
        if self._whole.slow:
            if before and any(finding.component == "job" for finding in findings):
                self._whole.begin()  # that wait is part of the slow job from now on
        elif before - after or (
            after - before and not self._leaves_more(frame, seconds, self._beside.added_s - added_s)
        ):
            self._whole.begin()  # the level changed by these waits alone, which is no further finding
        return more

    def _account_for_findings(
        self, frame: Frame, seconds: float, expected: Floats, findings: tuple[Finding, ...]
    ) -> None:
        """Add findings to the expectation, and learn whole iterations anew, unless the findings explain only a small
        part of the excess since their onset."""
        frame.present_s, _ = self._now_and_healthy(frame, expected)
        self._account_for(findings)
        added_s = self._now_and_healthy(frame, expected)[0] - frame.present_s
        if self._whole.slow or not self._leaves_more(frame, seconds, added_s):
            if added_s > 0.0 and self._whole.expected is not None:
                self._before = self._whole.expected
            self._whole.begin()

    def _leaves_more(self, frame: Frame, seconds: float, added_s: float) -> bool:
        """Whether the last iterations took far longer than with everything known to be slow, including the latest
        finding.

        `added_s`: seconds by which that finding lengthens this iteration. It then explains less than half of the
        excess, and may itself be caused by the remaining part.
        """
        usual, present_s = self._whole.expected, frame.present_s
        if usual is None or present_s is None or not 0.0 < min(present_s, present_s + added_s) < MAX_CHUNK_S:
            return False
        last = [
            (iteration_s, expected_s)
            for _, iteration_s, _, expected_s in islice(reversed(frame.kept), RECENT_ITERATIONS - 1)
        ]
        longer = [
            math.log(iteration_s / expected_s)
            for iteration_s, expected_s in (*last, (seconds, present_s))
            if expected_s is not None and 0.0 < iteration_s < MAX_CHUNK_S
        ]
        if not longer:
            return False
        explained = math.log1p(added_s / present_s)
        unexplained = statistics.median(longer) - explained - max(usual, self._before)
        return unexplained > max(MIN_UNEXPLAINED, abs(explained))

    def _now_and_healthy(self, frame: Frame, expected: Floats) -> tuple[float, float]:
        """Return the seconds of an iteration as things stand, and with everything healthy."""
        if not self._expected:  # computed on demand: verdicts and cooldowns arrive by the thousand
            self._expect()
        healthy = self._priced(frame, expected, frame.transfers)
        added_s = 0.0 if self._beside is None or self._whole.slow else self._beside.added_s
        if frame.present_factors is None and frame.present_transfers is None:
            return healthy + added_s, healthy
        chunks = expected if frame.present_factors is None else expected * frame.present_factors
        transfers = frame.transfers if frame.present_transfers is None else frame.present_transfers
        return self._priced(frame, chunks, transfers) + added_s, healthy

    def _priced(self, frame: Frame, chunks: Floats, transfers: Floats) -> float:
        return float(frame.stacked.compiled.iteration_seconds(chunks, transfers, optimizer_s=frame.beside_s))

    # --- knowledge of ranks and links -------------------------------------------------------------------------------

    def _account_for(self, findings: tuple[Finding, ...]) -> None:
        """Expect from now on that everything slow stays slow."""
        for finding in findings:
            for rank in finding.ranks:
                self._confirmed.pop(rank, None)
        self._remember()
        self._expect()

    def _remember(self) -> None:
        """Copy the tests' knowledge of slow ranks and links under the present plan."""
        frame = self._frame
        if frame is None:
            return
        own = frame.stacked.row
        self._slow = {rank: shift for rank, shift in self._slow.items() if rank not in own} | self._ranks.slow
        self._confirmed = {rank: speed for rank, speed in self._confirmed.items() if rank in self._slow}
        self._cooldowns |= self._ranks.cooldowns
        names = self._links.names
        self._slow_links = {n: shift for n, shift in self._slow_links.items() if n not in names} | self._links.slow

    def _expect(self) -> None:
        """Compute the parts of an iteration as things stand, and with everything healthy."""
        frame = self._frame
        if frame is None:
            return
        self._remember()
        self._expected = True
        frame.transfers = frame.links.edge_seconds(self._links.seconds(healthy=True))
        frame.present_transfers = None
        if self._links.slow:
            frame.present_transfers = frame.links.edge_seconds(self._links.seconds(healthy=False))
        frame.present_factors = None
        if self._ranks.slow:
            frame.present_factors = frame.stacked.factors({r: math.exp(s) for r, s in self._ranks.slow.items()})


def _levelled(seconds: float, level: float, most: float = math.inf) -> float:
    """Correct seconds by the usual difference between iterations and their parts; not if `level` is NaN or beyond
    `most`."""
    return seconds * math.exp(level) if abs(level) < most else seconds
