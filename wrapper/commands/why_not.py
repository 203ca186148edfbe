"""`resihp why-not`: explain why a rank is, or is not, considered slow. Data goes to stdout, messages to stderr.

For a job that runs on this machine, its supervisor is queried (`resihp.controller.fail_slow.standings`). For a finished
job, or another user's job, the last score is read from the ledger. Suspicions, verdicts and earlier jobs come from the
ledger. Decides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from resihp.errors import ResihpError, UsageError
from resihp.wrapper.output.answers import SCHEMA, JobArgument, JsonOption, LedgerOption, console, message, to_json

if TYPE_CHECKING:
    from resihp.db.reading.queries import Reader

Row = dict[str, Any]
MAX_SUSPICIONS_SHOWN = 5
"""Most suspicions shown on a terminal: the last ones."""


def register(app: typer.Typer) -> None:
    """Add `resihp why-not` to the command line."""
    app.command("why-not")(why_not)


def why_not(
    rank: Annotated[int, typer.Argument(help="Rank to explain.")],
    job: JobArgument = None,
    as_json: JsonOption = False,
    ledger: LedgerOption = None,
) -> None:
    """Explain why a rank is not considered slow, or why it is.

    Shows its time over its healthy time, the evidence that it is slow, the ranks
    it is compared with, and its suspicions with their outcomes.

    Example: resihp why-not 5 local-3
    """
    from resihp.wrapper.output.ledgers import opened, pinned

    job = pinned(job, ledger)
    with opened(job, ledger) as (reader, row):
        result = answer(reader, row, rank, _supervisor_answer(job, row, rank) if ledger is None else None)
    if as_json:
        print(to_json({"schema": SCHEMA, **result}))
    else:
        from rich.text import Text

        from resihp.wrapper.output.render import literal

        screen = console()
        for number, sentence in enumerate(result["verdict"]):
            screen.print(Text(literal(sentence if number == 0 else f"- {sentence}")), soft_wrap=False)


def answer(reader: Reader, job: Row, rank: int, live: Row | None) -> Row:
    """Return the content of `why-not --json`. `live`: the answer of the job's supervisor; None if it was not queried.

    Raises UsageError for a rank that the job never had.
    """
    from resihp.db.reading.suspicions import former_suspicions, of_device, place_of

    worker = _worker(reader, job, rank)
    suspicions = [row for row in reader.rows("suspicions", job["id"]) if rank in row["ranks"]]
    failures = reader.rows("failures", job["id"])
    verdicts = [row for row in failures if row["kind"] == "fail-slow" and rank in row["ranks"]]
    place = place_of(reader, job["id"], worker["node"])
    former = former_suspicions(reader, (worker["node"],), before=job)
    suspected_in, former_jobs = of_device(former, place, worker["device"])
    result: Row = {
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
    result["verdict"] = [_headline(result), *_figures(result), *_history(result)]
    return result


def _worker(reader: Reader, job: Row, rank: int) -> Row:
    workers = {row["rank"]: row for row in reader.rows("workers", job["id"])}
    if rank not in workers:
        ranks_known = f"has ranks {min(workers)} to {max(workers)}" if workers else "has none yet"
        raise UsageError(f"rank {rank}: job {job['name']} {ranks_known}; resihp status {job['name']} shows them")
    return workers[rank]


def _supervisor_answer(name: str | None, job: Row, rank: int) -> Row | None:
    """Return the answer of the supervisor of a job that runs here; None if there is no supervisor to query."""
    import asyncio

    import msgspec

    from resihp.protocol.messages import AskStanding
    from resihp.wrapper.commands.operate.request import ask
    from resihp.wrapper.job_folder import find_job, ours

    job_here = ours(find_job(name))
    if job_here is None:
        return None  # files of another user must not decide to which address we connect
    if job["state"] != "running" or job_here.supervisor() is None:
        return None
    try:
        reply = asyncio.run(ask(job_here, AskStanding(rank=rank)))
        return msgspec.json.decode(reply.text, type=dict[str, Any]) if reply.ok else None
    except (ResihpError, msgspec.DecodeError) as error:  # an older supervisor does not know the request
        message(f"{error}; falling back to the ledger")
        return None


def _last_known(reader: Reader, job: Row, rank: int, verdicts: list[Row]) -> Row:
    """Return the same figures as the supervisor's answer from the ledger, if no supervisor can be queried."""
    from resihp.wrapper.commands.status.job_status import detector
    from resihp.wrapper.output.job_history import ranks_in

    scores = reader.rows("scores", job["id"], rank=rank, last=1)
    last = scores[-1] if scores else {"iteration": None, "level": None, "evidence": None}
    return {
        "iteration": last["iteration"],
        "detector": detector(job),
        "unwatched": rank in ranks_in(reader.decoded(job["unwatched"] or "[]", "unwatched"), "a job"),
        "level": last["level"],
        "evidence": last["evidence"],
        "slow": any(row["ended_iteration"] is None for row in verdicts if row["component"] == "device"),
    }


# --- in words -------------------------------------------------------------------------------------------------------


