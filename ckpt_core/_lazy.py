"""jax, imported when something of it is first used: who only looks at a checkpoint waits for none.

Importing jax takes a second, on a busy machine many; a record is read without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


class LazyModule:
    """Stands for a module, and is as quick as one once something of it was used.

    Args:
        name: of the module.
        submodules: that are to be imported with it.
    """

    def __init__(self, name: str, *submodules: str) -> None:
        self._lazy_names = (name, *submodules)

    def __getattr__(self, name: str) -> Any:
        names = self.__dict__.get("_lazy_names")
        if names is not None:
            if name.startswith("__"):
                raise AttributeError(name)  # of inspections, which must not import anything
            module, *_ = map(importlib.import_module, names)
            # from now on this is the module: one dictionary, looked up without passing here again
            self.__dict__ = module.__dict__
            self.__class__ = _Imported  # pyright: ignore[reportAttributeAccessIssue]
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(name) from None


class _Imported:
    """A module that is there: its attributes are in the dictionary that both share."""


if TYPE_CHECKING:
    import jax as jax
    import jax.core  # pyright: ignore[reportUnusedImport]
    import jax.monitoring  # pyright: ignore[reportUnusedImport]
    import jax.numpy  # pyright: ignore[reportUnusedImport]
else:
    jax = LazyModule("jax", "jax.core", "jax.monitoring", "jax.numpy", "jax.sharding")
