"""Checks of `resihp doctor` for site settings that would break or silently change a job, before it is submitted.

Each check takes Slurm's answers (`resihp.slurm.survey`) and the job's requests, and returns findings: the effect on the
job, and the setting to change in the job file or to request from the administrator. Harmless settings are not reported.
Queries nothing itself; `resihp.wrapper.commands.doctor.slurm_checks` does.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from resihp.slurm.drains.site_limits import most_of
from resihp.words import count_of
from resihp.wrapper.commands.doctor.machine import CheckResult, Outcome
from resihp.wrapper.exit_codes import EXIT_CODES, REQUEUE_REQUESTED

if TYPE_CHECKING:
    from resihp.slurm.limits import Limit, Limits
    from resihp.slurm.survey import PartitionRules, PartitionView
    from resihp.wrapper.config.schema import Configuration


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The resources that a job requests from Slurm. `gpus_per_node` is 0 and `seconds` is None if the job does not
    request any."""

    nodes: int
    """Number of nodes, including spares."""
    gpus_per_node: int
    seconds: float | None
    warning_s: float
    replacements: int
    particular: bool
    """Whether the job restricts its nodes by features, GPU type or names."""
    replaced_elsewhere: bool = False
    """Whether replacements are requested in another partition."""

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


def requested_resources(configuration: Configuration) -> Wanted:
    job, section = configuration.job, configuration.slurm
    node_options = ("--constraint", "--nodelist", "--gres", "--gpus", "--exclude", "--prefer")
    return Wanted(
        nodes=job.nodes + section.spares,
        gpus_per_node=job.gpus_per_node if configuration.origin("job", "gpus_per_node") else 0,
        seconds=job.time,
        warning_s=section.warning,
        replacements=section.replacements,
        replaced_elsewhere=section.replacement_partition not in ("", section.partition),
        particular=bool(section.constraint or section.gpu_type)
        or any(option.startswith(node_options) for option in section.extra),
    )


# --- partitions -----------------------------------------------------------------------------------------------------


def shape(views: Sequence[PartitionView], rules: PartitionRules, job: Wanted) -> Iterator[CheckResult]:
    """Check the job against the limits of a partition. `views`: the nodes of the partition, by kind."""

    def finding(outcome: str, text: str, advice: str) -> CheckResult:
        return CheckResult(check="partition", outcome=outcome, text=f"{rules.name}: {text}", advice=advice)  # type: ignore[arg-type]

    suitable_views = [view for view in views if view.gpus >= job.gpus_per_node or view.unreadable]
    if unreadable := next((view.unreadable for view in views if view.unreadable), ""):
        yield finding("warning", f"number of GPUs per node unknown: {unreadable}", "check sinfo -o '%P %D %G'")
    suitable_nodes, count = sum(view.nodes for view in suitable_views), sum(view.nodes for view in views)
    kinds = f"sinfo -p {rules.name} -o '%D %G %f' lists the nodes"
    if job.nodes > suitable_nodes:
        text = f"{suitable_nodes} of its {count} nodes have {count_of(job.gpus_per_node, 'GPU')}"
        text += f", but the job requests {count_of(job.nodes, 'node')}"
        yield finding("failed", text, f"{kinds}; lower nodes or gpus_per_node in [job], or spares in [slurm]")
    types = sorted({kind for view in suitable_views for kind in view.gpu_types})
    if len(types) > 1 and job.gpus_per_node and job.nodes + job.replacements > 1 and not job.particular:
        text = (
            f"its nodes have GPUs of different types ({', '.join(types)}), and the job accepts any: all of its ranks "
        )
        text += "run at the pace of the slowest"
        yield finding("warning", text, f"{kinds}; set gpu_type or constraint in [slurm]")
    yield from _size(rules, job, finding)
    yield from _time(views, rules, job, finding)


def _size(rules: PartitionRules, job: Wanted, finding: Callable[[str, str, str], CheckResult]) -> Iterator[CheckResult]:
    """Check the number of nodes of the job, and of a replacement, against the partition's limits."""
    if rules.max_nodes is not None and job.nodes > rules.max_nodes:
        text = f"a job gets at most {count_of(rules.max_nodes, 'node')} (MaxNodes): a request for {job.nodes} is "
        text += "refused, or waits for ever (PartitionNodeLimit)"
        yield finding("failed", text, "lower nodes in [job] or spares in [slurm], or set another partition")
    if job.nodes < rules.min_nodes:
        text = f"a job gets at least {count_of(rules.min_nodes, 'node')} (MinNodes): a request for {job.nodes} is "
        text += "refused, or waits for ever (PartitionNodeLimit)"
        yield finding("failed", text, "raise nodes in [job] or spares in [slurm], or set another partition")
    elif rules.min_nodes > 1 and job.replacements and not job.replaced_elsewhere:
        text = (
            f"a job gets at least {count_of(rules.min_nodes, 'node')} (MinNodes), and a replacement requests one: it "
        )
        text += "would wait for ever"
        yield finding("warning", text, "set replacement_partition in [slurm], or replacements to 0 and spares instead")


