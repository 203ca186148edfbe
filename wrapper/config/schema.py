"""Keys of `job.toml`, their limits and their defaults, as one typed tree.

Decides which values are valid each by itself. A key that is a setting of the controller has the default that
`resihp.settings` gives it. Reads no file: `resihp.wrapper.config.sources` fills the tree from the user's files, the
environment and the command line.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from resihp.settings import PlannerName, Settings
from resihp.wrapper.config import values
from resihp.wrapper.config.line_pattern import line_pattern

ENV_PREFIX = "RESIHP_"
ENV_SEPARATOR = "__"

_files_lock = threading.Lock()
"""Held while `Configuration._files` is set: the class carries the files of the one being made, and doctor reads in
threads."""

_SETTINGS = Settings(job="", nodes=1, gpus_per_node=1, tp=1, pp=1)
"""Holds the defaults of keys that are settings of the controller."""
_DETECTION = _SETTINGS.detection
_PROBE_LIMITS = _DETECTION.probe_limits

Duration = Annotated[float, BeforeValidator(values.duration)]
Plain = Annotated[str, AfterValidator(values.plain)]


class Section(BaseModel):
    """Base of all sections."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class JobSection(Section):
    """[job]: how many devices, and the command that runs on them."""

    nodes: int = Field(default=1, ge=1, le=100_000)
    """Nodes that the layout uses, or virtual nodes with --local; if left out in an allocation, all nodes but the
    spares."""
    gpus_per_node: int = Field(default=1, ge=1, le=1024)
    """Devices of a node, one worker each; if left out in an allocation, the GPUs that Slurm gave."""
    min_nodes: int | None = Field(default=None, ge=1)
    """Smallest number of nodes with which a script that does not use `resihp.Trainer` is started again when nodes are
    lost; if left out, as many as `nodes`."""
    memory_per_device: Annotated[int | None, BeforeValidator(values.size)] = _SETTINGS.memory_bytes
    """Memory of each device that the job may use, with its unit, as `80GB`; a plan that needs more is refused. If left
    out, plans assume the smallest GPU's total memory and none is refused for it; where workers share a GPU, no memory
    is assumed."""
    command: tuple[str, ...] = ()
    """Command that each worker runs, unless the command line gives one; it may begin with a Python script."""
    time: Annotated[float | None, BeforeValidator(values.duration)] = None
    """Time limit of the Slurm job, with its unit, as `24h`; the partition's default if left out."""
    idle_limit: Annotated[float | None, BeforeValidator(values.duration_or_never)] = _SETTINGS.idle_limit_s
    """How long the last processes of a script that does not use resihp may stay idle after other processes have ended
    successfully. Then they are ended, with exit code 1. A process is idle while neither it nor any process that it
    started uses a processor, waits for a disk or writes. A process that only waits for something remote, such as
    `sbatch --wait` or the end of an upload, counts as idle: for such scripts set a longer time, or `never`."""
    hang_limit: Annotated[float | None, BeforeValidator(values.duration_or_never)] = _SETTINGS.script_hang_s
    """How long a script that does not use resihp may print no iteration before a rank that does nothing, while the
    others wait for it, is taken for hung: it is killed, and the script is started again. At least ten usual gaps
    between two iterations and three times the longest one must have passed, too. `never`: not at all."""
    name: Annotated[str, AfterValidator(values.plain_or_none)] = ""
    """Name of the job in Slurm. Jobs of a chain share it. If left out, the name of the training script."""
    setup: tuple[Annotated[str, AfterValidator(values.shell_line)], ...] = ()
    """Lines of the batch script before the job starts, as `module load cuda` or `ulimit -l unlimited`. What they put
    into the environment reaches agents and workers, also on replacement nodes."""
    environment: tuple[Annotated[str, AfterValidator(values.assignment)], ...] = ()
    """Environment variables of agents and workers, as `NCCL_DEBUG=INFO`; set after `setup`. Not for passwords: the
    batch script is stored by Slurm."""


