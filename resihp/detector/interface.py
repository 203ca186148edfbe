"""The interface of a detector of slow devices and links, which several methods implement.

Implementations: `resihp.detector.online.monitor` (ours) and `resihp.detector.rivals` (the paper's, Greyhound's);
`resihp.detector.modes` chooses one by the job's settings. A detector only finds: it measures nothing, starts no probes,
and does not decide on reactions. All are pure and have no clock. Called by the controller alone.
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
    """Healthy times of chunks, as far as they are learnt (`resihp.detector.online.predictor`)."""

    def predict(self, key: Key, kind: str, tokens: npt.ArrayLike, squares: npt.ArrayLike) -> Floats | None:
        """Return seconds of chunks of N tokens and S squared lengths, in their shape; None while unknown."""


class Detector(Protocol):
    """Judges iterations of the plan adopted last; its knowledge of healthy times survives a change of plan."""

    @property
    def predictor(self) -> HealthyChunks: ...

    @property
    def settled(self) -> bool:
        """Whether learning is complete: all kinds of chunks of the adopted plan are learnt, and their times stay."""

    @property
    def beside_s(self) -> float:
        """Seconds of an iteration outside of its chunks, under the adopted plan: synchronisation and optimizer step."""

    def healthy_transfers(self) -> tuple[float | None, float | None]:
        """Return median seconds of a healthy transfer between nodes and within a node; None without such links."""

    def adopt(self, plan: Plan, model: ModelSpec, orders: Orders, nodes: Mapping[int, Hashable] | None = None) -> None:
        """Switch to a plan that takes effect. `nodes`: node of each rank. Raises PlanError for impossible orders."""

    def observe(self, observation: Observation) -> Assessment:
        """Judge a committed iteration. Ignores one of another epoch, repeated or out of order."""

    def forecast(self, tokens: npt.ArrayLike, squares: npt.ArrayLike) -> float | None:
        """Return the expected seconds of an iteration at present speeds, from N and S (M,) of its micro-batches."""

    def speeds(self) -> dict[int, float]:
        """Return the present speed of each rank that was found slow; 1 is healthy."""

    def standing(self, rank: int) -> RankStanding | None:
        """Return why `rank` is considered slow or healthy; None for a rank that is not judged individually."""

    def coverage(self) -> dict[int, int]:
        """Return, for each rank with work, the iteration in which it last reported usable measurements; empty if no
        measurements are requested."""

    def scores(self) -> tuple[npt.NDArray[np.int64], Floats, Floats] | None:
        """Return ranks, levels and evidence, (R,) each, as in `standing`; None while no rank can be judged."""

    def confirmed(self, rank: int, speed: float) -> None:
        """Record the speed at which `rank` was declared slow. Raises ValueError for a speed that is not positive."""

    def cleared(self, rank: int) -> None:
        """Record that a probe found `rank` healthy."""

    def job_is_slow(self) -> None:
        """Tell a new detector that, on record, the job as a whole has been slow since before the first plan that it
        adopts, so that it reports the recovery."""

    def cleared_link(self, sender: int, receiver: int) -> None:
        """Record that a probe found the link healthy in this direction."""
