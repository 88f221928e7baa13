"""Where the attributes of a dataset are: in it, in objects that it holds, in classes and modules of the program."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import random
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from ckpt_keras._closed import is_closed, is_library, keras_module, package

_DEPTH = 4
PLAIN = (bool, int, float, complex, str, bytes, type(None))
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
_OF_LIBRARIES = (list, dict, set, tuple, str, bytes, np.ndarray, collections.deque, *GENERATORS)


@dataclasses.dataclass(frozen=True)
class Attribute:
    """One attribute of a dataset, or of something in it."""

    owner: Any  # the object, class or module that has it
    name: str
    value: Any
    holder: Any  # the object it belongs to, also if its class has it
    is_of_class: bool = False  # the class has the value, and the object is to get its own: nothing is written into it

    def set(self, value: Any) -> None:
        setattr(self.owner, self.name, value)

    def of_object(self) -> Attribute:
        """The same, to be set on the object, also if its class has it now."""
        moved = self.owner is not self.holder
        return dataclasses.replace(self, owner=self.holder, is_of_class=moved)


class Found:
    """Classes and modules of the program that were met in a dataset. What a class has may describe samples, and change.
    It is not a part of the fingerprint of each attribute that leads to the class: a counter of all objects would change
    all of them.
    """

    def __init__(self, dataset: Any) -> None:
        self._packages = frozenset(package(cls.__module__) for cls in type(dataset).__mro__)
        self._met: dict[str, Any] = {}
        self._asked: dict[int, Any] = {}  # by ids, which are theirs as long as they are here

    def add(self, value: Any) -> None:
        """Notes a class or a module, if it is of the program."""
        if id(value) in self._asked:
            return
        self._asked[id(value)] = value
        if not self.is_of_program(value):
            return
        name = _name(value)
        while name in self._met:  # a function makes classes of one name
            name += "'"
        self._met[name] = value

    def names(self) -> set[str]:
        return set(self._met)

    def is_of_program(self, value: Any) -> bool:
        """Whether it can hold something of the program: a package of the dataset's is none of the libraries, though installed."""
        module = value.__name__ if isinstance(value, types.ModuleType) else str(value.__module__)
        if package(module) in ("builtins", "keras", "abc", "typing"):
            return False
        if isinstance(value, type) and issubclass(value, enum.Enum):
            return False  # its members stay what they are
        return package(module) in self._packages or not is_library(module)

    def parts(self) -> Iterator[tuple[str, Any, Any, str, Any]]:
        """What each of them has, after its name and a colon."""
        for name, value in list(self._met.items()):
            is_module = isinstance(value, types.ModuleType)
            parts = _of_module(value) if is_module else _of_class(value, self)
            for owner, attribute, part in parts:
                yield f"{name}:", value, owner, attribute, part


def _name(value: Any) -> str:
    if isinstance(value, types.ModuleType):
        return value.__name__
    return f"{value.__module__}.{value.__qualname__}"


def class_of(name: str) -> str:
    """The class or module of the program that has the attribute; empty if an object has it."""
    return name.rpartition(":")[0]


@functools.cache
def _arguments_of_keras() -> frozenset[str]:
    return frozenset(vars(keras_module().utils.PyDataset()))


def attributes(dataset: Any, found: Found) -> dict[str, Attribute]:
    """All attributes, by dotted names: those of objects in it, of slots and of its classes, and of what was ``found``, too."""
    walk = _Walk(found, dataset)
    own = dict(walk.into(dataset, "", 0))
    for prefix, holder, owner, name, part in found.parts():
        own |= dict(walk.of(Attribute(owner, name, part, holder), prefix, 0))
    return own


class _Walk:
    """Goes through objects, each of them once."""

    def __init__(self, found: Found, dataset: Any) -> None:
        self._found = found
        self._seen = {id(dataset)}
        self._of_classes = set[tuple[int, str]]()

    def into(self, value: Any, prefix: str, depth: int) -> Iterator[tuple[str, Attribute]]:
        for owner, name, part in _parts(value, self._found):
            yield from self.of(Attribute(owner, name, part, value), prefix, depth)

    def of(self, one: Attribute, prefix: str, depth: int) -> Iterator[tuple[str, Attribute]]:
        if depth < _DEPTH and _is_open(one.value, self._found):
            if id(one.value) not in self._seen:
                self._seen.add(id(one.value))
                yield from self.into(one.value, f"{prefix}{one.name}.", depth + 1)
        elif (id(one.owner), one.name) not in self._of_classes:  # of several objects
            if isinstance(one.owner, type):
                self._of_classes.add((id(one.owner), one.name))
            yield prefix + one.name, one


def _parts(value: Any, found: Found) -> Iterator[tuple[Any, str, Any]]:
    own = value.__dict__ if hasattr(value, "__dict__") else {}
    is_dataset = isinstance(value, keras_module().utils.PyDataset)
    if is_dataset:  # without the arguments of Keras' own class: workers, a queue
        own = {name: part for name, part in own.items() if name not in _arguments_of_keras()}
    yield from ((value, name, part) for name, part in list(own.items()))
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for said in (slots,) if isinstance(slots, str) else slots:
            hidden = said.startswith("__") and not said.endswith("__")
            name = f"_{cls.__name__.lstrip('_')}{said}" if hidden else said
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield value, name, getattr(value, name)
    for cls, name, part in _of_class(type(value), found):
        if not (name in own or (is_dataset and hasattr(keras_module().utils.PyDataset, name))):
            yield cls, name, part


def _of_class(value: type, found: Found) -> Iterator[tuple[type, str, Any]]:
    """What a class and its bases have, but for code; of those of libraries, what can change."""
    hidden = set[str]()
    for cls in value.__mro__:
        if package(cls.__module__) in ("builtins", "keras", "abc", "typing"):
            continue
        of_program = found.is_of_program(cls)
        for name, part in list(vars(cls).items()):
            can_change = of_program or type(part) in _OF_LIBRARIES
            if can_change and name not in hidden and not _is_code(name, part):
                yield cls, name, part
        hidden |= vars(cls).keys()


def _of_module(value: types.ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """What a module has, but for code and what it imports: else one would lead to all of the program."""
    for name, part in list(vars(value).items()):
        imported = isinstance(part, type) and part.__module__ != value.__name__
        if not (imported or isinstance(part, types.ModuleType) or _is_code(name, part)):
            yield value, name, part


def _is_code(name: str, value: Any) -> bool:
    """Whether it is a method, a property or a function, or what Python itself notes of a class or module."""
    return name.startswith("__") or hasattr(type(value), "__get__")


def _is_open(value: Any, found: Found) -> bool:
    """Whether it is an object of a class written in Python that says nothing of how it is copied: its attributes are all of it."""
    cls = type(value)
    if is_closed(value) or isinstance(value, (*PLAIN, *GENERATORS, type, types.ModuleType)):
        return False
    if package(cls.__module__) == "keras" and not isinstance(value, keras_module().utils.PyDataset):
        return False
    if any(one.__module__ == "builtins" and one is not object for one in cls.__mro__):
        return False  # a list with attributes of its own, say
    try:
        list(_parts(value, found))
    except Exception:  # it does not let anybody look
        return False
    return not says_how(cls)


def says_how(cls: type) -> bool:
    """Whether a class says how its objects are copied, and may leave something out."""
    plain = cls.__reduce_ex__ is object.__reduce_ex__ and cls.__reduce__ is object.__reduce__
    return not plain or getattr(cls, "__getstate__", None) is not getattr(
        object, "__getstate__", None
    )
