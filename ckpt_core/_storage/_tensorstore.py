"""TensorStore, imported at first use: a load from a file system does not need it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckpt_core._lazy import LazyModule

if TYPE_CHECKING:
    import tensorstore as ts
else:
    ts = LazyModule("tensorstore")

__all__ = ["StoreContext", "ts"]

StoreContext = Callable[[], Any]
"""Gives TensorStore's context of one save or load. One thread makes it, when something first needs it: a load from a file
system needs none, and the import of TensorStore takes 10 ms, or 50 if its file has to be read first."""