class LayoutSection(Section):
    """[layout]: parallel degrees. The data-parallel degree follows from the devices."""

    tp: int = Field(default=1, ge=1)
    """Tensor-parallel degree; at most `job.gpus_per_node`."""
    pp: int = Field(default=1, ge=1)
    """Pipeline-parallel degree."""
    schedule: Annotated[str, AfterValidator(values.known_schedule)] = _SETTINGS.schedule
    """Pipeline schedule: `1f1b`, `interleaved` or `zero-bubble`."""
    virtual_stages: int = Field(default=_SETTINGS.chunks, ge=1)
    """Chunks of layers that each stage holds; 2 or more with `interleaved`, 1 with others."""
    sequence_parallel: bool = _SETTINGS.sequence_parallel
    """Split activations between layers along the sequence, over each tensor-parallel group."""
    tune: bool = _SETTINGS.tune
    """Begin with layers spread by their measured cost and with a searched order of work, instead of Megatron's grid."""


class AdaptSection(Section):
    """[adapt]: how the job reacts to failures."""

    mode: Literal["in-job", "observe"] = "in-job"
    """`in-job`: re-plan inside the job. `observe`: detect and report slow or broken devices and the action that would
    follow, but make no plan for them, put no slow device on standby, and drain, give back or request no node, whatever
    `[slurm]` allows. A failure that would end the job is still recovered. `restart` is not supported yet."""
    max_restarts: int = Field(default=_SETTINGS.max_restarts, ge=0)
    """How often all processes of a script that does not use `resihp.Trainer` may be started again, in one run of the
    job, after one of them has failed. With `resihp.Trainer`: how often training may go back to the newest checkpoint,
    because no rank holds some of the state any more; with 0 the job ends instead, or Slurm runs it again."""
    come_backs: int = Field(default=_SETTINGS.come_backs, ge=0)
    """How often a process may be started again on the same device."""
    least: float = Field(default=_SETTINGS.least, gt=0, le=1)
    """Smallest share of its devices, spares not counted, with which a job begins when others are missing or fail before
    its first iteration; 1: it begins with all devices or not at all."""
    examine: bool = _SETTINGS.examine
    """Probe devices and links before the first iteration, and each device that joins; devices that fail stand by."""
    detect: bool = _SETTINGS.detect
    """Look for slow devices and links while training."""
    recheck_s: float = Field(default=_SETTINGS.recheck_s, gt=0)
    """How often a slow device on standby is probed again. A device that only failed its probe is first probed again
    after 5 s (or after this time, if shorter), then at growing intervals, up to ten times this."""
    planner: PlannerName = _SETTINGS.planner
    """Planner that computes new layouts. For comparison: `resihp-paper` follows the paper; `paper-tp` and `paper-tp-pp`
    take only its first steps; `drop-replica` gives up any replica that loses a device."""
    plans_ahead: bool = _SETTINGS.plans_ahead
    """During training, make plans for the loss of each device and each node, in a separate process beside the
    supervisor, so that a recovery does not wait for a plan."""
    search_s: float = Field(default=_SETTINGS.search_s, ge=0, le=3600)
    """How long the process of `plans_ahead` searches for a plan better than the first one found, where `planner` is
    `resihp` and device memory is known. A plan that was made in haste is searched again as well, and replaced if a
    better one is worth the change. 0: no search. Without `plans_ahead` there is no search."""
    succession: bool | None = None
    """Agents keep copies of the journal and elect another supervisor when the first supervisor's node is lost; on by
    default in allocations of several nodes."""


