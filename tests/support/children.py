"""Interpreters that tests start."""

from __future__ import annotations

import os
import sys


def environment(**more: str) -> dict[str, str]:
    """The environment of a child that imports what this process can import."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | more


def with_devices(count: int) -> dict[str, str]:
    """The same for a child with so many devices of the CPU."""
    return environment(XLA_FLAGS=f"--xla_force_host_platform_device_count={count}")
