"""What `resihp doctor` says of a site's settings that would break or cheat a job, before it is submitted.

Each check takes what Slurm answered (`slurm.survey`) and what the job asks for, and returns findings: what would happen
to the job, and what to set in the job file or to ask the administrator for. A setting that does no harm is not told.
Asks nothing itself; `wrapper.commands.doctor.command` does.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from resihp.words import count_of
from wrapper.commands.doctor.machine import CheckResult
from wrapper.exit_codes import EXIT_CODES, REQUEUE

if TYPE_CHECKING:
    from slurm.limits import Limit, Limits
    from slurm.survey import PartitionRules, PartitionView
    from wrapper.config.schema import Configuration


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a job asks Slurm for. `gpus_per_node` is 0, `seconds` None where nothing is said of them."""

    nodes: int
    """With its spares."""
    gpus_per_node: int
    seconds: float | None
    warning_s: float
    replacements: int
    particular: bool
    """Whether it says which nodes it wants: features, a type of GPU, names."""

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


def wanted(found: Configuration) -> Wanted:
    job, section = found.job, found.slurm
    told = ("--constraint", "--nodelist", "--gres", "--gpus", "--exclude", "--prefer")
    return Wanted(
        nodes=job.nodes + section.spares,
        gpus_per_node=job.gpus_per_node if found.origin("job", "gpus_per_node") else 0,
        seconds=job.time,
        warning_s=section.warning,
        replacements=section.replacements,
        particular=bool(section.constraint or section.gpu_type)
        or any(option.startswith(told) for option in section.extra),
    )


# --- partitions -----------------------------------------------------------------------------------------------------


def shape(views: Sequence[PartitionView], rules: PartitionRules, job: Wanted) -> Iterator[CheckResult]:
    """A partition against the job; `views` are its nodes, by their kinds."""

    def finding(outcome: str, text: str, advice: str) -> CheckResult:
        return CheckResult(check="partition", outcome=outcome, text=f"{rules.name}: {text}", advice=advice)  # type: ignore[arg-type]

    fit = [view for view in views if view.gpus >= job.gpus_per_node or view.unreadable]
    if doubt := next((view.unreadable for view in views if view.unreadable), ""):
        yield finding("warning", f"how many GPUs its nodes have is not known: {doubt}", "look at sinfo -o '%P %D %G'")
    there, count = sum(view.nodes for view in fit), sum(view.nodes for view in views)
    kinds = f"sinfo -p {rules.name} -o '%D %G %f' lists what there is"
    if job.nodes > there:
        text = f"{there} of its {count} nodes have {count_of(job.gpus_per_node, 'GPU')}"
        text += f", and the job asks for {count_of(job.nodes, 'node')}"
        yield finding("failed", text, f"{kinds}; lower nodes or gpus_per_node in [job], or spares in [slurm]")
    types = sorted({kind for view in fit for kind in view.gpu_types})
    if len(types) > 1 and job.gpus_per_node and job.nodes + job.replacements > 1 and not job.particular:
        text = f"its nodes have GPUs of different types ({', '.join(types)}), and the job takes any: all of its ranks "
        text += "go at the pace of the slowest"
        yield finding("warning", text, f"{kinds}; set gpu_type or constraint in [slurm]")
    if rules.max_nodes is not None and job.nodes > rules.max_nodes:
        text = f"a job gets {count_of(rules.max_nodes, 'node')} at most (MaxNodes): one that asks for {job.nodes} is "
        text += "refused, or waits for ever (PartitionNodeLimit)"
        yield finding("failed", text, "lower nodes in [job] or spares in [slurm], or set another partition")
    yield from _time(views, rules, job, finding)


