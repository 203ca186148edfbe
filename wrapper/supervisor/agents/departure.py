"""The departure of the agents at the job's end: release them, wait for them, kill the remaining ones.

Decides how long to wait. Never ends the job itself. Called by `resihp.wrapper.supervisor.shell` when the job has ended.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from resihp.controller import interface as api
from resihp.wrapper.launch.launcher import Launcher
from resihp.wrapper.supervisor.agents.links import AgentLinks

LEAVE_GRACE_S = 60.0
"""How long training scripts may take to exit by themselves after training has ended."""
TERM_GRACE_S = 3.0
AGENT_EXIT_S = 3.0


class Departure:
    """The departure of the agents of one job. `hurry` stops all waiting."""

    def __init__(
        self,
        launcher: Launcher,
        links: AgentLinks,
        flush: Callable[[], None],
        commits: Collection[asyncio.Task[None]],
    ) -> None:
        """`flush` sends journal records that the agents have not received yet. `commits` are the checkpoint commits in
        progress."""
        self._launcher, self._links = launcher, links
        self._flush, self._commits = flush, commits
        self._hurry = asyncio.Event()

    def hurry(self) -> None:
        self._hurry.set()

    async def complete(self, end: api.End) -> None:
        """Wait until agents and workers have exited, kill the remaining ones, and wait for checkpoint commits in
        progress."""
        if not end.workers_leave:
            for rank in self._links.live_ranks:
                self._links.signal(rank, signal.SIGTERM)
        grace_s = LEAVE_GRACE_S if end.workers_leave else TERM_GRACE_S
        self._flush()
        self._links.release(grace_s)
        await self._unless_hurried(self._agents_gone(grace_s + AGENT_EXIT_S))
        await self._unless_hurried(self._links.all_closed(grace_s + AGENT_EXIT_S))
        for node in self._launcher.nodes:
            self._launcher.kill(node)
        await self._launcher.wait(AGENT_EXIT_S)
        if self._commits:
            await self._unless_hurried(asyncio.gather(*self._commits))

    async def _agents_gone(self, timeout_s: float) -> None:
        """Wait until the launcher or the connections report that all agents have exited. The launcher alone is not
        enough: srun also waits for agents on dead nodes."""
        ways = [asyncio.ensure_future(self._launcher.wait(timeout_s)), asyncio.ensure_future(self._links.all_ended())]
        try:
            await asyncio.wait(ways, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()

    async def _unless_hurried(self, waiting: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> None:
        hurried = asyncio.create_task(self._hurry.wait())
        waited = asyncio.ensure_future(waiting)
        await asyncio.wait([hurried, waited], return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        waited.cancel()
