"""The drain ladder: what is done about one node with a verdict, rung by rung.

    slurm       scontrol drains it, where we are allowed to, and as far as the site allows;
    spool       else a request for the site's hook, where the site has one;
    exclusion   always: our own jobs stay away from it for a while. The only one for a node that is not to be drained.

Decides nothing about whether a node is bad or how many a job may have drained: callers do
(`resihp.controller.nodes.drains` through `wrapper.slurm_tasks.nodes`, and `resihp node`). Synchronous; each rung's
failure is its outcome, in the terms of `journal.DrainAnswered`, and nothing raises.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from slurm.client import PREFIX, NodeView, Slurm, sanitised
from slurm.drains import spool as requests
from slurm.drains.exclusions import FOR_S, Exclusions, Measure
from slurm.drains.spool import SpoolError
from slurm.errors import SlurmError, SlurmOutputError, SlurmRefusedError
from slurm.rate_limited import Polite

NOT_RESPONDING = "Not responding"
"""Slurm's own words for a node that it cannot reach; nobody has set it aside."""

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """How one rung went. `unknown`: no answer, it may have happened."""

    step: Literal["slurm", "spool", "exclusion"]
    outcome: Literal["done", "refused", "unknown"]
    text: str


def climb(
    slurm: Slurm,
    node: str,
    reason: str,
    *,
    job_id: str,
    allowed_nodes: Collection[str],
    batch_host: str,
    spool: Path | None,
    exclusions: Exclusions,
    now: float,
    exclude_s: float = FOR_S["hardware"],
    measure: Measure = "drain",
    most_drained: int | None = None,
) -> Iterator[Step]:
    """Climb for `node` of job `job_id`; each rung is told when it has been tried.

    `allowed_nodes`: what the job holds or has held; of others nothing is even asked. The batch host is only kept out of
    later jobs: its end is the job's. How many a job may have drained is the caller's; `most_drained` is the site's: so
    many nodes of the cluster at a time, whoever of us drained them (jobs that drain in the same second may exceed it).
    """
    if not _NODE.fullmatch(node) or node not in allowed_nodes:
        yield _step("slurm", "refused", f"node {node[:64]!r}: job {job_id} does not hold it and never has")
        return
    if measure == "drain" and node == batch_host:
        yield _step("slurm", "refused", f"node {node}: the batch host of job {job_id} is never drained by it")
    elif measure == "drain":
        first, ask = _drained(slurm, node, sanitised(reason), most_drained)
        yield first
        if ask and spool is not None:
            yield _asked(spool, "drain", node, job_id=job_id, reason=reason, now=now)
    yield _excluded(exclusions, node, reason, job_id, measure, now, exclude_s)


def descend(
    slurm: Slurm,
    node: str,
    *,
    job_id: str,
    spool: Path | None,
    exclusions: Exclusions,
    now: float,
    user: str,
    uid: int | None = None,
) -> Iterator[Step]:
    """Take back what `climb` did for this user: only a drain with our reason, set by them or by the hook for them."""
    uid = os.getuid() if uid is None else uid
    first, ask = _undrained(slurm, node, user, uid)
    yield first
    if ask and first.outcome != "done" and spool is not None:
        yield _asked(spool, "undrain", node, job_id=job_id, reason="undrain", now=now)
    try:
        was = exclusions.remove(node)
    except SlurmError as error:
        yield _step("exclusion", "unknown", f"node {node}: {error}")
    else:
        how = "no longer kept out of" if was else "was not kept out of"
        yield _step("exclusion", "done", f"node {node}: {how} our jobs on cluster {exclusions.cluster}")


def set_aside(view: NodeView) -> bool:
    """Whether somebody, or Slurm for a cause that is not just silence, has taken the node out already."""
    if view.reason == NOT_RESPONDING and not view.flags & {"drain", "fail"}:
        return False
    noted = bool(view.reason) and not view.reason.startswith(PREFIX)
    return noted or bool(view.flags & {"drain", "fail"}) or view.state in ("down", "error")


def _view(slurm: Slurm, node: str) -> NodeView | None:
    """As it is now: a reason that somebody has set since the last look must not be overwritten.

    Raises SlurmOutputError where Slurm's answer about it cannot be read: then nobody knows who has set it aside.
    """
    views = slurm.nodes([node], fresh_s=0.0) if isinstance(slurm, Polite) else slurm.nodes([node])
    view = views.get(node)
    if view is not None and view.unreadable:
        raise SlurmOutputError(view.unreadable)
    return view


