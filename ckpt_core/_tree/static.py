"""Static parts of registered pytree classes, which jax does not flatten: fields and functions.

They are recorded with the structure as JSON: ``{"fields": {name: value}, "function": name}``. Only
plain values are recorded: as JSON values, or as ``[kind, ...]`` for those that JSON lacks. Reading
them never imports a module. ``"constants": {name: value}`` are those that a restore only compares: the
plain parts of fields that are not all plain, of jax's auxiliary data, and numbers in live objects.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ckpt_core._lazy import jax
from ckpt_core._tree.code import wrapped_name

_DEEPEST = 32
_TYPES = {cls.__name__: cls for cls in (bool, int, float, complex, str, bytes)}
_NUMBERS = frozenset("biufcV")
_DEEPEST_PART = 4


class NotPlain(ValueError):
    """A static value that cannot be recorded, or that this process cannot rebuild."""


def static_text(
    value: Any, children: Sequence[Any], *, by_field: bool, aux: Any, names_function: bool
) -> str:
    """The static parts of an object of a registered class as JSON, or nothing. ``children`` are keys, and names if ``by_field``."""
    described: dict[str, Any] = {}
    if by_field and dataclasses.is_dataclass(value):
        if (fields := recorded_fields(value, children)) is not None:
            described["fields"] = fields
        else:
            names = _static_names(type(value), tuple(children))
            parts = {name: getattr(value, name, ...) for name in names}
            described["constants"] = dict(_plain_parts("", parts, _DEEPEST_PART))
    elif aux is not None and aux is not value:  # names of children say nothing new
        texts = isinstance(aux, (tuple, list)) and all(type(part) is str for part in aux)
        parts = [part for part in aux if part not in children] if texts else aux
        described["constants"] = dict(_plain_parts("aux_data", parts, _DEEPEST_PART - 1))
    if names_function and (name := wrapped_name(value)) is not None:
        described["function"] = name
    described = {key: part for key, part in described.items() if part}
    return json.dumps(described, separators=(",", ":")) if described else ""


def _plain_parts(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """The plain values, and the plain parts of containers, dataclasses and objects of numpy, by path; as JSON values."""
    if isinstance(value, np.generic):
        value = value.item()
    try:
        yield name, _dump(value, _DEEPEST)
        return
    except (ValueError, AttributeError):
        pass  # it is not plain, and may have parts that are
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        value = {name: getattr(value, name, ...) for name in names}
    elif isinstance(value, (tuple, list)):
        value = dict(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    if isinstance(value, Mapping) and depth:
        for key, part in value.items():
            yield from _plain_parts(f"{name}/{key}" if name else str(key), part, depth - 1)


def recorded_fields(value: Any, children: Sequence[str]) -> dict[str, Any] | None:
    """The fields that are not children, as JSON values; None if one of them is not plain."""
    try:
        names = _static_names(type(value), tuple(children))
        return {name: _dump(getattr(value, name), _DEEPEST) for name in names}
    except (ValueError, AttributeError):
        return None


def is_lost(value: Any) -> bool:
    """Whether an object without children has static state of which nothing can be recorded."""
    cls = type(value)
    if dataclasses.is_dataclass(cls) and dataclasses.fields(cls):
        return recorded_fields(value, ()) is None
    return bool(getattr(value, "__dict__", None))


@functools.lru_cache(1024)
def _static_names(cls: type, children: tuple[str, ...]) -> tuple[str, ...]:
    if not dataclasses.is_dataclass(cls):
        return ()
    return tuple(field.name for field in dataclasses.fields(cls) if field.name not in children)


def checked_static(value: Any) -> str:
    """The static parts in a record, validated and as text; raises ValueError for what ``static_text`` never writes."""
    if not isinstance(value, dict) or not value.keys() <= {"fields", "function", "constants"}:
        raise ValueError(f"impossible static fields {str(value)[:80]}")
    for fields in (value.get("fields", {}), value.get("constants", {})):
        if not isinstance(fields, dict):
            raise ValueError(f"impossible static fields {str(fields)[:80]}")
        for field in fields.values():
            _check(field, _DEEPEST)
    if not isinstance(value.get("function", ""), str):
        raise ValueError(f"impossible name of a function {str(value)[:80]}")
    return json.dumps(value, separators=(",", ":"))


def static_fields(text: str) -> dict[str, Any]:
    """The static fields in a text, by name; raises NotPlain if one needs an enum class or dtype that this process does not have."""
    fields = json.loads(text).get("fields", {}) if text else {}
    try:
        return {name: _load(field) for name, field in fields.items()}
    except _NO_VALUE as error:
        raise NotPlain(str(error)) from error


def compared_values(text: str) -> dict[str, Any]:
    """What a restore compares of a text, by name: texts, numbers and None as they are, tuples of these, and a list for anything else."""
    found = json.loads(text) if text else {}
    recorded = {**found.get("fields", {}), **found.get("constants", {})}
    return {name: _meaning(value) for name, value in recorded.items()}


def static_function(text: str) -> str:
    """The name of the wrapped function in a text; empty if there is none."""
    return json.loads(text).get("function", "") if text else ""


def _dump(value: Any, depth: int) -> Any:
    cls = type(value)
    if value is None or cls is bool or cls is str:
        return value
    if cls is int:
        return value if -(2**63) <= value < 2**63 else ["int", hex(value)]
    if cls is float:
        return ["float", value.hex()]
    if cls is complex:
        return ["complex", value.real.hex(), value.imag.hex()]
    if cls is bytes:
        return ["bytes", value.hex()]
    if cls is tuple and depth:
        return ["tuple", *(_dump(part, depth - 1) for part in value)]
    if isinstance(value, enum.Enum):
        token = ["enum", f"{cls.__module__}:{cls.__qualname__}", value.name]
    elif isinstance(value, np.dtype):
        token = ["dtype", value.name]
    elif isinstance(value, type) and issubclass(value, np.generic):
        token = ["numpy", value.__name__]
    elif any(value is known for known in _TYPES.values()):
        token = ["type", value.__name__]
    else:  # jax.numpy.float32 and the like, which are neither numpy classes nor dtypes
        token = ["jax", str(getattr(getattr(value, "dtype", None), "name", ""))]
    made = _load(token)  # differs for other values, such as a dtype of the other byte order
    if made is not value and not (isinstance(value, np.dtype) and made == value):
        raise NotPlain(f"{cls.__name__} is no plain value")
    return token


def _check(value: Any, depth: int) -> None:
    """Raises ValueError for a value that ``_dump`` never writes."""
    if value is None or type(value) in (bool, int, str):
        return
    known = isinstance(value, list) and value and value[0] in ("tuple", *_LOADERS)
    if not known or depth < 0:
        raise ValueError(f"impossible static value {str(value)[:80]}")
    for part in value[1:]:
        if value[0] == "tuple":
            _check(part, depth - 1)
        elif type(part) is not str:
            raise ValueError(f"impossible static value {str(value)[:80]}")


def _load(value: Any) -> Any:
    """The value that ``_dump`` wrote; for others that ``_check`` passes one of _NO_VALUE."""
    if not isinstance(value, list):
        return value
    kind, *parts = value
    return tuple(map(_load, parts)) if kind == "tuple" else _LOADERS[kind](*parts)


def _meaning(value: Any) -> Any:
    """A recorded value in the form in which two are compared: where an enum lives, and what writes a dtype, does not count."""
    match value:
        case ["tuple", *parts]:
            return tuple(map(_meaning, parts))
        case ["enum", str(name), entry]:
            return [f"{name.rpartition(':')[2]}.{entry}"]
        case ["dtype" | "numpy" | "jax", name]:
            return [name]
        case ["int" | "float" | "complex", *_]:
            try:
                number = _load(value)
            except _NO_VALUE:  # of a crafted record
                return value
            return number if number == number else ["nan"]
        case _:
            return value


def _dtype(name: str) -> np.dtype[Any]:
    """The numeric dtype of a name, from numpy or ml_dtypes."""
    found: Any = getattr(ml_dtypes, name, None) or getattr(np, name, None)
    if not isinstance(found, type) or not issubclass(found, np.generic):
        raise ValueError(f"impossible dtype {name[:80]!r}")
    dtype = np.dtype(found)
    if dtype.kind not in _NUMBERS or not dtype.itemsize:
        raise ValueError(f"impossible dtype {name[:80]!r}")
    return dtype


def _member(name: str, entry: str) -> Any:
    """The member of an enum; only of a class whose module is already imported."""
    module, _, qualname = name.partition(":")
    cls: Any = sys.modules.get(module)
    for part in qualname.split("."):
        cls = getattr(cls, part, None)
    if not (isinstance(cls, type) and issubclass(cls, enum.Enum)) or entry not in cls.__members__:
        raise NotPlain(f"{name} has no member {entry!r} here")
    return cls.__members__[entry]


_LOADERS: dict[str, Callable[..., Any]] = {
    "enum": _member,
    "int": lambda digits: int(digits, 16),
    "float": float.fromhex,
    "complex": lambda real, imaginary: complex(float.fromhex(real), float.fromhex(imaginary)),
    "bytes": bytes.fromhex,
    "type": _TYPES.__getitem__,
    "dtype": _dtype,
    "numpy": lambda name: _dtype(name).type,
    "jax": lambda name: getattr(jax.numpy, _dtype(name).name, None),
}
"""Kind of a static value -> the function of its texts that gives it."""
_NO_VALUE = (ValueError, OverflowError, TypeError, KeyError)