def _headline(result: Row) -> str:
    """Return the first sentence: the answer itself."""
    subject = f"rank {result['rank']} ({result['node']} device {result['device']})"
    level = None if result["level"] is None else f"at {result['level']:.3f} of its healthy time"
    when = "" if result["live"] or level is None else f" when it was last noted, in iteration {result['iteration']}"
    if result["detector"] == "off":
        return f"{subject}: not monitored, as detect is false in [adapt]"
    if doubt := _doubt(result):
        return f"{subject} {doubt}{f': {level}' if level else ''}{when}"
    if reason := _not_judged(result):
        return f"{subject} {reason}"
    if level is None:
        return f"{subject}: no times yet{', the detector is warming up' if result['live'] else ''}"
    return f"{subject} is not considered slow: {level}{when}"


def _doubt(result: Row) -> str:
    """Return a sentence with the verdict on the rank's device, or else with the open suspicion of it; empty if there is
    neither."""
    verdicts = [row for row in result["verdicts"] if row["component"] == "device"]  # not those of a link
    open_failures = [row["failure"] for row in verdicts if row["ended_iteration"] is None]
    if open_failures:
        return f"is considered slow, failure {open_failures[-1]}"
    if result["slow"]:
        return "is considered slow, flagged by the detector, no verdict yet"
    suspicions = [row for row in result["suspicions"] if row["component"] == "device"]
    suspected = [row["suspicion"] for row in suspicions if row["ended_at"] is None]
    if suspected and result["state"] == "running":
        return f"is suspected of being slow, suspicion {suspected[-1]}"
    return ""


def _not_judged(result: Row) -> str:
    """Return the reason why the detector cannot judge the rank; empty if it can."""
    if not result.get("working", True):
        return "has no work under the current plan: it is on standby or has left, and is not monitored"
    if result["unwatched"]:
        last = result.get("reported")
        return f"is not watched: {'it never reported' if last is None else f'silent since iteration {last}'}"
    if result["detector"] == "plain times":
        return "cannot be judged: no rank reports its chunks, only iteration times of the whole job are known"
    if result["detector"] == "iterations":
        return "cannot be judged: in its mode, the detector judges whole iterations, not single ranks"
    return ""


def _figures(result: Row) -> list[str]:
    """Return the sentences with the figures on which the answer is based."""
    from resihp.wrapper.output.render import percent

    figures = []
    if result["evidence"] is not None and result["level"] is not None and not result["slow"]:
        noise = result.get("noise")
        varies = f"; its times vary by {percent(noise)} from one iteration to the next" if noise is not None else ""
        figures.append(f"{percent(result['evidence'])} of the evidence needed for a finding{varies}")
    peers = result.get("peers")
    if peers:
        others = "one other" if peers == 1 else f"{peers} others"
        figures.append(f"compared with {others} of the same work, and with its own past")
    elif peers == 0:
        figures.append("no other rank has the same work: compared only with its own past")
    if result.get("pardon") and result.get("pardoned_until") is not None:
        figures.append(
            f"a probe found it healthy: up to {1 + result['pardon']:.3f} of its healthy time is not reported again "
            f"before iteration {result['pardoned_until']}"
        )
    if result.get("reported") is not None:
        figures.append(f"last measured in iteration {result['reported']}, of {result['iteration']} committed")
    return figures


def _history(result: Row) -> list[str]:
    """Return sentences on the rank's suspicions and verdicts, in this job and in earlier jobs."""
    from resihp.wrapper.output.render import percent

    events = []
    for row in result["suspicions"][-MAX_SUSPICIONS_SHOWN:]:
        change = "" if row["change"] is None else f"{row['change']:+.1%} "
        probe = "" if row["probe"] is None else f" (probe {row['probe']})"
        outcome = "still open" if row["outcome"] is None else f"{row['outcome']}{probe}"
        why = f", {row['outcome_evidence']}" if row["outcome_evidence"] else ""
        confidence = "" if row["confidence"] is None else f", confidence {row['confidence']:.2f}"
        of_component = "" if row["component"] == "device" else f" of a {row['component']}"
        events.append(
            f"suspicion {row['suspicion']}{of_component}: {change}since iteration {row['iteration']}{confidence}: "
            f"{outcome}{why}"
        )
    if len(result["suspicions"]) > MAX_SUSPICIONS_SHOWN:
        more = len(result["suspicions"]) - MAX_SUSPICIONS_SHOWN
        events.append(f"{more} earlier suspicions: resihp history suspicions {result['job']}")
    for row in result["verdicts"]:
        speed = "" if row["speed"] is None else f"at {percent(row['speed'])} of its speed "
        until = "on" if row["ended_iteration"] is None else f"until {row['ended_iteration']}"
        detail = speed if row["component"] == "device" else f"{row['cause']}, "
        events.append(f"failure {row['failure']}: {detail}from iteration {row['iteration']} {until}")
    if not result["suspicions"] and not result["verdicts"]:
        events.append("never suspected in this job")
    if result["former"]["suspected"]:
        times = f"{result['former']['suspected']} of {result['former']['jobs']} former jobs"
        events.append(f"{result['node']} device {result['device']} was suspected in {times}")
    return events
