"""The engine on real ranks (gloo, loopback): any layout trains the same model as a single process."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Ranks = Callable[..., list[Any]]


def losses(answer: dict[str, Any]) -> list[float]:
    return [outcome["loss"] for outcome in answer["outcomes"]]


@pytest.fixture(scope="module")
def serial(serve: Callable[..., list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    return {kind: serve("train", 1, kind=kind)[0]["result"] for kind in ("gpt", "llama")}


@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize("grid", [(2, 2, 2), (2, 1, 1), (1, 4, 1)])
def test_uniform_layouts_train_like_one_process(
    ranks: Ranks, serial: dict[str, dict[str, Any]], kind: str, grid: tuple[int, int, int]
) -> None:
    answers = ranks("train", math.prod(grid), kind=kind, grid_of=grid)
    assert all(answer["outcomes"] == answers[0]["outcomes"] for answer in answers)
    assert losses(answers[0]) == pytest.approx(losses(serial[kind]), rel=1e-5)
    for ours, theirs in zip(answers[0]["outcomes"], serial[kind]["outcomes"], strict=True):
        assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-5)
        assert {key: ours[key] for key in ("tokens", "samples", "samples_digest", "learning_rate")} == {
            key: theirs[key] for key in ("tokens", "samples", "samples_digest", "learning_rate")
        }
    assert losses(answers[0])[-1] < losses(answers[0])[0]


def test_uneven_shares_and_unequal_stages_keep_the_mathematics(ranks: Ranks, serial: dict[str, dict[str, Any]]) -> None:
    stages = [
        [([4], (0, 0)), ([2], (1, 3))],
        [([0, 1], (0, 3))],
        [([3], (0, 2)), ([5], (3, 3))],
    ]
    answers = ranks("train", 6, kind="llama", stages=stages, assignment=[[4, 0], [1], [2, 5, 3]])
    assert losses(answers[0]) == pytest.approx(losses(serial["llama"]), rel=1e-5)
    norms = [outcome["gradient_norm"] for outcome in answers[0]["outcomes"]]
    assert norms == pytest.approx([o["gradient_norm"] for o in serial["llama"]["outcomes"]], rel=1e-5)
    assert all(answer["outcomes"] == answers[0]["outcomes"] for answer in answers)


def test_replicas_stay_equal_to_the_bit(ranks: Ranks) -> None:
    answers = ranks("train", 4, kind="gpt", grid_of=(1, 2, 2))
    assert answers[0]["digest"] == answers[2]["digest"]
    assert answers[1]["digest"] == answers[3]["digest"]


@pytest.mark.parametrize(
    ("grid", "plan"),
    [
        ((2, 2, 2), {}),
        ((1, 2, 1), {"chunks": 2, "schedule": "interleaved"}),
        ((2, 1, 1), {"sequence_parallel": True}),
        ((1, 2, 1), {"schedule": "zero-bubble"}),
    ],
)
def test_an_evaluation_gives_the_loss_of_its_batches_and_changes_nothing(
    ranks: Ranks, grid: tuple[int, int, int], plan: dict[str, Any]
) -> None:
    for answer in ranks("evaluated", math.prod(grid), grid_of=grid, plan=plan):
        assert answer["first"] == [pytest.approx(answer["expected"], rel=1e-5), answer["tokens"]]
        assert answer["again"] == answer["first"], "or gradients that are kept count"
        assert answer["kept"]
        assert set(answer["phases"]) == {"forward"}
        assert answer["primitives"] == 3 * answer["forwards"] + 1, "or a hang in it would not be seen"


def test_cached_memory_is_freed_before_communicators_are_made(ranks: Ranks) -> None:
    """NCCL takes a communicator's memory of the device itself, which a job at its limit has filled with torch's."""
    assert ranks("freed_and_connected", 2) == [["freed", "connected"]] * 2


def test_a_device_that_is_full_is_told_what_was_expected_of_it(ranks: Ranks) -> None:
    told, expected = ranks("runs_out_of_memory")[0]
    assert told.startswith("CUDA out of memory.")
    found = re.search(
        r"rank 0: expected under the plan of epoch 1: (\S+) [kMG]?B of state, (\S+) [kMG]?B of activ", expected
    )
    assert found
    assert all(float(size) > 0 for size in found.groups())
    assert "next: smaller micro-batches" in expected


def test_a_rank_that_is_to_park_before_it_has_begun_to_build_does_not_begin(ranks: Ranks) -> None:
    """Whoever asks wakes what there is to wake, and this is not there yet: else it waits until it is taken for hung."""
    assert ranks("called_off", 2) == ["epoch 1: called off"] * 2


def test_observer_sees_phases_primitives_and_waits(ranks: Ranks) -> None:
    answers = ranks("train", 4, kind="gpt", grid_of=(1, 2, 2), iterations=1)
    for answer in answers:
        assert answer["phases"] == ["forward", "backward", "reduce"]
        assert answer["primitives"] == 2 * 3 + 1 + 1  # three micro-batches, one bucket, the last synchronisation
        assert answer["waits"] > 0
        assert answer["waits"] % 2 == 0
        assert answer["compute_s"] > 0
        assert answer["gathered"] == [[rank, "x" * rank] for rank in range(4)]


@pytest.mark.parametrize(("groups", "window"), [(4, -1), (2, -1), (1, -1), (2, 0), (2, 4), (4, 8), (2, 16)])
def test_packed_attention_equals_a_block_mask(ranks: Ranks, groups: int, window: int) -> None:
    (answer,) = ranks("attention", groups=groups, window=window)
    assert answer["shape"]
    assert answer["output"] < 1e-12
    assert answer["gradients"] < 1e-12


@pytest.mark.parametrize("positions", ["rope", "learned_absolute"])
def test_documents_do_not_see_what_they_are_packed_with(ranks: Ranks, positions: str) -> None:
    (answer,) = ranks("packing_is_invisible", positions=positions)
    assert answer[0] == pytest.approx(answer[1], rel=1e-6)


@pytest.mark.parametrize("kind", ["gpt", "llama", "qwen3"])
def test_a_checkpoint_of_one_layout_loads_bit_equal_under_others(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    saved = ranks("save", 8, kind=kind, grid_of=(2, 2, 2), root=str(tmp_path), iterations=2)
    alone = ranks("restore", 1, kind=kind, grid_of=(1, 1, 1), root=str(tmp_path))
    same = ranks("restore", 4, kind=kind, grid_of=(2, 2, 1), root=str(tmp_path))
    assert [answer["digest"] for answer in same] == [answer["digest"] for answer in saved[:4]]
    assert alone[0]["updates"] == 4
    assert alone[0]["losses"] == pytest.approx(saved[0]["losses"], rel=1e-5)
    assert same[0]["losses"] == pytest.approx(saved[0]["losses"], rel=1e-5)


def test_a_checkpoint_of_one_process_loads_bit_equal_when_spread_and_gathered(ranks: Ranks, tmp_path: Path) -> None:
    whole, spread, again = (tmp_path / name for name in ("whole", "spread", "again"))
    (saved,) = ranks("save", 1, kind="llama", grid_of=(1, 1, 1), root=str(whole), iterations=0)
    ranks("save", 4, kind="llama", grid_of=(2, 2, 1), root=str(spread), iterations=0)
    restored = ranks("restore", 1, kind="llama", grid_of=(1, 1, 1), root=str(spread))
    assert restored[0]["digest"] == saved["digest"]
    assert not again.exists()


def test_a_checkpoint_of_another_model_or_damaged_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks("save", 1, kind="llama", grid_of=(1, 1, 1), root=str(tmp_path), iterations=1)
    folder = tmp_path / "iteration-000001"
    assert ranks("restore_error", kind="gpt", folder=str(folder))[0].startswith("CheckpointError")
    assert ranks("restore_error", kind="llama", folder=str(folder)) == [""]
    unsaid = ["kv_channels", "qk_layernorm"]  # by versions that did not know them
    assert ranks("restore_error", kind="llama", folder=str(folder), forget=unsaid) == [""]
    (part,) = folder.glob("part-*")
    content = bytearray(part.read_bytes())
    part.write_bytes(content[:-100])
    assert "not of" in ranks("restore_error", kind="llama", folder=str(folder))[0]


def test_wake_frees_a_waiting_rank_and_leaves_the_store_alone(ranks: Ranks, serial: dict[str, dict[str, Any]]) -> None:
    answers = ranks("woken", 2)
    assert answers[0]["error"]
    assert [answer["loss"] for answer in answers] == pytest.approx([losses(serial["gpt"])[0]] * 2, rel=1e-5)


def test_wake_frees_a_rank_that_waits_for_others_to_connect(ranks: Ranks) -> None:
    assert "woken" in ranks("woken_while_connecting")[0]


@pytest.mark.parametrize("back_end", ["gloo", "nccl-like"])
@pytest.mark.parametrize("dies", [0, 1])
def test_wake_frees_a_rank_whose_peer_died_while_it_connected(
    serve: Callable[..., list[dict[str, Any]]], dies: int, back_end: str
) -> None:
    """gloo waits for a connection that the dead peer was to make: no socket is there to shut. NCCL's is aborted."""
    answers = serve("peer_dies_while_it_connects", 2, dies=dies, back_end=back_end)
    assert answers[dies] == {"killed": 9}
    survivor = answers[1 - dies]["result"]
    assert survivor["free_s"] < 5.0
    assert not (back_end == "nccl-like" and survivor["connects"])


