"""What `resihp doctor` asks of Slurm: is it there, may we drain, will its settings let a job survive its nodes.

Each check takes who answers (`slurm.client`, `slurm.survey`) and returns findings; no answer is `unknown`, never ok.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slurm.errors import SlurmError, SlurmRefusedError
from slurm.render import time_limit
from wrapper.commands.doctor.machine import CheckResult
from wrapper.commands.submit import MENDED

if TYPE_CHECKING:
    from slurm.client import Slurm
    from slurm.survey import PartitionView, Survey
    from wrapper.config.schema import Configuration

OLDEST = (20, 11, 0)
MEASURED = ((22, 5), (26, 5))
"""The oldest and the newest release that the tests of Slurm run on: 22.05.8, 24.11.5 and 26.05.5."""
RESIZES_AGAIN = (24, 11, 0)
"""Since then a job can shrink more than once without slurmdbd (measured: 22.05.8 not, 24.11.5 and 26.05.5)."""
EXPEDITES = (25, 11, 0)
SEGMENTS = (24, 11, 0)
TELLS_THE_END = (24, 11, 0)
"""sbatch --requeue=expedite, sbatch --segment, SLURM_JOB_END_TIME: measured likewise, but for the first, which is
new in 25.11 and needs the site's leave."""
CGROUPS_V2 = Path("/sys/fs/cgroup/cgroup.controllers")
SHORTEST_KILL_WAIT_S = 10
SMALL_S = 1200.0
"""Of a job that is only tried."""
NO_ANSWER = "scontrol ping; sinfo"


def is_there() -> bool:
    """Whether this machine has Slurm's commands."""
    return shutil.which("scontrol") is not None and shutil.which("sbatch") is not None


def version(slurm: Slurm) -> Iterator[CheckResult]:
    found = slurm.version()
    text = f"{found[0]}.{found[1]:02}.{found[2]}"
    if found < OLDEST:
        older = f"{text}: older than {OLDEST[0]}.{OLDEST[1]:02}, whose fields are asked for"
        yield CheckResult(check="slurm", outcome="failed", text=older, advice="use a cluster with a later Slurm")
        return
    cluster = slurm.cluster()
    yield CheckResult(check="slurm", outcome="ok", text=f"{text}, cluster {cluster}, the controller answers")
    oldest, newest = MEASURED
    if not oldest <= found[:2] <= newest:
        which = "older" if found[:2] < oldest else "newer"
        tried = f"{oldest[0]}.{oldest[1]:02} to {newest[0]}.{newest[1]:02}"
        untried = f"{text} is {which} than the releases that resihp was tried with, {tried}"
        yield CheckResult(check="slurm", outcome="warning", text=untried, advice="try a short job first")


def offers(found: tuple[int, int, int], settings: Mapping[str, str], survey: Survey) -> Iterator[CheckResult]:
    """What this Slurm has that older ones have not; nothing is told of what it has not."""
    there = []
    if found >= TELLS_THE_END:
        there.append("jobs are told their end (SLURM_JOB_END_TIME)")
    if found >= SEGMENTS and settings.get("TopologyPlugin") == "topology/block":
        there.append("nodes come in blocks: sbatch --segment, in extra of [slurm], keeps a job's nodes together")
    if found >= EXPEDITES:
        try:
            survey.would_start(["--nodes=1", f"--time={time_limit(SMALL_S)}", "--requeue=expedite"])
        except SlurmRefusedError:
            there.append("sbatch --requeue=expedite is there, but not allowed at this site")
        else:
            there.append("sbatch --requeue=expedite is there: a job keeps its nodes when it is run again")
    if settings.get("AuthType") == "auth/slurm":
        there.append("auth/slurm in place of munge")
    if "cgroup" in settings.get("ProctrackType", "") and _second_cgroups(settings):
        there.append("control groups v2")
    if there:
        yield CheckResult(check="newer Slurm", outcome="ok", text="; ".join(there))


def _second_cgroups(settings: Mapping[str, str]) -> bool:
    plugin = settings.get("CgroupPlugin", "autodetect")
    return plugin.endswith("v2") or (plugin == "autodetect" and CGROUPS_V2.exists())


def survival(settings: Mapping[str, str]) -> Iterator[CheckResult]:
    """Settings that decide whether a job with --no-kill goes on when a node dies, and how it ends."""
    trouble = []
    if _seconds(settings.get("InactiveLimit", "0")):
        trouble.append(
            (
                f"InactiveLimit={settings['InactiveLimit']}: Slurm ends a job whose batch host is gone so long",
                "ask for InactiveLimit=0, or expect a requeue when the batch host dies",
            )
        )
    if settings.get("ProctrackType", "").endswith("/pgid"):
        trouble.append(("ProctrackType=pgid: processes of a lost job may stay", "ask for proctrack/cgroup"))
    wait = _seconds(settings.get("KillWait", "30"))
    if wait < SHORTEST_KILL_WAIT_S:
        text = f"KillWait={wait} s: little time to write the ledger when a job is cancelled"
        trouble.append((text, "ask for KillWait=30"))
    notices = settings.get("SlurmdTimeout", "unknown")
    told = [
        f"Slurm notices a dead node after {notices}, resihp after 6 s",
        *(["KillOnBadExit=1, which resihp overrules"] if settings.get("KillOnBadExit") == "1" else []),
    ]
    yield CheckResult(check="node death", outcome="ok", text="jobs ask for --no-kill; " + "; ".join(told))
    for text, advice in trouble:
        yield CheckResult(check="node death", outcome="warning", text=text, advice=advice)


