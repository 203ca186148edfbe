"""What a block of `benchmarks.gpu` yields, and at what size it runs."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import torch

LONGEST_FAILURE = 400
"""Characters of an exception's text in a figure; all of it is in the block's log."""


class Figure(msgspec.Struct, frozen=True):
    """One row: what was measured, and whether it is what is asked for; None where nothing is."""

    name: str
    value: str
    asked: str = ""
    met: bool | None = None


class Missing(Exception):
    """A block, or the rest of one, cannot run here, for the reason it carries."""


class Scale(msgspec.Struct, frozen=True):
    """`full` on a GPU; a rehearsal runs the same code on a processor, with sizes that say nothing.

    `brief`: the sizes of a first look, which takes nine minutes in all. `folder`: where files beside figures go.
    """

    full: bool
    brief: bool = False
    folder: Path = Path()

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if self.full else "cpu")

    def of(self, full: int, rehearsed: int) -> int:
        return full if self.full else rehearsed

    def count(self, full: int, brief: int, rehearsed: int) -> int:
        """How often something is repeated."""
        return self.of(brief if self.brief else full, rehearsed)

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


def attempt(name: str, measure: Callable[[], Iterable[Figure]]) -> Iterator[Figure]:
    """Yield the figures of `measure`; if it breaks, a figure that says so, so that others are still measured."""
    try:
        yield from measure()
    except Missing as reason:
        yield Figure(name, f"not here: {reason}")
    except Exception as error:  # noqa: BLE001 a first look meets what nobody has thought of
        traceback.print_exc()
        yield Figure(name, f"failed: {type(error).__name__}: {error}"[:LONGEST_FAILURE], "no failure", False)
