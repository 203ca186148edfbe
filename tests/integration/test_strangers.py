"""Who does not know the job's key, at every port that our processes listen on: learns nothing, changes nothing."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress

import psutil

from resihp.protocol.framing import KEY_BYTES, MAGIC, NONCE_BYTES, SecureCodec
from resihp.protocol.messages import AgentMessage, Inject
from tests.integration.jobs import Job
from tests.wrapper.sinks.test_metrics import free_port

ROLES = {
    "resihp.wrapper.supervisor.process": "supervisor",
    "resihp.wrapper.agent.process": "agent",
}
PATIENCE_S = 30.0
MOST_HEARD = len(MAGIC) + NONCE_BYTES + 12 + 32
"""A greeting, and the frame that proves the key and carries nothing."""

Address = tuple[str, int]


def role_of(process: psutil.Process) -> str:
    words = process.cmdline()
    return next((role for module, role in ROLES.items() if module in words), "guardian" if "run" in words else "other")


def listeners(job: Job) -> dict[Address, set[str]]:
    """As the kernel knows them: who has each open."""
    found: dict[Address, set[str]] = {}
    for process in job.processes():
        with suppress(psutil.Error):
            for each in process.net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    found.setdefault((each.laddr.ip, each.laddr.port), set()).add(role_of(process))
    return found


def forged(nonce: bytes) -> bytes:
    """A whole handshake and an order, of somebody who has guessed a key: the codec of a client that trusts itself."""
    client: SecureCodec[object] = SecureCodec(bytes(KEY_BYTES), "client", AgentMessage, nonce=nonce)
    list(client.feed(MAGIC + os.urandom(NONCE_BYTES)))
    proof = client.take_reply()
    client._received = 1
    return client.greeting + proof + client.encode(Inject(kind="kill", rank=0))


ATTEMPTS = {
    "silence": b"",
    "garbage": os.urandom(3000),
    "http": b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "wrong key": forged(os.urandom(NONCE_BYTES)),
    "half a greeting": MAGIC[:5],
}


def heard(address: Address, says: bytes) -> bytes:
    """What comes back until the other side hangs up."""
    answer = b""
    with socket.create_connection(address, timeout=PATIENCE_S) as connection, suppress(ConnectionError):
        connection.sendall(says)
        while chunk := connection.recv(4096):
            answer += chunk
    return answer


def test_strangers_at_every_port_learn_nothing_and_change_nothing(job: Job) -> None:
    page = ("127.0.0.1", free_port())
    job.environment |= {"RESIHP_ADAPT__SUCCESSION": "true", "RESIHP_METRICS__PORT": str(page[1])}
    done = job.folder / "done"
    waits = ("sh", "-c", f"until [ -e {done} ]; do sleep 0.1; done")
    job.start(command=waits, nodes=2, gpus=1, tp=1, pp=1)

    def all_listen() -> dict[Address, set[str]] | None:
        found = listeners(job)
        roles = [role for each in found.values() for role in each]
        return found if roles.count("agent") == 2 and "guardian" in roles and page in found else None

    found = job.until(all_listen, timeout_s=120)
    workers = job.until(lambda: [row for row in job.history("workers") if row["pid"]], timeout_s=60)
    assert len(found) == 4, "the guardian's, which the supervisor has, too; the page of metrics; two agents'"
    told: dict[tuple[Address, str], bytes] = {}

    def attempt(address: Address, name: str) -> None:
        told[address, name] = heard(address, ATTEMPTS[name])

    threads = [threading.Thread(target=attempt, args=(address, name)) for address in found for name in ATTEMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S + 10)
    assert len(told) == len(threads), "all are hung up on"
    for (address, name), answer in told.items():
        if address == page:
            assert (answer[:12] == b"HTTP/1.0 200") == (name == "http"), "loopback only, and asked for"
            assert b"resihp_" not in answer or name == "http"
        else:
            assert answer == b"" or answer.startswith(MAGIC), (address, name, found[address])
            assert len(answer) <= MOST_HEARD
            assert job.folder.name.encode() not in answer
    assert job.history("failures") == []
    assert [row["pid"] for row in job.history("workers")] == [row["pid"] for row in workers]
    done.touch()
    assert job.wait().status == 0, job.stderr
    log = next(job.folder.glob("home/jobs/*/logs/supervisor.log")).read_text()
    for reason in ("did not prove the key within 5 s", "garbage", "wrong key"):
        assert reason in log
