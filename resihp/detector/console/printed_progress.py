"""Follows the iterations of a training script by the lines that it prints. Pure.

The script may use any trainer of `line_formats`, or print a progress bar, as Hugging Face's Trainer and Lightning do;
the user's own pattern reads any other line. Output arrives in pieces that end anywhere, with colours, with lines of
other things between, and with counters that go back after a restart. Two lines of one form with a rising iteration are
needed before anything is reported, because a single line may look like a trainer's and be something else.
"""

from __future__ import annotations

import math
import re

import msgspec

from resihp.detector.console.line_formats import (
    HOMEMADE_FORMATS,
    LINE_FORMATS,
    MEGATRON_FORMATS,
    BarLine,
    LineFormat,
    bar_of,
    fields_of,
    label_of,
    match_of,
)
from resihp.detector.offline.recordings.values import ANSI_ESCAPE, moment_in, number_in

MAX_LINE = 8192
"""Characters of a line that are read. Frameworks print less; a script that never ends its line must not fill memory."""
MAX_LINE_FOR_PATTERN = 2000
"""The same for the user's pattern, which may take time that grows with the square of a line's length."""
MAX_LINES = 500
"""Lines of one piece of output that are read, its last ones: a script may print a gigabyte a minute."""
MIN_BAR_S = 5.0
"""Elapsed time of a bar before it counts: bars of loading and tokenising are shorter than that of training."""
MAX_ITERATION = 10**15
"""Numbers above this are no iterations."""
BIG_JUMP = 100
"""An iteration that is more than this many usual steps ahead is doubtful."""
NUMBER_PATTERN = r"[-+]?(?:nan|inf(?:inity)?|\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*(?:e[-+]?\d+)?|\.\d+)"
LOSS_PATTERN = re.compile(
    r"(?<![\w/])(?:lm[ _]loss|(?:reduced_)?train[_ ]loss(?:_step)?|total_loss|loss)"
    rf"['\"]?\s*[:=]?\s*['\"]?({NUMBER_PATTERN})(?![\w%])",
    re.IGNORECASE,
)
"""The first loss on a line: `loss: 2.1`, `lm loss: 2.1E+00`, `'loss': 2.1`, `Train loss 2.1`. Losses of an evaluation
have another name."""
TOKENS_PER_SECOND = re.compile(
    r"(?<![\w/])(?:tps|tok(?:ens)?[/_ ](?:per[_ ])?s(?:ec(?:ond)?)?)\)?['\"]?"
    rf"\s*[:=]?\s*({NUMBER_PATTERN})([KMG]?)(?![\w%])"
    rf"|(?<![\w.,])({NUMBER_PATTERN})([KMG]?) tok(?:ens)?/s(?:ec)?\b",
    re.IGNORECASE,
)
GOAL_PATTERN = re.compile(r"\s*/\s*(\d{1,15})\b")
"""The number of iterations, behind the number of one."""
ALL_FORMATS = (*MEGATRON_FORMATS, *LINE_FORMATS, *HOMEMADE_FORMATS)


class PrintedIteration(msgspec.Struct, frozen=True, kw_only=True):
    """An iteration of which the script has printed that it is complete."""

    iteration: int
    at: float
    """When the line arrived, in seconds."""
    seconds: float | None = None
    """Duration of an iteration, as printed or else by the arrival of lines; a mean if not every iteration is printed.
    None for a line that neither states it nor was compared with the line before."""
    loss: float | None = None
    """May be NaN or infinite."""
    tokens_per_second: float | None = None
    goal: int | None = None
    """The last iteration of the job."""
    goes_back: bool = False
    """Whether the counter went back: the script has started again, from an earlier checkpoint."""


class _Form:
    """The state of lines of one form: of a trainer, of the user's pattern, or of one progress bar."""

    def __init__(self) -> None:
        self.first: PrintedIteration | None = None
        """The first line, until it is reported with the second one."""
        self.last: PrintedIteration | None = None
        self.rising = 0
        """Number of lines whose iteration was greater than that of the line before."""
        self.step = 1
        """Iterations between the last two lines."""
        self.doubtful: PrintedIteration | None = None
        """A line that goes back or far ahead. It counts only if the next line follows on it: lines of two processes may
        be joined, or arrive late."""
        self.passed_s = 0.0
        """Elapsed time, as a bar states it."""
        self.done = self.done_before = 0
        """Iterations of the present bar, and of complete ones before it, as of one epoch each."""

    def take(self, stated: PrintedIteration) -> PrintedIteration | None:
        """Note a line of this form; return what it reports."""
        if stated.iteration > MAX_ITERATION:
            return None
        if self.last is None:
            self.first = self.last = stated
            return None
        ahead = stated.iteration - self.last.iteration
        if ahead == 0:
            return None
        before = self.last
        if ahead < 0 or (self.rising and ahead > BIG_JUMP * self.step):
            if self.doubtful is None or not 0 < stated.iteration - self.doubtful.iteration <= BIG_JUMP * self.step:
                self.doubtful = stated
                return None
            before = self.doubtful
        self.doubtful, self.last = None, stated
        self.rising += 1
        self.step = stated.iteration - before.iteration
        seconds = stated.seconds if stated.seconds is not None else (stated.at - before.at) / self.step
        is_known = math.isfinite(seconds) and seconds > 0
        return msgspec.structs.replace(stated, seconds=seconds if is_known else None, goes_back=ahead < 0)