def replacement_partition(
    views: Sequence[PartitionView], name: str, rules: Callable[[str], PartitionRules]
) -> Iterator[CheckResult]:
    """Check the partition of replacements: it must exist, be up, and take jobs of one node."""

    def finding(outcome: Outcome, text: str, advice: str) -> CheckResult:
        return CheckResult(check="replacements", outcome=outcome, text=f"{name}: {text}", advice=advice)

    advice = "set replacement_partition in [slurm]; sinfo"
    chosen_views = [view for view in views if view.name == name]
    if not chosen_views:
        names = ", ".join(dict.fromkeys(view.name for view in views))
        yield finding("failed", f"not among the partitions you may use: {names or 'none'}", advice)
    elif not any(view.up for view in chosen_views):
        yield finding("warning", "is down", advice)
    elif rules(name).min_nodes > 1:
        yield finding("failed", "takes no job of one node (MinNodes), and each replacement is one", advice)
    else:
        yield finding("ok", "takes jobs of one node", "")


def drained_share(views: Sequence[PartitionView], name: str, share: float | None) -> Iterator[CheckResult]:
    """Report how many nodes of a partition the site lets jobs drain, if its limit is a share. `views`: the nodes of all
    partitions, by kind."""
    nodes = sum(view.nodes for view in views if view.name == name)
    if share is not None and nodes:
        allowed = f"{most_of(share, nodes)} of its {count_of(nodes, 'node')}"
        text = f"{name}: jobs have at most {allowed} drained at a time ([site] drained, {100 * share:g} %)"
        yield CheckResult(check="drain", outcome="ok", text=text)


def _time(
    views: Sequence[PartitionView], rules: PartitionRules, job: Wanted, finding: Callable[[str, str, str], CheckResult]
) -> Iterator[CheckResult]:
    most = rules.max_seconds
    if job.seconds is not None and most is not None and job.seconds > most:
        text = f"a job gets at most {_hours(most)} (MaxTime): a request for {_hours(job.seconds)} is refused, or "
        text += "waits for ever (PartitionTimeLimit)"
        yield finding("failed", text, "lower time in [job], or set another partition; a job resumes after a requeue")
    usual = next((view.default_seconds for view in views if view.default_seconds is not None), most)
    if job.seconds is None and usual is not None and usual < 2 * job.warning_s:
        text = (
            f"a job without a time limit gets {_hours(usual)} (DefaultTime), and is warned {job.warning_s:g} s before "
        )
        text += "its end: it would save and be requeued, over and over"
        yield finding("failed", text, "set time in [job]")


# --- limits of accounting -------------------------------------------------------------------------------------------


def limits(account_limits: Limits, job: Wanted) -> Iterator[CheckResult]:
    """Check the job against accounting limits; a job that exceeds one is accepted by Slurm but waits for ever."""
    is_reported = False
    for limit in account_limits.found:
        requested, per_replacement = _requested(limit, job)
        if requested is None:
            continue
        advice = _how_to_see(limit) + "; "
        if requested > limit.most:
            is_reported = True
            amount, most = _amount(limit, requested), _amount(limit, limit.most)
            text = f"the job requests {amount}, but {limit.whose} allows {most}{_per(limit)} ({limit.setting}): it is "
            text += "refused, or waits for ever"
            advice += "lower the request in [job], or set another qos or account in [slurm]"
            yield CheckResult(check="limits", outcome="failed", text=text, advice=advice)
        elif limit.per != "job" and job.replacements and requested + per_replacement > limit.most:
            is_reported = True
            text = f"{limit.whose} allows {_amount(limit, limit.most)}{_per(limit)} ({limit.setting}): a replacement "
            text += "node, requested as a job of its own, waits while this job uses all of it"
            advice += "set spares in [slurm] instead of replacements, or ask for a higher limit"
            yield CheckResult(check="limits", outcome="warning", text=text, advice=advice)
    if account_limits.unseen:
        is_reported = True
        text = f"account {account_limits.unseen}: Slurm does not show you its limits"
        yield CheckResult(check="limits", outcome="skipped", text=text, advice="ask the administrator for its GrpTRES")
    if not is_reported:
        account = f"account {account_limits.account}" if account_limits.account else "no account"
        text = f"{account}, QOS {account_limits.qos or 'of the cluster'}: the job exceeds no limit"
        yield CheckResult(check="limits", outcome="ok", text=text)


def _requested(limit: Limit, job: Wanted) -> tuple[float | None, float]:
    """Return the amount of the limited resource that the job requests, None if unknown; and the amount that a
    replacement node adds."""
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
    return {"job": " per job", "user": " per user", "group": " to all its jobs together"}[limit.per]


def _how_to_see(limit: Limit) -> str:
    kind, _, name = limit.whose.partition(" ")
    if kind == "QOS":
        return f"sacctmgr show qos {name}"
    return "sacctmgr show assoc tree format=account,user,grptres,maxtres,maxjobs,maxwall"


# --- settings of the whole cluster ----------------------------------------------------------------------------------