class DetectSection(Section):
    """[detect]: how slow devices and links are detected, where `adapt.detect` is on."""

    mode: Literal["sequential", "paper", "greyhound"] = _DETECTION.mode
    """`sequential` tests every rank, link and iteration. The other two, for comparison, look at whole iterations and
    probe all devices to locate the slow one: `paper` suspects an iteration that takes 25 % longer than predicted at a
    change point, `greyhound` one that takes 10 % longer after a change point than before it."""
    false_alarms_per: int = Field(default=_DETECTION.false_alarms_per, ge=100, le=10_000_000)
    """Minimum mean number of iterations between false suspicions. This key and the next two apply to `sequential`
    only."""
    patience: int = Field(default=_DETECTION.patience, ge=2, le=1_000_000)
    """Iterations after which a device is suspected again on the same evidence, although its probe was normal."""
    least: float = Field(default=_DETECTION.least, ge=0.01, le=0.5)
    """Smallest slow-down of a device that is reported; 0.03 is about 3 % longer. Links are reported from 5 % on, whole
    iterations from 4 % on."""
    fit: float = Field(default=_PROBE_LIMITS.fit, gt=0, le=0.9)
    """Lowest probe speed, relative to its peers, of a healthy device. A slower device stands by when the job begins or
    when it joins."""
    sure: float = Field(default=_DETECTION.sure, ge=0.5, le=0.999999)
    """Probability, from its probe and its training times, at which a suspected device is declared slow."""
    link_fit: float = Field(default=_PROBE_LIMITS.link_fit, gt=0, le=1)
    """A link below this share of its peers' speed is reported at the start; link times scatter more than device
    times."""
    link_confirmed: float = Field(default=_PROBE_LIMITS.link_confirmed, gt=0, le=1)
    """A suspected link below this share of the speed of two or more other links is declared slow; at least
    `link_fit`."""


class CheckpointSection(Section):
    """[checkpoint]: how often, how many, where. `every`, `keep` and `folder` apply to `resihp.Trainer`."""

    every: int = Field(default=_SETTINGS.checkpoint_every, ge=0)
    """Iterations between checkpoints; the last iteration is followed by one, too. 0: no checkpoints."""
    keep: int = Field(default=2, ge=1)
    """Number of complete checkpoints to keep."""
    folder: str = ""
    """Folder for checkpoints; the job's own folder by default."""
    latest: Annotated[str, AfterValidator(values.path_pattern)] = ""
    """Where a script that does not use `resihp.Trainer` saves its checkpoints, as a pattern of paths relative to the
    working directory: `ckpt/step_*`, `out/checkpoint-*`, `logs/*.ckpt`, `ckpt/iter_*`. When the script is started, it
    finds the newest complete one in RESIHP_RESUME_FROM and in place of `{checkpoint}` in its command. The folder has
    to be visible to all nodes."""


class ProgressSection(Section):
    """[progress]: how the iterations of a script that does not use `resihp.Trainer` are read from its output."""

    pattern: Annotated[str, AfterValidator(line_pattern)] = ""
    """Regular expression for the lines that the script prints for each iteration, or every few, where resihp does not
    know them by itself: with a group `iteration`, and perhaps `goal`, `loss`, `seconds` (of one iteration), as
    `'batch (?P<iteration>\\d+) of (?P<goal>\\d+) ce=(?P<loss>\\S+)'`."""


class LedgerSection(Section):
    """[ledger]: where the history of a job is written."""

    url: str = "sqlite"
    """`sqlite` for a file in the job's folder, or a SQLAlchemy URL."""
    keep: Annotated[Duration, Field(ge=3600)] | None = None
    """How long rank reports, their quantiles and scores are kept, as `90d`: once a day, a job's writer removes older
    ones of your own jobs from that ledger. For ever if left out."""


