"""The state of other callbacks: their attributes that are not constructor arguments."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ckpt_core import Stateful, UnsupportedLeaf

logger = logging.getLogger("ckpt_keras")

_PLAIN = (bool, int, float, str, bytes, np.generic, type(None))


def states_of(callbacks: Sequence[Any]) -> dict[str, Any]:
    """The state of each callback, under its class and its number among callbacks of that class. Without ``get_state`` and
    ``set_state`` it is every attribute that is not an argument of ``__init__``: the code sets arguments, so a changed
    ``patience`` takes effect after a restart.
    """
    return {name: _state_of(callback) for name, callback in _numbered(callbacks)}


def warn_of_unlisted(callbacks: Sequence[Any], listed: Sequence[Any], stacklevel: int) -> None:
    """Warns of tracked callbacks that ``fit`` does not call: what is saved of them never changes."""
    # No error: a callback that one in the list calls is not in it either.
    for callback in callbacks:
        if not any(callback is one for one in listed):
            what = f"track holds a {type(callback).__name__} that is not in callbacks= of fit"
            advice = "which does not call it: pass the same object in both"
            warnings.warn(f"{what}, {advice}", UserWarning, stacklevel=stacklevel + 1)


def set_states(callbacks: Sequence[Any], states: dict[str, Any]) -> None:
    """Sets the result of ``states_of``; callbacks that are not in it are left unchanged."""
    for name, callback in _numbered(callbacks):
        if name not in states:
            logger.warning("track: %s was not tracked when the checkpoint was saved", name)
        elif isinstance(callback, Stateful):
            callback.set_state(states[name])
        else:
            vars(callback).update(states[name])


def _numbered(callbacks: Sequence[Any]) -> list[tuple[str, Any]]:
    counts, named = Counter[str](), list[tuple[str, Any]]()
    for callback in callbacks:
        name = type(callback).__name__
        counts[name] += 1
        named.append((name if counts[name] == 1 else f"{name}_{counts[name]}", callback))
    return named


def _state_of(callback: Any) -> Any:
    if isinstance(callback, Stateful):
        return callback.get_state()
    cls, state = type(callback), dict[str, Any]()
    inits = [vars(base)["__init__"] for base in cls.__mro__[:-1] if "__init__" in vars(base)]
    arguments = {name for init in inits for name in inspect.signature(init).parameters}
    for name, value in vars(callback).items():
        of_keras = type(value).__module__.partition(".")[0] == "keras"
        known = name in arguments or name in ("params", "_model", "validation_data")
        if not (known or of_keras or callable(value)):
            state[name] = _copied(value, f"{cls.__name__}.{name}")
    return state


def _copied(value: Any, where: str) -> Any:
    """A copy, which later epochs do not change."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(part, where) for part in value)
    if isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
        return {key: _copied(part, f"{where}[{key!r}]") for key, part in value.items()}
    if hasattr(value, "__array__"):
        return np.array(value)
    raise UnsupportedLeaf(
        f"track: {where} is a {type(value).__name__}, which cannot be saved. Give the callback get_state() and "
        "set_state(), or leave it out of track=",
        leaf=where,
        type_name=type(value).__name__,
    )
