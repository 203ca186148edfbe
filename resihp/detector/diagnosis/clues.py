"""Finds clues in a log: the lines that may explain why a process ended, and the times at which they were written.

Called by an agent on the node of the log, or by `candidates` for logs that were sent as text. Never decides on a cause
(`diagnosis`). The time is linear in the text, whatever its content. Colours and control characters are removed.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from calendar import timegm
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime

import msgspec

from resihp.detector.diagnosis import connections, outside, tracebacks
from resihp.detector.diagnosis.recoveries import recovered_kind
from resihp.detector.diagnosis.signatures import EXCEPTION, KERNEL_KINDS, SIGNATURES, Signature
from resihp.protocol.messages import MAX_LINES_AFTER, Clue

BEFORE_S = 900.0
"""Longest time, in seconds, between a line and the end of a process that it explains: PyTorch lets NCCL wait 10 minutes
for a peer."""
AFTER_S = 120.0
"""Longest time, in seconds, after the end of a process at which a line may still explain this end."""
LINE_CHARACTERS = 400
"""Number of characters of a line that a clue contains, from a little before the recognised words on."""
MAX_CLUES_OF_A_KIND = 4
"""Number of clues of one kind about one device or process: the first two and the last two."""
MAX_CLUES = 64
"""Number of clues of one log."""
_MAX_PLACES = 64
"""Number of occurrences of each literal that are examined, from the beginning of the text and again from its end."""
_WINDOW_CHARACTERS = 600
_CRASH_LINE = re.compile(
    r"[ \t]*$|[ \t]|[│╭╰|+]|> File|Traceback|frame #|#\d|Thread 0x|Current thread|Extension modules|\[rank\d|"
    r"terminate called|"
    r"what\(\)|Exception raised from|Fatal Python error|Aborted|Segmentation fault|\*\*\* |\[[\w.-]{1,64}:\d|"
    r"\[[EFW]\d|[EFW]\d{4} |"
    r"\S{1,64}:\d{1,9}:\d{1,9} \[\d|srun:|slurmstepd:|(?:During handling of|The above exception)|"
    r"Compile with|For debugging consider|CUDA kernel errors|Last error:|nccl\w{1,32}Error|"
    r"wandb: |COMET \w{1,16}: |\[neptune\]|\[mlflow\]|🏃 View run|🧪 View experiment|"
    r"(?:[A-Za-z_][\w.]{0,127}(?:Error|Exception|Interrupt|Exit)\b)|(?i:warning\b)|.{0,80}(?:Warning|resource_tracker)"
)
"""Matches the beginning of a line that a program writes while it crashes: stacks, C++ exceptions, watchdogs, launchers,
summaries of experiment trackers. Any other line is output of a program that goes on."""
_CONTROLS = re.compile(
    r"\x1b\[[0-?]{0,32}[ -/]{0,8}[@-~]|\x1b\][^\x07\x1b\n]{0,256}(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f]"
)


_STEM_CHARACTERS = 6
_NEEDLES = {needle for row in SIGNATURES if not row.raised for needle in row.needles}
_STEMS = Counter(needle[:_STEM_CHARACTERS] for needle in _NEEDLES)
_SHARED_STEMS = tuple(stem for stem, needles in _STEMS.items() if needles > 1)
"""Beginnings that several literals share: if a beginning does not occur in the text, its literals are not searched."""


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """Facts needed to read the times in a machine's logs.

    `near`: a time near that of the lines, in seconds since 1970, to complete times without a year. `booted`: time at
    which the kernel's clock was 0, for times such as `[12.345]`. `utc_offset_s`: offset of local time from UTC in
    seconds (3600 in Paris in winter), for times without a zone. If a field is None, times that need it are not read,
    because they might be wrong by hours.
    """

    near: float | None = None
    booted: float | None = None
    utc_offset_s: float | None = None


def read_log(tail: str, clock: Clock | None = None, *, kernel_lines: bool = True) -> tuple[Clue, ...]:
    """Return the clues in the tail of a log, or of the messages of the kernel and Slurm, in the order of the lines.

    `kernel_lines`: whether the kernel may have written lines of this text. In the output of a program, a line of the
    kernel is a quotation that says nothing about this machine, and a time far from the program's end is in another time
    zone; both are ignored.
    """
    clock = clock or Clock()
    text = tail.replace("\r\n", "\n").replace("\r", "\n") if "\r" in tail else tail
    if "\x1b" in text:
        text = _CONTROLS.sub("", text)
    ends = tracebacks.exceptions(
        text, _lines_of(text, tracebacks.TRACEBACK_TITLE), _lines_of(text, tracebacks.STRUCTURED_MARK)
    )
    matches = _matches(text, ends, kernel_lines=kernel_lines)
    ordinary = _ordinary_lines(text, min(matches)) if matches else []
    clues = []
    before: Signature | None = None
    for start in sorted(matches):
        at, signature, named = matches[start]
        line = _clean(text[max(start, at - LINE_CHARACTERS // 2) : _end(text, at)])
        signature = connections.of_system_error(signature, text[start : start + 2 * _WINDOW_CHARACTERS])
        raised = ends.get(start)
        if raised is not None:
            error = _clean(raised.words or text[raised.error : _end(text, start)])
            named["error"] = error[: LINE_CHARACTERS // 2]
            following = text[_end(text, start) : _end(text, start) + _WINDOW_CHARACTERS]
            after = before if raised.chained else None
            signature = outside.of_exception(signature, error, raised.file, after, following)
            before = signature
        kind = f"xid {int(named['xid'])}" if "xid" in named else signature.kind
        kind = recovered_kind(kind, line, text, _end(text, at)) or kind
        words_at = at if raised is None else raised.error
        time_end = _end(text, start) if _may_end_with_a_time(signature) else words_at
        when = time_of(text[start:time_end], clock)
        if when is not None and not kernel_lines and not _is_near(when, clock):
            when = None
        clues.append(
            Clue(
                kind=kind,
                line=line,
                at=when,
                named=named,
                raised=raised is not None,
                chained=raised is not None and raised.chained,
                age_s=clock.near - when if clock.near is not None and when is not None else None,
                lines_after=min(len(ordinary) - bisect_right(ordinary, start), MAX_LINES_AFTER),
            )
        )
    return _thinned(clues)


def _matches(
    text: str, ends: Mapping[int, tracebacks.TracebackEnd], *, kernel_lines: bool
) -> dict[int, tuple[int, Signature, dict[str, str]]]:
    """Return, by the start of each line that is a clue: the place of the recognised words, the row of the table, and
    the named groups of its pattern.

    `ends`: exceptions, by the start of their last line.
    """
    matches: dict[int, tuple[int, Signature, dict[str, str]]] = {}
    absent = {stem for stem in _SHARED_STEMS if stem not in text}
    for signature in SIGNATURES:
        if not signature.raised and (kernel_lines or signature.kind not in KERNEL_KINDS):
            for start, at in _places(text, signature, absent):
                if start not in matches and (named := _confirmed(text, start, at, signature)) is not None:
                    matches[start] = at, signature, named
    for start, end in ends.items():
        if end.words or start not in matches:
            signature = _of_exception(end.words or _clean(text[end.error : _end(text, start)]))
            if start not in matches or signature is not EXCEPTION:
                matches[start] = start, signature, {}
    return matches


def _may_end_with_a_time(signature: Signature) -> bool:
    """Return whether a time may follow the recognised words: in Slurm's lines; all other programs write it first."""
    return signature.node_wide and signature.kind not in KERNEL_KINDS


