from __future__ import annotations

import io
import threading

from wrapper.supervisor.patient_output import MOST_LINES, PatientOutput


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
    for number in range(MOST_LINES + 10):
        output.write(f"{number}\n")
    file.released.set()
    while not output._said.empty():
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
