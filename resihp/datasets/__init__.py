"""Data sets that keep `resihp.Dataset`'s protocol: pure in (seed, iteration), lengths known before anything is read."""

from resihp.datasets.megatron import MegatronIndexed
from resihp.datasets.packed import PackedDataset, PieceSource
from resihp.datasets.packing import Piece, pack
from resihp.datasets.text import ByteFiles

__all__ = ["ByteFiles", "MegatronIndexed", "PackedDataset", "Piece", "PieceSource", "pack"]
