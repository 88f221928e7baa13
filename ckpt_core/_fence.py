"""Who may commit to a directory of steps: the writer that came last.

A job that was rescheduled must not wait for the old one to be found dead. The newcomer leaves its
token in ``.ckpt-owner`` and goes on at once; the old writer finds the token at its next commit and
stops, so that two runs never weave their steps into one directory.
"""

from __future__ import annotations

import secrets

from ckpt_core._directory import Form
from ckpt_core._errors import CheckpointError
from ckpt_core._results import logger

OWNER_FILE = ".ckpt-owner"


class Fence:
    """One writer's claim on a directory."""

    def __init__(self, directory: str, form: Form) -> None:
        self._directory = directory
        self._form = form
        self._token = secrets.token_hex(16).encode()
        self._taken = False

    def take(self) -> None:
        """Claims the directory, once; whoever had it can no longer commit."""
        if self._taken:
            return
        if self._form.read(self._directory, OWNER_FILE) is not None:
            logger.info("%s: taken over from an earlier writer", self._directory)
        self._form.put(self._directory, OWNER_FILE, self._token)
        self._taken = True

    def check(self) -> None:
        """Last before a commit.

        Raises:
            CheckpointError: another writer has claimed the directory since.
        """
        if self._form.read(self._directory, OWNER_FILE) != self._token:
            raise CheckpointError(
                f"{self._directory}: another Checkpointer has begun to save here since, so this one may no "
                "longer: its step was not committed. Stop this run, or give each run its own directory"
            )
