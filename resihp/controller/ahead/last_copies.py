"""Which state the next loss would take with it, and who holds a copy so that it does not: said when a plan takes
effect under which that is newly so.

Decides nothing. Called by `transition`.
"""

from __future__ import annotations

from resihp.controller import planning
from resihp.controller.state.job import Job
from resihp.parallelism.layout import spans
from resihp.parallelism.plan import Plan
from resihp.record.describe import rank_list
from resihp.scheduler.losses import held_alone, sole_holders


def tell(job: Job, before: Plan | None, plan: Plan) -> None:
    """What has one holder under `plan` that had more under the plan `before`. A job that was asked to have one replica
    is told once, at its start, and not warned."""
    specs = planning.specs(job)
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
    known = frozenset() if before is None else _units(sole_holders(before.layout, specs))
    anew = {rank: held - known for rank, held in alone.items() if held - known}
    if not anew:
        return
    asked_so = before is None and job.settings.ranks_asked == job.settings.tp * job.settings.pp
    saved = bool(job.settings.checkpoint_every or job.record.checkpointed or job.declaration.resume_from)
    job.say("notice" if asked_so else "warning", held_alone(anew, saved=saved))


def _units(holders: dict[int, frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*holders.values())
