"""Lease: only the writer that claimed a directory of steps last may commit to it.

A rescheduled job cannot wait until the old one is known to be dead: it puts its token into ``.ckpt-owner`` and continues
at once. The old writer reads the file before its next commit, finds a foreign token and raises. A writer that lives holds
a lock on the file, so a new one can warn that it took over from a live one.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time

from ckpt_core._directory import Backend, Claim, introduction, is_dead, is_locked, this_owner
from ckpt_core._errors import CheckpointCorrupt, CheckpointError
from ckpt_core._format.untrusted import SHORT_BYTES
from ckpt_core._operation import logger
from ckpt_core._platform import of_tasks

OWNER_FILE = ".ckpt-owner"
_TRIES = 6
_PAUSE_SECS = 0.02


class Lease:
    """One writer's claim on a directory. The owner file of a local one names the run's ``persistent`` one."""

    def __init__(self, directory: str, backend: Backend, persistent: str = "") -> None:
        self._directory = directory
        self._persistent = f"{json.dumps(persistent)}\n" if persistent else ""
        self._backend = backend
        self._token = secrets.token_hex(16)
        self._claim: Claim | None = None
        self._closed = False

    def claim(self) -> None:
        """Claims the directory, once, and not after ``close``; the previous owner can no longer commit."""
        if self._claim is not None or self._closed:
            return
        try:
            before = self._backend.read(self._directory, OWNER_FILE, SHORT_BYTES)
        except CheckpointCorrupt:  # only used in the warning below; the claim replaces the file
            before = None
        text = f"{self._token} {introduction()}\n{this_owner()}\n{self._persistent}"
        try:
            self._claim = self._backend.claim(self._directory, OWNER_FILE, text.encode())
        except OSError as error:
            error.add_note(
                f"ckpt: {self._directory} could not be claimed for this run, which changes nothing there without: let this "
                "user write there, or pass read_only=True to a Checkpointer that only restores"
            )
            raise
        if self._claim.contested:
            logger.warning(
                "%s: taken over from %s, which is %s: its next save here will fail%s",
                self._directory,
                _owner_text(before),
                "an earlier Checkpointer of this process, not closed"
                if this_owner().encode() in (before or b"").splitlines()
                else "alive",
                of_tasks(),
            )

    @property
    def claimed(self) -> bool:
        """Whether this writer has claimed the directory."""
        return self._claim is not None

    def is_of_another(self) -> bool:
        """Whether another writer has claimed the directory, and not released it: it may go on."""
        if self._claim is not None:
            return False
        try:
            return self._backend.read(self._directory, OWNER_FILE, SHORT_BYTES) is not None
        except CheckpointCorrupt:
            return True

    def check(self) -> None:
        """Raises CheckpointError if this writer no longer owns the directory; called right before a commit."""
        for _ in range(_TRIES):
            now = self._backend.read(self._directory, OWNER_FILE, SHORT_BYTES)
            if now is not None:
                break
            # another writer, who is closing, may have it in hand for a moment: see ``PosixBackend.release``
            time.sleep(_PAUSE_SECS)
        else:
            raise CheckpointError(
                f"{self._directory}: its {OWNER_FILE} is gone, so this Checkpointer may no longer change what is here, "
                "and its change was not committed: the directory was deleted or emptied, or another Checkpointer (one that "
                "was closed since) took this directory over. Stop this run, and start it again if nobody else trains here"
            )
        if not now.startswith(self._token.encode()):
            raise CheckpointError(
                f"{self._directory}: another Checkpointer ({_owner_text(now)}) took this directory over, so this "
                "one may no longer change what is here: its change was not committed. Stop this run, or give each "
                f"run its own directory{of_tasks()}"
            )

    def check_if_claimed(self) -> None:
        """The same for who may do without a claim, as a tool or a deletion."""
        if self._claim is not None:
            self.check()

    def release(self) -> None:
        """Like ``close``; in a file system it also deletes its owner file, and an older writer is refused as before."""
        if self._claim is not None and not self._closed:
            with contextlib.suppress(OSError, CheckpointError):
                self._backend.release(self._directory, OWNER_FILE, self._token.encode())
        self.close()

    def close(self) -> None:
        """Releases the claim, so that the next writer does not warn of a live one."""
        self._closed = True
        if self._claim is not None:
            self._claim.close()


def is_abandoned(directory: str, backend: Backend, locks_work: bool) -> bool:
    """Whether the last owner of a local directory is dead, or has released it. A lock proves that it lives; a missing one
    proves something only of owners on this host, and if this process sees its own lock (``locks_work``).
    """
    if is_locked(f"{directory}/{OWNER_FILE}"):
        return False
    lines = _owner_lines(directory, backend)
    owner = lines[1] if len(lines) > 1 else ""
    return locks_work if owner == this_owner() else is_dead(owner, directory)


def persistent_of(directory: str, backend: Backend) -> str:
    """The persistent directory of the run that claimed a local directory last; empty if its owner file names none."""
    lines = _owner_lines(directory, backend)
    try:
        named: object = json.loads(lines[2])
    except (IndexError, ValueError):
        return ""
    return named if isinstance(named, str) else ""


def _owner_lines(directory: str, backend: Backend) -> list[str]:
    content = backend.read(directory, OWNER_FILE, SHORT_BYTES) or b""
    return content.decode(errors="replace").splitlines()


def _owner_text(content: bytes | None) -> str:
    """Process, host and start time that an owner file names, for messages."""
    if content is None:
        return "an unknown one"
    first = content.decode(errors="replace").partition("\n")[0]
    return first.strip().partition(" ")[2] or "an unknown one"
