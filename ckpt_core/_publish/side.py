"""What a Publisher and a Follower have in common: the directory, who else runs, and calls that take turns."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ckpt_core._directory import resolve
from ckpt_core._fork import HOME, forked
from ckpt_core._options import Options, checked_options
from ckpt_core._processes import Round, this_run
from ckpt_core._publish.chain import CHAIN_FILE, MOST_BYTES
from ckpt_core._run.in_flight import SaveSlot, Turns
from ckpt_core._run.in_flight import in_turn as in_turn
from ckpt_core._run.in_flight import settle_all as settle_all
from ckpt_core._storage import backend_of


class Side:
    """One object of either kind."""

    def __init__(self, directory: str | os.PathLike[str], options: Options | None) -> None:
        HOME.is_used = True
        if os.getpid() != HOME.pid:
            raise forked()
        self._options = checked_options(options)
        self.directory, self._local = resolve(directory)
        self._backend = backend_of(self._local, self._options)
        self._processes = this_run()
        self._slots: Sequence[SaveSlot] = [SaveSlot(self.directory)]
        self._turns = Turns(self.directory, self._slots, self._options.timeout_secs)

    def _round(self, call: str, more_secs: float = 0.0) -> Round:
        limit_secs = self._options.timeout_secs + more_secs
        return self._processes.round(call, limit_secs, self.directory)

    def _chain_data(self) -> bytes | None:
        return self._backend.read(self.directory, CHAIN_FILE, MOST_BYTES)
