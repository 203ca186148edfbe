"""Defines the interface of a detector of slow devices and links.

Implementations: `resihp.detector.online.monitor` (resihp's method) and `resihp.detector.rivals` (the methods of the
ResiHP paper and of Greyhound); `resihp.detector.modes` chooses one by the job's settings. A detector only reports
findings: it never measures, starts a probe or decides on a reaction. All implementations are pure and read no clock.
Called by the controller alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from resihp.detector.findings import Assessment, RankStanding
from resihp.detector.observation import Floats, Observation
from resihp.detector.online.predictor import Key
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan
from resihp.pipeline.timeline import Orders


class HealthyChunks(Protocol):
    """The learnt times of chunks on healthy devices (`resihp.detector.online.predictor`)."""

    def predict(self, key: Key, kind: str, tokens: npt.ArrayLike, squares: npt.ArrayLike) -> Floats | None:
        """Return the seconds of healthy chunks, from the token counts N and the sums of squared lengths S.

        The result has the shape of `tokens` and `squares`; None while the time of this kind of chunk is unknown.
        """


class Detector(Protocol):
    """A detector: judges each committed iteration of the adopted plan. Learnt healthy times survive a change of
    plan."""

    @property
    def predictor(self) -> HealthyChunks: ...

    @property
    def settled(self) -> bool:
        """Whether learning is complete: the healthy times of all kinds of chunks in the adopted plan are known and no
        longer change."""

    @property
    def beside_s(self) -> float:
        """Seconds per iteration of the adopted plan outside of chunks: synchronisation and optimizer step."""

    def healthy_transfers(self) -> tuple[float | None, float | None]:
        """Return the median seconds of a healthy transfer between nodes, and within a node; None without such links."""

    def adopt(self, plan: Plan, model: ModelSpec, orders: Orders, nodes: Mapping[int, Hashable] | None = None) -> None:
        """Judge the iterations of `plan` from now on.

        `nodes`: the node of each rank. Raises PlanError for orders that cannot be carried out.
        """

    def observe(self, observation: Observation) -> Assessment:
        """Judge a committed iteration. An iteration of another epoch, repeated or out of order, is ignored."""

    def forecast(self, tokens: npt.ArrayLike, squares: npt.ArrayLike) -> float | None:
        """Return the expected seconds of an iteration at the present speeds of ranks and links.

        `tokens`, `squares`: token count N and sum of squared lengths S of each micro-batch, (M,) both. None while too
        little is known.
        """

    def speeds(self) -> dict[int, float]:
        """Return the present speed of each rank that was found slow, relative to a healthy rank."""

    def standing(self, rank: int) -> RankStanding | None:
        """Return the detector's judgement of `rank` and its reasons; None for a rank that is not judged
        individually."""

    def coverage(self) -> dict[int, int]:
        """Return, for each rank with work, the last iteration with usable measurements of that rank; empty if no
        measurements are requested."""

    def scores(self) -> tuple[npt.NDArray[np.int64], Floats, Floats] | None:
        """Return all ranks with work, and their `level` and `evidence` as in `RankStanding`, each of shape (R,).

        None while no rank can be judged.
        """

    def confirmed(self, rank: int, speed: float) -> None:
        """Record the speed at which `rank` was declared slow; 1 is healthy.

        Raises ValueError for a speed that is not positive.
        """

    def cleared(self, rank: int) -> None:
        """Record that a probe found `rank` healthy."""

    def job_is_slow(self) -> None:
        """Record, before the first `adopt`, that the ledger has the job as a whole as slow, so that its recovery will
        be reported."""

    def cleared_link(self, sender: int, receiver: int) -> None:
        """Record that a probe found the link from rank `sender` to rank `receiver` healthy."""
