"""Whether the tests would notice: small random mistakes in the code, each against the tests beside it.

    python -m tests.mutants [--target core|edges] [--mutants 200] [--seed 1] [--jobs 2] [--only TEXT] [--json FILE]

`core` are the controller and the record, against all of their tests. `edges` are the commands, what reads the ledger,
and Slurm, each module against the test files that have its name or its folder's (`Target.near`), without PostgreSQL,
clusters and tests that take long.

A mutant is one comparison flipped, one condition negated, one `and` made an `or` (or the other way round), or one
statement deleted. What only words a message, asserts what cannot be, or gives a name its first value is left alone.
Mutants are written into private copies of the tree, never into this one. A mutant is killed when a test fails, or takes
far longer than it does otherwise; a test that never executes the line is not asked. `EQUIVALENT` names those that
change nothing that anybody could see, and why; they are not counted. Exit code 1: fewer than 95 % are killed, of
`edges` 85 %.

Called by `make soak`.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import compileall
import importlib
import itertools
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("resihp", "tests", "wrapper", "slurm", "db", "pyproject.toml")
SEEDS = 400
MEMORY_BYTES = 6 << 30
LONGEST_TEST_CPU_S = 10.0
"""Of `edges`: what takes longer without any mutant is no near test."""
HANGS_S = 90
"""Of `edges`, by the clock: what takes longer waits for something."""
ASKED_CPU_S = 60.0
"""Of `edges`: tests that one mutant is tried with take no longer than this without it."""
PRELOADED = ("numpy", "scipy.optimize", "scipy.stats", "msgspec", "hypothesis", "_pytest.assertion.rewrite")
"""What tests import and no mutant changes."""

COUNT_BYTECODES = ("tests/resihp/controller/test_size.py",)
"""They fail in a tree that notes which statements are executed, since that takes bytecodes of its own."""

executed: set[int] = set()
"""Statements that were executed, in a tree that notes it."""

EQUIVALENT: dict[str, str] = {
    "resihp/controller/nodes/joins.py::measured: if not member.ready: continue -> pass": (
        "who is not ready is told of, or considered, to no effect: `replan_policy` looks only at who is ready"
    ),
    "resihp/controller/shutdown.py::_agent_signalled: if len(nodes) > 1 or (nodes and alone): return -> pass": (
        "what follows could only be a warning, which `_begin` does not heed once the job is to stop"
    ),
    "resihp/controller/transition.py::parked: if job.pause is not None and parked.epoch == job.pause.epoch: "
    "return -> pass": "the answer is noted twice, and whoever has parked already is waited for no more",
    "resihp/controller/nodes/upkeep.py::_leave_unusable_nodes: if job.stage not in ('running', 'pausing'): "
    "return -> pass": (
        "the stage is looked at once more before a node is left, for the one before it may have ended the job"
    ),
    "resihp/controller/iterations.py::newcomers_leave: if not member.ready and member.fenced is None: "
    "member.fenced = 'started too late to take part' -> pass": (
        "once training is done, what a newcomer says, and how it ends, is passed over anyway"
    ),
    "resihp/controller/nodes/replacements.py::_worth: if job.usual_s == 0: return None -> pass": (
        "then the time left comes to 0 as well, and nothing is worth its price"
    ),
    "resihp/controller/nodes/replacements.py::_worth: return None -> pass": (
        "while training runs every rank of the plan in effect holds its state: none is lost"
    ),
}
"""By what a mutant is called, why nobody can tell it from the original."""

COMMANDS = "tests/wrapper/commands"
NEAR_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "wrapper/commands/in_slurm.py": (f"{COMMANDS}/test_run.py", "tests/wrapper/test_refusals.py"),
    "wrapper/commands/compare.py": ("tests/db/reading/test_queries.py", "tests/db/reading/test_explanations.py"),
    "wrapper/commands/options.py": (f"{COMMANDS}/test_jobs.py", f"{COMMANDS}/status"),
    "wrapper/commands/node": (f"{COMMANDS}/test_node.py",),
    "wrapper/commands/node/maintenance.py": (f"{COMMANDS}/test_node.py", "tests/db/reading/test_hardware.py"),
    "wrapper/commands/report": (f"{COMMANDS}/test_report.py", "tests/wrapper/test_report_runs.py"),
    "wrapper/commands/operate": (
        f"{COMMANDS}/operate",
        f"{COMMANDS}/test_last_words.py",
        f"{COMMANDS}/test_json.py",
    ),
    "slurm/site": ("tests/slurm/test_site_hook.py",),
    "slurm/client.py": ("tests/slurm/test_parse.py", "tests/slurm/test_replacement.py"),
    "slurm/command_call.py": ("tests/slurm/test_commands.py",),
}
"""Test files of modules, or of folders, that have other names."""


RUN_AS_PROGRAMS = {"slurm/site/hook.py"}
"""Their tests start them, so that nobody notes which statements they execute: all near tests are asked."""


def _near_by_name(path: str) -> list[str]:
    """The test files and folders beside a module, by its name or its folder's."""
    for place in (path, str(Path(path).parent)):
        if place in NEAR_ELSEWHERE:
            return list(NEAR_ELSEWHERE[place])
    if path.startswith("db/reading"):
        return ["tests/db/reading", f"{COMMANDS}/history", f"{COMMANDS}/test_why_not.py"]  # which ask it
    if path.startswith("slurm/"):
        return ["tests/slurm"]
    folder, name = Path("tests") / Path(path).parent, Path(path).stem
    beside = [folder / f"test_{name}.py", folder.parent / f"test_{folder.name}.py"]
    if folder.name != "commands":
        beside.append(folder)
    return [str(place) for place in beside if (ROOT / place).exists()]


