"""What an attacker, a bad disk or an accident makes of a job's home: seeded mutations, each with a name of its kind.

A mutation changes the copy of a home that the product made (`places.World.renew_hostile`), and says in words what it
did. `DAMAGE` are those that name nothing outside: they may befall one's own home as well. Called by the harness.
"""

from __future__ import annotations

import json
import os
import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from resihp.record import journal, journal_file, journal_format
from tests.hostile_homes import hostile_files, hostile_ledgers, values
from tests.hostile_homes.places import ATTACKER_UID, World, below

JSON_FILES = ("job.json", "run.json", "progress.json", "supervisor.json", "checkpoints/iteration-000020/manifest.json")
JOBS = ("local-1", "local-1", "local-2", "local-3", "4711-r1")
"""Whose folders are mutated; that of the finished one more often."""


@dataclass
class Target:
    """A job of the hostile home, whose files are to be changed, and by what dice."""

    world: World
    name: str
    rng: random.Random
    given_away: set[Path] = field(default_factory=set)
    """What is to stay somebody else's than the attacker's."""

    @property
    def folder(self) -> Path:
        return self.world.home / "jobs" / self.name

    @property
    def local(self) -> Path:
        """The folder of its journal on local disk."""
        return next(iter(sorted(self.world.local.glob(f"{self.name}-*"))))

    @property
    def journals(self) -> list[Path]:
        return [path for path in (self.local / "journal", self.folder / "journal") if path.exists()]

    def shown(self, path: Path) -> str:
        return str(path.relative_to(self.world.attacker.folder))


Mutate = Callable[[Target], str]


def ledger_url(target: Target) -> str:
    """job.json names another ledger."""
    url = target.rng.choice(values.urls(target.world))
    _edit(target.folder / "job.json", lambda content: content | {"ledger": url})
    return f"ledger: {url}"


def victims_own(target: Target) -> str:
    """The journal of a reader's own job, with more in it, and a ledger that is the reader's or root's."""
    victim = target.rng.choice(target.world.readers)
    records = journal_file.read(victim.job / "journal")
    for path in target.journals:
        path.unlink()
        writer = journal_file.Journal(path, sync=False)
        for record in records:
            writer.append(record.entry, record.at)
        for number in range(5):
            writer.append(journal.Suspected(rank=0, node="n1", evidence=f"forged {number}"), records[-1].at + number)
        writer.close()
    url = f"sqlite:///{victim.job}/ledger.db"
    _edit(target.folder / "job.json", lambda content: content | {"ledger": url})
    return f"journal of {victim.name}'s own job, ledger {url}"


def journal_elsewhere(target: Target) -> str:
    """job.json says that the journal is somewhere else."""
    path = target.rng.choice([*values.paths(target.world), str(target.folder / "journal"), str(target.world.home)])
    _edit(target.folder / "job.json", lambda content: content | {"journal": path})
    return f"journal: {path[:100]}"


def json_value(target: Target) -> str:
    """Some values of a JSON file are others."""
    path = target.rng.choice([target.folder / name for name in JSON_FILES if (target.folder / name).exists()])
    content = json.loads(path.read_bytes())
    words = []
    for _ in range(target.rng.choice((1, 1, 2, 4))):
        place = target.rng.choice(list(values.places_in(content)))
        new = values.instead_of(values.value_at(content, place), target.world, target.rng)
        content = values.put(content, place, new)
        words.append(f"{'.'.join(map(str, place)) or 'all'}={str(new)[:60]!r}")
    path.write_bytes(values.to_json(content))
    return f"{target.shown(path)}: {', '.join(words)}"


def supervisor_address(target: Target) -> str:
    """supervisor.json, and a lock that is held, of a job that does not run."""
    address = {"host": "127.0.0.1", "port": target.world.listeners.port, "pid": target.rng.choice((1, os.getpid()))}
    (target.folder / "supervisor.json").write_bytes(json.dumps(address).encode())
    (target.folder / "supervisor.lock").touch()
    return f"supervisor.json: {address}"


def journal_entry(target: Target) -> str:
    """Some fields of journal entries are others, in records whose checksums are right."""
    records = [msgspec.to_builtins(record) for record in journal_file.read(target.journals[0])]
    words = []
    for _ in range(target.rng.choice((1, 3, 10))):
        number = target.rng.choice((0, len(records) - 1, target.rng.randrange(len(records))))
        record = records[number]
        place = target.rng.choice(list(values.places_in(record))[1:])
        new = values.instead_of(values.value_at(record, place), target.world, target.rng)
        if isinstance(new, int) and not -(2**63) <= new < 2**64:
            new = float(new)
        values.put(record, place, new)
        words.append(f"{number}.{'.'.join(map(str, place))}={str(new)[:40]!r}")
    content = journal_format.MAGIC + b"".join(_frame(_packed(record)) for record in records)
    for path in target.journals:
        path.write_bytes(content)
    return f"journal: {', '.join(words)}"


