"""Modules that are imported at first use: jax takes a second or more, and ``inspect`` does not need it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


class LazyModule:
    """Proxy of a module that imports it, and these submodules, at first use; from then on as fast as the module."""

    def __init__(self, name: str, *submodules: str) -> None:
        self._lazy_names = (name, *submodules)

    def __getattr__(self, name: str) -> Any:
        names = self.__dict__.get("_lazy_names")
        if names is not None:
            if name.startswith("__"):
                raise AttributeError(name)  # introspection must not trigger the import
            module, *inner = map(importlib.import_module, names)
            for one in inner:  # found already, if an earlier import of the module was interrupted, which then set no attribute
                vars(module).setdefault(one.__name__.rpartition(".")[2], one)
            # Share the module's __dict__, so that later lookups do not reach __getattr__.
            self.__dict__ = module.__dict__
            self.__class__ = _Imported  # pyright: ignore[reportAttributeAccessIssue]
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(name) from None


class _Imported:
    """Class of the proxy after the import; its ``__dict__`` is that of the module."""


if TYPE_CHECKING:
    import jax as jax
    import jax.core
    import jax.monitoring
    import jax.numpy
else:
    jax = LazyModule("jax", "jax.core", "jax.monitoring", "jax.numpy", "jax.sharding")

JAX_SETTINGS = (
    *("jax_threefry_partitionable", "jax_default_prng_impl"),
    *("jax_enable_x64", "jax_default_matmul_precision"),
)
"""Settings of jax under which the same state gives other numbers."""
