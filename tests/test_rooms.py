"""The project's rules, read off the source: imports and their order, no circles, sizes, branches, unique names.

What breaks a rule stands in a list here with its reason. An entry that breaks nothing any more fails as well: the
lists only get shorter.
"""

from __future__ import annotations

import ast
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
MOST_MODULES = 12
MOST_LINES = 60

PACKAGES: Mapping[str, set[str]] = {
    "resihp": set(),
    "slurm": {"resihp.errors"},
    "db": {"resihp"},
    "wrapper": {"resihp", "slurm", "db"},
}
"""The four folders at the top, and what each may import beside itself. Installed, `db`, `slurm` and `wrapper` are
packages of `resihp`; here each is named after its folder."""
ENTRY_POINT = "resihp.__main__"
"""Starts the wrapper, and is therefore allowed to import everything."""
ORDER: Mapping[str, tuple[set[str], ...]] = {
    "resihp": (
        {"errors", "durable_files", "faults", "plain_files", "process", "words"},
        {"settings"},
        {"parallelism"},
        {"protocol", "datasets"},
        {"record", "pipeline"},
        {"detector", "scheduler", "worker"},
        {"controller", "executor", "reporting"},
        {"simulator"},
        {"__main__"},  # the command `resihp`, which loads the wrapper
    ),
    "wrapper": (
        {"exit_codes", "strict_modes", "early_signals", "site_check", "abandoned_threads"},
        {"file_locks", "registry"},
        {"job_files"},
        {"job_folder"},
        {"output", "launch", "site_folders"},
        {"config"},
        {"sinks", "slurm_tasks"},
        {"supervisor", "agent"},
        {"commands"},
        {"cli"},
    ),
}
"""A folder imports itself and those in lines above it: neither what stands beside it nor what comes below."""
APART = {("wrapper.commands", "wrapper.agent")}
"""The first one never imports the second, whose modules are one process's."""
UPWARDS = {
    ("resihp.faults", "resihp.errors"): "a fault that cannot be read is an error of ours",
    (
        "wrapper.launch.slurm_launcher",
        "wrapper.config.run_spec",
    ): "agents are started as the run's file asks",
    ("wrapper.launch.preloading", "wrapper.config.run_spec"): "the same",
    (
        "wrapper.config.values",
        "wrapper.sinks.hooks",
    ): "which events there are, and which URLs, is the hooks' to say",
}
CIRCLES: Mapping[frozenset[str], str] = {}
NAMED_TWICE: Mapping[str, str] = {
    "Allocation": "the simulator's Slurm",
    "Decision": "of the planner; of the controller about one node",
    "Job": "the controller's; a job's folder",
    "Ready": "both are messages, on different sockets",
    "ResihpCallback": "for transformers; for Lightning",
    "Replica": "of a layout; an agent's copy of the journal",
    "Signalled": "both are messages: what an agent heard is what the controller is told",
    "Slow": "an order to a worker; what the controller knows of a device",
    "Successor": "a message; the process that it starts",
    "Verdict": "the controller's of a device; the planner's of a transition",
    "Worker": "an agent's; the simulator's",
}
LONG: Mapping[str, int] = {
    "resihp.scheduler.search.kernels.own_orders.schedule_pipeline": 65,
    "resihp.controller.state.job.Job.__init__": 90,
    "resihp.detector.offline.traces.read": 66,
    "resihp.scheduler.transition_cost.verdict": 62,
    "wrapper.commands.init.job_text": 83,
}
"""Functions of more than `MOST_LINES` lines, with how many they may have."""
CROWDED: Mapping[str, int] = {}
MAX_MODULE_LINES = 400
LONG_MODULES: Mapping[str, int] = {
    "resihp/detector/online/link_channel.py": 425,
    "resihp/detector/sequential/changes.py": 425,
    "resihp/detector/online/lane_channel.py": 425,
    "resihp/executor/backends.py": 425,
    "resihp/executor/engine.py": 550,
    "db/models.py": 700,
    "resihp/controller/interface.py": 525,
    "resihp/detector/diagnosis/signatures.py": 550,
    "resihp/detector/online/monitor.py": 625,
    "resihp/detector/sequential/peer_cusum.py": 600,
    "resihp/protocol/messages.py": 975,
    "resihp/record/fold.py": 450,
    "resihp/record/journal.py": 775,
    "slurm/site/hook.py": 875,
    "wrapper/config/schema.py": 425,
    "wrapper/sinks/metrics.py": 450,
    "wrapper/supervisor/agents/links.py": 425,
    "wrapper/supervisor/shell.py": 485,
}
"""Files of more than `MAX_MODULE_LINES` lines, with how many they may have, in steps of 25."""
MAX_COMPLEXITY = 20
COMPLEX: Mapping[str, int] = {
    "wrapper.commands.status.tables.render_status": 25,
}
"""Functions with a complexity above `MAX_COMPLEXITY`, with how much they may have."""
MAX_TOKENS_PER_LINE = 9.3
"""Of all code lines of the product, comments and docstrings left out."""
WITHOUT_INIT = {
    "db/migrations": "Alembic's own",
    "db/migrations/versions": "Alembic's own",
    "slurm/site": "one file that root copies",
}


