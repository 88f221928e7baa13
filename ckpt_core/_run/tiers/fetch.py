"""Brings parts from other places to this process's directory, and verifies every byte of them.

A copy is equal to the original to the byte, ckpt.json included, and appears by the same commit as a save.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckpt_core._directory import Backend, write_pieces
from ckpt_core._errors import CheckpointCorrupt, CheckpointError
from ckpt_core._exchange import BLOCK_BYTES, Key, Lacking, open_plain
from ckpt_core._format.part import contains
from ckpt_core._format.record import RECORD_FILE, Record, load_record
from ckpt_core._format.untrusted import most_bytes
from ckpt_core._operation import logger
from ckpt_core._options import MIB, Options
from ckpt_core._run.tiers.judge import Source, StepHere
from ckpt_core._run.tiers.peers import Peers
from ckpt_core._run.tiers.verdict import State, cause_of
from ckpt_core._verify import verify

_VERIFY_BYTES = 256 * MIB
"""Maximum host memory in which a part is verified, if no chunk is larger."""
Pieces = Callable[[int], Iterator[bytes]]
"""The content of a file of a part, block by block: 0 is ckpt.json, then come its files by name."""


class Target(NamedTuple):
    """Where a part is brought."""

    path: str  # of the step's directory
    backend: Backend
    durable: bool  # whether it is fsynced
    # Called right before the commit; raises if the part is not wanted there any more.
    may_commit: Callable[[], None]


def bring(key: Key, pieces: Pieces, target: Target) -> Record:
    """Brings a part and verifies it; returns its record. If anything is wrong, nothing remains of it. Raises
    CheckpointCorrupt if it is damaged, or another one; ConnectionError if it could not be fetched.
    """
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
            write_pieces(os.path.join(attempt.path, name), content, durable=target.durable)
        attempt.make_durable(RECORD_FILE, head)
        report = verify(attempt.path, options=Options(max_host_bytes=_VERIFY_BYTES))
        if not report.ok:
            problem = report.problems[0]
            raise CheckpointCorrupt(str(problem), file=problem.file, leaf=problem.leaf)
        target.may_commit()
        attempt.commit()
    return record


class Fetched(NamedTuple):
    """A part that was brought here."""

    record: Record
    source: Source
    failures: list[str]  # what the sources before answered


def fetch_first(
    save: tuple[int, str], sources: Sequence[Source], peers: Peers, target: Target, what: str
) -> Fetched:
    """Brings a part from the first of its sources that gives it, another process or another folder of this one.
    CheckpointCorrupt says what each answered, if none has the part whole. OSError: it could not be written here, or one
    source could not be asked or could not read it.
    """
    failures: list[str] = []
    refused: OSError | None = None
    unasked: Exception | None = None  # why one that may have it could not be asked
    for source in sources:
        try:
            record = _bring_from(source, Key(*save, source.writer), peers, target)
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
            return Fetched(record, source, failures)
    text = f"{what}: {'; '.join(failures)}"
    if refused is not None:
        raise OSError(refused.errno, text) from refused
    if unasked is not None:
        raise OSError(errno.EHOSTUNREACH, text) from unasked
    raise CheckpointCorrupt(text)


def _bring_from(source: Source, key: Key, peers: Peers, target: Target) -> Record:
    if source.process == peers.index:
        offered = peers.offers.find(key)
        if offered is None:
            raise Lacking("it was here and is gone")
        return bring(key, pieces_of_directory(offered.path, offered.names), target)
    connection = peers.connect(source.process)
    try:
        return bring(key, lambda position: connection.pieces(*key, position), target)
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


class Mender:
    """Gets the parts that this process lacks or that are damaged here, from wherever they are whole. Each process does so by
    itself, when it opens the step: all have agreed on the sources before, in ``judge.judge``, and the others only serve
    files.
    """

    def __init__(self, peers: Peers, target: Callable[[int], Target]) -> None:
        self._peers = peers
        self._target = target
        self._missing: dict[int, StepHere] = {}
        self._damaged: dict[tuple[int, str], str] = {}
        self._unread: dict[tuple[int, str], str] = {}
        self._lock = threading.Lock()

    def note(self, steps: Mapping[int, StepHere]) -> None:
        """Takes over what all agreed on."""
        self._missing = {step: whole for step, whole in steps.items() if whole.sources}

    def state(self, step: int, token: str | None, path: str, max_host_bytes: int) -> State:
        """Whether this process's own part is as it was saved. If not, it is left out: one that could not be read until
        ``try_again``, a damaged one until another copy replaces it.
        """
        found = self._damaged
        try:
            report = verify(path, options=Options(max_host_bytes=max_host_bytes))
            problem = "" if report.ok else str(report.problems[0])
        except Exception as error:  # whatever it is: the other processes wait for the answer
            found, problem = self._unread, str(error) or type(error).__name__
        if problem and token is not None:
            found[step, token] = problem
        if not problem:
            return "whole"
        return "damaged" if found is self._damaged else "unread"

    def excludes(self, step: int, token: str) -> bool:
        """Whether this process's own part of a save was found damaged, or could not be read."""
        return (step, token) in self._damaged or (step, token) in self._unread

    def why_unread(self, step: int, token: str) -> str:
        """Why this process's own part could not be read; empty if that was not tried, or worked."""
        return self._unread.get((step, token), "")

    def try_again(self) -> None:
        """What could not be read may be readable now."""
        self._unread.clear()

    def mend(self, step: int) -> None:
        """Gets this process's part of a whole step, if it lacks it; blocks meanwhile. Raises CheckpointNotFound if it may not
        be brought here, else what ``fetch_first`` does.
        """
        if step not in self._missing:
            return
        with self._lock:
            if step not in self._missing:
                return
            whole = self._missing[step]
            token, save = whole.token, (step, whole.token)
            mine, target = self._peers.index, self._target(step)
            lost = f"the part of process {mine} of step {step} is lost or damaged in its local directory, and could not be fetched"
            fetched = fetch_first(save, whole.sources, self._peers, target, lost)
            for writer in (fetched.source.writer, mine):  # its partner asks for the latter
                self._peers.offers.put(Key(*save, writer), target.path)
            self._log(step, token, fetched, target.path)
            del self._missing[step]

    def _log(self, step: int, token: str, fetched: Fetched, path: str) -> None:
        damage, unread = (found.pop((step, token), "") for found in (self._damaged, self._unread))
        lost = f"was damaged ({damage})" if damage else "was missing"
        lost = f"could not be read ({unread})" if unread else lost
        where = "another folder of this host"
        if fetched.source.process != self._peers.index:
            where = f"process {fetched.source.process}"
        logger.warning(
            "%s: this process's part of the step %s; it was fetched from %s and verified%s",
            path,
            lost,
            where,
            f", after failures {'; '.join(fetched.failures)}" if fetched.failures else "",
        )
