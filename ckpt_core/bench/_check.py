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
        ours, theirs = (
            {str(shard.index): shard.data for shard in array.addressable_shards}
            for array in (one, other)
        )
        return one.shape == other.shape and all(
            index in theirs and _same(data, theirs[index]) for index, data in ours.items()
        )
    a, b = np.asarray(one), np.asarray(other)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # of bytes, NaN is equal to the same NaN, and -0.0 is not 0.0
    return np.array_equal(_bytes_of(a), _bytes_of(b))


def _bytes_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
