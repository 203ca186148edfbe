"""Configuration: one typed tree, filled from the command line, the environment and TOML files, in this precedence:

    command line > RESIHP_SECTION__KEY > --config FILE > ./resihp.toml > ~/.config/resihp/config.toml > /etc/resihp.toml

and defaults last. No key is ever ignored: an unknown one is an error that names the nearest valid key and where it
stands, and one that this version does not act upon is refused. What `/etc/resihp.toml` says in `[site]` bounds all
others, and stands nowhere else.
"""

from __future__ import annotations

import difflib
import os
import threading
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from resihp.errors import ConfigurationError
from resihp.settings import PlannerName
from wrapper.config import values
from wrapper.strict_modes import somebody_elses

PREFIX = "RESIHP_"
SEPARATOR = "__"

SITE_FILE = Path("/etc/resihp.toml")
"""The administrator's: the only place for [site]."""
HERE = Path("resihp.toml")
"""In the current folder."""

SECRETS = (("hooks", "webhook"), ("ledger", "url"))
"""(section, key) of what no message repeats."""

_reading = threading.Lock()
"""The files of one configuration are its class's while it is made: doctor reads in several threads."""

Duration = Annotated[float, BeforeValidator(values.duration)]
Plain = Annotated[str, AfterValidator(values.plain)]


class Section(BaseModel):
    """Base of all sections."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class JobSection(Section):
    """[job]: how many devices, and what runs on them."""

    nodes: int = Field(default=1, ge=1, le=100_000)
    """Nodes that the layout uses, or virtual nodes with --local; in an allocation, all but the spares if left out."""
    gpus_per_node: int = Field(default=1, ge=1, le=1024)
    """Devices of a node, one worker each; in an allocation, those that Slurm gave if left out."""
    memory_per_device: Annotated[int | None, BeforeValidator(values.size)] = None
    """What each device has for the job, with its unit, as `80GB`: no plan needs more. If left out, plans are made for
    what the smallest GPU has in all, and nothing is refused; of GPUs that workers share nothing is known."""
    command: tuple[str, ...] = ()
    """What each worker runs, unless the command line tells after `--`."""
    time: Annotated[float | None, BeforeValidator(values.duration)] = None
    """How long Slurm gives the job, with its unit, as `24h`; the partition's default if left out."""
    idle_limit: Annotated[float | None, BeforeValidator(values.duration_or_never)] = 1800.0
    """How long the last processes of a script that does not use resihp may be idle, once others have ended well. Then
    they are ended, with exit code 1. A process is idle while neither it nor any process that it started uses a
    processor, waits for a disk or writes; so one is idle that only waits for something remote, as `sbatch --wait` or
    the end of an upload. Where a script does that for long, set a longer time, or `never`."""
    name: Annotated[str, AfterValidator(values.plain)] = "resihp"
    """What Slurm calls the job. Jobs of a chain share it."""


class LayoutSection(Section):
    """[layout]: parallel degrees. The data-parallel degree follows from the devices."""

    tp: int = Field(default=1, ge=1)
    """Tensor-parallel degree; at most `job.gpus_per_node`."""
    pp: int = Field(default=1, ge=1)
    """Pipeline-parallel degree."""
    schedule: Annotated[str, AfterValidator(values.known_schedule)] = "1f1b"
    """Pipeline schedule: `1f1b`, `interleaved` or `zero-bubble`."""
    virtual_stages: int = Field(default=1, ge=1)
    """Chunks of layers that each stage holds; 2 or more with `interleaved`, 1 with others."""
    sequence_parallel: bool = False
    """Split activations between layers along the sequence, over each tensor-parallel group."""
    tune: bool = False
    """Begin with layers spread by what they cost and orders of work of their own, not with Megatron's grid."""


