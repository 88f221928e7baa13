"""Describes settings in the way of earlier versions, to compare with the checkpoints they saved.

They described arrays by dtype and shape, functions by name, and objects without a ``repr`` by class.
Do not change the texts: they are stored in existing checkpoints.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from ckpt_grain._how import ADDRESS, EARLIER_FIRM, MAX_ITEMS, MAX_TEXT, OLD, is_of_grain


class EarlierText:
    """Describes settings as text.

    Args:
        how: EARLIER_WHOLE, EARLIER_FIRM or OLD.
    """

    def __init__(self, how: str) -> None:
        self._how = how

    def counts_firmly(self, value: Any, optional: bool) -> bool:
        """Whether a setting is part of a description that leaves out what use may change."""
        return _is_plain(value)

    def text(self, value: Any, *, source: bool = False) -> str:
        """A setting as text that is the same in every process, shortened to MAX_TEXT.

        Args:
            source: the value is a data source: described by its ``repr``, as Grain itself does.
        """
        text = self._full_text(value, source)
        if len(text) <= MAX_TEXT:
            return text
        return f"{text[:MAX_TEXT]}... sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def _full_text(self, value: Any, source: bool = False) -> str:
        tell = self._full_text
        match value:
            case np.generic():
                return repr(value.item())
            case None | bool() | int() | float() | str() | slice() | enum.Enum():
                return repr(value)
            case bytes() | list() | tuple() | Mapping() if len(value) > MAX_ITEMS:  # data
                return f"{type(value).__name__}[{len(value)}]"
            case bytes():
                return repr(value)
            case list() | tuple():
                return f"[{', '.join(tell(item) for item in value)}]"
            case set() | frozenset():  # sorted, because the order differs between processes
                return f"{{{', '.join(sorted(tell(item) for item in value))}}}"
            case Mapping():
                return f"{{{', '.join(f'{key}: {tell(item)}' for key, item in value.items())}}}"
            case np.ndarray():
                return f"ndarray[{value.dtype}{value.shape}]"
            case functools.partial():
                return self._partial_text(value)
            case _:
                return self._object_text(value, source)

    def _partial_text(self, value: functools.partial[Any]) -> str:
        """The function and its arguments, which are settings like any other."""
        function = self._full_text(value.func)
        if self._how == OLD:
            return function
        given = [
            *(self._full_text(argument) for argument in value.args),
            *(f"{name}={self._full_text(told)}" for name, told in sorted(value.keywords.items())),
        ]
        return f"{function}({', '.join(given)})" if given else function

    def _object_text(self, value: Any, source: bool) -> str:
        if inspect.isroutine(value) or inspect.isclass(value):
            owner = getattr(value, "__self__", None)
            prefix = "" if owner is None or inspect.ismodule(owner) else f"{type(owner).__name__}."
            return prefix + value.__name__
        name = type(value).__name__
        if type(value).__repr__ is object.__repr__:
            return name
        dataclass: Any = getattr(value, "__dataclass_params__", None)
        if dataclass is not None and dataclass.repr:  # field by field, so that sets are sorted
            fields = [field for field in dataclasses.fields(value) if self._counts(field, value)]
            told = (f"{f.name}={self._full_text(getattr(value, f.name))}" for f in fields)
            return f"{name}({', '.join(told)})"
        if self._how == EARLIER_FIRM and not source and not is_of_grain(value):
            return name  # a repr may contain a counter of its calls
        text = repr(value)
        return name if ADDRESS.search(text) else text

    def _counts(self, field: dataclasses.Field[Any], value: Any) -> bool:
        """Whether a field is a setting that use cannot have changed."""
        if not field.repr or (self._how != OLD and not field.init):
            return False
        if self._how != EARLIER_FIRM:
            return True
        optional = (
            field.default is not dataclasses.MISSING
            or field.default_factory is not dataclasses.MISSING
        )
        return not optional or _is_plain(getattr(value, field.name))


def _is_plain(value: Any) -> bool:
    """Whether use cannot change a value: it is not a mutable container, an object or None."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_plain, value))
    plain = (bool, int, float, complex, str, bytes, slice, enum.Enum, np.generic, functools.partial)
    return isinstance(value, plain) or inspect.isroutine(value) or inspect.isclass(value)
