"""Rows of what a dataset reorders: lists, arrays and columns in dicts, compared whatever their order."""

from __future__ import annotations

import collections
import copy
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ckpt_keras import _attributes

_DEPTH = 3
"""Of dicts and tuples in each other."""

_MOST_KEYS = 1024

Column = tuple[Any, ...]
"""Where a column is: the name of an attribute, and steps into it: ("key", of what is in it) or ("part", begin, end, stride)."""


def column(value: Any, steps: Sequence[Any]) -> Any:
    """What is there; an error if there is nothing."""
    for kind, *said in steps:
        value = value[said[0]] if kind == "key" else value[slice(*said)]
    return value


def copied(value: Any, depth: int = 0) -> Any:
    """The same with columns of its own, so that it stays as it is when they are reordered."""
    if depth < _DEPTH and has_columns(value):
        if type(value) is np.ndarray:
            return value.copy()
        if isinstance(value, (list, tuple)):
            return type(value)(copied(one, depth + 1) for one in value)
        other = copy.copy(value)
        other.update({key: copied(one, depth + 1) for key, one in value.items()})
        return other
    return _attributes.copied(value)


def has_columns(value: Any) -> bool:
    """Whether a few sequences are in it, of a column each, and it is none itself."""
    if _attributes.is_dict(value):
        return 0 < len(value) <= _MOST_KEYS and any(map(_may_be_in, value.values()))
    few = _attributes.is_sequence(value) and len(value) <= _attributes.MOST_PARTS
    return few and any(_may_be_in(one) and len(one) > _attributes.MOST_PARTS for one in value)


def _may_be_in(value: Any) -> bool:
    return _attributes.is_sequence(value) or _attributes.is_dict(value)


def columns(value: Any, name: str) -> Iterator[Column]:
    """All columns in it, but not in their parts."""
    if not has_columns(value):
        if _attributes.is_sequence(value):
            yield (name,)
        return
    for steps in _steps(value, 0):
        yield name, *steps


def _steps(value: Any, depth: int) -> Iterator[tuple[Any, ...]]:
    if depth < _DEPTH and has_columns(value):
        for step in _keys(value):
            yield from ((step, *steps) for steps in _steps(value[step[1]], depth + 1))
    elif _attributes.is_sequence(value):
        yield ()


def _keys(value: Any) -> Iterator[tuple[str, Any]]:
    for key in value.keys() if _attributes.is_dict(value) else range(len(value)):
        if isinstance(key, (str, int, np.integer)):
            yield "key", key if isinstance(key, str) else int(key)


def inner(value: Any, depth: int = 0) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """What lies beside columns, and these, each with the steps to it; but no numbers, of which some are counters."""
    if depth < _DEPTH and has_columns(value):
        for step in _keys(value):
            yield from (((step, *steps), one) for steps, one in inner(value[step[1]], depth + 1))
    elif not isinstance(value, (int, float, np.number, np.bool_)):
        yield (), value


def parts(of: Column, length: int, rows: int) -> list[list[Column]]:
    """Ways in which a flat sequence may have a few columns of so many ``rows``: side by side, or one after the other."""
    count = length // rows
    if length % rows or not 1 <= count <= _attributes.MOST_PARTS:
        return []
    if count == 1:
        return [[of]]
    beside = [(*of, ("part", place, None, count)) for place in range(count)]
    after = [(*of, ("part", place * rows, (place + 1) * rows, None)) for place in range(count)]
    return [beside, after]


def is_small(value: Any) -> bool:
    """Whether a step would hold as much."""
    if has_columns(value):
        return all(_attributes.is_small(column(value, steps)) for steps in _steps(value, 0))
    return _attributes.is_sequence(value) and _attributes.is_small(value)


def sum_of(values: list[Any]) -> str:
    """The same for any order of the same rows, of which each value has a column; empty if one has no text."""
    texts = [text for value in values if (text := _texts_of(value)) is not None]
    if len(texts) != len(values):
        return ""
    total = 0
    for row in zip(*texts, strict=True):
        # No checksum: the sum over rows of one would be the same for labels that were exchanged.
        digest = hashlib.blake2b(b"\n".join(row), digest_size=8).digest()
        total += int.from_bytes(digest, "little")
    return f"{total % 2**64:x}"


def _texts_of(value: Any) -> list[bytes] | None:
    if isinstance(value, np.ndarray) and value.dtype.kind not in "biufc":
        return [np.ascontiguousarray(row).tobytes() for row in value]
    if isinstance(value, np.ndarray):
        data, size_bytes = value.tobytes(), value.nbytes // len(value) if len(value) else 0
        return [data[at * size_bytes : (at + 1) * size_bytes] for at in range(len(value))]
    texts = _attributes.texts(value)
    return None if texts is None else [text.encode() for text in texts]


def is_plain(value: Any) -> bool:
    """Whether all its elements are texts, or integers: they stay what they are, and one call compares them."""
    return not isinstance(value, np.ndarray) and set(map(type, value)) in ({str}, {int})


def same(values: list[Any], others: list[Any]) -> bool:
    """Whether plain columns have the rows of ``others`` in any order: as ``sum_of`` says, in a tenth of its time."""
    # Counter's own comparison asks for each key in Python.
    return dict.__eq__(_counted(values), _counted(others))


def _counted(values: list[Any]) -> collections.Counter[Any]:
    """How often there is each row."""
    return collections.Counter(values[0] if len(values) == 1 else zip(*values, strict=True))
