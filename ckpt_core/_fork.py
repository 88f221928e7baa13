"""Detects forked children in which the first use of TensorStore would abort the process, or wait for ever."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable

from ckpt_core._errors import ForkedProcess


class _Home:
    """The process that uses ckpt; in a forked child, os.getpid() differs."""

    pid = os.getpid()  # of the process that imported ckpt, or of a child forked before any use
    is_used = False  # by a save, a load or a Checkpointer; or somebody else uses TensorStore


HOME = _Home()


def around_forks(**calls: Callable[[], object]) -> None:
    """``os.register_at_fork``; nothing on Windows, where no process is forked."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**calls)


def forked() -> ForkedProcess:
    """The error to raise in a child that was forked from a process that had used what does not survive it."""
    return ForkedProcess(
        f"process {os.getpid()} was forked from {HOME.pid}, which had used ckpt_core, jax or TensorStore; "
        "they do not survive a fork. Save and load in the parent, or start the child with "
        "multiprocessing's 'spawn' method, or with 'forkserver' if nothing that is preloaded uses them."
    )


def _look_for_threads() -> None:
    """Before a fork: somebody else may have used TensorStore, whose threads the child would wait for."""
    if HOME.is_used or "tensorstore" not in sys.modules:
        return
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:
        threads, HOME.is_used = list[str](), True  # a system that does not say it
    for thread in threads:
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
            HOME.is_used |= file.read().startswith("ts_")


def _become_home() -> None:
    """In a child: a fork server often has imported what the program imports, and used nothing of it."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    # Read without jax's lock, which a thread may have held at the fork. A jax that hides it counts as used.
    if not HOME.is_used and not (bridge and getattr(bridge, "_backends", True)):
        HOME.pid = os.getpid()


around_forks(before=_look_for_threads, after_in_child=_become_home)
