"""Turns the reports of an incident into possible causes: clues of each rank's log and node, and how the rank ended.

Decides which lines count, and to which rank they belong; `diagnosis` weighs them. Pure.
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
"""Kinds of lines that may explain why a process exited without a word, but never why it was killed."""
_ENDED_BY_SLURM = ("time limit", "preempted", "cancelled", "interrupted")
MAX_LAST_LINES = 20
"""A program that wrote more lines of output than this after a line went on in spite of it."""
SIGNALS_FROM_OTHERS = frozenset(
    {-signals.SIGKILL, -signals.SIGTERM, -signals.SIGINT, -signals.SIGHUP, -signals.SIGUSR1}
)
"""Signals that a process never sends to itself."""
KILL_KINDS = frozenset({"loader killed"})
"""Kinds of lines that report a kill, and may therefore explain one."""
UNSPECIFIC_KINDS = frozenset({"nccl cuda", "nccl system", "nccl internal", "cuda error", "cuda libraries"})
"""Kinds of exceptions which say that CUDA or NCCL failed, without the part that failed; a nearby line names it."""
_CPLUSPLUS_WORDS = re.compile(r"what\(\)|terminate called|ProcessGroup\w{1,8}\.cpp|NCCL WARN|[Ww]atchdog")
_HANDLED_WORDS = re.compile(
    r"(?i:(?<!NCCL )warn|caught|retry|retries|ignor|fall(?:ing|s)? ?back|skipp|(?<!un)handled|recovered|"
    r"temporary (?:cache|dir)|instead|\bhint\b|\bif you (?:see|get|hit|run)\b)|"
    r"\b(?:INFO|DEBUG)\b|(?:^|[\[\s])W\d{4}\b"
)
"""Words of a line after which its writer goes on: a warning, a hint, a retry, a fallback."""


class _LogReader:
    """Reads each log once, however many reports have it."""

    def __init__(self) -> None:
        self._clues: dict[tuple[str, Clock, bool], tuple[Clue, ...]] = {}

    def clues(self, text: str, report: Report, *, kernel_lines: bool) -> tuple[Clue, ...]:
        """Return the clues in a log of this report's rank or node."""
        key = text, report.clock or Clock(near=report.at), kernel_lines
        if text and key not in self._clues:
            self._clues[key] = read_log(text, key[1], kernel_lines=kernel_lines)
        return self._clues.get(key, ())


def candidates_of(reports: Sequence[Report]) -> list[Candidate]:
    """Return all possible causes in one incident's reports, in a deterministic order."""
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
    """Return by rank the kinds of its clues that explain its end; one that only a time ties to an end does not."""
    of_ranks: dict[int, list[Signature]] = {}
    for candidate in candidates:
        if candidate.report is None or candidate.survived:
            continue
        if candidate.signature.tie not in ("moment", "silence"):
            of_ranks.setdefault(candidate.report.rank, []).append(candidate.signature)
    return of_ranks


def _candidate(clue: Clue, report: Report, rank_report: Report | None, signature: Signature) -> Candidate | None:
    """Return a clue as a candidate, or None if its time does not fit the end of `report`."""
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
    """Return the candidates of a rank's own log: the decisive one of its exceptions, and, for a living rank, its
    observations of others."""
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
    """Whether a line of a log did not end its process. Most lines that a library logs are survived.

    A process that raised a conclusive exception was ended by that; one killed by another process's signal, by that
    signal; and a line long before the end, as the output in between shows, did not end it. A device or a node is never
    blamed for a line that was only logged, but may be for one that was raised, in Python or in C++ that then aborted.
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
    """Return how many lines may follow the last exception of a process that ends with status 1, as Python does after an
    exception: shutdown code may print many. A device or a node is not blamed with that many lines after it."""
    return MAX_LAST_LINES if signature.blames else MAX_LINES_AFTER - 1


def _ended_it(clue: Clue, status: int | None) -> bool:
    """Whether C++ ended the process with this line: it aborts on an uncaught exception."""
    return status == -signals.SIGABRT and _CPLUSPLUS_WORDS.search(clue.line) is not None


def kind_of_raised(clues: Sequence[Clue]) -> Signature | None:
    """Return the kind of the decisive one of the exceptions that a program raised; None if no clue is an exception."""
    raised = [clue for clue in clues if clue.raised]
    decisive = _decisive_exception(raised) or (raised[-1] if raised else None)
    return None if decisive is None else signature_of(decisive.kind)


def _decisive_exception(raised: Sequence[Clue]) -> Clue | None:
    """Return the last exception that no peer caused; of the chain that it belongs to, the one nearest to a root cause.

    A connection error that may concern a peer counts only if it was the last of all.
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
    """Return a clue from the kernel or Slurm as a candidate of the rank that it names. None if it concerns none of our
    ranks, or a part of the node that has nothing to do with these ends."""
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
    """Return how many seconds before the rank's end a line was written; None if unknown."""
    if clue.at is None or report.at is None:
        return clue.age_s
    return report.at - clue.at


def _as_severe(signature: Signature, clue: Clue) -> Signature:
    """Return the row of an NVLink Xid, without blame if its line calls it non-fatal: then the link still works."""
    if not clue.kind.startswith("xid ") or signature.category != "link":
        return signature
    severity = _SEVERITY.search(clue.line)
    if severity is None or severity[1] is None:
        return signature
    words = f"{signature.words}, which its driver calls non-fatal"
    return msgspec.structs.replace(signature, words=words, depth=Depth.SIGN, blames=False, certainty=0.3, tie="silence")


def _rank_named_by(clue: Clue, signature: Signature, here: Sequence[Report]) -> tuple[Report | None, bool]:
    """Return the rank of this node that a line concerns, if it can be determined, and whether it concerns none of ours.

    A process that is not ours may have met a fault of our device. Only its own failures, and kills of it for memory,
    are foreign.
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
    """Return the report of a process or, without it, of a device; "" and 0 are none."""
    by_process = next((report for report in here if pid and pid == report.pid), None)
    by_device = next((report for report in here if bus and bus == normal_bus(report.bus)), None)
    return by_process or by_device  # several processes may each use a part of one GPU


def normal_bus(text: str) -> str:
    """Normalise a PCI address: `PCI:0000:3b:00` and `00000000:3B:00.0` become equal; empty if it is not an address."""
    parts = text.lower().removeprefix("pci:").partition(".")[0].split(":")
    return f"{parts[0].lstrip('0')}:{parts[1]}:{parts[2]}" if len(parts) == 3 else ""


def _lost_nodes(reports: Sequence[Report]) -> dict[str, Candidate]:
    """Return the nodes on which all processes are gone without an observed end."""
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
"""Signals that carry information of their own: category, addition to the signal's name, advice."""


def _of_end(report: Report, own: Sequence[Signature], ended_by_slurm: bool) -> Candidate | None:
    """Return how a rank ended as a candidate, unless its own log or another party's order explains it."""
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
