"""TensorStore, imported at first use: reading a record does not need it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_core._lazy import LazyModule

if TYPE_CHECKING:
    import tensorstore as ts
else:
    ts = LazyModule("tensorstore")

__all__ = ["ts"]