class Import(NamedTuple):
    source: str
    target: str
    line: int
    when: str
    """`module`, `function`, or `types`: for annotations only."""


def room(module: str) -> str:
    """Return the name that a module has in this file: `wrapper.cli` for `resihp.wrapper.cli`."""
    inner = module.removeprefix("resihp.")
    return inner if inner.split(".")[0] in PACKAGES else module


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
TREES = {module: ast.parse(path.read_text()) for module, path in MODULES.items()}


def imports_below(node: ast.AST, module: str, when: str) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for name in child.names:
                yield Import(module, room(name.name), child.lineno, when)
        elif isinstance(child, ast.ImportFrom):
            for name in child.names:
                whole = room(f"{child.module}.{name.name}")
                yield Import(module, whole if whole in MODULES else room(str(child.module)), child.lineno, when)
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            yield from imports_below(child, module, "types")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports_below(child, module, "function" if when == "module" else when)
        else:
            yield from imports_below(child, module, when)


IMPORTS = [
    found
    for module, tree in TREES.items()
    for found in imports_below(tree, module, "module")
    if found.target.split(".")[0] in PACKAGES
]


def below(module: str, folder: str) -> bool:
    return module == folder or module.startswith(f"{folder}.")


def where(found: Import) -> str:
    return f"{MODULES[found.source].relative_to(ROOT)}:{found.line} imports {found.target}"


