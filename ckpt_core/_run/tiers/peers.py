"""How the processes of a run reach each other's local steps, agreed once for each Checkpointer, and how parts of them are fetched.

A copy is equal to the original to the byte, ckpt.json included, and appears by the same commit as a save.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckpt_core._directory import SECRET_FILE, make_secret, read_secret, this_machine, this_network
from ckpt_core._errors import BarrierTimeout, CheckpointCorrupt, CheckpointError
from ckpt_core._exchange import (
    BLOCK_BYTES,
    IDLE_SECS,
    Connection,
    Key,
    Lacking,
    ServedParts,
    Server,
    choose_address,
    far_route,
    open_plain,
    route_to,
)
from ckpt_core._format.part import contains
from ckpt_core._format.record import RECORD_FILE, load_record
from ckpt_core._format.untrusted import most_bytes
from ckpt_core._operation import logger
from ckpt_core._options import MIB, Options
from ckpt_core._processes import Processes, coordinator_host
from ckpt_core._run.tiers.folders import Target
from ckpt_core._run.tiers.judge import (
    ChosenPartner,
    Source,
    all_partners,
    cause_of,
    choose_partner,
    inverted,
)
from ckpt_core._verify import verify

OPENING = "open local steps"
"""What all processes are about to do when they tell each other where they serve."""
_SECRET_BYTES = 32
_OPEN = (
    "So the secret that protects local steps goes through jax's coordination service: whoever reaches the "
    "coordinator's port can read it there, and fetch the local steps of every process. Set "
    "Options(peer_secret_file=) to a file with 32 random bytes and the mode 0600, the same on each host"
)
_WAITS = 8  # a process that gives up so many connections in turn is still in time for the others
_VERIFY_BYTES = 256 * MIB  # maximum host memory in which a part is verified, if no chunk is larger
Pieces = Callable[[int], Iterator[bytes]]
"""The content of a file of a part, block by block: 0 is ckpt.json, then come its files by name."""


@dataclass(frozen=True)
class Peers:
    """The processes of a run, and where each serves its local steps."""

    processes: Processes
    served: ServedParts  # finds the parts that this process gives
    secret: str  # what every request carries
    server: Server | None  # that of this process; None if it serves nothing
    folder: str = ""  # below it each process has one at the service; see ``Processes.put``
    idle_secs: float = IDLE_SECS  # maximum time in which a connection moves no byte
    machines: tuple[str, ...] = ()  # on process 0: that of each process
    copies: bool = False  # whether each process has a partner, which keeps copies of its parts
    sources: tuple[int, ...] = ()  # the processes that have this one as partner

    def find(self, process: int) -> tuple[str, int]:
        """Address and port of a process; port 0: it serves nothing. ConnectionError: it has ended."""
        try:
            text = self.processes.get(f"{self.folder}/{process}/address")
        except BarrierTimeout as error:
            raise ConnectionError(str(error)) from error
        if text is None:
            raise ConnectionError(f"process {process} has ended")
        address, port = json.loads(text)
        return address, port

    def connect(self, process: int) -> Connection:
        """A connection to a process; ConnectionError if it serves nothing."""
        address, port = self.find(process)
        if not port:
            raise ConnectionError(f"process {process} serves nothing")
        return Connection(address, port, self.secret, self.idle_secs)

    def close(self) -> None:
        """Serves no longer; may be called again."""
        if self.server is not None:
            self.server.close()

    def withdraw(self) -> None:
        """Serves no longer, and takes back all that concerns this process."""
        self.close()
        if self.folder:
            self.processes.drop(f"{self.folder}/{self.processes.index}")


class Table:
    """Rows of which each concerns one process: in the answer, which goes to all, their bytes would grow quadratically."""

    def __init__(self, processes: Processes, folder: str, name: str) -> None:
        self._processes = processes
        self._folder = folder  # that of ``Peers``
        self._name = name
        self._number, self._rows = 0, list[str]()  # of the newest table, on process 0
        self._read = ("", "")  # the newest table, and the row of it that this process has read

    def publish(self, rows: list[str]) -> str:
        """On process 0: the name of the table for the answer; empty if all rows are. Each process has read its row of the
        table before when it sends a value for this decision.
        """
        if not any(rows):
            return ""
        if rows != self._rows:
            self._number += 1
            for process, row in enumerate(rows):
                if row:
                    key = f"{self._folder}/{process}/{self._name}"
                    self._processes.put(key, f"{self._number} {row}")
            self._rows, self._read = rows, (str(self._number), rows[0])
        return str(self._number)

    def row(self, table: str) -> str:
        """This process's row of the table with the name that the answer had; empty if it has none."""
        if table and table != self._read[0]:
            key = f"{self._folder}/{self._processes.index}/{self._name}"
            number, _, row = (self._processes.get(key) or "").partition(" ")
            self._read = table, row if number == table else ""
        return self._read[1] if table else ""