class AdaptSection(Section):
    """[adapt]: what is done about failures."""

    mode: Literal["in-job", "observe"] = "in-job"
    """`in-job`: re-plan inside the job. `observe`: what is slow or broken is found and told, and what would be done
    about it; but no plan is made for it, no device stands by for being slow, and no node is drained, given back or
    asked for, whatever `[slurm]` allows. A job that a failure would end is recovered all the same. `restart` is not
    supported yet."""
    come_backs: int = Field(default=3, ge=0)
    """How often a process may be started again on the same device."""
    least: float = Field(default=0.5, gt=0, le=1)
    """The share of its devices, spares not counted, with which a job begins when others are missing or fail before
    its first iteration; with 1 it begins whole or not at all."""
    examine: bool = True
    """Measure devices and links before the first iteration, and a device that joins; what is not fit stands by."""
    detect: bool = True
    """Look for slow devices and links while training."""
    recheck_s: float = Field(default=60.0, gt=0)
    """How often a slow device that stands by is measured again. One that only failed its probe is after 5 s (or this,
    if that is less), and then ever more rarely, up to ten times this."""
    planner: PlannerName = "resihp"
    """By whose rules the job is planned anew. For comparison: `resihp-paper`, the paper's; `paper-tp` and
    `paper-tp-pp`, its first steps alone; `drop-replica`, which gives up replicas that lose a device."""
    plans_ahead: bool = True
    """While training goes on, make plans for the loss of each device and each node, in a process of its own beside
    the supervisor, so that a recovery does not wait for a plan."""
    search_s: float = Field(default=1.0, ge=0, le=3600)
    """For how long that process looks for a better plan than the one that is found at once, where `planner` is
    `resihp` and memory is known; also for one that was made in haste, which gives way to a better one
    if that is worth it. 0: not at all. Without `plans_ahead` nothing is looked for."""
    succession: bool | None = None
    """Agents keep copies of the journal and choose another supervisor when the first one's node is gone; by default
    in allocations of several nodes."""


class DetectSection(Section):
    """[detect]: how slow devices and links are looked for, where `adapt.detect` is on."""

    mode: Literal["sequential", "paper", "greyhound"] = "sequential"
    """`sequential` tests every rank, link and iteration. For comparison, two that look at whole iterations and have all
    devices measured to find who is slow: `paper` suspects what takes 25 % longer than predicted at a change point,
    `greyhound` what takes 10 % longer after one than before."""
    false_alarms_per: int = Field(default=10_000, ge=100, le=10_000_000)
    """Iterations between false suspicions, on average at least. This key and the next two are `sequential`'s."""
    patience: int = Field(default=24, ge=2, le=1_000_000)
    """Iterations after which a device is suspected again on the same evidence, though its probe was fine."""
    least: float = Field(default=0.03, ge=0.01, le=0.5)
    """Smallest slow-down of a device that is told: 0.03 is about 3 % longer. Links and whole iterations are told from
    5 and 4 % on."""
    fit: float = Field(default=0.8, gt=0, le=0.9)
    """A device whose probe reaches less than this of its peers is not fit: it stands by when the job begins or when it
    joins."""
    sure: float = Field(default=0.9975, ge=0.5, le=0.999999)
    """How sure it must be that a suspect is slow, by its probe and by what training showed, for a verdict."""
    link_fit: float = Field(default=0.6, gt=0, le=1)
    """A link that reaches less than this of its peers is told at the start; links' times scatter more."""
    link_confirmed: float = Field(default=0.8, gt=0, le=1)
    """A link under suspicion that reaches less than this of two others or more is slow; not below `link_fit`."""


class CheckpointSection(Section):
    """[checkpoint]: when, how many, where."""

    every: int = Field(default=0, ge=0)
    """Iterations between checkpoints, of which there is one after the last iteration, too; 0: none."""
    keep: int = Field(default=2, ge=1)
    """Complete checkpoints that are kept."""
    folder: str = ""
    """Where they are; the job's own folder by default."""


