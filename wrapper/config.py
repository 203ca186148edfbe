"""Configuration: one typed tree, filled from the command line, the environment and TOML files, in this precedence:

    command line > RESIHP_SECTION__KEY > --config FILE > ./resihp.toml > ~/.config/resihp/config.toml > /etc/resihp.toml

and defaults last. No key is ever ignored: an unknown one is an error that names the nearest valid key and where it
stands, and one that this version does not act upon is refused.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from resihp.errors import ConfigurationError
from resihp.pipeline.schedules import SCHEDULES

PREFIX = "RESIHP_"
SEPARATOR = "__"

NOT_YET = {
    "slurm": "Slurm allocations are not supported yet; remove the section, and use --local",
    "container": "containers are not supported yet; remove the section",
}
"""Sections of the design that this version would ignore."""


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


def known_schedule(name: str) -> str:
    """Raises ValueError naming those that there are."""
    if name not in SCHEDULES:
        raise ValueError(f"is one of {', '.join(SCHEDULES)}")
    return name


class Section(BaseModel):
    """Base of all sections."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class JobSection(Section):
    """[job]: how many devices, and what runs on them."""

    nodes: int = Field(default=1, ge=1, le=100_000)
    """Nodes, or virtual nodes with --local."""
    gpus_per_node: int = Field(default=1, ge=1, le=1024)
    """Devices of a node, one worker each."""
    memory_per_device: Annotated[int | None, BeforeValidator(size)] = None
    """What each device has for the job, with its unit, as `80GB`; if left out, it is not known, and not checked."""
    command: tuple[str, ...] = ()
    """What each worker runs, unless the command line tells after `--`."""


class LayoutSection(Section):
    """[layout]: parallel degrees. The data-parallel degree follows from the devices."""

    tp: int = Field(default=1, ge=1)
    """Tensor-parallel degree; at most `job.gpus_per_node`."""
    pp: int = Field(default=1, ge=1)
    """Pipeline-parallel degree."""
    schedule: Annotated[str, AfterValidator(known_schedule)] = "1f1b"
    """Pipeline schedule: `1f1b`, `interleaved` or `zero-bubble`."""
    virtual_stages: int = Field(default=1, ge=1)
    """Chunks of layers that each stage holds; 2 or more with `interleaved`, 1 with others."""
    sequence_parallel: bool = False
    """Split activations between layers along the sequence, over each tensor-parallel group."""


class AdaptSection(Section):
    """[adapt]: what is done about failures."""

    mode: Literal["in-job"] = "in-job"
    """Re-plan inside the job; `restart` and `observe` are not supported yet."""
    come_backs: int = Field(default=3, ge=0)
    """How often a process may be started again on the same device."""


class CheckpointSection(Section):
    """[checkpoint]: when, how many, where."""

    every: int = Field(default=0, ge=0)
    """Iterations between checkpoints; 0: none."""
    keep: int = Field(default=2, ge=1)
    """Complete checkpoints that are kept."""
    folder: str = ""
    """Where they are; the job's own folder by default."""


class LedgerSection(Section):
    """[ledger]: where the history is written."""

    url: str = "sqlite"
    """`sqlite` for a file in the job's folder, or a SQLAlchemy URL."""


class Configuration(BaseSettings):
    """The effective configuration of one run. `read` makes one."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_prefix=PREFIX,
        env_nested_delimiter=SEPARATOR,
        nested_model_default_partial_update=True,
    )

    job: JobSection = JobSection()
    layout: LayoutSection = LayoutSection()
    adapt: AdaptSection = AdaptSection()
    checkpoint: CheckpointSection = CheckpointSection()
    ledger: LedgerSection = LedgerSection()

    _files: ClassVar[list[tuple[str, dict[str, Any]]]] = []

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        files = [InitSettingsSource(settings_cls, content) for _, content in cls._files]
        return (init_settings, env_settings, *files)


def read(
    command_line: Mapping[str, Mapping[str, Any]],
    job_file: Path | None = None,
    *,
    site: tuple[Path, ...] | None = None,
) -> Configuration:
    """Put the sources together. `command_line`: section -> key -> value, of options that were given.

    Raises ConfigurationError that names the source, the key, and the nearest valid one.
    """
    paths = [] if job_file is None else [job_file]
    if job_file is not None and not job_file.is_file():
        raise ConfigurationError(f"{job_file}: no such file; resihp run --config names a TOML file")
    paths += [path for path in (site_files() if site is None else site) if path.is_file()]
    files = [(str(path), _parse(path)) for path in paths]
    given = {section: dict(keys) for section, keys in command_line.items() if keys}
    environment = _environment()
    sources: list[tuple[str, dict[str, Any]]] = [("command line", given), ("environment", environment), *files]
    for source, content in sources:
        _check_keys(source, content)
    Configuration._files = files
    try:
        return Configuration(**given)  # type: ignore[arg-type]  # sections as mappings, which pydantic validates
    except ValidationError as error:
        raise ConfigurationError(_explain(error, sources)) from None
    finally:
        Configuration._files = []


def site_files() -> tuple[Path, ...]:
    """Files that are read when they exist, the strongest first."""
    configuration = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return (Path("resihp.toml"), configuration / "resihp" / "config.toml", Path("/etc/resihp.toml"))


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _environment() -> dict[str, dict[str, str]]:
    """`RESIHP_SECTION__KEY` variables; those without the separator (RESIHP_HOME) are not configuration."""
    found: dict[str, dict[str, str]] = {}
    for name, value in os.environ.items():
        section, separator, key = name.removeprefix(PREFIX).partition(SEPARATOR)
        if name.startswith(PREFIX) and separator:
            found.setdefault(section.lower(), {})[key.lower()] = value
    return found


def _check_keys(source: str, content: Mapping[str, Any]) -> None:
    sections = {name: field.annotation for name, field in Configuration.model_fields.items()}
    for section, keys in content.items():
        if section in NOT_YET:
            raise ConfigurationError(f"{source}: [{section}]: {NOT_YET[section]}")
        model = sections.get(section)
        if model is None:
            raise ConfigurationError(f"{source}: unknown section [{section}]; {_nearest(section, sections)}")
        if not isinstance(keys, Mapping):
            raise ConfigurationError(f"{source}: {section} is a section; write [{section}] and its keys below")
        assert isinstance(model, type)
        assert issubclass(model, Section)
        for key in keys:
            mode = keys[key] if (section, key) == ("adapt", "mode") else None
            if mode in ("restart", "observe"):
                raise ConfigurationError(f"{source}: [adapt] mode: {mode} is not supported yet, only in-job is")
            if (section, key) == ("job", "time"):
                raise ConfigurationError(f"{source}: [job] time: a time limit is not supported yet; remove the key")
            if key not in model.model_fields:
                hint = _nearest(key, model.model_fields)
                raise ConfigurationError(f"{source}: unknown key {key} in [{section}]; {hint}")


def _nearest(word: str, valid: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(word, valid, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"valid: {', '.join(valid)}"


def _explain(error: ValidationError, sources: list[tuple[str, Any]]) -> str:
    """The first problem, with the source that it came from."""
    problem = error.errors()[0]
    section, key = (str(part) for part in (*problem["loc"], "", "")[:2])
    source = next((name for name, content in sources if key in content.get(section, {})), "configuration")
    words = problem["msg"].removeprefix("Value error, ")
    words = words if problem["type"] == "value_error" else words.lower()
    return f"{source}: [{section}] {key}: {words}, got {problem['input']!r}"
