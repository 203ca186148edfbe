"""The house's rules, read off the source: who imports whom, no circles, small rooms, short functions, one name each.

What breaks a rule stands in a list here with its reason. An entry that breaks nothing any more fails as well: the
lists only get shorter.
"""

from __future__ import annotations

import ast
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
"""The four packages, and what each may import beside itself."""
ORDER: Mapping[str, tuple[set[str], ...]] = {
    "resihp": (
        {"errors", "durable_files", "faults", "plain_files", "process", "words"},
        {"settings"},
        {"parallelism"},
        {"protocol", "datasets"},
        {"record", "pipeline"},
        {"detector", "scheduler", "worker"},
        {"controller", "executor"},
        {"simulator"},
        {"ledger"},  # the door to `db` for notebooks, which nothing in here goes through
    ),
    "wrapper": (
        {"exit_codes", "strict_modes", "early_signals"},
        {"file_locks", "registry"},
        {"job_files"},
        {"job_folder"},
        {"output", "launch"},
        {"config"},
        {"sinks", "slurm_tasks"},
        {"supervisor", "agent"},
        {"commands"},
        {"cli"},
        {"__main__"},
    ),
}
"""A folder imports itself and those in lines above it: neither what stands beside it nor what comes below."""
APART = {("wrapper.commands", "wrapper.agent")}
"""The first one never imports the second, whose modules are one process's."""
UPWARDS = {
    ("resihp.faults", "resihp.errors"): "a fault that cannot be read is an error of ours",
    ("wrapper.launch.slurm_launcher", "wrapper.config.run_spec"): "agents are started as the run's file asks",
    ("wrapper.launch.preloading", "wrapper.config.run_spec"): "the same",
    ("wrapper.config.values", "wrapper.sinks.hooks"): "which events there are, and which URLs, is the hooks' to say",
}
CIRCLES: Mapping[frozenset[str], str] = {}
NAMED_TWICE: Mapping[str, str] = {
    "Allocation": "the simulator's Slurm",
    "Decision": "of the planner; of the controller about one node",
    "Job": "the controller's; a job's folder",
    "Ready": "both are messages, on different sockets",
    "Replica": "of a layout; an agent's copy of the journal",
    "Signalled": "both are messages: what an agent heard is what the controller is told",
    "Slow": "an order to a worker; what the controller knows of a device",
    "Successor": "a message; the process that it starts",
    "Verdict": "the controller's of a device; the planner's of a transition",
    "Worker": "an agent's; the simulator's",
}
LONG: Mapping[str, int] = {
    "db.reading.iterations.why.why": 73,
    "resihp.controller.state.job.Job.__init__": 90,
    "resihp.detector.offline.traces.read": 66,
    "resihp.scheduler.search.kernels.partitioned": 71,  # machine code; a call more in it is one more to compile
    "resihp.scheduler.search.kernels.scheduled": 71,
    "resihp.scheduler.transition_cost.verdict": 61,
    "resihp.simulator.rules.Rules.check_order": 74,
    "resihp.simulator.scenario.Scenario.drawn": 63,
    "resihp.simulator.world.World.__init__": 74,
    "wrapper.commands.init.job_text": 83,
}
"""Functions of more than `MOST_LINES` lines, with how many they may have."""
CROWDED: Mapping[str, int] = {
    "db/migrations/versions": 22,  # one for each change of the schema, for ever
}
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
                yield Import(module, name.name, child.lineno, when)
        elif isinstance(child, ast.ImportFrom):
            for name in child.names:
                whole = f"{child.module}.{name.name}"
                yield Import(module, whole if whole in MODULES else str(child.module), child.lineno, when)
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


def test_packages_import_only_those_that_they_may() -> None:
    wrong = [
        where(found)
        for found in IMPORTS
        if not any(
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


def functions(node: ast.AST, name: str) -> Iterator[tuple[str, int]]:
    """Every function below, by its whole name, with its lines."""
    for child in ast.iter_child_nodes(node):
        whole = name
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            whole = f"{name}.{child.name}"
            if not isinstance(child, ast.ClassDef):
                yield whole, (child.end_lineno or child.lineno) - child.lineno + 1
        yield from functions(child, whole)


def test_functions_are_short() -> None:
    """Migrations are left out: a schema is written down once."""
    long = {
        name: lines
        for module, tree in TREES.items()
        if not below(module, "db.migrations")
        for name, lines in functions(tree, module)
        if lines > MOST_LINES
    }
    grown = {name: lines for name, lines in long.items() if lines > LONG.get(name, MOST_LINES)}
    assert not grown, f"longer than {MOST_LINES} lines, or than it was"
    assert not set(LONG) - set(long), "short by now: take it off the list"
