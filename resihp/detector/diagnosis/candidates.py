"""Turns the reports of an incident into candidates for the root cause.

A candidate is a clue in a rank's log, a clue in the messages of a node, or the exit status of a rank. This module
decides which clues count, and to which rank they belong. It never chooses the root cause; `diagnosis`, which calls it,
does. Pure.
"""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Mapping, Sequence

import msgspec

from resihp.detector.diagnosis.clues import AFTER_S, BEFORE_S, Clock, read_log
from resihp.detector.diagnosis.reports import Candidate, Report
from resihp.detector.diagnosis.signatures import CATEGORY_DEFAULTS, Category, Depth, Signature, signature_of, xid_of
from resihp.detector.diagnosis.ties import Endings, ends_of
from resihp.protocol.messages import ABORT_STATUS, MAX_LINES_AFTER, Clue

_SEVERITY = re.compile(r"(?i)Xid .{0,200}?\b(non-?)?fatal\b")
_SLURM_NODE_PROBLEMS = ("container", "nodes left out", "unkillable")
"""Kinds of lines that may explain an exit without a logged reason, but never a kill by a signal."""
_ENDED_BY_SLURM = ("time limit", "preempted", "cancelled", "interrupted")
MAX_LAST_LINES = 20
"""If a program wrote more lines of output than this after a line, it continued after that line."""
SIGNALS_FROM_OTHERS = frozenset(
    {-signals.SIGKILL, -signals.SIGTERM, -signals.SIGINT, -signals.SIGHUP, -signals.SIGUSR1}
)
"""Signals that only other processes send, as exit statuses."""
KILL_KINDS = frozenset({"loader killed"})
"""Kinds of lines that report a kill, and may therefore explain the kill of a rank."""
UNSPECIFIC_KINDS = frozenset({"nccl cuda", "nccl system", "nccl internal", "cuda error", "cuda libraries"})
"""Kinds of exceptions that report a failure of CUDA or NCCL without the failed part; a nearby line names the part."""
_CPLUSPLUS_WORDS = re.compile(r"what\(\)|terminate called|ProcessGroup\w{1,8}\.cpp|NCCL WARN|[Ww]atchdog")
_HANDLED_WORDS = re.compile(
    r"(?i:(?<!NCCL )warn|caught|retry|retries|ignor|fall(?:ing|s)? ?back|skipp|(?<!un)handled|recovered|"
    r"temporary (?:cache|dir)|instead|\bhint\b|\bif you (?:see|get|hit|run)\b)|"
    r"\b(?:INFO|DEBUG)\b|(?:^|[\[\s])W\d{4}\b"
)
"""Words of a line after which a program continues: a warning, a hint, a retry, a fallback."""


class _LogReader:
    """Finds the clues in logs; reads a log only once, even if several reports contain it."""

    def __init__(self) -> None:
        self._clues: dict[tuple[str, Clock, bool], tuple[Clue, ...]] = {}

    def clues(self, text: str, report: Report, *, kernel_lines: bool) -> tuple[Clue, ...]:
        """Return the clues in `text`, a log of the report's rank or messages of its node."""
        key = text, report.clock or Clock(near=report.at), kernel_lines
        if text and key not in self._clues:
            self._clues[key] = read_log(text, key[1], kernel_lines=kernel_lines)
        return self._clues.get(key, ())


def candidates_of(reports: Sequence[Report]) -> list[Candidate]:
    """Return all candidates for the root cause in the reports of one incident, in a deterministic order."""
    reader = _LogReader()
    own: list[Candidate] = []
    words: list[tuple[Report, list[tuple[Signature, Clue]]]] = []
    of_nodes: dict[tuple[str, str, float | None], tuple[Clue, Report]] = {}
    for report in reports:
        clues = (*report.clues, *reader.clues(report.log, report, kernel_lines=False))
        of_this = _of_log(clues, report)
        own += of_this
        words.append((report, [(c.signature, c.clue) for c in of_this if c.clue is not None and not c.survived]))
        for clue in (*clues, *reader.clues(report.messages, report, kernel_lines=True)):
            of_nodes.setdefault((report.node, clue.line, clue.at), (clue, report))
    endings = ends_of(words)
    own = [candidate for candidate in own if _is_tied(candidate, endings)]
    of_nodes_found = [_of_node(clue, report, reports, endings) for clue, report in of_nodes.values()]
    clued = [*own, *(candidate for candidate in of_nodes_found if candidate is not None)]
    lost_nodes = _lost_nodes(reports)
    of_ranks = _explanations_of_ranks(clued)
    ordered = any(candidate.kind in _ENDED_BY_SLURM for candidate in clued)
    slurm_explains = any(candidate.kind in _SLURM_NODE_PROBLEMS for candidate in clued)
    ends = [
        _of_end(report, of_ranks.get(report.rank, []), ordered)
        for report in reports
        if report.node not in lost_nodes and not (slurm_explains and report.exit and 0 < report.exit <= 128)
    ]
    return [*clued, *lost_nodes.values(), *(end for end in ends if end is not None)]


