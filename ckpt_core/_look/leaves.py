"""The leaves of a checkpoint of any format, read piece by piece, and numbers about each."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

import numpy as np

from ckpt_core._errors import CheckpointNotFound
from ckpt_core._layout.chunks import chunk_parts, chunk_shape
from ckpt_core._layout.regions import Region, whole
from ckpt_core._look.numbers import Sums
from ckpt_core._options import MIB, Options
from ckpt_core._read import Want, read_leaves, with_specs
from ckpt_core._saved import Checkpoint, NativeItem, OrbaxItem, SavedItem, open_checkpoint
from ckpt_core._tree import Node, Path, format_path
from ckpt_core._tree.leaves import TEXT_KINDS, LeafSpec, as_logical
from ckpt_core._tree.match import positions_of
from ckpt_core._tree.patterns import idle_patterns, read_again, selector

Array = np.ndarray[Any, Any]
PIECE_BYTES = 32 * MIB
"""A larger leaf is read in pieces of at most so many bytes, if its dimensions can be divided so."""


@dataclass(frozen=True)
class Leaf:
    """A saved leaf: its path and type, its value if that is text, and where its reader finds it."""

    path: str
    spec: LeafSpec
    text: str | None
    place: int

    @property
    def has_numbers(self) -> bool:
        """Whether it holds numbers, and not text, random keys or bytes."""
        return self.text is None and self.spec.kind not in ("key", "bytes")

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.spec.numpy_dtype.itemsize

    def regions(self, itemsize: int | None = None) -> list[Region]:
        """The pieces in which it is read; those of elements of ``itemsize``, to be read beside another leaf."""
        shape, itemsize = self.spec.stored_shape, itemsize or self.itemsize
        if math.prod(shape) * itemsize <= PIECE_BYTES:
            return [whole(shape)]
        piece = chunk_shape(shape, [whole(shape)], itemsize, PIECE_BYTES)
        return [part.in_region for part in chunk_parts(whole(shape), piece)]


class Trees:
    """The trees of one checkpoint: ``items`` has the leaves of each, ``others`` the form of each item that is none."""

    def __init__(self, path: str | os.PathLike[str], only: str | Iterable[str] | None) -> None:
        opened = open_checkpoint(path)
        self._opened: Checkpoint = opened
        self.path, self.metadata = opened.path, opened.metadata
        self.items: dict[str, list[Leaf]] = {}
        self.others: dict[str, str] = {}
        self.all_paths: dict[str, Sequence[Path]] = {}  # of the leaves of each tree, chosen or not
        self._saved: dict[str, SavedItem] = {}
        for name, item in opened.items.items():
            if item.form != "tree":
                self.others[name] = item.form
                continue
            if isinstance(item, OrbaxItem):
                item = with_specs(opened, item)
            self._saved[name], self.items[name], self.all_paths[name] = item, [], item.paths
            text_of = opened.texts(item)
            for n in positions_of(item.paths, item.specs, selector(only, item=item.name)):
                spec = item.specs[n]
                text = text_of(n) if spec.kind in TEXT_KINDS else None
                self.items[name].append(Leaf(format_path(item.paths[n]), spec, text, n))

    def root(self, item: str) -> Node | None:
        """The structure of an item, with the types of its containers; None if its format has none."""
        saved = self._saved[item]
        return saved.root if isinstance(saved, NativeItem) else None

    def chosen(self, item: str) -> list[Path]:
        """Paths of the leaves that ``only`` takes."""
        return [self._saved[item].paths[leaf.place] for leaf in self.items[item]]

    def pieces(
        self, item: str, leaves: Sequence[Leaf], itemsizes: Sequence[int] = ()
    ) -> Generator[Array]:
        """The values of leaves, ``regions()`` of each in turn, of its item size or that given; close it, its threads read ahead."""
        saved, sizes = self._saved[item], itemsizes or [leaf.itemsize for leaf in leaves]
        sized = zip(leaves, sizes, strict=True)
        wants = [Want(leaf.place, [part]) for leaf, size in sized for part in leaf.regions(size)]
        with self._opened.held():
            read = read_leaves(self._opened, saved, wants, Options())
            with contextlib.closing(read):
                for want, parts in read:
                    (array,) = parts.values()
                    yield as_logical(array, saved.specs[want.leaf])


def check_found(only: Any, *sides: Trees) -> None:
    """Raises CheckpointNotFound if ``only=``, or one of its patterns, matches no leaf on any side."""
    idle = idle_patterns(only, [tree for side in sides for tree in side.all_paths.items()])
    if idle or (only is not None and not any(any(side.items.values()) for side in sides)):
        where = ", ".join(side.path for side in sides)
        raise CheckpointNotFound(f"{where}: only={idle or only!r} matches no leaf")


@dataclass(frozen=True)
class LeafStatistics:
    """Numbers about one leaf, in float64; of complex numbers, ``min`` and ``max`` are of the magnitude."""

    item: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    # this and the following as in ``Sums``
    count: int  # elements; 0 if it holds no numbers (text, random keys), and the rest is NaN or 0
    nan_count: int
    inf_count: int
    zero_count: int
    min: float  # this and the following are of the finite elements
    max: float
    mean: complex
    std: float
    norm: float
    # of those that are not zero: (exponent, how many negative, how many positive), 2**(exponent - 1) <= |x| < 2**exponent
    octaves: tuple[tuple[int, int, int], ...] = ()


def leaf_statistics(
    path: str | os.PathLike[str], *, only: str | Iterable[str] | None = None
) -> Iterator[LeafStatistics]:
    """Numbers about each leaf of a checkpoint of any format, which is read in pieces."""
    only = read_again(only)
    trees = Trees(path, only)
    check_found(only, trees)
    names = [one.name for one in fields(LeafStatistics)][5:]
    for item, leaves in trees.items.items():
        numeric = [leaf for leaf in leaves if leaf.has_numbers]
        with contextlib.closing(trees.pieces(item, numeric)) as read:
            for leaf in leaves:
                sums, spec = Sums(), leaf.spec
                for piece in islice(read, len(leaf.regions()) if leaf.has_numbers else 0):
                    sums.add(piece)
                size_bytes = spec.stored_bytes if leaf.text is None else len(leaf.text.encode())
                described = (item, leaf.path, spec.shape, spec.dtype or spec.kind, size_bytes)
                yield LeafStatistics(*described, *(getattr(sums, name) for name in names))
