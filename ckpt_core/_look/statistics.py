"""``leaf_statistics``: numbers about every leaf of a checkpoint."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import islice

from ckpt_core._look.leaves import Trees, check_found
from ckpt_core._look.numbers import Sums
from ckpt_core._options import Options, checked_options
from ckpt_core._tree.patterns import read_again


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
    path: str | os.PathLike[str],
    *,
    only: str | Iterable[str] | None = None,
    options: Options | None = None,
) -> Iterator[LeafStatistics]:
    """Numbers about each leaf of the trees in a checkpoint of any format; holds a few pieces of it at a time."""
    only = read_again(only)
    trees = Trees(path, only, checked_options(options))
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
