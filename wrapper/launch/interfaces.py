"""Network interfaces of this node: which ones `[network]` means, and what there is where it means none.

`interface` names those of the workers (NCCL, gloo), `control` that of our own connections. Each is a list of names or
of beginnings of names, as `ib0` or `ib,eth1`: nodes may number theirs differently. Used by `wrapper.commands.run`,
`wrapper.agent.process`, and the doctor.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

import psutil

from resihp.errors import ConfigurationError


def present() -> dict[str, str]:
    """Interfaces that are up and have an address, with the address that others can connect to; IPv4 before IPv6."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        usable = sorted(
            filter(None, (_parsed(each.address) for each in addresses)), key=lambda address: address.version
        )
        if usable and name in up:
            found[name] = str(usable[0])
    return found


def _parsed(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None for what is no address of IP, or leads nowhere without saying by which interface."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return None if address.is_link_local and address.version == 6 else address


def meant(wanted: str, there: Mapping[str, str]) -> tuple[str, ...]:
    """Of those that are there, the ones that `wanted` names, in its order: exactly, else by their beginnings."""
    found: dict[str, None] = {}
    for name in wanted.split(","):
        exact = [name] if name in there else sorted(each for each in there if each.startswith(name))
        found |= dict.fromkeys(exact)
    return tuple(found)


def missing(wanted: str, there: Mapping[str, str]) -> str:
    """What to say of a node that has none of them."""
    told = ", ".join(f"{name} ({address})" for name, address in sorted(there.items()))
    return f"no interface {wanted} is up with an address; there is {told or 'none'}"


def of_workers(wanted: str) -> dict[str, str]:
    """What tells NCCL and gloo of them; gloo takes the first. Raises ConfigurationError where there are none."""
    there = present()
    names = meant(wanted, there)
    if not names:
        raise ConfigurationError(f"[network] interface: {missing(wanted, there)}")
    return {"GLOO_SOCKET_IFNAME": names[0], "NCCL_SOCKET_IFNAME": f"={','.join(names)}"}


def address_of(wanted: str, node: str) -> str:
    """Where our own processes on this node listen. Raises ConfigurationError where there is no such interface."""
    there = present()
    names = meant(wanted, there)
    if not names:
        raise ConfigurationError(f"[network] control: node {node}: {missing(wanted, there)}")
    return there[names[0]]
