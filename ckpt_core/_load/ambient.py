"""What jax keeps for each thread and a load depends on, taken along to another thread."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


def as_here(work: Callable[[], Result]) -> Callable[[], Result]:
    """``work``, which on any thread runs with the 64-bit types and the default device of this one now.

    Whoever calls inside of ``with jax.enable_x64(True)`` or ``with jax.default_device(...)`` means what is loaded,
    and not where the call returns.
    """
    jax: Any = sys.modules.get("jax")
    if jax is None:  # nobody can have set anything
        return work
    wide, device = jax.config.jax_enable_x64, jax.config.jax_default_device

    def run() -> Result:
        with _wide(jax)(wide), jax.default_device(device):
            return work()

    return run


def _wide(jax: Any) -> Any:
    found = getattr(jax, "enable_x64", None)
    if found is None:  # jax before 0.8.2
        found = importlib.import_module("jax.experimental").enable_x64
    return found