class SlurmSection(Section):
    """[slurm]: requests to Slurm, at submission and while the job runs. With --local, only `spares` counts."""

    partition: Plain = ""
    """Partition of the job, and of nodes that replace lost ones; Slurm's default if left out."""
    replacement_partition: Plain = ""
    """Partition of nodes that replace lost ones, where the job's own partition has a minimum size; `partition` if left
    out."""
    replacement_qos: Plain = ""
    """The same for their quality of service; `qos` if left out."""
    account: Plain = ""
    """Account that Slurm charges."""
    qos: Plain = ""
    """Quality of service."""
    constraint: Annotated[str, AfterValidator(values.features)] = ""
    """Features that nodes must have, as `a100&nvlink`."""
    gpu_type: Annotated[str, AfterValidator(values.gpu_type)] = ""
    """Slurm's name for the requested type of GPU, where a cluster has several, as `h100`; sinfo -o %G lists them."""
    reservation: Plain = ""
    """A reservation to run in."""
    exclusive: bool = True
    """Request whole nodes, with all their CPUs and memory; if off, state in `extra` how much of a node the job
    needs."""
    extra: tuple[Annotated[str, AfterValidator(values.option)], ...] = ()
    """Further options for sbatch, as `--mail-type=END`."""
    step_extra: tuple[Annotated[str, AfterValidator(values.step_option)], ...] = ()
    """Further options for the srun step that starts the agents, as `--network=single_node_vni`."""
    spares: int = Field(default=_SETTINGS.spares, ge=0, le=10_000)
    """Nodes beyond those of the layout; their workers stand by."""
    replacements: int = Field(default=_SETTINGS.replacements, ge=0, le=10_000)
    """How many nodes the job may request in place of lost ones, each as a separate Slurm job."""
    replacement_min_left: Duration = _SETTINGS.replacement_least_left_s
    """No replacement is requested when less time than this remains until the job's time limit."""
    replacement_wait: Duration = _SETTINGS.replacement_wait_s
    """Expected wait for the first replacement: one is requested only if it still pays off after this wait."""
    drains: int = Field(default=2, ge=0, le=10_000)
    """How many nodes the job may have drained."""
    comment: bool = True
    """Append progress and outcome to the Slurm job's comment."""
    ports: Annotated[str, AfterValidator(values.ports)] = ""
    """Range of ports on which the job's own processes listen for other nodes, as `60001-63000`; any port if left
    out."""
    spool: str = ""
    """Folder of the site's drain hook: drain requests of users who may not drain nodes themselves are written there."""
    on_drain: Literal["stay", "vacate"] = _SETTINGS.on_drain
    """Reaction to an administrator's drain of one of the job's nodes: `stay` and train on, or `vacate` it between two
    iterations and give it back, where the layout can do without it."""
    on_warning: Literal["requeue", "end"] = _SETTINGS.on_warning
    """What the job does after the checkpoint that it writes shortly before the time limit."""
    requeue: Literal["usual", "expedite"] = "usual"
    """`expedite`: a requeued job begins at once instead of after two minutes; needs Slurm 25.11 or later, where
    allowed."""
    warning: Annotated[Duration, Field(ge=60, le=65535)] = 300.0
    """How long before the time limit Slurm warns the job, which then writes a checkpoint."""
    restarts: int = Field(default=3, ge=1)
    """Consecutive runs of one Slurm job that may add no checkpoint; after so many it is not run again (exit code 4)."""


class NetworkSection(Section):
    """[network]: interfaces to use in an allocation, by name or beginning of a name, as `ib0` or `ib,eth1`."""

    interface: Annotated[str, AfterValidator(values.interfaces)] = ""
    """Interfaces of the workers, for NCCL and gloo, unless NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME is set; if left
    out, the interface on which the supervisor is reached."""
    control: Annotated[str, AfterValidator(values.interfaces)] = ""
    """Interfaces of resihp's own connections; if left out, the interface behind the node's address in Slurm."""


class ContainerSection(Section):
    """[container]: the container of the workers. Supervisor and agents stay outside; only they talk to Slurm."""

    runtime: Literal["", "apptainer", "enroot", "pyxis"] = ""
    """`apptainer`, or `enroot`; `pyxis`, which runs enroot, means the same as `enroot` here."""
    image: str = ""
    """Image file, readable on every node: .sif for apptainer, .sqsh for enroot."""
    mounts: tuple[Annotated[str, AfterValidator(values.mount)], ...] = ()
    """Folders to mount in addition to the job's own, as `/data` or `/scratch:/data:ro`."""
    python: str = "python3"
    """The interpreter in the image; resihp must be installed there."""


class MetricsSection(Section):
    """[metrics]: export of the job's figures to other tools; off by default. The first two keys need resihp[metrics];
    traces, resihp[otel]."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port for Prometheus on the supervisor's machine, on loopback only; 0: none."""
    textfile: Annotated[str, AfterValidator(values.textfile)] = ""
    """File for node_exporter's textfile collector; `{job}` in it stands for the job's name."""
    tensorboard: str = ""
    """Folder for TensorBoard's scalars; each job gets a folder of its own in it."""
    traces: bool = False
    """Export a trace of each failure and change of plan to the OpenTelemetry collector that
    `OTEL_EXPORTER_OTLP_ENDPOINT` names; the other `OTEL_*` variables apply, too."""