def journal_of_another_job(target: Target) -> str:
    """The journal on local disk is of an earlier job of that name, which has not ended."""
    records = journal_file.read(target.local / "journal")
    (target.local / "journal").unlink()
    writer = journal_file.Journal(target.local / "journal", sync=False)
    for record in records[: target.rng.randrange(1, len(records))]:
        writer.append(record.entry, record.at - 86_400)
    writer.close()
    return "local journal: of another job, begun a day before"


def bytes_of_journal(target: Target) -> str:
    """A journal with flipped bits, cut off, or with something behind it."""
    path = target.rng.choice(target.journals)
    return f"{target.shown(path)}: {_spoil(path, target.rng)}"


def last_record_of_journal(target: Target) -> str:
    """One bit of the last record on local disk is another, or the record is cut off."""
    path = target.local / "journal"
    content = path.read_bytes()
    last = len(_frame(journal_format.encode(journal_file.read(path)[-1])))
    at = len(content) - target.rng.randrange(1, last)
    if target.rng.random() < 0.7:
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << target.rng.randrange(8)]) + content[at + 1 :])
        return f"local journal: a bit of the last record, byte {at} of {len(content)}, flipped"
    path.write_bytes(content[:at])
    return f"local journal: cut off in the last record, at byte {at} of {len(content)}"


def bytes_of_any_file(target: Target) -> str:
    """Some file with flipped bits, cut off, empty, or with something behind it."""
    files = [path for path in hostile_files.everything(target.folder) if path.is_file()]
    path = target.rng.choice(files)
    return f"{target.shown(path)}: {_spoil(path, target.rng)}"


def hostile_names_in_logs(target: Target) -> str:
    """Log files whose names and lines steer terminals."""
    for name in (f"{values.EVIL.replace('/', '_')}.rank1.log", "\x9b31m.log", "-n.log", "a\nb.log", "x" * 240 + ".log"):
        (target.folder / "logs" / name).write_text(f"{values.EVIL}\n" * 3)
    os.close(os.open(os.fsencode(target.folder / "logs") + b"/n1.\xff\xfe.rank7.log", os.O_CREAT | os.O_WRONLY, 0o644))
    return "logs: names and lines with escapes"


def hostile_job_name(target: Target) -> str:
    """A job's folder with a name that steers terminals."""
    names = (
        "\x1b[31mred\x1b[0m",
        "a\nresihp: all is well",
        "--help",
        "-n",
        " ",
        "x" * 255,
        "..evil",
        "$(id)",
        "local-1 ",
    )
    name = target.rng.choice(names)
    target.folder.rename(target.folder.with_name(name))
    target.name = name
    return f"job's folder: {name[:40]!r}"


def checkpoint_names(target: Target) -> str:
    """Checkpoint folders with numbers and names that no checkpoint has."""
    root = target.folder / "checkpoints"
    for name in ("iteration-" + "9" * 200, "iteration-000021", "iteration-000000", "iteration-\u0661\u0662\u0663456"):
        (root / name).mkdir()
        (root / name / "manifest.json").write_text('{"format": 1, "iteration": ' + "9" * 300 + ', "parts": []}')
    return "checkpoints: numbers without end"


