"""Options of saves; fields that would change what is stored are refused where they are used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from ckpt_orbax._refused import not_offered
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


def timeout_of(options: AsyncOptions | None) -> dict[str, float]:
    """What the options change of ``ckpt_core.Options``."""
    if options is None:
        return {}
    if options.barrier_sync_fn is not None:
        raise not_offered(
            "AsyncOptions(barrier_sync_fn=)",
            "ckpt's processes agree by their own barriers, which name who is missing",
            "leave it at None",
        )
    if options.timeout_secs == AsyncOptions.timeout_secs:
        return {}
    return {"timeout_secs": float(options.timeout_secs)}


def refuse_unsupported(multiprocessing: MultiprocessingOptions | None) -> None:
    """Raises NotOffered for options that ckpt cannot honour."""
    if multiprocessing is not None and multiprocessing.primary_host != 0:
        raise not_offered(
            f"MultiprocessingOptions(primary_host={multiprocessing.primary_host!r})",
            "process 0 leads",
            "for disks of each host, ckpt_core.Checkpointer(local_directory=)",
        )
    active = None if multiprocessing is None else multiprocessing.active_processes
    if active is not None and len(active) != jax.process_count():
        raise not_offered(
            "MultiprocessingOptions(active_processes=)",
            "all processes take part in a checkpoint",
            "save with all of them",
        )


__all__ = [
    "AsyncOptions",
    "AtomicityMode",
    "AtomicityOptions",
    "FileOptions",
    "MemoryLimitOptions",
    "MultiprocessingOptions",
]
