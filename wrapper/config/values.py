"""Validators of configuration values: sizes, times, names for Slurm, mounts. Each raises ValueError with an
explanation.

Names and options end up in batch scripts. So a value is refused if a shell or sbatch would treat one of its characters
as special. Used by `resihp.wrapper.config.schema`.
"""

from __future__ import annotations

import difflib
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from resihp.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pydantic import SecretStr  # agents import this module, and start a third faster without pydantic

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(I?)B", re.IGNORECASE)


def size(text: object) -> int | None:
    """Return the number of bytes of `80GB`, `79.5 GiB` or `512MB`. Units are powers of 1000, or of 1024 with an `i`.
    Raises ValueError."""
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ValueError("not a size with a unit; examples: 80GB, 79.5GiB, 512MB")
    number, letter, binary = match.groups()
    unit = float(1024 if binary else 1000) ** " KMGTP".index(letter.upper() or " ")
    amount = round(float(number) * unit)
    if amount < 1:
        raise ValueError("must be more than 0 bytes")
    return amount


_DURATION = re.compile(r"(?:(\d+)d)?\s*(?:(\d+)h)?\s*(?:(\d+)m)?\s*(?:(\d+)s)?")
_SLURM_TIME = re.compile(r"(?:(\d+)-)?(\d+):(\d+):(\d+)")


def duration(text: object) -> float | None:
    """Return the number of seconds of `24h`, `1h30m`, `2d`, `45s`, or of Slurm's `[days-]hours:minutes:seconds`. Raises
    ValueError."""
    if text is None or (isinstance(text, float) and text > 0 and math.isfinite(text)):  # defaults are validated, too
        return text
    parts = isinstance(text, str) and (_DURATION.fullmatch(text.strip()) or _SLURM_TIME.fullmatch(text.strip()))
    if not parts or not any(parts.groups()):
        raise ValueError("not a time with its unit; examples: 24h, 1h30m, 45s, 2-00:00:00")
    seconds = sum(int(part or 0) * unit for part, unit in zip(parts.groups(), (86400, 3600, 60, 1), strict=True))
    if not 0 < seconds < 10 * 365 * 86400:
        raise ValueError("must be more than 0 s, and less than ten years")
    return float(seconds)


NO_LIMIT = "never"


def duration_or_never(text: object) -> float | None:
    """Return a number of seconds as `duration` does, or None for `never`. Raises ValueError."""
    if text == NO_LIMIT:
        return None
    try:
        return duration(text)
    except ValueError as error:
        raise ValueError(f"{error}; or {NO_LIMIT}") from None


_PLAIN = re.compile(r"[A-Za-z0-9_.,:+@/-]*")
_FEATURES = re.compile(r"[A-Za-z0-9_.,:+@/*&|!()\[\]-]*")


def plain(name: str) -> str:
    """Return the name if Slurm accepts it and a shell does not interpret it. Raises ValueError."""
    if not _PLAIN.fullmatch(name) or name.startswith("-"):
        raise ValueError("must consist of letters, digits and _ . , : + @ / -")
    return name


def plain_or_none(name: str) -> str:
    """As `plain`, but the name may be empty. Raises ValueError."""
    return plain(name) if name else name


def path_pattern(pattern: str) -> str:
    """Return a pattern of paths unchanged. Raises ValueError if it cannot match the path of a checkpoint."""
    if not pattern.isprintable():
        raise ValueError("must be one line of printable characters")
    if pattern.endswith(("/", "/..", "/.")):
        raise ValueError("must end with the name of a checkpoint, as ckpt/step_*")
    return pattern


