"""The report as one HTML page that needs nothing else: no network, no script, no fonts.

Jinja escapes everything that comes from the ledger (`page.html.j2`), and control characters are shown as such. What
would make the page endless, evidence and pictures of a job with thousands of failures, is cut, and the page says so.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from resihp.record.describe import rank_list, size
from wrapper.commands.report import runs
from wrapper.commands.report.facts import Facts, Row
from wrapper.commands.report.layouts import LayoutChange, changes
from wrapper.commands.report.levels import rank_levels
from wrapper.commands.report.marks import NAMED, SIGNS, clock
from wrapper.commands.report.story import costs, gaps, lost_hours, node_lines, not_drawn, safe, sentences, settings
from wrapper.commands.report.svg import sign
from wrapper.commands.report.timeline import MOST_BOXES, has_slow_strips, node_signs, timeline
from wrapper.commands.report.times import iteration_times
from wrapper.output.explanations import sentences as explained
from wrapper.output.render import as_change, duration, hours, literal, one_line, percent, suspects

if TYPE_CHECKING:
    from jinja2 import Environment

MOST_FAILURES = 400
"""Failures told one by one; of more, the first and the last half of this many."""
MOST_CHIPS = 12_000
"""Ranks drawn in pictures of layouts, those of the last plans first."""
MOST_SUSPICIONS = 100
"""Suspicions told, the last ones."""
MOST_PLANS = 400
MOST_NODES = 300
MOST_EVIDENCE = 3_000
"""Characters of a failure's evidence."""
OPEN = 8
"""Failures and plans that stand open; the rest opens by a click, and in print."""


def html(facts: Facts) -> str:
    """The page."""
    failures, failures_left_out = _both_ends(facts.failures, MOST_FAILURES)
    plans, plans_left_out = _both_ends(facts.plans, MOST_PLANS)
    nodes = node_lines(facts)
    shown_nodes = [line for line in nodes if line.troubles or line.what][:MOST_NODES]
    if len(nodes) <= MOST_NODES:
        shown_nodes = nodes
    pictures = _pictures(facts)
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            facts=facts,
            job=facts.job,
            account=facts.account,
            sentences=sentences(facts),
            costs=costs(facts),
            slurm_sentence=runs.sentence(facts.slurm) if facts.slurm else "",
            slurm_heads=runs.HEADS,
            slurm_runs=runs.lines(facts.slurm) if facts.slurm else [],
            lost_hours=lost_hours(facts),
            timeline=timeline(facts),
            times=iteration_times(facts),
            levels=rank_levels(facts),
            suspicions=facts.suspicions[-MOST_SUSPICIONS:],
            suspicions_left_out=max(len(facts.suspicions) - MOST_SUSPICIONS, 0),
            failures=failures,
            failures_left_out=failures_left_out,
            plans=plans,
            plans_left_out=plans_left_out,
            promises={row["epoch"]: row for row in facts.promises},
            pictures=pictures,
            explanations={epoch: explained(found) for epoch, found in facts.explanations.items()},
            pictures_left_out=sum(row["in_effect_at"] is not None for row in facts.plans) - len(pictures),
            nodes=shown_nodes,
            nodes_left_out=len(nodes) - len(shown_nodes),
            reconfigurations={row["epoch"]: row for row in facts.reconfigurations},
            settings=settings(facts.configuration),
            kinds=[kind for kind in SIGNS if any(row["kind"] == kind for row in facts.failures)],
            many_failures=len(facts.failures) > NAMED,
            many_changes=len(facts.reconfigurations) > MOST_BOXES,
            slow_strips=has_slow_strips(facts),
            node_signs=node_signs(facts),
            gaps=gaps(facts),
            not_drawn=not_drawn(facts),
            command=safe(facts.command),
            open=OPEN,
        )
    )


def _pictures(facts: Facts) -> list[LayoutChange]:
    """Pictures of the last plans, as many as the page has room for, in order."""
    found: list[LayoutChange] = []
    room = MOST_CHIPS
    for change in changes(facts.plans, facts.workers):
        room -= change.chips
        if room < 0 and found:
            break
        found.append(change)
    return found[::-1]


def _both_ends(rows: Sequence[Row], most: int) -> tuple[list[Row], int]:
    """`rows`, or its first and last ones, and how many are left out."""
    if len(rows) <= most:
        return list(rows), 0
    return [*rows[: most // 2], *rows[-(most // 2) :]], len(rows) - 2 * (most // 2)


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("wrapper.commands.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    environment.filters |= {
        "duration": duration,
        "one_line": one_line,
        "percent": percent,
        "hours": hours,
        "size": size,
        "clock": clock,
        "ranks": rank_list,
        "sign": _sign,
        "tight": _tight,
        "cut": _cut,
        "suspects": suspects,
        "change": as_change,
        "ratio": lambda value: "-" if value is None else f"{value:.2f}",
        "time_of_day": lambda moment: f"{moment:%H:%M:%S}",
    }
    # The style sheet is ours, and must not be escaped: `>` means something in it.
    style = resources.files("wrapper.commands.report").joinpath("page.css").read_text()
    environment.globals["style"] = Markup(style)
    environment.globals["sign"] = sign
    return environment


def _printable(value: Any) -> Any:
    """What a template prints: text from outside without control characters, and a dash for None."""
    if value is None:
        return "-"
    return value if isinstance(value, Markup) or not isinstance(value, str) else literal(value)


def _sign(kind: str) -> Markup:
    """The mark of a failure of that kind, as it stands in the pictures."""
    return sign(SIGNS[kind], kind)


def _tight(text: str) -> Markup:
    """`text` whose numbers stay on one line with their units."""
    words = re.sub(r"(?<=\d) (?=%|(?:[smhd]|min|GPU-\w+)\b)", "\N{NO-BREAK SPACE}", literal(text))
    return escape(words.replace("GPU-", "GPU\N{NON-BREAKING HYPHEN}"))


def _cut(text: str) -> str:
    if len(text) <= MOST_EVIDENCE:
        return text
    half = MOST_EVIDENCE // 2
    return f"{text[:half]}\n... {len(text) - 2 * half:,} characters left out ...\n{text[-half:]}"