class LedgerSection(Section):
    """[ledger]: where the history is written."""

    url: str = "sqlite"
    """`sqlite` for a file in the job's folder, or a SQLAlchemy URL."""
    keep: Annotated[Duration, Field(ge=3600)] | None = None
    """How long rank reports, their quantiles and scores are kept, as `90d`: a job's writer removes older ones of your
    own jobs in that ledger, once a day. For ever if left out."""


class SlurmSection(Section):
    """[slurm]: what is asked of Slurm, at submission and while the job runs. With --local, only `spares` counts."""

    partition: Plain = ""
    """Where the job runs, and nodes that replace lost ones; Slurm's default if left out."""
    account: Plain = ""
    """Whom Slurm charges."""
    qos: Plain = ""
    """Quality of service."""
    constraint: Annotated[str, AfterValidator(values.features)] = ""
    """Features that nodes must have, as `a100&nvlink`."""
    gpu_type: Annotated[str, AfterValidator(values.gpu_type)] = ""
    """Slurm's name for the GPUs that are asked for, where a cluster has several, as `h100`; sinfo -o %G lists them."""
    reservation: Plain = ""
    """A reservation to run in."""
    exclusive: bool = True
    """Take nodes whole, with all their CPUs and memory; else say in `extra` what the job needs of them."""
    extra: tuple[Annotated[str, AfterValidator(values.option)], ...] = ()
    """Further options for sbatch, as `--mail-type=END`."""
    spares: int = Field(default=0, ge=0, le=10_000)
    """Nodes beyond those of the layout, whose workers stand by."""
    replacements: int = Field(default=0, ge=0, le=10_000)
    """How many nodes the job may ask for in place of lost ones, each as a Slurm job of its own."""
    replacement_min_left: Duration = 1800.0
    """No replacement is asked for when less time than this is left until the job's limit."""
    replacement_wait: Duration = 60.0
    """How long a replacement is expected to take to come, until one has: it is asked for where it still pays then."""
    drains: int = Field(default=2, ge=0, le=10_000)
    """How many nodes the job may have drained."""
    comment: bool = True
    """Say in the comment of the job in Slurm how far it is and what became of it, behind what stands there."""
    ports: Annotated[str, AfterValidator(values.ports)] = ""
    """Where the job's own processes listen for other nodes, as `60001-63000`; any port if left out."""
    spool: str = ""
    """Folder of the site's hook, for requests to drain a node by users who may not do it themselves."""
    on_drain: Literal["stay", "vacate"] = "stay"
    """What the job does about a node of its own that an administrator drains: `stay` and train on, or `vacate` it
    between two iterations and give it back, where the layout can do without."""
    on_warning: Literal["requeue", "end"] = "requeue"
    """What follows the checkpoint when the time limit is near."""
    requeue: Literal["usual", "expedite"] = "usual"
    """`expedite`: a requeued job begins at once and not after two minutes; Slurm 25.11 or later, where allowed."""
    warning: Annotated[Duration, Field(ge=60, le=65535)] = 300.0
    """How long before the time limit that is."""
    restarts: int = Field(default=3, ge=1)
    """Runs of one Slurm job in a row that add no checkpoint; after so many it is not run again (exit code 4)."""


class NetworkSection(Section):
    """[network]: which interfaces are used in an allocation, by name or beginning of a name, as `ib0` or `ib,eth1`."""

    interface: Annotated[str, AfterValidator(values.interfaces)] = ""
    """The workers': for NCCL and gloo, unless NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME is set; if left out, the one
    on which the supervisor is reached."""
    control: Annotated[str, AfterValidator(values.interfaces)] = ""
    """That of resihp's own connections; if left out, where Slurm's address of the node leads."""


class ContainerSection(Section):
    """[container]: what workers run in. Supervisor and agents stay outside; only they talk to Slurm."""

    runtime: Literal["", "apptainer", "enroot", "pyxis"] = ""
    """`apptainer`, or `enroot`, which is what pyxis uses: `pyxis` means the same here."""
    image: str = ""
    """A file that every node can read: .sif for apptainer, .sqsh for enroot."""
    mounts: tuple[Annotated[str, AfterValidator(values.mount)], ...] = ()
    """Folders beside the job's own, as `/data` or `/scratch:/data:ro`."""
    python: str = "python3"
    """The interpreter in the image; resihp must be installed there."""


