"""Checks of `resihp doctor` on Slurm: whether it exists, whether the user may drain nodes, and whether jobs survive the
loss of nodes.

Each check takes the client to query (`resihp.slurm.client`, `resihp.slurm.survey`) and yields results. If there is no
answer, the result is `unknown`, never ok.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from resihp.slurm.errors import SlurmError, SlurmRefusedError
from resihp.slurm.render import time_limit
from resihp.wrapper.commands.doctor.machine import CheckResult
from resihp.wrapper.commands.submit import advice_on, exclude_option

if TYPE_CHECKING:
    from resihp.slurm.client import Slurm
    from resihp.slurm.survey import PartitionView, Survey
    from resihp.wrapper.config.schema import Configuration

MIN_RELEASE = (20, 11, 0)
TESTED_RELEASES = ((22, 5), (26, 5))
"""Oldest and newest release of the tested range; the tests run on 22.05.8, 24.11.5 and 26.05.5."""
REPEATED_RESIZE_SINCE = (24, 11, 0)
"""First release with which a job can shrink more than once without slurmdbd (measured: 24.11.5 and 26.05.5 can, 22.05.8
cannot)."""
EXPEDITED_REQUEUE_SINCE = (25, 11, 0)
SEGMENTS_SINCE = (24, 11, 0)
JOB_END_TIME_SINCE = (24, 11, 0)
"""First releases of Slurm with sbatch --requeue=expedite, sbatch --segment and SLURM_JOB_END_TIME. They were measured
in the same way, except for --requeue=expedite, which is new in 25.11 and must be enabled by the site."""
CGROUPS_V2 = Path("/sys/fs/cgroup/cgroup.controllers")
MIN_KILL_WAIT_S = 10
PRIVATE_FOLDERS = ("/tmp", "/dev/shm", "/var/tmp")
"""Folders that job_container/tmpfs gives to each job, by default or where `Dirs` in job_container.conf names them."""
TEST_JOB_TIME_S = 1200.0
"""Time limit, in seconds, of a job that is only tested for submission."""
NO_ANSWER_ADVICE = "scontrol ping; sinfo"


def is_there() -> bool:
    """Return whether this machine has Slurm's commands."""
    return shutil.which("scontrol") is not None and shutil.which("sbatch") is not None


def version(slurm: Slurm) -> Iterator[CheckResult]:
    release = slurm.version()
    text = f"{release[0]}.{release[1]:02}.{release[2]}"
    if release < MIN_RELEASE:
        older = f"{text}: older than {MIN_RELEASE[0]}.{MIN_RELEASE[1]:02}, the oldest supported release"
        yield CheckResult(check="slurm", outcome="failed", text=older, advice="use a cluster with a later Slurm")
        return
    cluster = slurm.cluster()
    yield CheckResult(check="slurm", outcome="ok", text=f"{text}, cluster {cluster}, the controller answers")
    oldest, newest = TESTED_RELEASES
    if not oldest <= release[:2] <= newest:
        age = "older" if release[:2] < oldest else "newer"
        tried = f"{oldest[0]}.{oldest[1]:02} to {newest[0]}.{newest[1]:02}"
        untried = f"{text} is {age} than the releases that resihp was tested with, {tried}"
        yield CheckResult(check="slurm", outcome="warning", text=untried, advice="try a short job first")


def offers(release: tuple[int, int, int], settings: Mapping[str, str], survey: Survey) -> Iterator[CheckResult]:
    """Report useful features of this release of Slurm that older releases lack. Missing features are not reported."""
    features = []
    if release >= JOB_END_TIME_SINCE:
        features.append("jobs know their end time (SLURM_JOB_END_TIME)")
    if release >= SEGMENTS_SINCE and settings.get("TopologyPlugin") == "topology/block":
        features.append("nodes come in blocks: sbatch --segment, in extra of [slurm], keeps a job's nodes together")
    if release >= EXPEDITED_REQUEUE_SINCE:
        try:
            survey.would_start(["--nodes=1", f"--time={time_limit(TEST_JOB_TIME_S)}", "--requeue=expedite"])
        except SlurmRefusedError:
            features.append("sbatch --requeue=expedite exists, but is not allowed at this site")
        else:
            features.append("sbatch --requeue=expedite works: a requeued job keeps its nodes")
    if settings.get("AuthType") == "auth/slurm":
        features.append("auth/slurm in place of munge")
    if "cgroup" in settings.get("ProctrackType", "") and _second_cgroups(settings):
        features.append("control groups v2")
    if features:
        yield CheckResult(check="newer Slurm", outcome="ok", text="; ".join(features))


def _second_cgroups(settings: Mapping[str, str]) -> bool:
    plugin = settings.get("CgroupPlugin", "autodetect")
    return plugin.endswith("v2") or (plugin == "autodetect" and CGROUPS_V2.exists())