def _explanations_of_ranks(candidates: Sequence[Candidate]) -> dict[int, list[Signature]]:
    """Return, by rank, the kinds of clues that explain its end. A clue that is linked to the end only by its time does
    not explain it."""
    of_ranks: dict[int, list[Signature]] = {}
    for candidate in candidates:
        if candidate.report is None or candidate.survived:
            continue
        if candidate.signature.tie not in ("moment", "silence"):
            of_ranks.setdefault(candidate.report.rank, []).append(candidate.signature)
    return of_ranks


def _candidate(clue: Clue, report: Report, rank_report: Report | None, signature: Signature) -> Candidate | None:
    """Return a clue as a candidate; None if its time is too far from the end of `report`.

    `rank_report`: report of the rank that the clue concerns; None for the node as such.
    """
    if None not in (clue.at, report.at) and not _fits(clue.at or 0.0, report.at or 0.0):
        return None
    return Candidate(
        signature=signature,
        node=report.node,
        report=rank_report,
        at=clue.at,
        until=clue.at if clue.at is not None else report.at,
        clue=clue,
        line=clue.line,
    )


def _fits(at: float, end: float) -> bool:
    return end - BEFORE_S <= at <= end + AFTER_S


# --- a rank's own log -------------------------------------------------------------------------------------------------


def _of_log(clues: Sequence[Clue], report: Report) -> list[Candidate]:
    """Return the candidates in a rank's own log.

    Of the rank's exceptions, only the decisive one is a candidate. Of a rank that is alive, only clues about other
    ranks and about links are."""
    decisive = _decisive_exception([clue for clue in clues if clue.raised])
    candidates = []
    for clue in clues:
        signature = signature_of(clue.kind)
        if signature is None or signature.node_wide:
            continue
        lives_on = not report.ended and signature.depth < Depth.SIGN and signature.category != "link"
        overtaken = clue.raised and clue is not decisive and signature.depth != Depth.AFTER
        if lives_on or overtaken:
            continue
        candidate = _candidate(clue, report, report, signature)
        if candidate is not None and _was_survived(clue, signature, report, decisive):
            candidate = msgspec.structs.replace(candidate, survived=True)
        candidates.append(candidate)
    return [candidate for candidate in candidates if candidate is not None]


def _was_survived(clue: Clue, signature: Signature, report: Report, decisive: Clue | None) -> bool:
    """Return whether a process continued after a line of its log, so that the line is not the cause of its end.

    This is true of most lines that a library logs. A process with a conclusive exception was ended by that exception,
    and a process killed by a signal from another process was ended by the signal. A line with much output after it did
    not end the process. A device or node is never blamed for a line that was only logged; it may be blamed for an
    exception, in Python, or in C++ if the process then aborted.
    """
    if not report.ended or signature.depth > Depth.RAISED:
        return False
    status = report.exit
    if status is not None and 128 < status <= 192:
        status = 128 - status
    if status in SIGNALS_FROM_OTHERS and signature.kind not in KILL_KINDS:
        return True
    if clue.lines_after > (MAX_LAST_LINES if clue is not decisive or status != 1 else _lines_after_raised(signature)):
        return True
    if clue.raised:
        return False
    if _ended_it(clue, status):
        return False
    if _HANDLED_WORDS.search(clue.line):
        return True
    decisive_signature = signature_of(decisive.kind) if decisive is not None else None
    if decisive_signature is not None and decisive_signature.depth <= Depth.RAISED:
        return True
    is_unspecific = decisive_signature is not None and decisive_signature.kind in UNSPECIFIC_KINDS
    blames_hardware = signature.component in ("device", "node") or (signature.blames and "NCCL WARN" not in clue.line)
    return blames_hardware and not is_unspecific


def _lines_after_raised(signature: Signature) -> int:
    """Return the highest number of lines after the last exception of a process that ends with status 1.

    Python ends with status 1 after an exception, and shutdown code may then print many lines. An exception that blames
    a device or a node may be followed by fewer lines.
    """
    return MAX_LAST_LINES if signature.blames else MAX_LINES_AFTER - 1


def _ended_it(clue: Clue, status: int | None) -> bool:
    """Return whether the line is an uncaught C++ exception, on which the process aborted."""
    return status == -signals.SIGABRT and _CPLUSPLUS_WORDS.search(clue.line) is not None


