"""Pytrees taken apart into paths, leaves and a structure, and put together again.

A *path* is a tuple with one entry per level: ``str`` for a dictionary's text key or a field name,
``int`` for a position or a dictionary's int key. People read and type it with ``/`` between the
entries (``~`` and ``/`` inside an entry are written ``~0`` and ``~1``, as in JSON pointers).
"""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ckpt_core._errors import UnsupportedLeaf

Path = tuple[str | int, ...]
"""Where a leaf stands: one entry per level."""

MAX_DEPTH = 300
"""Deepest tree that is saved or loaded; it bounds the recursion over hostile records too."""

_PRIMITIVES = (int, float, bool, complex, str, bytes, type(None))


@dataclass(frozen=True, slots=True)
class Node:
    """One level of a structure: what the container is, and how it is made again.

    Attributes:
        kind: ``leaf``, ``none``, ``dict``, ``ordered``, ``list``, ``tuple``, ``namedtuple``,
            ``dataclass``, ``custom`` (a registered pytree node) or ``expanded`` (a live object
            that an adapter took apart).
        keys: one path entry per child.
        children: the child nodes, in the order of ``keys``.
        type_name: ``module:qualname`` of the class, for kinds that have one.
        make: rebuilds the container from its children; None where it was read from disk. Nodes are
            equal whatever makes them.
    """

    kind: str
    keys: Path = ()
    children: tuple[Node, ...] = ()
    type_name: str = ""
    make: Callable[[list[Any]], Any] | None = field(default=None, compare=False)


LEAF = Node("leaf")
NONE = Node("none")


@dataclass(frozen=True, slots=True)
class FlatTree:
    """A tree as parallel lists of paths and leaves, and the structure that held them."""

    paths: list[Path]
    leaves: list[Any]
    root: Node


def format_path(path: Path) -> str:
    """The path as people read it: entries joined with ``/``, ``(root)`` for the tree itself."""
    if not path:
        return "(root)"
    text = "/".join(map(str, path))
    if "~" not in text and text.count("/") == len(path) - 1:
        return text  # nothing to escape
    return "/".join(
        str(entry).replace("~", "~0").replace("/", "~1") if isinstance(entry, str) else str(entry)
        for entry in path
    )


def array_name(path: Path) -> str:
    """The name under which Orbax's format stores a leaf: entries joined with ``.``, unescaped."""
    return ".".join(map(str, path))


def flatten(
    tree: Any, *, expand: Callable[[Any], Any] | None = None, keep: bool = False
) -> FlatTree:
    """Paths, leaves and structure of a tree.

    Args:
        tree: any nesting of dicts (str or int keys), lists, tuples, NamedTuples, dataclasses and
            registered pytree nodes; None is part of the structure.
        expand: gives, for an object that is no container, a tuple ``(state, finish)`` of the tree
            to save in its place and the function that makes the object's value out of a new
            state; None leaves the object a leaf.
        keep: let ``root.make`` remember the live containers, for ``unflatten`` into their types.

    Raises:
        UnsupportedLeaf: a dictionary key that is neither str nor int, or nesting beyond MAX_DEPTH.
    """
    walk = _Walk(expand, keep)
    root = walk.visit(tree, ())
    return FlatTree(walk.paths, walk.leaves, root)


