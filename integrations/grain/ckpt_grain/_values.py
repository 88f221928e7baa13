"""Describes settings by value: arrays by digests, functions by name, objects by constructor arguments.

The text is the same in every process that makes the same pipeline. For a pipeline that may have
been used before it was first described, everything that use may have changed is left out:
optional fields that hold objects or None, a ``repr``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import decimal
import enum
import functools
import hashlib
import inspect
import operator
import pathlib
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

MAX_TEXT = 400
"""The most characters of one setting; a longer one is cut, with a digest added."""

MAX_ITEMS = 10_000
"""The most entries of a list or dictionary that are described one by one."""

WHOLE_BYTES = 64 << 20
"""Larger arrays are digested by blocks spread over them, because they may be mapped files."""

BLOCKS = 64
BLOCK_BYTES = 1 << 20

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Memory addresses, which differ between processes."""

QUOTED = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"")
"""Text in quotes, as ``repr`` writes it."""

_VALUES = (
    *(type(None), bool, int, float, complex, str, slice, range, enum.Enum, np.dtype),
    type(Ellipsis),
    *(datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, pathlib.PurePath),
    *(operator.itemgetter, operator.attrgetter, operator.methodcaller),
)
"""Types of immutable values, which are described by their ``repr``."""


class Given(NamedTuple):
    """A constructor argument of an object, with its current value."""

    value: Any
    optional: bool

    def is_firm(self) -> bool:
        """Whether use cannot have changed it."""
        return _is_firm(self.value) or (not self.optional and as_array(self.value) is not None)


class ValueText:
    """Describes settings as text; ``firm``: only what use cannot change."""

    def __init__(self, firm: bool) -> None:
        self._firm = firm
        self._inside: list[int] = []

    def text(self, value: Any, *, source: bool = False) -> str:
        """A setting as text that is the same in every process, shortened to MAX_TEXT. ``source``: the value is a data
        source; Grain's own are described by their ``repr``.
        """
        text = self._described(value, own_repr=not self._firm or (source and is_of_grain(value)))
        if len(text) <= MAX_TEXT:
            return text
        digest = hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16]
        return f"{text[:MAX_TEXT]!r}... sha256:{digest}"

    def _described(self, value: Any, own_repr: bool) -> str:
        if id(value) in self._inside:  # a container that holds itself
            return "..."
        self._inside.append(id(value))
        try:
            return self._text_of(value, own_repr)
        finally:
            self._inside.pop()

    def _text_of(self, value: Any, own_repr: bool) -> str:
        def text_of(inner: Any) -> str:
            return self._described(inner, own_repr)

        match value:
            case np.generic() if value.dtype.names is None:
                return repr(value.item())
            case bytes() | bytearray():
                return repr(bytes(value))
            case enum.Enum():
                return f"{type(value).__name__}.{value.name}"
            case re.Pattern():
                return f"Pattern({value.pattern!r}, {int(value.flags)})"
            case _ if isinstance(value, _VALUES):
                return _closed(repr(value))
            case list() | tuple():
                return _listed("[]", value, text_of)
            case set() | frozenset():  # sorted, because the order differs between processes
                return f"{{{', '.join(sorted(map(text_of, value)))}}}"
            case Mapping():
                return self._mapping_text(value, text_of)
            case functools.partial():
                given = [
                    *map(text_of, value.args),
                    *_named(sorted(value.keywords.items()), text_of),
                ]
                function = text_of(value.func)
                return f"{function}({', '.join(given)})" if given else function
            case types.ModuleType():
                return value.__name__
            case _ if (array := as_array(value)) is not None:
                return array_text(array, text_of)
            case _ if inspect.isclass(value):
                return value.__qualname__
            case _ if callable(value) and isinstance(getattr(value, "__name__", None), str):
                return self._function_text(value)
            case _:
                return self._object_text(value, own_repr)

    def _mapping_text(self, value: Mapping[Any, Any], text_of: Any) -> str:
        def pair(item: tuple[Any, Any]) -> str:
            key, inner = item
            named = isinstance(key, str) and key.isidentifier()
            return f"{key if named else text_of(key)}: {text_of(inner)}"

        return _listed("{}", value.items(), pair)

    def _function_text(self, value: Any) -> str:
        """A function by its name, a method with its object; what it holds and its code are not compared."""
        owner = getattr(value, "__self__", None)
        if owner is not None and not inspect.ismodule(owner):
            return f"{self._described(owner, own_repr=False)}.{value.__name__}"
        if isinstance(value, types.FunctionType):
            return value.__qualname__
        wrapped = getattr(value, "__wrapped__", None)
        if wrapped is not None:  # jax.jit, functools.lru_cache
            return f"{type(value).__name__}({self._described(wrapped, own_repr=False)})"
        return value.__name__

    def _object_text(self, value: Any, own_repr: bool) -> str:
        name = type(value).__name__
        dataclass: Any = getattr(value, "__dataclass_params__", None)
        by_repr = type(value).__repr__ is not object.__repr__ and dataclass is None
        if by_repr and (own_repr or is_of_grain(value)):
            text = repr(value)  # may contain a counter of its calls
            return name if ADDRESS.search(text) else _closed(text)
        fields = [
            (field, given.value)
            for field, given in made_with(value).items()
            if not self._firm or (dataclass is not None and not given.optional) or given.is_firm()
        ]
        settings = ", ".join(_named(fields, lambda inner: self._described(inner, own_repr)))
        return f"{name}({settings})" if settings or dataclass is not None else name


