"""One leaf in ckpt.json, and how it is validated when a record is read."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_core._format.limits import MOST_BYTES
from ckpt_core._options import codec_parts
from ckpt_core._tree.leaves import CHANGEABLE_KINDS, KINDS, LeafSpec, dtype_from_name, leaf_spec

_MAX_DIMENSIONS = 64
_NUMBERS = frozenset({int})
_MOST_SHARDINGS = 2**24


class LeafRecord(NamedTuple):
    """One leaf: its type, chunk shape, sharding and compression.

    Attributes:
        spec: kind, dtype, shape.
        chunk: shape of its chunks; empty for text and scalars.
        sharding: index into ``ItemRecord.shardings``, or None.
        codec: name of its compression if it differs from the item's, else None.
    """

    spec: LeafSpec
    chunk: tuple[int, ...] = ()
    sharding: int | None = None
    codec: str | None = None


def load_leaf(value: list[Any]) -> LeafRecord:
    """The leaf in its entry of the record.

    Raises:
        ValueError: ckpt did not write the entry.
    """
    kind, dtype, shape, chunk, detail, sharding, *rest = value
    shape, chunk = tuple(shape), tuple(chunk)
    for name, sizes in (("shape", shape), ("chunk shape", chunk)):
        # Before anything hashes them: tuples of any numbers can be made that all have one hash.
        if (
            len(sizes) > _MAX_DIMENSIONS
            or not _NUMBERS.issuperset(map(type, sizes))
            or min(sizes, default=0) < 0
            or math.prod(filter(None, sizes)) >= MOST_BYTES
        ):
            raise ValueError(f"impossible {name} {sizes!r}")
    if sharding is not None and (type(sharding) is not int or not 0 <= sharding < _MOST_SHARDINGS):
        raise ValueError("a leaf refers to a sharding that is not there")
    if type(dtype) is not str:
        raise ValueError(f"dtype {dtype!r} is not one that a checkpoint holds")
    if type(kind) is not str or type(detail) is not str:
        raise ValueError(f"impossible kind of a leaf {str([kind, detail])[:80]}")
    return _checked_leaf(kind, dtype, shape, chunk, detail, sharding, *rest)


@functools.lru_cache(4096)
def _checked_leaf(
    kind: str,
    dtype: str,
    shape: tuple[int, ...],
    chunk: tuple[int, ...],
    detail: str,
    sharding: int | None,
    codec: str | None = None,
) -> LeafRecord:
    """A validated leaf; cached, so equal leaves share one object."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind of leaf {kind!r}")
    spec = leaf_spec(kind, dtype, shape, detail)
    if dtype and kind != "key":
        dtype_from_name(dtype)
    if spec.stored_bytes >= MOST_BYTES:
        raise ValueError(f"impossible shape {shape!r}")
    stored = spec.stored_shape if spec.stored_dtype else ()
    if len(chunk) != len(stored) or any(
        type(step) is not int or not 1 <= step <= max(1, size)
        for step, size in zip(chunk, stored, strict=True)
    ):
        raise ValueError(f"impossible chunk shape {chunk!r} for shape {shape!r}")
    if codec is not None:
        codec_parts(codec)  # raises for unknown codecs
    return LeafRecord(spec, chunk, sharding, codec)


def checked_shared(value: Any, leaves: Sequence[LeafRecord]) -> tuple[tuple[int, ...], ...]:
    """The groups of leaves that were one object, from the record.

    Raises:
        ValueError, TypeError: ckpt did not write the entry.
    """
    groups = tuple(tuple(group) for group in value)
    positions = [position for group in groups for position in group]
    if any(type(n) is not int or not 0 <= n < len(leaves) for n in positions):
        raise ValueError("a shared leaf that is not there")
    if len(set(positions)) < len(positions) or any(len(group) < 2 for group in groups):
        raise ValueError("leaves are shared twice, or with none")
    for group in groups:
        _refuse_different([leaves[position].spec for position in group])
    return groups


def checked_across(
    value: Any, leaves: Mapping[str, Sequence[LeafRecord]]
) -> tuple[tuple[tuple[str, int], ...], ...]:
    """The groups of leaves of several items that were one object, from the record.

    Args:
        value: the entry.
        leaves: of each item.

    Raises:
        ValueError, TypeError: ckpt did not write the entry.
    """
    groups = tuple(tuple((item, position) for item, position in group) for group in value)
    places = [place for group in groups for place in group]
    if any(item not in leaves or type(n) is not int for item, n in places):
        raise ValueError("a shared leaf of an item that is not there")
    if any(not 0 <= n < len(leaves[item]) for item, n in places):
        raise ValueError("a shared leaf that is not there")
    if len(set(places)) < len(places) or any(len(group) < 2 for group in groups):
        raise ValueError("leaves are shared twice, or with none")
    for group in groups:
        _refuse_different([leaves[item][position].spec for item, position in group])
    return groups


def _refuse_different(specs: Sequence[LeafSpec]) -> None:
    if len(set(specs)) > 1 or specs[0].kind not in CHANGEABLE_KINDS:
        raise ValueError("leaves of several kinds cannot be one object")
