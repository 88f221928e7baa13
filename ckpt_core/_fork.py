"""Whether this process may use TensorStore: not in a forked child, where its first use aborts."""

from __future__ import annotations

import os

from ckpt_core._errors import ForkedProcess

HOME_PID = os.getpid()
"""The process that imported ckpt; any other id means a forked child."""


def forked() -> ForkedProcess:
    """The error for any use in a child that ``os.fork`` made after ckpt was imported."""
    return ForkedProcess(
        f"process {os.getpid()} was forked from {HOME_PID}, which had imported ckpt_core; "
        "TensorStore and JAX do not survive a fork. Save and load in the parent, or start "
        "the child with multiprocessing's 'spawn' or 'forkserver' method."
    )