@dataclass(frozen=True)
class Target:
    """What mutants are made of, and the tests that are to notice."""

    sources: Callable[[Path], list[Path]]
    near: Callable[[str], list[str]]
    """Test files and folders for a module."""
    enough: float
    is_selective: bool = False
    """Whether tests that fail or take long without any mutant are left out, instead of ending the run."""


TARGETS = {
    "core": Target(
        sources=lambda root: [
            *sorted((root / "resihp/controller").rglob("*.py")),
            *(root / "resihp/record" / f"{n}.py" for n in ["fold", "state"]),
        ],
        near=lambda _: ["tests/resihp/controller", "tests/resihp/record"],
        enough=0.95,
    ),
    "edges": Target(
        sources=lambda root: [
            path
            for place in ("wrapper/commands", "db/reading", "slurm")
            for path in sorted((root / place).rglob("*.py"))
        ],
        near=_near_by_name,
        enough=0.85,
        is_selective=True,
    ),
}
target = TARGETS["core"]

FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True)
class Mutant:
    """One change. `start` and `end` are its place in the file, in bytes; `statement` is the one that it is in."""

    path: str
    function: str
    kind: str
    before: str
    after: str
    line: int
    statement: int
    start: int
    end: int

    @property
    def name(self) -> str:
        return f"{self.path}::{self.function}: {self.before} -> {self.after}"

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


def sources(root: Path) -> list[Path]:
    """The files that mutants are made of."""
    return target.sources(root)


def number(index: int, statement: ast.stmt) -> int:
    """What a statement of the so manieth file is called."""
    return 100_000 * index + statement.lineno


def candidates(root: Path) -> list[Mutant]:
    """Every mutant that there is, in the order of the files."""
    found: list[Mutant] = []
    for index, path in enumerate(sources(root)):
        found += _Finder(path.relative_to(root).as_posix(), index, path.read_bytes()).found
    return found