@pytest.mark.parametrize(
    ("phase", "bucket_bytes"),
    [("forward", 32 << 20), ("backward", 32 << 20), ("reduce", 32 << 20), ("reduce", 5000)],
    ids=["forward", "backward", "reduce", "reduce between parts of a backward"],
)
def test_survivors_of_a_kill_redo_the_iteration_under_a_new_plan(
    serve: Callable[..., list[dict[str, Any]]], serial: dict[str, dict[str, Any]], phase: str, bucket_bytes: int
) -> None:
    answers = serve("survive", 4, phase=phase, bucket_bytes=bucket_bytes)
    assert answers[3] == {"killed": 9}, answers
    for answer in answers[:2]:
        assert "result" in answer, answer
        assert answer["result"]["error"]
        assert answer["result"]["losses"] == pytest.approx(losses(serial["gpt"]), rel=1e-5)


def test_ranks_with_different_data_are_told(ranks: Ranks) -> None:
    assert all("must give every process the same" in message for message in ranks("impure", 2))


def test_gradients_that_are_not_finite_are_skipped_by_all(ranks: Ranks) -> None:
    for answer in ranks("not_finite", 4):
        assert answer == {"skip": True, "clip": 1.0, "unchanged": True, "stepped": 2, "updates": 1}


def test_what_an_engine_refuses(ranks: Ranks) -> None:
    (messages,) = ranks("rules")
    assert "cannot take step 1 after 1" in messages[0]
    assert "cannot run 1" in messages[1]
    assert messages[2].startswith("LayoutError")
    assert messages[3].startswith("CommunicatorError: rank 0: not connected")


