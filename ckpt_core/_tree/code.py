"""Names of functions in pytrees: a function is code, not state, so a checkpoint stores its name.

A module (a registered pytree class, such as Equinox's) may have functions in its fields, for
example an activation or a loss. The restore takes the function from the target and compares the
names; what a function holds (its closure, the arguments of a partial) is not compared.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from ckpt_core._errors import UnsupportedLeaf
from ckpt_core._items import Files, Json, SavedFiles
from ckpt_core.arguments import with_article

_DEEPEST = 32  # maximum depth of nested wrappers that are named
_INNER = ("__wrapped__", "fun", "fn", "_fun", "func")  # attributes that hold a wrapped function
_BARE_BYTES = type("_Empty", (), {}).__basicsize__  # size of an instance without C fields


def function_name(value: Any, depth: int = _DEEPEST) -> str | None:
    """``module:qualname`` of a function or a class; for a ``functools.partial`` that of its function, for an object that only
    wraps functions that of its class. None for anything else, and for a bound method: its object may be state.
    """
    if isinstance(value, functools.partial):
        return function_name(value.func, depth - 1) if depth else None
    owner = getattr(value, "__self__", None)
    bound = owner is not None and not inspect.ismodule(owner) and not inspect.isclass(owner)
    if bound or not callable(value):
        return None
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if isinstance(name, str):
        return f"{module if isinstance(module, str) else 'builtins'}:{name}"
    held: dict[str, Any] = getattr(value, "__dict__", {})
    inside = {
        field: depth and function_name(part, depth - 1)
        for field, part in held.items()
        if not (part is None or isinstance(part, (bool, str)))
    }
    only_wraps = any(map(inside.get, _INNER)) and all(inside.values())
    return type_name(type(value)) if only_wraps else None


def code_name(value: Any) -> str | None:
    """The name of a function, or ``module:qualname()`` of the class of a sentinel, such as the placeholder for a tied weight
    (``equinox.nn.Shared``): it can be found by its name, and has no attributes, methods or C-level fields. Else None.
    """
    if name := function_name(value):
        return name
    cls = type(value)
    if cls.__module__ == "builtins" or cls.__basicsize__ > _BARE_BYTES or callable(value):
        return None
    no_slots = all(vars(base).get("__slots__") == () for base in cls.__mro__[:-1])
    if getattr(value, "__dict__", None) or not (hasattr(value, "__dict__") or no_slots):
        return None
    found: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    own = [name for base in cls.__mro__[:-1] for name in vars(base) if not name.startswith("__")]
    return None if found is not cls or own or hasattr(cls, "__next__") else f"{type_name(cls)}()"


def wrapped_name(value: Any) -> str | None:
    """The name of the function that a registered container such as jax's ``Partial`` wraps."""
    named = isinstance(getattr(value, "__qualname__", None), str)
    return function_name(value) if named or isinstance(value, functools.partial) else None


def advice_for(value: Any) -> str:
    """Advice for the message about a leaf that cannot be saved."""
    if isinstance(value, type):
        return f"a class is code, and no state: pass an object of it, {value.__name__}(...), or leave it out"
    if function_name(value) is not None:
        return (
            "functions are code, and no state: leave it out, or keep it in a field of a registered "
            "pytree class, such as an Equinox module, which is restored into one that has it"
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


def refused(value: Any, where: str, why: str) -> UnsupportedLeaf:
    """The error for a value at a path that no checkpoint can hold."""
    return UnsupportedLeaf(f"{where}: {why}", leaf=where, type_name=_class_name(value))


def unsupported(value: Any, where: str, advice: str) -> UnsupportedLeaf:
    """The same, for a value of a class that cannot be saved."""
    name = function_name(value)
    called = "" if name is None else f" ({name})"
    why = f"cannot save {with_article(_class_name(value))}{called}: {advice}"
    return refused(value, where, why)


def _class_name(value: Any) -> str:
    return type_name(type(value)).replace(":", ".").removeprefix("builtins.")


def same_function(one: str, other: str) -> bool:
    """Whether two names may denote the same function: root package and qualified name count, since packages move functions.
    ``__main__`` equals any package: a script in one program may be a module in another. Earlier versions added arguments in
    parentheses, and after `` of `` the function that a wrapper transforms.
    """
    (package, name), (other_package, other_name) = _parts(one), _parts(other)
    same_package = package == other_package or "__main__" in (package, other_package)
    return name == other_name and same_package


def _parts(name: str) -> tuple[str, str]:
    """Root package and qualified name of a function."""
    module, _, qualname = name.partition(" of ")[0].partition("(")[0].partition(":")
    return module.partition(".")[0], qualname


def type_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
