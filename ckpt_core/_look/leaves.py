"""The leaves of a checkpoint of any format, read piece by piece, and numbers about each, in float64."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any

import numpy as np

from ckpt_core._errors import CheckpointNotFound
from ckpt_core._layout.chunks import chunk_parts, chunk_shape
from ckpt_core._layout.regions import Region, whole
from ckpt_core._options import MIB, Options
from ckpt_core._read import Want, read_leaves, with_specs
from ckpt_core._saved import Checkpoint, NativeItem, OrbaxItem, SavedItem, open_checkpoint
from ckpt_core._tree import Node, Path, format_path
from ckpt_core._tree.leaves import TEXT_KINDS, LeafSpec, as_logical
from ckpt_core._tree.match import positions_of
from ckpt_core._tree.patterns import read_again, selector, unmatched_patterns

Array = np.ndarray[Any, Any]
PIECE_BYTES = 32 * MIB  # a larger leaf is read in pieces, if its dimensions can be divided so
_BLOCK = 2**20  # so many elements are in float64 at a time
_LOWEST, _OCTAVES = -1074, 2099  # exponent of the least float64; up to 1024 of the greatest


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
        self.trees: dict[str, SavedItem] = {}  # as they were saved, with all leaves
        for name, item in opened.items.items():
            if item.form != "tree":
                self.others[name] = item.form
                continue
            if isinstance(item, OrbaxItem):
                item = with_specs(opened, item)
            self.trees[name], self.items[name] = item, []
            text_of = opened.texts(item)
            for n in positions_of(item.paths, item.specs, selector(only, item=item.name)):
                spec = item.specs[n]
                text = text_of(n) if spec.kind in TEXT_KINDS else None
                self.items[name].append(Leaf(format_path(item.paths[n]), spec, text, n))

    def root(self, item: str) -> Node | None:
        """The structure of an item, with the types of its containers; None if its format has none."""
        saved = self.trees[item]
        return saved.root if isinstance(saved, NativeItem) else None

    def chosen(self, item: str) -> list[Path]:
        """Paths of the leaves that ``only`` takes."""
        return [self.trees[item].paths[leaf.place] for leaf in self.items[item]]

    def pieces(self, item: str, leaves: list[Leaf], sizes: Sequence[int] = ()) -> Generator[Array]:
        """The values of leaves, ``regions()`` of each in turn, of its item size or that given; close it, its threads read ahead."""
        saved = self.trees[item]
        sized = zip(leaves, sizes or [leaf.itemsize for leaf in leaves], strict=True)
        wants = [Want(leaf.place, [part]) for leaf, size in sized for part in leaf.regions(size)]
        with self._opened.reading():
            read = read_leaves(self._opened, saved, wants, Options())
            with contextlib.closing(read):
                for want, parts in read:
                    (array,) = parts.values()
                    yield as_logical(array, saved.specs[want.leaf])


def check_found(only: Any, *sides: Trees) -> None:
    """Raises CheckpointNotFound if ``only=``, or one of its patterns, matches no leaf on any side."""
    trees = ((name, item.paths) for side in sides for name, item in side.trees.items())
    idle = unmatched_patterns(only, trees)
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


@dataclass
class Sums:
    """What one leaf's values add up to. Of complex numbers, ``min`` and ``max`` are of the magnitude."""

    count: int = 0
    nan_count: int = 0
    inf_count: int = 0
    zero_count: int = 0
    finite_count: int = 0  # the rest is of these elements
    min: float = math.nan
    max: float = math.nan
    average: complex = 0.0  # mean; 0 if no element is finite
    squares: float = 0.0  # sum of the squared magnitudes
    spread: float = 0.0  # sum of the squared distances to the mean
    # how many negative, and how many positive values have a magnitude below each power of two, and not below half of it
    octave_counts: Array = field(default_factory=lambda: np.zeros((2, _OCTAVES), np.int64))

    def add(self, array: Array) -> None:
        """Adds a piece."""
        for (block,) in blocks(array):
            values = as_numbers(block)
            finite = values[np.isfinite(values)]
            nan_count = int(np.isnan(values).sum())
            self.count += values.size
            self.nan_count += nan_count
            self.inf_count += values.size - finite.size - nan_count
            self.zero_count += values.size - int(np.count_nonzero(values))
            if finite.size:
                with np.errstate(over="ignore", invalid="ignore"):  # squares beyond all floats
                    self._add_finite(finite)

    def _add_finite(self, values: Array) -> None:
        sizes, is_complex = np.abs(values), values.dtype.kind == "c"
        ordered = sizes if is_complex else values
        self.min = float(np.fmin(self.min, ordered.min()))
        self.max = float(np.fmax(self.max, ordered.max()))
        taken = np.isfinite(sizes) & (sizes > 0)
        positive = is_complex or values[taken] > 0  # complex numbers count as positive ones
        places = np.frexp(sizes[taken])[1] - _LOWEST + _OCTAVES * positive
        self.octave_counts += np.bincount(places, minlength=2 * _OCTAVES).reshape(2, _OCTAVES)
        # the squares of sums lose all digits where the mean is far from 0
        before, self.finite_count = self.finite_count, self.finite_count + values.size
        share, mean = values.size / self.finite_count, values.mean().item()
        apart = mean - self.average
        self.squares += dot(values, values)
        between = before * share * np.longdouble(abs(apart)) ** 2
        self.spread += dot(values - mean, values - mean) + between
        self.average = self.average * (1 - share) + mean * share

    @property
    def octaves(self) -> tuple[tuple[int, int, int], ...]:
        """(exponent, how many negative, how many positive) from the least to the greatest: ``2**(e-1) <= |x| < 2**e``."""
        found = np.flatnonzero(self.octave_counts.any(axis=0)).tolist()
        places = range(found[0], found[-1] + 1) if found else ()
        return tuple((place + _LOWEST, *self.octave_counts[:, place].tolist()) for place in places)

    @property
    def mean(self) -> complex:
        """Of the finite ones; NaN if there is none."""
        return self.average if self.finite_count else math.nan

    @property
    def norm(self) -> float:
        """Euclidean, of the finite ones."""
        return float(np.sqrt(self.squares))

    @property
    def std(self) -> float:
        """Standard deviation of the finite ones; NaN if there is none."""
        return float(np.sqrt(self.spread / self.finite_count)) if self.finite_count else math.nan


def blocks(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Arrays of one shape, block by block: as float64, bytes take eight times their memory."""
    flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, _BLOCK):
        yield tuple(one[start : start + _BLOCK] for one in flat)


def as_numbers(array: Array) -> Array:
    """The values in float64, or complex128."""
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def dot(a: Array, b: Array) -> Any:
    """The sum of products, real part; beyond the range of floats, in the longest that the machine has."""
    found = np.vdot(a, b).real
    if 1e-290 < abs(found) < math.inf or not (a.any() and b.any()):
        return found
    long: Any = np.clongdouble if a.dtype.kind == "c" else np.longdouble
    return np.vdot(a.astype(long), b.astype(long)).real
