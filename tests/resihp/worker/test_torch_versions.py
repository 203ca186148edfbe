"""A torch that is too old is refused by its version, before anything of it is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from resihp.worker import torch_versions


@pytest.mark.parametrize(
    ("version", "refusals"),
    [
        ("2.7.1+cu126", (True, True, True)),
        ("2.8.0", (False, True, True)),
        ("2.10.0a0+b558c98", (False, False, True)),
        ("2.11.0a0+a1b2c3", (False, False, False)),
        ("3.0", (False, False, False)),
    ],
)
def test_what_a_version_is_enough_for(version: str, refusals: tuple[bool, ...]) -> None:
    lines = torch_versions.refusal(version), torch_versions.refusal_of_bf16(version), torch_versions.doubt(version)
    assert tuple(map(bool, lines)) == refusals


IMPORT = """
import torch
torch.__version__ = "2.7.1"
del torch.AcceleratorError
import resihp.executor
"""


def test_the_executor_names_the_version_that_it_needs() -> None:
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", IMPORT], capture_output=True, text=True, check=False)
    line = done.stderr.strip().splitlines()[-1]
    assert line == "ImportError: torch 2.7.1 is too old: resihp needs 2.8 or later; pip install 'torch>=2.11'"
