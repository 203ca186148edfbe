"""Finds the libraries that a script imports before it does anything else, from its text. Runs nothing of it.

`resihp.worker.early` imports them in advance, in a process that will run the script later. So only an import counts
that the script is certain to perform, in the same state: the imports at its top, and those at the top of the user's own
modules that it imports there, up to the first statement that could change what an import sees (`os.environ[...] = ...`,
`sys.path.insert`, a call of a function). Definitions, docstrings and constants are passed over.

A library is a module in a folder `site-packages` or `dist-packages` of the interpreter, or a package that is loaded
already. All other modules are the user's: their text is read, but they are never imported.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

MAX_FILES = 200
MAX_FILE_BYTES = 1 << 20
HARMLESS_CALLS = frozenset({"dataclass", "dataclasses.dataclass", "field", "getLogger", "logging.getLogger", "TypeVar"})
"""Functions that are often called between imports, and have no effect on later ones."""


class LibraryImport(NamedTuple):
    """`import MODULE`, or with names `from MODULE import NAMES`."""

    module: str
    names: tuple[str, ...] = ()


@dataclass
class ImportsAtTop:
    libraries: list[LibraryImport] = field(default_factory=list)
    files: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """The user's files that were read: modification time in ns, size, and number of the file itself, which differs if a
    link leads to another copy."""

    def is_current(self) -> bool:
        """Return whether none of the user's files has changed since it was read."""
        return all(state_of(path) == state for path, state in self.files.items())


def library_folders() -> tuple[str, ...]:
    """Return the folders of this interpreter's libraries. Call before the user's folders are added to `sys.path`."""
    names = ("site-packages", "dist-packages")
    return tuple(os.path.join(path, "") for path in sys.path if os.path.basename(path) in names)


def imports_at_top(kind: str, program: str, folders: Sequence[str]) -> ImportsAtTop:
    """Return the imports of a script or module, for which `sys.path` is set up. `folders`: those of libraries.

    A script that cannot be read, and a folder or an archive, has no imports here.
    """
    reader = _Reader(folders)
    with suppress(OSError, SyntaxError, ValueError, ImportError, RecursionError):
        if kind == "script":
            reader.read(Path(program).absolute(), "")
        else:
            reader.follow(program, is_main=True)
    return reader.result


