"""Listening for other nodes: inside the range, on the next port that is free, or not at all."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import ExitStack

import pytest

from resihp.errors import UsageError
from resihp.wrapper.launch.ports import KeptPort, listen


def free_range(count: int) -> tuple[int, int]:
    """So many ports in a row on which nobody listens, below those that the kernel chooses from."""
    for first in range(20000, 30000, count):
        try:
            with ExitStack() as stack:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
        except OSError:
            continue
        return first, first + count - 1
    raise AssertionError("no ports are free here")


def test_all_of_a_range_and_nothing_else_is_used() -> None:
    first, last = free_range(20)
    with ExitStack() as stack:
        bound = [stack.enter_context(listen("127.0.0.1", (first, last))).getsockname()[1] for _ in range(20)]
        assert sorted(bound) == list(range(first, last + 1)), "each has got one of its own"
        with pytest.raises(UsageError, match=rf"127\.0\.0\.1: no port of {first}-{last} is free here; widen .*ports"):
            listen("127.0.0.1", (first, last))


def test_jobs_do_not_all_begin_at_the_same_port() -> None:
    ports = free_range(40)
    begun = set()
    for _ in range(8):
        with listen("127.0.0.1", ports) as listener:
            begun.add(listener.getsockname()[1])
    assert len(begun) > 1


def test_without_a_range_the_kernel_chooses() -> None:
    with listen("127.0.0.1") as first, listen("127.0.0.1") as second:
        assert first.getsockname()[1] != second.getsockname()[1]


@pytest.mark.parametrize("ports", [None, (20000, 20100)])
def test_an_address_of_another_machine_is_told(ports: tuple[int, int] | None) -> None:
    with pytest.raises(UsageError) as refused:
        listen("192.0.2.1", ports)
    where = "any port" if ports is None else "port 2"
    assert str(refused.value).startswith(f"192.0.2.1: cannot listen on {where}")
    assert str(refused.value).endswith(
        ": Cannot assign requested address; see which addresses this machine has: ip -brief address"
    )


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.EACCES, "set [slurm] ports to a range above sysctl net.ipv4.ip_unprivileged_port_start"),
        (errno.EMFILE, "see what this machine allows: ulimit -a"),
    ],
)
def test_a_range_that_is_blocked_is_told_in_one_line_with_the_next_command(
    code: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blocked(*_: object, **__: object) -> socket.socket:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(socket, "create_server", blocked)
    with pytest.raises(UsageError) as refused:
        listen("10.0.0.1", (600, 600))
    assert str(refused.value) == f"10.0.0.1: cannot listen on port 600: {os.strerror(code)}; {advice}"


def test_a_meeting_place_is_given_to_nobody_but_who_asks_for_it() -> None:
    """As torch's store does: on all addresses, with SO_REUSEADDR, again where it was there before."""
    place = KeptPort()
    try:
        assert place.port > 0
        assert not place.is_used()
        other = KeptPort()
        assert other.port != place.port
        other.close()
        with pytest.raises(OSError, match="in use"), socket.socket() as stranger:
            stranger.bind(("127.0.0.1", place.port))
        for address, family in (("127.0.0.1", socket.AF_INET), ("", socket.AF_INET)):
            with socket.create_server((address, place.port), family=family):  # sets SO_REUSEADDR
                assert place.is_used()
        assert not place.is_used()
        place.watch()
        assert not place.is_used()
        socket.create_connection(("127.0.0.1", place.port)).close()
        assert place.is_used(), "somebody came in vain"
    finally:
        place.close()
