"""Names of functions in pytrees: a function is code, not state, so a checkpoint stores its name.

A module (a registered pytree class, such as Equinox's) may have functions in its fields, for
example an activation or a loss. The restore takes the function from the target and compares the
names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import inspect
import itertools
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ckpt_core._items import Files, Json, SavedFiles
from ckpt_core._lazy import jax

_PLAIN = (bool, int, float, complex, str, bytes, type(None), range, type(...))
_OF = " of "
"""Separator between the name of a wrapper and that of the function it transforms."""
_DEEPEST = 32
"""Maximum depth of nested wrappers and arguments that are named."""
Enclosing = tuple[int, ...]
"""ids of the enclosing functions and arguments, to detect cycles."""
_INNER = ("__wrapped__", "fun", "fn", "_fun", "func")
"""Attributes in which wrapper objects store the wrapped function."""
_INNER_VARIABLES = ("fun", "fn", "func", "f")
"""Closure variables in which wrapper functions store the wrapped function."""

Named = tuple[str, str]
"""Name of a function, and the name of the function it transforms if that differs, else ``""``."""


def function_name(value: Any) -> str | None:
    """``module:qualname`` of a function, a transformed function or a class; None for anything else. For a
    ``functools.partial``, or an object that only wraps functions, the arguments follow in parentheses: ``math:pow(2.0)``. If a
    wrapper does not take the name of the function it transforms (as ``jax.vmap`` sometimes), that follows after `` of ``. None
    for a bound method: its object may be state.
    """
    named = _named(value, ())
    return None if named is None else _joined(named)


def code_name(value: Any) -> str | None:
    """The name of a function, or of the class of a sentinel object; None for a value with state."""
    return function_name(value) or _sentinel_name(value)


def wrapped_name(value: Any) -> str | None:
    """The name of the function that a registered container such as jax's ``Partial`` wraps."""
    if isinstance(value, functools.partial):
        return function_name(value.func)
    name = getattr(value, "__qualname__", None)
    return function_name(value) if isinstance(name, str) else None


def advice_for(value: Any) -> str:
    """Advice for the message about a leaf that cannot be saved."""
    if isinstance(value, type):
        return f"a class is code, and no state: pass an object of it, {value.__name__}(...), or leave it out"
    if function_name(value) is not None:
        return (
            "functions are code, and no state: leave it out, or keep it in a field of a registered "
            "pytree class, such as an Equinox module, which is restored into one that has it"
        )
    if isinstance(value, functools.partial) and function_name(value.func) is not None:
        given = itertools.chain(enumerate(value.args), value.keywords.items())
        odd = [f"{k!r} ({type(v).__name__})" for k, v in given if _argument(v, ()) is None]
        return (
            f"a function is compared by name and arguments, which cannot be done with {', '.join(odd)}: pass "
            "plain values, functions or arrays, or write a function that has it inside"
        )
    if isinstance(value, Files | Json | SavedFiles):
        return "it is an item, and cannot be a leaf of a tree: pass it by a name of its own"
    if isinstance(value, Iterator):
        return (
            "an iterator of Python cannot be set back to where it was: pass the data iterator that is inside of it, "
            "such as data=iter(dataset) of Grain, and make this one of it again after a restore"
        )
    return (
        "convert it to an array or a plain value, leave it out, or give its class get_state() and "
        "set_state(), or ckpt.register an adapter for it"
    )


def same_function(one: str, other: str) -> bool:
    """Whether two names may denote the same function. Compares root package and qualified name only, since packages move
    functions between private modules. ``__main__`` equals any package: a script in one program may be a module in another. A
    name written by an earlier version, without `` of ``, equals a name with it.
    """
    (one_text, one_roots), (other_text, other_roots) = _parts(one), _parts(other)
    short, long = sorted((one_text, other_text), key=len)
    # not strict: the shorter name may lack the part after " of "
    return (short == long or long.startswith(short + _OF)) and all(
        a == b or "__main__" in (a, b) for a, b in zip(one_roots, other_roots, strict=False)
    )


