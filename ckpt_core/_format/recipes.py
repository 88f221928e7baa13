"""Leaves that are made of parts of saved arrays: by rules, or by an index. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ckpt_core._layout.regions import Region, Shape, region_shape, whole

_Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class View:
    """A leaf, without its stacked dimensions, as the view of a tensor that it is by a rule; taken both ways."""

    groups: tuple[tuple[int, ...], ...]  # dimensions that each one of the tensor is cut into
    reshaped: tuple[int, ...]  # the shape after that
    transpose: tuple[int, ...]  # for each dimension of the leaf, that of the reshaped tensor

    @property
    def tensor(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return tuple(math.prod(self.reshaped[axis] for axis in group) for group in self.groups)

    @property
    def leaf(self) -> tuple[int, ...]:
        """Shape of the leaf."""
        return tuple(self.reshaped[axis] for axis in self.transpose)

    @property
    def back(self) -> list[int]:
        """For each dimension of the reshaped tensor, that of the leaf."""
        return sorted(range(len(self.transpose)), key=self.transpose.__getitem__)

    def boxes(self, box: Region, array: _Array) -> Iterator[tuple[Region, _Array]]:
        """The parts of an array, which holds ``box`` of the reshaped tensor, that are regions of the tensor as well: one, if those of
        a group lie behind each other in memory.
        """
        cut = [
            group
            for group in self.groups
            for a, b in itertools.pairwise(group)
            if box[b] != (0, self.reshaped[b])
            or array.strides[a] != array.strides[b] * self.reshaped[b]
        ]
        fixed = sorted({axis for group in cut for axis in group[:-1]})
        for numbers in itertools.product(*(range(*box[axis]) for axis in fixed)):
            bounds = dict(enumerate(box)) | {
                axis: (n, n + 1) for axis, n in zip(fixed, numbers, strict=True)
            }
            place = (
                slice(first - start, last - start)
                for (first, last), (start, _) in zip(bounds.values(), box, strict=True)
            )
            region = list[tuple[int, int]]()
            for group in self.groups:
                begin, end = 0, 0
                for axis in group:
                    first, last = bounds[axis]
                    begin = begin * self.reshaped[axis] + first
                    end = end * self.reshaped[axis] + last - 1
                region.append((begin, end + 1))
            yield tuple(region), array[(*place, ...)].reshape(region_shape(tuple(region)))


def unchanged(shape: Shape) -> View:
    """A leaf that is a tensor as it is."""
    axes = tuple(range(len(shape)))
    return View(tuple((axis,) for axis in axes), shape, axes)


class Cut(NamedTuple):
    """A tensor that is all of a saved array, or a part of it."""

    leaf: int  # position of the array in the item
    region: Region  # of the array
    dropped: tuple[int, ...] = ()  # dimensions, of one index each, that the tensor lacks

    @property
    def shape(self) -> Shape:
        """Shape of the tensor."""
        sizes = enumerate(region_shape(self.region))
        return tuple(size for axis, size in sizes if axis not in self.dropped)

    def within(self, inner: Region) -> Cut:
        """The part that is a region of the tensor."""
        region, bounds = list(self.region), iter(inner)
        for axis, (first, _) in enumerate(self.region):
            if axis not in self.dropped:
                start, stop = next(bounds)
                region[axis] = first + start, first + stop
        return self._replace(region=tuple(region))


@dataclass(frozen=True)
class Recipe:
    """How a leaf is made: the parts of a row are joined along an axis, and seen by a view; rows are stacked."""

    # Parts, by index in the stacked dimensions.
    rows: tuple[tuple[tuple[int, ...], tuple[Cut, ...]], ...]
    view: View
    axis: int = 0
    stack_axis: int = 0  # the first of the stacked dimensions

    @classmethod
    def of(cls, part: Cut) -> Recipe:
        """That of a leaf which is one part as it is."""
        return cls((((), (part,)),), unchanged(part.shape))

    @property
    def first(self) -> int:
        """Position of the first array."""
        return self.rows[0][1][0].leaf

    @property
    def axes(self) -> list[int | None]:
        """For each dimension of the leaf that of its first array; None if it is stacked, or a part of one."""
        index, (part, *_) = self.rows[0]
        kept = [axis for axis in range(len(part.region)) if axis not in part.dropped]
        groups = zip(self.view.groups, kept, strict=True)
        uncut = {group[0]: axis for group, axis in groups if len(group) == 1}
        found = [uncut.get(axis) for axis in self.view.transpose]
        return [*found[: self.stack_axis], *[None] * len(index), *found[self.stack_axis :]]

    def is_all_of(self, shape: Shape) -> bool:
        """Whether the leaf is its first array, which has this shape, as it is."""
        return self == Recipe.of(Cut(self.first, whole(shape)))

    def takes(self, region: Region, buffer: _Array) -> Iterator[tuple[Cut, _Array]]:
        """The parts of arrays that fill a buffer with a region of the leaf, each with the view of the buffer that takes it."""
        back = self.view.back
        for index, parts in self.rows:
            stacked = slice(self.stack_axis, self.stack_axis + len(index))
            bounds = list(zip(index, region[stacked], strict=True))
            if not buffer.size or not all(start <= n < stop for n, (start, stop) in bounds):
                continue
            place: list[Any] = [slice(None)] * len(region)
            place[stacked] = [n - start for n, (start, _) in bounds]
            rest = [*region[: stacked.start], *region[stacked.stop :]]
            box = tuple(rest[axis] for axis in back)
            yield from self._of_row(parts, box, buffer[(*place, ...)].transpose(back))

    def _of_row(
        self, parts: tuple[Cut, ...], box: Region, array: _Array
    ) -> Iterator[tuple[Cut, _Array]]:
        begin, axis = 0, self.axis
        for part in parts:
            for region, view in self.view.boxes(box, array):
                if len(parts) > 1:
                    start, stop = region[axis]
                    first, last = max(start, begin), min(stop, begin + part.shape[axis])
                    if first >= last:
                        continue
                    region = (*region[:axis], (first - begin, last - begin), *region[axis + 1 :])
                    view = view[(*[slice(None)] * axis, slice(first - start, last - start))]
                yield part.within(region), np.expand_dims(view, part.dropped)
            begin += part.shape[axis] if len(parts) > 1 else 0


def indexed(leaf: int, shape: Shape, index: tuple[Any, ...]) -> Cut:
    """The part of an array that numpy's index takes: whole numbers, slices without a step, one ``...``; IndexError as of numpy."""
    np.broadcast_to(np.False_, shape)[index]  # raises it
    at = index.index(...) if ... in index else len(index)
    rest = [slice(None)] * (len(shape) - len(index) + (... in index))
    entries = zip((*index[:at], *rest, *index[at + 1 :]), shape, strict=True)
    chosen = [range(size)[entry] for entry, size in entries]
    runs = [one if isinstance(one, range) else range(one, one + 1) for one in chosen]
    dropped = tuple(n for n, one in enumerate(chosen) if not isinstance(one, range))
    return Cut(leaf, tuple((run.start, run.start + len(run)) for run in runs), dropped)