def exchange_addresses(
    processes: Processes, options: Options, served: ServedParts, directory: str | None = None
) -> Peers:
    """Starts this process's server and tells where it is; all processes must call it. The secret is in ``directory``, where
    process 0 has made it. CheckpointError: they have no secret in common, or one has no partner.
    """
    machine, machines = _name(this_machine()), list[str]()
    if processes.count == 1:
        return Peers(processes, served, "", None, machines=(machine,))
    private, why, error = _private(options, directory, processes.index == 0)
    partner: ChosenPartner = None
    try:
        partner = choose_partner(options.partners, processes.index, processes.count)
    except Exception as raised:
        error = error or f"has no partner: {type(raised).__name__}: {raised}"
    route = route_to(coordinator_host())
    proof = "" if private is None else _derived(private, "proof")
    mine = _Introduced(machine, _name(this_network()), route, partner, error, proof, why)

    def answer_all(texts: list[str]) -> str:
        introduced = [_Introduced(*json.loads(text)) for text in texts]
        machines.extend(one.machine for one in introduced)
        failed = (f"process {n} {one.error}" for n, one in enumerate(introduced) if one.error)
        problem = next(failed, "") or _strangers(introduced)
        partners = all_partners([one.partner for one in introduced], machines)
        without = [index for index, one in enumerate(partners) if one is None]
        nonce = secrets.token_hex(_SECRET_BYTES)
        if copies := not problem and not without:
            for index, sources in enumerate(inverted(partners)):
                processes.put(f"{_folder(nonce)}/{index}/sources", json.dumps(sources))
        far = far_route([(one.network, one.route) for one in introduced])
        return json.dumps([nonce, far, problem, without[:5], copies])

    together = processes.round(OPENING, options.timeout_secs)
    nonce, far, problem, without, copies = json.loads(together.decide(json.dumps(mine), answer_all))
    if problem:
        raise CheckpointError(problem)
    if private is None and processes.index == 0:
        logger.warning("local directories: %s. %s", why, _OPEN)
    if partner is not None and without:
        logger.warning(
            "Options.partners is set here, but not on processes %s: no copies are made", without
        )
    secret, folder = nonce if private is None else _derived(private, nonce), _folder(nonce)
    server, address = _serve(choose_address(route, far), secret, served)
    idle_secs = min(IDLE_SECS, options.timeout_secs / _WAITS)
    peers = Peers(
        processes, served, secret, server, folder, idle_secs, tuple(machines), copies=copies
    )
    try:
        port = 0 if server is None else server.port
        processes.put(f"{folder}/{processes.index}/address", json.dumps([address, port]))
        sources = processes.get(f"{folder}/{processes.index}/sources") if copies else None
        return replace(peers, sources=tuple(json.loads(sources or "[]")))
    except BaseException:
        peers.withdraw()
        raise


def _folder(nonce: str) -> str:
    """Where the processes put what concerns one opening; see ``Processes.put``."""
    return f"peers/{nonce[:16]}"


def _name(place: str) -> str:
    """10 letters for a machine or network: of so many processes, every byte counts."""
    return base64.b64encode(hashlib.sha256(place.encode()).digest())[:10].decode()


def _private(options: Options, directory: str | None, first: bool) -> tuple[bytes | None, str, str]:
    """The secret that is in a file; else None, with why there is none, and why the file of the options is refused."""
    given = options.peer_secret_file
    if given is None and directory is None:
        return None, "there is no file for a secret of the job", ""
    path = os.path.join(directory or "", SECRET_FILE)
    try:
        if first and given is None:
            make_secret(directory or "")
        return read_secret(os.fspath(given or path)), "", ""
    except (OSError, CheckpointError) as error:
        if given is not None:  # raised on every process, once all have met
            return None, "", f"has no secret: Options.peer_secret_file: {error}"
        return None, f"{path} holds no secret: {error}", ""


def _derived(private: bytes, what: str) -> str:
    """What only who knows the secret can compute; says nothing of the secret itself."""
    return hmac.new(private, f"ckpt {what}".encode(), hashlib.sha256).hexdigest()


