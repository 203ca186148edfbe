"""A worker's program begins and ends as python itself has it: each script is run by both, and compared."""

from __future__ import annotations

import py_compile
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from resihp.protocol.channels import LocalChannel
from resihp.protocol.messages import Start
from resihp.worker.requests import Ended, Fork, Forked, Ready, Report
from tests.resihp.worker.test_forkserver import Shared

DIES_LOUDLY = "import sys\nfrom loud import Group\n"
LOUD = """\
import sys
class Group:
    def __del__(self, sys=sys):
        sys.__stderr__.write(f"freed while python {'ends' if sys.is_finalizing() else 'runs'}\\n")
"""

SCRIPTS = {
    "objects of main live until the interpreter ends": DIES_LOUDLY + "group = Group()\nprint('done')\n",
    "so does what an exception's frames hold": DIES_LOUDLY + "def main():\n    group = Group()\n    1 / 0\nmain()\n",
    "what a function held goes with it": DIES_LOUDLY + "def main():\n    group = Group()\nmain()\n",
    "what sys.exit unwinds goes": DIES_LOUDLY + "def main():\n    group = Group()\n    sys.exit(3)\nmain()\n",
    "main is the program's": (
        "import sys, pickle, builtins\n"
        "main = sys.modules['__main__']\n"
        "class Sample: pass\n"
        "assert main.__dict__ is globals() and pickle.loads(pickle.dumps(Sample)) is Sample\n"
        "print(__name__, __file__, __doc__, __package__, __spec__, __cached__, type(__loader__).__name__)\n"
        "print(__builtins__ is builtins, __annotations__, sys.argv, sorted(globals()), __loader__.path)\n"
    ),
    "a thread outlives the main one": (
        "import threading, time, pickle, sys\n"
        "class Sample: pass\n"
        "def late():\n"
        "    threading.main_thread().join()\n"
        "    print(pickle.loads(pickle.dumps(Sample)) is Sample, sys.modules['__main__'].__dict__ is globals())\n"
        "threading.Thread(target=late).start()\n"
    ),
    "atexit in its order, after threads": (
        "import atexit, threading, time\n"
        "atexit.register(print, 'registered first')\n"
        "atexit.register(print, 'registered last')\n"
        "threading.Thread(target=lambda: (threading.main_thread().join(), print('thread'))).start()\n"
    ),
    "a daemon thread keeps nobody": (
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()\n"
        "print('done')\n"
    ),
    "a spawned child imports main": (
        "import multiprocessing\n"
        "def work(queue): queue.put(__name__)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.Queue()\n"
        "    child = context.Process(target=work, args=(queue,))\n"
        "    child.start()\n"
        "    print(queue.get(), child.join(), child.exitcode)\n"
    ),
    "children are joined, daemons ended": (
        "import multiprocessing, time\n"
        "context = multiprocessing.get_context('fork')\n"
        "context.Process(target=time.sleep, args=(3600,), daemon=True).start()\n"
        "context.Process(target=lambda: (time.sleep(0.2), print('child'))).start()\n"
    ),
    "exit by number": "import sys\nsys.exit(7)\n",
    "exit by a negative number": "import sys\nsys.exit(-1)\n",
    "exit by a number beyond a byte": "import sys\nsys.exit(256 + 7)\n",
    "exit by a number beyond a long": "import sys\nsys.exit(2**70)\n",
    "exit by truth": "import sys\nsys.exit(True)\n",
    "exit by text": "import sys\nsys.exit('no such corpus')\n",
    "exit by another object": "import sys\nsys.exit(['no', 'such'])\n",
    "exit without standard error": "import sys\nsys.stderr = None\nsys.exit('no such corpus')\n",
    "exit by os": "import os\nprint('said', flush=True)\nos._exit(9)\n",
    "exception": "def train():\n    raise KeyError('no such tokenizer')\ntrain()\n",
    "exception from another": (
        "try:\n    {}['a']\nexcept KeyError as error:\n    raise ValueError('bad key') from error\n"
    ),
    "exception without a text": (
        "class Odd(Exception):\n    def __str__(self): raise TypeError('no text')\nraise Odd\n"
    ),
    "exception with standard output closed": "import sys\nsys.stdout.close()\nraise ValueError('late')\n",
    "exception with another standard output": (
        "import sys\nclass Null:\n    def __repr__(self): return 'null'\n"
        "sys.stdout = Null()\nraise ValueError('late')\n"
    ),
    "a syntax error": "def train(:\n    pass\n",
    "a hook for exceptions": (
        "import sys\n"
        "sys.excepthook = lambda kind, error, trace: print('hook', kind.__name__, error)\n"
        "raise OSError(5)\n"
    ),
    "a hook that exits": (
        "import sys\ndef hook(*_):\n    sys.exit(17)\nsys.excepthook = hook\nraise OSError(5)\n"
    ),
    "a hook that ends the process": (
        "import os, sys\ndef hook(*_):\n    os._exit(18)\nsys.excepthook = hook\nraise OSError(5)\n"
    ),
    "a hook that fails": (
        "import sys\ndef hook(*_):\n    raise ValueError('hook')\nsys.excepthook = hook\nraise OSError(5)\n"
    ),
    "standard output that cannot be flushed": (
        "import os, sys\nfull = os.open('/dev/full', os.O_WRONLY)\nos.dup2(full, 1)\nsys.stdout.write('lost')\n"
    ),
    "future imports are not handed on": "print(__annotations__)\nx: undefined_name_is_evaluated = 1\n",
}  # fmt: skip

