"""Network interfaces of this node: those that `[network]` selects, and those that exist.

`interface` selects the interfaces of the workers (NCCL, gloo), and `control` those of resihp's own connections. Each is
a list of names or of beginnings of names, such as `ib0` or `ib,eth1`, because nodes may number their interfaces
differently. Used by `resihp.wrapper.commands.run`, `resihp.wrapper.agent.process`, and the doctor.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

import psutil

from resihp.errors import ConfigurationError


def present() -> dict[str, str]:
    """Return the interfaces that are up, each with an address to which other nodes can connect; IPv4 is preferred over
    IPv6."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    by_name: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        usable = sorted(
            filter(None, (_parsed(entry.address) for entry in addresses)), key=lambda address: address.version
        )
        if usable and name in up:
            by_name[name] = str(usable[0])
    return by_name


def _parsed(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return an IP address; None for other text, and for a link-local IPv6 address, which is useless without its
    interface."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return None if address.is_link_local and address.version == 6 else address


def meant(wanted: str, available: Mapping[str, str]) -> tuple[str, ...]:
    """Return the available interfaces that `wanted` selects, in its order. Each name in it selects the interface with
    exactly this name, or else those that begin with it."""
    names: dict[str, None] = {}
    for name in wanted.split(","):
        exact = (
            [name]
            if name in available
            else sorted(name_there for name_there in available if name_there.startswith(name))
        )
        names |= dict.fromkeys(exact)
    return tuple(names)


def missing(wanted: str, available: Mapping[str, str]) -> str:
    """Return the message for a node that has none of the wanted interfaces."""
    listed = ", ".join(f"{name} ({address})" for name, address in sorted(available.items()))
    return f"no interface {wanted} is up with an address; available: {listed or 'none'}"


def of_workers(wanted: str) -> dict[str, str]:
    """Return the variables that set the interfaces of NCCL and gloo; gloo uses only the first. Raises
    ConfigurationError if `wanted` selects none."""
    available = present()
    names = meant(wanted, available)
    if not names:
        raise ConfigurationError(f"[network] interface: {missing(wanted, available)}")
    return {"GLOO_SOCKET_IFNAME": names[0], "NCCL_SOCKET_IFNAME": f"={','.join(names)}"}


def address_of(wanted: str, node: str) -> str:
    """Return the address on which resihp's own processes on this node listen. Raises ConfigurationError if `wanted`
    selects no interface."""
    available = present()
    names = meant(wanted, available)
    if not names:
        raise ConfigurationError(f"[network] control: node {node}: {missing(wanted, available)}")
    return available[names[0]]
