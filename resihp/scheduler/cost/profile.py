"""What one micro-batch costs each layer, and what passes between stages: all that the planner knows of a model's time.

Taken from a catalogue of models and hardware (`resihp.scheduler.what_if.catalogue`), from measurements, or, where
nothing is known, `layer_units`. How long an iteration takes follows from it and from a layout by the timeline alone
(`resihp.scheduler.cost.prices`); nothing here plays or decides anything.
"""

from __future__ import annotations

import itertools
import math
from functools import cached_property, lru_cache

import msgspec

from resihp.errors import PlanError
from resihp.parallelism.model import ModelSpec


class Times(msgspec.Struct, frozen=True):
    """Seconds of one micro-batch on a group of speed 1: forward, gradients of inputs, gradients of weights.

    A B without a W takes `b` + `w`. A group's speed is in healthy devices (`Situation.speed`).
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
        """The same on a group of that speed; infinite at 0."""
        if not speed:
            return Times(math.inf, math.inf, math.inf)
        return Times(self.f / speed, self.b / speed, self.w / speed)


class Profile(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Times of every layer in order, of what comes before the first and after the last, and of communication.

    `transfer_s`: one micro-batch's activations (or their gradients) from a stage to the next over a healthy link
    between two nodes; `inside_s` the same within a node. `gradient_s`: synchronisation of one layer's gradients among
    replicas, held by one device and over healthy links; a group of k ranks takes a k-th of it. `step_s`: the optimizer.
    """

    layers: tuple[Times, ...]
    embedding: Times = Times()
    head: Times = Times()
    transfer_s: float = 0.0
    inside_s: float = 0.0
    gradient_s: float = 0.0
    step_s: float = 0.0

    def span(self, first: int, last: int) -> Times:
        """Layers `first` to `last`, both inclusive, with the embedding and the head where they belong to these."""
        f, b, w = (sums[last + 1] - sums[first] for sums in self._sums)
        found = Times(f, b, w)
        if first == 0:
            found += self.embedding
        return found + self.head if last == len(self.layers) - 1 else found

    @cached_property
    def _sums(self) -> tuple[tuple[float, ...], ...]:
        """Of the layers before each: forward, gradients of inputs, of weights."""
        return tuple(
            tuple(itertools.accumulate((getattr(layer, kind) for layer in self.layers), initial=0.0))
            for kind in ("f", "b", "w")
        )


def scaled(profile: Profile, by: float) -> Profile:
    """The same with all that takes time taking so many times as long."""

    def times(of: Times) -> Times:
        return Times(by * of.f, by * of.b, by * of.w)

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
    """Raises PlanError if a profile is not one of the model: layers missing, a time negative or not a number."""
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
    """Where nothing is measured: 1 is the forward of one layer; F, B and W take the same, communication nothing.

    The head from the operations that a token takes: 2 for each weight of the head, 2 for each weight of a layer. The
    embedding looks rows up and computes nothing. Attention scores, which depend on the lengths of documents, are left
    out: they make layers a little heavier than said here.
    """
    head = model.hidden * model.vocab_rows / model.parameters_per_layer
    return Profile(layers=(Times(1.0, 1.0, 1.0),) * model.layers, head=Times(head, head, head))
