"""Data sets for the `resihp.Dataset` protocol: pure functions of (seed, iteration), with lengths known in advance."""

from resihp.datasets.blended import Blended
from resihp.datasets.megatron import MegatronIndexed
from resihp.datasets.packed import PackedDataset, PieceSource
from resihp.datasets.packing import Piece, pack
from resihp.datasets.prefetched import Prefetched
from resihp.datasets.text import ByteFiles
from resihp.parallelism.batch_sizes import RampUp

__all__ = [
    "Blended",
    "ByteFiles",
    "MegatronIndexed",
    "PackedDataset",
    "Piece",
    "PieceSource",
    "Prefetched",
    "RampUp",
    "pack",
]
