"""Byte-level documents: the files below a folder, one document each, one token a byte."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np
import numpy.typing as npt

from resihp.errors import DatasetError

PYTHON = ".py"


class ByteFiles:
    """A `PieceSource` over the files below `folder` whose names end in `suffix`, in the order of their relative paths.

    Without a `suffix` these are Python's, `.py`, and a warning tells how many others were left out; `suffix=".txt"`,
    `suffix=(".c", ".h")` and `suffix=""`, all files, are taken at their word. Only sizes are read at the start. Raises
    DatasetError for a folder that is missing, unreadable, or without such a file.
    """

    vocab_size = 256

    def __init__(
        self,
        folder: str | os.PathLike[str],
        suffix: str | tuple[str, ...] | None = None,
        exclude: tuple[str, ...] = ("site-packages",),
    ) -> None:
        self.folder = Path(folder)
        wanted = PYTHON if suffix is None else suffix
        left_out = 0
        files: list[tuple[str, int]] = []

        def refuse(error: OSError) -> None:
            raise DatasetError(f"corpus {error.filename}: {error.strerror}") from error

        for parent, folders, names in os.walk(self.folder, onerror=refuse):
            folders[:] = [name for name in folders if name not in exclude]
            for name in names:
                if not name.endswith(wanted):
                    left_out += 1
                    continue
                path = os.path.join(parent, name)
                try:
                    size = os.stat(path).st_size
                except OSError as error:
                    dangling = "; it is a link to nothing: remove it" if os.path.islink(path) else ""
                    raise DatasetError(f"corpus file {path}: {error.strerror}{dangling}") from error
                files.append((os.path.relpath(path, self.folder), size))
        if not files:
            kind = " or ".join([wanted] if isinstance(wanted, str) else wanted)
            others = f", and {left_out} others; suffix='' takes all files" if left_out else ""
            raise DatasetError(f"corpus {self.folder}: no {f'{kind} ' if kind else ''}file in it{others}")
        if left_out and suffix is None:
            warnings.warn(
                f"corpus {self.folder}: {left_out} of {left_out + len(files)} files do not end in {PYTHON} and are "
                f"left out; ByteFiles(..., suffix='') takes all, suffix='{PYTHON}' these without a word",
                stacklevel=2,
            )
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
