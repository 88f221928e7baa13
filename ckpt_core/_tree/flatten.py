"""Flattens pytrees into paths, leaves and a structure.

A *path* is a tuple with one entry per level: ``str`` for a dictionary's text key or a field name,
``int`` for a position or a dictionary's int key, ``tuple`` for a dictionary's tuple key (Flax has
such). As text, entries are joined with ``/``; ``~`` and ``/`` inside an entry are escaped as ``~0``
and ``~1``, as in JSON pointers.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ckpt_core._lazy import jax
from ckpt_core._tree.code import code_name, refused, type_name, unsupported
from ckpt_core._tree.static import is_lost, static_text
from ckpt_core._words import some
from ckpt_core.arguments import an, with_article

Key = str | int | tuple[Any, ...]  # one level of a path; tuples are keys of dictionaries
Path = tuple[Key, ...]  # path of a leaf: one entry per level

MAX_DEPTH = 300  # maximum nesting of a tree; also bounds the recursion over a malicious record


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One node of a tree's structure: the type of the container, and how to rebuild it."""

    # ``leaf``, ``none``, ``dict``, ``ordered``, ``list``, ``tuple``, ``namedtuple``, ``dataclass``, ``custom`` (a registered
    # pytree node), ``code`` (a function in one, which is no state), ``expanded`` (a live object with the state of its adapter).
    kind: str
    keys: Path = ()  # one path entry per child
    children: tuple[Node, ...] = ()
    # ``module:qualname`` of a class or function; of a leaf or expanded node, the key of ``Below``.
    type_name: str = ""
    # Rebuilds the container from its children; None if the node was read from disk.
    make: Callable[[list[Any]], Any] | None = dataclasses.field(default=None, compare=False)
    # Static fields of a ``custom`` node, numbers in a live object: JSON (``static_text``).
    static: str = ""


LEAF = Node("leaf")
NONE = Node("none")


class Below:
    """Wrapper, in a tree to flatten, of a value that Orbax's trees have one key deeper: to Orbax, an NNX Variable is a node
    with the child ``value``. Paths, which users see, omit that key; stored array names, which Orbax reads, contain it. The
    value's ``leaf`` or ``expanded`` node has the key as its ``type_name``.
    """

    __slots__ = ("key", "value")

    def __init__(self, key: str, value: Any) -> None:
        self.key = key
        self.value = value


class WithConstants(NamedTuple):
    """Wrapper, in a tree to flatten, of the state of a live object; with numbers of the object that are no state, by path."""

    state: Any
    constants: Mapping[str, int | float]


@functools.lru_cache(64)
def leaf_below(key: str) -> Node:
    """The node of a leaf that is wrapped in ``Below``."""
    return Node("leaf", (), (), key)


@dataclasses.dataclass(frozen=True, slots=True)
class FlatTree:
    """A flattened tree: parallel lists of paths and leaves, and the structure."""

    paths: list[Path]
    leaves: list[Any]
    root: Node


def format_path(path: Path) -> str:
    """A path as text: ``("layers", 0, "a/b")`` gives ``layers/0/a~1b``, ``()`` gives ``(root)``."""
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
    """The array name in Orbax's format: ``("layers", 0, "w")`` gives ``layers.0.w``, unescaped."""
    return ".".join(map(str, path))


def stored_paths(root: Node, paths: Sequence[Path]) -> Sequence[Path]:
    """For each leaf its path in Orbax's own trees, with keys that ours omit (``Below``); ``paths`` itself if no leaf has one."""
    if not any_node(root, lambda node: node.kind in ("leaf", "expanded") and node.type_name != ""):
        return paths
    found: list[Path] = []

    def collect(node: Node, path: Path) -> None:
        if node.kind in ("leaf", "expanded") and node.type_name:
            path = (*path, node.type_name)
        if node.kind == "leaf":
            found.append(path)
        elif node.kind == "expanded":
            collect(node.children[0], path)
        else:
            for key, child in zip(node.keys, node.children, strict=True):
                collect(child, (*path, key))

    collect(root, ())
    return found


