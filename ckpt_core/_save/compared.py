"""Values of which every process of a save has one of its own, as texts that the processes compare.

Numbers, text, numpy arrays and arrays that are bound to no device: one of them is saved, and every process
gets it back. If they differed, all processes but one would go on with another's value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ckpt_core._tree.leaves import LeafSpec

_SHOWN = 80
"""Text up to this many characters is shown as it is."""


def text_of_array(values: np.ndarray[Any, Any], spec: LeafSpec) -> str:
    """A single number as it is, else a digest; equal if and only if all bits are."""
    if values.size == 1 and spec.kind != "bytes":
        one = values.reshape(-1)[0].item()
        if (
            isinstance(one, bool | int | float) and one == one
        ):  # a NaN has bits that it does not show
            return repr(one)
    bits = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return _digest(bits.data)


def text_of_text(text: str) -> str:
    """Short text as it is, else a digest."""
    return repr(text) if len(text) <= _SHOWN else _digest(text.encode(errors="surrogatepass"))


def digest_of(values: Mapping[str, str]) -> str:
    """One digest of all values of an item, by name."""
    ordered: Sequence[tuple[str, str]] = sorted(values.items())
    return _digest(repr(ordered).encode(errors="surrogatepass")) if ordered else ""


def _digest(data: bytes | memoryview) -> str:
    return f"of SHA-256 {hashlib.sha256(data).hexdigest()[:32]}"
