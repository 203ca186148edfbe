"""Byte-level documents: each file below a folder is one document, and each byte one token."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np
import numpy.typing as npt

from resihp.errors import DatasetError

DEFAULT_SUFFIX = ".py"


class ByteFiles:
    """A `PieceSource` over the files below `folder` with names ending in `suffix`, in the order of their relative
    paths.

    Without a `suffix`, only Python files (`.py`) are used, and a warning reports the number of other files. With
    `suffix=".txt"`, `suffix=(".c", ".h")` or `suffix=""` (all files) there is no warning. `exclude` are names of
    folders to skip. The constructor reads only file sizes. Raises DatasetError if the folder is missing or unreadable,
    or contains no such file.
    """

    vocab_size = 256

    def __init__(
        self,
        folder: str | os.PathLike[str],
        suffix: str | tuple[str, ...] | None = None,
        exclude: tuple[str, ...] = ("site-packages",),
    ) -> None:
        self.folder = Path(folder)
        wanted = DEFAULT_SUFFIX if suffix is None else suffix
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
                    dangling = "; it is a broken link: remove it" if os.path.islink(path) else ""
                    raise DatasetError(f"corpus file {path}: {error.strerror}{dangling}") from error
                files.append((os.path.relpath(path, self.folder), size))
        if not files:
            kind = " or ".join([wanted] if isinstance(wanted, str) else wanted)
            others = f", and {left_out} others; suffix='' takes all files" if left_out else ""
            raise DatasetError(f"corpus {self.folder}: no {f'{kind} ' if kind else ''}file in it{others}")
        if left_out and suffix is None:
            warnings.warn(
                f"corpus {self.folder}: {left_out} of {left_out + len(files)} files do not end in {DEFAULT_SUFFIX} and "
                f"are left out; ByteFiles(..., suffix='') takes all, suffix='{DEFAULT_SUFFIX}' these without a warning",
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