def _is_near(when: float, clock: Clock) -> bool:
    return clock.near is None or clock.near - BEFORE_S <= when <= clock.near + AFTER_S


def _ordinary_lines(text: str, since: int) -> list[int]:
    """Return the starts of the last lines, after `since`, that a program writes while it goes on (no `_CRASH_LINE`).

    There are no more of them than are counted.
    """
    places: list[int] = []
    line_end = len(text)
    while line_end > since and len(places) < MAX_LINES_AFTER + MAX_CLUES:
        start = text.rfind("\n", since, line_end) + 1
        if start == 0:
            break
        if not _CRASH_LINE.match(text, start, min(line_end, start + LINE_CHARACTERS)):
            places.append(start)
        line_end = start - 1
    return places[::-1]


def _end(text: str, start: int) -> int:
    """Return the end of the line that contains `start`, but at most `start` + `_WINDOW_CHARACTERS`."""
    end = text.find("\n", start, start + _WINDOW_CHARACTERS)
    return end if end >= 0 else min(start + _WINDOW_CHARACTERS, len(text))


def _places(text: str, signature: Signature, absent: set[str]) -> Iterator[tuple[int, int]]:
    """Yield (start of line, place of the literal) for the literals of a row of the table.

    `absent`: literals and shared beginnings that do not occur in the text; extended here.
    """
    for needle in signature.needles:
        if needle[:_STEM_CHARACTERS] in absent or needle in absent:
            continue
        places = list(_lines_of(text, needle))
        if not places:
            absent.add(needle)
        yield from places


def _lines_of(text: str, needle: str) -> Iterator[tuple[int, int]]:
    """Yield (start of line, place of the literal), once per line, for the first and the last lines with the literal."""
    at = text.find(needle)
    looked = 0
    while at >= 0 and looked < _MAX_PLACES:
        yield text.rfind("\n", 0, at) + 1, at
        looked += 1
        line_end = text.find("\n", at)
        at = text.find(needle, line_end) if line_end >= 0 else -1
    first_half = at
    at = len(text)
    looked = 0
    while first_half >= 0 and looked < _MAX_PLACES and (at := text.rfind(needle, first_half, at)) >= 0:
        start = text.rfind("\n", 0, at) + 1
        yield start, text.find(needle, start)
        looked += 1
        at = start


