"""Read the stacks that faulthandler prints. Pure.

Python's faulthandler writes the frames of all threads, innermost frame first, each as `File "F", line N in NAME`. The
main thread is the last one: threads are listed from the newest to the oldest.
"""

from __future__ import annotations

import re

import msgspec

MAX_FRAMES, MAX_SCRIPT_FRAMES = 12, 4
"""Number of innermost frames of a thread that are kept, and of further ones that belong to the user's script: all ranks
of a large job send their stacks at the same moment."""
MAX_NAME = 200
"""Characters of a file or function name that are kept."""
MAX_TEXT = 200
"""Characters of a line of source that are kept."""
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+", re.MULTILINE)
_FRAME = re.compile(r'^  File "([^"\n]*)", line (\d{1,9}) in (.*)$', re.MULTILINE)
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python\d|^<|/resihp/(?:worker|reporting)/")


class StackFrame(msgspec.Struct, frozen=True):
    """One call on a stack."""

    file: str
    line: int
    name: str

    @property
    def is_of_library(self) -> bool:
        """Whether the frame belongs to python, an installed package or resihp, and not to the user's script."""
        return bool(_LIBRARY.search(self.file))

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.name}"


def main_thread(printed: str) -> tuple[StackFrame, ...]:
    """Return the frames of the main thread, innermost first; empty if the text holds no stack."""
    begins = [match.end() for match in _THREAD.finditer(printed)]
    if not begins:
        return ()
    calls = (match.groups() for match in _FRAME.finditer(printed, begins[-1]))
    frames = [StackFrame(file[-MAX_NAME:], int(line), name[:MAX_NAME]) for file, line, name in calls]
    of_script = [frame for frame in frames[MAX_FRAMES:] if not frame.is_of_library]
    return (*frames[:MAX_FRAMES], *of_script[:MAX_SCRIPT_FRAMES])


def place_in_script(frames: tuple[StackFrame, ...]) -> StackFrame | None:
    """Return the innermost frame of the user's script; None if all frames belong to libraries."""
    return next((frame for frame in frames if not frame.is_of_library), None)
