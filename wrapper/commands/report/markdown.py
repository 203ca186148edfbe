"""The report as a short Markdown text, for a ticket. Text from the ledger is escaped, never parsed as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from resihp.record.describe import rank_list
from resihp.wrapper.commands.report import runs
from resihp.wrapper.commands.report.facts import Facts
from resihp.wrapper.commands.report.marks import clock
from resihp.wrapper.commands.report.story import costs, gaps, lost_hours, node_lines, safe, sentences
from resihp.wrapper.output.explanations import sentences as explained
from resihp.wrapper.output.render import as_change, duration, hours, literal, percent

MAX_FAILURES = 20
MAX_NODES = 10
MAX_PLANS = 20
MAX_EVIDENCE_CHARACTERS = 240


def markdown(facts: Facts) -> str:
    """Return the report as Markdown, with a newline at its end."""
    account, job = facts.account, facts.job
    parts = [f"## Job {text(job['name'])}: {job['state']}", "", " ".join(text(s) for s in sentences(facts)), ""]
    parts += table(
        ("began (UTC)", "goodput", "ETTR", "lost", "failures", "MTBF", "MTTR"),
        [
            (
                f"{facts.began:%Y-%m-%d %H:%M:%S}",
                percent(account.goodput),
                percent(account.ettr),
                lost_hours(facts),
                str(account.failures),
                duration(account.mtbf_s),
                duration(account.mttr_s),
            )
        ],
    )
    if facts.slurm is not None:
        parts += [f"### Slurm job {text(facts.slurm.slurm_job)}", "", text(runs.sentence(facts.slurm)), ""]
        parts += table(runs.RUN_HEADINGS, runs.lines(facts.slurm))
    if cause_costs := costs(facts):
        parts += ["### Lost time", ""]
        rows = [(cost.name, duration(cost.seconds), hours(cost.gpu_hours), percent(cost.share)) for cost in cause_costs]
        parts += table(("cause", "time", "cost", "of the loss"), rows)
    parts += [*_failures(facts), *_plans(facts), *_nodes(facts)]
    parts += [f"resihp {text(job['version'])}, `{code(safe(facts.command))}`"]
    return "\n".join(parts).rstrip() + "\n"


def _failures(facts: Facts) -> list[str]:
    if not facts.failures:
        return []
    parts = ["### Failures", ""]
    for row in facts.failures[:MAX_FAILURES]:
        where = f", {row['node']}" if row["node"] is not None else ""
        where += f" device {row['device']}" if row["device"] is not None else ""
        ranks = f", {rank_list(row['ranks'])}" if row["ranks"] else ""
        back = row["seconds_to_recover"]
        without = f" ({duration(row['seconds_without_noticing'])} without detection)"
        after = f", training back in {duration(back)}{without}" if back is not None else ""
        words = f"{row['kind']}{where}{ranks}, iteration {row['iteration']}, {clock(row['noticed_at'])}{after}"
        parts.append(f"{row['failure']}. {text(row['cause'])} ({text(words)})")
        if row["evidence"]:
            parts.append(f"   {text(_cut(row['evidence']))}")
    return [*parts, *_more(facts.failures, MAX_FAILURES, f"resihp history failures {facts.job['name']}"), ""]


def _plans(facts: Facts) -> list[str]:
    if not facts.plans:
        return []
    promised = {row["epoch"]: row for row in facts.promises}
    rows = []
    for row in facts.plans[-MAX_PLANS:]:
        promise = promised.get(row["epoch"])
        gains = [as_change(promise[name] if promise else None) for name in ("promised", "kept")]
        verdict = promise["verdict"] if promise and promise["promised"] is not None else "-"
        outcome = verdict if row["in_effect_at"] is not None else row["outcome"]
        rows.append((str(row["epoch"]), str(row["next_iteration"]), row["description"], *gains, outcome))
    parts = ["### Plans", "", *table(("epoch", "from", "layout", "promised", "kept", "verdict"), rows)]
    if missing := gaps(facts):
        parts += [" ".join(map(text, missing)), ""]
    if facts.explanations:
        epoch = max(facts.explanations)
        lines = [f"- {about}: {text(words)}" for about, words in explained(facts.explanations[epoch])]
        parts += [f"The plan of epoch {epoch}:", "", *lines, ""]
    return parts


def _nodes(facts: Facts) -> list[str]:
    troubled_nodes = [line for line in node_lines(facts) if line.troubles or line.changes]
    if not troubled_nodes:
        return []
    lines = [
        (
            line.name,
            ", ".join(f"{number} {kind}" for kind, number in line.failures.items()) or "none",
            line.changes or "stayed",
        )
        for line in troubled_nodes[:MAX_NODES]
    ]
    rows = table(("node", "failures", "outcome"), lines)
    return ["### Nodes", "", *rows, *_more(troubled_nodes, MAX_NODES, f"resihp history nodes {facts.job['name']}")]


def text(words: str) -> str:
    """Return the words as one line that Markdown shows literally: HTML and all special characters are escaped."""
    line = " ".join(literal(words).split())
    line = re.sub(r"([\\`*\[\]#~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))", r"\\\1", line)
    # Entities, since GitHub, GitLab and Jira do not agree on which of these a backslash escapes.
    for sign, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;"), ("@", "&#64;")):
        line = line.replace(sign, entity)
    return line


def code(words: str) -> str:
    """Return the words for use between backticks. Their own backticks are replaced, because they cannot be escaped
    there."""
    return " ".join(literal(words).split()).replace("`", "'")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, and an empty line after it."""
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    lines += [f"| {' | '.join(text(cell) for cell in row)} |" for row in rows]
    return [*lines, ""]


def _more(rows: Sequence[object], most: int, command: str) -> list[str]:
    hidden = len(rows) - most
    return [f"and {hidden:,} more: `{code(command)}`"] if hidden > 0 else []


def _cut(words: str) -> str:
    line = " ".join(words.split())
    return line if len(line) <= MAX_EVIDENCE_CHARACTERS else f"{line[:MAX_EVIDENCE_CHARACTERS]}..."
