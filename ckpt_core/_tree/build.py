"""Rebuilds trees: with the containers of a live target, or from the saved structure alone."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ckpt_core._tree.code import type_name
from ckpt_core._tree.flatten import DEFAULTDICT, Node, filled
from ckpt_core._tree.static import NotPlain, static_fields


def unflatten(root: Node, leaves: Iterable[Any]) -> Any:
    """A tree of this structure and these leaves; nodes read from disk become builtin containers and classes that are found here."""
    return _build(root, iter(leaves))


def _build(node: Node, leaves: Iterator[Any]) -> Any:
    if node.kind == "leaf":
        return next(leaves)
    if node.kind == "none":
        return None
    children = [_build(child, leaves) for child in node.children]
    if node.make is not None:
        return node.make(children)
    match node.kind:
        case "list":
            return children
        case "tuple":
            return tuple(children)
        case "ordered":
            return collections.OrderedDict(zip(node.keys, children, strict=True))
        case "expanded":
            return children[0]
        case "code":
            return None  # loads that need the function have raised before (refuse_missing)
        case "namedtuple" | "dataclass" | "custom" if make := _importable_type(node):
            return make(children)
        case "namedtuple":
            return _stand_in(node)(*children)
        case "custom" if node.keys and all(isinstance(key, int) for key in node.keys):
            return children
        case "custom" if len(set(node.keys)) < len(node.keys):
            return children  # a dict would hold the last of those that share a key
        case _ if node.type_name.startswith(DEFAULTDICT):
            return _saved_defaultdict(node, children)
        case _:
            return dict(zip(node.keys, children, strict=True))


_MADE = (
    *(bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple),
    *(collections.Counter, collections.OrderedDict, collections.deque),
)
_FACTORIES: dict[str, Any] = {"None": None, **{type_name(made): made for made in _MADE}}
"""The only default factories that a checkpoint may name: calling any other would be unsafe."""


def _saved_defaultdict(node: Node, children: list[Any]) -> dict[Any, Any]:
    """A defaultdict if its factory is in ``_FACTORIES``, or else a dict."""
    entries = zip(node.keys, children, strict=True)
    factory = node.type_name.removeprefix(DEFAULTDICT)
    if factory in _FACTORIES:
        return collections.defaultdict(_FACTORIES[factory], entries)
    warnings.warn(
        f"a defaultdict with the keys {', '.join(map(repr, node.keys[:5]))} comes back as a dict: its "
        f"factory {factory} is none that a checkpoint may name. Give a target that holds the defaultdict",
        UserWarning,
        stacklevel=2,
    )
    return dict(entries)


def _stand_in(node: Node) -> Any:
    """A new namedtuple class with the saved fields, for a class that this process cannot find."""
    name = node.type_name.rpartition(":")[2].rpartition(".")[2]
    fields = [str(key) for key in node.keys]
    make: Any = collections.namedtuple  # pyright cannot check a namedtuple with dynamic fields
    return make(name if name.isidentifier() else "Saved", fields, rename=True)


TRUSTED_ROOTS = frozenset({"optax", "flax", "chex", "jax"})  # imported to find saved classes


def _importable_type(node: Node) -> Callable[[list[Any]], Any] | None:
    """The function that rebuilds a saved NamedTuple or dataclass, or None. A checkpoint never decides what is imported: only
    classes of modules that are imported already count, and public ones of ``TRUSTED_ROOTS``, if their fields are the saved ones.
    """
    module_name, _, qualname = node.type_name.partition(":")
    try:
        static = static_fields(node.static)
    except NotPlain:
        return None
    for owner in _candidate_modules(module_name):
        cls: Any = owner
        for part in qualname.split("."):
            cls = getattr(cls, part, None)
        if not isinstance(cls, type):
            continue
        fields = [*map(str, node.keys), *static]
        if _are_fields_of(cls, node.kind, fields):
            if node.kind == "namedtuple":
                return lambda new, cls=cls: tuple.__new__(cls, new)
            names = fields[: len(node.keys)]
            return lambda new, cls=cls: filled(cls, dict(zip(names, new, strict=True)) | static)
    return None


def _are_fields_of(cls: type, kind: str, fields: list[str]) -> bool:
    """Whether ``cls`` is of this kind and has exactly these fields."""
    if kind == "namedtuple":
        return issubclass(cls, tuple) and list(getattr(cls, "_fields", ())) == fields
    if not dataclasses.is_dataclass(cls):
        return False
    known = [field.name for field in dataclasses.fields(cls)]
    # The fields of a registered dataclass come in the order of registration, statics last.
    return known == fields or (kind == "custom" and sorted(known) == sorted(fields))


def _candidate_modules(module_name: str) -> list[Any]:
    names, root = [module_name], module_name.partition(".")[0]
    if root in TRUSTED_ROOTS:
        with contextlib.suppress(ImportError):
            __import__(root)
        # a class may have moved to another private module since; its public name still exists
        names += [root, f"{root}.contrib", f"{root}.schedules"]
    return [sys.modules[name] for name in names if name in sys.modules]
