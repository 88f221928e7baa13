"""Ports for servers that tests start."""

import contextlib
import itertools
import os
import socket

# Below those that Linux gives to connections (from 32,768 on): a connection would take a port between the probe and
# the server's start.
_PORTS_OF_A_WORKER = 500
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 16
_first = 16_000 + _PORTS_OF_A_WORKER * _worker
_ports = itertools.cycle(range(_first, _first + _PORTS_OF_A_WORKER))
for _ in range(os.getpid() % _PORTS_OF_A_WORKER):  # of other sessions on this machine
    next(_ports)


def free_port() -> int:
    """A port that nobody listens at, and that neither a connection nor another worker of this session gets meanwhile."""
    for _ in range(_PORTS_OF_A_WORKER):
        with socket.socket() as probe, contextlib.suppress(OSError):
            port = next(_ports)
            probe.bind(("", port))
            return port
    raise RuntimeError("no port is free")
