"""Speeds of nodes in earlier jobs: read from the ledger in the background, and reported once they are known.

The job never waits for these speeds. If the ledger is absent, slow, hung or of another schema, the reading thread is
abandoned, and devices are compared only with other devices of the job. Decides nothing. Called by
`resihp.wrapper.supervisor.shell`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from resihp.detector.probes import Place
from resihp.errors import ResihpError
from resihp.protocol.messages import Speed

Usual = Mapping[Place, Speed]

_log = logging.getLogger("ledger")


class NodeMemory:
    """Reads the speeds of this cluster's nodes in earlier jobs. `read(url, nodes)` reads them from the ledger at `url`,
    and may take any time."""

    def __init__(
        self, url: str, read: Callable[[str, Sequence[str]], Usual] | None = None, *, cluster: str = ""
    ) -> None:
        self._url = url
        self._read = read or partial(_from_ledger, cluster=cluster)

    def recall(self, nodes: Sequence[str], report: Callable[[Usual], None]) -> None:
        """Read the speeds of `nodes` in a thread. If any are known, `report` is called in this event loop; otherwise it
        is never called."""
        loop = asyncio.get_running_loop()

        def ask() -> None:
            try:
                usual = self._read(self._url, nodes)
            except (ResihpError, OSError) as error:
                _log.warning("speeds of nodes in earlier jobs are unknown: %s", error)
                return
            if usual:
                with suppress(RuntimeError):  # the job has ended meanwhile
                    loop.call_soon_threadsafe(report, usual)

        threading.Thread(target=ask, name="node memory", daemon=True).start()


def _from_ledger(url: str, nodes: Sequence[str], cluster: str) -> Usual:
    from resihp.db.reading.health import usual_speeds
    from resihp.db.reading.queries import Reader

    with Reader.open(url) as reader:
        return usual_speeds(reader, nodes, cluster=cluster)
