"""`resihp why-not`: why a rank is, or is not, taken to be slow. Data goes to stdout, messages to stderr.

Of a job that runs here its supervisor is asked (`resihp.controller.fail_slow.standings`); of one that is over, or is
another's, the ledger has the last score. Suspicions, verdicts and former jobs are the ledger's. Decides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from resihp.errors import ResihpError, UsageError
from wrapper.output.answers import SCHEMA, JobArgument, JsonOption, LedgerOption, console, message, to_json

if TYPE_CHECKING:
    from db.reading.queries import Reader

Row = dict[str, Any]
SHOWN = 5
"""Suspicions told on a terminal, the last ones."""


def register(app: typer.Typer) -> None:
    """Add `resihp why-not` to the command line."""
    app.command("why-not")(why_not)


def why_not(
    rank: Annotated[int, typer.Argument(help="The rank that is asked about.")],
    job: JobArgument = None,
    as_json: JsonOption = False,
    ledger: LedgerOption = None,
) -> None:
    """Tell why a rank is not taken to be slow, or why it is.

    Its time over its healthy time, the evidence against it, what it is compared
    with, what it was suspected of, and what came of that.

    Example: resihp why-not 5 local-3
    """
    from wrapper.output.ledgers import opened, pinned

    job = pinned(job, ledger)
    with opened(job, ledger) as (reader, row):
        told = answer(reader, row, rank, _asked(job, row, rank) if ledger is None else None)
    if as_json:
        print(to_json({"schema": SCHEMA, **told}))
    else:
        from rich.text import Text

        from wrapper.output.render import literal

        screen = console()
        for number, sentence in enumerate(told["verdict"]):
            screen.print(Text(literal(sentence if number == 0 else f"- {sentence}")), soft_wrap=False)


def answer(reader: Reader, job: Row, rank: int, live: Row | None) -> Row:
    """What `why-not --json` prints. `live`: what the job's supervisor answered, where it did.

    Raises UsageError for a rank that the job never had.
    """
    from db.reading.suspicions import former_suspicions, of_device, place_of

    worker = _worker(reader, job, rank)
    suspicions = [row for row in reader.rows("suspicions", job["id"]) if rank in row["ranks"]]
    failures = reader.rows("failures", job["id"])
    verdicts = [row for row in failures if row["kind"] == "fail-slow" and rank in row["ranks"]]
    place = place_of(reader, job["id"], worker["node"])
    former = former_suspicions(reader, (worker["node"],), before=job)
    suspected_in, former_jobs = of_device(former, place, worker["device"])
    told: Row = {
        "job": job["name"],
        "state": job["state"],
        "rank": rank,
        "node": worker["node"],
        "device": worker["device"],
        **(live or _last_known(reader, job, rank, verdicts)),
        "live": live is not None,
        "suspicions": suspicions,
        "verdicts": verdicts,
        "former": {"jobs": former_jobs, "suspected": suspected_in},
    }
    told["verdict"] = [_first(told), *_figures(told), *_history(told)]
    return told


def _worker(reader: Reader, job: Row, rank: int) -> Row:
    workers = {row["rank"]: row for row in reader.rows("workers", job["id"])}
    if rank not in workers:
        known = f"has ranks {min(workers)} to {max(workers)}" if workers else "has none yet"
        raise UsageError(f"rank {rank}: job {job['name']} {known}; resihp status {job['name']} shows them")
    return workers[rank]


def _asked(name: str | None, job: Row, rank: int) -> Row | None:
    """What the supervisor of a job that runs here says; None where there is none to ask."""
    import asyncio

    import msgspec

    from resihp.protocol.messages import AskStanding
    from wrapper.commands.operate.request import ask
    from wrapper.job_folder import find_job, ours

    found = ours(find_job(name))
    if found is None:
        return None  # where somebody else's supervisor listens is his to say, and nobody is connected to for a look
    if job["state"] != "running" or found.supervisor() is None:
        return None
    try:
        reply = asyncio.run(ask(found, AskStanding(rank=rank)))
        return msgspec.json.decode(reply.text, type=dict[str, Any]) if reply.ok else None
    except (ResihpError, msgspec.DecodeError) as error:  # an older supervisor knows no such question
        message(f"{error}; what follows is of the ledger")
        return None


def _last_known(reader: Reader, job: Row, rank: int, verdicts: list[Row]) -> Row:
    """The same of the ledger, where there is no supervisor to ask."""
    import json

    from wrapper.commands.status.job_status import detector

    scores = reader.rows("scores", job["id"], rank=rank, last=1)
    last = scores[-1] if scores else {"iteration": None, "level": None, "evidence": None}
    return {
        "iteration": last["iteration"],
        "detector": detector(job),
        "unwatched": rank in json.loads(job["unwatched"] or "[]"),
        "level": last["level"],
        "evidence": last["evidence"],
        "slow": any(row["ended_iteration"] is None for row in verdicts if row["component"] == "device"),
    }


# --- in words -------------------------------------------------------------------------------------------------------


def _first(told: Row) -> str:
    """The answer itself."""
    who = f"rank {told['rank']} ({told['node']} device {told['device']})"
    level = None if told["level"] is None else f"at {told['level']:.3f} of its healthy time"
    when = "" if told["live"] or level is None else f" when it was last noted, in iteration {told['iteration']}"
    its_own = [row for row in told["verdicts"] if row["component"] == "device"]  # others it only has a part in
    present = [row["failure"] for row in its_own if row["ended_iteration"] is None]
    doubts = [row for row in told["suspicions"] if row["component"] == "device"]
    suspected = [row["suspicion"] for row in doubts if row["ended_at"] is None]
    if told["detector"] == "off":
        return f"{who}: nobody looks: [adapt] detect is false"
    if present or told["slow"]:
        verdict = f", failure {present[-1]}" if present else ", found by the detector, no verdict yet"
        return f"{who} is taken to be slow{verdict}{f': {level}' if level else ''}{when}"
    if suspected and told["state"] == "running":
        return f"{who} is suspected to be slow, suspicion {suspected[-1]}{f': {level}' if level else ''}{when}"
    if not told.get("working", True):
        return f"{who} has no work under the present plan: it stands by, or has left, and is not compared with others"
    if told["unwatched"]:
        last = told.get("reported")
        return f"{who} is not watched: {'it never reported' if last is None else f'silent since iteration {last}'}"
    if told["detector"] == "plain times":
        return f"{who} cannot be told from others: no rank reports its chunks, plain iteration times alone are judged"
    if told["detector"] == "iterations":
        return f"{who} cannot be told from others: the detector's mode judges whole iterations, no rank by itself"
    if level is None:
        return f"{who}: nothing is known of its times{', the detector is warming up' if told['live'] else ''}"
    return f"{who} is not taken to be slow: {level}{when}"


def _figures(told: Row) -> list[str]:
    """What the answer rests on."""
    from wrapper.output.render import percent

    found = []
    if told["evidence"] is not None and told["level"] is not None and not told["slow"]:
        noise = told.get("noise")
        varies = f"; its times vary by {percent(noise)} from one iteration to the next" if noise is not None else ""
        found.append(f"{percent(told['evidence'])} of the evidence that makes a finding{varies}")
    peers = told.get("peers")
    if peers:
        others = "one other" if peers == 1 else f"{peers} others"
        found.append(f"compared with {others} of the same work, and with its own past")
    elif peers == 0:
        found.append("no other rank has the same work: compared with its own past alone")
    if told.get("pardon") and told.get("pardoned_until") is not None:
        found.append(
            f"a probe found it healthy: up to {1 + told['pardon']:.3f} of its healthy time is not told again until "
            f"iteration {told['pardoned_until']}"
        )
    if told.get("reported") is not None:
        found.append(f"last measured in iteration {told['reported']}, of {told['iteration']} committed")
    return found


def _history(told: Row) -> list[str]:
    """What it was suspected of, and convicted of; in this job, and before."""
    from wrapper.output.render import percent

    found = []
    for row in told["suspicions"][-SHOWN:]:
        change = "" if row["change"] is None else f"{row['change']:+.1%} "
        probe = "" if row["probe"] is None else f" (probe {row['probe']})"
        became = "not settled" if row["outcome"] is None else f"{row['outcome']}{probe}"
        why = f", {row['outcome_evidence']}" if row["outcome_evidence"] else ""
        sure = "" if row["confidence"] is None else f", confidence {row['confidence']:.2f}"
        of = "" if row["component"] == "device" else f" of a {row['component']}"
        found.append(
            f"suspicion {row['suspicion']}{of}: {change}since iteration {row['iteration']}{sure}: {became}{why}"
        )
    if len(told["suspicions"]) > SHOWN:
        more = len(told["suspicions"]) - SHOWN
        found.append(f"{more} earlier suspicions: resihp history suspicions {told['job']}")
    for row in told["verdicts"]:
        speed = "" if row["speed"] is None else f"at {percent(row['speed'])} of its speed "
        until = "on" if row["ended_iteration"] is None else f"until {row['ended_iteration']}"
        what = speed if row["component"] == "device" else f"{row['cause']}, "
        found.append(f"failure {row['failure']}: {what}from iteration {row['iteration']} {until}")
    if not told["suspicions"] and not told["verdicts"]:
        found.append("never suspected in this job")
    if told["former"]["suspected"]:
        times = f"{told['former']['suspected']} of {told['former']['jobs']} former jobs"
        found.append(f"{told['node']} device {told['device']} was suspected in {times}")
    return found
