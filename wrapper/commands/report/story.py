"""A job's history in sentences and figures, for the page and for the Markdown text. Pure."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from resihp.db.engine import masked
from resihp.db.reading.costs.timeline import CAUSES
from resihp.words import natural
from resihp.wrapper.commands.report.facts import Facts
from resihp.wrapper.output.progress import NO_ITERATION_KNOWN
from resihp.wrapper.output.render import count, duration, hours, percent

CAUSE_WORDS: Mapping[str, tuple[str, str]] = {
    "start": ("starting", "from the job's start to the start of the first iteration"),
    "detect": ("detection", "from the fault to its detection"),
    "reconfigure": ("changing the plan", "parking, planning, groups, moving state"),
    "redo": ("redone work", "discarded work on an interrupted iteration"),
    "rollback": ("repeated iterations", "committed iterations that a later attempt committed again"),
    "slow": ("slow devices", "iterations beyond their healthy time"),
    "idle": ("idle devices", "iterations on fewer devices than requested, while others stood by"),
    "capacity": ("missing devices", "iterations on fewer devices than requested, as others were lost"),
    "checkpoint": ("checkpoints", "pauses after checkpointed iterations"),
    "other": ("other", "usual pauses between iterations, shutdown, and unrecorded time"),
}
"""Name and definition of each cause in `resihp.db.reading.costs.timeline`."""
SECRET_NAME = re.compile(r"(password|passwd|secret|token|api_?key|authorization|credential)s?$", re.IGNORECASE)
SECRET_MASK = "***"
MAX_EPOCHS_NAMED = 20
"""Most epochs that are named one by one because they have no plan, or a plan that never took effect."""


class CauseCost(msgspec.Struct, frozen=True):
    """Time lost to one cause. `share`: as a part of all lost time."""

    cause: str
    name: str
    meaning: str
    seconds: float
    gpu_hours: float
    share: float


class NodeLine(msgspec.Struct, frozen=True):
    """A node over the whole job. `device_hours`: its number of devices times its hours in the job; `changes`: its
    events in the job, in words."""

    name: str
    host: str
    devices: int
    device_hours: float
    failures: Mapping[str, int]
    changes: str

    @property
    def troubles(self) -> int:
        return sum(self.failures.values())


def sentences(facts: Facts) -> tuple[str, ...]:
    """Return sentences on progress and outcome, on failures, on idle GPUs if there were any, and on the cost."""
    idle = (f"{facts.idle}.",) if facts.idle else ()
    return _course(facts), _failures(facts), *idle, _cost(facts)


def costs(facts: Facts) -> list[CauseCost]:
    """Return the lost time by cause, largest first, without causes that cost no time; empty if losses are unknown."""
    if is_time_unknown(facts):
        return []
    lost_s = facts.account.lost_s
    total_s = sum(lost_s.values()) or 1.0
    cause_costs = [
        CauseCost(
            cause, *CAUSE_WORDS[cause], lost_s[cause], facts.account.lost_gpu_hours[cause], lost_s[cause] / total_s
        )
        for cause in CAUSES
        if lost_s[cause] >= 0.005
    ]
    return sorted(cause_costs, key=lambda cost: -cost.seconds)


def figures(facts: Facts) -> dict[str, Any]:
    """Return the unrounded figures of the report, for programs."""
    account = facts.account
    return {
        "goodput": account.goodput,
        "ettr": account.ettr,
        "held_seconds": account.held_s,
        "wall_seconds": account.wall_s,
        "useful_seconds": account.useful_s,
        "lost_seconds": account.lost_s,
        "gpu_hours": account.gpu_hours,
        "lost_gpu_hours": account.lost_gpu_hours,
        "failures": account.failures,
        "mttr_seconds": account.mttr_s,
    }


def lost_hours(facts: Facts) -> str:
    """Return the GPU-hours lost to all causes, as text; `-` if unknown."""
    return "-" if is_time_unknown(facts) else hours(sum(facts.account.lost_gpu_hours.values()))


def parameters(model: Mapping[str, Any] | None) -> str:
    """Describe the size of the model: `32 layers and 8.0G parameters`; empty if the script declared no model, or
    declared it in another form."""
    from resihp.parallelism.model import ModelSpec

    try:
        spec = msgspec.convert((model or {}).get("model"), ModelSpec)
        return f"{spec.layers} layers and {count(spec.parameters)} parameters"
    except (msgspec.ValidationError, TypeError, ZeroDivisionError):
        return ""


def node_lines(facts: Facts) -> list[NodeLine]:
    """Return every node of the job: nodes with most failures first, then nodes with events, then by name."""
    failed: dict[str, Counter[str]] = {}
    for row in facts.failures:
        if row["node"] is not None:
            failed.setdefault(row["node"], Counter())[row["kind"]] += 1
    drained = {row["node"]: row for row in facts.drains}
    replacement_of = {row["instead"]: row for row in facts.replacements}
    lines = []
    for row in facts.nodes:
        name = row["node"]
        until = row["lost_at"] or row["released_at"] or facts.ended
        has_joined = row["joined_at"] is not None
        held_s = max((until - row["joined_at"]).total_seconds(), 0.0) if has_joined else 0.0
        events = []
        if row["replacement"] is not None:
            joined_after_s = max(
                (row["joined_at"] - facts.began).total_seconds(), 0.0
            )  # the clock may have been set back
            events.append(f"joined {duration(joined_after_s)} after the start")
        if not has_joined:
            events.append(f"never joined: {row['lost_reason']}")
        elif row["lost_at"] is not None:
            events.append(f"lost after {duration(held_s)}: {row['lost_reason']}")
        if name in drained:
            events.append(_drain_words(drained[name]))
        if name in replacement_of:
            replacement = replacement_of[name]
            events.append(
                f"replaced by {replacement['node']}" if replacement["node"] else f"replacement {replacement['outcome']}"
            )
        hours = row["devices"] * held_s / 3600
        lines.append(NodeLine(name, row["host"], row["devices"], hours, failed.get(name, {}), "; ".join(events)))
    return sorted(lines, key=lambda line: (-line.troubles, not line.changes, natural(line.name)))


def _drain_words(drain: Mapping[str, Any]) -> str:
    if drain["outcome"] == "refused":
        return "drain refused"
    how = "excluded from your jobs" if drain["step"] == "exclusion" else "drained"
    return how if drain["undrained_at"] is None else f"{how}, used again since"


def gaps(facts: Facts) -> list[str]:
    """Return a sentence for each gap in the numbers of epochs, to explain that these epochs have no plan."""
    gap_sentences, before = [], 0
    for epoch in sorted(row["epoch"] for row in facts.plans):
        if epoch > before + 1:
            epochs, verb, possessive = _epochs(before + 1, epoch - 1)
            gap_sentences.append(
                f"{epochs} {verb} no plan: another failure or change came before one was made, and epoch {epoch} "
                f"began in {possessive} place."
            )
        before = epoch
    return gap_sentences[-MAX_EPOCHS_NAMED:]


def not_drawn(facts: Facts) -> str:
    """Return a sentence on plans that have no picture because they never took effect; empty if all took effect."""
    unused_plans = [f"epoch {row['epoch']} ({row['outcome']})" for row in facts.plans if row["in_effect_at"] is None]
    if not unused_plans:
        return ""
    more = f" and {len(unused_plans) - MAX_EPOCHS_NAMED} more" if len(unused_plans) > MAX_EPOCHS_NAMED else ""
    return f"Plans that never took effect are not drawn: {', '.join(unused_plans[:MAX_EPOCHS_NAMED])}{more}."


def _epochs(first: int, last: int) -> tuple[str, str, str]:
    return (f"Epoch {first}", "has", "its") if first == last else (f"Epochs {first} to {last}", "have", "their")


def settings(configuration: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the settings as pairs such as (`layout.tp`, `2`). Secrets are masked, and empty values left out."""
    return list(_flat(configuration, ""))


