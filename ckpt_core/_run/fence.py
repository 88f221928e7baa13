"""Who may commit to a directory of steps: the writer that came last.

A job that was rescheduled must not wait for the old one to be found dead. The newcomer leaves its
token in ``.ckpt-owner`` and goes on at once; the old writer finds the token at its next commit and
stops, so that two runs never weave their steps into one directory. The file is locked while its
writer lives, so that a newcomer can say whether it took over from a living one.
"""

from __future__ import annotations

import secrets

from ckpt_core._directory import Backend, Claim, introduction, is_dead, is_locked, this_owner
from ckpt_core._errors import CheckpointCorrupt, CheckpointError
from ckpt_core._events import logger

OWNER_FILE = ".ckpt-owner"


class Fence:
    """One writer's claim on a directory."""

    def __init__(self, directory: str, backend: Backend) -> None:
        self._directory = directory
        self._backend = backend
        self._token = secrets.token_hex(16)
        self._claim: Claim | None = None

    def take(self) -> None:
        """Claims the directory, once; whoever had it can no longer commit."""
        if self._claim is not None:
            return
        try:
            before = self._backend.read(self._directory, OWNER_FILE)
        except CheckpointCorrupt:  # it only says who was there: what cannot be read is replaced
            before = None
        text = f"{self._token} {introduction()}\n{this_owner()}\n"
        self._claim = self._backend.claim(self._directory, OWNER_FILE, text.encode())
        if self._claim.contested:
            logger.warning(
                "%s: taken over from %s, which is alive: its next save here will fail",
                self._directory,
                _who(before),
            )

    def check(self) -> None:
        """Last before a commit.

        Raises:
            CheckpointError: another writer has claimed the directory since.
        """
        now = self._backend.read(self._directory, OWNER_FILE)
        if now is None or not now.startswith(self._token.encode()):
            raise CheckpointError(
                f"{self._directory}: another Checkpointer ({_who(now)}) took this directory over, so this "
                "one may no longer save here: its step was not committed. Stop this run, or give each "
                "run its own directory"
            )

    def close(self) -> None:
        """Lets the directory go: whoever comes next takes over from nobody."""
        if self._claim is not None:
            self._claim.close()


def is_abandoned(directory: str, backend: Backend, locks_work: bool) -> bool:
    """Whether whoever last claimed a local directory is gone, or has let it go.

    Args:
        locks_work: whether this process sees its own claim as locked. A lock says that somebody lives;
            none says nothing of others: it may not reach from one host to the next.
    """
    if is_locked(f"{directory}/{OWNER_FILE}"):
        return False
    lines = (backend.read(directory, OWNER_FILE) or b"").decode(errors="replace").splitlines()
    owner = lines[1] if len(lines) > 1 else ""  # earlier versions wrote none
    return locks_work if owner == this_owner() else is_dead(owner, directory)


def _who(content: bytes | None) -> str:
    """Process, host and since when, of an owner file."""
    first = "" if content is None else content.decode(errors="replace").partition("\n")[0]
    return first.strip().partition(" ")[2] or "an unknown one"
