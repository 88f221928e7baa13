"""``compare``: what differs between two checkpoints, in structure and in values."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any

import numpy as np

from ckpt_core._load import load
from ckpt_core._look.leaves import Array, Leaf, Trees, as_numbers, blocks, check_found, dot
from ckpt_core._tree import Node, Path, format_path
from ckpt_core._tree.patterns import read_again
from ckpt_core._words import in_order


@dataclass(frozen=True)
class LeafDifference:
    """How far the values of one leaf moved from A to B, in float64."""

    item: str  # its name in A
    path: str
    kind: str  # same, values, text, dtype (values are compared, too), or shape
    a: str  # float32[3, 4] or the like; the value, if it is text
    b: str
    # this and the following as in ``PairSums``
    count: int = 0
    changed: int = 0  # elements with other bits; with other values, if the dtypes differ
    largest: float = math.nan  # of the finite differences, as rms; NaN if it holds no numbers
    rms: float = math.nan
    relative: float = math.nan  # norm of the difference over that of A
    cosine: float = math.nan  # of the angle between A and B; NaN if one of them is zero
    nan_a: int = 0
    nan_b: int = 0
    inf_a: int = 0
    inf_b: int = 0


@dataclass(frozen=True)
class NodeDifference:
    """A place of a tree with another container, or under another key; ``item`` is its name in A."""

    item: str
    path: str
    a: str
    b: str


@dataclass(frozen=True)
class Difference:
    """What ``compare`` found."""

    a: str  # absolute path
    b: str
    only_a: list[str]  # leaves as item/path, and items
    only_b: list[str]
    leaves: list[LeafDifference]  # those that both sides have
    # items that are no trees of arrays: whether they are the same; None: they were not compared
    others: dict[str, bool | None]
    metadata: bool  # whether they are the same
    # containers, keys and static fields that differ, of checkpoints of ckpt
    structure: list[NodeDifference] = field(default_factory=list[NodeDifference])

    @property
    def changed(self) -> list[LeafDifference]:
        """The leaves that differ, those that moved furthest first."""

        def place(leaf: LeafDifference) -> tuple[float, Any]:
            moved = 0.0 if math.isnan(leaf.relative) else leaf.relative
            return -math.inf if leaf.kind in ("shape", "text") else -moved, in_order(leaf.path)

        return sorted((leaf for leaf in self.leaves if leaf.kind != "same"), key=place)

    @property
    def same(self) -> bool:
        """Whether nothing differs of what was compared. Metadata are shown, and do not count."""
        apart = self.only_a or self.only_b or self.changed or self.structure
        return not apart and False not in self.others.values()


def compare(
    a: str | os.PathLike[str], b: str | os.PathLike[str], *, only: str | Iterable[str] | None = None
) -> Difference:
    """What differs between two checkpoints of any format. Items are matched by name, or if each side has one tree; leaves by path
    with slashes for dots, if that is unique. ``only`` leaves out items that are not trees.
    """
    only = read_again(only)
    one, other = Trees(a, only), Trees(b, only)
    check_found(only, one, other)  # what one side alone has is a difference
    pairs = {name: name for name in one.items if name in other.items}
    if len(one.items) == len(other.items) == 1:
        pairs = dict(zip(one.items, other.items, strict=True))
    only_a = [name for name in one.items if name not in pairs]
    only_b = [name for name in other.items if name not in pairs.values()]
    leaves: list[LeafDifference] = []
    structure: list[NodeDifference] = []
    for name_a, name_b in pairs.items():
        root_a, root_b = one.root(name_a), other.root(name_b)
        if root_a is not None and root_b is not None:
            paths = None if only is None else one.chosen(name_a) + other.chosen(name_b)
            structure += _differing_nodes(name_a, root_a, root_b, paths)
        mine, theirs = _by_path(one.items[name_a], other.items[name_b])
        only_a += [f"{name_a}/{leaf.path}" for path, leaf in mine.items() if path not in theirs]
        only_b += [f"{name_b}/{leaf.path}" for path, leaf in theirs.items() if path not in mine]
        both = [(leaf, theirs[path]) for path, leaf in mine.items() if path in theirs]
        leaves += _compared(one, name_a, other, name_b, both)
    others: dict[str, bool | None] = {}
    if only is None:
        only_a += [name for name in one.others if name not in other.others]
        only_b += [name for name in other.others if name not in one.others]
        shared = [name for name in one.others if name in other.others]
        others = {name: _same_item(one, other, name) for name in shared}
    alone = sorted(only_a), sorted(only_b)
    same = one.metadata == other.metadata
    return Difference(one.path, other.path, *alone, leaves, others, same, structure)


def _by_path(a: Iterable[Leaf], b: Iterable[Leaf]) -> list[dict[str, Leaf]]:
    """The leaves of both sides by path, with slashes for dots: files of weights have flat names with dots."""
    exact = [{leaf.path: leaf for leaf in side} for side in (a, b)]
    loose = [{path.replace(".", "/"): leaf for path, leaf in side.items()} for side in exact]
    unique = all(len(one) == len(other) for one, other in zip(exact, loose, strict=True))
    return loose if unique else exact


def _compared(
    one: Trees, name_a: str, other: Trees, name_b: str, both: list[tuple[Leaf, Leaf]]
) -> Iterator[LeafDifference]:
    read = [(a, b) for a, b in both if _has_values(a, b)]
    sizes = [max(a.itemsize, b.itemsize) for a, b in read]
    with (  # one that fails leaves the threads of the other waiting
        contextlib.closing(one.pieces(name_a, [a for a, _ in read], sizes)) as left,
        contextlib.closing(other.pieces(name_b, [b for _, b in read], sizes)) as right,
    ):
        pieces = zip(left, right, strict=True)
        for a, b in both:
            yield _leaf((name_a, a.path), a, b, pieces)


def _leaf(names: tuple[str, str], a: Leaf, b: Leaf, pieces: Iterator[Any]) -> LeafDifference:
    found = LeafDifference(*names, "same", _described(a), _described(b))
    if a.text is not None or b.text is not None:
        same = a.text == b.text
        return replace(found, kind="same" if same else "text", count=1, changed=int(not same))
    if not _has_values(a, b):
        return replace(found, kind="shape")
    sums = PairSums()
    for left, right in islice(pieces, len(a.regions(max(a.itemsize, b.itemsize)))):
        sums.add(left, right, a.has_numbers)
    kind = "values" if sums.changed else "same"
    kind = "dtype" if a.spec.dtype != b.spec.dtype else kind
    numbers = [one.name for one in fields(LeafDifference)][5 : None if a.has_numbers else 7]
    return replace(found, kind=kind, **{name: getattr(sums, name) for name in numbers})


def _has_values(a: Leaf, b: Leaf) -> bool:
    """Whether the values of two leaves can be compared, piece by piece."""
    if a.has_numbers and b.has_numbers:
        return a.spec.shape == b.spec.shape
    texts = a.text is not None or b.text is not None
    kinds = [(leaf.spec.kind, leaf.spec.dtype, leaf.spec.shape) for leaf in (a, b)]
    return not texts and kinds[0] == kinds[1]


def _described(leaf: Leaf) -> str:
    if leaf.text is not None:
        return repr(leaf.text)
    return f"{leaf.spec.dtype or leaf.spec.kind}{list(leaf.spec.shape)}"


def _same_item(one: Trees, other: Trees, name: str) -> bool | None:
    """Whether an item that is no tree is the same on both sides; None if it cannot be compared."""
    form = one.others[name]
    if form != other.others[name]:
        return False
    if form not in ("json", "files"):
        return None
    a, b = (load(trees.path, item=name) for trees in (one, other))
    if form == "json":  # as text: NaN is itself, and 1 is not true
        return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)
    names = sorted(a.names())
    return names == sorted(b.names()) and all(a.read(name) == b.read(name) for name in names)


def _differing_nodes(item: str, a: Node, b: Node, below: list[Path] | None) -> list[NodeDifference]:
    """Where two trees differ beside their leaves, on the way to the leaves ``below`` (None: everywhere)."""
    both = (_nodes_of(root, ()) for root in (a, b))
    nodes_a, nodes_b = ({format_path(path): text for path, text in nodes} for nodes in both)
    prefixes = (path[:length] for path in below or () for length in range(len(path) + 1))
    wanted = set(map(format_path, prefixes))
    found: list[NodeDifference] = []
    for path in dict.fromkeys([*nodes_a, *nodes_b]):
        mine, theirs = nodes_a.get(path, _NOTHING), nodes_b.get(path, _NOTHING)
        either = mine if theirs == _NOTHING else theirs
        # the lists of leaves have what one side alone has; earlier versions did not record constants
        known = _NOTHING in (mine, theirs) and either.startswith((_LEAF, _CONSTANT))
        if mine != theirs and not known and (below is None or path in wanted):
            found.append(NodeDifference(item, path, mine, theirs))
    return found


_LEAF, _CONSTANT, _NOTHING = "a leaf", "static ", "nothing"


def _nodes_of(node: Node, path: Path) -> Iterator[tuple[Path, str]]:
    """Path and description of a node and all below it."""
    while node.kind == "expanded":
        (node,) = node.children
    under = " under an int" if path and type(path[-1]) is int else ""
    if node.kind == "leaf":
        yield path, _LEAF + under
        return
    name = node.type_name.rpartition(":")[2] if node.kind not in ("list", "tuple") else ""
    empty = "" if node.children or node.kind in ("none", "code") else "empty "
    kind = "None" if node.kind == "none" else node.kind
    static = json.loads(node.static) if node.static else {}
    fields = [f" {key}={json.dumps(value)}" for key, value in static.get("fields", {}).items()]
    fields += [f" function={static['function']}"] if "function" in static else []
    yield path, f"{empty}{kind}{' ' + name if name else ''}{''.join(fields)}{under}"
    for name, value in static.get("constants", {}).items():
        yield (*path, *name.split("/")), _CONSTANT + json.dumps(value)
    for key, child in zip(node.keys, node.children, strict=True):
        yield from _nodes_of(child, (*path, key))


@dataclass
class PairSums:
    """How far the values of two leaves of one shape are apart."""

    count: int = 0
    changed: int = 0  # elements with other bits; with other values, if the dtypes differ
    largest: float = 0.0  # of the differences between elements that are finite on both sides
    squares: float = 0.0  # sum of the squares of these differences
    squares_a: float = 0.0  # of A, where both are finite
    squares_b: float = 0.0
    product: float = 0.0  # sum of A times B, of these
    finite_count: int = 0
    nan_a: int = 0
    nan_b: int = 0
    inf_a: int = 0
    inf_b: int = 0

    def add(self, a: Array, b: Array, are_numbers: bool) -> None:
        """Adds a piece of each; unless they are numbers, both are of one dtype, and their bits alone count."""
        for left, right in blocks(a, b):
            self.count += left.size
            if left.dtype == right.dtype:
                self.changed += left.size - int(np.count_nonzero(_same_bits(left, right)))
            if are_numbers:
                with np.errstate(over="ignore", invalid="ignore"):  # squares beyond all floats
                    self._add_numbers(left, right)

    def _add_numbers(self, a: Array, b: Array) -> None:
        numbers_a, numbers_b = as_numbers(a), as_numbers(b)
        nan_a, nan_b = np.isnan(numbers_a), np.isnan(numbers_b)
        if a.dtype != b.dtype:
            same = (numbers_a == numbers_b) | (nan_a & nan_b)
            self.changed += a.size - int(np.count_nonzero(same))
        self.nan_a += int(nan_a.sum())
        self.nan_b += int(nan_b.sum())
        self.inf_a += int((np.isinf(numbers_a) & ~nan_a).sum())
        self.inf_b += int((np.isinf(numbers_b) & ~nan_b).sum())
        apart = np.abs(numbers_b - numbers_a)
        if a.dtype == b.dtype and a.dtype in (np.int64, np.uint64):
            # neighbours have the same float
            apart = (np.maximum(a, b) - np.minimum(a, b)).view(np.uint64).astype(np.float64)
        finite = np.isfinite(numbers_a) & np.isfinite(numbers_b)
        if finite.any():
            numbers_a, numbers_b, apart = (one[finite] for one in (numbers_a, numbers_b, apart))
            self.finite_count += apart.size
            self.largest = max(self.largest, float(apart.max()))
            self.squares += dot(apart, apart)
            self.squares_a += dot(numbers_a, numbers_a)
            self.squares_b += dot(numbers_b, numbers_b)
            self.product += dot(numbers_a, numbers_b)

    @property
    def rms(self) -> float:
        """Root of the mean square of the differences."""
        return float(np.sqrt(self.squares / self.finite_count)) if self.finite_count else 0.0

    @property
    def relative(self) -> float:
        """Norm of the difference over that of the first leaf; infinite if that is zero and the difference is not."""
        if self.squares_a == 0:
            return math.inf if self.squares else 0.0
        return float(np.sqrt(self.squares) / np.sqrt(self.squares_a))

    @property
    def cosine(self) -> float:
        """Cosine of the angle between both; NaN if one of them is zero."""
        sizes = np.sqrt(self.squares_a) * np.sqrt(self.squares_b)
        return float(self.product / sizes) if sizes else math.nan


def _same_bits(a: Array, b: Array) -> Array:
    """For each element of two blocks of one dtype, whether its bits are the same."""
    if a.dtype.itemsize in (1, 2, 4, 8):
        bits = f"u{a.dtype.itemsize}"
        return a.view(bits) == b.view(bits)
    bytes_a, bytes_b = (one.view(np.uint8).reshape(a.size, -1) for one in (a, b))
    return (bytes_a == bytes_b).all(axis=1)
