"""Which checkpoints of scripts are complete, and which are found first."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from resihp.controller import interface as api
from resihp.wrapper.supervisor.checkpoints import finder
from resihp.wrapper.supervisor.checkpoints.finder import CheckpointFinder
from resihp.wrapper.supervisor.checkpoints.formats import complete, iteration_of
from tests.wrapper.run_requests import run_request


def write(path: Path, content: bytes = b"x" * 40) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def torch_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 1000)
    return path


def safetensors(path: Path, missing_bytes: int = 0) -> Path:
    header = json.dumps({"w": {"dtype": "F32", "shape": [25], "data_offsets": [0, 100]}}).encode()
    return write(path, struct.pack("<Q", len(header)) + header + b"\0" * (100 - missing_bytes))


def truncated(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-30])
    return path


@pytest.mark.parametrize(
    ("name", "iteration"),
    [
        ("step_500", 500),
        ("step-0000500", 500),
        ("checkpoint-500", 500),
        ("iter_0000500", 500),
        ("global_step500", 500),
        ("epoch=1-step=500.ckpt", 500),
        ("epoch=1-step=500-v1.ckpt", 500),
        ("ckpt_500.pt", 500),
        ("model.pt", None),
        ("latest", None),
    ],
)
def test_the_iteration_is_in_the_name(name: str, iteration: int | None) -> None:
    assert iteration_of(name) == iteration


def test_a_file_of_torch_save_is_complete_unless_it_is_truncated(tmp_path: Path) -> None:
    path = torch_file(tmp_path / "step_5.pt")
    checkpoint = complete(path)
    assert checkpoint is not None
    assert (checkpoint.iteration, checkpoint.is_certain) == (5, True)
    assert complete(truncated(path)) is None


def test_a_safetensors_file_is_complete_unless_it_is_truncated(tmp_path: Path) -> None:
    assert complete(safetensors(tmp_path / "step_5.safetensors")) is not None
    assert complete(safetensors(tmp_path / "step_6.safetensors", missing_bytes=1)) is None
    assert complete(write(tmp_path / "step_7.safetensors", b"\xff" * 64)) is None


def test_distributed_checkpoints_are_complete_with_their_metadata(tmp_path: Path) -> None:
    folder = tmp_path / "step_5"
    write(folder / "__0_0.distcp")
    assert complete(folder) is None
    write(folder / ".metadata", b"")
    assert complete(folder) is None
    write(folder / ".metadata")
    checkpoint = complete(folder)
    assert checkpoint is not None
    assert checkpoint.is_certain


def test_megatron_names_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    for iteration in (100, 200):
        write(tmp_path / f"iter_{iteration:07d}" / "mp_rank_00" / "model_optim_rng.pt")
    write(tmp_path / "latest_checkpointed_iteration.txt", b"100\n")
    assert complete(tmp_path / "iter_0000100") is not None
    assert complete(tmp_path / "iter_0000200") is None


def test_deepspeed_names_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    write(tmp_path / "global_step100" / "mp_rank_00_model_states.pt")
    write(tmp_path / "latest", b"global_step100")
    write(tmp_path / "global_step200" / "mp_rank_00_model_states.pt")
    os.utime(tmp_path / "latest", (1000, 1000))
    assert complete(tmp_path / "global_step100") is not None
    assert complete(tmp_path / "global_step200") is None


def test_the_hugging_face_trainer_writes_its_state_last(tmp_path: Path) -> None:
    safetensors(tmp_path / "checkpoint-50" / "model.safetensors")
    assert complete(tmp_path / "checkpoint-50") is None
    write(tmp_path / "checkpoint-50" / "trainer_state.json", b"{}")
    assert complete(tmp_path / "checkpoint-50") is not None


@pytest.mark.parametrize("name", [".step_5", "step_5.tmp", "step_5.incomplete", "gone"])
def test_temporary_hidden_and_missing_ones_are_left_out(name: str, tmp_path: Path) -> None:
    write(tmp_path / ".step_5" / "x")
    write(tmp_path / "step_5.tmp" / "x")
    write(tmp_path / "step_5.incomplete")
    assert complete(tmp_path / name) is None


def test_of_another_format_only_truncated_files_are_known(tmp_path: Path) -> None:
    torch_file(tmp_path / "step_5" / "model.pt")
    checkpoint = complete(tmp_path / "step_5")
    assert checkpoint is not None
    assert not checkpoint.is_certain
    truncated(tmp_path / "step_5" / "model.pt")
    assert complete(tmp_path / "step_5") is None
    (tmp_path / "step_6").mkdir()
    assert complete(tmp_path / "step_6") is None


def test_a_pipe_in_place_of_a_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "step_5.pt")
    with pytest.raises(OSError, match="plain file"):
        complete(tmp_path / "step_5.pt")


# --- the search -----------------------------------------------------------------------------------------------------


def search(folder: Path, pattern: str, reported: Sequence[str] = (), times: int = 1) -> list[api.CheckpointsFound]:
    """Return the answers to so many searches, one after the other."""
    answers: list[api.CheckpointsFound] = []

    async def run() -> None:
        request = run_request("local-1", folder, cwd=str(folder), checkpoint_pattern=pattern)
        found = asyncio.Event()

        def answer(event: api.CheckpointsFound) -> None:
            answers.append(event)
            found.set()

        searcher = CheckpointFinder(request, asyncio.create_task, answer)
        for _ in range(times):
            found.clear()
            searcher.begin(api.FindCheckpoints(reported=tuple(reported)))
            await asyncio.wait_for(found.wait(), 10)
            await asyncio.sleep(0)

    asyncio.run(run())
    return answers


def aged(path: Path, seconds: float) -> Path:
    at = time.time() - seconds
    os.utime(path, (at, at))
    return path


def test_the_newest_checkpoint_comes_first(tmp_path: Path) -> None:
    for iteration, age_s in ((100, 300), (200, 200), (150, 100)):  # 150 was written after a step back
        aged(torch_file(tmp_path / "ckpt" / f"step_{iteration}.pt"), age_s)
    write(tmp_path / "ckpt" / "step_900.tmp")
    (answer,) = search(tmp_path, "ckpt/step_*")
    assert [stored.iteration for stored in answer.checkpoints] == [150, 200, 100]
    assert not answer.error


def test_a_checkpoint_of_unknown_format_has_to_settle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "step_5" / "weights")
    first, second = search(tmp_path, "step_*", times=2)
    assert not first.checkpoints
    assert not second.checkpoints, "no 10 s have passed"
    monkeypatch.setattr(finder, "SETTLED_S", 0.0)
    assert search(tmp_path, "step_*")[0].checkpoints
    monkeypatch.undo()
    assert search(tmp_path, "step_*", reported=[str(tmp_path / "step_5")])[0].checkpoints, "the script says so"
    aged(aged(tmp_path / "step_5" / "weights", 100).parent, 100)
    assert search(tmp_path, "step_*")[0].checkpoints


def test_a_reported_checkpoint_that_is_gone_is_not_found(tmp_path: Path) -> None:
    (answer,) = search(tmp_path, "", reported=[str(tmp_path / "gone")])
    assert answer.checkpoints == ()
    assert not answer.error


def test_one_unreadable_checkpoint_does_not_hide_the_others(tmp_path: Path) -> None:
    torch_file(tmp_path / "step_5.pt")
    os.mkfifo(tmp_path / "step_6.pt")
    (answer,) = search(tmp_path, "step_*")
    assert [stored.iteration for stored in answer.checkpoints] == [5]
