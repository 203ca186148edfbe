"""megatron-core itself as the oracle: its GPTModel under its own 1F1B gives the losses and gradients that ours does.

And its own forwards the losses of an evaluation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASES = [
    ("gpt", "learned_absolute"),
    ("llama", "rope"),
    ("qwen3", "rope"),
    ("gpt-bf16", "learned_absolute"),
    ("llama-bf16", "rope"),
    ("qwen3-bf16", "rope"),
]
"""Configurations of `oracle.py`, and their position embeddings."""
SERVER = HERE.parent / "resihp" / "executor" / "ranks.py"


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, str], list[dict]]:
    """All configurations, each on eight ranks (TP2 PP2 DP2)."""
    requests = [
        json.dumps({"scenario": "compare", "world": 8, "arguments": {"kind": kind, "positions": positions}})
        for kind, positions in CASES
    ]
    done = subprocess.run(
        [sys.executable, str(SERVER), str(HERE / "oracle.py")],
        input="\n".join(requests) + "\n",
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "RES_OPTIONS": "timeout:1",
        },
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize(("kind", "positions"), CASES)
def test_loss_and_gradients_equal_megatrons(
    answers: dict[tuple[str, str], list[dict]], kind: str, positions: str
) -> None:
    for rank, answer in enumerate(answers[kind, positions]):
        assert "result" in answer, f"rank {rank}: {answer}"
        result = answer["result"]
        in_bf16 = kind.endswith("bf16")  # whose numbers have 8 bits, and megatron's sums of gradients here, too
        assert result["ours"] == pytest.approx(result["megatron"], rel=1e-3 if in_bf16 else 1e-5)
        ours, megatrons = result["evaluated"]
        assert ours == pytest.approx(megatrons, rel=1e-3 if in_bf16 else 1e-5)
        assert ours != pytest.approx(result["ours"], rel=1e-5), "other documents, another loss"
        assert result["difference"] < (0.05 if in_bf16 else 1e-5), f"rank {rank}: gradient of {result['worst']}"
