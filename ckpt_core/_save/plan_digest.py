"""Facts that must be equal on all processes of a save: all that decides what is stored where.

Each process computes by itself who writes which region, from structure, shapes, chunks and
shardings. If these differed between two processes, regions would be written twice or not at all.

Of a number, a text, a numpy array and an array that is bound to no device, every process has one of its own, of which one is
saved and all get it back. So these are compared too, as texts: if they differed, all processes but one would go on with
another's value.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ckpt_core._devices.shardings import where_text
from ckpt_core._tree import Node, Path, compared_values, format_path
from ckpt_core._tree.leaves import LeafSpec

_SHOWN = 160
"""A message shows at most this many characters of each of two differing texts."""
_WHOLE_TEXT = 80
"""A value of so many characters or less is compared as it is, a longer one by its digest."""


SETTING = "setting"
"""Kind of a fact that is no leaf, but an argument or option; its path is the name of that."""


class Fact(NamedTuple):
    """What processes compare of one leaf or container: texts, empty where they do not apply."""

    path: str
    kind: str  # type of the container; or kind, dtype and shape of the leaf
    chunk: str = ""  # shape of the stored chunks
    codec: str = ""
    sharding: str = ""  # which device holds which part
    value: str = ""  # where one is saved and each process has its own: shown, or its digest


_ASPECTS = {
    "kind": ("the structure of the state", "save the same tree"),
    "sharding": (
        "the sharding",
        "hold parts of the same global arrays, on one mesh with one order of devices",
    ),
    "chunk": ("the shape of stored chunks", "save with the same Options(chunk_bytes=)"),
    "codec": ("the compression", "save with the same Options(compression=)"),
    "value": (
        "a value that every process has of its own",
        "hold the same value there, since one is saved and all get it back. What belongs to each process alone, such as "
        "the position of its data, goes into an object with per_process = True, get_state and set_state, passed as an "
        "item of its own",
    ),
}
"""For each field of a Fact that may differ, causes before effects: how a message names it, and what
all processes must do."""


class Leaf(NamedTuple):
    """The planned leaf from which facts are made; see ``PlannedLeaf``, ``TreeSignature`` and ``Fact``."""

    spec: LeafSpec
    chunk: tuple[int, ...]
    codec: str | None
    stored: tuple[Any, bool] | None
    sharding: tuple[Any, bool] | None
    value: str = ""


def facts(root: Node, leaves: Iterable[Leaf], own: bool) -> Iterator[Fact]:
    """The facts of a pytree, in the order of its structure; with ``own`` each process writes a checkpoint of its own."""
    return _Facts(own).of(root, (), iter(leaves))


class _Facts:
    """Makes the facts of one pytree; caches texts, as thousands of leaves share few of them."""

    def __init__(self, own: bool) -> None:
        self._own = own
        self._kinds: dict[LeafSpec, str] = {}
        self._where: dict[tuple[int, tuple[int, ...]], str] = {}
        self._texts: dict[Any, str] = {}

    def of(self, node: Node, path: Path, leaves: Iterator[Leaf]) -> Iterator[Fact]:
        """The facts of a node and of all below it."""
        if node.kind == "leaf":
            yield self._leaf(path, next(leaves))
            return
        kind = f"{node.kind} {node.type_name}".rstrip()
        numbers = [key for key in node.keys if not isinstance(key, str)]
        if numbers and node.kind not in ("list", "tuple"):
            kind += f" with the integer keys {numbers}"
        value = self._static(node.static) if node.kind == "custom" else ""
        yield Fact(format_path(path), kind, value=value)
        # the state of a live object has the object's path
        below = [(*path, key) for key in node.keys] if node.kind != "expanded" else [path]
        for inner, child in zip(below, node.children, strict=True):
            if child.kind == "leaf":  # the most frequent case: spares a generator
                yield self._leaf(inner, next(leaves))
            else:
                yield from self.of(child, inner, leaves)

    def _leaf(self, path: Path, leaf: Leaf) -> Fact:
        spec, chunk, codec, stored, sharding, value = leaf
        kind = self._kinds.get(spec)
        if kind is None:
            text = str(spec) if str(spec).startswith(spec.kind) else f"{spec.kind} {spec}"
            kind = self._kinds[spec] = f"{text} {spec.detail}".rstrip()
        where = ""
        if stored is not None:
            where = self._sharding(stored, spec.stored_shape)
            if sharding is not None and sharding is not stored:
                where += f"; {self._sharding(sharding, spec.shape)}"
        return Fact(format_path(path), kind, self._text(chunk), codec or "none", where, value)

    def _static(self, text: str) -> str:
        """What a restore compares of static fields, which each process has for itself; texts only warn there."""
        if not text or self._own:
            return ""
        if text not in self._texts:
            values = compared_values(text).items()
            told = {name: value for name, value in values if not _is_text(value)}
            self._texts[text] = text_of_text(repr(told)) if told else ""
        return self._texts[text]

    def _text(self, value: Any) -> str:
        text = self._texts.get(value)
        if text is None:
            text = self._texts[value] = str(value)
        return text

    def _sharding(self, bound: tuple[Any, bool], shape: tuple[int, ...]) -> str:
        # the signature keeps these pairs alive, so an id identifies one of them
        known = self._where.get((id(bound), shape))
        if known is None:
            known = self._where[id(bound), shape] = where_text(*bound, shape, self._own)
        return known


def layout_of(all_facts: Iterable[Fact]) -> str:
    """A digest of these facts, which processes compare first: if it is equal, all facts are."""
    digest = hashlib.sha256()
    for fact in all_facts:
        digest.update(repr(tuple(fact)).encode(errors="surrogatepass"))
    return digest.hexdigest()


def dump_facts(all_facts: Sequence[Fact]) -> str:
    """The facts as text, in which each distinct text occurs once; compressed, as there may be 100,000."""
    texts = list(dict.fromkeys(text for fact in all_facts for text in fact))
    places = {text: place for place, text in enumerate(texts)}
    data = json.dumps([texts, [[places[text] for text in fact] for fact in all_facts]])
    return base64.b85encode(zlib.compress(data.encode())).decode()


def parse_facts(text: str) -> list[Fact]:
    """The facts that ``dump_facts`` wrote."""
    texts, chosen = json.loads(zlib.decompress(base64.b85decode(text)))
    return [Fact(*(texts[place] for place in places)) for places in chosen]


class Difference(NamedTuple):
    """The first difference between two processes, as parts of a message."""

    what: str  # the subject of a sentence
    how: str  # the values on both processes
    must: str  # what all processes must do


def difference(ours: Sequence[Fact], theirs: Sequence[Fact], process: int) -> Difference:
    """The first difference between the facts of process 0, which calls it, and those of ``process``."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    mine, other = (side[at] if at < len(side) else None for side in (ours, theirs))
    what, must = _ASPECTS["kind"]
    if mine is None or other is None or mine.path != other.path:
        return Difference(what, _path_difference(ours, mine, theirs, other, process), must)
    if mine.kind == SETTING:
        how = f"{mine.value} on process 0, and {other.value} on process {process}"
        return Difference(mine.path, how, "save the same")
    for aspect, (what, must) in _ASPECTS.items():
        a, b = getattr(mine, aspect), getattr(other, aspect)
        if a != b:
            a, b = _shortened(a, b)
            how = f"{mine.path} is {a} on process 0, and {b} on process {process}"
            return Difference(what, how, must)
    raise AssertionError("the facts are equal")


