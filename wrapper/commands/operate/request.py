"""Sends a request of an operator to a running job: one request, one reply, over the supervisor's authenticated socket.

Used by `resihp stop`, `checkpoint now`, `inject` and `why-not`.
"""

from __future__ import annotations

import asyncio

from resihp.errors import ProtocolError, ResihpError, UsageError
from resihp.protocol.channels import SecureChannel
from resihp.protocol.messages import OperatorReply, OperatorRequest
from resihp.wrapper.job_folder import Job

DEFAULT_TIMEOUT_S = 10.0


async def ask(job: Job, request: OperatorRequest, patience_s: float = DEFAULT_TIMEOUT_S) -> OperatorReply:
    """Send a request to a job's supervisor, and return the reply.

    Raises UsageError if the job is not running, ResihpError if its supervisor does not reply within `patience_s`
    seconds.
    """
    address = job.supervisor()
    if address is None:
        raise UsageError(f"job {job.name}: is not running; see resihp status {job.name}")
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
    except ProtocolError as error:
        raise ResihpError(_ended(job, f" ({error})")) from error
    if reply is None:
        raise ResihpError(_ended(job))
    return reply


def _ended(job: Job, how: str = "") -> str:
    return f"job {job.name}: the supervisor ended before it answered{how}; resihp status {job.name}"
