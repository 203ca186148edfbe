"""Limits on how the product's texts and names read, measured by `tests.plain_english`.

A folder or a name that misses a limit stands in a list here. An entry that is no longer needed fails as well: the lists
only get shorter.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.plain_english import (
    REPOSITORY,
    Name,
    Text,
    documents,
    names_of_module,
    python_files,
    rates,
    text_of_document,
    texts_of_module,
)

LIMITS: Mapping[str, float] = {"docstring": 4.0, "comment": 4.0, "message": 2.0, "document": 2.0}
"""Relative pronouns per 1,000 words, by kind of text."""
MIN_WORDS = 500
"""A folder or document with fewer words of a kind is not measured by itself."""
ABOVE_LIMIT: Mapping[tuple[str, str], int] = {}
"""(kind, folder or document) of texts above their limit, with the whole number that they may have."""
ONE_WORD_CONSTANTS: Mapping[str, int] = {
    "CAUSES": 1,
    "CERTAINTY": 1,
    "CHUNKS": 1,
    "COLUMNS": 6,
    "DECISIONS": 1,
    "DETECTORS": 1,
    "FORMAT": 1,
    "GROUPS": 1,
    "KINDS": 1,
    "MAGIC": 2,
    "MANIFEST": 1,
    "MODEL": 1,
    "OPTYPES": 1,
    "PATH": 1,
    "PREFIX": 2,
    "QUEUED": 1,
    "SCHEMA": 1,
    "SHARES": 1,
    "SIGNATURES": 1,
    "TABLES": 1,
    "TEMPLATES": 1,
    "TRAITS": 1,
    "VERSION": 3,
    "XIDS": 1,
}
"""Module constants of one word, with the number of modules that have one of that name."""
MAX_ONE_WORD_CONSTANTS = 60
VAGUE_VARIABLES: Mapping[str, int] = {
    "db": 1,
    "db/reading": 4,
    "resihp": 1,
    "resihp/controller": 22,
    "resihp/detector": 3,
    "resihp/parallelism": 2,
    "resihp/pipeline": 1,
    "resihp/protocol": 13,
    "resihp/record": 6,
    "resihp/scheduler": 2,
    "resihp/simulator": 1,
    "slurm": 3,
    "wrapper": 1,
    "wrapper/agent": 3,
    "wrapper/config": 1,
    "wrapper/sinks": 1,
    "wrapper/supervisor": 2,
}
"""Folders with variables whose names say nothing, with how many they may have."""

PYTHON_FILES = python_files()
ALL_TEXTS = [text for path in PYTHON_FILES for text in texts_of_module(path)]
ALL_NAMES = [name for path in PYTHON_FILES for name in names_of_module(path)]


def room(path: Path) -> str:
    """Return the folder that a file is counted in: two levels, as `resihp/detector`."""
    return "/".join(path.relative_to(REPOSITORY).parts[:-1][:2])


def rates_by_room() -> dict[tuple[str, str], float]:
    groups: dict[str, list[Text]] = defaultdict(list)
    for text in ALL_TEXTS:
        groups[room(text.path)].append(text)
    for path in documents():
        groups[path.relative_to(REPOSITORY).as_posix()].append(text_of_document(path))
    return {
        (kind, group): 1000 * pronouns / words
        for group, texts in groups.items()
        for kind, (pronouns, words) in rates(texts).items()
        if words >= MIN_WORDS
    }


def test_sentences_name_their_subjects() -> None:
    above = {key: rate for key, rate in rates_by_room().items() if rate > LIMITS[key[0]]}
    grown = {key: round(rate, 1) for key, rate in above.items() if rate > ABOVE_LIMIT.get(key, LIMITS[key[0]])}
    assert not grown, "relative pronouns per 1,000 words; see them with: python -m tests.plain_english --places PATH"
    now = {key: math.ceil(above.get(key, 0.0)) for key in ABOVE_LIMIT}
    fewer = {key: rate for key, rate in now.items() if rate < ABOVE_LIMIT[key]}
    assert not fewer, "fewer by now: lower the numbers in ABOVE_LIMIT, or take them out"


@pytest.mark.parametrize("kind", ["docstring", "message"])
def test_all_texts_together_are_plain(kind: str) -> None:
    pronouns, words = rates(ALL_TEXTS)[kind]
    assert 1000 * pronouns / words <= LIMITS[kind]


def counted(names: list[Name]) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for name in names:
        counts[name.name if name.kind == "constant" else room(name.path)] += 1
    return dict(counts)


def test_constants_say_their_unit_or_noun() -> None:
    constants = counted([name for name in ALL_NAMES if name.kind == "constant"])
    new = {name: count for name, count in constants.items() if count > ONE_WORD_CONSTANTS.get(name, 0)}
    assert not new, "constants of one word: add a noun or a unit, such as MIN_SAMPLES or PROBE_WINDOW_S"
    fewer = {name for name, count in ONE_WORD_CONSTANTS.items() if constants.get(name, 0) < count}
    assert not fewer, "fewer by now: lower the numbers in ONE_WORD_CONSTANTS, or take them out"
    assert sum(constants.values()) <= MAX_ONE_WORD_CONSTANTS


def test_variables_are_nouns_of_their_contents() -> None:
    variables = counted([name for name in ALL_NAMES if name.kind == "variable"])
    new = {folder: count for folder, count in variables.items() if count > VAGUE_VARIABLES.get(folder, 0)}
    assert not new, "variables named found, told, one, each and so on: name what they hold"
    fewer = {folder for folder, count in VAGUE_VARIABLES.items() if variables.get(folder, 0) < count}
    assert not fewer, "fewer by now: lower the numbers in VAGUE_VARIABLES, or take them out"