def survival(settings: Mapping[str, str]) -> Iterator[CheckResult]:
    """Check the settings that decide whether a job with --no-kill survives the death of a node, and how it ends."""
    trouble = []
    if _seconds(settings.get("InactiveLimit", "0")):
        trouble.append(
            (
                f"InactiveLimit={settings['InactiveLimit']}: Slurm ends a job whose batch host is lost for that long",
                "ask for InactiveLimit=0, or expect a requeue when the batch host dies",
            )
        )
    if settings.get("ProctrackType", "").endswith("/pgid"):
        trouble.append(("ProctrackType=pgid: processes of a dead job may survive", "ask for proctrack/cgroup"))
    wait = _seconds(settings.get("KillWait", "30"))
    if wait < MIN_KILL_WAIT_S:
        text = f"KillWait={wait} s: little time to write the ledger when a job is cancelled"
        trouble.append((text, "ask for KillWait=30"))
    local = Path(os.environ.get("RESIHP_LOCAL") or "/var/tmp")
    if "tmpfs" in settings.get("JobContainerType", "") and any(map(local.is_relative_to, PRIVATE_FOLDERS)):
        text = (
            f"{settings['JobContainerType']}: {local} may be the job's own, and removed with a journal in it at its end"
        )
        trouble.append(
            (text, "set RESIHP_LOCAL to a folder of yours on local disk that job_container.conf leaves alone")
        )
    notices = settings.get("SlurmdTimeout", "unknown")
    facts = [
        f"Slurm notices a dead node after {notices}, resihp after 6 s",
        *(["KillOnBadExit=1, which resihp overrides"] if settings.get("KillOnBadExit") == "1" else []),
    ]
    yield CheckResult(check="node death", outcome="ok", text="jobs ask for --no-kill; " + "; ".join(facts))
    for text, advice in trouble:
        yield CheckResult(check="node death", outcome="warning", text=text, advice=advice)


def requeue(settings: Mapping[str, str]) -> Iterator[CheckResult]:
    usual = "by default" if settings.get("JobRequeue", "1") != "0" else "on request, as resihp's jobs do"
    codes = settings.get("RequeueExit", "")
    mode, kind = settings.get("PreemptMode", "OFF"), settings.get("PreemptType", "preempt/none")
    text = f"jobs are requeued {usual}" + (f", and on exit codes {codes}" if codes else "")
    if "enable_expedited_requeue" in settings.get("SlurmctldParameters", ""):
        text += ", at once with --requeue=expedite"
    if kind == "preempt/none" or mode.upper() == "OFF":
        yield CheckResult(check="requeue", outcome="ok", text=f"{text}; no preemption")
        return
    signalled = "send_user_signal" in settings.get("PreemptParameters", "")
    text += f"; preemption by {mode.lower()}"
    text += ", with the warning signal before it" if signalled else ", with TERM and the partition's GraceTime at best"
    yield CheckResult(
        check="requeue",
        outcome="ok" if signalled else "warning",
        text=text,
        advice="" if signalled else "PreemptParameters=send_user_signal and a GraceTime leave time for a checkpoint",
    )


def firewall(settings: Mapping[str, str], ports: str) -> Iterator[CheckResult]:
    """Warn if Slurm has a range of ports for srun and none is configured for resihp: a site with such a range usually
    blocks all other ports between nodes.

    `ports`: the range configured for resihp; empty if none is.
    """
    range_of_srun = settings.get("SrunPortRange", "").replace("0-0", "")
    theirs = "; the kernel chooses the ports of gloo and NCCL (net.ipv4.ip_local_port_range)"
    if ports:
        yield CheckResult(check="firewall", outcome="ok", text=f"jobs listen on {ports}{theirs}")
    elif range_of_srun:
        text = f"SrunPortRange={range_of_srun}: other ports may be closed between nodes, but jobs use any port{theirs}"
        advice = f'set ports in [slurm], as ports = "{range_of_srun}"; salloc --nodes=2 resihp doctor tests it'
        yield CheckResult(check="firewall", outcome="warning", text=text, advice=advice)
    else:
        yield CheckResult(check="firewall", outcome="ok", text="Slurm sets no range of ports; jobs use any port")


def rights(survey: Survey, settings: Mapping[str, str], user: str, spool: Path | None) -> Iterator[CheckResult]:
    """Check whether the user may drain nodes, directly or through the site's hook."""
    try:
        operator = survey.is_operator(user, settings)
    except SlurmError as error:
        yield CheckResult(
            check="drain", outcome="unknown", text=str(error), advice="sacctmgr show user $USER withassoc"
        )
        return
    if operator:
        yield CheckResult(check="drain", outcome="ok", text=f"{user} may drain nodes")
    elif spool is not None and os.access(spool, os.W_OK | os.X_OK):
        yield CheckResult(check="drain", outcome="ok", text=f"{user} may ask the site's hook, in {spool}")
    else:
        text = f"{user} may not drain nodes, and there is no site hook: bad nodes are only excluded from your own jobs"
        advice = "ask the site to install the hook (slurm/site/README.md), or to make you an operator"
        yield CheckResult(check="drain", outcome="warning", text=text, advice=advice)


