"""Frozen dataclasses that are quick to import.

``dataclass`` compiles six functions for each class, which was half of the time that the modules of a load took to import.
Three of them differ in the names of the fields only: ``__eq__``, ``__hash__`` and ``__repr__`` are functions of all classes here.
"""

from __future__ import annotations

import functools
import operator
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar, dataclass_transform, overload

_T = TypeVar("_T")


@overload
def frozen(cls: type[_T], /) -> type[_T]: ...


@overload
def frozen(*, kw_only: bool = False, slots: bool = False) -> Callable[[type[_T]], type[_T]]: ...


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(
    cls: type[_T] | None = None, /, *, kw_only: bool = False, slots: bool = False
) -> type[_T] | Callable[[type[_T]], type[_T]]:
    """The class as ``dataclass(frozen=True)`` makes it, with only ``__init__`` compiled
    for it; its own ``__repr__``, ``__eq__``, ``__hash__`` stay.
    """
    if cls is None:
        return functools.partial(frozen, kw_only=kw_only, slots=slots)  # pyright: ignore[reportReturnType]
    own = vars(cls)
    made: Any = dataclass(frozen=True, eq=False, repr=False, kw_only=kw_only, slots=slots)(cls)
    if "__repr__" not in own:
        made.__repr__ = __repr__
    if "__eq__" not in own:
        made.__eq__ = __eq__
    if own.get("__hash__") is None:
        made.__hash__ = __hash__
    return made


class _Compared(NamedTuple):
    """What gives the fields of an object by which it is compared, and those by which it is hashed."""

    equal: Callable[[Any], Any]
    hashed: Callable[[Any], Any]


def _compared(cls: type[Any]) -> _Compared:
    """Kept by the class: a user's may end before the process does."""
    found = cls.__dict__.get("_frozen_compared")
    if found is None:
        equal = [one.name for one in fields(cls) if one.compare]
        hashed = [
            one.name for one in fields(cls) if (one.compare if one.hash is None else one.hash)
        ]
        found = _Compared(_getter(equal), _getter(hashed))
        cls._frozen_compared = found
    return found


def _getter(names: list[str]) -> Callable[[Any], Any]:
    """Gives a tuple, also of one field: it compares an array by what it is, not element by element."""
    if len(names) == 1:
        return lambda of, name=names[0]: (getattr(of, name),)
    return operator.attrgetter(*names) if names else lambda _: ()


def __eq__(self: Any, other: object) -> Any:
    """Whether all fields that count are equal."""
    if other.__class__ is not self.__class__:
        return NotImplemented
    of = _compared(self.__class__).equal
    return of(self) == of(other)


def __hash__(self: Any) -> int:
    return hash(_compared(self.__class__).hashed(self))


@reprlib.recursive_repr()
def __repr__(self: Any) -> str:
    shown = (f"{one.name}={getattr(self, one.name)!r}" for one in fields(self) if one.repr)
    return f"{self.__class__.__qualname__}({', '.join(shown)})"
