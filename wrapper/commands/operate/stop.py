"""`resihp stop`: end a job after a checkpoint of the current iteration, and show the progress of that until the job has
ended.

The job's controller decides the steps (`resihp.controller.shutdown`); this command reads the progress from the job's
journal. Slow imports are inside the functions.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from resihp.wrapper.output.answers import JsonOption, message, to_json

if TYPE_CHECKING:
    from resihp.record.journal import AnyEntry
    from resihp.record.reading_on import ReadingOn
    from resihp.wrapper.job_folder import Job

POLL_INTERVAL_S = 0.3
NO_SUPERVISOR_TIMEOUT_S = 10.0
"""Seconds without a supervisor and without a recorded end after which the job counts as dead. Before that, another
supervisor may be taking over."""


def register(app: typer.Typer) -> None:
    """Add `resihp stop` to the command line."""
    app.command()(stop)


def stop(
    job: Annotated[str, typer.Argument(help="Job name.")],
    now: Annotated[bool, typer.Option("--now", help="End immediately, without a checkpoint.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Stop a job after a checkpoint of the current iteration, and wait for its end.

    Ctrl-C ends only the waiting. The command to resume later is printed.

    Example: resihp stop local-3
    """
    import asyncio

    from resihp.errors import ResihpError
    from resihp.protocol.messages import AskStop
    from resihp.wrapper.commands.operate.request import ask
    from resihp.wrapper.commands.resume import resume_hint
    from resihp.wrapper.config.run_spec import load
    from resihp.wrapper.job_folder import find_job

    this_job = find_job(job)
    journal = StopProgress(this_job)
    journal.new()  # so that earlier entries are skipped
    state = "it may have been asked to stop"
    try:
        reply = asyncio.run(ask(this_job, AskStop(at_once=now)))
        message(f"job {this_job.name}: {reply.text}")
        state = "it is still stopping"
        ended = _follow(this_job, journal)
    except KeyboardInterrupt:
        message(f"job {this_job.name}: stopped waiting; {state}: resihp status {this_job.name}")
        raise typer.Exit(130) from None
    if not ended:
        raise ResihpError(
            f"job {this_job.name}: has no supervisor any more and recorded no end; resihp status {this_job.name}"
        )
    if hint := resume_hint(load(this_job.run_file)):
        message(f"job {this_job.name}: {hint}")
    if as_json:
        from resihp.wrapper.commands.operate.outcome import outcome

        print(to_json(outcome(this_job)))


def _follow(job: Job, journal: StopProgress) -> bool:
    """Print the job's progress until the job has ended; return False if the job is dead and has no recorded end."""
    last_led_at = time.monotonic()
    while True:
        is_over, is_led = job.is_over, job.supervisor() is not None
        for entry in journal.new():
            message(f"job {job.name}: {_text(entry)}")
        if is_over:
            return True
        if is_led:
            last_led_at = time.monotonic()
        elif time.monotonic() - last_led_at > NO_SUPERVISOR_TIMEOUT_S:
            return False
        time.sleep(POLL_INTERVAL_S)


class StopProgress:
    """Reads the journal entries about the stop of a job, each entry once.

    Only the new part of the journal is read, because this is done several times a second while the job writes its
    checkpoint.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._reading: ReadingOn | None = None

    def new(self) -> list[AnyEntry]:
        """Return the entries that were written since the last call."""
        from resihp.errors import JobNotFoundError, ProtocolError
        from resihp.record import journal
        from resihp.record.reading_on import ReadingOn

        kinds = (journal.JobSignalled, journal.CheckpointCommitted, journal.FailureFound, journal.JobEnded)
        with suppress(OSError, ProtocolError, JobNotFoundError):
            path = next((candidate for candidate in self._job.journals if candidate.exists()), None)
            if path is None:
                return []
            if self._reading is None or self._reading.path != path:  # another node leads now, or the copy was made
                self._reading = ReadingOn(path, self._reading.seen if self._reading else 0)
            return [record.entry for record in self._reading.new() if isinstance(record.entry, kinds)]
        return []


def _text(entry: AnyEntry) -> str:
    from resihp.record.describe import explain

    return explain(entry).removeprefix("job: ")
