"""Prints the lowest versions that pyproject.toml allows, as requirements for pip: `make bounds` tests with these.

`python -m tests.lower_bounds [EXTRA ...]`: those of `dependencies` and of these extras.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def lowest(extras: Sequence[str] = ()) -> list[str]:
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    return [re.sub(r">=([^,;]+).*", r"==\1", line) for line in wanted]


if __name__ == "__main__":
    print("\n".join(lowest(sys.argv[1:])))
