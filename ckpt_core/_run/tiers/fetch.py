"""Brings parts from other places to this process's directory, and verifies every byte of them.

A copy is equal to the original to the byte, ckpt.json included, and appears by the same commit as a save.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ckpt_core._directory import write_pieces
from ckpt_core._errors import CheckpointCorrupt, CheckpointError
from ckpt_core._exchange import BLOCK_BYTES, Key, Lacking, open_plain
from ckpt_core._format.part import contains
from ckpt_core._format.record import RECORD_FILE, load_record
from ckpt_core._format.untrusted import most_bytes
from ckpt_core._operation import logger
from ckpt_core._options import MIB
from ckpt_core._run.tiers.folders import Folders, Target
from ckpt_core._run.tiers.judge import CopyState, Source, cause_of
from ckpt_core._run.tiers.peers import Peers
from ckpt_core._verify import verify_part

_VERIFY_BYTES = 256 * MIB
"""Maximum host memory in which a part is verified, if no chunk is larger."""
_LOOK_SECS = 0.2
_STALLED_SECS = 10.0
"""``finish`` gives up if no partner is connected for this time."""
Pieces = Callable[[int], Iterator[bytes]]
"""The content of a file of a part, block by block: 0 is ckpt.json, then come its files by name."""


def bring(key: Key, pieces: Pieces, target: Target) -> None:
    """Brings a part and verifies it. If anything is wrong, nothing remains of it. Raises
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
        report = verify_part(attempt.path, _VERIFY_BYTES)
        if not report.ok:
            problem = report.problems[0]
            raise CheckpointCorrupt(str(problem), file=problem.file, leaf=problem.leaf)
        target.may_commit()
        attempt.commit()


def fetch_first(
    save: tuple[int, str], sources: Sequence[Source], peers: Peers, target: Target, what: str
) -> tuple[Source, list[str]]:
    """Brings a part from the first of its sources that gives it, another process or another folder of this one; also
    returns what the sources before answered. CheckpointCorrupt says what each answered, if none has the part whole. OSError: it could not be written here, or one
    source could not be asked or could not read it.
    """
    failures: list[str] = []
    refused: OSError | None = None
    unasked: Exception | None = None  # why one that may have it could not be asked
    for source in sources:
        try:
            _bring_from(source, Key(*save, source.writer), peers, target)
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


def _bring_from(source: Source, key: Key, peers: Peers, target: Target) -> None:
    if source.process == peers.index:
        paths = peers.served(key)
        if paths is None:
            raise Lacking("it was here and is gone")
        bring(key, pieces_of_files(paths), target)
        return
    with contextlib.closing(peers.connect(source.process)) as connection:
        bring(key, lambda position: connection.pieces(key, position), target)


def _bounded(pieces: Iterator[bytes], size_bytes: int, name: str) -> Iterator[bytes]:
    """The pieces; raises CheckpointCorrupt as soon as they are more than the file can have."""
    left = size_bytes
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise CheckpointCorrupt(f"{name} has more than {size_bytes} bytes", file=name)
        yield piece


def pieces_of_files(paths: Sequence[str]) -> Pieces:
    """The files of a part in a directory of this host."""

    def pieces(position: int) -> Iterator[bytes]:
        with open_plain(paths[position]) as file:
            while piece := file.read(BLOCK_BYTES):
                yield piece

    return pieces


def fetch_lost(
    step: int, token: str, sources: Sequence[Source], peers: Peers, folders: Folders
) -> None:
    """Gets this process's part of a whole step, which it lacks or which is damaged here, from wherever it is whole; blocks
    meanwhile. All have agreed on the sources before, in ``judge.judge``, and the others only serve files. Raises
    CheckpointNotFound if it may not be brought here, else what ``fetch_first`` does.
    """
    mine, target = peers.index, folders.own_target(step)
    lost = f"the part of process {mine} of step {step} is lost or damaged in its local directory, and could not be fetched"
    source, failures = fetch_first((step, token), sources, peers, target, lost)
    state, why = folders.useless.pop((step, token), ("", ""))
    was = {"damaged": f"was damaged ({why})", "unread": f"could not be read ({why})"}
    there = f"process {source.process}"
    logger.warning(
        "%s: this process's part of the step %s; it was fetched from %s and verified%s",
        target.path,
        was.get(state, "was missing"),
        "another folder of this host" if source.process == mine else there,
        f", after failures {'; '.join(failures)}" if failures else "",
    )


