"""The departure of the agents at the job's end: they are released, waited for, and ended.

Decides how long to wait. Never ends the job itself. Called by `wrapper.supervisor.shell` when the job has ended.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from resihp.controller import interface as api
from wrapper.launch.launcher import Launcher
from wrapper.supervisor.agents.links import AgentLinks

LEAVE_GRACE_S = 60.0
"""How long scripts may take to end by themselves after training is done."""
TERM_GRACE_S = 3.0
AGENT_EXIT_S = 3.0


class Departure:
    """The departure of the agents of one job. `hurry` ends all waiting."""

    def __init__(
        self,
        launcher: Launcher,
        links: AgentLinks,
        flush: Callable[[], None],
        commits: Collection[asyncio.Task[None]],
    ) -> None:
        """`flush` sends what is held back for agents; `commits` are those of checkpoints under way."""
        self._launcher, self._links = launcher, links
        self._flush, self._commits = flush, commits
        self._hurry = asyncio.Event()

    def hurry(self) -> None:
        self._hurry.set()

    async def complete(self, end: api.End) -> None:
        """Wait until agents and workers have left, kill what is left, and wait for checkpoints under way."""
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
        """Wait until launcher or links report that all agents are gone: srun waits for agents on dead nodes, too."""
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
