"""What may stand in a configuration's values: sizes, times, names for Slurm, mounts. Raises ValueError in words.

Names and options end in batch scripts: nothing passes that a shell or sbatch would read as more than itself. Used by
`wrapper.config.schema` alone.
"""

from __future__ import annotations

import difflib
import math
import re
from pathlib import Path

from pydantic import SecretStr

from resihp.errors import ConfigurationError
from resihp.pipeline.schedules import SCHEDULE_NAMES

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(I?)B", re.IGNORECASE)


def size(text: object) -> int | None:
    """Bytes of `80GB`, `79.5 GiB`, `512MB`: powers of 1000, with an i of 1024. Raises ValueError."""
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ValueError("not a size with a unit; examples: 80GB, 79.5GiB, 512MB")
    number, letter, binary = match.groups()
    unit = float(1024 if binary else 1000) ** " KMGTP".index(letter.upper() or " ")
    found = round(float(number) * unit)
    if found < 1:
        raise ValueError("must be more than nothing")
    return found


_DURATION = re.compile(r"(?:(\d+)d)?\s*(?:(\d+)h)?\s*(?:(\d+)m)?\s*(?:(\d+)s)?")
_SLURM_TIME = re.compile(r"(?:(\d+)-)?(\d+):(\d+):(\d+)")


def duration(text: object) -> float | None:
    """Seconds of `24h`, `1h30m`, `2d`, `45s`, or Slurm's `[days-]hours:minutes:seconds`. Raises ValueError."""
    if text is None or (
        isinstance(text, float) and text > 0 and math.isfinite(text)
    ):  # defaults pass through here, too
        return text
    found = isinstance(text, str) and (_DURATION.fullmatch(text.strip()) or _SLURM_TIME.fullmatch(text.strip()))
    if not found or not any(found.groups()):
        raise ValueError("not a time with its unit; examples: 24h, 1h30m, 45s, 2-00:00:00")
    seconds = sum(int(part or 0) * unit for part, unit in zip(found.groups(), (86400, 3600, 60, 1), strict=True))
    if not 0 < seconds < 10 * 365 * 86400:
        raise ValueError("must be more than nothing, and less than ten years")
    return float(seconds)


NEVER = "never"


def duration_or_never(text: object) -> float | None:
    """Seconds as `duration` reads them; None for `never`. Raises ValueError."""
    if text == NEVER:
        return None
    try:
        return duration(text)
    except ValueError as error:
        raise ValueError(f"{error}; or {NEVER}") from None


_PLAIN = re.compile(r"[A-Za-z0-9_.,:+@/-]*")
_FEATURES = re.compile(r"[A-Za-z0-9_.,:+@/*&|!()\[\]-]*")


def plain(name: str) -> str:
    """A name that Slurm takes as it is, and that no shell would read otherwise. Raises ValueError."""
    if not _PLAIN.fullmatch(name) or name.startswith("-"):
        raise ValueError("must consist of letters, digits and _ . , : + @ / -")
    return name


def features(text: str) -> str:
    """A constraint as sbatch takes it, such as `a100&nvlink`. Raises ValueError."""
    if not _FEATURES.fullmatch(text) or text.startswith("-"):
        raise ValueError("must consist of feature names joined with & | , and brackets")
    return text


_PORTS = re.compile(r"(\d{1,5})-(\d{1,5})", re.ASCII)
LEAST_PORTS = 16
"""A node may have four of our listeners a job, and several jobs."""


def ports(text: str) -> str:
    """A range such as `60001-63000`. Raises ValueError."""
    ports_of(text)
    return text


def ports_of(text: str) -> tuple[int, int] | None:
    """The first and the last of a range; None without one. Raises ValueError."""
    if not text:
        return None
    found = _PORTS.fullmatch(text)
    if found is None:
        raise ValueError("must be a range of ports, as 60001-63000")
    first, last = int(found[1]), int(found[2])
    if not 1024 <= first <= last <= 65535:
        raise ValueError("must lie within 1024-65535, the lower port first")
    if last - first + 1 < LEAST_PORTS:
        raise ValueError(f"must have {LEAST_PORTS} ports at least: each node of a job needs some, of every job there")
    return first, last


