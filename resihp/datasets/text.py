"""Byte-level documents: the files below a folder, one document each, one token a byte."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from resihp.errors import DatasetError


class ByteFiles:
    """A `PieceSource` over the files below `folder` with the given suffix, in the order of their relative paths.

    Only sizes are read at the start. Raises DatasetError for a folder that is missing, unreadable or empty.
    """

    vocab_size = 256

    def __init__(
        self, folder: str | os.PathLike[str], suffix: str = ".py", exclude: tuple[str, ...] = ("site-packages",)
    ) -> None:
        self.folder = Path(folder)
        files: list[tuple[str, int]] = []

        def refuse(error: OSError) -> None:
            raise DatasetError(f"corpus {error.filename}: {error.strerror}") from error

        for parent, folders, names in os.walk(self.folder, onerror=refuse):
            folders[:] = [name for name in folders if name not in exclude]
            for name in names:
                if name.endswith(suffix):
                    path = os.path.join(parent, name)
                    files.append((os.path.relpath(path, self.folder), os.stat(path).st_size))
        if not files:
            raise DatasetError(f"corpus {self.folder}: no {suffix} file in it")
        files.sort()
        self._names = [name for name, _ in files]
        self._sizes = [size for _, size in files]
        self.lengths = [max(0, size - 1) for size in self._sizes]

    def read(self, document: int, start: int, count: int) -> npt.NDArray[np.int64]:
        path = self.folder / self._names[document]
        try:
            with open(path, "rb") as file:
                file.seek(start)
                content = file.read(count)
        except OSError as error:
            raise DatasetError(f"corpus file {path}: {error.strerror}") from error
        if len(content) != count:
            raise DatasetError(f"corpus file {path}: shorter than when training began; restore it")
        return np.frombuffer(content, dtype=np.uint8).astype(np.int64)
