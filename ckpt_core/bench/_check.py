"""Compares every loaded result with what was saved, outside of the measured time."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ckpt_core._errors import CheckpointError
from ckpt_core.bench.libraries._base import names_of


class WrongData(CheckpointError):
    """The loaded values differ from the saved ones; the measured run fails."""


def check_equal(expected: Any, found: Any) -> None:
    """Compares the shards of two trees that this process holds, bit for bit; raises ``WrongData`` for the first leaf that differs."""
    names, wanted, got = names_of(expected), jax.tree.leaves(expected), jax.tree.leaves(found)
    if len(wanted) != len(got):
        raise WrongData(f"loaded {len(got)} leaves, saved were {len(wanted)}")
    for name, one, other in zip(names, wanted, got, strict=True):
        if not _same(one, other):
            raise WrongData(f"the loaded leaf {name!r} is not the one that was saved")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, jax.Array) and not one.is_fully_addressable:
        theirs = {str(shard.index): shard for shard in other.addressable_shards}
        return one.shape == other.shape and all(
            str(shard.index) in theirs and _same_host(shard.data, theirs[str(shard.index)].data)
            for shard in one.addressable_shards
        )
    return _same_host(one, other)


def _same_host(one: Any, other: Any) -> bool:
    a, b = np.asarray(one), np.asarray(other)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.tobytes() == b.tobytes() if a.dtype.hasobject else _same_bytes(a, b)


def _same_bytes(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Bit for bit: NaN is equal to the same NaN, and -0.0 is not 0.0."""
    flat_a, flat_b = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (a, b))
    return all(
        np.array_equal(flat_a[start : start + _PIECE], flat_b[start : start + _PIECE])
        for start in range(0, flat_a.size, _PIECE)
    )


_PIECE = 1 << 24  # numpy needs a temporary byte for each byte that it compares