class _Walk:
    """One traversal: collects paths and leaves while it builds the nodes."""

    def __init__(self, expand: Callable[[Any], Any] | None, keep: bool) -> None:
        self.paths: list[Path] = []
        self.leaves: list[Any] = []
        self._expand = expand
        self._keep = keep
        self._known_leaf_types: set[type] = set(_PRIMITIVES[:-1])

    def visit(self, value: Any, path: Path) -> Node:
        cls = type(value)
        if cls in self._known_leaf_types:
            return self._leaf(value, path)
        if value is None:
            return NONE
        if len(path) > MAX_DEPTH:
            raise UnsupportedLeaf(
                f"{format_path(path)[:200]}...: nested more than {MAX_DEPTH} levels deep",
                leaf=format_path(path),
                type_name=cls.__name__,
            )
        if cls is dict or cls is collections.OrderedDict or cls is collections.defaultdict:
            return self._dict(value, path, "ordered" if cls is collections.OrderedDict else "dict")
        if cls is list or cls is tuple:
            make = cls if self._keep else None
            return self._container(cls.__name__, range(len(value)), value, path, make=make)
        if isinstance(value, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
            self._known_leaf_types.add(cls)
            return self._leaf(value, path)
        return self._object(value, path)

    def _leaf(self, value: Any, path: Path) -> Node:
        self.paths.append(path)
        self.leaves.append(value)
        return LEAF

    def _dict(self, value: dict[Any, Any], path: Path, kind: str) -> Node:
        for key in value:
            # bool is an int to Python, but True and 1 are different keys to a reader
            if type(key) is not str and type(key) is not int:
                where = format_path(path)
                raise UnsupportedLeaf(
                    f"{where}: dictionary key {key!r} is a {type(key).__name__}; "
                    "keys must be str or int. Convert it before saving.",
                    leaf=where,
                    type_name=type(key).__name__,
                )
        keys = tuple(value)
        make = _dict_maker(keys, value) if self._keep else None
        return self._container(kind, keys, value.values(), path, make=make)

    def _container(
        self,
        kind: str,
        keys: Iterable[str | int],
        values: Iterable[Any],
        path: Path,
        *,
        type_name: str = "",
        make: Callable[[list[Any]], Any] | None = None,
    ) -> Node:
        keys = tuple(keys)
        children: list[Node] = []
        for key, value in zip(keys, values, strict=True):
            if type(value) in self._known_leaf_types:  # of thousands each a call less
                self.paths.append((*path, key))
                self.leaves.append(value)
                children.append(LEAF)
            else:
                children.append(self.visit(value, (*path, key)))
        return Node(kind, keys, tuple(children), type_name, make)

    def _object(self, value: Any, path: Path) -> Node:
        """Everything that is neither builtin nor an array: the four ways to take it apart."""
        cls = type(value)
        expanded = self._expand(value) if self._expand else None
        if expanded is not None:
            state, finish = expanded
            # who keeps the structure must not keep the live object with it
            make = (lambda new: finish(new[0])) if self._keep else None
            return Node("expanded", (), (self.visit(state, path),), "", make)
        if hasattr(cls, "__next__"):
            return self._leaf(value, path)  # jax warns of iterators before we can refuse them
        if isinstance(value, tuple) and hasattr(cls, "_fields"):
            make = (lambda new: cls._make(new)) if self._keep else None
            fields: tuple[str, ...] = cls._fields
            return self._container(
                "namedtuple", fields, value, path, type_name=_type_name(cls), make=make
            )
        keyed, treedef = jax.tree_util.tree_flatten_with_path(
            value, is_leaf=lambda x: x is not value
        )
        if not (len(keyed) == 1 and not keyed[0][0] and keyed[0][1] is value):
            keys = [_path_entry(key_path[0]) for key_path, _ in keyed]
            make = treedef.unflatten if self._keep else None
            children = [child for _, child in keyed]
            return self._container(
                "custom", keys, children, path, type_name=_type_name(cls), make=make
            )
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._dataclass(value, path)
        return self._leaf(value, path)

    def _dataclass(self, value: Any, path: Path) -> Node:
        names = [field.name for field in dataclasses.fields(value)]
        make = _dataclass_maker(value, names) if self._keep else None
        return self._container(
            "dataclass",
            names,
            [getattr(value, name) for name in names],
            path,
            type_name=_type_name(type(value)),
            make=make,
        )


def _dict_maker(keys: Path, value: dict[Any, Any]) -> Callable[[list[Any]], Any]:
    if type(value) is not collections.OrderedDict:
        return lambda new: dict(zip(keys, new, strict=True))
    attributes = dict(vars(value))  # torch hangs the versions of modules on a state_dict

    def make(new: list[Any]) -> Any:
        made = collections.OrderedDict(zip(keys, new, strict=True))
        vars(made).update(attributes)
        return made

    return make


def _dataclass_maker(value: Any, names: list[str]) -> Callable[[list[Any]], Any]:
    cls = type(value)

    def make(new: list[Any]) -> Any:
        # __init__ may compute or refuse; a copy of the fields is what was saved
        made = object.__new__(cls)
        for name, child in zip(names, new, strict=True):
            object.__setattr__(made, name, child)
        return made

    return make


def _type_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _path_entry(key: Any) -> str | int:
    for attribute in ("key", "idx", "name"):
        entry = getattr(key, attribute, None)
        if type(entry) is str or type(entry) is int:
            return entry
    return str(key)


def unflatten(
    root: Node, leaves: Iterable[Any], *, resolve: Callable[[Node], Any] | None = None
) -> Any:
    """A tree of the structure ``root`` that holds ``leaves`` in order.

    Args:
        root: a node of ``flatten(keep=True)``, which gives the same container types again, or one
            read from disk, for which builtin containers are made.
        leaves: one value per leaf.
        resolve: for nodes without ``make`` that name a class: gives the function that rebuilds
            them, or None for the default (a dict of fields).
    """
    return _build(root, iter(leaves), resolve)


def _build(node: Node, leaves: Iterator[Any], resolve: Callable[[Node], Any] | None) -> Any:
    if node.kind == "leaf":
        return next(leaves)
    if node.kind == "none":
        return None
    children = [_build(child, leaves, resolve) for child in node.children]
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
        case "namedtuple" | "dataclass" | "custom" if resolve and (make := resolve(node)):
            return make(children)
        case "namedtuple":
            return _stand_in(node)(*children)
        case "custom" if node.keys and all(isinstance(key, int) for key in node.keys):
            return children
        case _:
            return dict(zip(node.keys, children, strict=True))


def _stand_in(node: Node) -> Any:
    """A NamedTuple with the saved fields, for a class that this process does not have."""
    name = node.type_name.rpartition(":")[2].rpartition(".")[2]
    fields = [str(key) for key in node.keys]
    make: Any = collections.namedtuple  # typed NamedTuples cannot be made from names alone
    return make(name if name.isidentifier() else "Saved", fields, rename=True)


TRUSTED_ROOTS = frozenset({"optax", "flax", "chex", "jax"})
"""Packages whose public classes may be looked up by importing the package itself."""


def importable_type(node: Node) -> Callable[[list[Any]], Any] | None:
    """The function that rebuilds a saved NamedTuple or dataclass, if its class is at hand.

    Only classes of modules that are imported already are used, and the public classes of a few
    trusted packages; nothing is imported because a checkpoint says so. A class is taken only if
    its fields are the saved ones.
    """
    module_name, _, qualname = node.type_name.partition(":")
    for owner in _candidate_modules(module_name):
        cls: Any = owner
        for part in qualname.split("."):
            cls = getattr(cls, part, None)
        if not isinstance(cls, type):
            continue
        fields = list(map(str, node.keys))
        if _fields_of(cls, node.kind) == fields:
            if node.kind == "namedtuple":
                return lambda new, cls=cls: tuple.__new__(cls, new)
            return lambda new, cls=cls: _fill(cls, fields, new)
    return None


def _fields_of(cls: type, kind: str) -> list[str] | None:
    """The fields of a class, if it is one of that kind."""
    if kind == "namedtuple" and issubclass(cls, tuple):
        return list(getattr(cls, "_fields", ()))
    if kind == "dataclass" and dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls)]
    return None


def _fill(cls: type, fields: list[str], values: list[Any]) -> Any:
    made = object.__new__(cls)
    for name, value in zip(fields, values, strict=True):
        object.__setattr__(made, name, value)
    return made


def _candidate_modules(module_name: str) -> Iterator[Any]:
    root = module_name.partition(".")[0]
    if root in TRUSTED_ROOTS and root not in sys.modules:
        try:
            __import__(root)
        except ImportError:
            return
    if module_name in sys.modules:
        yield sys.modules[module_name]
    if root in TRUSTED_ROOTS:
        # public names outlive the private modules that define them
        for public in (root, f"{root}.contrib", f"{root}.schedules"):
            if public in sys.modules:
                yield sys.modules[public]