def releases_nodes(release: tuple[int, int, int], settings: Mapping[str, str]) -> Iterator[CheckResult]:
    if release < REPEATED_RESIZE_SINCE and "slurmdbd" not in settings.get("AccountingStorageType", ""):
        text = "without slurmdbd, a job can release only one node; it keeps further ones until its end"
        yield CheckResult(check="release", outcome="ok", text=text)


def chosen(views: Sequence[PartitionView], wanted: str) -> list[str]:
    """Return the partitions for a job that requests `wanted`, where empty means Slurm's default; an empty list if there
    is no default."""
    return [name for name in wanted.split(",") if name] or [view.name for view in views if view.default][:1]


def partitions(partition_views: Sequence[PartitionView], wanted: str) -> Iterator[CheckResult]:
    """Check the job's partitions. `wanted`: the configured partition; empty for Slurm's default."""
    names = list(dict.fromkeys(view.name for view in partition_views))
    named = chosen(partition_views, wanted)
    if not named:
        text = f"Slurm has no default partition; there are {', '.join(names) or 'none'}"
        yield CheckResult(check="partition", outcome="warning", text=text, advice="set partition in [slurm]")
    for name in named:
        views = [view for view in partition_views if view.name == name]
        if not views:
            text = f"{name}: not among the partitions you may use: {', '.join(names) or 'none'}"
            yield CheckResult(check="partition", outcome="failed", text=text, advice="set partition in [slurm]; sinfo")
        elif not any(view.up for view in views):
            yield CheckResult(check="partition", outcome="failed", text=f"{name}: is down", advice=f"sinfo -p {name}")
        else:
            kinds = ", ".join(f"{view.nodes} with {view.gpus} GPUs" for view in views)
            idle = sum(view.nodes_idle for view in views)
            limit = "no time limit" if views[0].seconds is None else f"at most {views[0].seconds / 3600:g} h"
            yield CheckResult(check="partition", outcome="ok", text=f"{name}: nodes {kinds}; {idle} idle; {limit}")


def submission(survey: Survey, configuration: Configuration, avoided: Sequence[str] = ()) -> Iterator[CheckResult]:
    """Check that Slurm would accept the job, or a small one without a job file. Submits nothing. `avoided`: nodes that
    the user's jobs avoid."""
    job, section = configuration.job, configuration.slurm
    nodes = job.nodes + section.spares
    seconds = TEST_JOB_TIME_S if job.time is None else job.time
    options = ["--no-kill", f"--nodes={nodes}", "--ntasks-per-node=1", f"--time={time_limit(seconds)}"]
    options.append("--requeue=expedite" if section.requeue == "expedite" else "--requeue")
    options.append(f"--signal=B:USR2@{round(section.warning)}")
    if configuration.origin("job", "gpus_per_node"):
        gpus = f"{section.gpu_type}:{job.gpus_per_node}" if section.gpu_type else str(job.gpus_per_node)
        options.append(f"--gpus-per-node={gpus}")
        options += ["--exclusive", "--mem=0"] if section.exclusive else []
    for name in ("partition", "account", "qos", "constraint", "reservation"):
        if value := getattr(section, name):
            options.append(f"--{name}={value}")
    options += [*section.extra, *exclude_option(section.extra, avoided)]
    try:
        answer = survey.would_start(options)
    except SlurmRefusedError as error:
        refusal = str(error)
        advice = advice_on(refusal, options) or "sacctmgr show associations user=$USER"
        yield CheckResult(check="submission", outcome="failed", text=refusal, advice=advice)
    else:
        size = "one node" if nodes == 1 else f"{nodes} nodes"
        yield CheckResult(check="submission", outcome="ok", text=f"a job of {size}, {answer}")


def munge(survey: Survey, settings: Mapping[str, str]) -> Iterator[CheckResult]:
    kind = settings.get("AuthType", "auth/munge")
    if kind != "auth/munge":
        yield CheckResult(check="munge", outcome="skipped", text=f"Slurm here uses {kind}")
        return
    if shutil.which("munge") is None:
        yield CheckResult(
            check="munge",
            outcome="skipped",
            text="the command munge is not installed; Slurm's answers show that it works",
        )
        return
    try:
        survey.munge(settings)
    except SlurmRefusedError as error:
        yield CheckResult(check="munge", outcome="failed", text=str(error), advice="date; systemctl status munge")
    else:
        yield CheckResult(check="munge", outcome="ok", text="creates credentials and accepts them")


def _seconds(text: str) -> int:
    """Return the number of seconds of a time in scontrol's form, such as `30 sec` or `5 min`."""
    match = re.match(r"(\d+)\s*(\w*)", text)
    if match is None:
        return 0
    return int(match[1]) * {"min": 60, "hour": 3600, "hours": 3600}.get(match[2], 1)