def state_of(path: str) -> tuple[int, int, int]:
    """Return what changes with a file or a folder, as in `ImportsAtTop.files`; zeros if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (status.st_mtime_ns, status.st_size, status.st_ino)


class _Reader:
    """Reads files in the order in which Python would run them. Its methods return whether what follows may be read,
    too: False after a statement that could change it."""

    def __init__(self, folders: Sequence[str]) -> None:
        self.result = ImportsAtTop()
        self._folders = tuple(folders)

    def read(self, path: Path, package: str) -> bool:
        if str(path) in self.result.files:
            return True
        state = state_of(str(path))
        if len(self.result.files) >= MAX_FILES or state[1] > MAX_FILE_BYTES:
            return False
        self.result.files[str(path)] = state
        return self._all_pass(ast.parse(path.read_bytes()).body, package)

    def follow(self, name: str, is_main: bool = False) -> bool:
        """Read a module of the user, after the packages that it is in."""
        top, *parts = name.split(".")
        spec = importlib.util.find_spec(top)
        if spec is None:
            return False
        if not parts and not spec.submodule_search_locations:
            return self.read(Path(spec.origin or ""), "")
        locations = list(spec.submodule_search_locations or ())
        package, is_harmless = top, True
        if spec.origin is not None:
            is_harmless = self.read(Path(spec.origin), package)
        for part in parts:
            file, locations = _below(locations, part)
            if file is None and not locations:
                return False
            is_package = bool(locations)
            package = f"{package}.{part}" if is_package else package
            if file is not None:
                is_harmless = is_harmless and self.read(file, package)
        if is_main and locations:
            file, _ = _below(locations, "__main__")
            is_harmless = is_harmless and file is not None and self.read(file, package)
        return is_harmless

    def _all_pass(self, statements: Iterable[ast.stmt], package: str) -> bool:
        return all(self._passes(statement, package) for statement in statements)

    def _passes(self, statement: ast.stmt, package: str) -> bool:
        match statement:
            case ast.Import():
                return all(self._import(name.name, ()) for name in statement.names)
            case ast.ImportFrom():
                name = "." * statement.level + (statement.module or "")
                whole = importlib.util.resolve_name(name, package) if statement.level else name
                return self._import(whole, tuple(alias.name for alias in statement.names))
            case ast.Try() if not (statement.orelse or statement.finalbody):
                handled = [inner for handler in statement.handlers for inner in handler.body]
                if not all(_is_harmless(inner) for inner in handled):
                    return False
                return _is_missing(statement.body) or self._all_pass(statement.body, package)
            case ast.If() if ast.unparse(statement.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                return not statement.orelse
        return _is_harmless(statement)

    def _import(self, name: str, names: tuple[str, ...]) -> bool:
        if name in ("", "__future__"):
            return bool(name)
        top = name.partition(".")[0]
        if top in sys.modules:
            if top not in sys.stdlib_module_names and top != "__main__":
                self.result.libraries.append(LibraryImport(name, names))
            return top != "__main__"
        spec = importlib.util.find_spec(top)
        if spec is None:
            return False
        places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
        if all(self._is_library(str(place)) for place in places):
            if top not in sys.stdlib_module_names:
                self.result.libraries.append(LibraryImport(name, names))
            return True
        if top in sys.stdlib_module_names and _is_standard(str(spec.origin)):
            return True
        submodules = [f"{name}.{inner}" for inner in names if self._exists(f"{name}.{inner}")]
        return all(self.follow(module) for module in [name, *submodules])

    def _is_library(self, place: str) -> bool:
        return place.startswith(self._folders)

    @staticmethod
    def _exists(name: str) -> bool:
        """Return whether a module of the user exists, without importing the packages that it is in."""
        top, *parts = name.split(".")
        spec = importlib.util.find_spec(top)
        locations = list(spec.submodule_search_locations or ()) if spec is not None else []
        file: Path | None = None
        for part in parts:
            file, locations = _below(locations, part)
        return file is not None


def _is_missing(statements: Sequence[ast.stmt]) -> bool:
    """Return whether the first of these statements imports a package that does not exist, so that a handler runs."""
    match statements[0]:
        case ast.Import(names=[ast.alias(name=name), *_]) | ast.ImportFrom(module=str(name), level=0):
            top = name.partition(".")[0]
            return top not in sys.modules and importlib.util.find_spec(top) is None
    return False


def _below(locations: Collection[str], name: str) -> tuple[Path | None, list[str]]:
    """Return the file of a submodule, and where its own submodules are; (None, []) if it does not exist."""
    folders = [Path(location, name) for location in locations]
    for folder in folders:
        if (folder / "__init__.py").is_file():
            return folder / "__init__.py", [str(folder)]
        if folder.with_suffix(".py").is_file():
            return folder.with_suffix(".py"), []
    return None, [str(folder) for folder in folders if folder.is_dir()]


def _is_standard(origin: str) -> bool:
    return origin in ("built-in", "frozen") or origin.startswith(os.path.dirname(os.__file__))


def _is_harmless(statement: ast.stmt) -> bool:
    """Return whether a statement defines something and has no other effect, as far as its text tells."""
    match statement:
        case ast.Pass() | ast.Expr(value=ast.Constant()):
            return True
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            defaults = [*statement.args.defaults, *filter(None, statement.args.kw_defaults)]
            return _calls_nothing([*statement.decorator_list, *defaults])
        case ast.ClassDef():
            headings = [*statement.decorator_list, *statement.bases, *(word.value for word in statement.keywords)]
            return _calls_nothing(headings) and all(_is_harmless(inner) for inner in statement.body)
        case ast.Assign():
            return all(_is_name(target) for target in statement.targets) and _calls_nothing([statement.value])
        case ast.AnnAssign():
            return _is_name(statement.target) and _calls_nothing([statement.value] if statement.value else [])
    return False


def _is_name(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) or (isinstance(target, ast.Tuple) and all(map(_is_name, target.elts)))


def _calls_nothing(expressions: Iterable[ast.expr]) -> bool:
    return all(
        not isinstance(node, ast.Call | ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr)
        or (isinstance(node, ast.Call) and ast.unparse(node.func) in HARMLESS_CALLS)
        for node in _nodes(expressions)
    )


def _nodes(expressions: Iterable[ast.expr]) -> Iterator[ast.AST]:
    for expression in expressions:
        yield from ast.walk(expression)
