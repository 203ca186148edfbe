"""The outcome of a finished job, for `resihp run --json` and `resihp stop --json`. Reads only."""

from __future__ import annotations

from typing import Any

from resihp.errors import ResihpError
from resihp.wrapper.job_folder import Job
from resihp.wrapper.output.answers import SCHEMA, message

LEDGER_FIELDS = ("state", "reason", "iteration", "target", "committed_iterations", "failures", "goodput")


def outcome(job: Job, exit_code: int | None = None) -> dict[str, Any]:
    """Return the outcome of a job: `schema, job, id, exit_code, state, reason, iteration, target, committed_iterations,
    failures, goodput, checkpoint, go_on, folder, logs`.

    `exit_code`: the exit code of the command; None to use the job's. If the ledger cannot be read, the values from it
    are None, and a message reports that.
    """
    from resihp.wrapper.commands.operate.checkpoint import rows
    from resihp.wrapper.commands.resume import checkpoint_folder_of
    from resihp.wrapper.commands.status.job_status import job_status
    from resihp.wrapper.config.run_spec import load
    from resihp.wrapper.output.ledgers import opened

    status: dict[str, Any] = {}
    try:
        with opened(str(job.folder), None) as (reader, row):
            status = job_status(reader, row) | {"id": row["uuid"]}
    except ResihpError as error:
        message(f"job {job.name}: its ledger cannot be read, values are missing: {error}")
    exit_code = status.get("exit_code") if exit_code is None else exit_code
    newest_checkpoint = next((row for row in rows(checkpoint_folder_of(job)) if row["resumes"]), None)
    goes_on = newest_checkpoint is not None and exit_code != 0 and job.run_file.exists()
    go_on = load(job.run_file).go_on if goes_on else ""
    return {
        "schema": SCHEMA,
        "job": job.name,
        "id": status.get("id"),
        "exit_code": exit_code,
        **{name: status.get(name) for name in LEDGER_FIELDS},
        "checkpoint": newest_checkpoint,
        "go_on": go_on or None,
        "folder": str(job.folder),
        "logs": str(job.logs),
    }
