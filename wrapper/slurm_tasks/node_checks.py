"""The site's own health check, asked on a node of the job before the node is drained.

The check runs as a step of the Slurm job that holds the node, beside the job's work, so only a node that Slurm still
regards as up can be asked. It is asked in a thread of its own: other requests to Slurm do not wait for it. Decides
nothing about the node: `resihp.wrapper.slurm_tasks.nodes` does. Owned by `nodes`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from resihp.slurm.errors import SlurmError
from resihp.slurm.survey import Survey
from resihp.wrapper import site_check
from resihp.wrapper.config.run_spec import SlurmRequest
from resihp.wrapper.site_check import Answer

MAX_ERROR_CHARS = 160
"""Slurm explains at length why a step could not be started."""

Ask = Callable[[str, str], Answer]
"""Asks on a node, as a step of a Slurm job: (job's number, node) -> answer. Waits for the answer."""


def in_step(request: SlurmRequest, survey: Survey) -> Ask:
    """Return the function that asks the site's check of `request` in a step of the job that holds the node."""
    command, timeout_s = request.health_command, request.health_timeout_s

    def ask(job_number: str, node: str) -> Answer:
        argv = site_check.command_for(command, timeout_s)
        longest_s = site_check.longest_s(command, timeout_s)
        try:
            output = survey.on_nodes(job_number, [node], argv, timeout_s=longest_s)
        except SlurmError as error:
            return Answer(outcome="not asked", text=str(error)[:MAX_ERROR_CHARS])
        return site_check.read(output)

    return ask


class NodeChecks:
    """Pending and answered checks, by the number of the drain that waits for the answer."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._answers: dict[int, Answer | None] = {}
        """None: not answered yet."""

    @property
    def is_pending(self) -> bool:
        return None in self._answers.values()

    def answer(self, drain: int, job_number: str, node: str) -> Answer | None:
        """Return the answer; None while there is none yet. The first call for a drain starts the check."""
        if drain not in self._answers:
            self._answers[drain] = None
            work = threading.Thread(target=self._look, args=(drain, job_number, node), name="site check", daemon=True)
            work.start()
        return self._answers[drain]

    def give_up(self) -> None:
        """Regard all pending checks as not answered: the job ends."""
        for drain, answer in list(self._answers.items()):
            if answer is None:
                self._answers[drain] = Answer(outcome="not asked", text="the job ended before its answer")

    def _look(self, drain: int, job_number: str, node: str) -> None:
        try:
            answer = self._ask(job_number, node)
        except Exception as error:  # noqa: BLE001 - a check that fails in an unforeseen way says nothing about the node
            answer = Answer(outcome="not asked", text=f"{type(error).__name__}: {error}")
        if self._answers[drain] is None:
            self._answers[drain] = answer
