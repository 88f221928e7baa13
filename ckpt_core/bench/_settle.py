"""Prepares disk, page cache and garbage collector, so that earlier work does not disturb a measurement."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

MIB = 1 << 20


@contextmanager
def settle() -> Generator[None, None, None]:
    """Syncs the disk and collects garbage before the block; disables garbage collection in it.

    Measure inside: ``with bench.settle(), metrics.measure("save"): ...``. Otherwise the first fsync
    in the block would also write earlier data that the kernel still holds.
    """
    _sync()
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def warm_free_memory(directory: Path, size_bytes: int) -> None:
    """Writes and deletes a file of this size, so that the kernel has free pages for the next one. On a virtual machine
    that returns memory to its host, every new page is slow at first use; without this, the first save of a run would pay
    for all of them.
    """
    block = bytes(MIB)
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        for _ in range(size_bytes // MIB + 1):
            file.write(block)


def can_drop_page_cache() -> bool:
    """Whether the system can be asked to read from the disk what it has in memory."""
    return hasattr(os, "posix_fadvise")


def _sync() -> None:
    if hasattr(os, "sync"):  # not on Windows
        os.sync()


def drop_page_cache(path: Path) -> None:
    """Asks the kernel to drop these files from the page cache, so that the next read comes from the disk; see ``can_drop_page_cache``."""
    _sync()  # dirty pages cannot be dropped
    if not can_drop_page_cache():
        return
    for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def fsync_all(path: Path) -> None:
    """Fsyncs every file and directory below a path, and the parent, for libraries that do not."""
    found = [path, *path.rglob("*")] if path.is_dir() else [path]
    for entry in [*reversed(found), path.parent]:
        descriptor = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def inventory(path: Path) -> tuple[int, int]:
    """Total bytes and number of the files below a directory."""
    sizes = [entry.lstat().st_size for entry in path.rglob("*") if entry.is_file()]
    return sum(sizes), len(sizes)
