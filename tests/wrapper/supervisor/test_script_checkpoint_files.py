"""Which checkpoints of scripts are complete, and which are found first."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import threading
import time
import zipfile
from collections.abc import Iterable, Sequence
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
        ("step_99999999999999999999", None),
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


def test_files_that_are_added_later_do_not_make_a_checkpoint_newer(tmp_path: Path) -> None:
    for iteration, age_s in ((5, 500), (6, 400)):
        write(tmp_path / f"step_{iteration}" / "__0_0.distcp")
        write(tmp_path / f"step_{iteration}" / ".metadata")
        for path in (tmp_path / f"step_{iteration}").iterdir():
            aged(path, age_s)
    write(tmp_path / "step_5" / "evaluation.json")
    (answer,) = search(tmp_path, "step_*")
    assert [stored.iteration for stored in answer.checkpoints] == [6, 5]


def test_a_checkpoint_that_is_written_again_in_place_has_to_settle(tmp_path: Path) -> None:
    write(tmp_path / "step_5" / "__0_0.distcp")
    aged(write(tmp_path / "step_5" / ".metadata"), 100)
    checkpoint = complete(tmp_path / "step_5")
    assert checkpoint is not None
    assert not checkpoint.is_certain
    assert not search(tmp_path, "step_*")[0].checkpoints


def test_after_a_step_back_megatron_writes_iterations_before_the_noted_one(tmp_path: Path) -> None:
    for iteration, age_s in ((500, 300), (450, 50)):
        folder = write(tmp_path / f"iter_{iteration:07d}" / "model.bin").parent
        aged(folder / "model.bin", age_s)
        aged(folder, age_s)
    aged(write(tmp_path / "latest_checkpointed_iteration.txt", b"500"), 200)
    assert complete(tmp_path / "iter_0000500") is not None
    assert complete(tmp_path / "iter_0000450") is None, "it is being written"
    write(tmp_path / "latest_checkpointed_iteration.txt", b"450")
    assert complete(tmp_path / "iter_0000450") is not None


@pytest.mark.parametrize("name", ["latest", "latest_checkpointed_iteration.txt"])
def test_the_file_with_the_newest_iteration_is_no_checkpoint(name: str, tmp_path: Path) -> None:
    assert complete(write(tmp_path / name, b"500")) is None


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


def search(
    folder: Path,
    pattern: str,
    reported: Sequence[str] = (),
    times: int = 1,
    known: Iterable[tuple[str, float]] = (),
    *,
    is_fresh: bool = True,
) -> list[api.CheckpointsFound]:
    """Return the answers to so many searches, one after the other."""
    fresh = frozenset(reported if is_fresh else ())
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
            searcher.begin(api.FindCheckpoints(reported=tuple(reported), fresh=fresh, complete=frozenset(known)))
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


def test_a_reported_path_that_is_written_again_is_not_complete(tmp_path: Path) -> None:
    folder = write(tmp_path / "last" / "weights").parent
    assert search(tmp_path, "", reported=[str(folder)])[0].checkpoints
    (again,) = search(tmp_path, "", reported=[str(folder)], is_fresh=False)
    assert not again.checkpoints, "the script is writing it, and has not reported it again"
    version = str(folder), max(folder.stat().st_mtime, (folder / "weights").stat().st_mtime)
    assert search(tmp_path, "last", known=[version])[0].checkpoints, "as another supervisor knows"


def test_all_names_that_glob_takes_for_a_pattern_may_be_in_the_working_directory(tmp_path: Path) -> None:
    folder = tmp_path / "run [1]*"
    torch_file(folder / "ckpt" / "step 5.pt")
    (answer,) = search(folder, "ckpt/step *")
    assert [stored.path for stored in answer.checkpoints] == [str(folder / "ckpt" / "step 5.pt")]


def test_names_that_no_message_can_hold_are_left_out(tmp_path: Path) -> None:
    torch_file(tmp_path / "step_5.pt")
    torch_file(tmp_path / "step_6\n.pt")
    torch_file(tmp_path / os.fsdecode(b"step_7\xff.pt"))
    (answer,) = search(tmp_path, "step_*", reported=[str(tmp_path / "step_8\0.pt")])
    assert [stored.iteration for stored in answer.checkpoints] == [5]
    assert not answer.error


def test_a_link_to_a_checkpoint_is_not_another_one(tmp_path: Path) -> None:
    torch_file(tmp_path / "step_5.pt")
    (tmp_path / "last.pt").symlink_to("step_5.pt")
    (answer,) = search(tmp_path, "*.pt")
    assert [Path(stored.path).name for stored in answer.checkpoints] == ["step_5.pt"], (
        "a distrusted one comes back else"
    )
    (answer,) = search(tmp_path, "last.pt")
    assert [Path(stored.path).name for stored in answer.checkpoints] == ["last.pt"]


def test_of_thousands_of_checkpoints_the_newest_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Path] = []
    monkeypatch.setattr(finder, "complete", lambda path: looked.append(path) or complete(path))
    monkeypatch.setattr(finder, "MAX_MATCHES", 100)
    for iteration in range(300):
        write(tmp_path / f"step_{iteration}.pt", b"PK")
        aged(torch_file(tmp_path / f"step_{iteration}.pt"), 1000 - iteration)
    torch_file(tmp_path / "last.pt")
    (answer,) = search(tmp_path, "*.pt")
    assert [stored.iteration for stored in answer.checkpoints[:3]] == [None, 299, 298]
    assert len(looked) == finder.MAX_FOUND


def test_a_folder_that_has_disappeared_is_an_error_if_it_had_checkpoints(tmp_path: Path) -> None:
    (answer,) = search(tmp_path, "ckpt/step_*")
    assert (answer.checkpoints, answer.error) == ((), ""), "the script creates it later"
    (answer,) = search(tmp_path, "ckpt/step_*", known=[(str(tmp_path / "ckpt" / "step_5"), 1.0)])
    assert "ckpt" in answer.error, "it may be on a file system that is not mounted any more"


def test_a_file_system_that_hangs_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(finder, "complete", lambda _path: released.wait(20))
    torch_file(tmp_path / "step_5.pt")

    async def run() -> None:
        request = run_request("local-1", tmp_path, cwd=str(tmp_path), checkpoint_pattern="*.pt")
        CheckpointFinder(request, asyncio.create_task, lambda _event: None).begin(api.FindCheckpoints())
        await asyncio.sleep(0.1)

    began_at = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - began_at < 5
    released.set()


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
