"""What a block of `benchmarks.gpu` yields, and at what size it runs."""

from __future__ import annotations

import msgspec
import torch


class Figure(msgspec.Struct, frozen=True):
    """One row: what was measured, and whether it is what is asked for; None where nothing is."""

    name: str
    value: str
    asked: str = ""
    met: bool | None = None


class Missing(Exception):
    """A block, or the rest of one, cannot run here, for the reason it carries."""


class Scale(msgspec.Struct, frozen=True):
    """`full` on a GPU; a rehearsal runs the same code on a processor, with sizes that say nothing."""

    full: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if self.full else "cpu")

    def of(self, full: int, rehearsed: int) -> int:
        return full if self.full else rehearsed

    def settle(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.full:
            torch.cuda.synchronize()


def at_most(name: str, value: float, limit: float, unit: str = "", digits: int = 3) -> Figure:
    return Figure(name, f"{value:.{digits}g}{unit}", f"at most {limit:g}{unit}", value <= limit)


def at_least(name: str, value: float, limit: float, unit: str = "", digits: int = 4) -> Figure:
    return Figure(name, f"{value:.{digits}g}{unit}", f"at least {limit:g}{unit}", value >= limit)


def all_of(name: str, passed: int, count: int) -> Figure:
    return Figure(name, f"{passed} of {count}", "all", passed == count)