def _path_difference(
    ours: Sequence[Fact],
    mine: Fact | None,
    theirs: Sequence[Fact],
    other: Fact | None,
    process: int,
) -> str:
    """How two pytrees differ in their paths: a leaf on one process only, or another order."""
    if other is not None and other.path not in {fact.path for fact in ours}:
        return f"{other.path} ({other.kind}) is on process {process}, and not on process 0"
    if mine is not None and mine.path not in {fact.path for fact in theirs}:
        return f"{mine.path} ({mine.kind}) is on process 0, and not on process {process}"
    first, second = ("nothing" if fact is None else fact.path for fact in (mine, other))
    return f"where process 0 has {first}, process {process} has {second}: another order"


def _shortened(one: str, other: str) -> tuple[str, str]:
    """Two differing texts, cut to 160 characters around the first difference if they are longer."""
    if max(len(one), len(other)) <= _SHOWN:
        return one, other
    pairs = enumerate(zip(one, other, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
    start = max(0, at - _SHOWN // 2)
    cut = (f"{'...' * (start > 0)}{text[start:][:_SHOWN]}" for text in (one, other))
    first, second = cut
    return first, second


def text_of_array(values: np.ndarray[Any, Any], spec: LeafSpec) -> str:
    """A single number as it is, else a digest; equal if and only if all bits are."""
    if values.size == 1 and spec.kind != "bytes":
        one = values.reshape(-1)[0].item()
        if (
            isinstance(one, bool | int | float) and one == one
        ):  # a NaN has bits that it does not show
            return repr(one)
    bits = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return _digest(bits.data)


def _is_text(value: Any) -> bool:
    """Whether a restore only warns of another value."""
    return isinstance(value, str | None) or (isinstance(value, tuple) and all(map(_is_text, value)))


def text_of_text(text: str) -> str:
    """Short text as it is, else a digest."""
    return repr(text) if len(text) <= _WHOLE_TEXT else _digest(text.encode(errors="surrogatepass"))


def digest_of(values: Mapping[str, str]) -> str:
    """One digest of all values of an item, by name."""
    ordered: Sequence[tuple[str, str]] = sorted(values.items())
    return _digest(repr(ordered).encode(errors="surrogatepass")) if ordered else ""


def _digest(data: bytes | memoryview) -> str:
    return f"of SHA-256 {hashlib.sha256(data).hexdigest()[:32]}"
