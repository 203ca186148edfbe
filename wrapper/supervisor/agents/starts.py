"""Messages that start workers: the settings and the environment of each worker.

Decides nothing: the controller decides which workers start. Called by `resihp.wrapper.supervisor.shell`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from resihp.controller import interface as api
from resihp.protocol import messages as m
from resihp.wrapper.config.run_spec import RunRequest
from resihp.wrapper.launch.launcher import Launcher


class WorkerStarts:
    """Makes the messages that start workers of one job."""

    def __init__(self, request: RunRequest, launcher: Launcher) -> None:
        self._request, self._settings = request, request.settings
        self._launcher = launcher
        self._nodes: tuple[str, ...] = ()
        self._runs: tuple[tuple[str, int], ...] = ()

    def spawn(self, action: api.StartWorkers, meeting_place: Mapping[str, str]) -> m.Spawn:
        """Return the message that starts `action.workers`. `meeting_place`: environment variables with the address at
        which ranks can rendezvous."""
        request, settings = self._request, self._settings
        return m.Spawn(
            workers=tuple(
                m.Start(
                    rank=rank,
                    node=action.node,
                    device=device,
                    world_size=len(action.nodes),
                    faults=settings.faults,
                    checkpoint_folder=request.checkpoint_folder,
                    checkpoint_every=settings.checkpoint_every,
                    resume=request.resume,
                    memory_bytes=settings.memory_bytes,
                    joins=action.joins,
                    round=action.round,
                    resume_from=action.checkpoint,
                    resume_iteration=action.checkpoint_iteration,
                )
                for rank, device in action.workers
            ),
            environment={
                **self._launcher.worker_environment,
                **meeting_place,
            },
            nodes=self._node_runs(action.nodes),
        )

    def _node_runs(self, nodes: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
        """Return (node, number of consecutive ranks) over the nodes of all ranks. Cached, because workers that start
        together have the same nodes."""
        if nodes is not self._nodes:
            self._nodes = nodes
            self._runs = tuple((node, len(list(ranks))) for node, ranks in itertools.groupby(nodes))
        return self._runs
