"""Data sets: what training relies on is that they are pure, use each piece once an epoch, and refuse damaged input."""

from __future__ import annotations

import threading
from collections import defaultdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.datasets import Blended, ByteFiles, MegatronIndexed, PackedDataset, Prefetched, RampUp
from resihp.datasets.packing import Pieces, cut, pack
from resihp.errors import DatasetError
from resihp.parallelism.workload import MicroBatch, ramp_of


class Numbers:
    """Documents of given lengths whose tokens count from 1000 * document."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def read(self, document: int, start: int, count: int) -> np.ndarray:
        return np.arange(start, start + count, dtype=np.int64) + 1000 * document


@given(st.lists(st.integers(0, 70), max_size=60), st.integers(8, 64), st.integers(1, 5))
def test_packing_uses_each_token_once_within_the_budget(lengths: list[int], budget: int, open_bins: int) -> None:
    bins = list(pack(cut(lengths, budget), budget, open_bins))
    assert all(sum(piece.length for piece in b) <= budget for b in bins)
    seen = sorted((p.document, p.start + i) for b in bins for p in b for i in range(p.length))
    assert seen == [(d, i) for d, length in enumerate(lengths) for i in range(length)]


@given(st.lists(st.integers(0, 70), max_size=60), st.integers(8, 64))
def test_pieces_have_the_numbers_in_which_they_are_cut(lengths: list[int], budget: int) -> None:
    pieces = Pieces(lengths, budget)
    assert [pieces[i] for i in range(len(pieces))] == list(cut(lengths, budget))


def test_long_tailed_lengths_fill_the_budget() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1.2, 4000).astype(int).tolist()
    bins = list(pack(cut(lengths, 1024), 1024))
    assert sum(p.length for b in bins for p in b) / (1024 * len(bins)) > 0.95


def test_order_is_a_function_of_seed_and_iteration() -> None:
    def make(seed: int = 7) -> PackedDataset:
        lengths = [3, 90, 14, 15, 92, 65, 35, 8, 97]
        return PackedDataset(Numbers(lengths), budget=64, micro_batches_per_iteration=3, seed=seed)

    forward, backward = make(), make()
    batches = {i: [(m.lengths, m.samples) for m in forward.micro_batches(i)] for i in range(1, 12)}
    for i in reversed(range(1, 12)):
        assert [(m.lengths, m.samples) for m in backward.micro_batches(i)] == batches[i]
    assert [m.samples for m in make(8).micro_batches(1)] != [m.samples for m in make().micro_batches(1)]


def test_each_piece_is_used_once_an_epoch() -> None:
    data = PackedDataset(Numbers([40] * 10), budget=64, micro_batches_per_iteration=5, seed=1)
    samples = [s for i in range(1, 5) for m in data.micro_batches(i) for s in m.samples]
    assert sorted(samples) == list(range(20))


def test_labels_are_the_next_tokens() -> None:
    data = PackedDataset(Numbers([5, 9]), budget=64, micro_batches_per_iteration=1, seed=1)
    (batch,) = data.micro_batches(1)
    tokens, labels = batch.load()
    assert tokens.shape == labels.shape == (14,)
    np.testing.assert_array_equal(labels, tokens + 1)


def test_byte_files_are_read_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_bytes(b"hello")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.py").write_bytes(b"")
    files = ByteFiles(tmp_path)
    assert list(files.lengths) == [4, 0]
    assert bytes(files.read(0, 1, 4).astype(np.uint8)) == b"ello"
    (tmp_path / "b.py").write_bytes(b"he")
    with pytest.raises(DatasetError, match="shorter than when training began"):
        files.read(0, 1, 4)


def test_files_that_are_left_out_are_told_unless_a_suffix_was_asked_for(tmp_path: Path) -> None:
    for name in ("a.py", "b.txt", "c.md", "site-packages/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"hello")
    told = r"corpus .*: 2 of 3 files do not end in \.py and are left out; ByteFiles\(\.\.\., suffix=''\) takes all"
    with pytest.warns(UserWarning, match=told):
        assert len(ByteFiles(tmp_path).lengths) == 1
    assert len(ByteFiles(tmp_path, ".py").lengths) == 1
    assert len(ByteFiles(tmp_path, (".txt", ".md")).lengths) == 2
    assert len(ByteFiles(tmp_path, "").lengths) == 3
    with pytest.raises(DatasetError, match=r"no \.c file in it, and 3 others; suffix='' takes all files"):
        ByteFiles(tmp_path, ".c")


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    """Where all files are taken, an editor's lock is one."""
    (tmp_path / "a.py").write_bytes(b"hello")
    (tmp_path / ".#a.py").symlink_to("somebody@somewhere.1234")
    with pytest.raises(DatasetError, match=r"\.#a\.py: No such file or directory; it is a broken link: remove it"):
        ByteFiles(tmp_path, "")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: ByteFiles(p / "absent"), "No such file"),
        (lambda p: ByteFiles(p), "no .py file"),
        (lambda p: MegatronIndexed(p / "absent"), "No such file"),
        (lambda p: PackedDataset(Numbers([0, 0]), budget=8, micro_batches_per_iteration=1), "two tokens"),
    ],
)
def test_a_corpus_that_is_not_there_is_named(tmp_path: Path, make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DatasetError, match=message):
        make(tmp_path)