def any_node(root: Node, holds: Callable[[Node], bool]) -> bool:
    """Whether any node of a structure is such; plain leaves below the root are not asked."""
    # equal layers may be one node
    below = {id(child): child for child in root.children if child is not LEAF}
    inside = functools.partial(any_node, holds=holds)  # one frame for each level
    return holds(root) or any(map(inside, below.values()))


def code_and_constants(node: Node, path: Path = ()) -> list[tuple[Path, str]]:
    """Path and name of each function in a structure; and path and text of what has static values."""
    while node.kind == "expanded":
        (node,) = node.children
    own = node.type_name if node.kind == "code" else node.static
    found = [(path, own)] if own else []
    for key, child in zip(node.keys, node.children, strict=True):
        if child is not LEAF and child.kind != "leaf":
            found += code_and_constants(child, (*path, key))
    return found


def flatten(
    tree: Any,
    *,
    expand: Callable[[Any, Path], Any] | None = None,
    keep: bool = False,
    saving: bool = False,
) -> FlatTree:
    """Paths, leaves and structure of a tree; None belongs to the structure. ``expand`` is called for all but arrays, plain values,
    dicts, lists and tuples; it gives None, or the tree to flatten in the object's place and the function that makes the object's
    value from a new state. ``keep`` sets ``Node.make``, for ``unflatten``; ``saving`` raises for objects without anything to
    store. Raises UnsupportedLeaf for an unsupported key, a container that contains itself, or too deep nesting.
    """
    walk = _Walk(expand, keep, saving)
    try:
        root = walk.visit(tree, ())
    except RecursionError as error:
        where = format_path(max(walk.paths, key=len, default=()))
        raise refused(
            tree,
            where[:200],
            "the tree, or a live object in it that gives its state, is nested too deeply for "
            f"Python, which allows {sys.getrecursionlimit()} calls within each other",
        ) from error
    return FlatTree(walk.paths, walk.leaves, root)