def kind_of_raised(clues: Sequence[Clue]) -> Signature | None:
    """Return the kind of a program's decisive exception; None if no clue is an exception."""
    raised = [clue for clue in clues if clue.raised]
    decisive = _decisive_exception(raised) or (raised[-1] if raised else None)
    return None if decisive is None else signature_of(decisive.kind)


def _decisive_exception(raised: Sequence[Clue]) -> Clue | None:
    """Return the decisive exception of a program; None if peers caused all of them.

    It is the last exception that no peer caused; if that exception belongs to a chain, the one of the chain that is
    nearest to a root cause. A connection error that may concern a peer counts only if it is the last exception.
    """
    depths = [signature.depth if (signature := signature_of(clue.kind)) else Depth.AFTER for clue in raised]
    passed = {Depth.AFTER, Depth.TRANSFER} if depths[-1:] != [Depth.TRANSFER] else {Depth.AFTER}
    last = max((i for i, depth in enumerate(depths) if depth not in passed), default=None)
    if last is None:
        return None
    first = last
    while raised[first].chained and first > 0:
        first -= 1
    best = min(depths[first : last + 1])
    return raised[last] if best == depths[last] else raised[first + depths[first : last + 1].index(best)]


# --- messages of a node -----------------------------------------------------------------------------------------------


def _of_node(clue: Clue, report: Report, reports: Sequence[Report], endings: Endings) -> Candidate | None:
    """Return a clue from the kernel or Slurm as a candidate, of the rank that it names if it names one.

    None if the clue concerns a foreign process, or a part of the node that cannot have led to the ends of the ranks.
    """
    signature = signature_of(clue.kind)
    if signature is None or not signature.node_wide:
        return None
    signature = _as_severe(signature, clue)
    if not endings.allow(signature, _age_s(clue, report)):
        return None
    if clue.kind.startswith("xid ") and xid_of(int(clue.kind[4:])).role == "notice":
        return None
    owner, foreign = _rank_named_by(
        clue, signature, [neighbour for neighbour in reports if neighbour.node == report.node]
    )
    return None if foreign else _candidate(clue, report, owner, signature)


def _is_tied(candidate: Candidate, endings: Endings) -> bool:
    clue, report = candidate.clue, candidate.report
    return clue is None or report is None or endings.allow(candidate.signature, _age_s(clue, report))


def _age_s(clue: Clue, report: Report) -> float | None:
    """Return the number of seconds from a line to the end of the rank; None if unknown."""
    if clue.at is None or report.at is None:
        return clue.age_s
    return report.at - clue.at


def _as_severe(signature: Signature, clue: Clue) -> Signature:
    """Return the row of a clue; for an NVLink Xid that its line calls non-fatal, a row that blames no node.

    After a non-fatal NVLink error the link still works.
    """
    if not clue.kind.startswith("xid ") or signature.category != "link":
        return signature
    severity = _SEVERITY.search(clue.line)
    if severity is None or severity[1] is None:
        return signature
    words = f"{signature.words}, which its driver calls non-fatal"
    return msgspec.structs.replace(signature, words=words, depth=Depth.SIGN, blames=False, certainty=0.3, tie="silence")


def _rank_named_by(clue: Clue, signature: Signature, here: Sequence[Report]) -> tuple[Report | None, bool]:
    """Return the report of the rank that a line of the node concerns, None if unknown; and whether the line is foreign.

    `here`: reports of the node. A line is foreign if it reports the failure of a process outside of the job, or a kill
    of such a process for lack of memory. Any other line about such a process may show a fault of the job's device.
    """
    bus, pid = normal_bus(clue.named.get("bus", "")), int(clue.named.get("pid", 0))
    named = _report_of(bus, pid, here)
    if named is not None:
        return named, False
    another_device = bool(bus) and all(report.bus for report in here)
    another_process = bool(pid) and all(report.pid for report in here)
    if signature.category in ("program", "secondary", "memory") and (another_device or another_process):
        return None, True
    if signature.category == "memory":
        killed = [report for report in here if report.exit in (-signals.SIGKILL, 128 + signals.SIGKILL)]
        return killed[0] if len(killed) == 1 else None, False
    if signature.component == "device" and len(here) == 1 and not another_device:
        return here[0], False
    return None, False


def _report_of(bus: str, pid: int, here: Sequence[Report]) -> Report | None:
    """Return the report with process id `pid`; else the one with the device at PCI address `bus`. 0 and "" are none."""
    by_process = next((report for report in here if pid and pid == report.pid), None)
    by_device = next((report for report in here if bus and bus == normal_bus(report.bus)), None)
    return by_process or by_device  # several processes may each use a part of one GPU