_MODULES = re.compile(
    r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?<![\w.])([^\W\d][\w.]*):(?=[\w<])"""
)
"""Matches a quoted string (group 1, left as it is) or the module in a name (group 2)."""


def _parts(name: str) -> tuple[str, list[str]]:
    """A name with all modules removed, and the root packages of those modules."""
    roots: list[str] = []

    def without(found: re.Match[str]) -> str:
        if found[1] is not None:
            return found[1]
        roots.append(found[2].partition(".")[0])
        return ":"

    return _MODULES.sub(without, name), roots


def _joined(named: Named) -> str:
    return f"{named[0]}{_OF}{named[1]}" if named[1] else named[0]


def _type_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _named(value: Any, enclosing: Enclosing) -> Named | None:
    if id(value) in enclosing or len(enclosing) == _DEEPEST:
        return None
    if isinstance(value, functools.partial):
        return _named_partial(value, enclosing)
    if not callable(value):
        return None
    owner = getattr(value, "__self__", None)
    if owner is not None and not inspect.ismodule(owner) and not inspect.isclass(owner):
        return None
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    enclosing = (*enclosing, id(value))
    if not isinstance(name, str):
        return _named_wrapper(value, enclosing)
    name = f"{module if isinstance(module, str) else 'builtins'}:{name}"
    for function in () if isinstance(value, type) else _inner_functions(value, name):
        inner = _named(function, enclosing)
        if inner is not None:
            # Most wrappers copy the name of the function they transform; then it is not repeated.
            text = inner[1] if same_function(inner[0], name) else _joined(inner)
            if text:
                return name, text
    return name, ""


def _inner_functions(value: Any, name: str) -> Iterator[Any]:
    """Objects that may be the function which ``value`` transforms."""
    yield getattr(value, "__wrapped__", None)
    if isinstance(value, types.FunctionType) and "<locals>" in name and value.__closure__:
        held = dict(zip(value.__code__.co_freevars, value.__closure__, strict=True))
        for variable in _INNER_VARIABLES:
            with contextlib.suppress(KeyError, ValueError):  # no such variable, or an empty cell
                yield held[variable].cell_contents


def _named_partial(value: functools.partial[Any], enclosing: Enclosing) -> Named | None:
    enclosing = (*enclosing, id(value))
    function = _named(value.func, enclosing)
    text = _arguments(value.args, value.keywords, functools.partial(_argument, enclosing=enclosing))
    return None if function is None or text is None else (f"{function[0]}({text})", function[1])


def _named_wrapper(value: Any, enclosing: Enclosing) -> Named | None:
    """The name of an object that wraps functions and has no attribute that could be state."""
    fields = getattr(value, "__dict__", None)
    if not isinstance(fields, dict) or not any(
        _named(getattr(value, name, None), enclosing) for name in _INNER
    ):
        return None

    def describe(field: Any) -> str | None:
        if field is None or isinstance(field, (bool, str)):
            return repr(field)
        named = _named(field, enclosing)
        return None if named is None else _joined(named)

    arguments = _arguments((), fields, describe)
    return None if arguments is None else (f"{_type_name(type(value))}({arguments})", "")


def _arguments(
    args: Iterable[Any], keywords: Mapping[str, Any], describe: Callable[[Any], str | None]
) -> str | None:
    """Arguments as in a call, keyword arguments sorted by name; None if one has no text."""
    texts = [describe(value) for value in args]
    named = [(name, describe(value)) for name, value in sorted(keywords.items())]
    if None in texts or any(text is None for _, text in named):
        return None
    return ", ".join([*map(str, texts), *(f"{name}={text}" for name, text in named)])


def _argument(value: Any, enclosing: Enclosing) -> str | None:
    """Text of an argument: the same for equal arguments; None for a value that may have state."""
    if isinstance(value, _PLAIN):
        return repr(value)
    cls = type(value)
    if isinstance(value, enum.Enum):
        return f"{_type_name(cls)}.{value.name}"
    if isinstance(value, (np.generic, np.dtype)):
        return f"{value.dtype if isinstance(value, np.generic) else 'dtype'}({value})"
    if isinstance(value, os.PathLike):
        return f"Path({os.fspath(value)!r})"
    if isinstance(value, (np.ndarray, jax.Array)):
        return _array_name(value)
    named = _named(value, enclosing)
    if named is not None:
        return _joined(named)
    if id(value) in enclosing or len(enclosing) == _DEEPEST:
        return None
    describe = functools.partial(_argument, enclosing=(*enclosing, id(value)))
    if isinstance(value, slice):
        return f"slice({_arguments((value.start, value.stop, value.step), {}, describe)})"
    if isinstance(value, (tuple, list, dict, set, frozenset)):
        return _container_name(value, describe)
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        text = _arguments((), fields, describe)
        return None if text is None else f"{_type_name(cls)}({text})"
    return _sentinel_name(value)


def _container_name(value: Any, describe: Callable[[Any], str | None]) -> str | None:
    """Text of a builtin container or an instance of a subclass; None if a part has no text."""
    parts: list[Any] = list(value.items()) if isinstance(value, dict) else list(value)
    texts = [describe(part) for part in parts]
    if None in texts:
        return None
    ordered = isinstance(value, (tuple, list))
    text = ", ".join(map(str, texts) if ordered else sorted(map(str, texts)))
    marks = {tuple: f"({text})", list: f"[{text}]", dict: f"{{{text}}}"}
    return marks.get(type(value), f"{_type_name(type(value))}({text})")


def _array_name(array: Any) -> str | None:
    """Dtype, shape and digest of an array; None if this process cannot read all its values."""
    if isinstance(array, jax.Array):
        if isinstance(array, jax.core.Tracer) or array.is_deleted():
            return None
        if not (array.is_fully_addressable or array.is_fully_replicated):
            return None
        name = str(array.dtype)
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        host = np.asarray(jax.device_get(array))
    else:
        name, host = str(array.dtype), array
    if host.dtype.hasobject:
        return None
    digest = hashlib.blake2b(host.tobytes(), digest_size=8).hexdigest()
    return f"{name}[{','.join(map(str, host.shape))}]#{digest}"


class _Empty:
    """Its ``__basicsize__`` is that of an instance without C fields."""


def _sentinel_name(value: Any) -> str | None:
    """``module:qualname()`` of the class of a sentinel, an object without state; else None. One is the placeholder for a tied
    weight (``equinox.nn.Shared``). The class must be importable by its name, and have no attributes, no methods and no C-level
    fields.
    """
    cls = type(value)
    if cls.__module__ == "builtins" or cls.__basicsize__ > _Empty.__basicsize__ or callable(value):
        return None
    if getattr(value, "__dict__", None) or not (hasattr(value, "__dict__") or _no_slots(cls)):
        return None
    found: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    own = [name for base in cls.__mro__[:-1] for name in vars(base) if not name.startswith("__")]
    return None if found is not cls or own or hasattr(cls, "__next__") else f"{_type_name(cls)}()"


def _no_slots(cls: type) -> bool:
    return all(vars(base).get("__slots__") == () for base in cls.__mro__[:-1])
