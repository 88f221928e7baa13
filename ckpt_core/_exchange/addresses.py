"""At which address a process serves its parts."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

_LOOPBACK = "127.0.0.1"
_DISCARD_PORT = 9


def route_to(host: str) -> str | None:
    """Address of this process on the network by which it reaches ``host``; None if unknown. Sends nothing: a UDP
    socket that is connected knows its route.
    """
    try:
        found = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError, IndexError):
        return None


@dataclass(frozen=True)
class Networks:
    """What a process must know of the networks of all to choose its address. ``elsewhere`` has at most two network
    namespaces, each with its first route to the coordinator that is not loopback.
    """

    one: bool  # all processes are in one network namespace
    elsewhere: tuple[tuple[str, str], ...]


def networks_of(everyone: Sequence[tuple[str, str | None]]) -> Networks:
    """On process 0: from the network namespace of each process and its route to the coordinator."""
    elsewhere: dict[str, str] = {}
    for network, address in everyone:
        if len(elsewhere) < 2 and address is not None and not _is_loopback(address):
            elsewhere.setdefault(network, address)
    return Networks(len({network for network, _ in everyone}) == 1, tuple(elsewhere.items()))


def choose_address(network: str, mine: str | None, networks: Networks) -> str | None:
    """The address at which a process listens; None if it has none that others could reach. In one network namespace
    that is loopback. Otherwise it is ``mine``, the route to the coordinator; where that is loopback, as on the
    coordinator's own host, the route to a process elsewhere.
    """
    if networks.one:
        return _LOOPBACK
    if mine is not None and not _is_loopback(mine):
        return mine
    there = next((address for other, address in networks.elsewhere if other != network), None)
    return None if there is None else route_to(there)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
