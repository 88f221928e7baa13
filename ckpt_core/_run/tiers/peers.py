"""How the processes of a run reach each other's local steps, agreed once for each Checkpointer; and what each offers."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_core._directory import (
    SECRET_FILE,
    PosixBackend,
    make_secret,
    read_secret,
    this_machine,
    this_network,
)
from ckpt_core._errors import CheckpointError
from ckpt_core._events import logger
from ckpt_core._exchange import (
    BLOCK_BYTES,
    IDLE_SECS,
    Connection,
    Key,
    Offered,
    Peer,
    Server,
    choose_address,
    route_to,
)
from ckpt_core._format.record import RECORD_FILE, load_record
from ckpt_core._options import Options
from ckpt_core._processes import Processes, coordinator_host, next_tag
from ckpt_core._run.tiers.judge import choose_partner

_CALL = "open local directories to each other"
_SECRET_BYTES = 32
_OPEN = (
    "So the secret that protects local steps goes through jax's coordination service: whoever reaches the "
    "coordinator's port can read it there, and fetch the local steps of every process. Set "
    "Options(peer_secret_file=) to a file with 32 random bytes and the mode 0600, the same on each host"
)
_WAITS = 8
"""A process that gives up this many connections, one after the other, is still in time for the others."""


class Offers:
    """The parts that other processes may fetch from this one; may be used by any thread."""

    def __init__(self) -> None:
        self._read = PosixBackend().read
        self._paths: dict[Key, str] = {}
        self._lock = threading.Lock()

    def put(self, key: Key, path: str) -> None:
        """Offers the part at a path."""
        with self._lock:
            self._paths[key] = path

    def replace(self, paths: dict[Key, str]) -> None:
        """Offers these parts and no other."""
        with self._lock:
            self._paths = dict(paths)

    def keep(self, wanted: Callable[[Key], bool]) -> None:
        """Offers no longer those that are not wanted."""
        with self._lock:
            self._paths = {key: path for key, path in self._paths.items() if wanted(key)}

    def path(self, key: Key) -> str | None:
        """Where a part is."""
        with self._lock:
            return self._paths.get(key)

    def find(self, key: Key) -> Offered | None:
        """The files of a part, from its record; a ``Shelf``."""
        path = self.path(key)
        if path is None:
            return None
        try:
            data = self._read(path, RECORD_FILE)
            record = None if data is None else load_record(data)
        except (CheckpointError, OSError):
            return None
        if record is None or record.token != key.token:
            return None  # it was replaced in the meantime
        return Offered(path, (RECORD_FILE, *sorted(record.files)))


@dataclass(frozen=True)
class Peers:
    """The processes of a run, and where each serves its local steps.

    Attributes:
        everyone: one per process.
        offers: the parts that this process gives.
        secret: what every request carries.
        partners: for each process, the one that keeps copies of its parts, or None.
        server: that of this process; None if it serves nothing.
        idle_secs: maximum time in which a connection moves no byte.
        index: of this process.
    """

    everyone: tuple[Peer, ...]
    offers: Offers
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


def exchange_addresses(
    processes: Processes, options: Options, offers: Offers, directory: str | None = None
) -> Peers:
    """Starts this process's server and learns where the others are; all processes must call it.

    Args:
        processes, options: of the run.
        offers: the parts that this process gives.
        directory: the persistent directory, where it is one of a file system: the secret is made there.

    Raises:
        CheckpointError: ``Options.partners`` of a process gave no other process; or the processes have no
            secret in common.
    """
    machine = this_machine()
    if processes.count == 1:
        return Peers((Peer(machine, "", 0),), offers, "", (None,), None)
    tag = next_tag()
    private, why, refused = _private(options, directory if processes.index == 0 else None)
    mine = json.dumps([machine, this_network(), route_to(coordinator_host()), private is not None])

    def tell_all(texts: list[str]) -> str:
        found = [json.loads(text) for text in texts]
        return json.dumps([found, secrets.token_hex(_SECRET_BYTES)])

    answer = processes.gather_decide(tag, mine, tell_all, options.timeout_secs, _CALL)
    found, nonce = json.loads(answer)
    if private is None and found[0][3]:  # process 0 has made one meanwhile
        private, why, refused = _private(options, directory)
    secret = nonce if private is None else _derived(private, "fetch", nonce)
    if private is None and processes.index == 0 and not refused:
        logger.warning("local directories: %s. %s", why, _OPEN)
    found = [told[:3] for told in found]
    proof = "" if private is None else _derived(private, "proof", nonce)
    server, address = _serve(
        choose_address([told[1:] for told in found], processes.index), secret, offers
    )
    try:
        everyone, partners = _introduce(
            processes,
            options,
            tag,
            [told[0] for told in found],
            server,
            (address, proof, why),
            refused,
        )
    except BaseException:
        if server is not None:
            server.close()
        raise
    idle_secs = min(IDLE_SECS, options.timeout_secs / _WAITS)
    return Peers(everyone, offers, secret, partners, server, idle_secs, processes.index)


def _private(options: Options, directory: str | None) -> tuple[bytes | None, str, str]:
    """The secret that is in a file; else None, with why there is none, and why the file of the options is refused."""
    given = options.peer_secret_file
    if given is None and directory is None:
        return None, "there is no file for a secret of the job", ""
    try:
        return read_secret(given or make_secret(directory or "")), "", ""
    except (OSError, CheckpointError) as error:
        if given is not None:  # raised on every process, once all have met
            return None, "", f"has no secret: Options.peer_secret_file: {error}"
        return None, f"{os.path.join(directory or '', SECRET_FILE)} holds no secret: {error}", ""


def _derived(private: bytes, what: str, nonce: str) -> str:
    """What only who knows the secret can compute; says nothing of the secret itself."""
    return hmac.new(private, f"ckpt {what} {nonce}".encode(), hashlib.sha256).hexdigest()


def _serve(address: str | None, secret: str, offers: Offers) -> tuple[Server | None, str]:
    try:
        if address is not None:
            return Server(address, secret, offers.find), address
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
    said: tuple[str, str, str],
    refused: str,
) -> tuple[tuple[Peer, ...], tuple[int | None, ...]]:
    """Tells all at which port this process serves, and who its partner is.

    ``said``: at which address; the proof that it knows the secret, or nothing; and why it has none. ``refused``: why
    this process cannot take part.
    """
    address, proof, why = said
    port = 0 if server is None else server.port
    partner, error = None, refused
    try:
        partner = choose_partner(options.partners, machines, processes.index)
    except Exception as raised:
        error = error or f"has no partner: {type(raised).__name__}: {raised}"
    mine = json.dumps([address, port, partner, error, proof, why])
    answer = processes.gather_decide(
        f"{tag}/ports",
        mine,
        lambda texts: json.dumps([json.loads(text) for text in texts]),
        options.timeout_secs,
    )
    told: list[Any] = json.loads(answer)
    proofs, reasons = [entry[4] for entry in told], [entry[5] for entry in told]
    told = [entry[:4] for entry in told]
    failed = [(index, error) for index, (_, _, _, error) in enumerate(told) if error]
    if failed:
        raise CheckpointError(f"process {failed[0][0]} {failed[0][1]}")
    _refuse_strangers(proofs, reasons)
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


def _refuse_strangers(proofs: list[str], reasons: list[str]) -> None:
    """Raises CheckpointError if the processes do not all know one secret, or all none."""
    for index, proof in enumerate(proofs):
        if proof != proofs[0]:
            first, other = (
                f"has {'a' if said else 'no'} secret{f' ({why})' if why else ''}"
                for said, why in ((proofs[0], reasons[0]), (proof, reasons[index]))
            )
            raise CheckpointError(
                f"process {index} {other} and process 0 {first}, not the same one: Options(peer_secret_file=) must "
                "name a file with the same bytes on each host"
            )
