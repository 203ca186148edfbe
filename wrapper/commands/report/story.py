"""What happened, in three sentences and in figures: the same for the page and for a ticket. Pure."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from db.engine import masked
from db.reading.costs.timeline import CAUSES
from wrapper.commands.report.facts import Facts
from wrapper.output.render import count, duration, hours, percent

CAUSE_WORDS: Mapping[str, tuple[str, str]] = {
    "start": ("starting", "from the job's start until the first iteration began"),
    "detect": ("noticing failures", "from the fault until it was noticed"),
    "reconfigure": ("changing the plan", "parking, planning, groups, moving state"),
    "redo": ("redone work", "work on an interrupted iteration that was thrown away"),
    "rollback": ("repeated iterations", "committed iterations that a later attempt committed again"),
    "slow": ("slow devices", "iterations beyond their healthy time"),
    "idle": ("idle devices", "iterations on fewer devices than were asked for, while others stood by"),
    "capacity": ("missing devices", "iterations on fewer devices than were asked for, as others were gone"),
    "checkpoint": ("checkpoints", "pauses after checkpointed iterations"),
    "other": ("other", "usual pauses between iterations, winding down, and what nobody noted"),
}
"""For each cause of `db.reading.costs.timeline`: its name, and what counts."""
SECRET_NAME = re.compile(r"(password|passwd|secret|token|api_?key|authorization|credential)s?$", re.IGNORECASE)
MASK = "***"
MOST_GAPS = 20
"""Epochs that are accounted for one by one."""


class CauseCost(msgspec.Struct, frozen=True):
    """What one cause took. `share`: of all that was lost."""

    cause: str
    name: str
    meaning: str
    seconds: float
    gpu_hours: float
    share: float


class NodeLine(msgspec.Struct, frozen=True):
    """A node over the whole job. `device_hours`: its devices by the time that it was in the job."""

    name: str
    host: str
    devices: int
    device_hours: float
    failures: Mapping[str, int]
    what: str

    @property
    def troubles(self) -> int:
        return sum(self.failures.values())


def sentences(facts: Facts) -> tuple[str, ...]:
    """What it did and how it ended; what failed; which GPUs had no work, if any; what that cost."""
    idle = (f"{facts.idle}.",) if facts.idle else ()
    return _course(facts), _failures(facts), *idle, _cost(facts)


def costs(facts: Facts) -> list[CauseCost]:
    """Lost time by cause, the largest first; causes that took nothing are left out. None where nobody knows."""
    if untold(facts):
        return []
    lost = facts.account.lost_s
    whole = sum(lost.values()) or 1.0
    found = [
        CauseCost(cause, *CAUSE_WORDS[cause], lost[cause], facts.account.lost_gpu_hours[cause], lost[cause] / whole)
        for cause in CAUSES
        if lost[cause] >= 0.005
    ]
    return sorted(found, key=lambda cost: -cost.seconds)


def figures(facts: Facts) -> dict[str, Any]:
    """What the report's text and pictures round: for programs."""
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
    """GPU-hours lost to all causes; `-` where nobody knows."""
    return "-" if untold(facts) else hours(sum(facts.account.lost_gpu_hours.values()))


def parameters(model: Mapping[str, Any] | None) -> str:
    """`32 layers and 8.0G parameters`; empty where the script has not told, or told it otherwise."""
    from resihp.parallelism.model import ModelSpec

    try:
        spec = msgspec.convert((model or {}).get("model"), ModelSpec)
        return f"{spec.layers} layers and {count(spec.parameters)} parameters"
    except (msgspec.ValidationError, TypeError, ZeroDivisionError):
        return ""


