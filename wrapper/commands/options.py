"""Builds commands whose options are the fields of a dataclass. The annotation of each field contains its Typer
option."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")


def command_of(options: type[T], carry_out: Callable[[T], None]) -> Callable[..., None]:
    """Return a function for `app.command()` that calls `carry_out` with the options, and has its name and help text."""
    hints = get_type_hints(options, include_extras=True)

    def command(**given: Any) -> None:
        carry_out(options(**given))

    command.__name__, command.__doc__ = carry_out.__name__, carry_out.__doc__
    command.__annotations__ = hints
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                option.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if option.default is MISSING else option.default,
                annotation=hints[option.name],
            )
            for option in fields(options)  # type: ignore[arg-type]
        ]
    )
    return command