def made_with(obj: Any) -> dict[str, Given]:
    """The constructor arguments that an object stores under the name of the parameter."""
    if dataclasses.is_dataclass(obj):
        return {
            field.name: Given(
                getattr(obj, field.name, None),
                field.default is not dataclasses.MISSING
                or field.default_factory is not dataclasses.MISSING,
            )
            for field in dataclasses.fields(obj)
            if field.init
        }
    attributes = _attributes(obj)
    found: dict[str, Given] = {}
    for name, parameter in _parameters(type(obj)).items():
        for attribute in (name, f"_{name}", f"_global_{name}"):
            if attribute in attributes:
                optional = parameter.default is not parameter.empty
                found[name] = Given(attributes[attribute], optional)
    return found


def _parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(cls.__init__).parameters
    except (TypeError, ValueError):  # a class written in C
        return {}


def _attributes(obj: Any) -> dict[str, Any]:
    found = dict(getattr(obj, "__dict__", {}))
    for cls in type(obj).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(obj, name):
                found.setdefault(name, getattr(obj, name))
    return found


def _is_firm(value: Any) -> bool:
    """Whether use cannot change a value: it is not a mutable container, an object or None."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_firm, value))
    if isinstance(value, (bytes, np.generic, re.Pattern, functools.partial, *_VALUES)):
        return value is not None
    return inspect.isroutine(value) or inspect.isclass(value) or isinstance(value, np.ufunc)


def _named(items: Iterator[tuple[str, Any]] | Sequence[tuple[str, Any]], text_of: Any) -> list[str]:
    return [f"{name}={text_of(value)}" for name, value in items]


def _listed(brackets: str, items: Any, text_of: Any) -> str:
    """Entries in brackets; above MAX_ITEMS, their number and a digest of a sample."""
    left, right = brackets
    if len(items) <= MAX_ITEMS:
        return f"{left}{', '.join(map(text_of, items))}{right}"
    step = len(items) // MAX_ITEMS
    digest = hashlib.sha256()
    for number, item in enumerate(items):
        if number % step == 0 or number == len(items) - 1:
            digest.update(text_of(item).encode(errors="backslashreplace") + b"\n")
    return f"{left}{len(items)} entries, digest {digest.hexdigest()[:16]}{right}"


def _closed(text: str) -> str:
    """A text with balanced brackets, so that the text after it can be separated."""
    depth = 0
    unquoted = QUOTED.sub("", text)
    for character in unquoted:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            break
    return text if depth == 0 and not {"'", '"'} & set(unquoted) else repr(text)


def is_of_grain(value: Any) -> bool:
    """Whether an object is of one of Grain's own classes."""
    return type(value).__module__.partition(".")[0] == "grain"


def as_array(value: Any) -> np.ndarray | None:
    """The value as a host array; None if it is not an array, or not readable on the host."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, np.void):
        return np.asarray(value)
    if isinstance(value, jax.Array):
        if value.is_deleted() or not value.is_fully_addressable:
            return None
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        return np.asarray(jax.device_get(value))
    if type(value).__module__.partition(".")[0] in ("torch", "tensorflow"):
        with contextlib.suppress(
            RuntimeError, TypeError, ValueError
        ):  # on a device, or no numpy dtype
            found = np.asarray(value)
            return found if found.dtype.kind != "O" else None
    return None


def array_text(array: np.ndarray, text_of: Callable[[Any], str]) -> str:
    """An array as text; ``text_of`` describes its elements if they are objects."""
    if array.dtype.hasobject or array.dtype.kind == "T":
        return f"ndarray[{array.dtype}{array.shape}, {text_of(array.tolist())}]"
    if array.dtype.names is not None:  # the padding between fields must not count
        return f"ndarray[{text_of({name: array[name] for name in array.dtype.names})}]"
    return f"ndarray[{array.dtype}{array.shape}, digest {_array_digest(array)}]"


def _array_digest(array: np.ndarray) -> str:
    if array.nbytes <= WHOLE_BYTES:
        return hashlib.sha256(array.tobytes()).hexdigest()[:16]
    items = max(1, BLOCK_BYTES // array.itemsize)
    found = hashlib.sha256()
    for start in np.linspace(0, array.size - items, BLOCKS).astype(np.int64):
        found.update(array.flat[start : start + items].tobytes())
    return found.hexdigest()[:16]
