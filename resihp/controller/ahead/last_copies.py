"""Report state that the next loss would destroy, and ranks that mirror state to prevent this. Reported when a new plan
takes effect, for state that had more copies before.

Makes no decision. Called by `transition`.
"""

from __future__ import annotations

from resihp.controller.planning import situations
from resihp.controller.state.job import Job
from resihp.parallelism.layout import spans
from resihp.parallelism.plan import Plan
from resihp.record.describe import rank_list
from resihp.scheduler.losses import held_alone, sole_holders


def report(job: Job, before: Plan | None, plan: Plan) -> None:
    """Report the state that a single rank holds under `plan` but several held under `before`, and the new mirrors.

    A job that was requested with one replica gets a notice at its start instead of a warning.
    """
    specs = situations.specs(job)
    mirroring = plan.mirroring
    if mirroring and (before is None or before.mirroring != mirroring):
        copied = {layer for d in plan.mirrors for s in plan.layout.replicas[d].stages if s.ranks for layer in s.layers}
        layers = f"layer{'' if len(copied) == 1 else 's'} {spans(sorted(copied))}"
        ranks = rank_list(sorted(mirroring))
        mirror, process = ("mirrors", "processes") if len(mirroring) == 1 else ("mirror", "process")
        job.say("notice", f"{ranks} {mirror} {layers} as a backup, and {process} no micro-batches")
    alone = sole_holders(plan.layout, specs)
    if not alone:
        return
    alone_before = frozenset() if before is None else _units(sole_holders(before.layout, specs))
    newly_alone = {rank: units - alone_before for rank, units in alone.items() if units - alone_before}
    if not newly_alone:
        return
    as_requested = before is None and job.settings.ranks_asked == job.settings.tp * job.settings.pp
    saved = bool(job.settings.checkpoint_every or job.record.checkpointed or job.declaration.resume_from)
    job.say("notice" if as_requested else "warning", held_alone(newly_alone, saved=saved))


def _units(holders: dict[int, frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*holders.values())
