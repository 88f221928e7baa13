"""Interpreters that tests start."""

import os
import sys
from pathlib import Path


def environment(**more: str) -> dict[str, str]:
    """The environment of a child that imports what this process can import."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | more


def masked(platform: str) -> dict[str, str]:
    """What to add to the environment of a child from which another system's lacks are taken: "portable" or "windows"."""
    folder = str(Path(__file__).parent / "masked")
    return {
        "CKPT_TEST_PLATFORM": platform,
        "PYTHONPATH": os.pathsep.join([folder, *filter(None, sys.path)]),
    }


def with_devices(count: int) -> dict[str, str]:
    """The same for a child with so many devices of the CPU."""
    return environment(XLA_FLAGS=f"--xla_force_host_platform_device_count={count}")


def compiling_once(cache: Path) -> dict[str, str]:
    """What to add to the environment of children that compile the same programs one after the other."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