REMARKS = (
    "Exception ignored on threading shutdown:",
    "OverflowError: Python int too large to convert to C long",
)
"""What Python 3.12 and 3.13 print about a status that no C long holds; 3.11 prints nothing. The status is the same."""


START = Start(
    rank=0, node="n1", device=0, world_size=1, faults=(), checkpoint_folder="", checkpoint_every=0, resume=False
)


class Both:
    """A fork server, and python."""

    def __init__(self, folder: Path) -> None:
        self.folder = self._folder = folder
        self._shared = Shared(folder, "json,resihp.protocol.client")
        self._agent = self._shared.agent()
        assert isinstance(self._agent.server.recv(Report), Ready)

    def worker(self, kind: Literal["script", "module"], argv: tuple[str, ...]) -> tuple[int, str]:
        """Returns exit status and output of a worker."""
        log = self._folder / "worker.out"
        log.unlink(missing_ok=True)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            order = Fork(rank=0, kind=kind, argv=argv, cwd=str(self._folder), environment={}, log=str(log))
            LocalChannel(ours).send(START)
            self._agent.server.send(order, [theirs.fileno()])
            assert isinstance(self._agent.server.recv(Report), Forked)
            ended = self._agent.server.recv(Report)
        assert isinstance(ended, Ended)
        return ended.status, log.read_text()

    def python(self, *argv: str) -> tuple[int, str]:
        """Returns exit status and output of the same under python."""
        with (self._folder / "python.out").open("w") as out:
            done = subprocess.run(
                [sys.executable, *argv],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=self._folder,
                check=False,
            )
        return done.returncode, (self._folder / "python.out").read_text()

    def end(self) -> None:
        self._shared.end()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    made = Both(tmp_path_factory.mktemp("both"))
    (made.folder / "loud.py").write_text(LOUD)  # a function of `__main__` would keep its objects alive: a cycle
    yield made
    made.end()


@pytest.fixture
def folder(both: Both) -> Path:
    return both.folder


def compare(both: Both, kind: Literal["script", "module"], argv: tuple[str, ...]) -> tuple[int, str]:
    """Run by both; returns what python made of it. Of two streams in one file the order is not python's."""
    expected = both.python(*(("-m",) if kind == "module" else ()), *argv)
    status, output = both.worker(kind, argv)
    lines = [line for line in expected[1].splitlines() if line not in REMARKS]
    assert (status, sorted(output.splitlines())) == (expected[0], sorted(lines))
    return expected


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_begins_and_ends_as_under_python(both: Both, folder: Path, name: str) -> None:
    (folder / "script.py").write_text(SCRIPTS[name])
    status, output = compare(both, "script", ("script.py", "--lr", "1"))
    if name.startswith("objects"):
        assert (status, output.splitlines()) == (0, ["done", "freed while python ends"])


def test_a_thread_and_exit_functions_end_in_pythons_order(both: Both, folder: Path) -> None:
    (folder / "script.py").write_text(SCRIPTS["atexit in its order, after threads"])
    assert both.worker("script", ("script.py",)) == (0, "thread\nregistered last\nregistered first\n")


def test_a_keyboard_interrupt_is_what_a_shell_makes_of_it(both: Both, folder: Path) -> None:
    """python ends itself by SIGINT then, which workers disregard."""
    (folder / "script.py").write_text("raise KeyboardInterrupt\n")
    status, output = both.worker("script", ("script.py",))
    assert (status, output.splitlines()[-1]) == (130, "KeyboardInterrupt")


SHOWS = "import sys\nprint(__name__, __file__, __package__, __spec__.name, sys.argv, sys.path[0])\n"


@pytest.mark.parametrize("path", ["package", "package.trains", "alone"])
def test_a_module_begins_as_under_python(both: Both, folder: Path, path: str) -> None:
    (folder / "package").mkdir(exist_ok=True)
    (folder / "package" / "__init__.py").touch()
    (folder / "alone.py").write_text(SHOWS + DIES_LOUDLY + "group = Group()\n")
    (folder / "package" / "__main__.py").write_text("from . import trains\n" + SHOWS)
    (folder / "package" / "trains.py").write_text(SHOWS)
    assert compare(both, "module", (path, "a"))[0] == 0


@pytest.mark.parametrize("suffix", ["", ".zip", ".pyz"])
def test_a_folder_and_an_archive_begin_as_under_python(both: Both, folder: Path, suffix: str) -> None:
    name = f"archive{suffix}"
    if suffix == ".zip":
        (folder / name).mkdir()  # a folder may be called so
        (folder / name / "__main__.py").write_text(SHOWS)
    else:
        with zipfile.ZipFile(folder / name, "w") as archive:
            archive.writestr("__main__.py", SHOWS)
    assert compare(both, "script", (name, "a"))[0] == 0


def test_compiled_code_begins_as_under_python(both: Both, folder: Path) -> None:
    (folder / "source.py").write_text("print(__file__, type(__loader__).__name__, __cached__)\n")
    compiled = py_compile.compile(str(folder / "source.py"), cfile=str(folder / "compiled.pyc"))
    assert compiled is not None
    assert compare(both, "script", ("compiled.pyc",))[0] == 0


def test_a_module_that_is_not_there_is_named(both: Both) -> None:
    status, output = both.worker("module", ("no_such_module",))
    assert (status, output.splitlines()[-1]) == (1, "ImportError: No module named no_such_module")