class _Walk:
    """One traversal: collects paths and leaves while it builds the nodes."""

    _modules = 0  # number of enclosing registered classes with fields

    def __init__(self, expand: Callable[[Any, Path], Any] | None, keep: bool, saving: bool) -> None:
        self.paths, self.leaves = list[Path](), list[Any]()
        self._expand, self._keep, self._saving = expand, keep, saving
        self._open = set[int]()
        self._known_leaf_types: set[type] = {int, float, bool, complex, str, bytes}

    def visit(self, value: Any, path: Path) -> Node:
        cls = type(value)
        if cls in self._known_leaf_types:
            return self._leaf(value, path)
        if value is None:
            return NONE
        if cls is Below:
            node = self.visit(value.value, path)
            if node is LEAF:
                return leaf_below(value.key)
            return Node("expanded", (), (node,), value.key)
        if cls is WithConstants:
            node = self.visit(value.state, path)
            if node.kind != "dict":
                return node
            numbers = value.constants.items()
            plain = {name: ["float", x.hex()] if type(x) is float else x for name, x in numbers}
            return dataclasses.replace(node, static=json.dumps({"constants": plain}))
        if len(path) > MAX_DEPTH:
            where = f"{format_path(path)[:200]}..."
            raise refused(value, where, f"nested more than {MAX_DEPTH} levels deep")
        if isinstance(value, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
            self._known_leaf_types.add(cls)
            return self._leaf(value, path)
        if id(value) in self._open:
            way = "no tree can hold that. Leave the way back to it out of the state"
            raise refused(value, format_path(path), f"{an(value)} that holds itself: {way}")
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
            # type(), since a bool is an int too: True and 1 must not be the same key.
            if type(key) is not str and type(key) is not int and not is_plain_tuple(key):
                rule = "keys must be str or int, or tuples of them. Convert it."
                why = f"dictionary key {key!r} is {an(key)}; {rule}"
                raise refused(key, format_path(path), why)
        keys = tuple(value)
        make = _dict_maker(keys, value) if self._keep else None
        kind = "ordered" if type(value) is collections.OrderedDict else "dict"
        name = ""
        if isinstance(value, collections.defaultdict):
            factory = value.default_factory
            module, made = (getattr(factory, part, "?") for part in ("__module__", "__qualname__"))
            name = DEFAULTDICT + ("None" if factory is None else f"{module}:{made}")
        return self._container(kind, keys, value.values(), path, name, make)

    def _container(
        self,
        kind: str,
        keys: Iterable[Key],
        values: Iterable[Any],
        path: Path,
        type_name: str = "",
        make: Callable[[list[Any]], Any] | None = None,
    ) -> Node:
        keys = tuple(keys)
        children: list[Node] = []
        for key, value in zip(keys, values, strict=True):
            if type(value) in self._known_leaf_types:  # inlined visit(): saves a call per leaf
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
        """Neither a builtin container nor an array: by adapter, NamedTuple, registered node, dataclass."""
        cls = type(value)
        expanded = self._expand(value, path) if self._expand else None
        if expanded is not None:
            state, finish = expanded
            # A closure over `finish` only: the structure must not keep the live object alive.
            make = (lambda new: finish(new[0])) if self._keep else None
            return Node("expanded", (), (self.visit(state, path),), "", make)
        if hasattr(cls, "__next__"):
            return self._leaf(value, path)  # an iterator; jax's flatten would warn about it
        if isinstance(value, tuple) and hasattr(cls, "_fields"):
            make = cls._make if self._keep else None
            fields: tuple[str, ...] = cls._fields
            if self._saving and getattr(value, "__dict__", None):
                _refuse_more_than_fields(value, fields, format_path(path))
            return self._container("namedtuple", fields, value, path, type_name(cls), make)
        try:
            flattened = jax.tree_util.tree_flatten_with_path
            keyed, treedef = flattened(value, is_leaf=lambda one: one is not value)
        except (AttributeError, TypeError):  # jax's and Equinox's say no path
            _refuse_unset(value, format_path(path))
            raise
        if not (len(keyed) == 1 and not keyed[0][0] and keyed[0][1] is value):
            return self._registered(value, path, keyed, treedef)
        # in a target, what has a shape and a dtype stands for an array
        array = self._keep and hasattr(value, "shape") and hasattr(value, "dtype")
        if dataclasses.is_dataclass(value) and not isinstance(value, type) and not array:
            return self._dataclass(value, path)
        if self._modules and (name := code_name(value)) is not None:
            make = (lambda _: value) if self._keep else None
            return Node("code", (), (), name, make)
        return self._leaf(value, path)

    def _registered(self, value: Any, path: Path, keyed: list[Any], treedef: Any) -> Node:
        """The node of a registered pytree class; ``keyed`` are its children with jax's keys."""
        aux = treedef.node_data()[1]
        is_static = not keyed and aux is value
        if is_static and self._saving and not self._modules and is_lost(value):
            raise refused(
                value,
                format_path(path),
                f"cannot save {an(value)}: all of it is static to jax, and a checkpoint would hold nothing of it. "
                "Leave it out: of flax.nnx.split(model) save the state, or save the model itself",
            )
        make = treedef.unflatten if self._keep else None
        kinds = {type(key_path[0]) for key_path, _ in keyed}
        named, numbered = jax.tree_util.GetAttrKey, jax.tree_util.FlattenedIndexKey
        # a class with fields, as opposed to a registered mapping or sequence
        module = named in kinds or numbered in kinds
        self._modules += module
        keys = [_path_entry(key_path[0]) for key_path, _ in keyed]
        children = [child for _, child in keyed]
        node = self._container("custom", keys, children, path, type_name(type(value)), make)
        self._modules -= module
        by_field, code = kinds <= {named}, any_node(node, lambda below: below.kind == "code")
        static = static_text(value, node.keys, by_field=by_field, aux=aux, names_function=not code)
        return dataclasses.replace(node, static=static) if static else node

    def _dataclass(self, value: Any, path: Path) -> Node:
        where, names = format_path(path), [field.name for field in dataclasses.fields(value)]
        if base := next((cls for cls in _WITH_CONTENTS if isinstance(value, cls)), None):
            advice = "Register its class with jax.tree_util.register_pytree_node, or save a plain"
            why = f"it is a dataclass and {with_article(base.__name__)}, and only its fields would be saved"
            raise unsupported(value, where, f"{why}. {advice} {base.__name__} or dataclass")
        _refuse_unset(value, where)
        if self._saving:
            _refuse_more_than_fields(value, names, where)
        make: Callable[[list[Any]], Any] | None = None
        cls = type(value)
        if self._keep:
            beyond = dict(_beyond(value, names))
            make = lambda new: filled(cls, {**dict(zip(names, new, strict=True)), **beyond})  # noqa: E731
        values = [getattr(value, name) for name in names]
        return self._container("dataclass", names, values, path, type_name(cls), make)


def is_plain_tuple(key: Any) -> bool:
    """Whether ``key`` is a tuple of str, int and such tuples, which may be a dictionary key."""
    return type(key) is tuple and all(
        type(part) is str or type(part) is int or is_plain_tuple(part) for part in key
    )


def _dict_maker(keys: Path, value: dict[Any, Any]) -> Callable[[list[Any]], Any]:
    if isinstance(value, collections.defaultdict):
        factory: Any = value.default_factory
        return lambda new: collections.defaultdict(factory, zip(keys, new, strict=True))
    if type(value) is not collections.OrderedDict:
        return lambda new: dict(zip(keys, new, strict=True))
    attributes = dict(vars(value))  # torch stores module versions as attributes of a state_dict

    def make(new: list[Any]) -> Any:
        made = collections.OrderedDict(zip(keys, new, strict=True))
        vars(made).update(attributes)
        return made

    return make


_WITH_CONTENTS = (
    *(dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float, complex),
    *(collections.deque, BaseException),
)
"""Classes whose objects hold something that is no attribute."""


def _refuse_unset(value: Any, where: str) -> None:
    """Raises UnsupportedLeaf for a dataclass with a field that was never set."""
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    for name in (field.name for field in fields if not hasattr(value, field.name)):
        why = f"its field {name!r} was never set: set it in __init__ or __post_init__, or give it a default"
        raise unsupported(value, where, why)


def _refuse_more_than_fields(value: Any, names: Sequence[str], where: str) -> None:
    """Raises UnsupportedLeaf for a dataclass or NamedTuple that holds attributes beside its fields."""
    if beyond := [name for name, _ in _beyond(value, names)]:
        raise unsupported(
            value,
            where,
            f"{some(beyond)} would be lost, which is set on it and no field. Declare it as a field; or as a "
            "functools.cached_property, if it follows from the fields; or delete it before the save",
        )


def _beyond(value: Any, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Name and value of the attributes of an object that are no fields, nor computed from them."""
    cls = type(value)
    for name, found in getattr(value, "__dict__", {}).items():
        special = name.startswith("__") and name.endswith("__")  # __orig_class__ of typing
        cached = isinstance(inspect.getattr_static(cls, name, None), functools.cached_property)
        if name not in names and not special and not cached:
            yield name, found
    for owner in cls.__mro__:
        for name, member in vars(owner).items():
            if inspect.ismemberdescriptor(member) and name not in names and hasattr(value, name):
                yield name, getattr(value, name)


def filled(cls: type, attributes: Mapping[str, Any]) -> Any:
    """An object with these attributes, made without __init__, which may compute other values or raise."""
    made = object.__new__(cls)
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made


DEFAULTDICT = "collections:defaultdict of "
"""Prefix of the type name of a ``dict`` node that is a defaultdict; the factory's name follows."""


def _path_entry(key: Any) -> Key:
    for attribute in ("key", "idx", "name"):
        entry: Any = getattr(key, attribute, None)
        if type(entry) is str or type(entry) is int or is_plain_tuple(entry):
            return entry
    return str(key)