class _Finder(ast.NodeVisitor):
    """Mutants of one file."""

    def __init__(self, path: str, index: int, source: bytes) -> None:
        self.path = path
        self.index = index
        self.source = source
        self.offsets = [0]
        for line in source.splitlines(keepends=True):
            self.offsets.append(self.offsets[-1] + len(line))
        self.found: list[Mutant] = []
        self.names: list[str] = []
        self.bound: list[Counter[str]] = []
        self.statement: ast.stmt | None = None
        self.header = ""
        """Of the block that a statement is in, where it is a condition's."""
        self.last: ast.stmt | None = None
        """Of the function: to return nothing there changes nothing."""
        self.visit(ast.parse(source))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names.append(node.name)
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef):
                self.visit(inner)
        self.names.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name == "check" and self.names == ["Controller"]:
            return  # it asserts
        self.names.append(node.name)
        stored = [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        self.bound.append(
            Counter(stored) + Counter(argument.arg for argument in ast.walk(node) if isinstance(argument, ast.arg))
        )
        self.last = node.body[-1]
        for statement in node.body:
            self.visit(statement)
        self.bound.pop()
        self.names.pop()

    def visit(self, node: ast.AST) -> None:
        if not self.bound and not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            return
        if isinstance(node, ast.Assert | ast.JoinedStr | ast.arguments) or _only_words(node):
            return
        outer = self.statement, self.header
        if isinstance(node, ast.stmt):
            self.statement = node
            if self._deletable(node):
                self._add("deleted", node, "pass", self.header)
        elif isinstance(node, ast.match_case) and node.guard is not None:
            self._negate(node.guard)
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            self._negate(node.test)
        elif isinstance(node, ast.comprehension):
            for condition in node.ifs:
                self._negate(condition)
        elif isinstance(node, ast.Compare):
            self._flip(node)
        elif isinstance(node, ast.BoolOp):
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            self._add("and/or", node, f"({ast.unparse(ast.BoolOp(other, node.values))})")
        if isinstance(node, ast.If):
            self.header = f"if {ast.unparse(node.test)}: "
        elif isinstance(node, ast.match_case):
            self.header = f"case {ast.unparse(node.pattern)}: "
        elif isinstance(node, ast.stmt):
            self.header = ""
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self.visit(node.value)
        else:
            super().visit(node)
        self.statement, self.header = outer

    def _deletable(self, node: ast.stmt) -> bool:
        match node:
            case ast.Assign(value=ast.JoinedStr()) | ast.Return(value=ast.JoinedStr()):
                return False  # words
            case ast.Expr(value=ast.Call()):
                return True
            case ast.Assign():
                return self.names[-1] != "__init__" and all(self._rebinds(target) for target in node.targets)
            case ast.Return(value=None | ast.Constant(value=None | False)):
                return node is not self.last
            case ast.AugAssign() | ast.Return() | ast.Continue() | ast.Break() | ast.Delete() | ast.Raise():
                return True
            case _:
                return False

    def _rebinds(self, target: ast.expr) -> bool:
        """Whether there is a value also without this assignment."""
        match target:
            case ast.Name():
                return self.bound[-1][target.id] > 1
            case ast.Tuple():
                return all(self._rebinds(each) for each in target.elts)
            case _:
                return True

    def _negate(self, condition: ast.expr) -> None:
        match condition:
            case ast.Compare(ops=[_]):
                return  # flipped
            case ast.UnaryOp(op=ast.Not()):
                self._add("negated", condition, f"({ast.unparse(condition.operand)})")
            case _:
                self._add("negated", condition, f"(not ({ast.unparse(condition)}))")

    def _flip(self, node: ast.Compare) -> None:
        for i, operator in enumerate(node.ops):
            ops = [*node.ops[:i], FLIPPED[type(operator)](), *node.ops[i + 1 :]]
            self._add("flipped", node, f"({ast.unparse(ast.Compare(node.left, ops, node.comparators))})")

    def _add(self, kind: str, node: ast.stmt | ast.expr, after: str, where: str = "") -> None:
        statement = self.statement
        assert statement is not None
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        self.found.append(
            Mutant(
                path=self.path,
                function=".".join(self.names),
                kind=kind,
                before=where + ast.unparse(node),
                after=after,
                line=node.lineno,
                statement=number(self.index, statement),
                start=self.offsets[node.lineno - 1] + node.col_offset,
                end=self.offsets[node.end_lineno - 1] + node.end_col_offset,
            )
        )


def _only_words(node: ast.AST) -> bool:
    """A message to people, or that something cannot be."""
    if not isinstance(node, ast.Call):
        return isinstance(node, ast.Expr) and _only_words(node.value)
    called = node.func
    return (isinstance(called, ast.Attribute) and called.attr == "say") or (
        isinstance(called, ast.Name) and called.id in ("assert_never", "message", "notice", "say")
    )


# --- running tests in a fork, in a private copy -------------------------------------------------------------------


class _Noting(ast.NodeTransformer):
    """Has every statement of a function note that it is executed."""

    def __init__(self, index: int) -> None:
        self.index = index

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if not isinstance(node, ast.Module | ast.ClassDef):
            for name in ("body", "orelse", "finalbody"):
                inner = getattr(node, name, None)
                if isinstance(inner, list):
                    setattr(node, name, [each for statement in inner for each in (self._note(statement), statement)])
        return node

    def _note(self, statement: ast.stmt) -> ast.stmt:
        # A process that a test starts has nobody to tell.
        noted = f"getattr(__import__('builtins'), '__executed__', set()).add({number(self.index, statement)})"
        return ast.parse(noted).body[0]


def instrument(tree: Path) -> None:
    """Have the tree's own code tell which of its statements are executed."""
    for index, path in enumerate(sources(tree)):
        noting = _Noting(index).visit(ast.parse(path.read_bytes()))
        path.write_text(ast.unparse(ast.fix_missing_locations(noting)))


@dataclass
class Known:
    """Of each test, without any mutant: its CPU seconds, and which statements it executes."""

    seconds: dict[str, float]
    executed: dict[str, list[int]]

    def ask(self, mutant: Mutant) -> list[str]:
        """The tests that can notice, quickest first."""
        able = [test for test, executed in self.executed.items() if mutant.statement in executed]
        quickest = sorted(able, key=self.seconds.__getitem__)
        if not target.is_selective:
            return quickest
        near = tuple(target.near(mutant.path))
        if mutant.path in RUN_AS_PROGRAMS:
            quickest = sorted(self.executed, key=self.seconds.__getitem__)
        asked = [test for test in quickest if test.startswith(near)]
        through_s = itertools.accumulate(self.seconds[test] for test in asked)
        return [test for test, seconds in zip(asked, through_s, strict=True) if seconds <= ASKED_CPU_S]


class Chosen:
    """A pytest plugin: all tests in these places, or these in this order, each within so many CPU seconds; notes what
    they did."""

    def __init__(self, tests: dict[str, float] | None = None, places: Iterable[str] = ()) -> None:
        self.tests = tests
        self.places = list(places)
        self.seconds: dict[str, float] = {}
        self.executed: dict[str, list[int]] = {}
        self.failed = ""
        self.unfit: list[str] = []

    @property
    def where(self) -> Iterable[str]:
        return self.places if self.tests is None else dict.fromkeys(test.partition("::")[0] for test in self.tests)

    @property
    def options(self) -> list[str]:
        if not target.is_selective:
            return ["-x", "--timeout", "0", *(f"--ignore={path}" for path in COUNT_BYTECODES)]
        if self.tests is None:
            return ["--timeout", str(HANGS_S), "-m", "not soak and not alone", "-k", "not postgresql"]
        return ["-x", "--timeout", str(HANGS_S)]

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if target.is_selective:
            clusters = {"cluster", "real_cluster"}
            items[:] = [item for item in items if not clusters & set(getattr(item, "fixturenames", ()))]
        if self.tests is not None:
            order = {test: i for i, test in enumerate(self.tests)}
            items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        longest_s = LONGEST_TEST_CPU_S if target.is_selective else 0.0
        if self.tests is not None:
            longest_s = self.tests[item.nodeid]
        if longest_s:
            signal.signal(signal.SIGVTALRM, _too_long)
            signal.setitimer(signal.ITIMER_VIRTUAL, longest_s)
        executed.clear()
        began = time.process_time()
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
            self.seconds[item.nodeid] = time.process_time() - began
            self.executed[item.nodeid] = sorted(executed)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid
            self.unfit.append(report.nodeid)


def _too_long(_: int, __: FrameType | None) -> None:
    raise TimeoutError("far longer than without the mutant")


def in_fork(tree: Path, plugin: Chosen, log: Path, cpu_s: float | None = None) -> dict[str, Any]:
    """Run tests of a tree in a process of their own. Returns its exit status and what the plugin noted."""
    answers, answer = os.pipe()
    pid = os.fork()
    if pid == 0:
        failed = 1
        try:
            os.close(answers)
            noted = _run(tree, plugin, log, cpu_s)
            with os.fdopen(answer, "w") as stream:
                json.dump(noted, stream)
            failed = 0
        finally:
            if failed:
                traceback.print_exc()
            os._exit(failed)
    os.close(answer)
    with os.fdopen(answers) as stream:
        text = stream.read()
    _, status = os.waitpid(pid, 0)
    if text:
        return json.loads(text)  # type: ignore[no-any-return]
    code = os.waitstatus_to_exitcode(status)
    if code > 0:  # else a signal: it ran for too long, say
        raise RuntimeError(f"tests could not be run:\n{log.read_text()}")
    return {"exit": code, "failed": "", "seconds": {}, "executed": {}, "unfit": []}


def _run(tree: Path, plugin: Chosen, log: Path, cpu_s: float | None) -> dict[str, Any]:
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    if cpu_s is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s) + 1, int(cpu_s) + 2))
    builtins.__executed__ = executed  # type: ignore[attr-defined]
    os.chdir(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT), str(ROOT / "tests")))]
    os.environ["RESIHP_FUZZ_SEEDS"] = str(SEEDS)
    os.environ["PYTHONPATH"] = str(tree)
    status = pytest.main(["-q", "-p", "no:xdist", *plugin.options, *plugin.where], plugins=[plugin])
    where = Path(str(sys.modules["resihp"].__file__)) if "resihp" in sys.modules else tree
    assert where.is_relative_to(tree), f"tests ran with {where}"
    assert status != pytest.ExitCode.USAGE_ERROR
    return {
        "exit": int(status),
        "failed": plugin.failed,
        "seconds": plugin.seconds,
        "executed": plugin.executed,
        "unfit": plugin.unfit,
    }


