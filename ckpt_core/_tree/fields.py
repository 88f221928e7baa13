"""Dataclasses and NamedTuples as nodes: their fields are all that a checkpoint holds of them."""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ckpt_core._tree.code import unsupported
from ckpt_core._words import some
from ckpt_core.arguments import with_article

_WITH_CONTENTS = (
    *(dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float, complex),
    *(collections.deque, BaseException),
)
"""Classes whose objects hold something that is no attribute."""


def refuse_contents(value: Any, where: str) -> None:
    """Raises UnsupportedLeaf for a dataclass that is also a dict, a list or the like."""
    base = next((cls for cls in _WITH_CONTENTS if isinstance(value, cls)), None)
    if base is not None:
        raise unsupported(
            value,
            where,
            f"it is a dataclass and {with_article(base.__name__)}, and only its fields would be saved. Register its class with "
            f"jax.tree_util.register_pytree_node, or save a plain {base.__name__} or dataclass",
        )


def refuse_unset(value: Any, where: str) -> None:
    """Raises UnsupportedLeaf for a dataclass with a field that was never set."""
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    for name in (field.name for field in fields if not hasattr(value, field.name)):
        why = f"its field {name!r} was never set: set it in __init__ or __post_init__, or give it a default"
        raise unsupported(value, where, why)


def refuse_more_than_fields(value: Any, names: Sequence[str], where: str) -> None:
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


def dataclass_maker(value: Any, names: Sequence[str]) -> Callable[[list[Any]], Any]:
    """A function that makes an object like ``value`` from new values of its fields."""
    cls, beyond = type(value), dict(_beyond(value, names))
    return lambda new: filled(cls, {**dict(zip(names, new, strict=True)), **beyond})


def filled(cls: type, attributes: Mapping[str, Any]) -> Any:
    """An object with these attributes, made without __init__, which may compute other values or raise."""
    made = object.__new__(cls)
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made