def requeue(settings: Mapping[str, str]) -> Iterator[CheckResult]:
    usual = "by default" if settings.get("JobRequeue", "1") != "0" else "for jobs that ask, as ours do"
    codes = settings.get("RequeueExit", "")
    mode, kind = settings.get("PreemptMode", "OFF"), settings.get("PreemptType", "preempt/none")
    text = f"jobs run again {usual}" + (f", and on exit codes {codes}" if codes else "")
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
    """A site that gives srun a range of ports lets nothing else through between its nodes, usually. `ports`: ours."""
    range_of_srun = settings.get("SrunPortRange", "").replace("0-0", "")
    theirs = "; what gloo and NCCL listen on is the kernel's choice (net.ipv4.ip_local_port_range)"
    if ports:
        yield CheckResult(check="firewall", outcome="ok", text=f"jobs listen on {ports}{theirs}")
    elif range_of_srun:
        text = f"SrunPortRange={range_of_srun}: other ports may be closed between nodes, and jobs listen on any{theirs}"
        advice = f'set ports in [slurm], as ports = "{range_of_srun}"; salloc --nodes=2 resihp doctor tries it'
        yield CheckResult(check="firewall", outcome="warning", text=text, advice=advice)
    else:
        yield CheckResult(check="firewall", outcome="ok", text="Slurm names no range of ports; jobs listen on any")


def rights(survey: Survey, settings: Mapping[str, str], user: str, spool: Path | None) -> Iterator[CheckResult]:
    """Who may drain: we, the site's hook for us, or nobody."""
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
        text = f"{user} may not drain nodes, and there is no hook to ask: bad nodes are only kept out of your own jobs"
        advice = "ask the site to install the hook (slurm/site/README.md), or to make you an operator"
        yield CheckResult(check="drain", outcome="warning", text=text, advice=advice)


def releases_nodes(found: tuple[int, int, int], settings: Mapping[str, str]) -> Iterator[CheckResult]:
    if found < RESIZES_AGAIN and "slurmdbd" not in settings.get("AccountingStorageType", ""):
        text = "without slurmdbd a job can give back one node only; others stay with it to its end"
        yield CheckResult(check="release", outcome="ok", text=text)


def chosen(found: Sequence[PartitionView], wanted: str) -> list[str]:
    """Where a job runs that asks for `wanted`, empty for Slurm's default; none if there is none."""
    return [name for name in wanted.split(",") if name] or [view.name for view in found if view.default][:1]


def partitions(found: Sequence[PartitionView], wanted: str) -> Iterator[CheckResult]:
    """`wanted`: the configured partition; empty for Slurm's default."""
    names = list(dict.fromkeys(view.name for view in found))
    named = chosen(found, wanted)
    if not named:
        text = f"Slurm has no default partition; there are {', '.join(names) or 'none'}"
        yield CheckResult(check="partition", outcome="warning", text=text, advice="set partition in [slurm]")
    for name in named:
        views = [view for view in found if view.name == name]
        if not views:
            text = f"{name}: there is none of that name, or none for you; there are {', '.join(names) or 'none'}"
            yield CheckResult(check="partition", outcome="failed", text=text, advice="set partition in [slurm]; sinfo")
        elif not any(view.up for view in views):
            yield CheckResult(check="partition", outcome="failed", text=f"{name}: is down", advice=f"sinfo -p {name}")
        else:
            kinds = ", ".join(f"{view.nodes} of {view.gpus} GPUs" for view in views)
            idle = sum(view.nodes_idle for view in views)
            limit = "no time limit" if views[0].seconds is None else f"at most {views[0].seconds / 3600:g} h"
            yield CheckResult(check="partition", outcome="ok", text=f"{name}: nodes {kinds}; {idle} idle; {limit}")


def submission(survey: Survey, configuration: Configuration) -> Iterator[CheckResult]:
    """Whether Slurm would take the job, or a small one if there is no job file. Submits nothing."""
    job, section = configuration.job, configuration.slurm
    nodes = job.nodes + section.spares
    seconds = SMALL_S if job.time is None else job.time
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
    try:
        answer = survey.would_start([*options, *section.extra])
    except SlurmRefusedError as error:
        said = str(error)
        advice = next((how for words, how in MENDED if words in said.lower()), "sacctmgr show associations user=$USER")
        yield CheckResult(check="submission", outcome="failed", text=said, advice=advice)
    else:
        what = "one node" if nodes == 1 else f"{nodes} nodes"
        yield CheckResult(check="submission", outcome="ok", text=f"a job of {what}, {answer}")


def munge(survey: Survey, settings: Mapping[str, str]) -> Iterator[CheckResult]:
    kind = settings.get("AuthType", "auth/munge")
    if kind != "auth/munge":
        yield CheckResult(check="munge", outcome="skipped", text=f"Slurm here uses {kind}")
        return
    if shutil.which("munge") is None:
        yield CheckResult(
            check="munge", outcome="skipped", text="the command munge is not here; Slurm's answers show it works"
        )
        return
    try:
        survey.munge(settings)
    except SlurmRefusedError as error:
        yield CheckResult(check="munge", outcome="failed", text=str(error), advice="date; systemctl status munge")
    else:
        yield CheckResult(check="munge", outcome="ok", text="makes credentials, and takes its own")


def _seconds(text: str) -> int:
    """`30 sec` or `5 min`, as scontrol shows times."""
    found = re.match(r"(\d+)\s*(\w*)", text)
    if found is None:
        return 0
    return int(found[1]) * {"min": 60, "hour": 3600, "hours": 3600}.get(found[2], 1)