def test_folders_beside_resihp_are_imported_as_its_packages() -> None:
    """`import db` would be another copy of the module in a checkout, and somebody else's package where resihp is
    installed."""
    wrong = [
        f"{MODULES[module].relative_to(ROOT)}:{node.lineno}"
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        for target in (
            [name.name for name in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        if target.split(".")[0] in PACKAGES.keys() - {"resihp"}
    ]
    assert not wrong


def test_packages_import_only_those_that_they_may() -> None:
    wrong = [
        where(found)
        for found in IMPORTS
        if found.source != ENTRY_POINT
        and not any(
            below(found.target, allowed)
            for package in [found.source.split(".")[0]]
            for allowed in (package, *PACKAGES[package])
        )
    ]
    assert not wrong


@pytest.mark.parametrize("package", ORDER)
def test_folders_import_only_from_those_before_them(package: str) -> None:
    level = {folder: number for number, folders in enumerate(ORDER[package]) for folder in folders}
    there = {module.split(".")[1] for module in MODULES if module.startswith(f"{package}.")}
    assert there == set(level), "every folder has its place in ORDER"
    wrong, used = [], set()
    for found in IMPORTS:
        if not (below(found.source, package) and below(found.target, package)):
            continue
        if package in (found.source, found.target):
            continue  # the package itself says what is public
        source, target = found.source.split(".")[1], found.target.split(".")[1]
        if source != target and level[target] >= level[source]:
            used.add((found.source, found.target))
            if (found.source, found.target) not in UPWARDS:
                wrong.append(where(found))
    wrong += [
        where(found) for found in IMPORTS if any(below(found.source, a) and below(found.target, b) for a, b in APART)
    ]
    assert not wrong
    assert used == {pair for pair in UPWARDS if below(pair[0], package)}, "no longer upwards: take it off the list"


def circles(edges: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """Tarjan's strongly connected components, those of more than one module."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = set()

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in edges[module]:
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            circle = frozenset(stack[stack.index(module) :])
            del stack[stack.index(module) :]
            if len(circle) > 1:
                found.add(circle)

    for module in list(edges):
        if module not in index:
            visit(module)
    return found


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """An import in a function counts; one for annotations does not."""
    edges: dict[str, set[str]] = {module: set() for module in MODULES}
    for found in IMPORTS:
        if found.when != "types" and found.target in MODULES and found.target != found.source:
            edges[found.source].add(found.target)
    assert circles(edges) == set(CIRCLES)


def test_circles_are_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set()}
    assert circles(edges) == {frozenset("abc")}


def test_rooms_are_small_and_say_what_they_decide() -> None:
    folders: dict[Path, int] = defaultdict(int)
    for path in MODULES.values():
        folders[path.parent] += path.name != "__init__.py"
    crowded = {folder.relative_to(ROOT).as_posix(): count for folder, count in folders.items() if count > MOST_MODULES}
    assert crowded == CROWDED, f"more than {MOST_MODULES} modules"
    mute = {
        folder.relative_to(ROOT).as_posix()
        for folder in folders
        if not (folder / "__init__.py").exists()
        or not ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    }
    assert mute == set(WITHOUT_INIT)


def test_a_class_name_is_one_class() -> None:
    classes = defaultdict(list)
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(f"{module}:{node.lineno}")
    twice = {name: places for name, places in classes.items() if len(places) > 1}
    new = {name: places for name, places in twice.items() if name not in NAMED_TWICE}
    assert not new, "a class name that stands elsewhere already: choose one that can be grepped for"
    assert not set(NAMED_TWICE) - set(twice), "no longer twice: take it off the list"


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(node: ast.AST, name: str) -> Iterator[tuple[str, Function]]:
    """Yield every function below, with its whole name."""
    for child in ast.iter_child_nodes(node):
        whole = name
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            whole = f"{name}.{child.name}"
            if not isinstance(child, ast.ClassDef):
                yield whole, child
        yield from functions(child, whole)


def test_functions_are_short() -> None:
    """Migrations are left out: a schema is written down once."""
    lines = {
        name: (function.end_lineno or function.lineno) - function.lineno + 1
        for module, tree in TREES.items()
        if not below(module, "db.migrations")
        for name, function in functions(tree, module)
    }
    long = {name: count for name, count in lines.items() if count > MOST_LINES}
    grown = {name: lines for name, lines in long.items() if lines > LONG.get(name, MOST_LINES)}
    assert not grown, f"longer than {MOST_LINES} lines, or than it was"
    assert not set(LONG) - set(long), "short by now: take it off the list"


def test_modules_are_short() -> None:
    lines = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for path in MODULES.values()
        if "migrations/versions" not in path.as_posix()
    }
    long = {path: count for path, count in lines.items() if count > MAX_MODULE_LINES}
    grown = {path: count for path, count in long.items() if count > LONG_MODULES.get(path, MAX_MODULE_LINES)}
    assert not grown, f"longer than {MAX_MODULE_LINES} lines, or than it was: split it"
    shorter = {path for path, limit in LONG_MODULES.items() if lines.get(path, 0) <= max(limit - 25, MAX_MODULE_LINES)}
    assert not shorter, "shorter by now: lower its number, or take it off the list"


BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension, ast.match_case)


def complexity(function: ast.AST) -> int:
    """Count the branches of a function: statements, conditional expressions, `and`, `or`, loops of comprehensions."""
    count = 1
    for node in ast.walk(function):
        count += isinstance(node, (*BRANCHES, ast.With, ast.AsyncWith, ast.Assert))
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        if isinstance(node, ast.comprehension):
            count += len(node.ifs)
    return count


def test_functions_have_few_branches() -> None:
    branches: dict[str, int] = defaultdict(int)
    for module, tree in TREES.items():
        for name, function in functions(tree, module):
            branches[name] = max(branches[name], complexity(function))
    complex_ones = {name: count for name, count in branches.items() if count > MAX_COMPLEXITY}
    grown = {name: count for name, count in complex_ones.items() if count > COMPLEX.get(name, MAX_COMPLEXITY)}
    assert not grown, f"more than {MAX_COMPLEXITY} branches, or than it had: split it"
    simpler = {name for name, limit in COMPLEX.items() if complex_ones.get(name, 0) < limit}
    assert not simpler, "fewer branches by now: lower its number, or take it off the list"


def test_lines_are_not_packed() -> None:
    tokens, lines = 0, 0
    kinds = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
    for path in MODULES.values():
        with path.open("rb") as source:
            starts = [token.start[0] for token in tokenize.tokenize(source.readline) if token.type in kinds]
        tokens += len(starts)
        lines += len(set(starts))
    assert tokens / lines <= MAX_TOKENS_PER_LINE
