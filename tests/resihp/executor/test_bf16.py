"""bf16 on real ranks: parameters are derived from float32 masters, which are state like any other."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from resihp.worker import checkpoints
from tests.resihp.executor.test_engine import losses

Ranks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def alone(serve: Callable[..., list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Each kind on one rank."""
    return {kind: serve("train", 1, kind=kind)[0]["result"] for kind in ("gpt-bf16", "llama-bf16", "llama")}


def test_its_numbers_are_not_those_of_fp32_but_near(alone: dict[str, dict[str, Any]]) -> None:
    half, full = losses(alone["llama-bf16"]), losses(alone["llama"])
    assert half != full
    assert half[0] == pytest.approx(full[0], rel=1e-3)
    assert half == pytest.approx(full, rel=1e-2)


@pytest.mark.parametrize(
    ("kind", "grid"), [("gpt-bf16", (2, 1, 2)), ("gpt-bf16", (1, 4, 1)), ("llama-bf16", (2, 2, 2))]
)
def test_layouts_train_like_one_process_and_replicas_are_equal_to_the_bit(
    ranks: Ranks, alone: dict[str, dict[str, Any]], kind: str, grid: tuple[int, int, int]
) -> None:
    answers = ranks("train", math.prod(grid), kind=kind, grid_of=grid)
    assert all(answer["outcomes"] == answers[0]["outcomes"] for answer in answers)
    assert losses(answers[0])[0] == pytest.approx(losses(alone[kind])[0], rel=1e-3)
    assert losses(answers[0]) == pytest.approx(losses(alone[kind]), rel=1e-2)
    half = len(answers) // grid[2]
    for one, other in zip(answers[:half], answers[-half:], strict=True):
        assert one["digest"] == other["digest"]


@pytest.mark.parametrize("extra", [{"schedule": "zero-bubble"}, {"sequence_parallel": True}])
def test_the_same_again_is_the_same_to_the_bit(ranks: Ranks, extra: dict[str, Any]) -> None:
    once, again = (ranks("train", 4, kind="llama-bf16", grid_of=(2, 2, 1), plan=extra) for _ in range(2))
    for one, other in zip(once, again, strict=True):
        assert one["digest"] == other["digest"]
        assert one["outcomes"] == other["outcomes"]


@pytest.mark.parametrize(("wrote", "reads"), [("llama", "llama-bf16"), ("llama-bf16", "llama")])
def test_either_precision_reads_the_others_checkpoint_bit_for_bit(
    ranks: Ranks, tmp_path: Path, wrote: str, reads: str
) -> None:
    ranks("save", 4, kind=wrote, grid_of=(2, 2, 1), root=str(tmp_path), iterations=2)
    (same,) = ranks("restore", 1, kind=wrote, grid_of=(1, 1, 1), root=str(tmp_path))
    (other,) = ranks("restore", 1, kind=reads, grid_of=(1, 1, 1), root=str(tmp_path))
    assert other["digest"] == same["digest"]
    assert other["losses"] == pytest.approx(same["losses"], rel=1e-2)
    assert other["losses"] != same["losses"]


def test_a_checkpoint_from_before_models_had_a_precision_loads(ranks: Ranks, tmp_path: Path) -> None:
    ranks("save", 1, kind="llama", grid_of=(1, 1, 1), root=str(tmp_path), iterations=1)
    folder = tmp_path / "iteration-000001"
    (part,) = folder.glob("part-*")
    content = torch.load(part, weights_only=True)
    model = json.loads(content["model"])
    del model["precision"]
    content["model"] = json.dumps(model)
    torch.save(content, part)
    checkpoints.write_manifest(folder, 1, [(part.name, part.stat().st_size)])
    for kind in ("llama", "llama-bf16"):
        assert ranks("restore_error", kind=kind, folder=str(folder)) == [""]


def test_what_is_computed_with_is_derived_whatever_has_happened(ranks: Ranks) -> None:
    """After draws, steps, moves to another layout, and a transition that was called off."""
    for answer in ranks("derived", 2):
        assert answer == {"drawn": True, "stepped": True, "called off": True, "moved": True, "shared": True, "on": True}


@pytest.mark.parametrize(("kind", "each"), [("llama", 16), ("llama-bf16", 18)])
def test_the_memory_model_counts_what_is_allocated(ranks: Ranks, kind: str, each: int) -> None:
    for answer in ranks("allocated", 4, kind=kind):
        assert answer["state"] == pytest.approx(answer["predicted"], rel=0.02)
        assert answer["state"] == pytest.approx(each * answer["elements"], rel=0.001)
        assert answer["checkpoint"] == pytest.approx(12 * answer["written"], rel=0.02)
