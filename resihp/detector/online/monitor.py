"""Judges each committed iteration of a running job: its expected time, and the ranks and links that are slow.

The controller calls it after each iteration. It measures nothing, starts no probes, and leaves reactions to the
controller. Pure, no clock. Five channels examine an iteration:

===================  ==================================================================================================
`iteration_channel`  the iteration's seconds relative to the prediction, by change points of the log ratio (`changes`).
                     Sees every slow-down, including common ones, but cannot localise it. The prediction is the paper's
                     Eq. 2 (`pipeline.compiled`) over the chunk times of Eq. 1 (`predictor`)
`rank_channel`       each rank's own work relative to its prediction and to all other ranks
`link_channel`       transfers relative to the link's own past and to all other links
`between_nodes`      the slow-down that all links between nodes share
`beside`             ranks that are slow in some iterations only; collectives, gradient sums and data (`lane_channel`)
===================  ==================================================================================================

The last four channels detect smaller slow-downs, detect them earlier, and name the slow rank or link. Their findings
become part of the time that `iteration_channel` expects, so that one failure makes one finding. If chunks are not
measured, `iteration_channel` alone tests the logarithm of plain iteration times.
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
"""Smallest slow-down of a rank that is reported, log units."""
MAX_BESIDE_SAMPLES = 60
"""Number of iterations from which the time outside of chunks (synchronisation, optimizer step) is learnt."""
MIN_WHOLE_SHIFT = 0.04
"""Smallest slow-down of whole iterations that is reported while ranks and links are tested as well, log units."""
FOREIGN_ITERATIONS, FOREIGN_FADING = 3.0, 0.9
"""Number of iterations with a workload outside of the learnt range after which that workload is learnt as well; each
iteration within the range multiplies the count by FOREIGN_FADING."""
MAX_LEVEL = 0.2
"""Largest credible difference between the healthy level of iterations and their prediction, log units."""
MIN_UNEXPLAINED = 0.15
"""Excess over the time expected with all known slowness at which there must be another cause, log units."""
RECENT_ITERATIONS = 3
"""Number of latest iterations from whose median that excess is taken: a single iteration may be long by chance."""
MIN_PLAIN_SHIFT = 0.03
"""Smallest slow-down that is reported if only plain iteration times are known, log units."""


class Monitor:
    """resihp's own detector: judges each iteration of the adopted plan. Learnt healthy times survive a change of plan.

    `false_alarms_per`: lower bound of the mean number of iterations between false alarms, over all channels, ranks and
    links. `patience`: number of iterations after a healthy probe in which the same evidence raises no suspicion;
    doubled at each further healthy probe of the same rank, up to four times the first value. `least`: smallest
    slow-down that is reported, log units; channels with a larger limit of their own apply their own."""

    def __init__(
        self,
        *,
        predictor: Predictor | None = None,
        false_alarms_per: int = 10_000,
        patience: int = 500,
        least: float = MIN_RANK_SHIFT,
    ) -> None:
        self.predictor = Predictor() if predictor is None else predictor
        """Learnt healthy times of chunks. Kinds of chunks: F, B and W, and BW for a B that does the work of a W as
        well."""
        self._false_alarms_per, self._patience, self._least = false_alarms_per, patience, least
        self._frame: Frame | None = None
        self._job_slow: float | None = None
        """None while the job as a whole is healthy; else the approximate healthy level of whole iterations, NaN if it
        is unknown."""
        self._ranks: RankTest
        self._between: BetweenNodes
        self._whole: WholeTest
        self._beside: Beside | None = None
        self._before = -math.inf
        """Level of whole iterations before the present slowness was found, because a lower level may be learnt when
        that slowness ends; -inf if there is none."""
        self._slow: dict[int, float] = {}
        """Slow-down of each slow rank, log units; ranks on standby included."""
        self._slow_links: dict[tuple[int, int], float] = {}
        self._confirmed: dict[int, float] = {}
        self._expected = True
        """Whether the expected iteration time is up to date with all known slow ranks and links."""
        self._cooldowns: dict[int, Cooldown] = {}
        """Cooldowns of ranks that a probe found healthy. Expired ones are kept, because `patience` doubles from
        them."""

    # --- plans ------------------------------------------------------------------------------------------------------

    def adopt(self, plan: Plan, model: ModelSpec, orders: Orders, nodes: Mapping[int, Hashable] | None = None) -> None:
        """Judge the iterations of `plan` from now on.

        Statistics restart; learnt chunk times and known slow ranks and links are kept. `nodes`: the node of each rank;
        if known, links within nodes and links between nodes are compared with each other from the start. The plan's
        first iteration may have any number. Raises PlanError for orders that cannot be carried out.
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
        """The adopted plan as arrays; defines the rows of `observe_stacked`. None before the first plan."""
        return None if self._frame is None else self._frame.stacked

    @property
    def links(self) -> Links | None:
        """Links of the adopted plan, in the order of `observe_stacked`. None before the first plan."""
        return None if self._frame is None else self._frame.links

    @property
    def settled(self) -> bool:
        """Whether learning is complete: the healthy times of all kinds of chunks in the adopted plan are known and no
        longer change."""
        return self._frame is not None and self._frame.fitted and not self.predictor.learning

    @property
    def beside_s(self) -> float:
        """Seconds per iteration of the adopted plan outside of chunks: synchronisation and optimizer step."""
        return 0.0 if self._frame is None else self._frame.beside_s

    def healthy_transfers(self) -> tuple[float | None, float | None]:
        """Return the median seconds of a healthy transfer over links between nodes, and over links within a node.

        None for a kind without links, or while its times are unknown. If the nodes of ranks are unknown, all links
        count as links between nodes.
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
        """Judge a committed iteration. An iteration of another epoch, repeated or out of order, is ignored.

        Missing reports of ranks and impossible measurements are left out.
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
        """Judge a committed iteration from sums that the ranks computed; until `settled`, call `learn` as well.

        Arrays over ranks have the order of `Stacked.ranks`, arrays over links that of `Links.pairs`. Raises ValueError
        for arrays of other shapes.
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
        """Learn healthy chunk times from an iteration without judging it.

        The measurements of a few ranks of each kind of stage suffice.
        """
        if self._frame is not None and observation.epoch == self._frame.epoch:
            columns = self._frame.stacked.columns(observation.times)
            self._teach(self._frame, observation.iteration, columns)

    def forecast(self, tokens: npt.ArrayLike, squares: npt.ArrayLike) -> float | None:
        """Return the expected seconds of an iteration of the adopted plan, if slow ranks and links stay slow.

        `tokens`, `squares`: token count N and sum of squared lengths S of each micro-batch, (M,) both. None while too
        little is known, or if the plan has another number of micro-batches.
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
        """Return the present speed of each slow rank, 1 is healthy: the speed that a probe confirmed, else an
        estimate."""
        self._remember()
        return {rank: self._confirmed.get(rank, math.exp(-shift)) for rank, shift in sorted(self._slow.items())}

    def standing(self, rank: int) -> RankStanding | None:
        """Return the judgement of `rank` and its reasons; None for a rank that is not in the adopted plan's stages."""
        frame = self._frame
        row = None if frame is None else frame.stacked.row.get(rank)
        if frame is None or row is None:
            return None
        return self._ranks.standing(row, frame.reported(row))

    def scores(self) -> tuple[npt.NDArray[np.int64], Floats, Floats] | None:
        """Return all ranks with work, and their `level` and `evidence` as in `RankStanding`, each of shape (R,).

        None while no rank can be judged.
        """
        frame = self._frame
        if frame is None or frame.revision is None:
            return None
        levels, evidence = self._ranks.test.scores()
        busy = frame.stacked.lengths > 0
        return frame.stacked.ranks[busy], np.exp(levels[busy]), evidence[busy]

    def coverage(self) -> dict[int, int]:
        """Return, for each rank with work, the last iteration with usable measurements of that rank.

        For a rank without any such iteration, return the iteration before the first one that was measured under the
        adopted plan: that rank is not watched. Empty before the first measurements.
        """
        return {} if self._frame is None else self._frame.coverage()

    def confirmed(self, rank: int, speed: float) -> None:
        """Record the speed at which `rank` was declared slow; 1 is healthy.

        The speed is valid until the rank is cleared, recovers or becomes slower. Raises ValueError for a speed that is
        not positive.
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
        """Record, before the first `adopt`, that the job as a whole is slow, so that its recovery will be reported."""
        self._job_slow = math.nan

    def cleared_link(self, sender: int, receiver: int) -> None:
        """Record that a probe found the link from rank `sender` to rank `receiver` healthy."""
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
        """Return the frame of the adopted plan, and mark `iteration` as seen.

        None if the iteration is of another epoch, or not later than all iterations before.
        """
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
        """Judge an iteration without measurements of chunks, by its seconds alone."""
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
        """Return whether the workload is outside of the learnt range, so that the iteration cannot be judged.

        After `FOREIGN_ITERATIONS` of them, the predictor learns this range as well.
        """
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
        """Learn the levels of ranks and of whole iterations again, because the predictions changed.

        Judges the latest iterations (`Frame.kept`) again and returns the findings. For a rank that became slow or
        recovered, only iterations since then count, because earlier ones do not show its present level.
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
        """Return the approximate healthy level of whole iterations relative to the changed predictions.

        It is the former level, corrected by the difference between old and new predictions of the same iterations. None
        if the former level is unknown.
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
        """Return the predicted healthy seconds of the iteration, and findings about the whole job.

        `expected` (V,): healthy seconds of each slot. The prediction is None if it is not credible.
        """
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
        """Return the findings of `beside` for this iteration. `findings`: the findings of the other channels."""
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
        """Add findings to the expected time, and learn the level of whole iterations again.

        The level is kept if the findings explain only a small part of the excess since their onset, so that
        `iteration_channel` reports the remaining part.
        """
        frame.present_s, _ = self._now_and_healthy(frame, expected)
        self._account_for(findings)
        added_s = self._now_and_healthy(frame, expected)[0] - frame.present_s
        if self._whole.slow or not self._leaves_more(frame, seconds, added_s):
            if added_s > 0.0 and self._whole.expected is not None:
                self._before = self._whole.expected
            self._whole.begin()

    def _leaves_more(self, frame: Frame, seconds: float, added_s: float) -> bool:
        """Return whether the latest iterations took far longer than all known slowness explains.

        `added_s`: seconds by which the latest finding lengthens this iteration. If the result is True, that finding
        explains less than half of the excess, and may itself be caused by the remaining part.
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
        """Return the expected seconds of an iteration: with the present slow ranks and links, and with none of them.

        `expected` (V,): healthy seconds of each slot.
        """
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
        """Include the findings in the expected time: from now on, slow ranks and links are expected to stay slow."""
        for finding in findings:
            for rank in finding.ranks:
                self._confirmed.pop(rank, None)
        self._remember()
        self._expect()

    def _remember(self) -> None:
        """Copy the slow ranks and links that the tests know under the adopted plan, to keep them across plans."""
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
        """Compute the seconds of transfers and the factors of chunks, with the present slow ranks and links and
        without.

        The results are attributes of the frame.
        """
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
    """Return `seconds` corrected by `level`, the usual log ratio of measured over predicted seconds.

    A level that is NaN or beyond `most` is ignored.
    """
    return seconds * math.exp(level) if abs(level) < most else seconds
