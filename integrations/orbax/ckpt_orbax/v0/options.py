"""Options of saves; fields that would change what is stored are refused where they are used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckpt_orbax.v1 import options as named
from ckpt_orbax.v1.options import (
    AtomicityMode,
    AtomicityOptions,
    FileOptions,
    MultiprocessingOptions,
)


@dataclass(kw_only=True)
class AsyncOptions(named.AsyncOptions):
    """Asynchronous saves.

    Attributes:
        timeout_secs: how long processes wait for each other.
        barrier_sync_fn: refused, except None.
        post_finalization_callback: called after each save, in another thread.
        create_directories_asynchronously: of no effect.
    """

    barrier_sync_fn: Callable[..., Any] | None = None


@dataclass
class MemoryLimitOptions:
    """Limits of memory, of no effect: ckpt chooses how much it copies at once."""

    max_transfer_concurrent_gb: int | None = None


__all__ = [
    "AsyncOptions",
    "AtomicityMode",
    "AtomicityOptions",
    "FileOptions",
    "MemoryLimitOptions",
    "MultiprocessingOptions",
]