def copy(tree: Path, into: Path) -> Path:
    """A private tree, with compiled modules and all."""
    into.mkdir()
    for name in COPIED:
        if (tree / name).is_dir():
            shutil.copytree(tree / name, into / name, symlinks=True)
        else:
            shutil.copy2(tree / name, into / name)
    return into


def without_mutant(tree: Path, log: Path, places: Iterable[str]) -> Known:
    """What the tests do otherwise; they leave compiled modules in the tree. Raises RuntimeError where they fail."""
    originals = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in sources(tree)}
    instrument(tree)
    found = in_fork(tree, Chosen(places=places), log)
    for path, (source, changed_ns) in originals.items():
        path.write_bytes(source)
        os.utime(path, ns=(changed_ns, changed_ns))
    compileall.compile_dir(tree / "resihp", quiet=1)
    if not target.is_selective and found["exit"] != 0:
        raise RuntimeError(f"tests fail without any mutant, {found['failed']}:\n{log.read_text()}")
    if found["unfit"]:
        print(f"left out, as they fail or take long without any mutant: {' '.join(found['unfit'])}", flush=True)
    executed = {test: lines for test, lines in found["executed"].items() if test not in found["unfit"]}
    return Known(found["seconds"], executed)


@dataclass
class Outcome:
    """What became of a mutant. `by`: the test that killed it."""

    mutant: str
    line: int
    kind: str
    killed: bool
    by: str
    asked: int
    seconds: float


