"""Brings a part from another place to this process's directory, and verifies every byte of it.

The copy is equal to the original to the byte, ckpt.json included, and appears by the same commit as a save.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ckpt_core._directory import Backend, write_pieces
from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._exchange import BLOCK_BYTES, Key, open_plain
from ckpt_core._format.part import contains
from ckpt_core._format.record import RECORD_FILE, Record, load_record
from ckpt_core._format.untrusted import most_bytes
from ckpt_core._options import MIB
from ckpt_core._run.tiers.parts import Source
from ckpt_core._run.tiers.peers import Peers
from ckpt_core._run.tiers.places import Offers
from ckpt_core._save.protocol import aborting
from ckpt_core._verify import verify_part

_VERIFY_BYTES = 256 * MIB
"""Maximum host memory in which a part is verified, if no chunk is larger."""
Pieces = Callable[[int], Iterator[bytes]]
"""The content of a file of a part, block by block: 0 is ckpt.json, then come its files by name."""


class Target(NamedTuple):
    """Where a part is brought.

    Attributes:
        path: of the step's directory.
        backend: writes it.
        durable: whether it is fsynced.
        may_commit: called right before the commit; raises if the part is not wanted there any more.
    """

    path: str
    backend: Backend
    durable: bool
    may_commit: Callable[[], None]


def bring(key: Key, pieces: Pieces, target: Target) -> Record:
    """Brings a part; returns its record. If anything is wrong with it, nothing remains of it.

    Raises:
        CheckpointCorrupt: it is damaged, or another one.
        ConnectionError: it could not be fetched.
        OSError: it could not be read or written.
    """
    head = b"".join(_bounded(pieces(0), most_bytes(RECORD_FILE), RECORD_FILE))
    record = load_record(head)
    serves = record.part is None or contains(record.part.serves, key.writer)
    if record.token != key.token or not serves:
        raise CheckpointCorrupt(
            f"{RECORD_FILE}: another part than that of process {key.writer} of step {key.step}",
            file=RECORD_FILE,
        )
    attempt = target.backend.begin(
        target.path, overwrite=True, durable=target.durable, token=key.token
    )
    with aborting(attempt.abort):
        for position, (name, entry) in enumerate(sorted(record.files.items()), 1):
            content = _bounded(pieces(position), entry.size_bytes, name)
            write_pieces(os.path.join(attempt.path, name), content, durable=target.durable)
        attempt.make_durable(RECORD_FILE, head)
        report = verify_part(attempt.path, _VERIFY_BYTES)
        if not report.ok:
            problem = report.problems[0]
            raise CheckpointCorrupt(str(problem), file=problem.file, leaf=problem.leaf)
        target.may_commit()
        attempt.commit()
    return record


def bring_from(
    source: Source,
    key: Key,
    peers: Peers,
    offers: Offers,
    target: Target,
    may_go_on: Callable[[], None] = lambda: None,
) -> Record:
    """Brings a part from another process, or from another folder of this one; raises as ``bring``.

    Args:
        source, key: where, and what.
        peers: the processes of the run.
        offers: what this process sees.
        target: where to.
        may_go_on: called after each block; raises if it has become too late.
    """

    def watched(pieces: Pieces) -> Pieces:
        def some(position: int) -> Iterator[bytes]:
            for piece in pieces(position):
                may_go_on()
                yield piece

        return some

    if source.process == peers.index:
        offered = offers.find(key)
        if offered is None:
            raise ConnectionError("it was here and is gone")
        return bring(key, watched(pieces_of_directory(offered.path, offered.names)), target)
    connection = peers.connect(source.process)
    try:
        return bring(key, watched(lambda position: connection.pieces(*key, position)), target)
    finally:
        connection.close()


def _bounded(pieces: Iterator[bytes], size_bytes: int, name: str) -> Iterator[bytes]:
    """The pieces; raises CheckpointCorrupt as soon as they are more than the file can have."""
    left = size_bytes
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise CheckpointCorrupt(f"{name} has more than {size_bytes} bytes", file=name)
        yield piece


def pieces_of_directory(path: str, names: tuple[str, ...]) -> Pieces:
    """The files of a part in a directory of this host."""

    def pieces(position: int) -> Iterator[bytes]:
        with open_plain(os.path.join(path, names[position])) as file:
            while piece := file.read(BLOCK_BYTES):
                yield piece

    return pieces
