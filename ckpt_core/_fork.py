"""Detects forked children, in which the first use of TensorStore would abort the process."""

from __future__ import annotations

import os
from collections.abc import Callable

from ckpt_core._errors import ForkedProcess

HOME_PID = os.getpid()
"""Id of the process that imported ckpt; in a forked child, os.getpid() differs."""


def around_forks(
    *,
    before: Callable[[], object] | None = None,
    after_in_parent: Callable[[], object] | None = None,
    after_in_child: Callable[[], object] | None = None,
) -> None:
    """``os.register_at_fork``; nothing on Windows, where no process is forked."""
    if hasattr(os, "register_at_fork"):
        chosen = {
            "before": before,
            "after_in_parent": after_in_parent,
            "after_in_child": after_in_child,
        }
        os.register_at_fork(**{name: call for name, call in chosen.items() if call is not None})


def forked() -> ForkedProcess:
    """The error to raise in a child that was forked after ckpt was imported."""
    return ForkedProcess(
        f"process {os.getpid()} was forked from {HOME_PID}, which had imported ckpt_core; "
        "TensorStore and JAX do not survive a fork. Save and load in the parent, or start "
        "the child with multiprocessing's 'spawn' or 'forkserver' method."
    )
