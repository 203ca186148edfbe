"""What nodes gave in former jobs: read from the ledger behind the job's back, and told when it is there.

Nobody waits for it. A ledger that is absent, slow, hung or of another schema knows nothing: the thread that asks it is
left to itself, and devices are compared with their peers alone. Decides nothing. Called by `wrapper.supervisor.shell`.
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
    """Of the ledger at `url`, of nodes of this cluster. `read`: how it is read, given the URL and nodes; that may take
    as long as it likes."""

    def __init__(
        self, url: str, read: Callable[[str, Sequence[str]], Usual] | None = None, *, cluster: str = ""
    ) -> None:
        self._url = url
        self._read = read or partial(_from_ledger, cluster=cluster)

    def recall(self, nodes: Sequence[str], tell: Callable[[Usual], None]) -> None:
        """Ask in a thread; `tell` is called in this event loop, if there is anything to tell, or never."""
        loop = asyncio.get_running_loop()

        def ask() -> None:
            try:
                usual = self._read(self._url, nodes)
            except (ResihpError, OSError) as error:
                _log.warning("what nodes gave in former jobs is not known: %s", error)
                return
            if usual:
                with suppress(RuntimeError):  # the job has ended meanwhile
                    loop.call_soon_threadsafe(tell, usual)

        threading.Thread(target=ask, name="node memory", daemon=True).start()


def _from_ledger(url: str, nodes: Sequence[str], cluster: str) -> Usual:
    from db.reading.health import usual_speeds
    from db.reading.queries import Reader

    with Reader.open(url) as reader:
        return usual_speeds(reader, nodes, cluster=cluster)
