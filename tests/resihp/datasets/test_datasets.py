"""Data sets: what training relies on is that they are pure, use each piece once an epoch, and refuse damaged input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.datasets import ByteFiles, MegatronIndexed, PackedDataset
from resihp.datasets.packing import Pieces, cut, pack
from resihp.errors import DatasetError


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
