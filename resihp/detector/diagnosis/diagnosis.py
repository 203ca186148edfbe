"""Decides on the root cause of an incident, in which processes, a device or a node ended: one verdict for all reports.

The root cause is a line of a log or an exit status; everything else only followed from it. The controller calls this
module before it records a failure. It never acts on the verdict. Rules, in this order:

1. A line that was written long before or after the incident, or by another process, is not a clue.
2. Of a program's exceptions, the last one that no peer caused counts; of a chain of exceptions, the one nearest to a
   root cause.
3. A candidate that is clearly later than another cause followed from that cause. Of the remaining candidates, the one
   nearest to a root cause is chosen (`Depth`), then the earliest. A lost connection, a timeout of a peer, a flushed
   work request or Xid 45 is chosen only if there is nothing else, and never blames a node.
4. If a rank's own log explains its end, the end is not a candidate of its own. If all processes of a node are gone and
   no exit status is known, the lost node is one candidate. If a process continued after a line (`candidates`), that
   line explains nothing, and the exit status counts for more.
5. If several ranks raised the same exception, the program or a setting is the cause, and no single device is blamed.
   A failure that is usually the application's (`USUALLY_THE_PROGRAM`) is attributed to the device if the same device
   failed in this way before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from resihp.detector.diagnosis.candidates import candidates_of, normal_bus
from resihp.detector.diagnosis.clues import Clock, read_log
from resihp.detector.diagnosis.reports import Candidate, Report
from resihp.detector.diagnosis.signatures import (
    CATEGORY_DEFAULTS,
    USUALLY_THE_PROGRAM,
    Category,
    Component,
    Depth,
    xid_of,
)
from resihp.detector.diagnosis.xids import advice as xid_advice
from resihp.protocol.messages import Clue

__all__ = ["Clock", "Clue", "Diagnosis", "Report", "diagnose", "read_log"]

SKEW_S = 5.0
"""Tolerance between clocks of different machines, and between a cause and its immediate effect, in either direction."""
MAX_EVIDENCE_LINES = 4
SMALLER_MEMORY_SHARE = 0.97
"""A device with less than this share of the other devices' memory is a smaller model; row remapping costs far less."""
_CAPACITY = re.compile(r"total capacity of (\d{1,6}(?:\.\d{1,3})?) GiB")
_OTHERS = re.compile(r"Process (\d{1,10}) has (\d{1,6}(?:\.\d{1,3})?) ([GM])iB memory in use")
_NUMBERS = re.compile(r"0x[0-9a-fA-F]{1,16}|\d{1,20}")


