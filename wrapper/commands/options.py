"""Builds commands whose options are the fields of dataclasses. The annotation of each field contains its Typer
option."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, get_type_hints


def command_of(carry_out: Callable[..., None], *option_classes: type) -> Callable[..., None]:
    """Return a function for `app.command()` that calls `carry_out` with an object of each class of options, and has its
    name and help text."""
    hints = {
        name: hint
        for option_class in option_classes
        for name, hint in get_type_hints(option_class, include_extras=True).items()
    }

    def command(**given: Any) -> None:
        carry_out(
            *(
                option_class(**{option.name: given[option.name] for option in fields(option_class)})
                for option_class in option_classes
            )
        )

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
            for option_class in option_classes
            for option in fields(option_class)
        ]
    )
    return command
