"""What a detector of slow devices and links is to whoever asks it: one interface, several ways to find out.

Implementations: `resihp.detector.online.monitor` (ours), `resihp.detector.rivals` (the paper's, Greyhound's); which one
a job has, `resihp.detector.modes` decides by its settings. A detector only finds: nothing here measures, probes, or
decides what is done. All are pure and have no clock. Asked by the controller alone.
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
    """What is known of healthy chunks (`resihp.detector.online.predictor`)."""

    def predict(self, key: Key, kind: str, tokens: npt.ArrayLike, squares: npt.ArrayLike) -> Floats | None:
        """Seconds of chunks of N tokens and S squared lengths, the same shape; None while that is not known."""


class Detector(Protocol):
    """Judges iterations of the plan adopted last; knowledge of healthy times survives plans."""

    @property
    def predictor(self) -> HealthyChunks: ...

    @property
    def settled(self) -> bool:
        """Whether all kinds of chunks of the adopted plan are learnt, and learnt no more: their times stay."""

    @property
    def beside_s(self) -> float:
        """Seconds of an iteration beside its chunks, of the adopted plan: synchronisation and step."""

    def healthy_transfers(self) -> tuple[float | None, float | None]:
        """Median seconds of a transfer where all is well, between nodes and within one; None where there is none."""

    def adopt(self, plan: Plan, model: ModelSpec, orders: Orders, nodes: Mapping[int, Hashable] | None = None) -> None:
        """A plan takes effect; `nodes`: where ranks are. Raises PlanError for orders that cannot be carried out."""

    def observe(self, observation: Observation) -> Assessment:
        """Judge a committed iteration. One of another epoch, repeated or out of order is ignored."""

    def forecast(self, tokens: npt.ArrayLike, squares: npt.ArrayLike) -> float | None:
        """Seconds that an iteration should take, from N and S (M,) of its micro-batches; what is slow stays so."""

    def speeds(self) -> dict[int, float]:
        """Present speed of each rank that was found slow, 1 being healthy."""

    def standing(self, rank: int) -> RankStanding | None:
        """Why `rank` is taken to be slow, or is not; None for one that is not judged by itself."""

    def coverage(self) -> dict[int, int]:
        """The iteration in which each rank with work last reported measurements that can be; empty where none is asked
        for any."""

    def scores(self) -> tuple[npt.NDArray[np.int64], Floats, Floats] | None:
        """(R,) each: ranks, their levels and evidence, as `standing` tells them; None while no rank can be judged."""

    def confirmed(self, rank: int, speed: float) -> None:
        """A probe says that `rank` has this speed. Raises ValueError for one that is not positive."""

    def cleared(self, rank: int) -> None:
        """A probe says that `rank` is healthy."""

    def job_is_slow(self) -> None:
        """On record, where the detector is new: the job as a whole has been slow since before the first plan that it
        adopts. Its end is to be told."""

    def cleared_link(self, sender: int, receiver: int) -> None:
        """A probe says that the link is healthy, in this direction."""
