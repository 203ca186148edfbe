"""Measure how plain the English of the product is: `python -m tests.plain_english [--places] [PATH ...]`.

It counts relative pronouns ("what", "who", "whose", "whom", "whoever") per 1,000 words of docstrings, comments,
messages and documents, constants of one word, and variables whose names say nothing. Codebases of this field have about
one such pronoun per 1,000 words, because a sentence that names its subject needs none. `tests/test_rooms.py` holds the
limits.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[1]
PRODUCT_FOLDERS = ("resihp", "wrapper", "slurm", "db")
DOCUMENTS = ("README.md", "docs")

RELATIVE_PRONOUNS = {"what", "who", "whose", "whom", "whoever"}
VAGUE_NAMES = {
    "asked", "each", "every", "found", "gone", "had", "held", "known", "left", "lost", "of", "one", "other",
    "said", "says", "seen", "shown", "so", "tell", "tells", "there", "told", "what", "which", "who", "whose",
}  # fmt: skip
"""Names of variables and parameters that do not say what is held."""
MIN_MESSAGE_WORDS = 3
"""A string literal of fewer words is a key or a label and not a sentence."""

WORD_PATTERN = re.compile(r"[A-Za-z](?:[\w'-]*\w)?")
"""A compound such as "what-if" is one word."""
CODE_BLOCK = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"`[^`\n]*`|\]\([^)\n]*\)|[\w/-]+\.md\b")
"""Code and names of files within a line."""
ONE_WORD_CONSTANT = re.compile(r"[A-Z][A-Z0-9]+")


class Text(NamedTuple):
    kind: str
    """`docstring`, `comment`, `message` or `document`."""
    path: Path
    line: int
    text: str


class Name(NamedTuple):
    kind: str
    """`constant` or `variable`."""
    path: Path
    line: int
    name: str


def python_files(paths: Iterable[str] = PRODUCT_FOLDERS) -> list[Path]:
    """Return the Python files at or below `paths`, which are relative to the repository; no database migrations."""
    files = []
    for path in paths:
        start = REPOSITORY / path
        files += [start] if start.suffix == ".py" else sorted(start.rglob("*.py"))
    return [file for file in files if "migrations/versions" not in file.as_posix()]


def documents(paths: Iterable[str] = DOCUMENTS) -> list[Path]:
    """Return the Markdown files at or below `paths`, which are relative to the repository."""
    files = []
    for path in paths:
        start = REPOSITORY / path
        files += [start] if start.suffix == ".md" else sorted(start.rglob("*.md"))
    return files


def texts_of_module(path: Path) -> Iterator[Text]:
    """Yield the docstrings, comments and messages of one Python file."""
    source = path.read_text()
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.add(node.value)
            yield Text("docstring", path, node.lineno, node.value.value)
    inside_f_strings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part for part in node.values if isinstance(part, ast.Constant)]
            inside_f_strings.update(parts)
            yield from _message(path, node.lineno, " _ ".join(str(part.value) for part in parts))
    for node in ast.walk(tree):
        is_string = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_string and node not in docstrings and node not in inside_f_strings:
            yield from _message(path, node.lineno, node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text("comment", path, token.start[0], token.string)


def _message(path: Path, line: int, text: str) -> Iterator[Text]:
    if len(WORD_PATTERN.findall(text)) >= MIN_MESSAGE_WORDS:
        yield Text("message", path, line, text)


def text_of_document(path: Path) -> Text:
    """Return a document without its code, each line where it stood."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match.group().count("\n")

    prose = CODE_SPAN.sub("", CODE_BLOCK.sub(blank, path.read_text()))
    return Text("document", path, 1, prose)


def relative_pronouns(text: Text) -> Iterator[tuple[int, str]]:
    """Yield the line of each relative pronoun of a text, and that line's words."""
    for offset, line in enumerate(text.text.split("\n")):
        for word in WORD_PATTERN.findall(CODE_SPAN.sub("", line)):
            if word.lower() in RELATIVE_PRONOUNS:
                yield text.line + offset, line.strip()


def names_of_module(path: Path) -> Iterator[Name]:
    """Yield the constants of one word and the variables with vague names of one Python file."""
    tree = ast.parse(path.read_text())
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        for target in targets:
            if isinstance(target, ast.Name) and ONE_WORD_CONSTANT.fullmatch(target.id):
                yield Name("constant", path, target.lineno, target.id)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE_NAMES:
            yield Name("variable", path, node.lineno, node.id)
        if isinstance(node, ast.arg) and node.arg in VAGUE_NAMES:
            yield Name("variable", path, node.lineno, node.arg)


def rates(texts: Iterable[Text]) -> dict[str, tuple[int, int]]:
    """Return, by kind of text, the number of relative pronouns and of words."""
    pronouns: Counter[str] = Counter()
    words: Counter[str] = Counter()
    for text in texts:
        pronouns[text.kind] += sum(1 for _ in relative_pronouns(text))
        words[text.kind] += len(WORD_PATTERN.findall(CODE_SPAN.sub("", text.text)))
    return {kind: (pronouns[kind], words[kind]) for kind in words}


def main(arguments: list[str]) -> None:
    show_places = "--places" in arguments
    paths = [argument for argument in arguments if not argument.startswith("--")]
    modules = python_files([path for path in paths if not path.endswith(".md")] if paths else PRODUCT_FOLDERS)
    pages = documents([path for path in paths if path.endswith(".md") or path == "docs"] if paths else DOCUMENTS)
    texts = [text for path in modules for text in texts_of_module(path)]
    texts += [text_of_document(path) for path in pages]
    names = [name for path in modules for name in names_of_module(path)]
    if show_places:
        for text in texts:
            for line, words in relative_pronouns(text):
                print(f"{text.path.relative_to(REPOSITORY)}:{line}: {text.kind}: {words}")
        for name in names:
            print(f"{name.path.relative_to(REPOSITORY)}:{name.line}: {name.kind}: {name.name}")
    for kind, (pronouns, words) in rates(texts).items():
        print(f"{kind}: {pronouns} relative pronouns in {words} words: {1000 * pronouns / max(words, 1):.1f} per 1,000")
    of_kind: dict[str, list[str]] = defaultdict(list)
    for name in names:
        of_kind[name.kind].append(name.name)
    for kind, found_names in of_kind.items():
        print(f"{kind}: {len(found_names)} of one word or a vague name")


if __name__ == "__main__":
    main(sys.argv[1:])
