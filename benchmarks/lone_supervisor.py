"""The supervisor's process for `supervisor.py`: the real one, but that it starts no agents."""

from __future__ import annotations

from typing import Any

from resihp.wrapper.supervisor import process


class Elsewhere:
    """A launcher that starts nobody: agents come by themselves."""

    def __init__(self, host: str, nodes: tuple[str, ...]) -> None:
        self.host = host
        self.nodes = nodes
        self.worker_environment: dict[str, str] = {}

    async def start(self, port: int, ended: Any) -> None: ...

    def adopt(self, node: str, pid: int, ended: Any) -> None: ...

    def kill(self, node: str) -> None: ...

    async def wait(self, timeout_s: float) -> bool:
        return True


if __name__ == "__main__":
    given: Any = process
    given._launcher = lambda request, host, *others: Elsewhere(host, request.settings.node_names)
    process.main()
