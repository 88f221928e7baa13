"""TensorStore, imported when something of it is first used: a record is read without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_core._lazy import LazyModule

if TYPE_CHECKING:
    import tensorstore as ts
else:
    ts = LazyModule("tensorstore")

__all__ = ["ts"]
