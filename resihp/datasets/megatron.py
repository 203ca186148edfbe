"""Megatron's indexed data sets (`NAME.bin` and `NAME.idx`), read without conversion.

Format (megatron-core `datasets/indexed_dataset.py`): the index begins with the 9 bytes `MMIDIDX\\0\\0`, u64 version 1,
u8 code of the token type, u64 number of sequences, u64 number of document boundaries; then int32 lengths, int64 byte
offsets into the .bin file, int64 document boundaries. All little-endian.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from resihp.errors import DatasetError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}


class MegatronIndexed:
    """A `PieceSource` over one indexed data set; each of its sequences is one document.

    `prefix` is the path without suffix. Raises DatasetError for missing or truncated files and for other formats.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        index, tokens = Path(f"{os.fspath(prefix)}.idx"), Path(f"{os.fspath(prefix)}.bin")
        try:
            content = index.read_bytes()
            size = tokens.stat().st_size
        except OSError as error:
            raise DatasetError(f"corpus {error.filename}: {error.strerror}") from error
        if len(content) < _HEADER.size or content[: len(_MAGIC)] != _MAGIC:
            raise DatasetError(f"corpus {index}: not a Megatron index")
        _, version, code, count, _ = _HEADER.unpack_from(content)
        if version != 1 or code not in _TYPES:
            raise DatasetError(f"corpus {index}: version {version} with token type {code} is not supported")
        self._type = np.dtype(_TYPES[code]).newbyteorder("<")
        if len(content) < _HEADER.size + 12 * count:
            raise DatasetError(f"corpus {index}: truncated, {count} sequences announced")
        lengths = np.frombuffer(content, dtype="<i4", count=count, offset=_HEADER.size)
        self._offsets = np.frombuffer(content, dtype="<i8", count=count, offset=_HEADER.size + 4 * count)
        self._tokens = lengths.astype(np.int64)
        ends = self._offsets + self._tokens * self._type.itemsize
        if count and (int(ends.max()) > size or int(lengths.min()) < 0):
            raise DatasetError(f"corpus {tokens}: {size} bytes, the index needs {int(ends.max())}")
        self.path = tokens
        self.lengths: Sequence[int] = np.maximum(self._tokens - 1, 0).tolist()

    def read(self, document: int, start: int, count: int) -> npt.NDArray[np.int64]:
        offset = int(self._offsets[document]) + start * self._type.itemsize
        try:
            read = np.fromfile(self.path, dtype=self._type, count=count, offset=offset)
        except OSError as error:
            raise DatasetError(f"corpus {self.path}: {error.strerror}") from error
        if len(read) != count:
            raise DatasetError(f"corpus {self.path}: shorter than when training began; restore it")
        return read.astype(np.int64)
