"""A command whose options are the fields of a dataclass, each with what Typer must know of it in its annotation."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")


def command_of(options: type[T], carry_out: Callable[[T], None]) -> Callable[..., None]:
    """What `app.command()` takes. It is called, and its help reads, as `carry_out` does."""
    hints = get_type_hints(options, include_extras=True)

    def command(**given: Any) -> None:
        carry_out(options(**given))

    command.__name__, command.__doc__ = carry_out.__name__, carry_out.__doc__
    command.__annotations__ = hints
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                one.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if one.default is MISSING else one.default,
                annotation=hints[one.name],
            )
            for one in fields(options)  # type: ignore[arg-type]
        ]
    )
    return command
