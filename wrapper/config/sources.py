"""The sources of a configuration, in this precedence:

    command line > RESIHP_SECTION__KEY > --config FILE > ./resihp.toml > ~/.config/resihp/config.toml > /etc/resihp.toml

and defaults last. No key is ever ignored: an unknown key is an error that names the nearest valid key and its source,
and a key that this version does not act upon is refused. The [site] section of `/etc/resihp.toml` limits all other
sources; [site] is refused anywhere else. Keys and their defaults: `resihp.wrapper.config.schema`. Called by the
commands.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from resihp.errors import ConfigurationError
from resihp.wrapper.config.schema import ENV_PREFIX, ENV_SEPARATOR, Configuration, Section
from resihp.wrapper.strict_modes import other_owner

SITE_FILE = Path("/etc/resihp.toml")
"""The administrator's file, and the only source of [site]."""
WORKING_FOLDER_FILE = Path("resihp.toml")
"""The file in the current folder."""

SECRET_KEYS = (("hooks", "webhook"), ("ledger", "url"))
"""(section, key) of the values that no message may contain."""


def read(
    command_line: Mapping[str, Mapping[str, Any]],
    job_file: Path | None = None,
    *,
    site: tuple[Path, ...] | None = None,
    authority: Path = SITE_FILE,
) -> Configuration:
    """Return the configuration merged from all sources. `command_line`: section -> key -> value, for the options that
    were given.

    `site`: files that are read if they exist, in order of precedence; `authority`: the only file that may set [site].
    Raises ConfigurationError that names the source, the key, and the nearest valid key.
    """
    paths = [] if job_file is None else [job_file]
    if job_file is not None and not job_file.is_file():
        raise ConfigurationError(f"{job_file}: no such file; resihp run --config names a TOML file")
    paths += [path for path in (site_files() if site is None else site) if path.is_file() and _is_read(path, job_file)]
    files = [(str(path), _parse(path)) for path in paths]
    given = {section: dict(keys) for section, keys in command_line.items() if keys}
    environment = _environment()
    sources: list[tuple[str, dict[str, Any]]] = [("command line", given), ("environment", environment), *files]
    for source, content in sources:
        _check_keys(source, content, str(authority))
    origins = {
        (section, key): source
        for source, content in reversed(sources)
        for section in content
        for key in content[section]
    }
    try:
        configuration = Configuration.merged(given, files, origins)
    except ValidationError as error:
        raise ConfigurationError(_explain(error, sources)) from None
    _check_detection(configuration)
    return _bounded(configuration, str(authority))


def _check_detection(configuration: Configuration) -> None:
    """Raise ConfigurationError for limits of probes that contradict each other or keys that the chosen mode ignores."""
    detect = configuration.detect
    if detect.link_confirmed < detect.link_fit:
        source = configuration.origin("detect", "link_confirmed") or configuration.origin("detect", "link_fit")
        raise ConfigurationError(
            f"{source}: [detect] link_confirmed {detect.link_confirmed:g} is below link_fit {detect.link_fit:g}: "
            "a link that is slow at the start would not be slow when suspected; raise link_confirmed or lower link_fit"
        )
    for key in ("false_alarms_per", "patience", "least"):
        if detect.mode != "sequential" and (source := configuration.origin("detect", key)):
            raise ConfigurationError(
                f"{source}: [detect] {key} applies to mode sequential only, and the mode is {detect.mode}; leave it out"
            )


def _bounded(configuration: Configuration, authority: str) -> Configuration:
    """Lower default values to the site's limits. Raise ConfigurationError if a configured value exceeds a limit."""
    slurm, lower = configuration.slurm, {}
    for key in ("drains", "replacements", "spares"):
        requested, most = getattr(slurm, key), getattr(configuration.site, key)
        if most is None or requested <= most:
            continue
        if source := configuration.origin("slurm", key):
            raise ConfigurationError(f"{source}: [slurm] {key}: {requested}, but {authority} allows {most}; lower it")
        lower[key] = most
    for key in ("partition", "replacement_partition"):
        check_partition(getattr(slurm, key), configuration, f"[slurm] {key}", authority)
    return configuration.model_copy(update={"slurm": slurm.model_copy(update=lower)}) if lower else configuration


