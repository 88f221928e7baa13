"""TensorStore, imported at first use: a load of uncompressed arrays from a file system does not need it."""

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
"""Gives TensorStore's context of one save or load, which is made at the first call: so that is one of the thread that plans, before
others. A load of uncompressed arrays from a file system needs none: to import TensorStore takes 10 ms, 50 from a cold disk."""