def _time(
    views: Sequence[PartitionView], rules: PartitionRules, job: Wanted, finding: Callable[[str, str, str], CheckResult]
) -> Iterator[CheckResult]:
    most = rules.max_seconds
    if job.seconds is not None and most is not None and job.seconds > most:
        text = f"a job gets {_hours(most)} at most (MaxTime): one that asks for {_hours(job.seconds)} is refused, or "
        text += "waits for ever (PartitionTimeLimit)"
        yield finding("failed", text, "lower time in [job], or set another partition; a job goes on after a requeue")
    usual = next((view.default_seconds for view in views if view.default_seconds is not None), most)
    if job.seconds is None and usual is not None and usual < 2 * job.warning_s:
        text = f"a job that names no time gets {_hours(usual)} (DefaultTime), and is warned {job.warning_s:g} s before "
        text += "its end: it would save and be run again, over and over"
        yield finding("failed", text, "set time in [job]")


# --- what accounting allows -----------------------------------------------------------------------------------------


def limits(found: Limits, job: Wanted) -> Iterator[CheckResult]:
    """Limits that the job is beyond: Slurm takes it all the same, and lets it wait for ever."""
    told = False
    for limit in found.found:
        asked, each = _asked(limit, job)
        if asked is None:
            continue
        advice = _how_to_see(limit) + "; "
        if asked > limit.most:
            told = True
            what, most = _amount(limit, asked), _amount(limit, limit.most)
            text = f"the job asks for {what}, and {limit.whose} allows {most}{_per(limit)} ({limit.setting}): it is "
            text += "refused, or waits for ever"
            advice += "lower what [job] asks for, or set another qos or account in [slurm]"
            yield CheckResult(check="limits", outcome="failed", text=text, advice=advice)
        elif limit.per != "job" and job.replacements and asked + each > limit.most:
            told = True
            text = f"{limit.whose} allows {_amount(limit, limit.most)}{_per(limit)} ({limit.setting}): a node that is "
            text += "asked for in place of a lost one, as a job of its own, waits while this job has all of it"
            advice += "set spares in [slurm] instead of replacements, or ask for a higher limit"
            yield CheckResult(check="limits", outcome="warning", text=text, advice=advice)
    if found.unseen:
        told = True
        text = f"account {found.unseen}: Slurm does not show you its limits"
        yield CheckResult(check="limits", outcome="skipped", text=text, advice="ask the administrator for its GrpTRES")
    if not told:
        of = f"account {found.account}" if found.account else "no account"
        text = f"{of}, QOS {found.qos or 'of the cluster'}: nothing that the job is beyond"
        yield CheckResult(check="limits", outcome="ok", text=text)


def _asked(limit: Limit, job: Wanted) -> tuple[float | None, float]:
    """What the job has of it, and what a replacement adds; None for what is not known."""
    if limit.kind == "nodes":
        return job.nodes, 1
    if limit.kind == "gpus":
        return job.gpus, job.gpus_per_node
    if limit.kind == "time":
        return job.seconds, 0
    return (1, 1) if limit.kind in ("jobs", "submitted") else (None, 0)


def _amount(limit: Limit, count: float) -> str:
    if limit.kind == "time":
        return _hours(count)
    words = {"nodes": "node", "gpus": "GPU", "cpus": "CPU", "jobs": "running job", "submitted": "submitted job"}
    return f"{count:g} {words[limit.kind]}{'' if count == 1 else 's'}"


def _per(limit: Limit) -> str:
    return {"job": " a job", "user": " a user", "group": " to all its jobs together"}[limit.per]


def _how_to_see(limit: Limit) -> str:
    kind, _, name = limit.whose.partition(" ")
    if kind == "QOS":
        return f"sacctmgr show qos {name}"
    return "sacctmgr show assoc tree format=account,user,grptres,maxtres,maxjobs,maxwall"


# --- settings of the whole cluster ----------------------------------------------------------------------------------

FINAL = tuple(sorted({code for code in EXIT_CODES.values() if code != REQUEUE}))
"""Exit codes after which a job must not be run again."""