def check_partition(named: str, configuration: Configuration, subject: str, authority: str = str(SITE_FILE)) -> None:
    """Raise ConfigurationError for a partition that the site does not allow. `named`: one or several partitions,
    separated by commas."""
    allowed = configuration.site.partitions
    for name in filter(None, named.split(",")):
        if allowed and name not in allowed:
            raise ConfigurationError(f"{subject}: {name} is not allowed by {authority}; choose {' or '.join(allowed)}")


def _is_read(path: Path, job_file: Path | None) -> bool:
    """Return whether to read a file that the user did not name; False if it is the job file, which is read already.

    Raises ConfigurationError if the file is in the current folder and belongs to another user, as it could choose the
    commands to run and the servers to contact.
    """
    if path != WORKING_FOLDER_FILE or not (owner := other_owner(path)):
        return True
    if job_file is not None and job_file.samefile(path):
        return False
    raise ConfigurationError(
        f"{path.absolute()}: belongs to {owner}; a resihp.toml of another user is not read by default. To use it: "
        f"resihp run --config {path}, or resihp submit {path}"
    )


def site_files() -> tuple[Path, ...]:
    """Return the files that are read if they exist, in order of precedence."""
    own: tuple[Path, ...] = ()
    with suppress(RuntimeError):  # in a container, the user may have no home directory
        configuration = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        own = (configuration / "resihp" / "config.toml",)
    return (WORKING_FOLDER_FILE, *own, SITE_FILE)


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _environment() -> dict[str, dict[str, str]]:
    """Return the `RESIHP_SECTION__KEY` variables as section -> key -> value. Other variables, such as RESIHP_HOME, are
    no configuration."""
    variables: dict[str, dict[str, str]] = {}
    for name, value in os.environ.items():
        section, separator, key = name.removeprefix(ENV_PREFIX).partition(ENV_SEPARATOR)
        if name.startswith(ENV_PREFIX) and separator:
            variables.setdefault(section.lower(), {})[key.lower()] = value
    return variables


def _check_keys(source: str, content: Mapping[str, Any], authority: str) -> None:
    sections = {name: field.annotation for name, field in Configuration.model_fields.items()}
    for section, keys in content.items():
        if section == "site" and source != authority:
            raise ConfigurationError(f"{source}: [site] is allowed in {authority} only, which administrators write")
        model = sections.get(section)
        if model is None:
            raise ConfigurationError(f"{source}: unknown section [{section}]; {_nearest(section, sections)}")
        if not isinstance(keys, Mapping):
            raise ConfigurationError(f"{source}: {section} is a section; write [{section}] and its keys below")
        assert isinstance(model, type)
        assert issubclass(model, Section)
        for key in keys:
            mode = keys[key] if (section, key) == ("adapt", "mode") else None
            if mode == "restart":
                raise ConfigurationError(
                    f"{source}: [adapt] mode: restart is not supported yet, only in-job and observe are"
                )
            if key not in model.model_fields:
                hint = _nearest(key, model.model_fields)
                raise ConfigurationError(f"{source}: unknown key {key} in [{section}]; {hint}")


def _nearest(word: str, valid: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(word, valid, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"valid: {', '.join(valid)}"


def _explain(error: ValidationError, sources: list[tuple[str, Any]]) -> str:
    """Describe the first problem of a configuration, and name the source of the wrong value."""
    problem = error.errors()[0]
    section, key = (str(part) for part in (*problem["loc"], "", "")[:2])
    source = next((name for name, content in sources if key in content.get(section, {})), "configuration")
    words = problem["msg"].removeprefix("Value error, ")
    words = words if problem["type"] == "value_error" else words.lower()
    got = "" if (section, key) in SECRET_KEYS else f", got {problem['input']!r}"
    return f"{source}: [{section}] {key}: {words}{got}"