class _Cancelled(CheckpointError):
    """The copy is not wanted any more."""


class Copier:
    """Fetches the parts of the processes that have this one as partner, one step at a time; others can fetch them here."""

    def __init__(self, peers: Peers, folders: Folders) -> None:
        self.sources: Sequence[int] = peers.sources
        self.active = peers.copies
        self._peers = peers
        self._folders = folders
        self._state: CopyState = "idle" if self.active else "off"
        self._now: tuple[int, str] = (-1, "")
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def report(self) -> list[Any]:
        """What ``judge_copies`` gets of this process."""
        state = self._state
        return [state, *self._now] if state in ("busy", "done") else [state, -1, ""]

    @property
    def busy(self) -> bool:
        """Whether copies are being made."""
        return self._state == "busy"

    def copy(self, step: int, token: str) -> None:
        """Begins to copy a step that all processes have committed; ends copying another one."""
        self._cancelled.set()
        self._now, self._state = (step, token), "busy"
        self._cancelled = cancelled = threading.Event()
        try:
            work, given = self._work, (step, token, cancelled)
            self._thread = threading.Thread(None, work, "ckpt-partner", given, daemon=True)
            self._thread.start()
        except RuntimeError:  # the interpreter is about to end
            self._thread, self._state = None, "idle"

    def _work(self, step: int, token: str, cancelled: threading.Event) -> None:
        done = True
        for source in self.sources:
            try:
                self._copy(Key(step, token, source), cancelled)
            except _Cancelled:
                done = False
            except Exception as error:
                done = False
                logger.warning(
                    "step %d: no copy of the part of process %d was made here: %s",
                    step,
                    source,
                    error,
                )
        if not cancelled.is_set():  # else another step may be copied already
            self._state = "done" if done else "idle"

    def _copy(self, key: Key, cancelled: threading.Event) -> None:
        def may_go_on() -> None:
            if cancelled.is_set():
                raise _Cancelled(f"the copy of step {key.step} is not wanted any more")

        connection = self._peers.connect(key.writer)

        def pieces(position: int) -> Iterator[bytes]:
            for piece in connection.pieces(key, position):
                may_go_on()
                yield piece

        try:
            target = self._folders.copy_target(key.writer, key.step, may_go_on)
            if target.token != key.token:  # else it was copied before the last restart
                bring(key, pieces, target)
        finally:
            with contextlib.suppress(ConnectionError):
                connection.close()  # it may have stopped midway through a file
                connection.say_done(key)
            connection.close()

    def cancel(self) -> None:
        """Stops copying; returns when nothing more is committed, or after 20 s."""
        self._cancelled.set()
        if self._thread is not None:
            self._thread.join(2 * _STALLED_SECS)
        if self._state != "off":
            self._state = "idle"

    def finish(self, timeout_secs: float) -> None:
        """Blocks until the copies of the last step are made, here and of this process's part; gives up at the timeout, or
        once no partner is connected any more. What this process fetches ends by itself, if no byte comes.
        """
        server, moved = self._peers.server, time.monotonic()
        deadline = moved + timeout_secs
        while self._state in ("busy", "done") and (now := time.monotonic()) < deadline:
            fetched = server is None or server.was_done(Key(*self._now, self._peers.index))
            moved = now if self.busy else max(moved, 0.0 if server is None else server.last_used)
            if not self.busy and (fetched or now - moved > _STALLED_SECS):
                return
            time.sleep(_LOOK_SECS)

    def close(self, steps: Mapping[int, str], timeout_secs: float) -> None:
        """Finishes; also copies the newest of ``steps`` (with their tokens), if copies of an earlier one were still being
        made then. The timeout is for all of it.
        """
        if not self.active:
            return
        try:
            deadline = time.monotonic() + timeout_secs
            self.finish(timeout_secs)
            newest = max(steps.items(), default=self._now)
            if self._state in ("busy", "done") and newest != self._now:
                self.copy(*newest)
                self.finish(deadline - time.monotonic())
        except BaseException:  # an interrupt: its thread must not go on
            self._cancelled.set()
            raise
        self.cancel()
