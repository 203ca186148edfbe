"""Which interfaces a name means, and what is said where it means none."""

from __future__ import annotations

import pytest

from resihp.errors import ConfigurationError
from resihp.wrapper.launch import interfaces

THERE = {"eth0": "10.0.0.1", "ib0": "10.1.0.1", "ib1": "10.2.0.1", "ib10": "10.3.0.1", "lo": "127.0.0.1"}


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("ib0", ("ib0",)),
        ("ib1", ("ib1",)),
        ("ib", ("ib0", "ib1", "ib10")),
        ("ib1,eth", ("ib1", "eth0")),
        ("ib1,ib", ("ib1", "ib0", "ib10")),
        ("hsn", ()),
    ],
)
def test_names_and_their_beginnings(wanted: str, found: tuple[str, ...]) -> None:
    assert interfaces.meant(wanted, THERE) == found


def test_what_workers_and_our_own_connections_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "present", lambda: THERE)
    assert interfaces.of_workers("ib") == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0,ib1,ib10"}
    assert interfaces.address_of("eth", "n1") == "10.0.0.1"
    with pytest.raises(ConfigurationError, match=r"control: node n1: no interface hsn .* eth0 \(10\.0\.0\.1\), ib0"):
        interfaces.address_of("hsn", "n1")


def test_those_of_this_machine_are_up_and_have_addresses() -> None:
    assert interfaces.present()["lo"] == "127.0.0.1"
