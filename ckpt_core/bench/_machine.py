"""Where a benchmark runs: the facts of the machine; its disk, page cache and garbage collector at rest."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from ckpt_core._directory import file_system_of
from ckpt_core.bench._measure import Skipped

MIB = 1 << 20
_PACKAGES = (
    *("jax", "jaxlib", "numpy", "tensorstore"),
    *("orbax-checkpoint", "torch", "safetensors", "equinox"),
)


def describe_environment(output: Path) -> dict[str, Any]:
    """Facts that the measurements depend on; initializes jax's backend."""
    import jax

    import ckpt_core

    devices, versions = jax.devices(), {"ckpt": ckpt_core.__version__}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    asked, revision = ["git", "rev-parse", "HEAD"], None
    with suppress(OSError, subprocess.SubprocessError):  # no git, no revision, no answer
        quiet = subprocess.DEVNULL
        revision = subprocess.check_output(asked, stderr=quiet, text=True, timeout=10).strip()
    return {
        "git_sha": revision,
        "backend": jax.default_backend(),
        "device_kind": devices[0].device_kind,
        "devices": len(devices),
        "processes": jax.process_count(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "file_system": file_system_of(str(output)) or "unknown",
        "versions": versions,
    }


@contextmanager
def settle() -> Generator[None]:
    """Syncs the disk and collects garbage before the block; disables garbage collection in it.

    Measure inside: ``with bench.settle(), metrics.measure("save"): ...``. Otherwise the first fsync
    in the block would also write earlier data that the kernel still holds.
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
    """Writes and deletes a file of this size: on a virtual machine that returns memory to its host, the first use of each page is
    slow, and else the first save of a run would pay for all of them.
    """
    block = bytes(MIB)
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        for _ in range(size_bytes // MIB + 1):
            file.write(block)


def drop_page_cache(path: Path) -> None:
    """Drops files from the page cache, so that the next read comes from the disk; ``Skipped`` if the system cannot."""
    if not hasattr(os, "posix_fadvise"):
        raise Skipped("the page cache cannot be dropped on this system")
    os.sync()  # dirty pages cannot be dropped
    for found in [path, *path.rglob("*")]:
        if found.is_file():
            with found.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fsync_all(path: Path) -> None:
    """Fsyncs every file and directory below a path, and the parent, for libraries that do not."""
    for entry in [*reversed([path, *path.rglob("*")]), path.parent]:
        descriptor = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
