"""AdamW: the settings that users pass, the learning-rate schedule, and the optimizer state of one rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from resihp.errors import ConfigurationError

Decay = Literal["cosine", "linear", "constant", "inverse-square-root", "WSD"]
WsdDecay = Literal["exponential", "linear", "cosine", "minus_sqrt"]
Increase = Literal["linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Settings of decoupled AdamW (Loshchilov and Hutter 2019), with gradient clipping.

    Learning rate and weight decay follow the schedules of Megatron's `OptimizerParamScheduler`, counted in iterations.
    """

    lr: float = 3e-4
    """Maximum learning rate, reached at the end of the warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Weight decay. Not applied to parameters with one dimension (norms and biases), as in Megatron-LM."""
    start_weight_decay: float | None = None
    """Weight decay at the beginning, from which it rises to `weight_decay`; None: it is constant."""
    weight_decay_iterations: int = 0
    """Iteration at which weight decay reaches `weight_decay`."""
    weight_decay_increase: Increase = "linear"
    clip: float = 1.0
    """Maximum norm of the whole gradient; 0 for no clipping."""
    warmup: int = 0
    """Number of iterations in which the learning rate rises linearly from 0."""
    decay_iterations: int = 0
    """Iteration after which the learning rate is `min_lr`. 0: never; then only `inverse-square-root` decays at all."""
    min_lr: float = 0.0
    decay: Decay = "cosine"
    """Curve of the decay. `WSD` (warm-up, stable, decay) stays at `lr`, then decays in the last
    `wsd_decay_iterations`."""
    wsd_decay_iterations: int = 0
    wsd_decay: WsdDecay = "exponential"

    def __post_init__(self) -> None:
        for name, valid, rule in (
            ("lr", self.lr > 0, "must be above 0"),
            ("betas", all(0 <= beta < 1 for beta in self.betas), "must lie in [0, 1)"),
            ("eps", self.eps > 0, "must be above 0"),
            ("weight_decay", self.weight_decay >= 0, "must not be negative"),
            ("clip", self.clip >= 0, "must not be negative; 0 turns clipping off"),
            ("min_lr", 0 <= self.min_lr <= self.lr, "must lie between 0 and lr"),
            ("warmup", self.warmup >= 0, "must not be negative"),
            ("decay_iterations", self.decay_iterations in (0, max(self.decay_iterations, self.warmup + 1)),
             "must be above warmup, or 0"),
            ("decay", self.decay in get_args(Decay), f"must be one of {', '.join(get_args(Decay))}"),
            ("wsd_decay", self.wsd_decay in get_args(WsdDecay),
             f"must be one of {', '.join(get_args(WsdDecay))}"),
            ("wsd_decay_iterations",
             self.decay != "WSD" or 1 <= self.wsd_decay_iterations <= self.decay_iterations - self.warmup,
             f"must lie between 1 and decay_iterations - warmup = {self.decay_iterations - self.warmup}"),
            ("start_weight_decay", self.start_weight_decay is None or 0 <= self.start_weight_decay <= self.weight_decay,
             "must lie between 0 and weight_decay"),
            ("weight_decay_iterations", self.start_weight_decay is None or self.weight_decay_iterations >= 1,
             "must be at least 1 where weight decay rises"),
            ("weight_decay_increase", self.weight_decay_increase in get_args(Increase),
             f"must be one of {', '.join(get_args(Increase))}"),
        ):  # fmt: skip
            if not valid:
                raise ConfigurationError(f"optimizer: {name}={getattr(self, name)!r} {rule}")

    def learning_rate(self, iteration: int) -> float:
        """Return the learning rate of iteration 1, 2, ... It depends only on the iteration, so it is the same after a
        restart."""
        if iteration < self.warmup:
            return self.lr * iteration / self.warmup
        if self.decay == "constant":
            return self.lr
        if self.decay_iterations and iteration > self.decay_iterations:
            return self.min_lr
        if self.decay == "inverse-square-root":
            return max(self.min_lr, self.lr * math.sqrt(max(self.warmup, 1) / max(iteration, 1)))
        if self.decay_iterations == 0:
            return self.lr
        if self.decay == "WSD":
            done = 1.0 - (self.decay_iterations - iteration) / self.wsd_decay_iterations
            remaining = _remaining(self.wsd_decay, max(done, 0.0))
        else:
            remaining = _remaining(self.decay, (iteration - self.warmup) / (self.decay_iterations - self.warmup))
        return self.min_lr + (self.lr - self.min_lr) * remaining

    def weight_decay_of(self, iteration: int) -> float:
        """Return the weight decay of iteration 1, 2, ... It depends only on the iteration."""
        if self.start_weight_decay is None or iteration >= self.weight_decay_iterations:
            return self.weight_decay
        remaining = _remaining(self.weight_decay_increase, iteration / self.weight_decay_iterations)
        return self.weight_decay - (self.weight_decay - self.start_weight_decay) * remaining

    def clip_coefficient(self, norm: float) -> float:
        """Return the factor, at most 1, for gradients with this norm. As in Megatron-LM, 1e-6 is added to the
        divisor."""
        return 1.0 if self.clip == 0 else min(1.0, self.clip / (norm + 1e-6))


def _remaining(style: str, done: float) -> float:
    """Return the remaining fraction of a decay from 1 to 0, after a fraction `done` of its duration."""
    match style:
        case "linear":
            return 1.0 - done
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))
        case "minus_sqrt":
            return 1.0 - math.sqrt(done)
        case _:  # exponential
            return 2.0 * 0.5**done - 1.0


class AdamWState:
    """torch's AdamW for one rank's parameters, with moments that exist from the beginning and are accessible.

    The updated parameters are float32, even if forward and backward passes use another type
    (`resihp.executor.state.rank_state.masters_of`). If `shared` has the same parameter object under the same name, its
    moments are shared as well.
    """

    def __init__(self, settings: AdamW, parameters: dict[str, nn.Parameter], shared: AdamWState | None = None) -> None:
        self.parameters = parameters
        decayed = [p for p in parameters.values() if p.ndim > 1]
        others = [p for p in parameters.values() if p.ndim <= 1]
        self._torch = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": settings.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )
        for name, parameter in parameters.items():
            kinds = ("exp_avg", "exp_avg_sq")
            if shared is not None and shared.parameters.get(name) is parameter:
                moments = {kind: shared.tensors(name)[kind] for kind in kinds}
            else:
                moments = {kind: torch.zeros_like(parameter, requires_grad=False) for kind in kinds}
            self._torch.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}
        self.updates = 0
        """Number of updates of the job so far; skipped iterations do not count."""

    def apply(self, clip: float, learning_rate: float, weight_decay: float) -> None:
        """Update the parameters from their gradients, after multiplying the gradients by `clip` in place. No
        communication."""
        if clip != 1.0:
            torch._foreach_mul_([p.grad for p in self.parameters.values() if p.grad is not None], clip)
        for group in self._torch.param_groups:
            group["lr"] = learning_rate
        self._torch.param_groups[0]["weight_decay"] = weight_decay
        self._torch.step()
        self.updates += 1

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return a parameter's state by kind: "value", "exp_avg", "exp_avg_sq". Each has the shape of the parameter."""
        parameter = self.parameters[name]
        state = self._torch.state[parameter]
        return {"value": parameter.data, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}

    def resume(self, updates: int) -> None:
        """Set the number of updates so far. Call this when the tensors have been filled."""
        self.updates = updates
        for parameter in self.parameters.values():
            self._torch.state[parameter]["step"].fill_(updates)