def gpu_type(name: str) -> str:
    """A type of GPUs as a site calls it in Slurm. Raises ValueError."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]*", name) or name.startswith("-") or name.isdigit():
        raise ValueError("must be one name of letters, digits and _ . -, as h100; sinfo -o %G lists those there are")
    return name


_INTERFACES = re.compile(r"[A-Za-z0-9_.-]{1,15}(,[A-Za-z0-9_.-]{1,15})*", re.ASCII)


def interfaces(text: str) -> str:
    """Names of network interfaces or their beginnings, as `ib0` or `ib,eth1`. Raises ValueError."""
    if text and not _INTERFACES.fullmatch(text):
        raise ValueError("must be names of interfaces or their beginnings, as ib0 or ib,eth1")
    return text


_OPTION = re.compile(r"--[a-z][a-z0-9-]*(=[^\x00-\x1f\x7f\"'`$\\#]+)?")

OURS = {
    "nodes": "[job] nodes and [slurm] spares",
    "gpus-per-node": "[job] gpus_per_node",
    "gres": "[job] gpus_per_node",
    "gpus": "[job] gpus_per_node",
    "time": "[job] time",
    "job-name": "[job] name",
    "partition": "[slurm] partition",
    "account": "[slurm] account",
    "qos": "[slurm] qos",
    "constraint": "[slurm] constraint",
    "reservation": "[slurm] reservation",
    "signal": "[slurm] warning",
    "requeue": "[slurm] on_warning",
    "no-requeue": "[slurm] on_warning",
    "exclusive": "[slurm] exclusive",
    "dependency": "resihp submit --chain",
    **dict.fromkeys(
        ("ntasks", "ntasks-per-node", "no-kill", "kill-on-invalid-dep", "wrap", "array", "open-mode", "export"), ""
    ),
}
"""Options of sbatch that we set ourselves, and what to use instead; nothing where no other value would work."""


def option(text: str) -> str:
    """An option for sbatch that is none of ours. Raises ValueError."""
    if not _OPTION.fullmatch(text):
        raise ValueError("must be a long option of sbatch, as --mail-type=END, without quotes, $, # and backslashes")
    name = text[2:].partition("=")[0]
    if name in OURS:
        raise ValueError(f"--{name}: use {OURS[name]}" if OURS[name] else f"--{name} is ours to set")
    return text


_MOUNT = re.compile(r"/[^:,\s]*(:/[^:,\s]*(:(ro|rw))?)?")


def mount(text: str) -> str:
    """`/source`, `/source:/destination` or `/source:/destination:ro`. Raises ValueError."""
    if not _MOUNT.fullmatch(text):
        raise ValueError("must be /source, /source:/destination or /source:/destination:ro, without spaces and commas")
    return text


def textfile(path: str) -> str:
    """A file for node_exporter, which reads those that end with .prom. Raises ValueError."""
    if path and not path.endswith(".prom"):
        raise ValueError("node_exporter reads files that end with .prom only; name such a one")
    return path


def webhook(url: SecretStr) -> SecretStr:
    """Raises ValueError, which does not tell the URL, for one that nothing can be POSTed to."""
    from wrapper.sinks.hooks import checked

    if url.get_secret_value():
        checked(url.get_secret_value())
    return url


def known_events(names: tuple[str, ...]) -> tuple[str, ...]:
    """Raises ValueError naming those that there are."""
    from wrapper.sinks.hooks import EVENTS

    for name in names:
        if name not in EVENTS:
            near = difflib.get_close_matches(name, EVENTS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(EVENTS)}"
            raise ValueError(f"unknown event {name[:40]}; {hint}")
    return names


def expanded(path: str) -> Path:
    """Return a path with the user's home in place of `~`. Raises ConfigurationError where there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigurationError(
            f"{path}: ~ cannot be expanded: the user has no home directory on this host; write the whole path"
        ) from None


def known_schedule(name: str) -> str:
    """Raises ValueError naming those that there are."""
    if name not in SCHEDULE_NAMES:
        raise ValueError(f"is one of {', '.join(SCHEDULE_NAMES)}")
    return name
