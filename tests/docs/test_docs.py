"""What README and docs say can be followed: links lead somewhere, commands parse, keys and files exist."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from resihp.wrapper.cli import app
from resihp.wrapper.config.schema import Configuration, Section
from resihp.wrapper.config.sources import read

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("slurm/**/*.md")])
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}

FENCE = re.compile(r"^( *)```([a-z]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
INLINE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
KEY = re.compile(r"^\[([a-z]+)\] ([a-z_0-9]+)(?: =|$)")
VARIABLE = re.compile(r"\bRESIHP_[A-Z_]+\b")
PLACE = re.compile(r"(?:resihp|wrapper|slurm|db|tests|docs|benchmarks|examples)(?:/[\w.*-]+)+/?")
MODULE = re.compile(r"(?:resihp|wrapper|slurm|db)(?:\.[a-z_]+)+(?:\.[A-Z]\w*)?")
SHELL = ("", "bash", "sh")
PROGRAMS = re.compile(r"(?:\S*/)?(?:resihp|make|python3?)")
WITHOUT_ACTION = re.compile(r"resihp (?:plan --(?!.*--tune)|--help|\S+ --help)")
"""Commands that need no job and change nothing: those are run."""


def fences(page: Path) -> Iterator[tuple[str, str]]:
    for match in FENCE.finditer(TEXTS[page]):
        yield match[2], match[3]


def prose(page: Path) -> str:
    return FENCE.sub("", TEXTS[page])


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    found: dict[str, int] = {}
    for title in HEADING.findall(prose(page)):
        plain = re.sub(r"[^\w\- ]", "", re.sub(r"`|\[([^\]]*)\]\([^)]*\)", r"\1", title).strip().lower())
        slug = plain.replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return {f"{slug}-{number}" if number else slug for slug, most in found.items() for number in range(most + 1)}


def commands(page: Path) -> Iterator[str]:
    """The commands in a page's blocks: lines of a shell, continued lines put together, parts of a line apart."""
    for language, text in fences(page):
        if language not in SHELL:
            continue
        for line in re.sub(r"\\\n\s*", "", text).splitlines():
            words = shlex.shlex(line.strip().removeprefix("exec "), posix=True, punctuation_chars=";|&")
            words.whitespace_split = True
            try:
                parts = list(words)
            except ValueError:  # an apostrophe: this is not a command but what one printed
                continue
            part: list[str] = []
            for word in [*parts, ";"]:
                if set(word) <= set(";|&"):
                    if part and PROGRAMS.fullmatch(part[0]):
                        yield shlex.join(part)
                    part = []
                elif not part and re.match(r"[A-Z_]+=", word):
                    continue  # a variable for this command
                else:
                    part.append(word)


def inline_commands(page: Path) -> Iterator[str]:
    """Commands in running text, which may be cut short: `resihp history failures`."""
    for span in INLINE.findall(prose(page)):
        if span.startswith("resihp "):
            yield " ".join(span.split())


@functools.cache
def program(top: Path) -> str:
    """All Python text of a folder but this test's, or a file's text."""
    files = [top] if top.is_file() else top.rglob("*.py")
    return "\n".join(file.read_text(encoding="utf-8") for file in files if file != Path(__file__))