def node_lines(facts: Facts) -> list[NodeLine]:
    """Every node of the job: those with most failures first, then by name."""
    failed: dict[str, Counter[str]] = {}
    for row in facts.failures:
        if row["node"] is not None:
            failed.setdefault(row["node"], Counter())[row["kind"]] += 1
    drained = {row["node"]: row for row in facts.drains}
    instead = {row["instead"]: row for row in facts.replacements}
    found = []
    for row in facts.nodes:
        name = row["node"]
        until = row["lost_at"] or row["released_at"] or facts.ended
        came = row["joined_at"] is not None
        held_s = max((until - row["joined_at"]).total_seconds(), 0.0) if came else 0.0
        what = []
        if row["replacement"] is not None:
            later_s = max((row["joined_at"] - facts.began).total_seconds(), 0.0)  # the clock may have been set back
            what.append(f"came {duration(later_s)} after the start")
        if not came:
            what.append(f"never came: {row['lost_reason']}")
        elif row["lost_at"] is not None:
            what.append(f"lost after {duration(held_s)}: {row['lost_reason']}")
        if name in drained:
            what.append(_kept_out(drained[name]))
        if name in instead:
            other = instead[name]
            what.append(f"replaced by {other['node']}" if other["node"] else f"replacement {other['outcome']}")
        hours = row["devices"] * held_s / 3600
        found.append(NodeLine(name, row["host"], row["devices"], hours, failed.get(name, {}), "; ".join(what)))
    return sorted(found, key=lambda line: (-line.troubles, not line.what, _natural(line.name)))


def _kept_out(drain: Mapping[str, Any]) -> str:
    if drain["outcome"] == "refused":
        return "drain refused"
    how = "left out of next jobs" if drain["step"] == "exclusion" else "drained"
    return how if drain["undrained_at"] is None else f"{how}, used again since"


def gaps(facts: Facts) -> list[str]:
    """A sentence for each run of epochs that have no plan: numbers that a reader would miss."""
    told, before = [], 0
    for epoch in sorted(row["epoch"] for row in facts.plans):
        if epoch > before + 1:
            which, have, its = _epochs(before + 1, epoch - 1)
            told.append(
                f"{which} {have} no plan: something else failed or changed before one was made, and epoch {epoch} "
                f"began in {its} place."
            )
        before = epoch
    return told[-MOST_GAPS:]


def not_drawn(facts: Facts) -> str:
    """Which plans have no picture as they never took effect; empty where all did."""
    never = [f"epoch {row['epoch']} ({row['outcome']})" for row in facts.plans if row["in_effect_at"] is None]
    if not never:
        return ""
    left = f" and {len(never) - MOST_GAPS} more" if len(never) > MOST_GAPS else ""
    return f"Plans that never took effect are not drawn: {', '.join(never[:MOST_GAPS])}{left}."


def _epochs(first: int, last: int) -> tuple[str, str, str]:
    return (f"Epoch {first}", "has", "its") if first == last else (f"Epochs {first} to {last}", "have", "their")


def settings(configuration: Mapping[str, Any]) -> list[tuple[str, str]]:
    """`layout.tp = 2` and so on, secrets masked, what is empty left out."""
    return list(_flat(configuration, ""))


def safe(text: str) -> str:
    """`text` without passwords in URLs, and without what a web hook keeps secret in its path."""
    return re.sub(r"[A-Za-z][\w+.-]*://\S+", lambda found: _safe_url(found[0]), text)


def _safe_url(url: str) -> str:
    scheme, _, rest = url.partition("://")
    if scheme not in ("http", "https"):
        return masked(url)
    server, slash, path = rest.partition("/")
    return f"{scheme}://{server.rpartition('@')[2]}{slash}{MASK if path else ''}"


def _flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    elif value in (None, "", [], {}):
        return
    elif SECRET_NAME.search(name) and isinstance(value, str | list):
        yield name, MASK
    elif isinstance(value, list):
        yield name, safe(" ".join(map(str, value)))
    else:
        yield name, safe({True: "true", False: "false"}[value] if isinstance(value, bool) else str(value))


# --- sentences ------------------------------------------------------------------------------------------------------


