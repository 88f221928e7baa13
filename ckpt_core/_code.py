"""Functions in trees: by name, since what they do is code and no state.

A module (a registered pytree class, such as Equinox's) may hold functions in its fields: an
activation, a loss. A checkpoint records what they are called; the program that restores brings them.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def function_name(value: Any) -> str | None:
    """``module:qualname`` of a function, a transformed one, or a class; None for anything else.

    Of a ``functools.partial`` with plain arguments, these follow in parentheses. What a method is
    bound to may be state, so a bound method is none.
    """
    if isinstance(value, functools.partial):
        return _partial_name(value)
    if not callable(value):
        return None
    owner = getattr(value, "__self__", None)
    if owner is not None and not inspect.ismodule(owner) and not inspect.isclass(owner):
        return None
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if not isinstance(name, str):  # an object that can be called, with a state of its own
        return None
    return f"{module if isinstance(module, str) else 'builtins'}:{name}"


def _partial_name(value: functools.partial[Any]) -> str | None:
    function = function_name(value.func)
    given = [*value.args, *value.keywords.values()]
    if function is None or not all(isinstance(argument, _PLAIN) for argument in given):
        return None
    told = [*map(repr, value.args), *(f"{k}={v!r}" for k, v in sorted(value.keywords.items()))]
    return f"{function}({', '.join(told)})"


def same_function(one: str, other: str) -> bool:
    """Whether two names are of one function, as far as names tell.

    Packages move functions between their private modules, and the same file is ``__main__`` in one
    program and a module in another: the root package and the name inside of the module count.
    """
    one_module, _, one_name = one.partition(":")
    other_module, _, other_name = other.partition(":")
    roots = {one_module.partition(".")[0], other_module.partition(".")[0]}
    return one_name == other_name and (len(roots) == 1 or "__main__" in roots)
