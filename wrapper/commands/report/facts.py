"""The data of a report on one job, as rows of the ledger. `resihp.wrapper.commands.report.command` reads them once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from resihp.db.reading.costs.cost_accounts import Account
from resihp.db.reading.iterations.scores import Scores, scores
from resihp.db.reading.plans.promises import promises
from resihp.db.reading.tables import object_in
from resihp.wrapper.commands.report.runs import Total
from resihp.wrapper.output.idle_gpus import IdleGpus
from resihp.wrapper.output.job_history import JobHistory

if TYPE_CHECKING:
    from resihp.db.reading.queries import Reader
    from resihp.scheduler.explained.explanation import Explanation

Row = dict[str, Any]
MAX_CHECKPOINTS = 1_000_000
MAX_PLANS_EXPLAINED = 8
"""Most plans that are explained, besides the first one."""
MAX_RANKS_DRAWN = 5
"""Most ranks whose levels are drawn as separate lines."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The data of a report on one job.

    `began` and `ended` are the limits of the pictures: the job's start; and its end, its last sign of life, or `now`.
    """

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
    """Explanations of the iteration times of the first and the last plans, by epoch."""
    suspicions: Sequence[Row]
    scores: Scores
    began: datetime
    ended: datetime
    now: datetime
    """Time of the report."""
    idle: str = ""
    """Text on the GPUs without work, with reasons (`resihp.wrapper.output.idle_gpus`); empty if all GPUs have work."""
    slurm: Total | None = None
    """All runs of the Slurm job that the job belongs to; None without Slurm."""


def read(reader: Reader, job: Row, now: datetime, slurm: Total | None = None, attempts: Sequence[Row] = ()) -> Facts:
    """Return the data of a report on `job`, a row of `Reader.job`.

    `attempts`: attempts of the same training in other ledgers (`ledgers.attempts_here`), which may have repeated
    iterations.
    """
    number = job["id"]
    iterations = reader.narrow("iterations", number)
    failures, plans, reconfigurations, nodes = (
        reader.rows(table, number) for table in ("failures", "plans", "reconfigurations", "nodes")
    )
    suspicions = reader.rows("suspicions", number)
    device_rows = [
        row for row in (*suspicions, *failures) if row["component"] == "device" and row.get("kind") != "fail-stop"
    ]
    checkpoints = reader.events(number, ("CheckpointCommitted",), MAX_CHECKPOINTS)
    ended = job["last_entry_at"] if job["state"] == "abnormal" else job["ended_at"] or now
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
        scores=scores(reader, number, {rank for row in device_rows for rank in row["ranks"]}, MAX_RANKS_DRAWN),
        began=job["started_at"],
        ended=max(ended, job["started_at"]),
        now=now,
        idle=IdleGpus(JobHistory.of_ledger(reader, job)).line(),
        slurm=slurm,
    )


def _to_explain(plans: Sequence[Row]) -> list[Row]:
    """Return the plans to explain: the first plan, and the last plans that took effect."""
    taken = [row for row in plans if row["in_effect_at"] is not None]
    return [*taken[:1], *taken[1:][-MAX_PLANS_EXPLAINED:]]


def _decoded(text: str | None) -> Mapping[str, Any] | None:
    """Return a JSON object that the ledger stores as text; None if the text is not a JSON object."""
    return object_in(text) or None


def _command(text: str) -> str:
    """Return the command as a user would type it. The ledger stores it as a JSON list."""
    import shlex

    try:
        words = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return shlex.join(map(str, words)) if isinstance(words, list) else text