FINAL_EXIT_CODES = tuple(sorted({code for code in EXIT_CODES.values() if code != REQUEUE_REQUESTED}))
"""Exit codes after which a job must not be requeued."""


def exit_codes(settings: Mapping[str, str]) -> Iterator[CheckResult]:
    """Check RequeueExit, which requeues a job without limit, and RequeueExitHold.

    On Slurm 22.05.8 RequeueExit overrides --no-requeue, on 24.11.5 it does not.
    """
    requeued_codes = [code for code in codes(settings.get("RequeueExit", "")) if code in FINAL_EXIT_CODES]
    if requeued_codes:
        text = f"RequeueExit={settings['RequeueExit']}: Slurm requeues a job that resihp ended for good with "
        text += f"{_listed(requeued_codes)}, over and over (93: the training program is broken)"
        advice = f"ask for RequeueExit without {_listed(requeued_codes)}; scancel ends such a job"
        yield CheckResult(check="requeue", outcome="warning", text=text, advice=advice)
    held_codes = [code for code in codes(settings.get("RequeueExitHold", "")) if code in FINAL_EXIT_CODES]
    if held_codes:
        text = (
            f"RequeueExitHold={settings['RequeueExitHold']}: a job that ends with {_listed(held_codes)} stays in the "
        )
        text += "queue, held (SPECIAL_EXIT), and a chain behind it waits"
        yield CheckResult(check="requeue", outcome="warning", text=text, advice="scancel it, or ask for its removal")


def codes(text: str) -> list[int]:
    """Return the exit codes in a list as slurm.conf has it, such as `93` or `1,4-5`."""
    exit_codes: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.strip().partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            exit_codes += range(int(first), int(last or first) + 1)
    return exit_codes


def visibility(settings: Mapping[str, str], operator: bool) -> Iterator[CheckResult]:
    """Check that PrivateData does not hide the states of nodes. It does not apply to operators, or to a user's own
    jobs."""
    hidden = set(settings.get("PrivateData", "").lower().split(","))
    if "nodes" in hidden and not operator:
        text = (
            "PrivateData=nodes: Slurm hides node states from you: a node that an administrator drains, or that Slurm "
        )
        text += "marks down, is not noticed as such; faults that the job's own processes notice still are"
        advice = (
            "ask for PrivateData without nodes, or to be made an operator; this doctor cannot see partitions either"
        )
        yield CheckResult(check="visibility", outcome="warning", text=text, advice=advice)


_INHERITED = {
    "CPU": (resource.RLIMIT_CPU, "-t", "each process is killed after this many seconds of CPU time"),
    "AS": (resource.RLIMIT_AS, "-v", "CUDA reserves far more addresses than memory, and does not start"),
    "DATA": (resource.RLIMIT_DATA, "-d", "large buffers cannot be allocated"),
    "FSIZE": (resource.RLIMIT_FSIZE, "-f", "larger checkpoints cannot be written"),
}
"""Resource limits, by Slurm's names for them, that are usually unlimited on nodes but often not on login nodes; and the
effect of each limit on a rank."""


def inherited(settings: Mapping[str, str], soft: Callable[[int], int] | None = None) -> Iterator[CheckResult]:
    """Check this shell for resource limits that sbatch would pass on to the job."""
    read = soft or (lambda kind: resource.getrlimit(kind)[0])
    propagates = _propagates(settings)
    for name, (kind, option, effect) in _INHERITED.items():
        value = read(kind)
        if value != resource.RLIM_INFINITY and propagates(name):
            text = f"jobs inherit limits of the submitting shell (PropagateResourceLimits), and ulimit {option} is "
            text += f"{value} ({name} in Slurm): {effect}"
            advice = f"ulimit -S {option} unlimited before you submit, or --propagate=NONE in extra of [slurm]"
            yield CheckResult(check="inherited limits", outcome="warning", text=text, advice=advice)


def _propagates(settings: Mapping[str, str]) -> Callable[[str], bool]:
    propagated, excepted = (
        settings.get("PropagateResourceLimits", ""),
        settings.get("PropagateResourceLimitsExcept", ""),
    )
    if excepted and (not propagated or propagated.upper() == "ALL"):
        left_out = set(excepted.upper().split(","))
        return lambda name: name not in left_out
    named = set(propagated.upper().split(",")) if propagated else {"ALL"}
    return lambda name: "NONE" not in named and ("ALL" in named or name in named)


def plugins(settings: Mapping[str, str]) -> Iterator[CheckResult]:
    """Report plugins that may change a job at submission."""
    if plugin_names := settings.get("JobSubmitPlugins", ""):
        text = f"JobSubmitPlugins={plugin_names}: the site may change or refuse a job's requests"
        yield CheckResult(check="submission", outcome="ok", text=text)


def _listed(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers)) if len(numbers) < 3 else ", ".join(map(str, numbers))


def _hours(seconds: float) -> str:
    return f"{seconds / 60:g} min" if seconds < 7200 else f"{seconds / 3600:g} h"
