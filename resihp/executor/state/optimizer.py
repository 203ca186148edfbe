"""AdamW: its settings, which users write, its learning-rate curve, and its state on one rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from resihp.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Settings of decoupled AdamW (Loshchilov and Hutter 2019), with gradient clipping and a learning-rate curve."""

    lr: float = 3e-4
    """Highest learning rate, reached at the end of the warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Not applied to parameters of one dimension (norms and biases), as in Megatron-LM."""
    clip: float = 1.0
    """Largest norm of the whole gradient; 0 for no clipping."""
    warmup: int = 0
    """Iterations of linear warm-up from 0."""
    decay_iterations: int = 0
    """Iteration at which the learning rate has come down to `min_lr`; 0 keeps it at `lr`."""
    min_lr: float = 0.0
    decay: Literal["cosine", "linear"] = "cosine"

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
            ("decay", self.decay in ("cosine", "linear"), "must be cosine or linear"),
        ):  # fmt: skip
            if not valid:
                raise ConfigurationError(f"optimizer: {name}={getattr(self, name)!r} {rule}")

    def learning_rate(self, iteration: int) -> float:
        """Of iteration 1, 2, ...: a function of the iteration alone, equal on all ranks and after any restart."""
        if iteration < self.warmup:
            return self.lr * iteration / self.warmup
        if self.decay_iterations == 0:
            return self.lr
        done = min((iteration - self.warmup) / (self.decay_iterations - self.warmup), 1.0)
        left = 1.0 - done if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.min_lr + (self.lr - self.min_lr) * left

    def clip_coefficient(self, norm: float) -> float:
        """Factor for gradients of that norm, at most 1; as in Megatron-LM, 1e-6 guards the division."""
        return 1.0 if self.clip == 0 else min(1.0, self.clip / (norm + 1e-6))


class AdamWState:
    """torch's AdamW over one rank's parameters, with moments that exist from the beginning and can be reached.

    What it updates is float32, whatever passes compute with (`resihp.executor.state.rank_state.masters_of`).
    Moments of `parameters` that `shared` has too, the same object under the same name, are shared with it.
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
        """Updates made so far; iterations that were skipped do not count."""

    def apply(self, clip: float, learning_rate: float) -> None:
        """Update the parameters from their gradients, which are scaled by `clip` in place. No communication."""
        if clip != 1.0:
            torch._foreach_mul_([p.grad for p in self.parameters.values() if p.grad is not None], clip)
        for group in self._torch.param_groups:
            group["lr"] = learning_rate
        self._torch.step()
        self.updates += 1

    def tensors(self, name: str) -> dict[str, Tensor]:
        """A parameter's state by kind: "value", "exp_avg", "exp_avg_sq", each of the parameter's own shape."""
        parameter = self.parameters[name]
        state = self._torch.state[parameter]
        return {"value": parameter.data, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}

    def resume(self, updates: int) -> None:
        """Go on as after that many updates, once the tensors have been filled."""
        self.updates = updates
        for parameter in self.parameters.values():
            self._torch.state[parameter]["step"].fill_(updates)