def _confirmed(text: str, start: int, at: int, signature: Signature) -> dict[str, str] | None:
    """Return the named groups of the row's pattern if the line matches it; else None."""
    if signature.pattern is None:
        return {}
    window = text[max(start, at - _WINDOW_CHARACTERS) : _end(text, at)]
    match = signature.pattern.search(window)
    if match is None:
        return None
    named = {name: value for name, value in match.groupdict().items() if value is not None}
    if signature.preceding is not None and not named:
        before = [*signature.preceding.finditer(text, max(0, start - _WINDOW_CHARACTERS), start)]
        named = before[-1].groupdict() if before else {}
    return named


def _of_exception(error: str) -> Signature:
    """Return the first row that matches the text of an exception; `EXCEPTION` if none does."""
    for signature in SIGNATURES:
        if signature.node_wide or not any(needle in error for needle in signature.needles):
            continue
        if signature.pattern is None or signature.pattern.search(error):
            return signature
    return EXCEPTION


def _clean(line: str) -> str:
    return _CONTROLS.sub("", line).strip()[:LINE_CHARACTERS]


def _thinned(clues: list[Clue]) -> tuple[Clue, ...]:
    """Return at most `MAX_CLUES` of the clues: the first and last few of each kind, the latest ones preferred."""
    of_kind: dict[tuple[str, str, str], list[int]] = {}
    for i, clue in enumerate(clues):
        of_kind.setdefault((clue.kind, clue.named.get("bus", ""), clue.named.get("pid", "")), []).append(i)
    half = MAX_CLUES_OF_A_KIND // 2
    kept = sorted({i for places in of_kind.values() for i in (*places[:half], *places[-half:])})
    firsts = {places[0] for places in list(of_kind.values())[: MAX_CLUES // 2]}
    kept = sorted({*firsts, *kept[-(MAX_CLUES - len(firsts)) :]}) if len(kept) > MAX_CLUES else kept
    return tuple(clues[i] for i in kept)


# --- times ------------------------------------------------------------------------------------------------------------

_ISO = re.compile(
    r"\b(20\d\d)-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?\s?(Z|[+-]\d\d:?\d\d)?",
)
_UPTIME = re.compile(r"\[ {0,10}(\d{1,10}\.\d{6})\]")
_KMSG = re.compile(r"\d{1,5},\d{1,20},(\d{1,18}),")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_NAMED_MONTH = re.compile(rf"({'|'.join(_MONTHS)})\s{{1,2}}(\d{{1,2}}) (\d\d):(\d\d):(\d\d)(?: (20\d\d)\b)?")
_GLOG = re.compile(r"\b[IWEF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,9})")


def time_of(line: str, clock: Clock) -> float | None:
    """Return the time in a line, in seconds since 1970; None without a time, or if `clock` lacks a fact to read it.

    Reads ISO 8601 (Python's logging, journald, Slurm), the kernel's time since boot (dmesg, /dev/kmsg), dmesg -T,
    syslog, and glog's short form (NCCL's watchdog in PyTorch).
    """
    head = line[:240]
    if match := _ISO.search(head):
        *numbers, fraction, zone = match.groups()
        offset_s = clock.utc_offset_s
        if zone is not None:
            sign = -1 if zone[0] == "-" else 1
            offset_s = 0.0 if zone == "Z" else sign * (int(zone[1:3]) * 3600 + int(zone[-2:]) * 60)
        return _seconds([int(number) for number in numbers], fraction, offset_s)
    if match := _NAMED_MONTH.search(head):
        month, day, hour, minute, second, year = match.groups()
        parts = [_MONTHS.index(month) + 1, int(day), int(hour), int(minute), int(second)]
        if year:
            return _seconds([int(year), *parts], None, clock.utc_offset_s)
        return _in_some_year(parts, None, clock)
    if match := _GLOG.search(head):
        *numbers, fraction = match.groups()
        return _in_some_year([int(number) for number in numbers], fraction, clock)
    if clock.booted is not None:
        if match := _UPTIME.search(head, 0, 80):
            return clock.booted + float(match[1])
        if match := _KMSG.match(head):
            return clock.booted + int(match[1]) * 1e-6
    return None


def _seconds(parts: list[int], fraction: str | None, offset_s: float | None) -> float | None:
    year, month, day, hour, minute, second = parts
    if offset_s is None or not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60 and second < 61):
        return None
    return timegm((year, month, day, hour, minute, second)) + float(f"0.{fraction or 0}") - offset_s


def _in_some_year(parts: list[int], fraction: str | None, clock: Clock) -> float | None:
    """Return a time without a year, in the year that brings it nearest to `clock.near`; None if that is None."""
    if clock.near is None:
        return None
    with suppress(OverflowError, ValueError, OSError):
        year = datetime.fromtimestamp(clock.near, UTC).year
        times = [_seconds([y, *parts], fraction, clock.utc_offset_s) for y in (year - 1, year, year + 1)]
        near = clock.near
        return min((time for time in times if time is not None), key=lambda time: abs(time - near), default=None)
    return None
