"""At which address a process serves its parts."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

_LOOPBACK = "127.0.0.1"
_DISCARD_PORT = 9


def route_to(host: str) -> str | None:
    """Address of this process on the network by which it reaches ``host``; None if unknown.

    Sends nothing: a UDP socket that is connected knows its route.
    """
    try:
        found = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError, IndexError):
        return None


def choose_address(everyone: Sequence[tuple[str, str | None]], index: int) -> str | None:
    """The address at which process ``index`` listens; None if it has none that others could reach.

    In one network namespace that is loopback. Otherwise it is the route to the coordinator; where that
    is loopback, as on the coordinator's own host, the route to a process elsewhere.

    Args:
        everyone: for each process its network namespace and its route to the coordinator.
        index: of this process.
    """
    network, mine = everyone[index]
    if all(other == network for other, _ in everyone):
        return _LOOPBACK
    if mine is not None and not _is_loopback(mine):
        return mine
    for other, address in everyone:
        if other != network and address is not None and not _is_loopback(address):
            return route_to(address)
    return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
