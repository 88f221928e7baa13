"""What a Publisher and a Follower have in common: the directory, and who else runs."""

from __future__ import annotations

import os
import threading

from ckpt_core._directory import resolve
from ckpt_core._fork import HOME, forked
from ckpt_core._options import Options, checked_options
from ckpt_core._processes import Round, this_run
from ckpt_core._publish.chain import CHAIN_FILE, MOST_BYTES, Chain, parse_chain
from ckpt_core._storage import backend_of

PUBLISHED = "published"
"""In the metadata of an anchor: "all", or "part" if ``only=`` left leaves out, which followers keep as they are."""


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
        self._turn = threading.RLock()  # what several threads call takes turns

    def _round(self, call: str, more_secs: float = 0.0) -> Round:
        limit_secs = self._options.timeout_secs + more_secs
        return self._processes.round(call, limit_secs, self.directory)

    def _chain_data(self) -> bytes | None:
        return self._backend.read(self.directory, CHAIN_FILE, MOST_BYTES)

    def _chain_of_directory(self) -> Chain | None:
        return parse_chain(self._chain_data(), self.directory)
