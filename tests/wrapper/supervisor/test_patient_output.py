from __future__ import annotations

import io
import os
import sys
import threading

import pytest

from resihp.wrapper.supervisor.patient_output import (
    MAX_QUEUED_CHARACTERS,
    MAX_QUEUED_LINES,
    PatientOutput,
    never_wait_for,
)


class Hung(io.StringIO):
    """A file whose writes wait until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def write(self, text: str) -> int:
        self.released.wait()
        return super().write(text)


def test_what_is_said_while_the_file_hangs_is_written_once_it_is_back() -> None:
    file = Hung()
    output = PatientOutput(file)
    print("one", file=output)
    print("two", file=output, flush=True)
    assert file.getvalue() == ""
    file.released.set()
    output.close()
    assert file.getvalue() == "one\ntwo\n"


def test_too_much_is_left_out_and_said_so() -> None:
    file = Hung()
    output = PatientOutput(file)
    for number in range(MAX_QUEUED_LINES + 10):
        output.write(f"{number}\n")
    file.released.set()
    while not output._messages.empty():
        pass
    output.write("later\n")
    output.close()
    lines = file.getvalue().splitlines()
    assert lines[:2] == ["0", "1"]
    assert lines[-1] == "later"
    assert "messages could not be written in time" in lines[-2]


def test_a_file_that_never_comes_back_does_not_hold_up_the_end() -> None:
    output = PatientOutput(Hung())
    output.write("gone\n")
    output._thread.join(0.01)
    began = threading.Event()
    threading.Thread(target=lambda: (output.close(), began.set())).start()
    assert began.wait(10)


def test_what_waits_takes_no_more_memory_than_it_may() -> None:
    """As where a script prints much, and nobody reads on."""
    file = Hung()
    output = PatientOutput(file)
    for _ in range(40):
        output.write("x" * (MAX_QUEUED_CHARACTERS // 10))
    assert sum(len(text or "") for text in list(output._messages.queue)) <= 1.2 * MAX_QUEUED_CHARACTERS
    file.released.set()
    while not output._messages.empty():
        pass
    output.write("later\n")
    output.close()
    assert file.getvalue().endswith(" messages could not be written in time\nlater\n")


def test_a_terminal_that_nobody_reads_does_not_hold_up_who_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped by Ctrl-S, or by a connection that stalls. It is still a terminal."""
    ours, theirs = os.openpty()
    stopped = os.fdopen(theirs, "w")
    monkeypatch.setattr(sys, "stderr", stopped)
    never_wait_for("stderr")
    printed = threading.Event()

    def prints() -> None:
        for _ in range(1000):
            print("x" * 100, file=sys.stderr, flush=True)
        printed.set()

    threading.Thread(target=prints, daemon=True).start()
    try:
        assert printed.wait(10)
        assert sys.stderr.isatty()
    finally:
        os.close(ours)  # whoever still writes has an error then, and ends


def test_a_stream_that_was_closed_before_we_began_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """`resihp run ... 2>&-`."""
    monkeypatch.setattr(sys, "stderr", None)
    never_wait_for("stderr")
    assert sys.stderr is None
