"""Describes where a benchmark ran: machine, versions, revision."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from ckpt_core._directory.paths import file_system_of
from ckpt_core.bench._settle import can_drop_page_cache

_PACKAGES = (
    *("jax", "jaxlib", "numpy", "tensorstore"),
    *("orbax-checkpoint", "torch", "safetensors", "equinox"),
)


def describe_environment(output: Path) -> dict[str, Any]:
    """Facts that the measurements depend on; initializes jax's backend."""
    import jax

    import ckpt_core

    devices = jax.devices()
    return {
        "git_sha": git_sha(),
        "backend": jax.default_backend(),
        "device_kind": devices[0].device_kind,
        "devices": len(devices),
        "processes": jax.process_count(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        "machine": platform.machine(),
        "drops_page_cache": can_drop_page_cache(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "file_system": file_system_of(str(output)) or "unknown",
        "versions": {"ckpt": ckpt_core.__version__} | _versions(),
    }


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_sha() -> str | None:
    """The revision of the working directory, or None outside of git."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def machine_of(environment: Mapping[str, Any]) -> str:
    """Devices, processes, CPUs and file system, as the table names them."""
    return "{devices} x {device_kind}, {processes} process(es), {cpus} CPUs, {file_system}".format(
        **environment
    )


def warnings_about(environment: Mapping[str, Any]) -> list[str]:
    """Sentences about what makes measurements on this machine unreliable."""
    found: list[str] = []
    if environment["file_system"] in ("tmpfs", "ramfs"):
        found.append("the output lies on a RAM disk: fsync costs nothing there")
    if not environment.get("drops_page_cache", True):
        found.append("the page cache cannot be dropped on this system: loads read from memory")
    if environment["load_average"] > 0.5 * (environment["cpus"] or 1):
        found.append(
            f"the machine is busy (load {environment['load_average']:.1f} on "
            f"{environment['cpus']} CPUs): compare within this run only, and with care"
        )
    return found
