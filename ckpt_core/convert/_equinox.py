"""``.eqx``: the leaves of a tree as ``equinox.tree_serialise_leaves`` writes them, one ``.npy`` after the other.

The file holds no names: they come from a tree of the same structure, or are numbers. A first line of JSON, as Equinox' own
examples write it for hyperparameters, becomes metadata.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import replace
from typing import IO, Any

import numpy as np

from ckpt_core import _adapters
from ckpt_core._errors import CheckpointCorrupt, Mismatch, StructureMismatch
from ckpt_core._lazy import jax
from ckpt_core._tree import flatten
from ckpt_core.convert._npy import read_header
from ckpt_core.convert._source import Array, Slot, Source, array_spec, source_of

_MOST_LINE_BYTES = 2**20
_MAGIC = b"\x93NUMPY"
_ALONE = {2: "bfloat16"}
"""By size, what elements without a name are; of one byte there are many dtypes."""


@contextlib.contextmanager
def opened(path: str, like: Any = None) -> Generator[Source]:
    """The leaves of a file: a list of arrays, or the tree of ``like``."""
    with open(path, "rb") as stream:
        metadata = _first_line(stream, path)

        def read(slot: Slot) -> Array:
            header, offset, where = slot.place
            stream.seek(offset)
            return header.read(stream, where, slot.spec.stored_bytes)

        if like is None:
            source = source_of(list(_slots(stream, path, itertools.repeat(_ALONE))), read)
        else:
            flat = flatten(
                _placed(stream, path, like, read),
                expand=_adapters.expander(stored=True),
                saving=True,
            )
            source = Source(flat.root, flat.paths, flat.leaves, lambda slots: map(read, slots))
        yield replace(source, metadata=metadata)


def _first_line(stream: IO[bytes], path: str) -> Any:
    if stream.read(len(_MAGIC)) == _MAGIC:
        stream.seek(0)
        return None
    stream.seek(0)
    line = stream.readline(_MOST_LINE_BYTES)
    try:
        return json.loads(line) if line.endswith(b"\n") else _none(path)
    except CheckpointCorrupt:
        raise
    except (ValueError, RecursionError):
        return _none(path)


def _none(path: str) -> Any:
    raise CheckpointCorrupt(
        f"{path}: it begins neither with an array of numpy nor with a line of JSON", file=path
    )


def _slots(stream: IO[bytes], path: str, unnamed: Iterable[Mapping[int, str]]) -> Generator[Slot]:
    """The arrays that follow; ``unnamed`` is, for each, which dtype elements without one have, by their size."""
    offset = stream.tell()
    end = stream.seek(0, 2)
    for number, names in enumerate(unnamed):
        if offset == end:
            return
        where = f"{path}: leaf {number}"
        stream.seek(offset)
        header = read_header(stream, where, names)
        offset = stream.tell()
        if offset + header.spec.stored_bytes > end:
            raise CheckpointCorrupt(f"{where}: the file is cut short", file=path)
        spec = array_spec(header.spec.dtype, header.spec.shape, where)
        yield Slot(spec, (header, offset, where))
        offset += spec.stored_bytes


def _placed(stream: IO[bytes], path: str, like: Any, read: Callable[[Slot], Array]) -> Any:
    """``like`` with a slot, or a number, for each leaf that Equinox stores."""
    leaves, treedef = jax.tree_util.tree_flatten(like)
    stored = [n for n, leaf in enumerate(leaves) if _is_stored(leaf)]
    names = [_unnamed(leaves[n]) for n in stored]
    slots = list(_slots(stream, path, itertools.chain(names, itertools.repeat(_ALONE))))
    if len(stored) != len(slots):
        raise StructureMismatch(
            [Mismatch("", "leaves", f"{len(slots)} leaves", f"{len(stored)} leaves")],
            where=path,
            advice="Equinox stores no names: the target must be what was saved, made by the same code.",
        )
    for n, slot in zip(stored, slots, strict=True):
        leaf = leaves[n]
        number = isinstance(leaf, bool | int | float | complex) and not slot.spec.shape
        leaves[n] = _number(type(leaf), read(slot).item(), path) if number else slot
    return treedef.unflatten(leaves)


def _number(kind: type[Any], found: Any, path: str) -> Any:
    """A number as the target has it, if that is the same number."""
    try:
        made = kind(found)
    except (TypeError, ValueError, OverflowError):
        made = None
    if made is None or (made != found and found == found):  # NaN differs from itself
        raise StructureMismatch(
            [Mismatch("", "dtype", repr(found), kind.__name__)],
            where=path,
            advice="The target must be what was saved, made by the same code.",
        )
    return made


def _unnamed(leaf: Any) -> dict[int, str]:
    """Of several dtypes that numpy writes without a name, that of the target; another one does not mean such bytes."""
    dtype = getattr(leaf, "dtype", None)
    if not isinstance(dtype, np.dtype) or np.dtype(np.lib.format.dtype_to_descr(dtype)) == dtype:
        return _ALONE
    return {**_ALONE, dtype.itemsize: dtype.name}


def _is_stored(leaf: Any) -> bool:
    """Whether Equinox stores a leaf: arrays and numbers, not functions or text."""
    arrays = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)
    return isinstance(leaf, (*arrays, bool, int, float, complex)) or hasattr(leaf, "__jax_array__")