class Past(Protocol):
    """An earlier verdict, with the fields that are compared with the new verdict."""

    @property
    def code(self) -> str: ...
    @property
    def category(self) -> str: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def node(self) -> str | None: ...
    @property
    def device(self) -> int | None: ...


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on an incident.

    `cause`: one sentence that begins with the failed rank or node; `code`: kind of cause, for programs (`xid 79`,
    `nccl remote`, `exit -9`); `advice`: the next step or command; `evidence`: lines of logs. `blames_node`: whether the
    node or a part of it caused the failure, as opposed to the program or the other end of a connection. `secondary`:
    whether all lines only followed from the end of another process. `ranks`: ranks that the cause concerns; `node`,
    `device`: their node and device, even if not to blame. `at`: time of the cause in seconds since 1970, None if
    unknown. `certainty`: probability that the category is right, 0 to 1; a rule of thumb (`signatures`), not measured.
    """

    category: Category
    component: Component
    cause: str
    blames_node: bool
    secondary: bool
    evidence: tuple[str, ...]
    code: str
    advice: str
    ranks: tuple[int, ...] = ()
    node: str | None = None
    device: int | None = None
    at: float | None = None
    certainty: float = 0.0

    def but(self, **changes: Any) -> Diagnosis:
        return msgspec.structs.replace(self, **changes)


def diagnose(reports: Sequence[Report], earlier: Sequence[Past] = ()) -> Diagnosis:
    """Return the verdict on an incident. `earlier`: previous verdicts of this job and of others.

    The order of reports does not matter. Without any candidate the category is `unknown`, and no node is blamed.
    """
    reports = sorted(reports, key=lambda report: report.rank)
    candidates = candidates_of(reports)
    if not candidates:
        return _nothing(reports)
    causes = [c for c in candidates if c.signature.depth <= Depth.EXIT and not c.survived]
    first = min((c.until for c in causes if c.until is not None), default=float("inf"))
    in_time = [c for c in candidates if c.at is None or c.at <= first + SKEW_S]
    root = min(in_time or candidates, key=lambda candidate: candidate.order)
    same = [
        candidate
        for candidate in in_time or candidates
        if (candidate.signature.kind, candidate.survived) == (root.signature.kind, root.survived)
        and _alike(candidate, root)
    ]
    return _Verdict(root, same, candidates, reports).diagnosis(earlier)


def _alike(candidate: Candidate, root: Candidate) -> bool:
    return _NUMBERS.sub("#", candidate.named("error")) == _NUMBERS.sub("#", root.named("error"))


class _Verdict:
    """Makes the verdict for the candidate `root`. `same`: all candidates of the same kind and text, including
    `root`."""

    def __init__(
        self, root: Candidate, same: Sequence[Candidate], candidates: Sequence[Candidate], reports: Sequence[Report]
    ) -> None:
        self.root = root
        self.candidates = candidates
        self.reports = reports
        self.report = root.report or self._by_complaints()
        self.ranks = tuple(sorted({c.report.rank for c in same if c.report is not None}))
        self.nodes = {c.node for c in same}
        self.peers = {c.named("peer") for c in same if c.named("peer")}

    def diagnosis(self, earlier: Sequence[Past]) -> Diagnosis:
        root, signature = self.root, self.root.signature
        single = self._single()
        if signature.component == "node":
            return self._node(single)
        if signature.category == "allocation":
            return self._of_all(single, f"job: {self._words()}").but(node=None)
        if signature.category == "secondary":
            cause = f"{_rank_list(self.ranks)}: {self._words()}; the rank that failed first left no reason"
            return self._of_all(single, cause).but(node=None, device=None)
        if signature.kind == "gpu memory":
            return self._gpu_memory(single)
        if root.kind in USUALLY_THE_PROGRAM and (again := _again(single, earlier)):
            return again
        if signature.category == "storage" and len(self.nodes) > 1:
            return self._of_all(single, f"{len(self.nodes)} nodes: {self._words()}").but(blames_node=False)
        if signature.category in ("program", "service") and len(self.ranks) > 1:
            return self._program(single)
        if signature.component == "device" and len(self.ranks) > 1:
            return self._device(single)
        if signature.category == "link" and signature.depth == Depth.TRANSFER:
            towards = f" its peer {next(iter(self.peers))}" if len(self.peers) == 1 else " its peer"
            return self._of_all(single, f"{_rank_list(self.ranks)}: {self._words()}".replace(" its peer", towards))
        if signature.category == "unknown" and len(self.ranks) > 1:
            where = f", all on node {root.node}" if len(self.nodes) == 1 else ""
            return self._of_all(single, f"{_rank_list(self.ranks)} {self._words()}{where}")
        return single

    def _single(self) -> Diagnosis:
        """Return the verdict about the rank or node of the root cause alone."""
        root, signature, report = self.root, self.root.signature, self.report
        return Diagnosis(
            category=signature.category,
            component=signature.component,
            cause=f"{self._subject()} {self._words()}",
            blames_node=signature.blames,
            secondary=signature.category == "secondary",
            evidence=self._evidence(),
            code=root.kind,
            advice=self._advice(),
            ranks=(report.rank,) if report is not None else (),
            node=root.node,
            device=report.device if report is not None else None,
            at=root.at if root.at is not None else root.until,
            certainty=signature.certainty,
        )

    def _of_all(self, single: Diagnosis, cause: str) -> Diagnosis:
        """Return the verdict about all ranks with the same cause; its node is None if they are on several nodes."""
        node = self.root.node if len(self.nodes) == 1 else None
        device = single.device if self.ranks == single.ranks else None
        return single.but(cause=cause, ranks=self.ranks, node=node, device=device)

    def _subject(self) -> str:
        signature, report = self.root.signature, self.report
        if signature.component == "node" or report is None:
            return f"node {self.root.node}:"
        verbs = ("raised ", "killed ", "exited ", "hung")
        return f"rank {report.rank}{'' if signature.words.startswith(verbs) else ':'}"

    def _words(self) -> str:
        named = self.root.clue.named if self.root.clue is not None else {}
        words = self.root.signature.words
        for name, value in named.items():
            words = words.replace(f"{{{name}}}", value)
        return words

    def _advice(self) -> str:
        if self.root.kind.startswith("xid "):
            return xid_advice(xid_of(int(self.root.kind[4:])), self.root.named("bus"))
        return self.root.signature.advice

    def _by_complaints(self) -> Report | None:
        """Return the report of the only rank on the root's node with a clue of its own; None if there is not exactly
        one.

        Used if the kernel reports a failed device or link, but does not identify its rank.
        """
        root = self.root
        if root.signature.component not in ("device", "link") or root.clue is None:
            return None
        bus = normal_bus(root.named("bus"))
        here = [report for report in self.reports if report.node == root.node and not (bus and report.bus)]
        complaining_reports = [
            candidate.report
            for candidate in self.candidates
            if candidate.signature.depth <= Depth.SIGN and candidate.report is not None and not candidate.survived
        ]
        complaining = [report for report in here if report in complaining_reports]
        return complaining[0] if len(complaining) == 1 else None

    def _evidence(self) -> tuple[str, ...]:
        """Return the lines of the evidence: the root's, then lines of the same rank or node, the nearest to a root
        cause first. If there are none, lines of other ranks follow."""
        root, reports_meant = self.root, (self.report, None)
        ordered = sorted(self.candidates, key=lambda candidate: candidate.order)
        near = [c.line for c in ordered if c.node == root.node and (self.report is None or c.report in reports_meant)]
        lines = [line for line in dict.fromkeys((root.line, *near)) if line]
        if len(lines) < 2:
            lines = [line for line in dict.fromkeys((*lines, *(c.line for c in ordered))) if line]
        return tuple(lines[:MAX_EVIDENCE_LINES])

    def _node(self, single: Diagnosis) -> Diagnosis:
        """Return the verdict about a node and all its ranks.

        Slurm may report the failure of a node in the log of another node, without its name.
        """
        named = self.root.named("node")
        if "[" in named or "," in named:
            return self._several_named_nodes(single, named)
        if len(self.nodes) > 1 and self.root.signature.kind != "node failure":
            return self._nodes_at_once(single)
        is_failure = self.root.signature.kind == "node failure"
        node = named or (self._lost_node() if is_failure else self.root.node)
        ranks = tuple(report.rank for report in self.reports if report.node == node and report.ended)
        subject = f"node {node}" if node else "job"
        words = self._words()
        if self.root.signature.kind == "node failure" and node != self.root.node:
            words = "Slurm lost this node" if node else "Slurm lost a node"
        blames = single.blames_node and node is not None and len(self.nodes) == 1
        return single.but(cause=f"{subject}: {words}", ranks=ranks, node=node, device=None, blames_node=blames)

    def _several_named_nodes(self, single: Diagnosis, named: str) -> Diagnosis:
        """Return the verdict about several nodes that one line of Slurm names."""
        words = "Slurm lost these nodes" if self.root.kind == "node failure" else self._words()
        lost_ranks = tuple(report.rank for report in self.reports if report.ended and report.exit is None)
        cause = f"nodes {named}: {words}"
        return single.but(cause=cause, ranks=lost_ranks, node=None, device=None, blames_node=False)

    def _nodes_at_once(self, single: Diagnosis) -> Diagnosis:
        """Return the verdict about several nodes with the same cause."""
        ranks = tuple(report.rank for report in self.reports if report.node in self.nodes and report.ended)
        cause = f"nodes {', '.join(sorted(self.nodes))}: {self._words()}, all at once"
        return single.but(cause=cause, ranks=ranks, node=None, device=None, blames_node=False)

    def _lost_node(self) -> str | None:
        """Return the node of all ranks that ended without a known exit status; None if there is not exactly one
        node."""
        lost_nodes = {report.node for report in self.reports if report.ended and report.exit is None}
        return next(iter(lost_nodes)) if len(lost_nodes) == 1 else None

    def _device(self, single: Diagnosis) -> Diagnosis:
        """Return the verdict about the device of several ranks; no device is blamed if several devices fail at once."""
        devices = {(report.node, report.device) for report in self.reports if report.rank in self.ranks}
        cause = f"{_rank_list(self.ranks)}: {self._words()}"
        if len(devices) == 1 and single.device is not None:
            return single.but(cause=cause, ranks=self.ranks)
        if self.root.signature.depth != Depth.REPORTED:
            return single
        return self._of_all(single, cause).but(device=None, blames_node=False)

    def _program(self, single: Diagnosis) -> Diagnosis:
        error = self.root.named("error")
        raised = self._words().startswith("raised ")
        cause = f"{_rank_list(self.ranks)}: {self._words()}"
        if raised and len(self.ranks) > 1:
            cause = f"{len(self.ranks)} ranks raised the same: {error}"
        if len(self.nodes) == 1 and len({report.node for report in self.reports}) > 1:
            cause += f", only on node {self.root.node}"
        return self._of_all(single, cause).but(certainty=max(single.certainty, 0.95))

    def _gpu_memory(self, single: Diagnosis) -> Diagnosis:
        """Return the verdict about exhausted GPU memory.

        The cause is a device with less memory than others, another process on the device, or the program.
        """
        if len(self.ranks) > 1 or self.report is None:
            return self._of_all(single, f"{_rank_list(self.ranks)}: {self._words()}").but(component="script")
        line, report = self.root.line, self.report
        match = _CAPACITY.search(line)
        mine = report.memory_bytes or (float(match[1]) * 2**30 if match else 0.0)
        others = sorted(r.memory_bytes for r in self.reports if r.memory_bytes and r.rank != report.rank)
        usual = others[len(others) // 2] if others else 0.0
        if 0.0 < mine < SMALLER_MEMORY_SHARE * usual:
            return single.but(
                component="device",
                cause=f"{single.cause}; its device has {mine / 2**30:.1f} GiB, others {usual / 2**30:.1f}",
                advice="nvidia-smi -q -d MEMORY on the node; ask for nodes of one kind (--constraint)",
            )
        foreign = [match for match in _OTHERS.finditer(line) if report.pid and int(match[1]) != report.pid]
        if foreign:
            users = ", ".join(f"process {user[1]} with {user[2]} {user[3]}iB" for user in foreign[:2])
            advice = "nvidia-smi on the node shows the processes that hold the GPU; end those of an earlier job"
            return single.but(cause=f"{single.cause}; {users} holds it too", advice=advice)
        return single


def _again(verdict: Diagnosis, earlier: Sequence[Past]) -> Diagnosis | None:
    """Return a verdict that blames the device if it failed before in this way or as a device; else None.

    `verdict`: a failure that is usually the application's.
    """
    before = [
        past
        for past in earlier
        if (past.node, past.device) == (verdict.node, verdict.device) and len(past.ranks) == 1
        if past.code in USUALLY_THE_PROGRAM or past.category == "device"
    ]
    if not before or verdict.node is None:
        return None
    return verdict.but(
        category="device",
        component="device" if verdict.device is not None else "node",
        cause=f"{verdict.cause}; the same happened on this device before",
        blames_node=True,
        advice="drain the node, then dcgmi diag -r 3",
        certainty=min(0.95, 0.6 + 0.15 * len(before)),
    )


def _nothing(reports: Sequence[Report]) -> Diagnosis:
    default = CATEGORY_DEFAULTS["unknown"]
    ranks = tuple(report.rank for report in reports)
    return Diagnosis(
        category="unknown",
        component=default.component,
        cause=f"{_rank_list(ranks)}: no log or kernel message gives a reason",
        blames_node=False,
        secondary=False,
        evidence=(),
        code="unknown",
        advice=default.advice,
        ranks=ranks,
    )


def _rank_list(ranks: Iterable[int]) -> str:
    """Return ranks in words: `rank 5`, `ranks 0-3, 8`."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {words}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {words}" if runs else "job"
