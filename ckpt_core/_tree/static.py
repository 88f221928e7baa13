"""What a registered class keeps where jax sees no child: fields that are static, and a wrapped function.

It is recorded beside the structure as JSON: ``{"fields": {name: value}, "function": name}``. Plain values
only; a value is itself, or ``[kind, ...]`` of what JSON cannot hold. Nothing is imported for it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import sys
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ckpt_core._lazy import jax
from ckpt_core._tree.code import wrapped_name

_DEEPEST = 32
_TYPES = {cls.__name__: cls for cls in (bool, int, float, complex, str, bytes)}
_NUMBERS = frozenset("biufcV")
_KINDS = ("tuple", "enum", "int", "float", "complex", "bytes", "type", "dtype", "numpy", "jax")
_MEMBERS = {"fields", "function"}


class NotPlain(ValueError):
    """A value that is not recorded, or that this program cannot make."""


def static_text(value: Any, children: Sequence[str] | None, *, names_function: bool) -> str:
    """What is recorded of an object besides its children; empty where that is nothing.

    Args:
        value: an object of a registered class.
        children: the names of its children, where they are names of fields.
        names_function: whether the function that it wraps, if any, is asked for.
    """
    told: dict[str, Any] = {}
    if children is not None and (fields := recorded_fields(value, children)):
        told["fields"] = fields
    if names_function and (name := wrapped_name(value)) is not None:
        told["function"] = name
    return json.dumps(told, separators=(",", ":")) if told else ""


def recorded_fields(value: Any, children: Sequence[str]) -> dict[str, Any] | None:
    """The fields that are no children, as JSON; None where there is one that is not plain."""
    try:
        return {
            name: _dump(getattr(value, name), _DEEPEST)
            for name in _static_names(type(value), tuple(children))
        }
    except (ValueError, AttributeError):
        return None


def is_lost(value: Any) -> bool:
    """Whether nothing can be recorded of an object that has no children, and there is something to it."""
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
    """The text of what a record says that ``static_text`` gave.

    Raises:
        ValueError: it never gave that.
    """
    if not isinstance(value, dict) or not value.keys() <= _MEMBERS:
        raise ValueError(f"impossible static fields {str(value)[:80]}")
    fields: Any = value.get("fields", {})
    if not isinstance(fields, dict):
        raise ValueError(f"impossible static fields {str(fields)[:80]}")
    for field in fields.values():
        _check(field)
    if not isinstance(value.get("function", ""), str):
        raise ValueError(f"impossible name of a function {str(value)[:80]}")
    return json.dumps(value, separators=(",", ":"))


def static_fields(text: str) -> dict[str, Any]:
    """The static fields in a text.

    Raises:
        NotPlain: one is of an enum, or of a dtype, that is not at hand.
    """
    fields = json.loads(text).get("fields", {}) if text else {}
    try:
        return {name: _load(field) for name, field in fields.items()}
    except (ValueError, OverflowError) as error:
        raise NotPlain(str(error)) from error


def static_function(text: str) -> str:
    """The name of the function in a text; empty where there is none."""
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
    else:  # perhaps jax.numpy.float32, which is neither a class of numpy's nor a dtype
        token = ["jax", getattr(getattr(value, "dtype", None), "name", "")]
    made = _load(token)  # of another byte order, or something else altogether, where it differs
    if made is not value and not (isinstance(value, np.dtype) and made == value):
        raise NotPlain(f"{cls.__name__} is no plain value")
    return token


def _check(value: Any) -> None:
    """Raises ValueError for what ``_dump`` never gives."""
    if value is None or type(value) in (bool, int, str):
        return
    if not isinstance(value, list) or not value or value[0] not in _KINDS:
        raise ValueError(f"impossible static value {str(value)[:80]}")
    for part in value[1:]:
        if value[0] == "tuple":
            _check(part)
        elif type(part) is not str:
            raise ValueError(f"impossible static value {str(value)[:80]}")


def _load(value: Any) -> Any:
    """The value that was dumped.

    Raises:
        ValueError, OverflowError: nothing that ``_dump`` gives.
    """
    if not isinstance(value, list):
        return value
    match value:
        case ["tuple", *parts]:
            return tuple(map(_load, parts))
        case ["enum", str(name), str(entry)]:
            return _member(name, entry)
        case ["int", str(digits)]:
            return int(digits, 16)
        case ["float", str(text)]:
            return float.fromhex(text)
        case ["complex", str(real), str(imaginary)]:
            return complex(float.fromhex(real), float.fromhex(imaginary))
        case ["bytes", str(digits)]:
            return bytes.fromhex(digits)
        case ["type", str(name)] if name in _TYPES:
            return _TYPES[name]
        case ["dtype", str(name)]:
            return _dtype(name)
        case ["numpy", str(name)]:
            return _dtype(name).type
        case ["jax", str(name)]:
            return getattr(jax.numpy, _dtype(name).name, None)
        case _:
            raise ValueError(f"impossible static value {str(value)[:80]}")


def _dtype(name: str) -> np.dtype[Any]:
    """A dtype of numbers by its name."""
    found: Any = getattr(ml_dtypes, name, None) or getattr(np, name, None)
    if not isinstance(found, type) or not issubclass(found, np.generic):
        raise ValueError(f"impossible dtype {name[:80]!r}")
    dtype = np.dtype(found)
    if dtype.kind not in _NUMBERS or not dtype.itemsize:
        raise ValueError(f"impossible dtype {name[:80]!r}")
    return dtype


def _member(name: str, entry: str) -> Any:
    """The member of an enum whose module is imported already."""
    module, _, qualname = name.partition(":")
    cls: Any = sys.modules.get(module)
    for part in qualname.split("."):
        cls = getattr(cls, part, None)
    if not (isinstance(cls, type) and issubclass(cls, enum.Enum)) or entry not in cls.__members__:
        raise NotPlain(f"{name} has no member {entry!r} here")
    return cls.__members__[entry]
