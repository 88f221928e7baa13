"""What a file of another format holds: a tree whose arrays are read when they are asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np

from ckpt_core._errors import CheckpointCorrupt, CheckpointError, UnsupportedLeaf
from ckpt_core._format.treedef import TreeBounds, letters_of
from ckpt_core._tree import Node, Path, flatten
from ckpt_core._tree.leaves import LeafSpec, dtype_from_name, leaf_spec

Array = np.ndarray[Any, Any]
_WIDE = frozenset({"int64", "uint64", "float64", "complex128"})
_PIECE_BYTES = 2**22


class Slot:
    """An array that is not read yet; no dataclass, which would be a tree. Only its reader understands ``place``;
    ``refused`` is the error to raise unless the leaf is left out.
    """

    def __init__(
        self, spec: LeafSpec, place: Any = None, refused: CheckpointError | None = None
    ) -> None:
        self.spec, self.place, self.refused = spec, place, refused


@dataclass(frozen=True)
class Source:
    """A tree, part by part."""

    root: Node
    paths: Sequence[Path]
    leaves: Sequence[Any]  # a Slot, or a value that is no array
    read: Callable[[Sequence[Slot]], Iterator[Array]]  # the stored arrays of slots, in order
    items: Mapping[str, Any] = field(default_factory=dict[str, Any])  # that belong to the tree
    metadata: Any = None


def source_of(
    tree: Any, read: Callable[[Slot], Array], items: Mapping[str, Any] | None = None
) -> Source:
    """The source of a tree of slots, each of which is read alone; checks that its paths fit into memory."""
    try:
        _take(tree, TreeBounds(), 0, 0)
    except ValueError as error:
        raise CheckpointCorrupt(f"the tree in it is impossibly large: {error}") from error
    flat = flatten(tree)
    return Source(
        flat.root, flat.paths, flat.leaves, lambda slots: map(read, slots), dict(items or {})
    )


def _take(tree: Any, bounds: TreeBounds, depth: int, letters: int) -> None:
    """Raises ValueError if a tree of plain containers holds more than the bounds leave."""
    if isinstance(tree, dict):
        parts = [(letters_of(key), part) for key, part in dict.items(tree)]
    elif isinstance(tree, (list, tuple)):
        parts = [(8, part) for part in tree]
    else:
        return bounds.take(0, depth, letters)
    bounds.take(1)
    for more, part in parts:
        _take(part, bounds, depth + 1, letters + more)


def array_spec(dtype: str, shape: Sequence[int], where: str, *, numpy: bool = False) -> LeafSpec:
    """The spec of an array in a file: one of jax, unless ``numpy`` or jax holds no such numbers by default."""
    try:
        unit = dtype_from_name(dtype).itemsize
    except ValueError:
        raise UnsupportedLeaf(
            f"{where}: a checkpoint holds no {dtype}: convert it to numbers, or leave it out of the file",
            leaf=where,
            type_name=dtype,
        ) from None
    sizes = [size for size in shape if type(size) is int and size >= 0]
    reach = math.prod(size or 1 for size in sizes) * unit  # numpy counts so, of empty arrays, too
    if len(sizes) < len(shape) or len(shape) > 64 or reach >= 2**63:
        raise CheckpointCorrupt(f"{where}: no array has the shape {tuple(shape)}", leaf=where)
    kind = "numpy" if numpy or dtype in _WIDE else "jax"
    return leaf_spec(kind, dtype, tuple(shape))


def empty(spec: LeafSpec, where: str, most_bytes: int) -> Array:
    """Memory for an array, of which a file of ``most_bytes`` may hold the values."""
    if spec.stored_bytes > most_bytes:
        raise CheckpointCorrupt(
            f"{where}: {spec} has {spec.stored_bytes} bytes, and the file holds {most_bytes} at most: it is "
            "damaged or cut short",
            leaf=where,
        )
    return np.empty(spec.stored_shape, spec.numpy_dtype)


def read_into(stream: IO[bytes], array: Array, where: str) -> None:
    """Fills an array in C order from a stream."""
    view = array.reshape(-1).view(np.uint8).data
    done = 0
    while done < len(view):
        piece = stream.read(min(_PIECE_BYTES, len(view) - done))
        if not piece:
            raise CheckpointCorrupt(
                f"{where}: the file is cut short: {done} of {len(view)} bytes are there", leaf=where
            )
        view[done : done + len(piece)] = piece
        done += len(piece)


def read_at(stream: IO[bytes], offset: int, spec: LeafSpec, where: str) -> Array:
    """An array that lies in C order in a file."""
    stream.seek(0, 2)
    found = empty(spec, where, max(0, stream.tell() - offset))
    stream.seek(offset)
    read_into(stream, found, where)
    return found


def elements(shape: Sequence[int]) -> int:
    """Number of elements of an array."""
    return math.prod(shape)