def _course(facts: Facts) -> str:
    job = facts.job
    model = f" of a model with {told}" if (told := parameters(facts.model)) else ""
    where = f"{_many(job['nodes'], 'node')} with {_many(job['gpus_per_node'], 'device')}"
    where += " each" if job["nodes"] > 1 else ""
    took = duration((facts.ended - facts.began).total_seconds())
    reason = f": {job['reason']}" if job["reason"] else ""
    how = {
        "running": "and is running",
        "completed": "and completed",
        "failed": f"and failed{reason}",
        "cancelled": f"and was cancelled{reason}",
        "abnormal": "until its supervisor died",
    }[job["state"]]
    done = len(facts.iterations)
    if untold(facts):
        return f"Job {job['name']} on {where} took {took}, {how}; its script did not say what it trains."
    began_at, goal = ((facts.model or {}).get(name) for name in ("resume_from", "iterations"))
    if not done and job["state"] == "completed" and isinstance(began_at, int) and began_at and began_at == goal:
        left = f"nothing was left to do after iteration {began_at:,}, from whose checkpoint it went on"
        return f"Job {job['name']} on {where} completed in {took}: {left}."
    if not done:
        ended = {"running": "is running", "completed": "ended", "failed": f"failed{reason}"}
        state = ended.get(job["state"], f"was {job['state']}{reason}")
        return f"Job {job['name']} on {where} has committed no iteration in {took}; it {state}."
    first, last = facts.iterations[0]["iteration"], facts.iterations[-1]["iteration"]
    asked = (facts.model or {}).get("iterations")
    of = f" of {asked:,}" if isinstance(asked, int) and asked != last else ""
    what = f"{last:,}{of} iteration{'' if (last, of) == (1, '') else 's'}"
    if first > 1:  # from a checkpoint on
        what = f"iteration{'' if first == last else f's {first:,} to'} {last:,}{of}"
    return f"Job {job['name']} trained {what}{model} on {where} in {took}, {how}."


def untold(facts: Facts) -> bool:
    """Whether it is a script without `resihp.Trainer`, or one that ended before it had begun: where its time went
    nobody knows."""
    return facts.job["state"] != "running" and facts.model is None and not facts.iterations


def _failures(facts: Facts) -> str:
    failures = facts.failures
    if not failures:
        return "No failure was noticed."
    kinds = Counter(row["kind"] for row in failures)
    told = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    worst = Counter(row["node"] for row in failures if row["node"] is not None).most_common(2)
    most = ""
    if worst and worst[0][1] > 1 and (len(worst) == 1 or worst[0][1] > worst[1][1]):
        most = f", most of them on {worst[0][0]} ({worst[0][1]})"
    one = len(failures) == 1
    mended = [row for row in failures if row["seconds_to_recover"] is not None]
    repairs = [row["seconds_to_recover"] for row in mended]
    back = ""
    if len(mended) == 1:
        which, noticed_s = "it" if one else "the one that stopped it", mended[0]["noticed_after_seconds"] or 0.0
        back = f"; training was back {duration(repairs[0])} after {which} ({duration(noticed_s)} of that to notice it)"
    elif mended:
        usual, longest = statistics.median(repairs), max(repairs)
        back = f"; training was back in {duration(usual)} on median, {duration(longest)} at most"
    head = f"One failure was noticed ({told})" if one else f"{len(failures):,} failures were noticed ({told}){most}"
    return f"{head}{back}."


def _cost(facts: Facts) -> str:
    account = facts.account
    if untold(facts):
        return f"There is no goodput without iterations: {hours(account.gpu_hours)} were held."
    if account.goodput is None:
        held = f"{hours(account.gpu_hours)} went to starting" if account.gpu_hours > 0 else "nothing was held"
        return f"There is no goodput to tell yet: {held}."
    goodput = f"Goodput was {percent(account.goodput)} (committed iterations over wall time, on the devices asked for)"
    lost = sum(account.lost_s.values())
    if lost < 0.005:
        return f"{goodput}, and nothing was lost."
    largest = costs(facts)[0]
    gpu = lost_hours(facts)
    most = f"most of it to {largest.name} ({duration(largest.seconds)})"
    return f"{goodput}; with slow devices counted as well, {duration(lost)} or {gpu} were lost, {most}."


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _natural(name: str) -> tuple[object, ...]:
    """`n2` before `n10`."""
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part)
