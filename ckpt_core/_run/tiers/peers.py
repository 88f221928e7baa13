"""How the processes of a run reach each other's local steps, agreed once for each Checkpointer."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_core._directory import this_machine, this_network
from ckpt_core._errors import CheckpointError
from ckpt_core._events import logger
from ckpt_core._exchange import (
    BLOCK_BYTES,
    IDLE_SECS,
    Connection,
    Peer,
    Server,
    Shelf,
    choose_address,
    route_to,
)
from ckpt_core._options import Options
from ckpt_core._processes import Processes, coordinator_host, next_tag
from ckpt_core._run.tiers.partners import choose_partner

_CALL = "open local directories to each other"
_SECRET_BYTES = 32
_WAITS = 8
"""A process that gives up this many connections, one after the other, is still in time for the others."""


@dataclass(frozen=True)
class Peers:
    """The processes of a run, and where each serves its local steps.

    Attributes:
        everyone: one per process.
        secret: what every request carries.
        partners: for each process, the one that keeps copies of its parts, or None.
        server: that of this process; None if it serves nothing.
        idle_secs: maximum time in which a connection moves no byte.
        index: of this process.
    """

    everyone: tuple[Peer, ...]
    secret: str
    partners: tuple[int | None, ...]
    server: Server | None
    idle_secs: float = IDLE_SECS
    index: int = 0

    def connect(self, process: int, block_bytes: int = BLOCK_BYTES) -> Connection:
        """A connection to a process."""
        return Connection(self.everyone[process], self.secret, block_bytes, self.idle_secs)

    def close(self) -> None:
        """Serves no longer; may be called again."""
        if self.server is not None:
            self.server.close()

    @property
    def machines(self) -> list[str]:
        """The machine of each process."""
        return [peer.machine for peer in self.everyone]

    @property
    def serving(self) -> list[bool]:
        """For each process, whether others can fetch from it."""
        return [peer.port > 0 for peer in self.everyone]


def meet(processes: Processes, options: Options, shelf: Shelf) -> Peers:
    """Starts this process's server and learns where the others are; all processes must call it.

    Raises:
        CheckpointError: ``Options.partners`` of a process gave no other process.
    """
    machine = this_machine()
    if processes.count == 1:
        return Peers((Peer(machine, "", 0),), "", (None,), None)
    tag = next_tag()
    mine = json.dumps([machine, this_network(), route_to(coordinator_host())])

    def tell_all(texts: list[str]) -> str:
        found = [json.loads(text) for text in texts]
        return json.dumps([found, secrets.token_hex(_SECRET_BYTES)])

    answer = processes.gather_decide(tag, mine, tell_all, options.timeout_secs, _CALL)
    found, secret = json.loads(answer)
    server, address = _serve(
        choose_address([told[1:] for told in found], processes.index), secret, shelf
    )
    try:
        everyone, partners = _introduce(
            processes, options, tag, [told[0] for told in found], server, address
        )
    except BaseException:
        if server is not None:
            server.close()
        raise
    idle_secs = min(IDLE_SECS, options.timeout_secs / _WAITS)
    return Peers(everyone, secret, partners, server, idle_secs, processes.index)


def _serve(address: str | None, secret: str, shelf: Shelf) -> tuple[Server | None, str]:
    try:
        if address is not None:
            return Server(address, secret, shelf), address
        logger.warning(
            "no address is known at which other hosts could reach this process: they cannot fetch local steps from it"
        )
    except OSError as error:
        logger.warning("other hosts cannot fetch local steps from this process: %s", error)
    return None, ""


def _introduce(
    processes: Processes,
    options: Options,
    tag: str,
    machines: Sequence[str],
    server: Server | None,
    address: str,
) -> tuple[tuple[Peer, ...], tuple[int | None, ...]]:
    """Tells all at which port this process serves, and who its partner is."""
    port = 0 if server is None else server.port
    partner, error = None, ""
    try:
        partner = choose_partner(options.partners, machines, processes.index)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    mine = json.dumps([address, port, partner, error])
    answer = processes.gather_decide(
        f"{tag}/ports",
        mine,
        lambda texts: json.dumps([json.loads(text) for text in texts]),
        options.timeout_secs,
    )
    told: list[Any] = json.loads(answer)
    failed = [(index, error) for index, (_, _, _, error) in enumerate(told) if error]
    if failed:
        raise CheckpointError(f"process {failed[0][0]} has no partner: {failed[0][1]}")
    without = [index for index, (_, _, partner, _) in enumerate(told) if partner is None]
    if partner is not None and without:
        logger.warning(
            "Options.partners is set here, but not on processes %s: no copies are made", without[:5]
        )
    peers = (
        Peer(machine, where, port)
        for machine, (where, port, _, _) in zip(machines, told, strict=True)
    )
    return tuple(peers), tuple(partner for _, _, partner, _ in told)
