"""Values that hurt whoever believes them: paths and URLs that lead to others' files and to sockets, texts that steer a
terminal, numbers beyond any type, and shapes that no reader expects. Called by the mutations."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from tests.hostile_homes.places import World

EVIL = "\x1b]0;owned\x07\x1b[31mred\x1b[0m\r\nresihp: all is well\u202e<script>alert(1)</script>[/b]{{7*7}}$(id)"
RAW = {
    "@deep list@": "[" * 100_000,
    "@deep object@": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "@great integer@": "1" + "0" * 400,
    "@too great an integer@": "1" + "0" * 5_000,
    "@beyond a float@": "1e999",
    "@not a number@": "NaN",
    "@half a character@": '"\\ud800"',
}
"""Pieces of JSON that no encoder writes, by what stands for them until the text is made."""


def paths(world: World) -> list[str]:
    """To files of the reader and root, to devices, and to nowhere."""
    people = (world.reader, world.root)
    leading = [
        f"{person.folder}/{name}"
        for person in people
        for name in (
            ".ssh/authorized_keys",
            ".ssh/authorized_keys2",
            ".ssh/id_ed25519",
            "home/jobs/local-1/ledger.db",
            "home/jobs/local-1/journal",
            "home/jobs/local-1/job.json",
            "made-by-somebody",
            "state",
        )
    ]
    return [
        *leading,
        "../../../../reader/.ssh/authorized_keys2",
        "~/made-by-somebody",
        f"{world.home}/pipe",
        f"{world.home}/jobs/local-2",
        "/dev/zero",
        "/dev/tty",
        "/dev/full",
        "/proc/self/environ",
        "/proc/self/mem",
        "/",
        ".",
        "",
        "a\0b",
        "x" * 5_000,
        "a/" * 3_000,
        "\udce9".encode("utf-8", "surrogatepass").decode("latin-1"),
    ]


def urls(world: World) -> list[str]:
    """Of ledgers: in others' files, and on servers, which are ours and count who comes."""
    port, folder = world.listeners.port, world.listeners.folder
    files = [f"sqlite:///{path}" for path in paths(world) if path.startswith(("/", "~", ".."))]
    key = world.reader.folder / ".ssh" / "id_ed25519"
    return [
        *files,
        f"sqlite:///{world.reader.folder}/.ssh/authorized_keys2?mode=rwc",
        f"sqlite:///file:{world.reader.folder}/made-by-somebody?uri=true&mode=rwc",
        f"sqlite:///{world.reader.job}/ledger.db?vfs=unix-none&nolock=1",
        f"postgresql://me@127.0.0.1:{port}/ledger",
        f"postgres://me:secret@127.0.0.1:{port}/ledger",
        f"postgresql+psycopg://me@localhost:{port}/ledger?connect_timeout=600",
        f"postgresql://me@db.example/ledger?hostaddr=127.0.0.1&port={port}",
        f"postgresql://me@/ledger?host={folder}",
        f"postgresql:///ledger?host=127.0.0.1&port={port}&passfile={world.reader.folder}/.pgpass",
        f"postgresql://me@127.0.0.1:{port}/ledger?sslmode=require&sslkey={key}&sslcert={key}",
        f"postgresql://me@127.0.0.1:{port}/ledger?options=-c%20search_path%3Devil&service=other",
        f"postgresql://me@127.0.0.1:{port},127.0.0.1:{port}/ledger?target_session_attrs=any",
        f"mysql://me@127.0.0.1:{port}/ledger",
        f"postgresql://me@127.0.0.1:{port}99/ledger",
        "sqlite://",
        "sqlite",
        "sqlite:///:memory:",
        "postgresql://[::1/x",
        EVIL,
    ]


def texts() -> list[str]:
    return [EVIL, "", " ", "\0", "a\0b", "--help", "-", "%s%n", "\x9b31m", "x" * 100_000, "\u2028\u202e", "ü" * 300]


def numbers() -> list[Any]:
    return [
        *(-1, 0, 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1),
        *(1e308, -1e308, 1e-320, 1e15, -62_135_596_801.0, 253_402_300_800.0, 0.1),
        *("@great integer@", "@too great an integer@", "@beyond a float@", "@not a number@"),
    ]


def shapes() -> list[Any]:
    return [None, True, [], {}, [[]], {"": ""}, [1, "a", None], 1, "text", "@deep list@", "@deep object@"]


def instead_of(value: Any, world: World, rng: random.Random) -> Any:
    """Something hostile in place of what stands there; of its own kind rather than of another."""
    kinds: list[list[Any]]
    if isinstance(value, str):
        kinds = [paths(world), paths(world), urls(world), texts(), shapes(), ["@half a character@"]]
    elif isinstance(value, bool) or value is None or isinstance(value, list | dict):
        kinds = [shapes(), paths(world), numbers(), urls(world)]
    else:
        kinds = [numbers(), numbers(), numbers(), shapes(), texts()]
    return rng.choice(rng.choice(kinds))


def places_in(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in decoded JSON or msgpack: keys and indexes from its root, whose own place is empty."""
    yield at
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places_in(item, (*at, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from places_in(item, (*at, index))


def value_at(value: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        value = value[key]
    return value


def put(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """`value` with something else at that place; it is changed, unless the place is its root."""
    if not place:
        return new
    value_at(value, place[:-1])[place[-1]] = new
    return value


def to_json(value: Any) -> bytes:
    """As JSON, with pieces that no encoder writes where their names stand."""
    text = json.dumps(value)
    for name, piece in RAW.items():
        text = text.replace(json.dumps(name), piece)
    return text.encode()
