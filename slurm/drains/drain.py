"""The drain ladder: the steps that are taken, one after the other, for a node with a verdict.

  slurm       scontrol drains the node, if this user has the right to, and within the site's limit;
  spool       otherwise a request goes to the site's hook, if the site has one;
  exclusion   always: the user's own jobs avoid the node for a while. The only step for a node that must not be drained.

Never decides whether a node is bad, nor how many nodes a job may have drained: the callers do
(`resihp.controller.nodes.drains` through `resihp.wrapper.slurm_tasks.nodes`, and `resihp node`). Synchronous. A step
that fails reports this as its outcome, in the terms of `journal.DrainAnswered`; nothing raises.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from resihp.slurm.client import PREFIX, NodeView, Slurm, sanitised
from resihp.slurm.drains import site_limits
from resihp.slurm.drains import spool as requests
from resihp.slurm.drains.exclusions import EXCLUSION_S, Exclusions, Measure
from resihp.slurm.drains.site_limits import NO_LIMITS, DrainLimits
from resihp.slurm.drains.spool import SpoolError
from resihp.slurm.errors import SlurmError, SlurmOutputError, SlurmRefusedError
from resihp.slurm.rate_limited import Polite

NOT_RESPONDING = "Not responding"
"""Slurm's own reason for a node that it cannot reach; with this reason, the node counts as not set aside by any
person."""

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one step of the drain ladder. `unknown`: Slurm gave no answer, and the change may have been made."""

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
    exclude_s: float = EXCLUSION_S["hardware"],
    measure: Measure = "drain",
    limits: DrainLimits = NO_LIMITS,
    uid: int | None = None,
) -> Iterator[Step]:
    """Take the steps of the drain ladder for `node` of job `job_id`, and yield the result of each.

    `allowed_nodes`: the nodes that the job holds or has held; for any other node, Slurm is not even called. The batch
    host is only excluded from later jobs, because the job ends with it. `measure`: `drain`, or `exclude` for a node
    that must not be drained. `exclude_s`: seconds for which the user's own jobs avoid the node. The caller limits the
    number of drained nodes for each job; `limits` are the site's, for all jobs. `uid`: the user whose jobs count for
    the limits of one user; None for the current user.
    """
    if not _NODE.fullmatch(node) or node not in allowed_nodes:
        yield _step("slurm", "refused", f"node {node[:64]!r}: job {job_id} does not hold it and never has")
        return
    if measure == "drain" and node == batch_host:
        yield _step("slurm", "refused", f"node {node}: the batch host of job {job_id} is never drained by it")
    elif measure == "drain":
        uid = os.getuid() if uid is None else uid
        first, ask = _drain(slurm, node, sanitised(reason), lambda: site_limits.refusal(slurm, limits, uid, now))
        yield first
        if ask and spool is not None:
            yield _request_in_spool(spool, "drain", node, job_id=job_id, reason=reason, now=now)
    yield exclude(exclusions, node, reason, job_id, measure, now, exclude_s)


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
    """Undo `climb` for this user, and yield the result of each step. Only a drain with resihp's reason is undone, and
    only if this user, or the site's hook for this user, has set it."""
    uid = os.getuid() if uid is None else uid
    first, ask = _undrain(slurm, node, user, uid)
    yield first
    if ask and first.outcome != "done" and spool is not None:
        yield _request_in_spool(spool, "undrain", node, job_id=job_id, reason="undrain", now=now)
    try:
        was = exclusions.remove(node)
    except SlurmError as error:
        yield _step("exclusion", "unknown", _about(node, error))
    else:
        how = "no longer kept out of" if was else "was not kept out of"
        yield _step("exclusion", "done", f"node {node}: {how} our jobs on cluster {exclusions.cluster}")


def set_aside(view: NodeView) -> bool:
    """Decide whether a person has already taken the node out of use, or Slurm has for a cause other than silence."""
    if view.reason == NOT_RESPONDING and not view.flags & {"drain", "fail"}:
        return False
    noted = bool(view.reason) and not view.reason.startswith(PREFIX)
    return noted or bool(view.flags & {"drain", "fail"}) or view.state in ("down", "error")


def _about(node: str, error: Exception) -> str:
    """Return the error's text, which may or may not name the node."""
    subject = f"node {node}: "
    return subject + str(error).removeprefix(subject)


def _view(slurm: Slurm, node: str) -> NodeView | None:
    """Return the node's current view, without using a cached answer, so that a reason that was set in the meantime is
    not overwritten.

    Raises SlurmOutputError if Slurm's answer about the node cannot be parsed, because then it is unknown whether the
    node was set aside.
    """
    views = slurm.nodes([node], fresh_s=0.0) if isinstance(slurm, Polite) else slurm.nodes([node])
    view = views.get(node)
    if view is not None and view.unreadable:
        raise SlurmOutputError(view.unreadable)
    return view


