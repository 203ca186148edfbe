"""What the controller asks after each committed iteration: how long should it have taken, is something slow, and where.

Five channels look at an iteration:

===================  ==================================================================================================
`iteration_channel`  its seconds against Eq. 2 over Eq. 1 (`pipeline.compiled`, `predictor`), change points of the log
                     ratio (`changes`). Sees everything, also what hits everybody, but cannot say where
`rank_channel`       each rank's own work against its prediction, relative to all others
`link_channel`       transfers against the link's own past, relative to all others
`between_nodes`      what all links between nodes have in common
`beside`             ranks that are slow now and then; collectives, sums of gradients and data (`lane_channel`)
===================  ==================================================================================================

All but the first see milder changes, sooner, and name who is slow. What they have found is part of the expectation that
the first one compares with, so that one failure is one finding. Without measurements of chunks only plain iteration
times are left: the first channel then tests their logarithm.

Nothing here measures, probes, or decides what is done about a finding: that is the controller's. Pure, no clock.
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
from resihp.detector.online.plan_arrays import LONGEST_S, Stacked, Sums
from resihp.detector.online.predictor import Predictor
from resihp.detector.online.rank_channel import RankTest
from resihp.detector.sequential.shifts import Pardon
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan
from resihp.pipeline.timeline import Orders

__all__ = ["Assessment", "Finding", "Monitor"]

LEAST = 0.03
"""Smallest shift of a rank that counts, log units."""
BESIDE = 60
"""Iterations from which the time beside chunks (synchronisation, step) is learnt."""
LEAST_OF_WHOLE = 0.04
"""Smallest change of whole iterations that counts where ranks and links are tested, too; log units."""
STAYS, FADING = 3.0, 0.9
"""Iterations in a row of a workload beyond what is learnt, from which it is learnt, too; each of another kind between
them takes a tenth of the count away."""
FAR = 0.2
"""A level of healthy iterations that is further from what they are made of is none; log units."""
UNEXPLAINED = 0.15
"""By how much iterations are longer than with all that is known to be slow, for that not to be the whole of it; log
units."""
FEW = 3
"""Iterations that tell it, the last ones: one of them may have been long by chance."""
LEAST_OF_PLAIN = 0.03
"""The same where nothing else is known."""


class Monitor:
    """Judges iterations of the plan adopted last; knowledge of healthy times survives plans.

    `false_alarms_per`: iterations between false alarms, on average at least, over all channels, ranks and links.
    `patience`: iterations for which a suspicion that was cleared is not raised again on the same evidence; twice as
    long each time that it is, up to four times. `least`: smallest slow-down of a rank that counts, log units;
    channels that are coarser keep their own.
    """

    def __init__(
        self,
        *,
        predictor: Predictor | None = None,
        false_alarms_per: int = 10_000,
        patience: int = 500,
        least: float = LEAST,
    ) -> None:
        self.predictor = Predictor() if predictor is None else predictor
        """What is known of healthy chunks. Kinds: F, B and W, and BW for a B that does the work of both."""
        self._false_alarms_per, self._patience, self._least = false_alarms_per, patience, least
        self._frame: Frame | None = None
        self._job_slow: float | None = None
        """While the job as a whole is slow: about the healthy level of whole iterations, NaN where it is not known."""
        self._ranks: RankTest
        self._between: BetweenNodes
        self._whole: WholeTest
        self._beside: Beside | None = None
        self._before = -math.inf
        """Level of whole iterations before what is slow was found: as that ends, they may learn a lower one."""
        self._slow: dict[int, float] = {}
        """Log shifts of slow ranks, those without work included."""
        self._slow_links: dict[tuple[int, int], float] = {}
        self._confirmed: dict[int, float] = {}
        self._expected = True
        """Whether what is known of slow ranks and links is in what iterations are expected to take."""
        self._pardons: dict[int, Pardon] = {}
        """Of ranks that a probe found healthy; of those that have ended, the patience is remembered."""

    # --- plans ------------------------------------------------------------------------------------------------------

    def adopt(self, plan: Plan, model: ModelSpec, orders: Orders, nodes: Mapping[int, Hashable] | None = None) -> None:
        """A plan takes effect. Statistics begin afresh; what is known of chunks and of slow ranks and links stays.

        `nodes`: where ranks are, if known: links within and between nodes can then be compared from the start.
        Iterations may begin anywhere. Raises PlanError for orders that cannot be carried out.
        """
        self._remember()
        frame = Frame(plan, orders, nodes)
        wandering: float = 0.0 if self._frame is None else self._ranks.test.wandering
        if self._frame is not None:
            self._job_slow = self._whole.level if self._whole.slow else None
        self._frame = frame
        self._slow = {rank: shift for rank, shift in self._slow.items() if rank in frame.present}
        self._confirmed = {rank: speed for rank, speed in self._confirmed.items() if rank in self._slow}
        self._pardons = {rank: pardon for rank, pardon in self._pardons.items() if rank in frame.present}
        self._slow_links = {link: shift for link, shift in self._slow_links.items() if frame.present.issuperset(link)}
        self._ranks = RankTest(frame.stacked, self._false_alarms_per, self._patience, self._least, wandering)
        self._ranks.begin(self._slow, self._pardons)
        self._links = LinkTest(frame.links, self._slow_links, self._false_alarms_per, self._patience, self._least)
        self._between = BetweenNodes(self._links, false_alarms_per=self._false_alarms_per, patience=self._patience)
        self._beside = Beside(
            frame.stacked, self._beside, false_alarms_per=self._false_alarms_per, patience=self._patience
        )
        self._before = -math.inf
        self._whole = WholeTest(
            "iterations against the predicted time, no rank or link stands out",
            least=max(LEAST_OF_WHOLE, self._least),
            floor=LEAST_OF_WHOLE / 2,
            false_alarms_per=2 * self._false_alarms_per,
        )
        if self._job_slow is not None:
            self._whole.slow_before(self._job_slow)
        self._plain = WholeTest(
            "plain iteration times, workload not known",
            least=max(LEAST_OF_PLAIN, self._least),
            floor=LEAST_OF_PLAIN / 10,
            false_alarms_per=self._false_alarms_per,
        )

    @property
    def stacked(self) -> Stacked | None:
        """The adopted plan as arrays: what `observe_stacked` calls rows."""
        return None if self._frame is None else self._frame.stacked

    @property
    def links(self) -> Links | None:
        """Links of the adopted plan, in the order that `observe_stacked` takes them in."""
        return None if self._frame is None else self._frame.links

    @property
    def settled(self) -> bool:
        """Whether all kinds of chunks of the adopted plan are learnt, and learnt no more: their times stay."""
        return self._frame is not None and self._frame.fitted and not self.predictor.learning

    @property
    def beside_s(self) -> float:
        """Seconds of an iteration beside its chunks, of the adopted plan: synchronisation and step."""
        return 0.0 if self._frame is None else self._frame.beside_s

    def healthy_transfers(self) -> tuple[float | None, float | None]:
        """Median seconds of a mean transfer where all is well, between nodes and within one; None where there is none.

        Where ranks' nodes are not known, all links are taken to be between nodes.
        """
        if self._frame is None:
            return None, None
        seconds, kind = self._links.seconds(healthy=True), self._frame.links.kind
        between_s, within_s = (seconds[(kind == one) & (seconds > 0.0)] for one in (0, 1))
        found = [float(np.median(of)) if of.size else None for of in (between_s, within_s)]
        return found[0], found[1]

    # --- iterations -------------------------------------------------------------------------------------------------

    def observe(self, observation: Observation) -> Assessment:
        """Judge a committed iteration. One of another epoch, repeated or out of order is ignored.

        Ranks that did not report are left out, as are measurements that cannot be.
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
        """As `observe`, from sums that the ranks made themselves; until `settled`, chunk times must come in by `learn`.

        Rows of ranks are those of `plan_arrays`, of links those of `link_channel`. Raises ValueError for arrays of
        other shapes.
        """
        frame = self._next(iteration, epoch)
        if frame is None:
            return Assessment(predicted_s=None, known=self._known())
        batch, ranks, links = frame.stacked.compiled.micro_batches, frame.stacked.ranks.size, frame.links.size
        of_links = (sums.delays, sums.delay_tokens, sums.delay_counts)
        lanes, of = len(frame.stacked.places), sums.lanes
        of_lanes = () if of is None else (of.collective, of.reduction, of.data)
        given = [np.shape(one) for one in (sums.tokens, sums.squares, sums.compute, *of_links, *of_lanes)]
        if given != [(batch,), (batch,), (ranks,), *[(links,)] * 3, *[(lanes,)] * len(of_lanes)]:
            what = f"{batch} micro-batches, {ranks} ranks, {links} links, {lanes} lanes"
            raise ValueError(f"iteration {iteration}: sums of shapes {given} for {what}")
        with np.errstate(invalid="ignore"):
            compute = np.where((sums.compute > 0.0) & (sums.compute < LONGEST_S), sums.compute, np.nan)
        return self._judge(frame, iteration, seconds, msgspec.structs.replace(sums, compute=compute))

    def learn(self, observation: Observation) -> None:
        """Learn healthy chunk times from the ranks in it, and judge nothing; a few of each kind of stage suffice."""
        if self._frame is not None and observation.epoch == self._frame.epoch:
            columns = self._frame.stacked.columns(observation.times)
            self._teach(self._frame, observation.iteration, columns)

    def forecast(self, tokens: npt.ArrayLike, squares: npt.ArrayLike) -> float | None:
        """Seconds that an iteration of the adopted plan should take, from N and S (M,) of its micro-batches alone.

        What is slow is taken to stay so. None while too little is known, or for another number of micro-batches.
        """
        workload = [np.asarray(one, dtype=np.float64) for one in (tokens, squares)]
        if self._frame is None or any(len(one) != self._frame.stacked.compiled.micro_batches for one in workload):
            return None
        expected = self._frame.stacked.seconds(self.predictor, *workload)
        seconds = 0.0
        if expected is not None:
            seconds = _levelled(self._now_and_healthy(self._frame, expected)[0], self._whole.now)
        return seconds if 0.0 < seconds < LONGEST_S else None

    # --- what is slow -----------------------------------------------------------------------------------------------

    def speeds(self) -> dict[int, float]:
        """Present speed of each rank that was found slow, 1 being healthy: as confirmed, else as estimated."""
        self._remember()
        return {rank: self._confirmed.get(rank, math.exp(-shift)) for rank, shift in sorted(self._slow.items())}

    def standing(self, rank: int) -> RankStanding | None:
        """Why `rank` is taken to be slow, or is not; None for one without work in the adopted plan."""
        frame = self._frame
        row = None if frame is None else frame.stacked.row.get(rank)
        if frame is None or row is None:
            return None
        return self._ranks.standing(row, frame.reported(row))

    def scores(self) -> tuple[npt.NDArray[np.int64], Floats, Floats] | None:
        """(R,) each: ranks with work, their levels (1 healthy, NaN unknown) and evidence, as `standing` tells them.

        None while no rank can be judged.
        """
        frame = self._frame
        if frame is None or frame.revision is None:
            return None
        levels, evidence = self._ranks.test.scores()
        busy = frame.stacked.lengths > 0
        return frame.stacked.ranks[busy], np.exp(levels[busy]), evidence[busy]

    def coverage(self) -> dict[int, int]:
        """The iteration in which each rank of the adopted plan with work last reported measurements that can be.

        Of ranks that never did, the iteration before the plan's first: they are not watched.
        """
        return {} if self._frame is None else self._frame.coverage()

    def confirmed(self, rank: int, speed: float) -> None:
        """A probe says that `rank` has this speed. It stays until the rank is cleared, recovers or becomes slower.

        Raises ValueError for a speed that is not positive.
        """
        if not (math.isfinite(speed) and speed > 0.0):
            raise ValueError(f"rank {rank}: a speed of {speed} cannot be; 1 is healthy, 0.5 half as fast")
        row = None if self._frame is None else self._frame.stacked.row.get(rank)
        if rank not in self._slow if row is None else not self._ranks.test.is_slow(row):
            self._slow[rank] = max(-math.log(speed), 0.0)
            if row is not None:
                self._ranks.test.accept(row, self._slow[rank], slow=True)
        self._confirmed[rank] = speed
        self._expected = False

    def cleared(self, rank: int) -> None:
        """A probe says that `rank` is healthy. The same evidence is not raised again for some hundred iterations."""
        self._slow.pop(rank, None)
        self._confirmed.pop(rank, None)
        if self._frame is not None and (row := self._frame.stacked.row.get(rank)) is not None:
            self._ranks.test.clear(row, self._frame.last or 0)
            self._ranks.onsets.pop(rank, None)
            assert self._beside is not None
            self._beside.cleared(rank)
        self._expected = False

    def job_is_slow(self) -> None:
        """On record: the job as a whole has been slow since before the first plan that is adopted."""
        self._job_slow = math.nan

    def cleared_link(self, sender: int, receiver: int) -> None:
        """A probe says that the link is healthy, in this direction."""
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
        """The frame that an iteration belongs to, if it is a later one than all before."""
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
        """Nothing but the iteration's seconds: robust statistics of their logarithm."""
        if frame.measured or not 0.0 < seconds < LONGEST_S:
            return Assessment(predicted_s=None, known=self._known())
        findings = self._plain.update(iteration, math.log(seconds))
        predicted = math.exp(self._plain.level) if self._plain.ready else None
        return Assessment(predicted_s=predicted, findings=findings, known=self._known())

    def _judge(self, frame: Frame, iteration: int, seconds: float, sums: Sums) -> Assessment:
        frame.measured = True
        frame.report(iteration, sums.compute)
        beside = seconds - sums.busy_s
        if 0.0 <= beside < LONGEST_S and len(frame.beside) < BESIDE:
            frame.beside.append(beside)
        findings = self._links.update(iteration, sums.delays, sums.delay_tokens, sums.delay_counts, self._ranks.onsets)
        expected = frame.stacked.seconds(self.predictor, sums.tokens, sums.squares)
        predicted: float | None = None
        if expected is not None and self._foreign(frame, sums):
            if findings:
                self._account_for(findings)
                self._whole.begin()
                assert self._beside is not None
                self._beside.heed(findings, self._links.slow)
            return Assessment(predicted_s=None, findings=findings, known="warming up")
        if expected is not None:
            if frame.revision != self.predictor.revision:
                findings += self._begin_anew(frame)
            ratios = sums.compute / frame.stacked.totals(expected)
            findings += self._ranks.update(iteration, ratios)
            findings += self._between.update(iteration, ratios)
            if findings:
                self._explain(frame, seconds, expected, findings)
            elif iteration % 16 == 0 and (self._slow or self._slow_links):
                self._expect()
            predicted, more = self._judge_whole(frame, iteration, seconds, expected)
            findings += more
            findings += self._judge_beside(frame, iteration, seconds, sums, ratios, findings)
        frame.kept.append((iteration, seconds, sums, frame.present_s))
        return Assessment(predicted_s=predicted, findings=findings, known=self._known())

    def _foreign(self, frame: Frame, sums: Sums) -> bool:
        """Whether this workload is beyond what is learnt: then it is learnt, and nothing is judged by it."""
        if frame.stacked.covered(self.predictor, sums.tokens, sums.squares):
            frame.foreign *= FADING
            return False
        frame.foreign += 1.0
        frame.kept.clear()
        if frame.foreign >= STAYS and not self.predictor.learning:
            self.predictor.refit(union=True)
            frame.fitted, frame.foreign = False, 0.0
        return True

    def _begin_anew(self, frame: Frame) -> tuple[Finding, ...]:
        """Predictions changed: learn levels anew, from the iterations that are still remembered. Of a rank that is slow
        or was, those since: what it was before would be taken for its level now."""
        self._remember()
        frame.revision = self.predictor.revision
        frame.beside_s = float(np.median(frame.beside)) if frame.beside else 0.0
        self._ranks.begin(self._slow, self._pardons)
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
        """About the level of healthy iterations against predictions that have just changed; None if it was not known.

        What was learnt against the former ones is off by as much as predictions of the same iterations differ.
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
        """Healthy seconds of the iteration, and what it says about all of the job; `expected` (V,): of its chunks."""
        present, healthy = self._now_and_healthy(frame, expected)
        frame.present_s, frame.healthy_s = None, healthy
        if not 0.0 < healthy < LONGEST_S:
            return None, ()
        frame.present_s = present
        predicted = _levelled(healthy, self._whole.level, FAR)
        if not 0.0 < seconds < LONGEST_S:
            return predicted, ()
        assert self._beside is not None
        hold = self._ranks.test.suspects or self._links.test.suspects or self._beside.suspects
        found = self._whole.update(iteration, math.log(seconds / present), hold=hold)
        return predicted, tuple(self._with_transfers(finding) for finding in found)

    def _with_transfers(self, finding: Finding) -> Finding:
        longer = self._between.longer_since(finding.iteration) if finding.kind == "fail-slow" else None
        if longer is None:
            return finding
        told = f"{finding.evidence}; transfers between nodes take {longer:.1f} times as long"
        return msgspec.structs.replace(finding, transfers=longer, evidence=told)

    def _judge_beside(
        self,
        frame: Frame,
        iteration: int,
        seconds: float,
        sums: Sums,
        ratios: Floats,
        findings: tuple[Finding, ...],
    ) -> tuple[Finding, ...]:
        """What no slow rank, link or job explains; `findings`: of those."""
        assert self._beside is not None
        self._beside.heed(findings, self._links.slow)
        before, added_s = self._beside.lanes.slow.keys(), self._beside.added_s
        more = self._beside.update(iteration, sums, ratios, frame.healthy_s, self._ranks.test)
        after = self._beside.lanes.slow.keys()
        if self._whole.slow:
            if before and any(finding.component == "job" for finding in findings):
                self._whole.begin()  # what waits is part of that from now on
        elif before - after or (
            after - before and not self._leaves_more(frame, seconds, self._beside.added_s - added_s)
        ):
            self._whole.begin()  # whole iterations are not longer by that any more, or are, and by that alone: no news
        return more

    def _explain(self, frame: Frame, seconds: float, expected: Floats, findings: tuple[Finding, ...]) -> None:
        """What was found is expected from now on, and whole iterations are learnt anew, unless it explains little of
        what they showed since its onset."""
        frame.present_s, _ = self._now_and_healthy(frame, expected)
        self._account_for(findings)
        added_s = self._now_and_healthy(frame, expected)[0] - frame.present_s
        if self._whole.slow or not self._leaves_more(frame, seconds, added_s):
            if added_s > 0.0 and self._whole.expected is not None:
                self._before = self._whole.expected
            self._whole.begin()

    def _leaves_more(self, frame: Frame, seconds: float, added_s: float) -> bool:
        """Whether the last iterations took longer by far than with all that is known, what was just found included:
        this one is expected to take `added_s` longer for it. It explains less than half then, and may have its cause in
        what is left."""
        usual, present_s = self._whole.expected, frame.present_s
        if usual is None or present_s is None or not 0.0 < min(present_s, present_s + added_s) < LONGEST_S:
            return False
        last = [(one, expected_s) for _, one, _, expected_s in islice(reversed(frame.kept), FEW - 1)]
        longer = [
            math.log(one / expected_s)
            for one, expected_s in (*last, (seconds, present_s))
            if expected_s is not None and 0.0 < one < LONGEST_S
        ]
        if not longer:
            return False
        explained = math.log1p(added_s / present_s)
        left = statistics.median(longer) - explained - max(usual, self._before)
        return left > max(UNEXPLAINED, abs(explained))

    def _now_and_healthy(self, frame: Frame, expected: Floats) -> tuple[float, float]:
        """Seconds of an iteration as things stand, and where all is well."""
        if not self._expected:  # verdicts and pardons come by the thousand
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

    # --- what is known of ranks and links ---------------------------------------------------------------------------

    def _account_for(self, findings: tuple[Finding, ...]) -> None:
        """What is slow now is expected from now on."""
        for finding in findings:
            for rank in finding.ranks:
                self._confirmed.pop(rank, None)
        self._remember()
        self._expect()

    def _remember(self) -> None:
        """Take over what the tests know of slow ranks and links of the present plan."""
        frame = self._frame
        if frame is None:
            return
        own = frame.stacked.row
        self._slow = {rank: shift for rank, shift in self._slow.items() if rank not in own} | self._ranks.slow
        self._confirmed = {rank: speed for rank, speed in self._confirmed.items() if rank in self._slow}
        self._pardons |= self._ranks.pardons
        names = self._links.names
        self._slow_links = {n: shift for n, shift in self._slow_links.items() if n not in names} | self._links.slow

    def _expect(self) -> None:
        """What an iteration is made of now, and where all is well."""
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
    """By how much iterations usually differ from what they are made of; `level` NaN, or beyond `most`: not known."""
    return seconds * math.exp(level) if abs(level) < most else seconds