def _drained(slurm: Slurm, node: str, reason: str, most: int | None) -> tuple[Step, bool]:
    """And whether the hook may be asked, should this not do: not where the site has enough nodes drained."""
    try:
        view = _view(slurm, node)
        if view is None:
            return _step("slurm", "refused", f"node {node}: Slurm does not know it"), True
        if set_aside(view):
            state = "+".join([view.state, *sorted(view.flags)])
            whose = f" by {view.reason_by}" if view.reason_by else ""
            stands = f"{view.reason!r}{whose} stands" if view.reason else "no reason was given"
            return _step("slurm", "done", f"node {node}: is {state} already; {stands}"), False
        if most is not None:
            ours = sum(each.reason.startswith(PREFIX) for each in slurm.drained().values())
            if ours >= most:
                text = (
                    f"node {node}: not drained: {ours} nodes are, with our reason, and the site allows {most} at a time"
                )
                return _step("slurm", "refused", f"{text}; try: sinfo -R | grep {PREFIX.strip()}"), False
        slurm.drain(node, reason)
    except SlurmRefusedError as error:
        return _step("slurm", "refused", f"node {node}: {error}"), True
    except (SlurmError, OSError) as error:
        return _step("slurm", "unknown", f"node {node}: {error}"), True
    return _step("slurm", "done", f"node {node}: drained: {reason}"), False


def _undrained(slurm: Slurm, node: str, user: str, uid: int) -> tuple[Step, bool]:
    """And whether the hook may be asked, should this not do."""
    ask = False
    try:
        view = _view(slurm, node)
        if view is None:
            return _step("slurm", "refused", f"node {node}: Slurm does not know it"), False
        if not view.draining:
            return _step("slurm", "done", f"node {node}: is not drained{_still_out(view)}"), False
        if not view.reason.startswith(PREFIX):
            whose = f"by {view.reason_by or 'somebody'} with {view.reason or 'no reason'!r}"
            return _step("slurm", "refused", f"node {node}: was drained {whose}, which is not ours to undo"), False
        ask = requests.asked_by(view.reason) == uid
        if not ask and view.reason_by != user:
            text = f"node {node}: was drained by {view.reason_by or 'somebody'} for another user: {view.reason!r}"
            return _step("slurm", "refused", text), False
        slurm.undrain(node)
    except SlurmRefusedError as error:
        return _step("slurm", "refused", f"node {node}: {error}"), ask
    except (SlurmError, OSError) as error:
        return _step("slurm", "unknown", f"node {node}: {error}"), ask
    try:
        left = _still_out(_view(slurm, node))
    except SlurmError:
        left = ""  # it was undrained, whatever else there is
    return _step("slurm", "done", f"node {node}: undrained, it had {view.reason!r}{left}"), False


def _still_out(view: NodeView | None) -> str:
    """Why Slurm starts nothing on a node that is not drained, and what is still to be done: a drain is not all that may
    keep a node out."""
    if view is None or not (view.state in ("down", "error", "unknown") or view.flags & {"not_responding", "fail"}):
        return ""
    state = "+".join([view.state, *sorted(view.flags)])
    why = f" ({view.reason})" if view.reason not in ("", "none") else ""
    return f"; but it is {state}{why}: once slurmd answers there, scontrol update NodeName={view.name} State=RESUME"


def _asked(spool: Path, kind: Literal["drain", "undrain"], node: str, *, job_id: str, reason: str, now: float) -> Step:
    try:
        path = requests.put(spool, kind, node, job_id=job_id, reason=reason, now=now)
    except SpoolError as error:
        return _step("spool", "refused", f"node {node}: {error}")
    return _step("spool", "done", f"node {node}: {kind} asked for in {path}; the site's hook decides")


def _excluded(
    exclusions: Exclusions, node: str, reason: str, job_id: str, measure: Measure, now: float, for_s: float
) -> Step:
    words = sanitised(reason).removeprefix(PREFIX)
    try:
        added = exclusions.add(node, words, now + for_s, job_id=job_id, measure=measure, now=now)
    except SlurmError as error:
        return _step("exclusion", "unknown", f"node {node}: {error}")
    when = f"{datetime.fromtimestamp(added.expires_at, UTC):%Y-%m-%d %H:%M} UTC"
    return _step("exclusion", "done", f"node {node}: kept out of our jobs on cluster {exclusions.cluster} until {when}")


def _step(
    step: Literal["slurm", "spool", "exclusion"], outcome: Literal["done", "refused", "unknown"], text: str
) -> Step:
    return Step(step=step, outcome=outcome, text=text)