def site_command(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words of a command that runs without a shell. Raises ValueError if they look like a shell's line, or
    depend on the folder in which a job starts."""
    if not words:
        return words
    if not words[0] or not words[0].isprintable() or words[0].split() != [words[0]]:
        raise ValueError('must be one word for each argument, as ["/usr/sbin/nhc", "-q"]: no shell splits it')
    if "/" in words[0] and not words[0].startswith("/"):
        raise ValueError("must begin with an absolute path, or with a name that is found in the system's folders")
    if any("\0" in word for word in words):
        raise ValueError("must not contain the character 0")
    return words


def shell_line(text: str) -> str:
    """Return the text if it can be a line of a batch script. Raises ValueError."""
    if not text.isprintable() or text.lstrip().startswith("#"):
        raise ValueError("must be one line of shell, without control characters, and no comment")
    return text


_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=[^\x00-\x1f\x7f]*")


def assignment(text: str) -> str:
    """Return the text if it is an assignment such as `NCCL_DEBUG=INFO`. Raises ValueError."""
    if not _ASSIGNMENT.fullmatch(text):
        raise ValueError("must be NAME=VALUE, as NCCL_DEBUG=INFO, on one line")
    if text.startswith(("SLURM_", "RESIHP_")):
        raise ValueError("variables of Slurm and of resihp cannot be set here; use the keys of the job file")
    return text


def features(text: str) -> str:
    """Return the text if it is a constraint in sbatch's syntax, such as `a100&nvlink`. Raises ValueError."""
    if not _FEATURES.fullmatch(text) or text.startswith("-"):
        raise ValueError("must consist of feature names joined with & | , and brackets")
    return text


_PORTS = re.compile(r"(\d{1,5})-(\d{1,5})", re.ASCII)
MIN_PORTS = 16
"""Smallest number of ports in a range: a job may have four of our listeners on a node, and a node may have several
jobs."""


def ports(text: str) -> str:
    """Return the text if it is a range of ports such as `60001-63000`. Raises ValueError."""
    ports_of(text)
    return text


def ports_of(text: str) -> tuple[int, int] | None:
    """Return the first and the last port of a range; None for an empty text. Raises ValueError."""
    if not text:
        return None
    bounds = _PORTS.fullmatch(text)
    if bounds is None:
        raise ValueError("must be a range of ports, as 60001-63000")
    first, last = int(bounds[1]), int(bounds[2])
    if not 1024 <= first <= last <= 65535:
        raise ValueError("must lie within 1024-65535, the lower port first")
    if last - first + 1 < MIN_PORTS:
        raise ValueError(f"must have at least {MIN_PORTS} ports: every job on a node needs some of them there")
    return first, last


def gpu_type(name: str) -> str:
    """Return the text if it may be a site's name in Slurm for a type of GPU. Raises ValueError."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]*", name) or name.startswith("-") or name.isdigit():
        raise ValueError("must be one name of letters, digits and _ . -, as h100; sinfo -o %G lists the valid names")
    return name


_INTERFACES = re.compile(r"[A-Za-z0-9_.-]{1,15}(,[A-Za-z0-9_.-]{1,15})*", re.ASCII)


def interfaces(text: str) -> str:
    """Return the text if it lists network interfaces, or beginnings of their names, as `ib0` or `ib,eth1`. Raises
    ValueError."""
    if text and not _INTERFACES.fullmatch(text):
        raise ValueError("must be names of interfaces or their beginnings, as ib0 or ib,eth1")
    return text


_OPTION = re.compile(r"--[a-z][a-z0-9-]*(=[^\x00-\x1f\x7f\"'`$\\#]+)?")

OWN_SBATCH_OPTIONS = {
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
"""Options of sbatch that resihp sets itself, each with the key to use instead; empty if only resihp's value works."""


_ONE_AGENT = "one agent runs on each node"
_WHOLE_NODE = "an agent has all that the job has on its node"
_OWN_LOGS = "agents write their logs themselves"
_SURVIVES = "the step outlives a node that fails"
OWN_SRUN_OPTIONS = {
    **dict.fromkeys(
        ("nodes", "ntasks", "ntasks-per-node", "nodelist", "exclude", "relative", "multi-prog"), _ONE_AGENT
    ),
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu", "cpus-per-task", "cpu-bind", "exclusive"), _WHOLE_NODE),
    **dict.fromkeys(("exact", "overlap", "gres", "gpus", "gpus-per-node", "gpus-per-task", "gpu-bind"), _WHOLE_NODE),
    **dict.fromkeys(("output", "error", "input", "open-mode", "label", "pty", "unbuffered"), _OWN_LOGS),
    **dict.fromkeys(("no-kill", "kill-on-bad-exit", "wait", "time", "immediate", "deadline"), _SURVIVES),
    **dict.fromkeys(("jobid", "job-name", "dependency", "het-group"), "the step belongs to its job"),
    "mpi": "agents are no MPI processes",
    "export": "use [job] environment",
    "chdir": "agents run where the job was submitted",
}
"""Options of srun that may not be changed, each with the reason."""


def option(text: str) -> str:
    """Return the text if it is an option of sbatch that resihp does not set itself. Raises ValueError."""
    name = _own_option(text, "sbatch, as --mail-type=END", OWN_SBATCH_OPTIONS)
    if name:
        key = OWN_SBATCH_OPTIONS[name]
        raise ValueError(f"--{name}: use {key}" if key else f"--{name} is set by resihp and cannot be changed")
    return text


def step_option(text: str) -> str:
    """Return the text if it is an option of srun that does not change how agents run. Raises ValueError."""
    name = _own_option(text, "srun, as --network=single_node_vni", OWN_SRUN_OPTIONS)
    if name:
        raise ValueError(f"--{name} cannot be changed: {OWN_SRUN_OPTIONS[name]}")
    if text.startswith("--container"):
        raise ValueError("agents run outside of containers; use [container] for the workers")
    return text


def _own_option(text: str, example: str, own: Iterable[str]) -> str:
    """Return which of our own options the text sets, whole or abbreviated; empty if none. Raises ValueError for a text
    that is no option."""
    if not _OPTION.fullmatch(text):
        raise ValueError(f"must be a long option of {example}, without quotes, $, # and backslashes")
    name = text[2:].partition("=")[0]
    return name if name in own else next((option for option in own if option.startswith(name)), "")


_MOUNT = re.compile(r"/[^:,\s]*(:/[^:,\s]*(:(ro|rw))?)?")


def mount(text: str) -> str:
    """Return the text if it is a mount: `/source`, `/source:/destination` or `/source:/destination:ro`. Raises
    ValueError."""
    if not _MOUNT.fullmatch(text):
        raise ValueError("must be /source, /source:/destination or /source:/destination:ro, without spaces and commas")
    return text


def textfile(path: str) -> str:
    """Return the path if node_exporter would read the file: its name must end with .prom. Raises ValueError."""
    if path and not path.endswith(".prom"):
        raise ValueError("node_exporter reads only files that end with .prom; choose such a name")
    return path


def webhook(url: SecretStr) -> SecretStr:
    """Return the URL if documents can be POSTed to it. Raises ValueError, which does not repeat the URL."""
    from resihp.wrapper.sinks.hooks import checked

    if url.get_secret_value():
        checked(url.get_secret_value())
    return url


_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,3})?) ?%", re.ASCII)


