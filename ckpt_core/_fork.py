"""Whether this process may use TensorStore: not in a forked child, where its first use aborts."""

from __future__ import annotations

import os

from ckpt_core._errors import ForkedProcess

_HOME_PID = os.getpid()


def refuse_in_forked_child() -> None:
    """Raise ForkedProcess in a child made by ``os.fork`` after ckpt was imported."""
    if os.getpid() != _HOME_PID:
        raise ForkedProcess(
            f"process {os.getpid()} was forked from {_HOME_PID}, which had imported ckpt_core; "
            "TensorStore and JAX do not survive a fork. Save and load in the parent, or start "
            "the child with multiprocessing's 'spawn' or 'forkserver' method."
        )