class HooksSection(Section):
    """[hooks]: notifications, one JSON document for each event; none by default."""

    webhook: Annotated[SecretStr, AfterValidator(values.webhook)] = SecretStr("")
    """URL to which documents are POSTed. It is kept secret; in a file that others can read, use webhook_file."""
    webhook_file: str = ""
    """File that holds the URL, readable by its owner only."""
    command: tuple[str, ...] = ()
    """Command that gets each document on its stdin, on the supervisor's machine, without a shell: with events
    `["end"]`, `["mail", "-s", "a job has ended", "me@example.org"]` mails the outcome of the job."""
    events: Annotated[tuple[str, ...], AfterValidator(values.known_events)] = (
        *("failure", "recovery", "drain", "replacement", "leader", "signal", "end"),
    )
    """Events to send: start, failure, recovery, suspicion, plan, node, drain, replacement, checkpoint, leader, signal,
    fault, end."""
    timeout: Annotated[Duration, Field(le=300)] = 10.0
    """Time limit for delivering one event; then it is given up, and a command is killed."""


class SiteSection(Section):
    """[site], in /etc/resihp.toml only: limits for the jobs of all users."""

    drains: int | None = Field(default=None, ge=0)
    """Highest `slurm.drains`."""
    drained: Annotated[int | str | None, BeforeValidator(values.count_or_share)] = None
    """How many nodes of the cluster may be drained with our reason at a time, by all jobs; or the share of the nodes of
    a job's partition, rounded down, but at least one node. The hook has --drained."""
    user_drains_per_hour: int | None = Field(default=None, ge=0)
    """How many nodes the jobs of one user may have drained in an hour, counted from the reasons that Slurm shows; the
    hook has --user-rate."""
    replacements: int | None = Field(default=None, ge=0)
    """Highest `slurm.replacements`."""
    spares: int | None = Field(default=None, ge=0)
    """Highest `slurm.spares`."""
    partitions: tuple[str, ...] = ()
    """Partitions that jobs may use; all when empty."""
    audit: Annotated[str, AfterValidator(values.absolute_or_none)] = ""
    """Folder in which all jobs record their decisions about the cluster, such as `/shared/site/resihp/audit`: one file
    for each user and month, one JSON line for each decision."""
    share: Annotated[str, AfterValidator(values.absolute_or_none)] = ""
    """Folder in which all running jobs keep a summary of themselves, for `resihp jobs --all-users` and `resihp status`
    of operators, such as `/shared/site/resihp/jobs`."""
    health_command: Annotated[tuple[str, ...], AfterValidator(values.site_command)] = ()
    """The site's own health check of a node, as `["/usr/sbin/nhc"]` or `["dcgmi", "health", "-c"]`: exit status 0 for a
    healthy node. Asked on the node before a job drains it and before `resihp node undrain`. It runs without a shell,
    with the user's rights, and with the system's PATH."""
    health_timeout: Annotated[Duration, Field(gt=0, le=300)] = 30.0
    """Time limit of the health check; then it is killed, and the node counts as not asked."""


class Configuration(BaseSettings):
    """Effective configuration of one run, made by `resihp.wrapper.config.sources.read`."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter=ENV_SEPARATOR,
        nested_model_default_partial_update=True,
    )

    job: JobSection = JobSection()
    layout: LayoutSection = LayoutSection()
    adapt: AdaptSection = AdaptSection()
    progress: ProgressSection = ProgressSection()
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

    @classmethod
    def merged(
        cls,
        given: Mapping[str, Mapping[str, Any]],
        files: list[tuple[str, dict[str, Any]]],
        origins: dict[tuple[str, str], str],
    ) -> Configuration:
        """Return the given values over those of the environment and of the files, the strongest first.

        `origins`: the strongest source of each (section, key). Raises pydantic's ValidationError.
        """
        with _files_lock:
            cls._files = files
            try:
                configuration = cls(**given)  # type: ignore[arg-type]  # sections as mappings, which pydantic validates
            finally:
                cls._files = []
        configuration._origins = origins
        return configuration

    def origin(self, section: str, key: str) -> str | None:
        """Return the strongest source that sets a key; None if the default applies."""
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