def test_megatron_index_written_by_megatron_is_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="megatron-core's writer needs torch")
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "corpus.bin"), dtype=np.uint16)
    documents = [[5, 6, 7, 60000], [1], [9, 8]]
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(tmp_path / "corpus.idx"))

    data = MegatronIndexed(tmp_path / "corpus")
    assert list(data.lengths) == [3, 0, 1]
    assert data.read(0, 1, 3).tolist() == [6, 7, 60000]
    assert data.read(2, 0, 2).tolist() == [9, 8]

    index = (tmp_path / "corpus.idx").read_bytes()
    (tmp_path / "corpus.idx").write_bytes(index[:40])
    with pytest.raises(DatasetError, match="truncated"):
        MegatronIndexed(tmp_path / "corpus")
    (tmp_path / "corpus.idx").write_bytes(b"PK" + index[2:])
    with pytest.raises(DatasetError, match="not a Megatron index"):
        MegatronIndexed(tmp_path / "corpus")
    (tmp_path / "corpus.idx").write_bytes(index)
    (tmp_path / "corpus.bin").write_bytes(b"xx")
    with pytest.raises(DatasetError, match="the index needs"):
        MegatronIndexed(tmp_path / "corpus")


# --- mixed data sets ------------------------------------------------------------------------------------------