class PrintedProgress:
    """Reads the output of one rank as it arrives. `pattern`: the user's own, with a group `iteration`, and perhaps
    `loss`, `seconds`, `tokens_per_second` and `goal`."""

    def __init__(self, pattern: re.Pattern[str] | None = None) -> None:
        self._pattern = pattern
        self._rest = ""
        self._forms: dict[str, _Form] = {}
        """The forms of lines that were seen, by the name of the trainer and its needle."""
        self._bars: dict[tuple[str, str], _Form] = {}
        self._chosen = ""
        """The form whose lines are reported; empty while there is none. It takes precedence over bars."""
        self._loss: float | None = None
        """Loss of a line without an iteration, as Hugging Face's Trainer prints it beside a bar."""

    def feed(self, text: str, at: float, since: float | None = None) -> list[PrintedIteration]:
        """Return the iterations that this piece of output completes. `at`: the time, in seconds, at which its last line
        was written; `since`: the time of the last line before it, if known. Lines between are taken as evenly spread.
        """
        *ended_lines, rest = re.split(r"[\r\n]", self._rest + text)
        self._rest = rest[:MAX_LINE]
        lines = [line for line in ended_lines if line]
        pause_s = 0.0 if since is None or not lines else max(at - since, 0.0) / len(lines)
        reports: list[PrintedIteration] = []
        for after, line in zip(reversed(range(len(lines))), lines, strict=True):
            if after < MAX_LINES:
                reports += self._read(ANSI_ESCAPE.sub("", line[:MAX_LINE]), at - after * pause_s)
        return reports

    def _read(self, line: str, at: float) -> list[PrintedIteration]:
        if self._pattern is not None:
            match = self._pattern.search(line[:MAX_LINE_FOR_PATTERN])
            return [] if match is None else self._take("pattern", _of_pattern(match, at))
        for form in ALL_FORMATS:
            if (stated := _of_line(form, line, at)) is not None:
                return self._take(f"{form.tool} {form.needle}", stated)
        if (bar := bar_of(line)) is not None:
            return self._take_bar(bar, line, at)
        if "loss" in line and (loss := LOSS_PATTERN.search(line)) is not None:
            self._loss = number_in(loss[1])
        return []

    def _take(self, name: str, stated: PrintedIteration | None) -> list[PrintedIteration]:
        """Note a line of a trainer, or one that matches the user's pattern. The first line of all is reported with the
        second one."""
        if stated is None:
            return []
        form = self._forms.setdefault(name, _Form())
        report = form.take(stated)
        if report is not None and not self._chosen:
            self._chosen = name
        if report is None or name != self._chosen:
            return []
        first, form.first = form.first, None
        return [report] if first is None or report.goes_back else [first, report]

    def _take_bar(self, bar: BarLine, line: str, at: float) -> list[PrintedIteration]:
        """Note a line of a progress bar. The bar whose elapsed time is longest is that of training."""
        form = self._bars.setdefault((bar.head, bar.total), _Form())
        total = int(bar.total) if bar.total.isdigit() else None
        if bar.done < form.done == total:
            form.done_before += total
        form.done = bar.done
        is_of_epoch = form.done_before > 0 or "epoch" in bar.head.lower()
        form.passed_s = max(form.passed_s, moment_in(bar.passed))
        loss = LOSS_PATTERN.search(line)
        report = form.take(
            PrintedIteration(
                iteration=form.done_before + bar.done,
                at=at,
                loss=self._loss if loss is None else number_in(loss[1]),
                goal=None if is_of_epoch else total,
            )
        )
        longest_s = max(bar_form.passed_s for bar_form in self._bars.values())
        if report is None or self._chosen or form.passed_s < max(MIN_BAR_S, longest_s):
            return []
        self._loss = None
        return [report]


def _of_line(form: LineFormat, line: str, at: float) -> PrintedIteration | None:
    """Return what a line of this trainer states; None for any other line."""
    if (match := match_of(form, line)) is None:
        return None
    fields = fields_of(form, line) or {}
    if form.time is not None and not fields:
        return None  # cut off before its time
    value = fields.get(form.field)
    seconds = _seconds(form.field, value) if isinstance(value, float) else math.nan
    loss, tokens = LOSS_PATTERN.search(line, match.start()), TOKENS_PER_SECOND.search(line, match.start())
    goal = GOAL_PATTERN.match(line, match.end(1)) if not match.re.groupindex else None
    return PrintedIteration(
        iteration=label_of(match),
        at=at,
        seconds=seconds if math.isfinite(seconds) and seconds > 0 else None,
        loss=None if loss is None else number_in(loss[1]),
        tokens_per_second=None if tokens is None else _tokens(tokens),
        goal=None if goal is None else int(goal[1]),
    )


def _seconds(field: str, value: float) -> float:
    """Return the seconds of an iteration, from a field of a trainer's line; NaN if it states something else."""
    if field in ("steps_per_second", "ups"):
        return 1 / value if value else math.nan
    return {"seconds": value, "milliseconds": value / 1000}.get(field, math.nan)


def _of_pattern(match: re.Match[str], at: float) -> PrintedIteration | None:
    """Return what a line that matches the user's pattern states; None if its iteration is no whole number."""
    groups = {name: number_in(text) for name, text in match.groupdict().items() if text is not None}
    iteration, goal = groups.get("iteration", math.nan), groups.get("goal", math.nan)
    if not iteration.is_integer() or iteration < 0:
        return None
    return PrintedIteration(
        iteration=int(iteration),
        at=at,
        seconds=groups.get("seconds"),
        loss=groups.get("loss"),
        tokens_per_second=groups.get("tokens_per_second"),
        goal=int(goal) if goal.is_integer() and 0 < goal <= MAX_ITERATION else None,
    )


def _tokens(match: re.Match[str]) -> float:
    number, unit = (match[1], match[2]) if match[1] is not None else (match[3], match[4])
    return number_in(number) * {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}[unit.upper()]