def exit_codes(settings: Mapping[str, str]) -> Iterator[CheckResult]:
    """RequeueExit runs a job again without a budget; on 22.05.8 with --no-requeue, too, on 24.11.5 not."""
    again = [code for code in codes(settings.get("RequeueExit", "")) if code in FINAL]
    if again:
        text = f"RequeueExit={settings['RequeueExit']}: a job that resihp ends with {_listed(again)}, for good, is run "
        text += "again by Slurm, over and over (93: the training program is broken)"
        advice = f"ask for RequeueExit without {_listed(again)}; scancel ends such a job"
        yield CheckResult(check="requeue", outcome="warning", text=text, advice=advice)
    held = [code for code in codes(settings.get("RequeueExitHold", "")) if code in FINAL]
    if held:
        text = f"RequeueExitHold={settings['RequeueExitHold']}: a job that ends with {_listed(held)} stays in the "
        text += "queue, held (SPECIAL_EXIT), and a chain behind it waits"
        yield CheckResult(check="requeue", outcome="warning", text=text, advice="scancel it, or ask for its removal")


def codes(text: str) -> list[int]:
    """`93`, `1,4-5`: exit codes, as slurm.conf lists them."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.strip().partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            found += range(int(first), int(last or first) + 1)
    return found


def visibility(settings: Mapping[str, str], operator: bool) -> Iterator[CheckResult]:
    """PrivateData does not bind operators, and one's own jobs are always seen."""
    hidden = set(settings.get("PrivateData", "").lower().split(","))
    if "nodes" in hidden and not operator:
        text = "PrivateData=nodes: Slurm tells you no states of nodes: a node that an administrator drains, or that "
        text += "Slurm has given up, is not noticed as such; what the job's own processes notice still is"
        advice = (
            "ask for PrivateData without nodes, or to be made an operator; this doctor cannot see partitions either"
        )
        yield CheckResult(check="visibility", outcome="warning", text=text, advice=advice)


_INHERITED = {
    "CPU": (resource.RLIMIT_CPU, "-t", "each process is killed after so many seconds of CPU time"),
    "AS": (resource.RLIMIT_AS, "-v", "CUDA reserves far more addresses than memory, and does not start"),
    "DATA": (resource.RLIMIT_DATA, "-d", "large buffers cannot be allocated"),
    "FSIZE": (resource.RLIMIT_FSIZE, "-f", "larger checkpoints cannot be written"),
}
"""By Slurm's names: limits that are endless on a node, and often are not where users log in; what they do to a rank."""


def inherited(settings: Mapping[str, str], soft: Callable[[int], int] | None = None) -> Iterator[CheckResult]:
    """Limits of this shell that sbatch would take along into the job."""
    read = soft or (lambda kind: resource.getrlimit(kind)[0])
    propagates = _propagates(settings)
    for name, (kind, option, effect) in _INHERITED.items():
        found = read(kind)
        if found != resource.RLIM_INFINITY and propagates(name):
            text = f"jobs inherit limits of the shell that submits (PropagateResourceLimits), and ulimit {option} says "
            text += f"{found} (in Slurm's words {name}): {effect}"
            advice = f"ulimit -S {option} unlimited before you submit, or --propagate=NONE in extra of [slurm]"
            yield CheckResult(check="inherited limits", outcome="warning", text=text, advice=advice)


def _propagates(settings: Mapping[str, str]) -> Callable[[str], bool]:
    every, but = settings.get("PropagateResourceLimits", ""), settings.get("PropagateResourceLimitsExcept", "")
    if but and (not every or every.upper() == "ALL"):
        left_out = set(but.upper().split(","))
        return lambda name: name not in left_out
    named = set(every.upper().split(",")) if every else {"ALL"}
    return lambda name: "NONE" not in named and ("ALL" in named or name in named)


def plugins(settings: Mapping[str, str]) -> Iterator[CheckResult]:
    """What may change a job on its way in."""
    if found := settings.get("JobSubmitPlugins", ""):
        text = f"JobSubmitPlugins={found}: the site may change or refuse what a job asks for"
        yield CheckResult(check="submission", outcome="ok", text=text)


def _listed(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers)) if len(numbers) < 3 else ", ".join(map(str, numbers))


def _hours(seconds: float) -> str:
    return f"{seconds / 60:g} min" if seconds < 7200 else f"{seconds / 3600:g} h"
