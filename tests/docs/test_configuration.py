"""docs/configuration.md is what the schema says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_documented_keys_are_those_of_the_schema() -> None:
    script = "import make_configuration; print(make_configuration.document(), end='')"
    made = subprocess.run(
        [sys.executable, "-c", script], cwd=DOCS, capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert (DOCS / "configuration.md").read_text(encoding="utf-8") == made, "type: python docs/make_configuration.py"