def count_or_share(value: object) -> int | str | None:
    """Return the value if it is a count, or a share such as `2%`. Raises ValueError."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    if isinstance(value, str) and (share_of(value) or 0) > 0:
        return value
    raise ValueError('must be a whole number, 0 or more, or a share of the nodes, as "2%"')


def share_of(text: object) -> float | None:
    """Return the share in a text such as `2%`: more than 0, at most 1. None if the text is no share."""
    match = _SHARE.fullmatch(text) if isinstance(text, str) else None
    share = float(match[1]) / 100 if match else 0.0
    return share if 0 < share <= 1 else None


def absolute_or_none(path: str) -> str:
    """Return the path if it is absolute or empty. Raises ValueError."""
    if path and (not path.startswith("/") or "\0" in path):
        raise ValueError("must be an absolute path, as /shared/site/resihp/audit")
    return path


def known_events(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names if all are names of hook events. Raises ValueError that lists the valid events."""
    from resihp.wrapper.sinks.hooks import EVENT_ENTRIES

    for name in names:
        if name not in EVENT_ENTRIES:
            near = difflib.get_close_matches(name, EVENT_ENTRIES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"valid: {', '.join(EVENT_ENTRIES)}"
            raise ValueError(f"unknown event {name[:40]}; {hint}")
    return names


def expanded(path: str) -> Path:
    """Return the path with `~` replaced by the user's home directory. Raises ConfigurationError if the user has
    none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigurationError(
            f"{path}: ~ cannot be expanded: the user has no home directory on this host; write the whole path"
        ) from None


def known_schedule(name: str) -> str:
    """Return the name if it is a known pipeline schedule. Raises ValueError that lists the valid names."""
    from resihp.pipeline.schedules import SCHEDULE_NAMES

    if name not in SCHEDULE_NAMES:
        raise ValueError(f"must be one of {', '.join(SCHEDULE_NAMES)}")
    return name