def _drain(slurm: Slurm, node: str, reason: str, refusal: Callable[[], str]) -> tuple[Step, bool]:
    """Drain the node. Also return whether to send a request to the site's hook if this failed; not if the node needs no
    drain, or if a limit of the site forbids it. `refusal` returns why it does; empty if not."""
    try:
        view = _view(slurm, node)
        if view is None:
            return _step("slurm", "refused", f"node {node}: Slurm does not know it"), True
        if set_aside(view):
            state = "+".join([view.state, *sorted(view.flags)])
            set_by = f" by {view.reason_by}" if view.reason_by else ""
            stands = f"{view.reason!r}{set_by} stands" if view.reason else "no reason was given"
            return _step("slurm", "done", f"node {node}: is {state} already; {stands}"), False
        if why := refusal():
            return _step("slurm", "refused", f"node {node}: not drained: {why}"), False
        slurm.drain(node, reason)
    except SlurmRefusedError as error:
        return _step("slurm", "refused", _about(node, error)), True
    except (SlurmError, OSError) as error:
        return _step("slurm", "unknown", _about(node, error)), True
    return _step("slurm", "done", f"node {node}: drained: {reason}"), False


def _undrain(slurm: Slurm, node: str, user: str, uid: int) -> tuple[Step, bool]:
    """Undrain the node. Also return whether to send a request to the site's hook if this failed."""
    ask = False
    try:
        view = _view(slurm, node)
        if view is None:
            return _step("slurm", "refused", f"node {node}: Slurm does not know it"), False
        if not view.draining:
            return _step("slurm", "done", f"node {node}: is not drained{_remaining_obstacle(view)}"), False
        if not view.reason.startswith(PREFIX):
            set_by = f"by {view.reason_by or 'somebody'} with {view.reason or 'no reason'!r}"
            return _step("slurm", "refused", f"node {node}: was drained {set_by}, which is not ours to undo"), False
        ask = requests.asked_by(view.reason) == uid
        if not ask and view.reason_by != user:
            text = f"node {node}: was drained by {view.reason_by or 'somebody'} for another user: {view.reason!r}"
            return _step("slurm", "refused", text), False
        slurm.undrain(node)
    except SlurmRefusedError as error:
        return _step("slurm", "refused", _about(node, error)), ask
    except (SlurmError, OSError) as error:
        return _step("slurm", "unknown", _about(node, error)), ask
    try:
        remaining_problem = _remaining_obstacle(_view(slurm, node))
    except SlurmError:
        remaining_problem = ""  # the node was undrained, even if another cause keeps Slurm from using it
    return _step("slurm", "done", f"node {node}: undrained, it had {view.reason!r}{remaining_problem}"), False


def _remaining_obstacle(view: NodeView | None) -> str:
    """Return a text that explains why Slurm starts nothing on a node that is not drained, and the remedy. Empty if the
    node is usable."""
    if view is None or not (view.state in ("down", "error", "unknown") or view.flags & {"not_responding", "fail"}):
        return ""
    state = "+".join([view.state, *sorted(view.flags)])
    why = f" ({view.reason})" if view.reason not in ("", "none") else ""
    return f"; but it is {state}{why}: once slurmd answers there, scontrol update NodeName={view.name} State=RESUME"


def _request_in_spool(
    spool: Path, kind: Literal["drain", "undrain"], node: str, *, job_id: str, reason: str, now: float
) -> Step:
    try:
        path = requests.put(spool, kind, node, job_id=job_id, reason=reason, now=now)
    except SpoolError as error:
        return _step("spool", "refused", _about(node, error))
    return _step("spool", "done", f"node {node}: {kind} asked for in {path}; the site's hook decides")


def exclude(
    exclusions: Exclusions, node: str, reason: str, job_id: str, measure: Measure, now: float, for_s: float
) -> Step:
    """Take the last step of the ladder by itself: exclude the node from the user's own jobs for `for_s` seconds."""
    words = sanitised(reason).removeprefix(PREFIX)
    try:
        added = exclusions.add(node, words, now + for_s, job_id=job_id, measure=measure, now=now)
    except SlurmError as error:
        return _step("exclusion", "unknown", _about(node, error))
    when = f"{datetime.fromtimestamp(added.expires_at, UTC):%Y-%m-%d %H:%M} UTC"
    return _step("exclusion", "done", f"node {node}: kept out of our jobs on cluster {exclusions.cluster} until {when}")


def _step(
    step: Literal["slurm", "spool", "exclusion"], outcome: Literal["done", "refused", "unknown"], text: str
) -> Step:
    return Step(step=step, outcome=outcome, text=text)