KINDS: Mapping[str, Mutate] = {
    "ledger URL": ledger_url,
    "victim's journal": victims_own,
    "journal elsewhere": journal_elsewhere,
    "JSON value": json_value,
    "supervisor address": supervisor_address,
    "journal entry": journal_entry,
    "journal of another job": journal_of_another_job,
    "journal bytes": bytes_of_journal,
    "journal's last record": last_record_of_journal,
    "bytes of a file": bytes_of_any_file,
    "log names": hostile_names_in_logs,
    "job name": hostile_job_name,
    "checkpoint names": checkpoint_names,
    "ledger bytes": hostile_ledgers.flipped,
    "ledger rows": hostile_ledgers.rows,
    "ledger schema": hostile_ledgers.schema,
    "ledger WAL": hostile_ledgers.wal,
    "ledger hot journal": hostile_ledgers.hot_journal,
    "ledger beside links": hostile_ledgers.links_beside,
    "file is a link": hostile_files.become_link,
    "file is a pipe": hostile_files.become_pipe,
    "file is a device": hostile_files.become_device,
    "file is a socket": hostile_files.become_socket,
    "file is a folder": hostile_files.become_folder,
    "file is giant": hostile_files.become_giant,
    "file is gone": hostile_files.become_nothing,
    "folder is a link": hostile_files.folder_becomes_link,
    "many files": hostile_files.many,
    "modes": hostile_files.modes,
    "owners": hostile_files.owners,
    "times": hostile_files.times,
    "planted names": hostile_files.planted,
}
DAMAGE = frozenset(
    {"journal of another job", "journal bytes", "journal's last record", "bytes of a file", "ledger bytes", "times"}
    | {"file is a pipe", "file is a folder", "file is giant", "file is gone", "ledger schema", "checkpoint names"}
)
"""What may befall a home by accident: nothing in it says where to write."""
OFTEN = (
    "ledger URL",
    "ledger URL",
    "JSON value",
    "JSON value",
    "file is a link",
    "file is a pipe",
    "ledger hot journal",
)
"""Have further turns: what they draw from is large."""
CHANGES_WHAT_JOURNALS_SAY = frozenset({"journal entry", "victim's journal"})


@dataclass(frozen=True)
class Mutation:
    """One or several kinds, applied one after the other, by the dice of `seed` and `number`."""

    seed: int
    number: int
    kinds: tuple[str, ...]

    @classmethod
    def drawn(cls, seed: int, number: int) -> Mutation:
        """Each kind has its turn; of four, one comes with a second and a third kind."""
        rng = random.Random(f"{seed}/{number}/kinds")
        names = list(KINDS)
        turns = [*names, *OFTEN]
        kinds = [turns[number % len(turns)]]
        if rng.random() < 0.25:
            kinds += rng.sample(names, rng.choice((1, 2)))
        return cls(seed, number, tuple(dict.fromkeys(kinds)))

    @property
    def is_damage(self) -> bool:
        return all(kind in DAMAGE for kind in self.kinds)

    def apply(self, world: World) -> tuple[Target, list[str]]:
        """Change the hostile home, which was renewed before. Returns whose folder, and what was done in words."""
        rng = random.Random(f"{self.seed}/{self.number}")
        target = Target(world, rng.choice(JOBS), rng)
        words = []
        for kind in self.kinds:
            try:
                words.append(KINDS[kind](target))
            except (OSError, ValueError, TypeError, KeyError, IndexError, StopIteration, msgspec.MsgspecError) as error:
                if len(self.kinds) == 1:
                    raise
                words.append(f"{kind}: not possible after the others: {error}"[:200])
            except Exception as error:
                if len(self.kinds) == 1 or type(error).__module__.partition(".")[0] not in ("sqlite3", "resihp"):
                    raise
                words.append(f"{kind}: not possible after the others: {error}"[:200])
        for path in (*below(world.lure), *below(world.local)):
            if path.lstat().st_uid == 0 and path not in target.given_away:
                os.chown(path, ATTACKER_UID, ATTACKER_UID, follow_symlinks=False)
        return target, words


def _edit(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path.write_bytes(values.to_json(change(json.loads(path.read_bytes()))))


def _spoil(path: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    how = rng.choice(("flipped", "flipped", "cut", "longer", "zeros", "empty"))
    if how == "flipped" and content:
        places = [rng.randrange(len(content)) for _ in range(rng.choice((1, 1, 8, 64)))]
        for at in places:
            content[at] ^= 1 << rng.randrange(8)
        how = f"bits flipped at {places[:4]}"
    elif how == "cut" and content:
        del content[rng.randrange(len(content)) :]
        how = f"cut to {len(content)} bytes"
    elif how == "zeros" and content:
        at = rng.randrange(len(content))
        content[at : at + 512] = bytes(len(content[at : at + 512]))
        how = f"zeros from byte {at}"
    elif how == "longer":
        content += rng.choice((rng.randbytes(4096), bytes(content), b"\0" * 4096, b"[" * 100_000))
    else:
        content.clear()
        how = "empty"
    path.write_bytes(content)
    return how


def _packed(record: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(record)
    except (UnicodeEncodeError, OverflowError, RecursionError):
        return msgspec.msgpack.encode(json.loads(json.dumps(record).encode("ascii", "replace"), strict=False))


def _frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body
