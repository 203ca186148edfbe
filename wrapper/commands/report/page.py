"""The report as one self-contained HTML page: no network, no script, no fonts.

Jinja escapes all text from the ledger (`page.html.j2`), and control characters are shown as escapes. Evidence and
pictures of a job with thousands of failures are cut to limit the page's size, and the page says so.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from resihp.record.describe import rank_list, size
from resihp.wrapper.commands.report import runs
from resihp.wrapper.commands.report.facts import Facts, Row
from resihp.wrapper.commands.report.layouts import LayoutChange, changes
from resihp.wrapper.commands.report.levels import rank_levels
from resihp.wrapper.commands.report.marks import FAILURE_SHAPES, MAX_FAILURES_NUMBERED, clock
from resihp.wrapper.commands.report.story import (
    costs,
    gaps,
    lost_hours,
    node_lines,
    not_drawn,
    safe,
    sentences,
    settings,
)
from resihp.wrapper.commands.report.svg import sign
from resihp.wrapper.commands.report.timeline import MAX_BOXES, has_slow_strips, node_signs, timeline
from resihp.wrapper.commands.report.times import iteration_times
from resihp.wrapper.output.explanations import sentences as explained
from resihp.wrapper.output.render import as_change, duration, hours, literal, one_line, percent, suspects

if TYPE_CHECKING:
    from jinja2 import Environment

MAX_FAILURES = 400
"""Most failures that are listed; if there are more, the first and the last ones, this many in total."""
MAX_RANKS_DRAWN = 12_000
"""Most ranks that are drawn in all pictures of layouts together; the last plans have precedence."""
MAX_SUSPICIONS = 100
"""Most suspicions that are listed: the last ones."""
MAX_PLANS = 400
MAX_NODES = 300
MAX_EVIDENCE_CHARACTERS = 8_000
"""Most characters of a failure's evidence that are shown."""
MAX_EXPANDED = 8
"""Number of failures and of layouts that are expanded at first. The others expand on a click, and in print."""


def html(facts: Facts) -> str:
    """Return the report as an HTML page."""
    failures, failures_left_out = _both_ends(facts.failures, MAX_FAILURES)
    plans, plans_left_out = _both_ends(facts.plans, MAX_PLANS)
    nodes = node_lines(facts)
    shown_nodes = [line for line in nodes if line.troubles or line.changes][:MAX_NODES]
    if len(nodes) <= MAX_NODES:
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
            slurm_heads=runs.RUN_HEADINGS,
            slurm_runs=runs.lines(facts.slurm) if facts.slurm else [],
            lost_hours=lost_hours(facts),
            timeline=timeline(facts),
            times=iteration_times(facts),
            levels=rank_levels(facts),
            suspicions=facts.suspicions[-MAX_SUSPICIONS:],
            suspicions_left_out=max(len(facts.suspicions) - MAX_SUSPICIONS, 0),
            failures=failures,
            failures_left_out=failures_left_out,
            plans=plans,
            plans_left_out=plans_left_out,
            promises={row["epoch"]: row for row in facts.promises},
            pictures=pictures,
            explanations={epoch: explained(explanation) for epoch, explanation in facts.explanations.items()},
            pictures_left_out=sum(row["in_effect_at"] is not None for row in facts.plans) - len(pictures),
            nodes=shown_nodes,
            nodes_left_out=len(nodes) - len(shown_nodes),
            reconfigurations={row["epoch"]: row for row in facts.reconfigurations},
            settings=settings(facts.configuration),
            kinds=[kind for kind in FAILURE_SHAPES if any(row["kind"] == kind for row in facts.failures)],
            many_failures=len(facts.failures) > MAX_FAILURES_NUMBERED,
            many_changes=len(facts.reconfigurations) > MAX_BOXES,
            slow_strips=has_slow_strips(facts),
            node_signs=node_signs(facts),
            gaps=gaps(facts),
            not_drawn=not_drawn(facts),
            command=safe(facts.command),
            open=MAX_EXPANDED,
        )
    )


def _pictures(facts: Facts) -> list[LayoutChange]:
    """Return the layouts before and after the last plans, oldest first, as many as the limit of ranks allows."""
    pictures: list[LayoutChange] = []
    ranks_left = MAX_RANKS_DRAWN
    for change in changes(facts.plans, facts.workers):
        ranks_left -= change.chips
        if ranks_left < 0 and pictures:
            break
        pictures.append(change)
    return pictures[::-1]


def _both_ends(rows: Sequence[Row], most: int) -> tuple[list[Row], int]:
    """Return `rows` if they are at most `most`; otherwise the first and the last of them, and the number left out."""
    if len(rows) <= most:
        return list(rows), 0
    return [*rows[: most // 2], *rows[-(most // 2) :]], len(rows) - 2 * (most // 2)


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("resihp.wrapper.commands.report", "."),
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
    # The style sheet is ours and must not be escaped, as `>` is part of its syntax.
    style = resources.files("resihp.wrapper.commands.report").joinpath("page.css").read_text()
    environment.globals["style"] = Markup(style)
    environment.globals["sign"] = sign
    return environment


def _printable(value: Any) -> Any:
    """Return a value for the template to print: text without control characters, and a dash for None."""
    if value is None:
        return "-"
    return value if isinstance(value, Markup) or not isinstance(value, str) else literal(value)


def _sign(kind: str) -> Markup:
    """Return the mark for a kind of failure; it is the same in the pictures."""
    return sign(FAILURE_SHAPES[kind], kind)


def _tight(text: str) -> Markup:
    """Return `text` with no-break spaces between numbers and units."""
    words = re.sub(r"(?<=\d) (?=%|(?:[smhd]|min|GPU-\w+)\b)", "\N{NO-BREAK SPACE}", literal(text))
    return escape(words.replace("GPU-", "GPU\N{NON-BREAKING HYPHEN}"))


def _cut(text: str) -> str:
    if len(text) <= MAX_EVIDENCE_CHARACTERS:
        return text
    half = MAX_EVIDENCE_CHARACTERS // 2
    return f"{text[:half]}\n... {len(text) - 2 * half:,} characters left out ...\n{text[-half:]}"
