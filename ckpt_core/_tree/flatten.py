"""Pytrees taken apart into paths, leaves and a structure.

A *path* is a tuple with one entry per level: ``str`` for a dictionary's text key or a field name,
``int`` for a position or a dictionary's int key, ``tuple`` for a dictionary's key that is one, as Flax has
them. People read and type it with ``/`` between the entries (``~`` and ``/`` inside an entry are written
``~0`` and ``~1``, as in JSON pointers).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckpt_core._errors import UnsupportedLeaf
from ckpt_core._lazy import jax
from ckpt_core._tree.code import code_name
from ckpt_core._tree.static import is_lost, static_text

Key = str | int | tuple[Any, ...]
"""One level of a path; tuples (of text, ints and tuples) are keys of dictionaries."""
Path = tuple[Key, ...]
"""Where a leaf stands: one entry per level."""

MAX_DEPTH = 300
"""Deepest tree that is saved or loaded; it bounds the recursion over hostile records too."""

_PRIMITIVES = (int, float, bool, complex, str, bytes, type(None))


@dataclass(frozen=True, slots=True)
class Node:
    """One level of a structure: what the container is, and how it is made again.

    Attributes:
        kind: ``leaf``, ``none``, ``dict``, ``ordered``, ``list``, ``tuple``, ``namedtuple``,
            ``dataclass``, ``custom`` (a registered pytree node), ``code`` (a function in one, which
            is no state) or ``expanded`` (a live object that an adapter took apart).
        keys: one path entry per child.
        children: the child nodes, in the order of ``keys``.
        type_name: ``module:qualname`` of the class or function, for kinds that have one; of a leaf or an
            expanded node the key under which Orbax's trees hold it one level deeper, if they do (``Below``).
        make: rebuilds the container from its children; None where it was read from disk. Nodes are
            equal whatever makes them.
        static: what a ``custom`` node has besides its children, as JSON (``static_text``).
    """

    kind: str
    keys: Path = ()
    children: tuple[Node, ...] = ()
    type_name: str = ""
    make: Callable[[list[Any]], Any] | None = field(default=None, compare=False)
    static: str = ""


LEAF = Node("leaf")
NONE = Node("none")


class Below:
    """A value that Orbax's own trees hold one key deeper: stands for it in a tree that is flattened.

    An NNX Variable is a node to Orbax, whose array it calls ``value``. Paths, which people see, do without
    that key; names of arrays, which Orbax sees, have it. The node of such a value is a ``leaf`` or
    ``expanded`` one that has the key for ``type_name``.
    """

    __slots__ = ("key", "value")

    def __init__(self, key: str, value: Any) -> None:
        self.key = key
        self.value = value


@functools.lru_cache(64)
def leaf_below(key: str) -> Node:
    """The node of a leaf that Orbax's trees hold one key deeper."""
    return Node("leaf", (), (), key)


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
        str(entry) if isinstance(entry, int) else str(entry).replace("~", "~0").replace("/", "~1")
        for entry in path
    )


def array_name(path: Path) -> str:
    """The name under which Orbax's format stores a leaf: entries joined with ``.``, unescaped."""
    return ".".join(map(str, path))


def flatten(
    tree: Any,
    *,
    expand: Callable[[Any], Any] | None = None,
    keep: bool = False,
    saving: bool = False,
) -> FlatTree:
    """Paths, leaves and structure of a tree.

    Args:
        tree: any nesting of dicts (str or int keys), lists, tuples, NamedTuples, dataclasses and
            registered pytree nodes; None is part of the structure.
        expand: gives, for an object that is no container, a tuple ``(state, finish)`` of the tree
            to save in its place and the function that makes the object's value out of a new
            state; None leaves the object a leaf.
        keep: let ``root.make`` remember the live containers, for ``unflatten`` into their types.
        saving: refuse what a checkpoint would hold nothing of.

    Raises:
        UnsupportedLeaf: a dictionary key that is neither str nor int, nesting beyond MAX_DEPTH or
            beyond Python's own limit, or a container that holds itself.
    """
    walk = _Walk(expand, keep, saving)
    try:
        root = walk.visit(tree, ())
    except RecursionError as error:
        where = format_path(max(walk.paths, key=len, default=()))
        raise UnsupportedLeaf(
            f"{where[:200]}: the tree, or a live object in it that gives its state, is nested too deeply for "
            f"Python, which allows {sys.getrecursionlimit()} calls within each other",
            leaf=where,
            type_name=type(tree).__name__,
        ) from error
    return FlatTree(walk.paths, walk.leaves, root)


