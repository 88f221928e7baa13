"""``.msgpack``: trees as ``flax.serialization`` and ``flax.training.checkpoints`` write them."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import numpy as np

from ckpt_core._tree.leaves import to_host_array
from ckpt_core.convert._source import (
    Array,
    Slot,
    Source,
    array_spec,
    library,
    parsing,
    source_of,
    with_slots,
)


@contextlib.contextmanager
def opened(path: str) -> Generator[Source]:
    """What ``flax.serialization.to_bytes`` or ``msgpack_serialize`` wrote into a file."""
    flax: Any = library("flax.serialization", path)
    with open(path, "rb") as stream, parsing(path):
        tree = flax.msgpack_restore(stream.read())
    yield source_of(with_slots(tree, _slot, f"{path}: "), _read)


def _slot(value: Any, where: str) -> Slot | None:
    if not isinstance(value, np.ndarray | np.generic):
        return None
    return Slot(array_spec(value.dtype.name, value.shape, where), value)


def _read(slot: Slot) -> Array:
    return to_host_array(np.asarray(slot.place), slot.spec)
