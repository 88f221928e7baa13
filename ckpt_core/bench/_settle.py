"""Keeping what is not measured out of what is."""

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
    """Nothing is left to write or to collect from before the block, and nothing is collected in it.

    Measure inside: ``with bench.settle(), metrics.measure("save"): ...``. Earlier writes that the
    kernel still holds would otherwise be paid for by the next fsync.
    """
    os.sync()
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def warm_free_memory(directory: Path, size_bytes: int) -> None:
    """Touches the free memory that files of this size will go into, by writing and deleting one.

    A virtual machine that returns memory to its host pays for every page that it touches again;
    whoever saves first would pay for all.
    """
    block = bytes(MIB)
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        for _ in range(size_bytes // MIB + 1):
            file.write(block)


def drop_page_cache(path: Path) -> None:
    """Makes the next read of these files come from the disk, as far as the kernel grants it."""
    os.sync()  # dirty pages cannot be dropped
    for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def fsync_all(path: Path) -> None:
    """Makes what a library wrote without fsync durable: every file, every directory, the parent."""
    found = [path, *path.rglob("*")] if path.is_dir() else [path]
    for entry in [*reversed(found), path.parent]:
        descriptor = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def inventory(path: Path) -> tuple[int, int]:
    """Bytes and number of the files below a directory."""
    sizes = [entry.lstat().st_size for entry in path.rglob("*") if entry.is_file()]
    return sum(sizes), len(sizes)