class _Walk:
    """One traversal: collects paths and leaves while it builds the nodes."""

    def __init__(self, expand: Callable[[Any], Any] | None, keep: bool, saving: bool) -> None:
        self.paths: list[Path] = []
        self.leaves: list[Any] = []
        self._expand = expand
        self._keep = keep
        self._saving = saving
        self._open: set[int] = set()
        self._known_leaf_types: set[type] = set(_PRIMITIVES[:-1])
        self._modules = 0  # how many module-like nodes the walk is inside of

    def visit(self, value: Any, path: Path) -> Node:
        cls = type(value)
        if cls in self._known_leaf_types:
            return self._leaf(value, path)
        if value is None:
            return NONE
        if cls is Below:
            node = self.visit(value.value, path)
            return (
                leaf_below(value.key) if node is LEAF else Node("expanded", (), (node,), value.key)
            )
        if len(path) > MAX_DEPTH:
            raise UnsupportedLeaf(
                f"{format_path(path)[:200]}...: nested more than {MAX_DEPTH} levels deep",
                leaf=format_path(path),
                type_name=cls.__name__,
            )
        if isinstance(value, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
            self._known_leaf_types.add(cls)
            return self._leaf(value, path)
        if id(value) in self._open:
            where = format_path(path)
            raise UnsupportedLeaf(
                f"{where}: a {cls.__name__} that holds itself: no tree can hold that. Leave the way back "
                "to it out of the state",
                leaf=where,
                type_name=cls.__name__,
            )
        self._open.add(id(value))
        if cls is dict or cls is collections.OrderedDict or cls is collections.defaultdict:
            node = self._dict(value, path)
        elif cls is list or cls is tuple:
            make = cls if self._keep else None
            node = self._container(cls.__name__, range(len(value)), value, path, make=make)
        else:
            node = self._object(value, path)
        self._open.remove(id(value))
        return node

    def _leaf(self, value: Any, path: Path) -> Node:
        self.paths.append(path)
        self.leaves.append(value)
        return LEAF

    def _dict(self, value: dict[Any, Any], path: Path) -> Node:
        for key in value:
            # bool is an int to Python, but True and 1 are different keys to a reader
            if type(key) is not str and type(key) is not int and not is_plain_tuple(key):
                where = format_path(path)
                raise UnsupportedLeaf(
                    f"{where}: dictionary key {key!r} is a {type(key).__name__}; "
                    "keys must be str or int, or tuples of them. Convert it.",
                    leaf=where,
                    type_name=type(key).__name__,
                )
        keys = tuple(value)
        make = _dict_maker(keys, value) if self._keep else None
        kind = "ordered" if type(value) is collections.OrderedDict else "dict"
        name = ""
        if isinstance(value, collections.defaultdict):
            name = DEFAULTDICT + _factory_name(value.default_factory)
        return self._container(kind, keys, value.values(), path, type_name=name, make=make)

    def _container(
        self,
        kind: str,
        keys: Iterable[Key],
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
            elif type(value) is Below and type(value.value) in self._known_leaf_types:
                self.paths.append((*path, key))
                self.leaves.append(value.value)
                children.append(leaf_below(value.key))
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
            return self._registered(value, path, keyed, treedef)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._dataclass(value, path)
        if self._modules and (name := code_name(value)) is not None:
            make = (lambda _: value) if self._keep else None
            return Node("code", (), (), name, make)
        return self._leaf(value, path)

    def _registered(self, value: Any, path: Path, keyed: list[Any], treedef: Any) -> Node:
        """An object of a class that jax knows how to take apart, into ``keyed``."""
        is_static = not keyed and treedef.node_data()[1] is value
        if is_static and self._saving and not self._modules and is_lost(value):
            raise UnsupportedLeaf(
                f"{format_path(path)}: cannot save a {type(value).__name__}: all of it is static to jax, and a "
                "checkpoint would hold nothing of it. Leave it out: of flax.nnx.split(model) save the state, "
                "or save the model itself",
                leaf=format_path(path),
                type_name=f"{type(value).__module__}.{type(value).__qualname__}",
            )
        make = treedef.unflatten if self._keep else None
        # a class with fields, rather than a mapping or a sequence with a class of its own
        module = any(isinstance(key_path[0], _field_keys()) for key_path, _ in keyed)
        self._modules += module
        node = self._container(
            "custom",
            [_path_entry(key_path[0]) for key_path, _ in keyed],
            [child for _, child in keyed],
            path,
            type_name=_type_name(type(value)),
            make=make,
        )
        self._modules -= module
        by_field = all(isinstance(key_path[0], _field_keys()[0]) for key_path, _ in keyed)
        names = list(map(str, node.keys)) if by_field else None
        static = static_text(value, names, names_function=not _has_code(node))
        return dataclasses.replace(node, static=static) if static else node

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


def _has_code(node: Node) -> bool:
    """Whether a function is recorded below a node."""
    return any(child.kind == "code" or _has_code(child) for child in node.children)


def is_plain_tuple(key: Any) -> bool:
    """Whether it is a tuple of text, ints and such tuples: what a key can be that is no text and no int."""
    return type(key) is tuple and all(
        type(part) is str or type(part) is int or is_plain_tuple(part) for part in key
    )


def _dict_maker(keys: Path, value: dict[Any, Any]) -> Callable[[list[Any]], Any]:
    if isinstance(value, collections.defaultdict):
        factory: Any = value.default_factory
        return lambda new: collections.defaultdict(factory, zip(keys, new, strict=True))
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


DEFAULTDICT = "collections:defaultdict of "
"""Begins the type name of a ``dict`` node that is a defaultdict; its factory's name follows."""


def _factory_name(factory: Any) -> str:
    if factory is None:
        return "None"
    module, name = getattr(factory, "__module__", "?"), getattr(factory, "__qualname__", "?")
    return f"{module}:{name}"


@functools.cache
def _field_keys() -> tuple[type, ...]:
    """What jax calls the children of a class with fields; the second where it names none."""
    return jax.tree_util.GetAttrKey, jax.tree_util.FlattenedIndexKey


def _type_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _path_entry(key: Any) -> Key:
    for attribute in ("key", "idx", "name"):
        entry: Any = getattr(key, attribute, None)
        if type(entry) is str or type(entry) is int or is_plain_tuple(entry):
            return entry
    return str(key)