def try_mutant(tree: Path, mutant: Mutant, known: Known, log: Path) -> Outcome:
    began = time.monotonic()
    asked = known.ask(mutant)
    if not asked:
        return Outcome(mutant.name, mutant.line, mutant.kind, False, "", 0, 0.0)
    path = tree / mutant.path
    source, times = path.read_bytes(), path.stat()
    allowed = {test: 5.0 + 5.0 * known.seconds[test] for test in asked}
    path.write_bytes(mutant.apply(source))
    try:
        found = in_fork(tree, Chosen(allowed), log, cpu_s=120.0 + 5.0 * sum(known.seconds.values()))
    finally:
        path.write_bytes(source)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    killed = found["exit"] != 0
    by = found["failed"] or (f"exit {found['exit']}" if killed else "")
    return Outcome(mutant.name, mutant.line, mutant.kind, killed, by, len(asked), time.monotonic() - began)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--target", choices=TARGETS, default="core")
    parser.add_argument("--mutants", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="those whose name contains this, instead of random ones")
    parser.add_argument("--under", default="", help="of those drawn, only the ones in files below this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", action="store_true", help="name the mutants, run nothing")
    options = parser.parse_args(arguments)
    global target
    target = TARGETS[options.target]
    every = candidates(ROOT)
    names = Counter(mutant.name for mutant in every)
    files = {mutant.path for mutant in every}
    unclear = [name for name in EQUIVALENT if name.partition("::")[0] in files and names[name] != 1]
    assert not unclear, f"not exactly one mutant is called {unclear}"
    counted = [mutant for mutant in every if mutant.name not in EQUIVALENT]
    if options.only:
        drawn = [mutant for mutant in counted if options.only in mutant.name]
    else:
        drawn = random.Random(options.seed).sample(counted, min(options.mutants, len(counted)))
    drawn = [mutant for mutant in drawn if mutant.path.startswith(options.under)]
    print(
        f"{len(every)} mutants, {len(every) - len(counted)} of them equivalent; {len(drawn)} drawn, seed {options.seed}"
    )
    if options.list:
        print("\n".join(mutant.name for mutant in drawn))
        return 0
    for name in PRELOADED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="resihp-mutants-") as folder:
        outcomes = run_all(Path(folder), drawn, options.jobs)
    killed = sum(outcome.killed for outcome in outcomes)
    share = killed / len(outcomes) if outcomes else 1.0
    print(f"\n{'kind':10}{'mutants':>9}{'killed':>9}")
    for kind in sorted({outcome.kind for outcome in outcomes}):
        of_it = [outcome for outcome in outcomes if outcome.kind == kind]
        print(f"{kind:10}{len(of_it):9}{sum(outcome.killed for outcome in of_it):9}")
    print(f"{'all':10}{len(outcomes):9}{killed:9}  {share:.1%}")
    survivors = [outcome for outcome in outcomes if not outcome.killed]
    for outcome in survivors:
        print(f"survived: {outcome.mutant}  (line {outcome.line})")
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    return 0 if share >= target.enough else 1