class Counting:
    """Micro-batches of one token each, `size` of them an iteration: their number since the beginning."""

    def __init__(self, size: int = 1) -> None:
        self.size = size

    def micro_batches(self, iteration: int) -> list[MicroBatch]:
        first = (iteration - 1) * self.size
        return [MicroBatch((1,), (n,), partial(self.load, n)) for n in range(first, first + self.size)]

    def load(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        return np.array([number]), np.array([number + 1])


@given(st.lists(st.floats(0.05, 10), min_size=1, max_size=5), st.integers(1, 7), st.integers(1, 4))
def test_a_blend_keeps_its_weights_at_any_moment(weights: list[float], count: int, size: int) -> None:
    data = Blended([(weight, Counting(size)) for weight in weights], micro_batches_per_iteration=count)
    parts = len(weights)
    used = [0] * parts
    for iteration in range(1, 60):
        for batch in data.micro_batches(iteration):
            part = batch.samples[0] % parts
            assert batch.samples[0] // parts == used[part], "each part in its own order, nothing left out"
            assert batch.load()[0].tolist() == [used[part]]
            used[part] += 1
        shares = [weight / sum(weights) * count * iteration for weight in weights]
        assert all(abs(have - share) <= parts for have, share in zip(used, shares, strict=True))


def test_a_blend_is_a_function_of_the_iteration_across_rounds() -> None:
    def make() -> Blended:
        return Blended([(0.7, Counting()), (0.2, Counting(3)), (0.1, Counting())], micro_batches_per_iteration=64)

    forward, backward = make(), make()
    batches = {i: [batch.samples for batch in forward.micro_batches(i)] for i in range(1, 400)}
    assert 64 * len(batches) > 2 * 10_000
    for i in reversed(batches):
        assert [batch.samples for batch in backward.micro_batches(i)] == batches[i]
    samples = [sample for batch in batches.values() for (sample,) in batch]
    assert len(set(samples)) == len(samples)
    for part, share in enumerate((0.7, 0.2, 0.1)):
        own = [sample // 3 for sample in samples if sample % 3 == part]
        assert own == list(range(len(own)))
        assert len(own) == pytest.approx(share * len(samples), abs=3)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], "0 parts"),
        ([1.0, 0.0], "must be above 0"),
        ([1.0, float("nan")], "must be above 0"),
        ([1.0, 1e-6], "weight 1e-06 is less than 1/10000 of all; leave that part out"),
    ],
)
def test_weights_that_are_no_shares_are_refused(weights: list[float], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        Blended([(weight, Counting()) for weight in weights], micro_batches_per_iteration=1)


# --- prefetched data sets -------------------------------------------------------------------------------------


class Watched(Counting):
    """Tells, for each thing that was read, whether a thread did it; some cannot be read."""

    def __init__(self, broken: tuple[int, ...] = (), empty: tuple[int, ...] = ()) -> None:
        super().__init__(4)
        self.broken, self.empty = broken, empty
        self.ahead: dict[int, list[bool]] = defaultdict(list)
        self.read = {number: threading.Event() for number in range(100)}

    def micro_batches(self, iteration: int) -> list[MicroBatch]:
        if iteration in self.empty:
            raise DatasetError(f"nothing for iteration {iteration}")
        return super().micro_batches(iteration)

    def load(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        self.ahead[number].append(threading.current_thread() is not threading.main_thread())
        self.read[number].set()
        if number in self.broken:
            raise DatasetError(f"micro-batch {number} cannot be read")
        return super().load(number)


def test_what_was_needed_last_is_read_before_it_is_asked_for() -> None:
    source = Watched()
    data = Prefetched(source)
    for iteration in range(1, 6):
        batch = data.micro_batches(iteration)
        assert [one.samples for one in batch] == [one.samples for one in source.micro_batches(iteration)]
        numbers = [4 * (iteration - 1) + m for m in (3, 1)]
        if iteration > 2:
            assert all(source.read[number].wait(30) for number in numbers), "before anybody asks"
        for number in numbers:
            for _ in range(2):  # as the first and the last stage do
                assert batch[number % 4].load()[0].tolist() == [number]
    read = {number: ways for number, ways in source.ahead.items() if number < 20}
    assert read == {3: [False] * 2, 1: [False] * 2, 7: [False] * 2, 5: [False] * 2} | {
        number: [True] for number in (11, 9, 15, 13, 19, 17)
    }


def test_another_assignment_or_iteration_reads_the_same() -> None:
    data, plain = Prefetched(Watched()), Counting(4)
    for iteration, needed in ((1, (0, 1)), (2, (0, 1)), (3, (2, 3)), (4, (1, 3)), (3, (0,)), (9, (2,)), (1, (0, 3))):
        batch, right = data.micro_batches(iteration), plain.micro_batches(iteration)
        for _ in range(2):  # the iteration is redone with the same batch
            for m in needed:
                assert [a.tolist() for a in batch[m].load()] == [a.tolist() for a in right[m].load()]


def test_what_cannot_be_read_ahead_is_told_where_it_is_asked_for() -> None:
    data = Prefetched(Watched(broken=(9,), empty=(4,)))
    for iteration in (1, 2):
        for one in data.micro_batches(iteration)[:2]:
            one.load()
    third = data.micro_batches(3)
    assert third[0].load()[0].tolist() == [8]
    with pytest.raises(DatasetError, match="micro-batch 9 cannot be read"):
        third[1].load()
    with pytest.raises(DatasetError, match="nothing for iteration 4"):
        data.micro_batches(4)
    assert data.micro_batches(5)[0].load()[0].tolist() == [16]


# --- batch ramp-up --------------------------------------------------------------------------------------------


RAMP_UP = RampUp(start=2, increment=3, micro_batches=20)


def test_a_ramp_up_gives_the_same_micro_batches_in_other_iterations() -> None:
    def make(count: int, ramp_up: RampUp | None) -> PackedDataset:
        source = Numbers([5, 9, 30, 2, 17] * 9)
        return PackedDataset(source, budget=16, micro_batches_per_iteration=count, ramp_up=ramp_up)

    ramped, single = make(8, RAMP_UP), make(1, None)
    batches = {i: [one.samples for one in ramped.micro_batches(i)] for i in range(1, 20)}
    assert [len(batch) for batch in batches.values()][:10] == [2, 2, 2, 2, 2, 5, 5, 8, 8, 8]
    in_order = [samples for batch in batches.values() for samples in batch]
    assert in_order == [single.micro_batches(i)[0].samples for i in range(1, len(in_order) + 1)]
    assert {i: [one.samples for one in ramped.micro_batches(i)] for i in reversed(batches)} == batches


def test_a_blend_and_what_reads_ahead_have_the_ramp_up_too() -> None:
    plain = Blended([(2.0, Counting()), (1.0, Counting(3))], micro_batches_per_iteration=1)
    ramped = Blended([(2.0, Counting()), (1.0, Counting(3))], micro_batches_per_iteration=8, ramp_up=RAMP_UP)
    ahead = Prefetched(ramped)
    assert ramp_of(ahead) == ramp_of(ramped) == ((1, 2), (6, 5), (8, 8))
    assert ramp_of(Prefetched(plain)) == ramp_of(Counting()) == ()
    batches = [ahead.micro_batches(i) for i in range(1, 12)]
    assert [len(batch) for batch in batches] == [2, 2, 2, 2, 2, 5, 5, 8, 8, 8, 8]
    samples = [one.samples for batch in batches for one in batch]
    assert samples == [plain.micro_batches(i)[0].samples for i in range(1, len(samples) + 1)]
    with pytest.raises(DatasetError, match="a part has a ramp-up; give it to the blend"):
        Blended([(1.0, ramped)], micro_batches_per_iteration=8)


@pytest.mark.parametrize("ramp", [((1, 2), (6,)), ((1, "two"),), 5, ((1, 2.5),)])
def test_what_are_no_steps_of_a_ramp_up_is_told_by_the_data_sets_name(ramp: object) -> None:
    dataset = Counting()
    dataset.ramp = ramp  # type: ignore[attr-defined]
    with pytest.raises(DatasetError, match=r"Counting\.ramp: .*; it holds a ramp-up's steps, \(first iteration"):
        ramp_of(dataset)
