"""Digests of values ("prints"), which runs and processes compare instead of the values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from ckpt_core import _adapters
from ckpt_core._tree import LEAF, Node, Path, flatten, format_path
from ckpt_core._tree.leaves import TEXT_KINDS, describe, to_host_array, to_text

_MOST_STATIC = 200  # letters of static fields in a message
_MOST_SHOWN = 4  # array elements in a message
_CONTAINER = " (container)"


class Print(NamedTuple):
    """A leaf or a container: its description, a digest of its bits, and its first elements as text."""

    what: str
    digest: str = ""
    glimpse: str = ""

    def __str__(self) -> str:
        return f"{self.what} {self.glimpse}".rstrip()


Prints = dict[str, Print]
"""Path -> print, of every leaf and every container of a value."""


def prints_of(value: Any) -> Prints:
    """The prints of a value as it is now: a pytree, a live object, or containers of both.

    Raises:
        UnsupportedLeaf: a value that a checkpoint cannot hold.
    """
    flat = flatten(value, expand=_expanded)
    found = {
        format_path(path): _of_leaf(leaf, path)
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
    }
    containers = _containers(flat.root, ())
    return found | {format_path(path) + _CONTAINER: text for path, text in containers}


def prints_from(entries: dict[str, list[str]]) -> Prints:
    """Prints that were JSON in between."""
    return {path: Print(*entry) for path, entry in entries.items()}


def leaves_only(prints: Prints) -> Prints:
    """The prints without those of containers, to compare values whose containers may differ."""
    return {path: text for path, text in prints.items() if not path.endswith(_CONTAINER)}


def first_difference(expected: Prints, actual: Prints) -> str | None:
    """A sentence for the first path at which the two differ, and how many there are; None if there is none."""
    # Leaves first: a leaf that differs says more than its container.
    paths = sorted(expected | actual, key=lambda path: path.endswith(_CONTAINER))
    nothing = Print("nothing")
    pairs = [(path, expected.get(path, nothing), actual.get(path, nothing)) for path in paths]
    differing = [pair for pair in pairs if pair[1][:2] != pair[2][:2]]
    for path, wanted, given in differing[:1]:
        more = f" (and {len(differing) - 1} more)" if differing[1:] else ""
        return f"{path}: expected {wanted}, found {given}{more}"


def assert_same(actual: Any, expected: Any, what: str = "the value") -> None:
    """Returns if two values have the same containers, types, dtypes, shapes and bits.

    Args:
        actual, expected: pytrees, live objects that an adapter knows, or containers of both. NaNs
            with the same bits are the same; 0.0 and -0.0 are not.
        what: the first words of the error message.

    Raises:
        AssertionError: names the first leaf that differs, both sides, and how many more there are.

    Example:
        >>> import numpy as np
        >>> assert_same({"w": np.zeros(2)}, {"w": np.zeros(2)})
    """
    difference = first_difference(prints_of(expected), prints_of(actual))
    if difference is not None:
        raise AssertionError(f"{what} differs at {difference}")


def _expanded(value: Any, path: Path) -> Any:
    """Expands live objects as a save does, but allows iterators at any place."""
    adapter = _adapters.adapter_for(value)
    return None if adapter is None else (adapter.get_state(value), lambda state: state)


def _containers(node: Node, path: Path) -> Iterator[tuple[Path, Print]]:
    if node.kind == "expanded":
        yield from _containers(node.children[0], path)
    elif node is not LEAF:
        yield path, Print(_container_text(node), node.static, node.static[:_MOST_STATIC])
        for key, child in zip(node.keys, node.children, strict=True):
            yield from _containers(child, (*path, key))


def _container_text(node: Node) -> str:
    if node.kind in ("none", "list", "tuple"):
        return "None" if node.kind == "none" else f"{node.kind} of {len(node.keys)}"
    # Sorted, because the order of a plain dict has no meaning; by repr, because "0" is not 0.
    keys = sorted(map(repr, node.keys)) if node.kind == "dict" else map(repr, node.keys)
    return f"{node.type_name.rpartition(':')[2] or node.kind} of {', '.join(keys)}"


def _of_leaf(leaf: Any, path: Path) -> Print:
    spec = describe(leaf, path)
    kind = spec.kind if spec.kind in ("numpy", "numpy_scalar") else ""
    notes = ", ".join(filter(None, (kind, spec.detail)))
    what = f"{spec} ({notes})" if notes else str(spec)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return Print(what, "abstract", "(abstract)")
    if spec.kind in TEXT_KINDS:
        text = to_text(leaf, spec)
        return Print(what, _digest(text.encode(errors="surrogatepass")), repr(text[:40]))
    if spec.kind == "key":
        array = np.asarray(jax.random.key_data(leaf))
    else:
        array = np.asarray(leaf) if spec.kind == "jax" else to_host_array(leaf, spec)
    flat = array.reshape(-1)
    shown = ", ".join(map(str, flat[:_MOST_SHOWN].tolist()))
    glimpse = f"[{shown}, ...]" if flat.size > _MOST_SHOWN else f"[{shown}]"
    return Print(what, _digest(array.tobytes()), glimpse if array.shape else shown)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
