"""Times of one micro-batch in each layer and of its transfer between stages: the planner's model of costs.

A profile comes from a catalogue of models and hardware (`resihp.scheduler.what_if.catalogue`), from measurements, or
from `layer_units` if nothing is known. The duration of an iteration follows from a profile and a layout, by the
timeline alone (`resihp.scheduler.cost.prices`); this module plays no orders and decides nothing.
"""

from __future__ import annotations

import itertools
import math
from functools import cached_property, lru_cache

import msgspec

from resihp.errors import PlanError
from resihp.parallelism.model import ModelSpec


class Times(msgspec.Struct, frozen=True):
    """Seconds of one micro-batch on a group of speed 1: forward `f`, gradients of inputs `b`, gradients of weights `w`.

    A B without a separate W takes `b` + `w`. A group's speed is measured in healthy devices (`Situation.speed`).
    """

    f: float = 0.0
    b: float = 0.0
    w: float = 0.0

    def __add__(self, other: Times) -> Times:
        return Times(self.f + other.f, self.b + other.b, self.w + other.w)

    @property
    def total(self) -> float:
        return self.f + self.b + self.w

    def at(self, speed: float) -> Times:
        """Return these times on a group with speed `speed`; infinite for speed 0."""
        if not speed:
            return Times(math.inf, math.inf, math.inf)
        return Times(self.f / speed, self.b / speed, self.w / speed)


class Profile(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Times of every layer in order, of embedding and head, and of communication.

    `transfer_s`: sending one micro-batch's activations (or their gradients) to the next stage, over a healthy link
    between two nodes; `inside_s`: the same within a node. `gradient_s`: synchronising one layer's gradients among
    replicas over healthy links, if one device holds the whole layer; a group of k ranks takes a k-th of it. `step_s`:
    the optimizer's step.
    """

    layers: tuple[Times, ...]
    embedding: Times = Times()
    head: Times = Times()
    transfer_s: float = 0.0
    inside_s: float = 0.0
    gradient_s: float = 0.0
    step_s: float = 0.0

    def span(self, first: int, last: int) -> Times:
        """Return the times of layers `first` to `last`, both inclusive, plus embedding for the first layer and head for
        the last."""
        f, b, w = (sums[last + 1] - sums[first] for sums in self._sums)
        times = Times(f, b, w)
        if first == 0:
            times += self.embedding
        return times + self.head if last == len(self.layers) - 1 else times

    @cached_property
    def _sums(self) -> tuple[tuple[float, ...], ...]:
        """For each of f, b and w: the sum over the layers before each layer."""
        return tuple(
            tuple(itertools.accumulate((getattr(layer, kind) for layer in self.layers), initial=0.0))
            for kind in ("f", "b", "w")
        )


def scaled(profile: Profile, by: float) -> Profile:
    """Return the profile with all times multiplied by `by`."""

    def times(layer: Times) -> Times:
        return Times(by * layer.f, by * layer.b, by * layer.w)

    return Profile(
        layers=tuple(times(layer) for layer in profile.layers),
        embedding=times(profile.embedding),
        head=times(profile.head),
        transfer_s=by * profile.transfer_s,
        inside_s=by * profile.inside_s,
        gradient_s=by * profile.gradient_s,
        step_s=by * profile.step_s,
    )


def check(profile: Profile, model: ModelSpec) -> None:
    """Raise PlanError if a profile does not fit the model: wrong number of layers, or a time that is negative or not
    finite."""
    if len(profile.layers) != model.layers:
        raise PlanError(f"profile: {len(profile.layers)} layers, the model has {model.layers}")
    named = [*((f"layer {i}", layer) for i, layer in enumerate(profile.layers))]
    for name, times in (("embedding", profile.embedding), *named, ("head", profile.head)):
        if not all(math.isfinite(x) and x >= 0 for x in (times.f, times.b, times.w)):
            raise PlanError(f"profile: {name} takes {times.f}, {times.b}, {times.w} s; times are at least 0 and finite")
    for name in ("transfer_s", "inside_s", "gradient_s", "step_s"):
        if not (math.isfinite(value := getattr(profile, name)) and value >= 0):
            raise PlanError(f"profile: {name} is {value}; times are at least 0 and finite")


@lru_cache(maxsize=64)
def layer_units(model: ModelSpec) -> Profile:
    """Return the profile to use if nothing was measured, in units of one layer's forward pass.

    F, B and W take one unit each; communication takes no time. The head's time follows from its operations per token
    relative to a layer: 2 for each weight. The embedding looks up rows and takes no time. Attention scores are left
    out, because they depend on the lengths of documents; real layers take a little longer.
    """
    head = model.hidden * model.vocab_rows / model.parameters_per_layer
    return Profile(layers=(Times(1.0, 1.0, 1.0),) * model.layers, head=Times(head, head, head))