def test_a_transition_allocates_what_is_new_and_nothing_of_it_on_the_host(ranks: Ranks) -> None:
    """Of three layers one is new: its parameters and moments, and the angles of positions, are all that is made. They
    take the place of gradients, which are gone before."""
    (here,) = ranks("transition_allocations", away=False)
    assert here["new"] <= here["host"] < here["new"] + 5 * here["angles"]
    assert here["beside_gradients"] == 0
    (elsewhere,) = ranks("transition_allocations", away=True)
    assert elsewhere["host"] < 5 * elsewhere["angles"]


def test_an_iteration_keeps_the_host_waiting_for_the_device_three_times_at_most(ranks: Ranks) -> None:
    """However many micro-batches, layers and slices: what a chunk needs is sent ahead of it, sums are read once."""
    for counted in (*ranks("host_waits", 4, grid_of=(2, 2, 1)), *ranks("host_waits", 1, grid_of=(1, 1, 1))):
        for calls in counted:
            assert sum(calls.values()) <= 3, calls


def test_communicators_of_a_rank_and_waits_of_its_host_do_not_grow(ranks: Ranks) -> None:
    """Over NCCL each communicator takes memory and time of every change of layout, and a host that waits in the middle
    of an iteration leaves its device idle. Whoever sits out a split makes a communicator, too, which goes at once."""
    answers = ranks("counted_calls", 8)
    made = [[sum(count.values()) for count in answer["communicators"]] for answer in answers]
    start, lost, came_back = ([counts[change] for counts in made] for change in range(3))
    assert start == [5] * 8, "all ranks, tensor parallelism, two of edges, sums"
    assert lost == [8, 8, 8, 8, 8, 8, 9, 1], "rank 6 sums with two ranks, and gets state from rank 7, which has no work"
    assert came_back == [6] * 8
    for answer in answers:
        assert all(sum(waits.values()) <= 2 for waits in answer["host waits"]), answer["host waits"]
    assert [len(answer["host waits"]) for answer in answers] == [9] * 7 + [6]


def test_a_mirror_holds_the_state_of_a_stage_and_computes_nothing(
    ranks: Ranks, serial: dict[str, dict[str, Any]]
) -> None:
    """A replica without micro-batches: its ranks join the sums of gradients and take each step."""
    stages = [
        [([0, 1], (0, 1)), ([2], (2, 3))],
        [([3], (0, 1)), ([], (2, 3))],
        [([], (0, 1)), ([4], (2, 3))],
    ]
    answers = ranks("train", 5, kind="llama", stages=stages, assignment=[[0, 1, 2, 3, 4, 5], [], []])
    assert losses(answers[0]) == pytest.approx(losses(serial["llama"]), rel=1e-5)
    assert all(answer["outcomes"] == answers[0]["outcomes"] for answer in answers)
    assert answers[4]["digest"] == answers[2]["digest"], "or the mirror's copy is another one"
    assert [answer["compute_s"] > 0 for answer in answers] == [True, True, True, False, False]
    assert [set(answer["phases"]) for answer in answers[3:]] == [{"reduce"}, {"reduce"}]
