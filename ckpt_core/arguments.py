"""Arguments that a call does not have: the answer names what was meant. Arguments that are no number. For the core and its adapters.

Example:
    >>> from ckpt_core.arguments import answering
    >>> answering(lambda path, only=None: path)("runs/1", only="w")
    'runs/1'
"""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Call = TypeVar("Call", bound=Callable[..., Any])

__all__ = (
    "an",
    "answer_for_classes",
    "answering",
    "check_flags",
    "is_flag",
    "meant",
    "with_article",
)


class NotPassed:
    """The default of an argument for which None is a value, as ``help`` shows it."""

    def __init__(self, shown: str) -> None:
        self._shown = shown

    def __repr__(self) -> str:
        return self._shown


def is_flag(value: object) -> bool:
    """Whether a value is True or False, of Python or numpy, or 0 or 1."""
    return type(value).__name__ in ("bool", "bool_") or (isinstance(value, int) and value in (0, 1))


def check_flags(where: str = "", /, **flags: Any) -> None:
    """Raises TypeError for what is neither True nor False: a text, ``"no"`` too, would count as True. ``where`` goes before the name."""
    for name, value in flags.items():
        if not is_flag(value):
            raise TypeError(f"{where}{name} must be True or False, got {value!r}")


def an(value: object) -> str:
    """The name of a value's class with its article: ``an int``, ``a dict``."""
    return with_article(type(value).__name__)


def with_article(name: str) -> str:
    return f"{'an' if name[:1] in 'aeioAEIO' else 'a'} {name}"


def answering(call: Call, unknown: Callable[[str], str] | None = None) -> Call:
    """``call``, which answers a keyword that it does not have.

    Args:
        call: a function, a method, or the ``__init__`` of a class, without ``**`` of its own.
        unknown: what is said of such a name; by default the nearest of the names that there are.
    """
    code: Any = getattr(call, "__code__")  # noqa: B009
    known = frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])

    @functools.wraps(call)
    def checked(*arguments: Any, **named: Any) -> Any:
        for name in named:
            if name not in known:
                answer = unknown or functools.partial(_unknown, call, known, arguments)
                raise TypeError(answer(name))
        return call(*arguments, **named)

    return checked  # pyright: ignore[reportReturnType]


def answer_for_classes(classes: Iterable[type]) -> None:
    """Has classes, and those inside of them, answer as ``answering``; those that take any keyword stay as they are."""
    for cls in classes:
        inside = (one for one in vars(cls).values() if isinstance(one, type))
        begin = f"{cls.__qualname__}."
        answer_for_classes([one for one in inside if one.__qualname__.startswith(begin)])
        init = vars(cls).get("__init__")
        if inspect.isfunction(init) and not hasattr(init, "__wrapped__") and not _takes_any(init):
            setattr(cls, "__init__", answering(init))  # noqa: B010


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that is most like a name; None if none is as alike as ``cutoff`` says."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), None)


def meant(name: str, known: Iterable[str]) -> str:
    """``: write only=...`` if one of the known names is near, or else all of them; the end of a message."""
    names = sorted(known)
    close = nearest(name, names, 0.75)  # the default takes "state" for "static"
    return f": write {close}=..." if close else f"; it takes {', '.join(names) or 'none'}"


def _unknown(call: Any, known: frozenset[str], arguments: tuple[Any, ...], name: str) -> str:
    where = call.__qualname__
    if call.__name__ == "__init__":
        where, known = type(arguments[0]).__name__, _names_of(type(arguments[0]))
    positional = call.__code__.co_varnames[: call.__code__.co_posonlyargcount]
    return f"{where} has no argument {name!r}{meant(name, known - {'self', *positional})}"


def _names_of(cls: type) -> frozenset[str]:
    """What a class takes by keyword: also what it passes on to the ``__init__`` of its bases."""
    names = set[str]()
    for base in cls.__mro__:
        init = inspect.unwrap(vars(base).get("__init__", object.__init__))
        if inspect.isfunction(init):
            code = init.__code__
            names.update(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
            if not _takes_any(init):
                break
    return frozenset(names)


def _takes_any(call: Any) -> bool:
    return bool(inspect.unwrap(call).__code__.co_flags & inspect.CO_VARKEYWORDS)


def whole_number(name: str, value: object, least: int = 1, why: str = "") -> int:
    """``value`` as an int of at least ``least``; else a TypeError or ValueError with ``name``, and ``why`` if it is too small."""
    try:
        number = operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise _no_number(name, "a whole number", value) from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}{why}")
    return number


def seconds(name: str, value: object) -> float:
    """``value`` as a number of seconds, which may be infinite; TypeError or ValueError with ``name`` if it is none, or negative."""
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        raise _no_number(name, "a number of seconds", value)
    number = float(value)  # pyright: ignore[reportArgumentType]
    if not number >= 0:
        raise ValueError(f"{name} must not be negative, got {number:g}")
    return number


def numbers_of_steps(name: str, values: Iterable[object]) -> frozenset[int]:
    """The numbers of steps in ``values``; a TypeError or ValueError with ``name`` if they are none."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise _no_number(name, "a list of numbers", values)
    return frozenset(whole_number(f"each of {name}", value, least=0) for value in values)


def _no_number(name: str, wanted: str, value: object) -> TypeError:
    return TypeError(f"{name} must be {wanted}, got {value!r}, {an(value)}")
