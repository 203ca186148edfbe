"""Commands of Slurm that our messages tell users to type: each does what is said of it, and nothing beyond.

Found in the texts of `wrapper` and `slurm` themselves, so that a new one is tried, too.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from tests.integration.cluster import Cluster

SOURCES = [path for room in ("wrapper", "slurm") for path in (Path(__file__).parents[2] / room).rglob("*.py")]
PLACEHOLDER = "{}"
_COMMAND = re.compile(r"\b(sinfo|squeue|scontrol|scancel)((?: +(?:'[^']*'|[^\s;,)('`]+))+)")
LOOKING = ("ping", "show")
"""What of scontrol changes nothing."""


def texts(path: Path) -> Iterator[str]:
    """What the strings of a module say, with PLACEHOLDER for what is put in; not its docstrings."""
    inside: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inside.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in node.values}
            yield "".join(str(p.value) if isinstance(p, ast.Constant) else PLACEHOLDER for p in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


def advised() -> Iterator[tuple[str, list[str]]]:
    """(where, words) of each command: its options with their values, and what scontrol or scancel is given."""
    for path in SOURCES:
        for text in texts(path):
            for found in _COMMAND.finditer(text):
                words = words_of(found[1], shlex.split(found[2]))
                if len(words) > 1:  # else a sentence is about the command
                    yield f"{path.name}: {text[:100]}", words


def words_of(command: str, rest: list[str]) -> list[str]:
    """The command without the sentence that it stands in: that begins with a word which is no option's value."""
    words = [command]
    for word in rest:
        value = words[-1] in ("-o", "-n", "-p", "-j", "-w", "show") or word in (PLACEHOLDER, "%s")
        if not (word.startswith("-") or value or (command == "scontrol" and word in (*LOOKING, "requeue"))):
            break
        words.append(word)
    return words


ADVISED = list(advised())


def test_there_is_advice() -> None:
    assert {words[0] for _, words in ADVISED} == {"sinfo", "squeue", "scontrol", "scancel"}
    assert len(ADVISED) > 15


def test_only_named_jobs_are_cancelled() -> None:
    """`scancel --me --name ...` would end other jobs, too, and with less of it all that the user has."""
    for where, words in ADVISED:
        if words[0] == "scancel":
            named = words[2:] if words[1] == "--signal=CONT" else words[1:]
            assert named in ([PLACEHOLDER], ["%s"]), where


def test_what_lists_or_tells_does_so_and_nothing_is_changed(real_cluster: Cluster) -> None:
    job = real_cluster.run("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true").stdout.strip()
    try:
        for where, words in ADVISED:
            if words[0] == "scancel" or (words[0] == "scontrol" and words[1] not in LOOKING):
                continue
            name = "n1" if {"-n", "node"} & {*words} else "main" if {"-p", "partition"} & {*words} else job
            argv = [word.replace(PLACEHOLDER, name).replace("%s", name) for word in words]
            done = real_cluster.run(*argv, check=False)
            assert (done.returncode, done.stderr) == (0, ""), f"{where}: {' '.join(argv)}"
            assert done.stdout.strip(), f"{where}: {' '.join(argv)} tells nothing"
    finally:
        real_cluster.run("scancel", job)
