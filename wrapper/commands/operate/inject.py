"""`resihp inject`: inject a fault into a running test job immediately."""

from __future__ import annotations

import asyncio
from typing import Any

from resihp.errors import UsageError
from resihp.faults import ends
from resihp.protocol.messages import Inject
from resihp.wrapper.commands.operate.request import ask
from resihp.wrapper.job_folder import find_job


def inject(
    name: str | None,
    kind: str,
    rank: int | None,
    node: str | None,
    speed: float | None = None,
    link: str | None = None,
) -> dict[str, Any]:
    """Inject a fault immediately; return `job`, the fault's parameters, and the job's answer as `text`.

    Raises UsageError if the job refuses or is not running.
    """
    if sum(target is not None for target in (rank, node, link)) != 1:
        raise UsageError("inject: name one target: --rank R or --node N; for slow also --link N-M")
    nodes = None if link is None else ends(link)
    if link is not None and nodes is None:
        raise UsageError(f"inject: --link {link} is not two nodes; for example --link n1-n2")
    job = find_job(name, acts=True)
    reply = asyncio.run(ask(job, Inject(kind=kind, rank=rank, node=node, link=nodes, speed=speed)))
    if not reply.ok:
        raise UsageError(f"job {job.name}: {reply.text}")
    fault = {"kind": kind, "rank": rank, "node": node, "link": nodes, "speed": speed}
    return {"job": job.name, **fault, "text": reply.text}