class MetricsSection(Section):
    """[metrics]: the job's figures, for others to draw; nothing by default. The first two need resihp[metrics]; traces,
    resihp[otel]."""

    port: int = Field(default=0, ge=0, le=65535)
    """Prometheus finds them there on the supervisor's machine, on loopback only; 0: nowhere."""
    textfile: Annotated[str, AfterValidator(values.textfile)] = ""
    """A file for node_exporter's textfile collector; `{job}` in it stands for the job's name."""
    tensorboard: str = ""
    """A folder for TensorBoard's scalars, in which each job gets one of its own."""
    traces: bool = False
    """A trace of each failure and change of plan, for the OpenTelemetry collector that `OTEL_EXPORTER_OTLP_ENDPOINT`
    names; the other `OTEL_*` variables hold, too."""


class HooksSection(Section):
    """[hooks]: who is told when something happens, by a JSON document for each event; nobody by default."""

    webhook: Annotated[SecretStr, AfterValidator(values.webhook)] = SecretStr("")
    """A URL that documents are POSTed to. It is kept secret; in a file that others can read, use webhook_file."""
    webhook_file: str = ""
    """A file that only its owner can read, and that holds the URL."""
    command: tuple[str, ...] = ()
    """A command that gets each document on its stdin, on the supervisor's machine, without a shell: with events
    `["end"]`, `["mail", "-s", "a job has ended", "me@example.org"]` mails what truly became of the job."""
    events: Annotated[tuple[str, ...], AfterValidator(values.known_events)] = (
        *("failure", "recovery", "drain", "replacement", "leader", "signal", "end"),
    )
    """What is told: start, failure, recovery, suspicion, plan, node, drain, replacement, checkpoint, leader, signal,
    fault, end."""
    timeout: Annotated[Duration, Field(le=300)] = 10.0
    """How long telling one event may take; then it is given up, a command killed."""