def safe(text: str) -> str:
    """Return `text` without passwords in URLs, and without the paths of http(s) URLs, because a webhook's path is
    secret."""
    return re.sub(r"[A-Za-z][\w+.-]*://\S+", lambda match: _safe_url(match[0]), text)


def _safe_url(url: str) -> str:
    scheme, _, rest = url.partition("://")
    if scheme not in ("http", "https"):
        return masked(url)
    server, slash, path = rest.partition("/")
    return f"{scheme}://{server.rpartition('@')[2]}{slash}{SECRET_MASK if path else ''}"


def _flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    elif value in (None, "", [], {}):
        return
    elif SECRET_NAME.search(name) and isinstance(value, str | list):
        yield name, SECRET_MASK
    elif isinstance(value, list):
        yield name, safe(" ".join(map(str, value)))
    else:
        yield name, safe({True: "true", False: "false"}[value] if isinstance(value, bool) else str(value))


# --- sentences ------------------------------------------------------------------------------------------------------


def _course(facts: Facts) -> str:
    job = facts.job
    model = f" of a model with {model_words}" if (model_words := parameters(facts.model)) else ""
    where = f"{_many(job['nodes'], 'node')} with {_many(job['gpus_per_node'], 'device')}"
    where += " each" if job["nodes"] > 1 else ""
    took = duration((facts.ended - facts.began).total_seconds())
    reason = f": {job['reason']}" if job["reason"] else ""
    ending = {
        "running": "and is running",
        "completed": "and completed",
        "failed": f"and failed{reason}",
        "cancelled": f"and was cancelled{reason}",
        "abnormal": "until its supervisor died",
    }[job["state"]]
    done = len(facts.iterations)
    if is_time_unknown(facts):
        return f"Job {job['name']} on {where} took {took}, {ending}; {NO_ITERATION_KNOWN}."
    began_at, goal = ((facts.model or {}).get(name) for name in ("resume_from", "iterations"))
    if not done and job["state"] == "completed" and isinstance(began_at, int) and began_at and began_at == goal:
        nothing_left = f"nothing was left to do, as it resumed from the checkpoint of iteration {began_at:,}"
        return f"Job {job['name']} on {where} completed in {took}: {nothing_left}."
    if not done:
        ended = {"running": "is running", "completed": "ended", "failed": f"failed{reason}"}
        state = ended.get(job["state"], f"was {job['state']}{reason}")
        return f"Job {job['name']} on {where} has committed no iteration in {took}; it {state}."
    first, last = facts.iterations[0]["iteration"], facts.iterations[-1]["iteration"]
    goal_iterations = (facts.model or {}).get("iterations")
    of_goal = f" of {goal_iterations:,}" if isinstance(goal_iterations, int) and goal_iterations != last else ""
    iterations_done = f"{last:,}{of_goal} iteration{'' if (last, of_goal) == (1, '') else 's'}"
    if first > 1:  # resumed from a checkpoint
        iterations_done = f"iteration{'' if first == last else f's {first:,} to'} {last:,}{of_goal}"
    return f"Job {job['name']} trained {iterations_done}{model} on {where} in {took}, {ending}."