def _serve(address: str | None, secret: str, served: ServedParts) -> tuple[Server | None, str]:
    try:
        if address is not None:
            return Server(address, secret, served), address
        logger.warning(
            "no address is known at which other hosts could reach this process: they cannot fetch local steps from it"
        )
    except (OSError, RuntimeError) as error:  # no address or port, or no thread
        logger.warning("other hosts cannot fetch local steps from this process: %s", error)
    return None, ""


class _Introduced(NamedTuple):
    """What one process says of itself."""

    machine: str
    network: str
    route: str | None  # its address on the network by which it reaches the coordinator
    partner: ChosenPartner  # see ``judge.choose_partner``
    error: str  # why it cannot take part
    proof: str  # that it knows the secret, or nothing
    why: str  # it has no secret


def _strangers(introduced: Sequence[_Introduced]) -> str:
    """What is wrong if the processes do not all know one secret, or all none; empty if nothing is."""
    first = introduced[0]
    for index, one in enumerate(introduced):
        if one.proof != first.proof:
            theirs, ours = (
                f"has no secret ({said.why})" if said.why else "has a secret"
                for said in (one, first)
            )
            return (
                f"process {index} {theirs} and process 0 {ours}, not the same one: Options(peer_secret_file=) must "
                "name a file with the same bytes on each host"
            )
    return ""


def bring(key: Key, pieces: Pieces, target: Target) -> None:
    """Brings a part, verified, or nothing. CheckpointCorrupt: damaged, or another one; ConnectionError: not fetched."""
    head = b"".join(_bounded(pieces(0), most_bytes(RECORD_FILE), RECORD_FILE))
    record = load_record(head)
    serves = record.part is None or contains(record.part.serves, key.writer)
    if record.token != key.token or not serves:
        raise CheckpointCorrupt(
            f"{RECORD_FILE}: another part than that of process {key.writer} of step {key.step}",
            file=RECORD_FILE,
        )
    with target.backend.begin(
        target.path, overwrite=True, durable=target.durable, token=key.token
    ) as attempt:
        for position, name in enumerate(record.beside, 1):
            content = _bounded(pieces(position), record.files[name].size_bytes, name)
            attempt.write_data(name, content)
        attempt.make_durable(RECORD_FILE, head)
        report = verify(attempt.path, options=Options(max_host_bytes=_VERIFY_BYTES))
        if not report.ok:
            problem = report.problems[0]
            raise CheckpointCorrupt(str(problem), file=problem.file, leaf=problem.leaf)
        target.may_commit()
        attempt.commit()


def fetch_first(
    save: tuple[int, str], sources: Sequence[Source], peers: Peers, target: Target, what: str
) -> tuple[Source, list[str]]:
    """Brings a part from the first source that gives it; also gives what the ones before answered. CheckpointCorrupt: none
    has it whole; OSError: it cannot be written here, or one could not be asked, or read it.
    """
    failures: list[str] = []
    refused: OSError | None = None
    unasked: Exception | None = None  # why one that may have it could not be asked
    for source in sources:
        key = Key(*save, source.writer)
        try:
            if source.process == peers.processes.index:
                bring(key, pieces_of_files(peers.served(key)), target)
            else:
                with contextlib.closing(peers.connect(source.process)) as connection:
                    bring(key, functools.partial(connection.pieces, key), target)
        except (CheckpointError, OSError) as error:
            failures.append(f"from process {source.process}: {error}")
            if isinstance(error, ConnectionError):  # nothing of this machine
                if not isinstance(error, Lacking):
                    unasked = error
                continue
            if isinstance(error, OSError) and (cause := cause_of(error)):
                refused = error
                if cause == "room":  # nor would there be for what another source gives
                    break
        else:
            return source, failures
    text = f"{what}: {'; '.join(failures)}"
    if refused is not None:
        raise OSError(refused.errno, text) from refused
    if unasked is not None:
        raise OSError(errno.EHOSTUNREACH, text) from unasked
    raise CheckpointCorrupt(text)


def _bounded(pieces: Iterator[bytes], size_bytes: int, name: str) -> Iterator[bytes]:
    """The pieces; raises CheckpointCorrupt as soon as they are more than the file can have."""
    left = size_bytes
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise CheckpointCorrupt(f"{name} has more than {size_bytes} bytes", file=name)
        yield piece


def pieces_of_files(paths: Sequence[str] | None) -> Pieces:
    """The files of a part in a directory of this host; None: it is gone."""
    if paths is None:
        raise Lacking("it was here and is gone")

    def pieces(position: int) -> Iterator[bytes]:
        with open_plain(paths[position]) as file:
            while piece := file.read(BLOCK_BYTES):
                yield piece

    return pieces