def run_all(folder: Path, drawn: list[Mutant], jobs: int) -> list[Outcome]:
    """So many at a time, each in a private copy."""
    began = time.monotonic()
    tree = copy(ROOT, folder / "tree")
    places = dict.fromkeys(place for mutant in drawn for place in target.near(mutant.path))
    known = without_mutant(tree, folder / "log", places)
    cpu_s, took_s = sum(known.seconds.values()), time.monotonic() - began
    print(f"{len(known.seconds)} tests, {cpu_s:.0f} s of CPU; known after {took_s:.0f} s", flush=True)
    outcomes = []
    with multiprocessing.get_context("fork").Pool(jobs, _begin_worker, (tree, known)) as pool:
        for outcome in pool.imap_unordered(_try, drawn):
            outcomes.append(outcome)
            word = f"killed by {outcome.by}" if outcome.killed else "SURVIVED"
            print(f"{outcome.seconds:6.1f} s, {outcome.asked} tests: {outcome.mutant}\n          {word}", flush=True)
    return outcomes


_worker: tuple[Path, Known]


def _begin_worker(tree: Path, known: Known) -> None:
    global _worker
    sys.dont_write_bytecode = True  # a mutant's must not outlive it
    _worker = copy(tree, tree.with_name(f"tree-{os.getpid()}")), known


def _try(mutant: Mutant) -> Outcome:
    tree, known = _worker
    return try_mutant(tree, mutant, known, tree.with_suffix(".log"))


if __name__ == "__main__":
    sys.exit(main())
