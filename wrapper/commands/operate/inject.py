"""What an operator asks of a running job: one request, one answer, over the supervisor's authenticated socket."""

from __future__ import annotations

import asyncio

from resihp.errors import ResihpError, UsageError
from resihp.faults import ends
from resihp.protocol.framing import SecureChannel
from resihp.protocol.messages import Inject, OperatorReply, OperatorRequest
from wrapper.job_folder import Job, find_job

ANSWER_S = 10.0


def inject(
    name: str | None,
    kind: str,
    rank: int | None,
    node: str | None,
    speed: float | None = None,
    link: str | None = None,
) -> str:
    """Inject a fault at once; returns what the job answered. Raises UsageError when it refuses or is not running."""
    if sum(target is not None for target in (rank, node, link)) != 1:
        raise UsageError("inject: name one target, --rank R or --node N, or of slow --link N-M")
    nodes = None if link is None else ends(link)
    if link is not None and nodes is None:
        raise UsageError(f"inject: --link {link} is not two nodes; for example --link n1-n2")
    job = find_job(name, acts=True)
    reply = asyncio.run(ask(job, Inject(kind=kind, rank=rank, node=node, link=nodes, speed=speed)))
    if not reply.ok:
        raise UsageError(f"job {job.name}: {reply.text}")
    return f"job {job.name}: {reply.text}"


async def ask(job: Job, request: OperatorRequest, patience_s: float = ANSWER_S) -> OperatorReply:
    """Raises UsageError when the job is not running, ResihpError when it does not answer within `patience_s`."""
    address = job.supervisor()
    if address is None:
        raise UsageError(f"job {job.name}: is not running; resihp status {job.name} tells how it ended")
    try:
        async with asyncio.timeout(patience_s):
            channel: SecureChannel[OperatorReply] = await SecureChannel.connect(
                address.host, address.port, job.key, OperatorReply
            )
            try:
                await channel.send(request)
                reply = await channel.recv()
            finally:
                channel.close()
    except TimeoutError:
        raise ResihpError(f"job {job.name}: no answer within {patience_s:g} s; resihp status {job.name}") from None
    except OSError as error:
        raise ResihpError(f"job {job.name}: the supervisor does not answer: {error}") from error
    if reply is None:
        raise ResihpError(f"job {job.name}: the supervisor ended before it answered")
    return reply
