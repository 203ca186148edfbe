"""Configuration: who overrules whom, and that nothing is ignored."""

from __future__ import annotations

import ast
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from resihp.errors import ConfigurationError
from resihp.settings import Detection, ProbeLimits, Settings
from resihp.slurm.drains.site_limits import DrainLimits
from resihp.wrapper.commands import run
from resihp.wrapper.config import schema
from resihp.wrapper.config.schema import Configuration
from resihp.wrapper.config.site_limits import drain_limits
from resihp.wrapper.config.sources import read

SECTIONS = {
    "section": "DetectSection",
    "adapt": "AdaptSection",
    "layout": "LayoutSection",
    "slurm": "SlurmSection",
    "configuration.job": "JobSection",
    "configuration.checkpoint": "CheckpointSection",
}
"""Sections by their names in `resihp.wrapper.commands.run`."""


def toml(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_precedence_key_by_key(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, job_size, keeping = (
        "[layout]\ntp = {0}\npp = {0}\n",
        "[job]\nnodes = {0}\ngpus_per_node = {0}\n",
        "keep = {0}\n",
    )
    every = "[checkpoint]\nevery = {0}\n"
    etc = toml(fresh_home / "etc.toml", (layout + job_size + every + keeping).format(1))
    user = toml(fresh_home / "user.toml", (layout + job_size + every).format(2))
    here = toml(fresh_home / "resihp.toml", (layout + job_size).format(3))
    job = toml(fresh_home / "job.toml", "[layout]\ntp = 4\npp = 4\n[job]\nnodes = 4\n")
    monkeypatch.setenv("RESIHP_LAYOUT__TP", "5")
    monkeypatch.setenv("RESIHP_LAYOUT__PP", "5")
    found = read({"layout": {"tp": 6}}, job, site=(here, user, etc))
    assert (found.layout.tp, found.layout.pp) == (6, 5)
    assert (found.job.nodes, found.job.gpus_per_node) == (4, 3)
    assert (found.checkpoint.every, found.checkpoint.keep) == (2, 1)
    assert found.layout.schedule == "1f1b"


def test_files_are_found_where_they_are_said_to_be(fresh_home: Path) -> None:
    toml(fresh_home / "configuration" / "resihp" / "config.toml", "[layout]\ntp = 2\npp = 2\n")
    toml(fresh_home / "resihp.toml", "[layout]\npp = 3\n")
    assert (read({}).layout.tp, read({}).layout.pp) == (2, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[layout]\ntq = 2\n", r"job\.toml: unknown key tq in \[layout\]; did you mean tp\?"),
        ("[layuot]\ntp = 2\n", r"job\.toml: unknown section \[layuot\]; did you mean layout\?"),
        ("tp = 2\n", r"job\.toml: unknown section \[tp\]; valid: job, layout"),
        ("layout = 2\n", r"layout is a section"),
        ("[layout]\ntp = 0\n", r"job\.toml: \[layout\] tp: .* got 0"),
        (
            "[layout]\nschedule = 'gpipe'\n",
            r"job\.toml: \[layout\] schedule: must be one of 1f1b, interleaved, zero-bubble, got 'gpipe'",
        ),
        ("[layout]\nvirtual_stages = 0\n", r"\[layout\] virtual_stages: .* got 0"),
        ("[layout]\nvirtual_stage = 2\n", r"unknown key virtual_stage in \[layout\]; did you mean virtual_stages\?"),
        ("[layout]\nsequence_parallel = 'often'\n", r"\[layout\] sequence_parallel: .* got 'often'"),
        ("[adapt]\nmode = 'restart'\n", r"\[adapt\] mode: restart is not supported yet, only in-job and observe are"),
        ("[adapt]\nmode = 'in_job'\n", r"\[adapt\] mode: .*'in-job'.*got 'in_job'"),
        ("[adapt]\ncome_backs = -1\n", r"\[adapt\] come_backs: .* got -1"),
        ("[adapt]\ncomebacks = 1\n", r"unknown key comebacks in \[adapt\]; did you mean come_backs\?"),
        (
            "[detect]\nlink_confirmed = 0.5\n",
            r"job\.toml: \[detect\] link_confirmed 0\.5 is below link_fit 0\.6: .*; raise link_confirmed or lower",
        ),
        ("[detect]\nlink_fit = 0.9\n", r"job\.toml: \[detect\] link_confirmed 0\.8 is below link_fit 0\.9"),
        ("[detect]\nfit = 0.95\n", r"\[detect\] fit: .*less than or equal to 0\.9, got 0\.95"),
        ("[detect]\nfit = nan\n", r"\[detect\] fit: .*got nan"),
        ("[detect]\nsure = 1\n", r"\[detect\] sure: .*less than or equal to 0\.999999"),
        ("[detect]\nleast = 3\n", r"\[detect\] least: .*less than or equal to 0\.5"),
        ("[detect]\npatience = 1\n", r"\[detect\] patience: .*greater than or equal to 2"),
        ("[detect]\nfalse_alarms_per = 0\n", r"\[detect\] false_alarms_per: .*greater than or equal to 100"),
        ("[detect]\nmode = 'ours'\n", r"\[detect\] mode: .*'sequential', 'paper' or 'greyhound', got 'ours'"),
        (
            "[detect]\nmode = 'paper'\nleast = 0.1\n",
            r"job\.toml: \[detect\] least applies to mode sequential only, and the mode is paper; leave it out",
        ),
        ("[job]\nmemory_per_device = 80\n", r"\[job\] memory_per_device: not a size with a unit; examples: 80GB"),
        ("[job]\nmemory_per_device = '80'\n", r"not a size with a unit.*, got '80'"),
        ("[job]\nmemory_per_device = '0GB'\n", r"must be more than 0 bytes"),
        ("[slurm]\nspare = 1\n", r"unknown key spare in \[slurm\]; did you mean spares\?"),
        ("[slurm]\npartition = 'gpu; rm -rf'\n", r"\[slurm\] partition: must consist of letters, digits and"),
        ("[slurm]\npartition = '--wrap=x'\n", r"\[slurm\] partition: must consist"),
        ("[slurm]\nconstraint = 'a100 `id`'\n", r"\[slurm\] constraint: must consist of feature names"),
        ("[slurm]\non_warning = 'stop'\n", r"\[slurm\] on_warning: .*'requeue' or 'end', got 'stop'"),
        ("[slurm]\nwarning = '5s'\n", r"\[slurm\] warning: .*greater than or equal to 60"),
        ("[slurm]\nextra = ['-N 3']\n", r"\[slurm\] extra: must be a long option of sbatch"),
        ("[slurm]\nextra = ['--no-req']\n", r"\[slurm\] extra: --no-requeue: use \[slurm\] on_warning"),
        ("[slurm]\nstep_extra = ['-n 3']\n", r"\[slurm\] step_extra: must be a long option of srun"),
        ("[slurm]\nstep_extra = ['--mpi=pmix']\n", r"step_extra: --mpi cannot be changed: agents are no MPI processes"),
        ("[slurm]\nstep_extra = ['--container-image=a']\n", r"step_extra: agents run outside of containers; use \[con"),
        ("[slurm]\nstep_extra = ['--kill-on=1']\n", r"--kill-on-bad-exit cannot be changed: the step outlives a node"),
        ("[slurm]\nextra = ['--comment=a\\nb']\n", r"\[slurm\] extra: must be a long option of sbatch"),
        ("[slurm]\nextra = ['--comment=$(id)']\n", r"\[slurm\] extra: must be a long option of sbatch"),
        ("[slurm]\nextra = ['--nodes=3']\n", r"\[slurm\] extra: --nodes: use \[job\] nodes and \[slurm\] spares"),
        ("[slurm]\nextra = ['--no-kill']\n", r"\[slurm\] extra: --no-kill is set by resihp"),
        ("[slurm]\nports = '60001'\n", r"\[slurm\] ports: must be a range of ports, as 60001-63000, got '60001'"),
        ("[slurm]\nports = '0-63000'\n", r"\[slurm\] ports: must lie within 1024-65535"),
        ("[slurm]\nports = '63000-60001'\n", r"\[slurm\] ports: must lie within .* the lower port first"),
        ("[slurm]\nports = '60001-60002'\n", r"\[slurm\] ports: must have at least 16 ports"),
        ("[slurm]\nports = 60001\n", r"\[slurm\] ports: .*string"),
        ("[network]\ninterface = '^docker0'\n", r"\[network\] interface: must be names of interfaces"),
        ("[network]\ncontrol = 'eth0 eth1'\n", r"\[network\] control: must be names of interfaces"),
        ("[container]\nruntime = 'docker'\n", r"\[container\] runtime: .*'apptainer'.*got 'docker'"),
        ("[container]\nmounts = ['data']\n", r"\[container\] mounts: must be /source, /source:/destination"),
        ("[job]\ntime = '24'\n", r"\[job\] time: not a time with its unit; examples: 24h, .*got '24'"),
        ("[job]\ntime = 3600\n", r"\[job\] time: not a time with its unit.*got 3600"),
        ("[job]\ntime = '0h'\n", r"\[job\] time: must be more than 0 s"),
        ("[job]\nidle_limit = inf\n", r"\[job\] idle_limit: not a time with its unit; .*45s, .*; or never, got inf"),
        ("[slurm]\nwarning = inf\n", r"\[slurm\] warning: not a time with its unit.*got inf"),
        ("[job]\ntime = 'never'\n", r"\[job\] time: not a time with its unit"),
        ("[site]\ndrains = 1\n", r"job\.toml: \[site\] is allowed in /etc/resihp\.toml only"),
        ("[layout\n", r"job\.toml: .*line 1"),
    ],
)
def test_mistakes_name_their_place(fresh_home: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read({}, toml(fresh_home / "job.toml", text))


def test_mistakes_in_the_environment_name_it(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESIHP_LAYOUT__TQ", "2")
    with pytest.raises(ConfigurationError, match=r"environment: unknown key tq in \[layout\]; did you mean tp"):
        read({})
    monkeypatch.delenv("RESIHP_LAYOUT__TQ")
    monkeypatch.setenv("RESIHP_LAYOUT__TP", "two")
    with pytest.raises(ConfigurationError, match=r"environment: \[layout\] tp: .*'two'"):
        read({})


def test_missing_job_file_is_told(fresh_home: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such file"):
        read({}, fresh_home / "job.toml")


def test_commands_and_numbers_from_the_environment(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESIHP_JOB__COMMAND", '["python", "train.py"]')
    monkeypatch.setenv("RESIHP_CHECKPOINT__EVERY", "7")
    assert read({}).job.command == ("python", "train.py")
    assert read({}).checkpoint.every == 7


@pytest.mark.parametrize(
    ("text", "bytes_of_it"),
    [
        ("80GB", 80 * 10**9),
        ("80 gb", 80 * 10**9),
        ("79.5GiB", int(79.5 * 2**30)),
        ("512MiB", 512 * 2**20),
        ("512MB", 512 * 10**6),
        ("7kB", 7000),
        ("7KiB", 7168),
        ("1TB", 10**12),
        ("64B", 64),
    ],
)
def test_sizes_have_units(fresh_home: Path, text: str, bytes_of_it: int) -> None:
    assert read({"job": {"memory_per_device": text}}).job.memory_per_device == bytes_of_it
    assert read({}).job.memory_per_device is None


def test_layout_and_adaptation_from_a_job_file(fresh_home: Path) -> None:
    text = "[layout]\nschedule = 'interleaved'\nvirtual_stages = 2\nsequence_parallel = true\n[adapt]\ncome_backs = 0\n"
    found = read({}, toml(fresh_home / "job.toml", text))
    layout = found.layout
    assert (layout.schedule, layout.virtual_stages, layout.sequence_parallel) == ("interleaved", 2, True)
    assert found.adapt.come_backs == 0
    assert (read({}).layout.virtual_stages, read({}).adapt.come_backs) == (1, 3)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("24h", 86400), ("1h30m", 5400), ("2d", 172800), ("45s", 45), ("2-01:00:30", 176430), ("00:20:00", 1200)],
)
def test_times_have_units(fresh_home: Path, text: str, seconds: int) -> None:
    assert read({"job": {"time": text}}).job.time == seconds
    assert read({}).job.time is None


def test_the_last_processes_may_be_waited_for_for_ever(fresh_home: Path) -> None:
    assert read({}, toml(fresh_home / "job.toml", "[job]\nidle_limit = 'never'\n")).job.idle_limit is None
    assert read({}).job.idle_limit == 1800


def test_slurm_and_container_from_a_job_file(fresh_home: Path) -> None:
    text = (
        "[slurm]\npartition = 'gpu,gpu2'\nconstraint = '[a100|h100]&ib'\nspares = 1\nreplacements = 2\n"
        "warning = '10m'\nreplacement_min_left = '1h'\nextra = ['--mail-type=END', '--contiguous']\n"
        "[container]\nruntime = 'apptainer'\nimage = '/i.sif'\nmounts = ['/data', '/a:/b:ro']\n"
    )
    found = read({}, toml(fresh_home / "job.toml", text))
    assert (found.slurm.spares, found.slurm.replacements, found.slurm.drains) == (1, 2, 2)
    assert (found.slurm.warning, found.slurm.replacement_min_left) == (600, 3600)
    assert found.slurm.extra == ("--mail-type=END", "--contiguous")
    assert found.container.mounts == ("/data", "/a:/b:ro")
    assert (read({}).slurm.warning, read({}).slurm.replacement_min_left, read({}).container.runtime) == (300, 1800, "")


def test_a_sites_limits_on_drains_are_counts_or_shares(fresh_home: Path) -> None:
    def limits(drained: str, *partitions: str) -> DrainLimits:
        etc = toml(fresh_home / "etc.toml", f"[site]\ndrained = {drained}\nuser_drains_per_hour = 3\n")
        return drain_limits(read({}, site=(etc,), authority=etc), *partitions)

    assert limits("4", "gpu") == DrainLimits(drained=4, partition="gpu", user_drains_per_hour=3)
    share = DrainLimits(drained_share=0.025, partition="gpu,spare", user_drains_per_hour=3)
    assert limits("'2.5%'", "gpu", "", "spare", "gpu") == share
    text = r"etc\.toml: \[site\] drained: must be a whole number, 0 or more, or a share"
    for wrong in ("-1", "true", "'0%'", "'101%'", "'2'", "0.02", "'-2%'"):
        with pytest.raises(ConfigurationError, match=text):
            limits(wrong)


def test_a_site_bounds_what_users_ask_for(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "[site]\ndrains = 1\ndrained = 3\nreplacements = 0\npartitions = ['gpu', 'long']\n"
    text += "[slurm]\nspool = '/site/spool'\n"
    etc = toml(fresh_home / "etc.toml", text)

    def asked(slurm: str) -> Configuration:
        return read({}, toml(fresh_home / "job.toml", f"[slurm]\n{slurm}\n"), site=(etc,), authority=etc)

    assert asked("partition = 'gpu'").slurm.drains == 1, "the default of 2 gives way"
    assert asked("").slurm.spool == "/site/spool"
    assert asked("").site.drained == 3
    for slurm, message in (
        ("drains = 2", r"job\.toml: \[slurm\] drains: 2, but .*etc\.toml allows 1; lower it"),
        ("replacements = 1", r"job\.toml: \[slurm\] replacements: 1, but .*etc\.toml allows 0"),
        ("partition = 'gpu,debug'", r"\[slurm\] partition: debug is not allowed by .*etc\.toml; choose gpu or long"),
        ("replacement_partition = 'debug'", r"\[slurm\] replacement_partition: debug is not allowed by .*etc\.toml"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            asked(slurm)
    monkeypatch.setenv("RESIHP_SLURM__DRAINS", "3")
    with pytest.raises(ConfigurationError, match=r"environment: \[slurm\] drains: 3, but"):
        asked("")
    monkeypatch.setenv("RESIHP_SITE__DRAINS", "9")
    with pytest.raises(ConfigurationError, match=r"environment: \[site\] is allowed in"):
        asked("")


def test_where_a_value_comes_from_can_be_asked(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESIHP_JOB__NODES", "3")
    found = read({"layout": {"tp": 2}}, toml(fresh_home / "job.toml", "[job]\nnodes = 2\n[layout]\npp = 2\n"))
    assert found.origin("job", "nodes") == "environment"
    assert found.origin("layout", "tp") == "command line"
    assert found.origin("layout", "pp") == str(fresh_home / "job.toml")
    assert found.origin("job", "gpus_per_node") is None


def test_threads_that_read_at_once_read_their_own_files(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """As doctor's checks do."""
    usual = sys.getswitchinterval()
    request.addfinalizer(lambda: sys.setswitchinterval(usual))
    sys.setswitchinterval(1e-6)
    files = [tmp_path / f"{i}.toml" for i in range(4)]
    for i, file in enumerate(files):
        file.write_text(f"[job]\nnodes = {i + 1}\n")
    with ThreadPoolExecutor(max_workers=len(files)) as pool:
        found = list(pool.map(lambda i: read({}, files[i % 4], site=()).job.nodes, range(400)))
    assert found == [i % 4 + 1 for i in range(400)]


def test_a_default_of_the_controller_is_stated_once() -> None:
    """A key that `resihp run` hands to the controller as it is has the default of the controller's setting."""
    with_default = {
        field.name
        for struct in (Settings, Detection, ProbeLimits)
        for field in msgspec.structs.fields(struct)
        if not field.required
    }
    keys = {
        (SECTIONS[ast.unparse(value.value)], value.attr)
        for call in ast.walk(ast.parse(Path(run.__file__).read_text()))
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if keyword.arg in with_default and isinstance(value := keyword.value, ast.Attribute)
        if ast.unparse(value.value) in SECTIONS
    }
    assert {("AdaptSection", "examine"), ("DetectSection", "fit"), ("SlurmSection", "on_drain")} <= keys
    defaults = {
        (section.name, key.target.id): ast.unparse(key.value)
        for section in ast.parse(Path(schema.__file__).read_text()).body
        if isinstance(section, ast.ClassDef)
        for key in section.body
        if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name) and key.value is not None
    }
    stated_twice = [key for key in keys if not re.search(r"_(SETTINGS|DETECTION|PROBE_LIMITS)\.", defaults[key])]
    assert not stated_twice, "take it from `resihp.settings`"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("['nhc -q']", "must be one word for each argument"),
        ("['']", "must be one word for each argument"),
        ("['./nhc']", "must begin with an absolute path, or with a name that is found in the system's folders"),
        ("'nhc'", "tuple"),
    ],
)
def test_the_sites_health_command_is_no_line_for_a_shell(fresh_home: Path, command: str, message: str) -> None:
    file = toml(fresh_home / "etc.toml", f"[site]\nhealth_command = {command}\n")
    with pytest.raises(ConfigurationError, match=message):
        read({}, site=(file,), authority=file)
    good = toml(fresh_home / "etc.toml", "[site]\nhealth_command = ['dcgmi', 'health', '-c']\nhealth_timeout = '1m'\n")
    site = read({}, site=(good,), authority=good).site
    assert (site.health_command, site.health_timeout) == (("dcgmi", "health", "-c"), 60.0)