class SiteSection(Section):
    """[site], in /etc/resihp.toml only: what no user's job may exceed."""

    drains: int | None = Field(default=None, ge=0)
    """Highest `slurm.drains`."""
    drained: int | None = Field(default=None, ge=0)
    """How many nodes of the cluster may be drained with our reason at a time, by all jobs; the hook has --drained."""
    replacements: int | None = Field(default=None, ge=0)
    """Highest `slurm.replacements`."""
    spares: int | None = Field(default=None, ge=0)
    """Highest `slurm.spares`."""
    partitions: tuple[str, ...] = ()
    """Partitions that jobs may use; all when empty."""


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
    detect: DetectSection = DetectSection()
    checkpoint: CheckpointSection = CheckpointSection()
    ledger: LedgerSection = LedgerSection()
    slurm: SlurmSection = SlurmSection()
    network: NetworkSection = NetworkSection()
    container: ContainerSection = ContainerSection()
    metrics: MetricsSection = MetricsSection()
    hooks: HooksSection = HooksSection()
    site: SiteSection = SiteSection()

    _files: ClassVar[list[tuple[str, dict[str, Any]]]] = []
    _origins: dict[tuple[str, str], str] = PrivateAttr(default_factory=dict)

    def origin(self, section: str, key: str) -> str | None:
        """Which source says it, the strongest one; None for a default."""
        return self._origins.get((section, key))

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
    authority: Path = SITE_FILE,
) -> Configuration:
    """Put the sources together. `command_line`: section -> key -> value, of options that were given.

    `site`: files that are read if they exist, the strongest first; `authority`: the one whose [site] counts.

    Raises ConfigurationError that names the source, the key, and the nearest valid one.
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
    with _reading:
        Configuration._files = files
        try:
            found = Configuration(**given)  # type: ignore[arg-type]  # sections as mappings, which pydantic validates
        except ValidationError as error:
            raise ConfigurationError(_explain(error, sources)) from None
        finally:
            Configuration._files = []
    found._origins = origins
    _check_thresholds(found)
    return _bounded(found, str(authority))


def _check_thresholds(found: Configuration) -> None:
    """Raises ConfigurationError for thresholds that contradict each other, or that nobody would heed."""
    detect = found.detect
    if detect.link_confirmed < detect.link_fit:
        source = found.origin("detect", "link_confirmed") or found.origin("detect", "link_fit")
        raise ConfigurationError(
            f"{source}: [detect] link_confirmed {detect.link_confirmed:g} is below link_fit {detect.link_fit:g}: "
            "what is slow at the start would not be slow under suspicion; raise link_confirmed or lower link_fit"
        )
    for key in ("false_alarms_per", "patience", "least"):
        if detect.mode != "sequential" and (source := found.origin("detect", key)):
            raise ConfigurationError(
                f"{source}: [detect] {key} is of mode sequential, and mode {detect.mode} has none; leave it out"
            )


def _bounded(found: Configuration, authority: str) -> Configuration:
    """Raises ConfigurationError for what the site does not allow. Defaults give way in silence."""
    slurm, lower = found.slurm, {}
    for key in ("drains", "replacements", "spares"):
        asked, most = getattr(slurm, key), getattr(found.site, key)
        if most is None or asked <= most:
            continue
        if source := found.origin("slurm", key):
            raise ConfigurationError(f"{source}: [slurm] {key}: {asked}, but {authority} allows {most}; lower it")
        lower[key] = most
    check_partition(slurm.partition, found, "[slurm] partition", authority)
    return found.model_copy(update={"slurm": slurm.model_copy(update=lower)}) if lower else found


def check_partition(named: str, found: Configuration, whose: str, authority: str = str(SITE_FILE)) -> None:
    """Raises ConfigurationError for a partition that the site does not allow. Slurm takes several, with commas."""
    allowed = found.site.partitions
    for name in filter(None, named.split(",")):
        if allowed and name not in allowed:
            raise ConfigurationError(f"{whose}: {name} is not allowed by {authority}; choose {' or '.join(allowed)}")


def _is_read(path: Path, job_file: Path | None) -> bool:
    """Whether a file is read without having been named. Raises ConfigurationError for somebody else's in the current
    folder: it says which commands are run and which servers are spoken to. The one that was named is read already."""
    if path != HERE or not (owner := somebody_elses(path)):
        return True
    if job_file is not None and job_file.samefile(path):
        return False
    raise ConfigurationError(
        f"{path.absolute()}: belongs to {owner}; a resihp.toml of another user is not read by default. To use it: "
        f"resihp run --config {path}, or resihp submit {path}"
    )


def site_files() -> tuple[Path, ...]:
    """Files that are read when they exist, the strongest first."""
    own: tuple[Path, ...] = ()
    with suppress(RuntimeError):  # a container may know no home of ours
        configuration = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        own = (configuration / "resihp" / "config.toml",)
    return (HERE, *own, SITE_FILE)


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


def _check_keys(source: str, content: Mapping[str, Any], authority: str) -> None:
    sections = {name: field.annotation for name, field in Configuration.model_fields.items()}
    for section, keys in content.items():
        if section == "site" and source != authority:
            raise ConfigurationError(f"{source}: [site] stands in {authority} only, where administrators write it")
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
    """The first problem, with the source that it came from."""
    problem = error.errors()[0]
    section, key = (str(part) for part in (*problem["loc"], "", "")[:2])
    source = next((name for name, content in sources if key in content.get(section, {})), "configuration")
    words = problem["msg"].removeprefix("Value error, ")
    words = words if problem["type"] == "value_error" else words.lower()
    got = "" if (section, key) in SECRETS else f", got {problem['input']!r}"
    return f"{source}: [{section}] {key}: {words}{got}"
