"""Everything that a report tells of one job, as rows of the ledger. Read once, by `wrapper.commands.report.command`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from db.reading.costs.cost_accounts import Account
from db.reading.plans.promises import promises
from db.reading.scores import Scores, scores
from wrapper.commands.report.runs import Total
from wrapper.output.idle_gpus import of_ledger

if TYPE_CHECKING:
    from db.reading.queries import Reader
    from resihp.scheduler.explained.explanation import Explanation

Row = dict[str, Any]
MOST_CHECKPOINTS = 1_000_000
EXPLAINED = 8
"""Plans beside the first that are explained."""
DRAWN = 5
"""Ranks whose levels are drawn one by one."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """One job. `began` and `ended` bound what is drawn: its start, and its end, its last sign of life or `now`."""

    job: Row
    command: str
    configuration: Mapping[str, Any]
    model: Mapping[str, Any] | None
    iterations: Sequence[Row]
    failures: Sequence[Row]
    plans: Sequence[Row]
    reconfigurations: Sequence[Row]
    nodes: Sequence[Row]
    workers: Sequence[Row]
    drains: Sequence[Row]
    replacements: Sequence[Row]
    checkpoints: Sequence[Row]
    account: Account
    promises: Sequence[Row]
    explanations: Mapping[int, Explanation]
    """Why plans take as long as they do, by epoch: the last ones."""
    suspicions: Sequence[Row]
    scores: Scores
    began: datetime
    ended: datetime
    now: datetime
    """When the report was made."""
    idle: str = ""
    """Which GPUs have no work, and why (`wrapper.output.idle_gpus`); empty where all have."""
    slurm: Total | None = None
    """All runs of the Slurm job that it was in; None without Slurm."""


def read(reader: Reader, job: Row, now: datetime, slurm: Total | None = None, attempts: Sequence[Row] = ()) -> Facts:
    """The facts about `job`, as `Reader.job` gives it.

    `attempts`: those of its run in other ledgers (`ledgers.attempts_here`), which may have repeated iterations of it.
    """
    number = job["id"]
    iterations = reader.narrow("iterations", number)
    failures, plans, reconfigurations, nodes = (
        reader.rows(table, number) for table in ("failures", "plans", "reconfigurations", "nodes")
    )
    suspicions = reader.rows("suspicions", number)
    told = [row for row in (*suspicions, *failures) if row["component"] == "device" and row.get("kind") != "fail-stop"]
    checkpoints = reader.events(number, ("CheckpointCommitted",), MOST_CHECKPOINTS)
    over = job["last_entry_at"] if job["state"] == "abnormal" else job["ended_at"] or now
    return Facts(
        job=job,
        command=_command(job["command"]),
        configuration=_decoded(job["configuration"]) or {},
        model=_decoded(job["model"]),
        iterations=iterations,
        failures=failures,
        plans=plans,
        reconfigurations=reconfigurations,
        nodes=nodes,
        workers=reader.rows("workers", number),
        drains=reader.rows("drains", number),
        replacements=reader.rows("replacements", number),
        checkpoints=checkpoints,
        account=reader.account(job, now, reader.committed_again(job, attempts)),
        promises=promises(plans, iterations, failures),
        explanations=reader.explanations(number, _to_explain(plans)),
        suspicions=suspicions,
        scores=scores(reader, number, {rank for row in told for rank in row["ranks"]}, DRAWN),
        began=job["started_at"],
        ended=max(over, job["started_at"]),
        now=now,
        idle=of_ledger(reader, job).line(),
        slurm=slurm,
    )


def _to_explain(plans: Sequence[Row]) -> list[Row]:
    """The first plan and the last ones that took effect."""
    taken = [row for row in plans if row["in_effect_at"] is not None]
    return [*taken[:1], *taken[1:][-EXPLAINED:]]


def _decoded(text: str | None) -> Mapping[str, Any] | None:
    """A JSON object that the ledger keeps as text; None for what is none."""
    try:
        found = json.loads(text or "null")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _command(text: str) -> str:
    """The command as one would type it; the ledger has a JSON list."""
    import shlex

    try:
        words = json.loads(text)
    except ValueError:
        return text
    return shlex.join(map(str, words)) if isinstance(words, list) else text
