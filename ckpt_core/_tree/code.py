"""Functions in trees: by name, since what they do is code and no state.

A module (a registered pytree class, such as Equinox's) may hold functions in its fields: an
activation, a loss. A checkpoint records what they are called; the program that restores brings them.
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

from ckpt_core._lazy import jax

_PLAIN = (bool, int, float, complex, str, bytes, type(None), range, type(...))
_OF = " of "
"""Between the name of a transformed function and that of the function in it."""
_DEEPEST = 32
"""So many functions within each other have a name."""
Above = tuple[int, ...]
"""The ids of what a function or an argument stands in: nothing is named by itself."""
_INNER = ("__wrapped__", "fun", "fn", "_fun", "func")
"""Where objects that stand for a function keep it."""
_INNER_VARIABLES = ("fun", "fn", "func", "f")
"""What functions call the function that they were made of."""

Named = tuple[str, str]
"""The name of a function, and that of the one that it transforms where it goes by another name."""


def function_name(value: Any) -> str | None:
    """``module:qualname`` of a function, a transformed one, or a class; None for anything else.

    Of a ``functools.partial``, and of an object that does nothing but wrap functions, the arguments follow
    in parentheses. After `` of `` follows what a function transforms, where its name does not say so
    (``jax.vmap`` at times). What a method is bound to may be state, so a bound method is none.
    """
    named = _named(value, ())
    return None if named is None else _joined(named)


def code_name(value: Any) -> str | None:
    """The name of anything that is code and no state: a function, or a sentinel by its class."""
    return function_name(value) or _sentinel_name(value)


def wrapped_name(value: Any) -> str | None:
    """The function that a container keeps where no leaf is (``jax.tree_util.Partial``), if it has a name."""
    if isinstance(value, functools.partial):
        return function_name(value.func)
    name = getattr(value, "__qualname__", None)
    return function_name(value) if isinstance(name, str) else None


def what_to_do(value: Any) -> str:
    """What to do about a value that cannot be saved where it stands."""
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
    return (
        "convert it to an array or a plain value, leave it out, or give its class get_state() and "
        "set_state()"
    )


def same_function(one: str, other: str) -> bool:
    """Whether two names are of one function, as far as names tell.

    Packages move functions between their private modules, and the same file is ``__main__`` in one
    program and a module in another: the root package and the name inside of the module count. A name
    of before, which does not tell what is transformed, fits any that does.
    """
    (one_text, one_roots), (other_text, other_roots) = _parts(one), _parts(other)
    short, long = sorted((one_text, other_text), key=len)
    # zip stops with the shorter name
    return (short == long or long.startswith(short + _OF)) and all(
        a == b or "__main__" in (a, b) for a, b in zip(one_roots, other_roots, strict=False)
    )


_MODULES = re.compile(
    r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?<![\w.])([^\W\d][\w.]*):(?=[\w<])"""
)
"""Quoted text, which stays as it is, or the module of a name."""


def _parts(name: str) -> tuple[str, list[str]]:
    """A name without the modules in it, and their root packages."""
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


def _named(value: Any, above: Above) -> Named | None:
    if id(value) in above or len(above) == _DEEPEST:
        return None
    if isinstance(value, functools.partial):
        return _named_partial(value, above)
    if not callable(value):
        return None
    owner = getattr(value, "__self__", None)
    if owner is not None and not inspect.ismodule(owner) and not inspect.isclass(owner):
        return None
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    above = (*above, id(value))
    if not isinstance(name, str):
        return _named_wrapper(value, above)
    name = f"{module if isinstance(module, str) else 'builtins'}:{name}"
    for function in () if isinstance(value, type) else _inner_functions(value, name):
        inner = _named(function, above)
        if inner is not None:
            # most transformations take the name of what they transform
            told = inner[1] if same_function(inner[0], name) else _joined(inner)
            if told:
                return name, told
    return name, ""


def _inner_functions(value: Any, name: str) -> Iterator[Any]:
    """What a function may be a transformation of."""
    yield getattr(value, "__wrapped__", None)
    if isinstance(value, types.FunctionType) and "<locals>" in name and value.__closure__:
        held = dict(zip(value.__code__.co_freevars, value.__closure__, strict=True))
        for variable in _INNER_VARIABLES:
            with contextlib.suppress(KeyError, ValueError):  # none of that name, or not set yet
                yield held[variable].cell_contents


def _named_partial(value: functools.partial[Any], above: Above) -> Named | None:
    above = (*above, id(value))
    function = _named(value.func, above)
    told = _arguments(value.args, value.keywords, functools.partial(_argument, above=above))
    return None if function is None or told is None else (f"{function[0]}({told})", function[1])


def _named_wrapper(value: Any, above: Above) -> Named | None:
    """Of an object that wraps a function and keeps nothing that could be state."""
    fields = getattr(value, "__dict__", None)
    if not isinstance(fields, dict) or not any(
        _named(getattr(value, name, None), above) for name in _INNER
    ):
        return None

    def told(field: Any) -> str | None:
        if field is None or isinstance(field, (bool, str)):
            return repr(field)
        named = _named(field, above)
        return None if named is None else _joined(named)

    arguments = _arguments((), fields, told)
    return None if arguments is None else (f"{_type_name(type(value))}({arguments})", "")


def _arguments(
    args: Iterable[Any], keywords: Mapping[str, Any], tell: Callable[[Any], str | None]
) -> str | None:
    """Arguments as they are written, those with names in the order of these; None if one cannot be told."""
    texts = [tell(value) for value in args]
    named = [(name, tell(value)) for name, value in sorted(keywords.items())]
    if None in texts or any(text is None for _, text in named):
        return None
    return ", ".join([*map(str, texts), *(f"{name}={text}" for name, text in named)])


def _argument(value: Any, above: Above) -> str | None:
    """An argument of a function as text, equal where the argument is; None for what may have a state."""
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
    named = _named(value, above)
    if named is not None:
        return _joined(named)
    if id(value) in above or len(above) == _DEEPEST:
        return None
    tell = functools.partial(_argument, above=(*above, id(value)))
    if isinstance(value, slice):
        return f"slice({_arguments((value.start, value.stop, value.step), {}, tell)})"
    if isinstance(value, (tuple, list, dict, set, frozenset)):
        return _container_name(value, tell)
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        told = _arguments((), fields, tell)
        return None if told is None else f"{_type_name(cls)}({told})"
    return _sentinel_name(value)


def _container_name(value: Any, tell: Callable[[Any], str | None]) -> str | None:
    """Of a builtin container, or of a class that is one."""
    parts: list[Any] = list(value.items()) if isinstance(value, dict) else list(value)
    texts = [tell(part) for part in parts]
    if None in texts:
        return None
    ordered = isinstance(value, (tuple, list))
    told = ", ".join(map(str, texts) if ordered else sorted(map(str, texts)))
    marks = {tuple: f"({told})", list: f"[{told}]", dict: f"{{{told}}}"}
    return marks.get(type(value), f"{_type_name(type(value))}({told})")


def _array_name(array: Any) -> str | None:
    """Dtype, shape and digest of an array; None where this process cannot see its values."""
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
    """What an instance takes that holds nothing."""


def _sentinel_name(value: Any) -> str | None:
    """``module:qualname`` of the class of an object that is nothing but a mark.

    Such as the placeholder for a weight that is tied to another one (``equinox.nn.Shared``): of a class
    that can be found by its name, with neither fields nor methods, and nothing that C code could hide.
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
