"""What the controller asks after each committed iteration: how long should it have taken, is something slow, and where.

Three channels look at an iteration:

===================  ==================================================================================================
`iteration_channel`  its seconds against Eq. 2 over Eq. 1 (`pipeline.compiled`, `predictor`), change points of the log
                     ratio (`changes`). Sees everything, also what hits everybody, but cannot say where
`rank_channel`       each rank's own work against its prediction, relative to all others
`link_channel`       transfers against the link's own past, relative to all others
===================  ==================================================================================================

The last two see milder changes, sooner, and name who is slow. What they have found is part of the expectation that the
first one compares with, so that one failure is one finding. Without measurements of chunks only plain iteration times
are left: the first channel then tests their logarithm.

Nothing here measures, probes, or decides what is done about a finding: that is the controller's. Pure, no clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from resihp.detector.findings import Assessment, Finding, Known
from resihp.detector.observation import Floats, Observation
from resihp.detector.online.iteration_channel import WholeTest
from resihp.detector.online.link_channel import Links, LinkTest
from resihp.detector.online.plan_arrays import LONGEST_S, Stacked, Sums
from resihp.detector.online.predictor import Predictor
from resihp.detector.online.rank_channel import RankTest
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan
from resihp.pipeline.compiled import compile_orders
from resihp.pipeline.timeline import Orders

__all__ = ["Assessment", "Finding", "Monitor"]

TEACHERS = 16
"""Ranks of each group of peers that the predictor learns from."""
KEPT = 8
"""Iterations that are judged anew when predictions become better."""
BESIDE = 60
"""Iterations from which the time beside chunks (synchronisation, step) is learnt."""
LEAST_OF_WHOLE = 0.04
"""Smallest change of whole iterations that counts where ranks and links are tested, too; log units."""
LEAST_OF_PLAIN = 0.03
"""The same where nothing else is known."""


class _Frame:
    """A plan that took effect, and the statistics that began with it."""

    def __init__(self, plan: Plan, orders: Orders, nodes: Mapping[int, Hashable] | None) -> None:
        self.epoch = plan.epoch
        self.stacked = Stacked(plan, compile_orders(plan, orders))
        self.links = Links(self.stacked, nodes)
        self.present = {*self.stacked.ranks.tolist(), *plan.layout.standby}
        self.last: int | None = None
        """Iteration seen last."""
        self.revision: int | None = None
        """The predictor's, on which levels rest."""
        self.fitted = False
        """Whether all kinds of chunks have been learnt, not only derived from others."""
        self.measured = False
        """Whether chunks are measured at all."""
        self.kept: deque[tuple[int, float, Sums, float | None]] = deque(maxlen=KEPT)
        """Iterations seen last: what `_judge` was given, and what was expected of them, as things stood."""
        self.present_s: float | None = None
        """What was expected of the iteration seen last, as things stood."""
        self.beside: list[float] = []
        self.beside_s = 0.0
        """Seconds of an iteration beside its chunks: synchronisation and step."""
        self.transfers: Floats = np.zeros(self.stacked.compiled.edges.shape[1])
        """(E,): healthy seconds."""
        self.present_transfers: Floats | None = None
        self.present_factors: Floats | None = None
        """(V,): by how much slots last longer now than where all is well; None for not at all."""

    def teachers(self, without: Mapping[int, float]) -> list[int]:
        """Rows that the predictor learns from, spread over each group of peers."""
        group, ranks = self.stacked.group, self.stacked.ranks
        rows: list[int] = []
        for one in range(int(group.max(initial=-1)) + 1):
            members = np.flatnonzero(group == one)
            members = members[:: max(1, -(-members.size // TEACHERS))]
            rows += [row for row in members.tolist() if int(ranks[row]) not in without]
        return rows


class Monitor:
    """Judges iterations of the plan adopted last; knowledge of healthy times survives plans.

    `false_alarms_per`: iterations between false alarms, on average at least, over all channels, ranks and links.
    `patience`: iterations for which a suspicion that was cleared is not raised again on the same evidence, doubled
    each time that it is.
    """

    def __init__(
        self, *, predictor: Predictor | None = None, false_alarms_per: int = 10_000, patience: int = 500
    ) -> None:
        self.predictor = Predictor() if predictor is None else predictor
        """What is known of healthy chunks. Kinds: F, B and W, and BW for a B that does the work of both."""
        self._false_alarms_per, self._patience = false_alarms_per, patience
        self._frame: _Frame | None = None
        self._slow: dict[int, float] = {}
        """Log shifts of slow ranks, those without work included."""
        self._slow_links: dict[tuple[int, int], float] = {}
        self._confirmed: dict[int, float] = {}
        self._cleared: dict[int, tuple[float, int]] = {}
        """Log shifts of ranks that a probe found healthy, and the iteration of that."""

    # --- plans ------------------------------------------------------------------------------------------------------

    def adopt(self, plan: Plan, model: ModelSpec, orders: Orders, nodes: Mapping[int, Hashable] | None = None) -> None:
        """A plan takes effect. Statistics begin afresh; what is known of chunks and of slow ranks and links stays.

        `nodes`: where ranks are, if known: links within and between nodes can then be compared from the start.
        Iterations may begin anywhere. Raises PlanError for orders that cannot be carried out.
        """
        self._remember()
        last = 0 if self._frame is None else self._frame.last or 0
        frame = _Frame(plan, orders, nodes)
        self._frame = frame
        self._slow = {rank: shift for rank, shift in self._slow.items() if rank in frame.present}
        self._confirmed = {rank: speed for rank, speed in self._confirmed.items() if rank in self._slow}
        self._cleared = {
            rank: (shift, then)
            for rank, (shift, then) in self._cleared.items()
            if rank in frame.present and last - then < self._patience
        }
        self._slow_links = {link: shift for link, shift in self._slow_links.items() if frame.present.issuperset(link)}
        self._ranks = RankTest(frame.stacked, self._false_alarms_per, self._patience)
        self._ranks.begin(self._slow, self._pardoned())
        self._links = LinkTest(frame.links, self._slow_links, self._false_alarms_per, self._patience)
        self._whole = WholeTest(
            "iterations against the predicted time, no rank or link stands out",
            least=LEAST_OF_WHOLE,
            floor=LEAST_OF_WHOLE / 2,
            false_alarms_per=5 * self._false_alarms_per,
        )
        self._plain = WholeTest(
            "plain iteration times, workload not known",
            least=LEAST_OF_PLAIN,
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
        )
        return self._judge(frame, observation.iteration, observation.seconds, sums)

    def observe_stacked(self, iteration: int, epoch: int, seconds: float, sums: Sums) -> Assessment:
        """As `observe`, from sums that the ranks made themselves; chunk times must come in by `learn`.

        Rows of ranks are those of `plan_arrays`, of links those of `link_channel`. Raises ValueError for arrays of
        other shapes.
        """
        frame = self._next(iteration, epoch)
        if frame is None:
            return Assessment(predicted_s=None, known=self._known())
        batch, ranks, links = frame.stacked.compiled.micro_batches, frame.stacked.ranks.size, frame.links.size
        of_links = (sums.delays, sums.delay_tokens, sums.delay_counts)
        given = [np.shape(one) for one in (sums.tokens, sums.squares, sums.compute, *of_links)]
        if given != [(batch,), (batch,), (ranks,), *[(links,)] * 3]:
            raise ValueError(
                f"iteration {iteration}: sums of shapes {given} for {batch} micro-batches, {ranks} ranks, {links} links"
            )
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
        seconds = 0.0 if expected is None else self._levelled(self._now_and_healthy(self._frame, expected)[0])
        return seconds if 0.0 < seconds < LONGEST_S else None

    # --- what is slow -----------------------------------------------------------------------------------------------

    def speeds(self) -> dict[int, float]:
        """Present speed of each rank that was found slow, 1 being healthy: as confirmed, else as estimated."""
        self._remember()
        return {rank: self._confirmed.get(rank, math.exp(-shift)) for rank, shift in sorted(self._slow.items())}

    def confirmed(self, rank: int, speed: float) -> None:
        """A probe says that `rank` has this speed. It stays until the rank is cleared, recovers or becomes slower.

        Raises ValueError for a speed that is not positive.
        """
        if not (math.isfinite(speed) and speed > 0.0):
            raise ValueError(f"rank {rank}: a speed of {speed} cannot be; 1 is healthy, 0.5 half as fast")
        if rank not in self.speeds():
            self._slow[rank] = max(-math.log(speed), 0.0)
            row = None if self._frame is None else self._frame.stacked.row.get(rank)
            if row is not None:
                self._ranks.test.accept(row, self._slow[rank], slow=True)
        self._confirmed[rank] = speed
        self._expect()

    def cleared(self, rank: int) -> None:
        """A probe says that `rank` is healthy. The same evidence is not raised again for some hundred iterations."""
        self._remember()
        shift = self._slow.pop(rank, 0.0)
        self._confirmed.pop(rank, None)
        if self._frame is not None:
            last = self._frame.last or 0
            row = self._frame.stacked.row.get(rank)
            if row is not None:
                self._ranks.test.clear(row, last)
                self._ranks.onsets.pop(rank, None)
            self._cleared[rank] = (max(shift, self._cleared.get(rank, (0.0, 0))[0]), last)
        self._expect()

    def cleared_link(self, sender: int, receiver: int) -> None:
        """A probe says that the link is healthy, in this direction."""
        self._remember()
        if self._slow_links.pop((sender, receiver), None) is not None and self._frame is not None:
            self._links.clear((sender, receiver), self._frame.last or 0)
        self._expect()

    # --- one iteration ----------------------------------------------------------------------------------------------

    def _next(self, iteration: int, epoch: int) -> _Frame | None:
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

    def _teach(self, frame: _Frame, iteration: int, columns: Floats) -> None:
        if not frame.fitted:
            frame.fitted = all(self.predictor.ready(key, kind) for key, kind in frame.stacked.work)
        if not frame.fitted or self.predictor.learning:
            frame.stacked.teach(self.predictor, iteration, columns, frame.teachers(self._slow))

    def _judge_plain(self, frame: _Frame, iteration: int, seconds: float) -> Assessment:
        """Nothing but the iteration's seconds: robust statistics of their logarithm."""
        if frame.measured or not 0.0 < seconds < LONGEST_S:
            return Assessment(predicted_s=None, known=self._known())
        findings = self._plain.update(iteration, math.log(seconds))
        predicted = math.exp(self._plain.level) if self._plain.ready else None
        return Assessment(predicted_s=predicted, findings=findings, known=self._known())

    def _judge(self, frame: _Frame, iteration: int, seconds: float, sums: Sums) -> Assessment:
        frame.measured = True
        beside = seconds - sums.busy_s
        if 0.0 <= beside < LONGEST_S and len(frame.beside) < BESIDE:
            frame.beside.append(beside)
        findings = self._links.update(iteration, sums.delays, sums.delay_tokens, sums.delay_counts, self._ranks.onsets)
        expected = frame.stacked.seconds(self.predictor, sums.tokens, sums.squares)
        predicted: float | None = None
        if expected is not None:
            if frame.revision != self.predictor.revision:
                findings += self._begin_anew(frame)
            findings += self._ranks.update(iteration, sums.compute / frame.stacked.totals(expected))
            if findings:
                self._account_for(frame, findings)
            elif iteration % 16 == 0 and (self._slow or self._slow_links):
                self._expect()
            predicted, more = self._judge_whole(frame, iteration, seconds, expected)
            findings += more
        frame.kept.append((iteration, seconds, sums, frame.present_s))
        return Assessment(predicted_s=predicted, findings=findings, known=self._known())

    def _begin_anew(self, frame: _Frame) -> tuple[Finding, ...]:
        """Predictions changed: learn levels anew, from the iterations that are still remembered."""
        self._remember()
        frame.revision = self.predictor.revision
        frame.beside_s = float(np.median(frame.beside)) if frame.beside else 0.0
        self._ranks.begin(self._slow, self._pardoned())
        self._expect()
        self._whole.begin(self._carried_over(frame))
        findings: tuple[Finding, ...] = ()
        for iteration, seconds, sums, _ in frame.kept:
            expected = frame.stacked.seconds(self.predictor, sums.tokens, sums.squares)
            if expected is not None:
                findings += self._ranks.update(iteration, sums.compute / frame.stacked.totals(expected))
                findings += self._judge_whole(frame, iteration, seconds, expected)[1]
        return tuple(msgspec.structs.replace(finding, detected=frame.last or 0) for finding in findings)

    def _carried_over(self, frame: _Frame) -> float | None:
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
        self, frame: _Frame, iteration: int, seconds: float, expected: Floats
    ) -> tuple[float | None, tuple[Finding, ...]]:
        """Healthy seconds of the iteration, and what it says about all of the job; `expected` (V,): of its chunks."""
        present, healthy = self._now_and_healthy(frame, expected)
        frame.present_s = None
        if not 0.0 < healthy < LONGEST_S:
            return None, ()
        frame.present_s = present
        predicted = self._levelled(healthy)
        if not 0.0 < seconds < LONGEST_S:
            return predicted, ()
        hold = self._ranks.test.suspects or self._links.test.suspects
        return predicted, self._whole.update(iteration, math.log(seconds / present), hold=hold)

    def _now_and_healthy(self, frame: _Frame, expected: Floats) -> tuple[float, float]:
        """Seconds of an iteration as things stand, and where all is well."""
        healthy = self._priced(frame, expected, frame.transfers)
        if frame.present_factors is None and frame.present_transfers is None:
            return healthy, healthy
        chunks = expected if frame.present_factors is None else expected * frame.present_factors
        transfers = frame.transfers if frame.present_transfers is None else frame.present_transfers
        return self._priced(frame, chunks, transfers), healthy

    def _levelled(self, seconds: float) -> float:
        """By how much iterations usually differ from what they are made of."""
        level = self._whole.level
        return seconds * math.exp(level) if abs(level) < 0.2 else seconds

    def _priced(self, frame: _Frame, chunks: Floats, transfers: Floats) -> float:
        return float(frame.stacked.compiled.iteration_seconds(chunks, transfers, optimizer_s=frame.beside_s))

    # --- what is known of ranks and links ---------------------------------------------------------------------------

    def _pardoned(self) -> dict[int, float]:
        """Log shifts that probes found healthy, by rank."""
        return {rank: shift for rank, (shift, _) in self._cleared.items()}

    def _account_for(self, frame: _Frame, findings: tuple[Finding, ...]) -> None:
        """What is slow now is expected from now on: what whole iterations showed since its onset is explained."""
        for finding in findings:
            for rank in finding.ranks:
                self._confirmed.pop(rank, None)
        self._remember()
        self._expect()
        self._whole.begin()

    def _remember(self) -> None:
        """Take over what the tests know of slow ranks and links of the present plan."""
        frame = self._frame
        if frame is None:
            return
        own = frame.stacked.row
        self._slow = {rank: shift for rank, shift in self._slow.items() if rank not in own} | self._ranks.slow
        self._confirmed = {rank: speed for rank, speed in self._confirmed.items() if rank in self._slow}
        names = self._links.names
        self._slow_links = {n: shift for n, shift in self._slow_links.items() if n not in names} | self._links.slow

    def _expect(self) -> None:
        """What an iteration is made of now, and where all is well."""
        frame = self._frame
        if frame is None:
            return
        self._remember()
        frame.transfers = frame.links.edge_seconds(self._links.seconds(healthy=True))
        frame.present_transfers = None
        if self._links.slow:
            frame.present_transfers = frame.links.edge_seconds(self._links.seconds(healthy=False))
        frame.present_factors = None
        if self._ranks.slow:
            frame.present_factors = frame.stacked.factors({r: math.exp(s) for r, s in self._ranks.slow.items()})