def resolve(words: list[str]) -> tuple[Any, list[str]]:
    """The command that these words name, and what is left of them."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"there is no {words[0]} in {sorted(command.commands)}"
        command, words = command.commands[words[0]], words[1:]
    return command, words


def parse(command: str) -> None:
    found, words = resolve(shlex.split(command)[1:])
    if "--help" in words or hasattr(found, "commands"):
        return
    try:
        found.make_context(found.name, words)
    except Exception as error:  # noqa: BLE001  typer has classes of its own for what click calls UsageError
        pytest.fail(f"{command}: {error}")


def test_readme_says_how_resihp_gets_on_the_path_before_it_is_typed() -> None:
    """`make` puts it into .venv alone."""
    lines = [line for _, text in fences(ROOT / "README.md") for line in text.splitlines()]
    typed = next(number for number, line in enumerate(lines) if line.startswith("resihp "))
    assert any(line.startswith(". .venv/bin/activate") for line in lines[:typed])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{target} is not there"
        assert there.is_relative_to(ROOT), f"{target} is outside of the repository"
        if anchor:
            assert anchor in anchors(there), f"{target}: {there.name} has {sorted(anchors(there))}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_blocks_parse(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for command in commands(page):
        program, *words = shlex.split(command)
        if program.endswith("resihp"):
            parse(command)
        elif program == "make":
            for word in words:
                assert word in targets or "=" in word, f"{command}: the Makefile has {sorted(targets)}"
        elif "-m" in words:
            module = words[words.index("-m") + 1]
            assert module == "pytest" or importlib.util.find_spec(module), f"{command}: there is no {module}"
            for word in words[words.index("-m") + 2 :]:
                assert not word.startswith("tests") or (ROOT / word).exists(), f"{command}: there is no {word}"
        elif words and words[0].endswith(".py") and "/" in words[0]:
            assert (ROOT / words[0]).is_file(), f"{command}: there is no {words[0]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_the_text_exist(page: Path) -> None:
    for command in inline_commands(page):
        try:
            found, words = resolve(shlex.split(re.sub(r"[|]\S+|\.\.\.|…", "", command))[1:])
        except ValueError:
            continue
        known = {name for parameter in getattr(found, "params", ()) for name in parameter.opts} | {"--help", "--"}
        before = words[: words.index("--")] if "--" in words else words
        for word in before:
            assert not word.startswith("-") or word.partition("=")[0] in known, f"{command}: no {word}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_need_no_job_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESIHP_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for command in filter(WITHOUT_ACTION.match, commands(page)):
        outcome = CliRunner().invoke(app, shlex.split(command)[1:])
        assert outcome.exit_code == 0, f"{command}: {outcome.output} {outcome.exception}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_keys_and_job_files_are_valid(page: Path, tmp_path: Path) -> None:
    for span in INLINE.findall(prose(page)):
        if found := KEY.match(" ".join(span.split())):
            assert has_key(found[1], found[2]), f"`{span}`: there is no such key"
    for number, text in enumerate(text for language, text in fences(page) if language == "toml"):
        if not set(tomllib.loads(text)) & set(Configuration.model_fields):
            continue  # a model or hardware for `resihp plan`
        file = tmp_path / f"{number}.toml"
        file.write_text(text, encoding="utf-8")
        read({}, file, site=(), authority=file)


def has_key(section: str, key: str) -> bool:
    field = Configuration.model_fields.get(section)
    model = None if field is None else field.annotation
    return isinstance(model, type) and issubclass(model, Section) and key in model.model_fields


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_variables_are_read_by_somebody(page: Path) -> None:
    code = "".join(program(ROOT / top) for top in ("resihp", "wrapper", "slurm", "tests", "Makefile"))
    for name in set(VARIABLE.findall(TEXTS[page])) - {"RESIHP_SECTION__KEY"}:
        section, separator, key = name.removeprefix("RESIHP_").lower().partition("__")
        assert has_key(section, key) if separator else name in code, f"nobody reads {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_modules_that_are_named_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # tells of what was
    for span in INLINE.findall(prose(page)):
        if PLACE.fullmatch(span):
            assert any(ROOT.glob(span.rstrip("/"))), f"`{span}` is not there"
        elif MODULE.fullmatch(span):
            words = [word for word in span.split(".") if not word[0].isupper()]
            names = [os.path.join(*words[:length]) for length in (len(words), len(words) - 1)]
            there = [(ROOT / name).is_dir() or (ROOT / f"{name}.py").is_file() for name in names if name]
            assert any(there), f"`{span}` is not there"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_notebooks_and_scripts_import_is_there(page: Path) -> None:
    for line in re.findall(r"^(?:from|import) .*$", "".join(t for kind, t in fences(page) if kind == "python"), re.M):
        if re.match(r"(?:from|import) (?:resihp|db)\b", line):
            exec(line, {})


@pytest.mark.parametrize("option", ["--slow", "--hurts"])
def test_the_plan_that_is_shown_is_the_one_that_is_made(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    blocks = [text for _, text in fences(ROOT / "docs" / "planning.md")]
    asked = next(n for n, text in enumerate(blocks) if re.match(f"resihp plan .*{option}", text))
    outcome = CliRunner().invoke(app, shlex.split(blocks[asked].splitlines()[0])[1:])
    answer = " ".join(re.sub("─+", "─", outcome.output).split())
    for line in re.sub(r"\(decided in .*|in \S+ s\.$|(?<=─)─+", "", blocks[asked + 1]).splitlines():
        assert " ".join(line.split()) in answer, f"{line}: not in {outcome.output}"


def test_tests_that_are_named_exist() -> None:
    """As `test_file.py::test_name`."""
    named = {pair for text in TEXTS.values() for pair in re.findall(r"\b(test_\w+\.py)::(test_\w+)", text)}
    assert named
    for file, name in sorted(named):
        texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob(file)]
        assert any(f"def {name}(" in text for text in texts), f"{file} has no {name}"


def test_messages_are_those_of_the_code() -> None:
    """Of each quoted message the parts between `...` stand in the code, where literals are put together."""
    code = "".join(program(ROOT / top) for top in ("resihp", "wrapper", "slurm", "db"))
    code = re.sub(r"""["']\s*\n\s*f?["']""", "", code)
    rows = [line for line in TEXTS[ROOT / "docs" / "troubleshooting.md"].splitlines() if line.startswith("| `")]
    assert len(rows) > 50
    for row in rows:
        for message in re.findall(r"`([^`]+)`", row.split(" | ")[0]):
            for part in filter(lambda part: len(part) > 3, re.split(r"\s*\.\.\.\s*", message)):
                assert part in code, f"`{message}`: nothing says {part!r}"


def test_pages_are_found() -> None:
    assert {"README.md", "slurm.md", "configuration.md"} <= {page.name for page in PAGES}
