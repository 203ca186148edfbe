"""`resihp stop`: have a job end, after a checkpoint of the iteration under way, and show what happens until it has.

What it takes is decided by the job's controller (`resihp.controller.shutdown`); what is shown stands in its journal.
Everything that takes time to import is imported in the functions.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from wrapper.output.answers import JsonOption, message, to_json

if TYPE_CHECKING:
    from resihp.record.journal import AnyEntry
    from resihp.record.reading_on import ReadingOn
    from wrapper.job_folder import Job

LOOK_EVERY_S = 0.3
GONE_S = 10.0
"""How long nobody may supervise the job, without a word of its end, before it is called dead; another supervisor may
be taking over."""


def register(app: typer.Typer) -> None:
    """Add `resihp stop` to the command line."""
    app.command()(stop)


def stop(
    job: Annotated[str, typer.Argument(help="The job.")],
    now: Annotated[bool, typer.Option("--now", help="End at once, without a checkpoint.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Stop a job: a checkpoint of the iteration under way, then the end. Waits for it.

    Ctrl-C only ends the waiting. To go on later: resihp run --resume, as it says.

    Example: resihp stop local-3
    """
    import asyncio

    from resihp.errors import ResihpError
    from resihp.protocol.messages import AskStop
    from wrapper.commands.operate.request import ask
    from wrapper.commands.resume import how_to_go_on
    from wrapper.config.run_spec import load
    from wrapper.job_folder import find_job

    found = find_job(job)
    journal = Told(found)
    journal.new()  # what was before is no news
    goes_on = "it may have been asked to stop"
    try:
        reply = asyncio.run(ask(found, AskStop(at_once=now)))
        message(f"job {found.name}: {reply.text}")
        goes_on = "it goes on stopping"
        ended = _follow(found, journal)
    except KeyboardInterrupt:
        message(f"job {found.name}: not waited for any longer; {goes_on}: resihp status {found.name}")
        raise typer.Exit(130) from None
    if not ended:
        raise ResihpError(f"job {found.name}: nobody supervises it any more, and it has not said how it ended")
    if told := how_to_go_on(load(found.run_file)):
        message(f"job {found.name}: {told}")
    if as_json:
        from wrapper.commands.operate.outcome import outcome

        print(to_json(outcome(found)))


def _follow(job: Job, journal: Told) -> bool:
    """Say what happens until the job has ended; False where it is dead and has not."""
    heard_at = time.monotonic()
    while True:
        is_over, is_led = job.is_over, job.supervisor() is not None
        for entry in journal.new():
            message(f"job {job.name}: {_text(entry)}")
        if is_over:
            return True
        if is_led:
            heard_at = time.monotonic()
        elif time.monotonic() - heard_at > GONE_S:
            return False
        time.sleep(LOOK_EVERY_S)


class Told:
    """What a job's journal tells of how it stops, each entry once. Of a long journal only what has come since the last
    look is read: this is asked several times a second, of a job that is busy with its checkpoint."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._reading: ReadingOn | None = None

    def new(self) -> list[AnyEntry]:
        from resihp.errors import JobNotFoundError, ProtocolError
        from resihp.record import journal
        from resihp.record.reading_on import ReadingOn

        kinds = (journal.JobSignalled, journal.CheckpointCommitted, journal.FailureFound, journal.JobEnded)
        with suppress(OSError, ProtocolError, JobNotFoundError):
            path = next((each for each in self._job.journals if each.exists()), None)
            if path is None:
                return []
            if self._reading is None or self._reading.path != path:  # another node leads, or the copy is there now
                self._reading = ReadingOn(path, self._reading.seen if self._reading else 0)
            return [record.entry for record in self._reading.new() if isinstance(record.entry, kinds)]
        return []


def _text(entry: AnyEntry) -> str:
    from resihp.record.describe import explain

    return explain(entry).removeprefix("job: ")
