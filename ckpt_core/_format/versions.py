"""Versions of the libraries that write a checkpoint."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version


def library_versions() -> dict[str, str]:
    """Versions of Python, ckpt and its dependencies, and of the imported frameworks."""
    names = {"ckpt-core": "ckpt_core", "jax": "jax", "numpy": "numpy", "tensorstore": "tensorstore"}
    for framework in ("flax", "optax", "keras", "torch", "torchax", "grain"):
        names[framework] = framework
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for distribution, module in names.items():
        if module in sys.modules:
            found[distribution] = _version(distribution)
    return found


_versions: dict[str, str] = {}


def _version(distribution: str) -> str:
    if distribution not in _versions:
        try:
            _versions[distribution] = version(distribution)
        except PackageNotFoundError:
            _versions[distribution] = "unknown"
    return _versions[distribution]