def normal_bus(text: str) -> str:
    """Return a PCI address in normal form, equal for `PCI:0000:3b:00` and `00000000:3B:00.0`; "" for other text."""
    parts = text.lower().removeprefix("pci:").partition(".")[0].split(":")
    return f"{parts[0].lstrip('0')}:{parts[1]}:{parts[2]}" if len(parts) == 3 else ""


def _lost_nodes(reports: Sequence[Report]) -> dict[str, Candidate]:
    """Return a candidate for each node on which all processes ended without a known exit status."""
    lost_nodes = {}
    signature = _made("node lost", "node", Depth.NAMED, "lost, nobody saw its processes end")
    on_nodes: dict[str, list[Report]] = {}
    for report in reports:
        on_nodes.setdefault(report.node, []).append(report)
    for node, here in on_nodes.items():
        if all(report.ended and report.exit is None and not report.fenced for report in here):
            at = min((report.at for report in here if report.at is not None), default=None)
            lost_nodes[node] = Candidate(signature=signature, node=node, report=None, at=None, until=at)
    return lost_nodes


# --- how it ended -----------------------------------------------------------------------------------------------------

CRASH_SIGNALS: Mapping[int, tuple[Category, str, str]] = {
    signals.SIGSEGV: ("program", "", "PYTHONFAULTHANDLER=1 shows where; if it repeats on this node: dcgmi diag -r 3"),
    signals.SIGBUS: (
        "memory",
        ", often because /dev/shm is full",
        "df -h /dev/shm on the node; dmesg -T for bad memory",
    ),
    signals.SIGILL: ("program", "", "the program was built for another processor, or the processor is at fault"),
    signals.SIGFPE: ("program", "", "PYTHONFAULTHANDLER=1 shows where"),
    signals.SIGXCPU: ("allocation", ", its limit of processor time", "ulimit -t"),
    signals.SIGXFSZ: ("storage", ", its limit of a file's size", "ulimit -f"),
}
"""Signals that indicate a cause: category, addition to the signal's name, advice."""


def _of_end(report: Report, own: Sequence[Signature], ended_by_slurm: bool) -> Candidate | None:
    """Return the exit status of a rank as a candidate; None if the rank is alive, or if the end is explained.

    `own`: kinds of clues that explain the end; `ended_by_slurm`: whether Slurm ended the job, which explains signals.
    """
    if not report.ended:
        return None
    status = report.exit
    if status is not None and 128 < status <= 192:
        status = 128 - status  # shells and containers report a signal this way
    crashed = status is not None and -status in CRASH_SIGNALS
    ordered = status is not None and status < 0 and ended_by_slurm
    explained = any(signature.depth <= Depth.RAISED for signature in own)
    if explained or ((own or ordered) and not crashed and not report.fenced):
        return None
    how = "gone with its node" if status is None else f"exit {status}"
    subject = f"pid {report.pid} on node {report.node}" if report.pid else f"rank {report.rank} on node {report.node}"
    return Candidate(
        signature=_end(status, report.fenced),
        node=report.node,
        report=report,
        at=None,
        until=report.at,
        line=f"{subject}: {how}",
    )


def _end(status: int | None, fenced: str) -> Signature:
    if fenced:
        return _made("fenced", "unknown", Depth.EXIT, fenced)
    if status is None:
        return _made("gone", "unknown", Depth.EXIT, "gone, nobody saw how")
    if status == ABORT_STATUS:
        words = "exited, since an abort of its communicators did not end"
        return _made(f"exit {status}", "link", Depth.EXIT, words, advice="look at NCCL's version: resihp doctor")
    if status >= 0:
        return _made(
            f"exit {status}", "unknown", Depth.EXIT, f"exited with status {status}, no line of its log gives a reason"
        )
    try:
        name = f"killed by signal {-status} ({signals.Signals(-status).name})"
    except ValueError:
        name = f"killed by signal {-status}"
    category, words, advice = CRASH_SIGNALS.get(-status, ("unknown", "", ""))
    made = _made(f"exit {status}", category, Depth.EXIT, name + words, advice=advice)
    return msgspec.structs.replace(made, component="process", certainty=min(made.certainty, 0.5), blames=False)


def _made(kind: str, category: Category, depth: Depth, words: str, advice: str = "") -> Signature:
    default = CATEGORY_DEFAULTS[category]
    return Signature(
        kind=kind,
        category=category,
        depth=depth,
        words=words,
        needles=(),
        pattern=None,
        component=default.component,
        blames=default.blames,
        certainty=default.certainty,
        advice=advice or default.advice,
    )