def is_time_unknown(facts: Facts) -> bool:
    """Return whether the use of time is unknown, because the script does not use `resihp.Trainer` or the job ended
    before training."""
    return facts.job["state"] != "running" and facts.model is None and not facts.iterations


def _failures(facts: Facts) -> str:
    failures = facts.failures
    if not failures:
        return "No failure was noticed."
    kinds = Counter(row["kind"] for row in failures)
    kinds_listed = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    worst = Counter(row["node"] for row in failures if row["node"] is not None).most_common(2)
    worst_node = ""
    if worst and worst[0][1] > 1 and (len(worst) == 1 or worst[0][1] > worst[1][1]):
        worst_node = f", most of them on {worst[0][0]} ({worst[0][1]})"
    is_single = len(failures) == 1
    recovered_failures = [row for row in failures if row["seconds_to_recover"] is not None]
    recovery_s = [row["seconds_to_recover"] for row in recovered_failures]
    back = ""
    if len(recovered_failures) == 1:
        subject, noticed_s = (
            "it" if is_single else "the one that stopped it",
            recovered_failures[0]["noticed_after_seconds"] or 0.0,
        )
        back = f"; training was back {duration(recovery_s[0])} after {subject} "
        back += f"({duration(noticed_s)} of that for detection)"
    elif recovered_failures:
        usual, longest = statistics.median(recovery_s), max(recovery_s)
        back = f"; training was back in {duration(usual)} on median, {duration(longest)} at most"
    head = (
        f"One failure was noticed ({kinds_listed})"
        if is_single
        else f"{len(failures):,} failures were noticed ({kinds_listed}){worst_node}"
    )
    return f"{head}{back}."


def _cost(facts: Facts) -> str:
    account = facts.account
    if is_time_unknown(facts):
        return f"Goodput is unknown: {hours(account.gpu_hours)} were held."
    if account.goodput is None:
        held_hours = f"{hours(account.gpu_hours)} went to starting" if account.gpu_hours > 0 else "nothing was held"
        return f"There is no goodput yet: {held_hours}."
    goodput = f"Goodput was {percent(account.goodput)} (committed iterations over wall time, on the requested devices)"
    lost_s = sum(account.lost_s.values())
    if lost_s < 0.005:
        return f"{goodput}, and nothing was lost."
    largest = costs(facts)[0]
    gpu = lost_hours(facts)
    most = f"most of it to {largest.name} ({duration(largest.seconds)})"
    return f"{goodput}; with slow devices counted as well, {duration(lost_s)} or {gpu} were lost, {most}."


def _many(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
