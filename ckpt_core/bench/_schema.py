"""YAML into frozen dataclasses by their type hints; an error names every key that is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import types
from collections.abc import Callable, Iterable, Mapping
from typing import (
    Annotated,
    Any,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from ckpt_core._errors import CheckpointError

T = TypeVar("T")


class ConfigError(CheckpointError, ValueError):
    """A file that cannot be used; the message lists every problem in it, each with its key.

    Attributes:
        problems: the text of each problem.
    """

    def __init__(self, file: str, *problems: str) -> None:
        self.file = file
        self.problems = problems
        super().__init__("\n".join(f"{file}: {text}" for text in problems))


@dataclasses.dataclass(frozen=True)
class Is:
    """For ``Annotated``: the type of a value in words, what else it must be, and what is made of it."""

    words: str
    test: Callable[[Any], bool] = lambda _: True
    read: Callable[[Reader, Any, str], Any] | None = None


Text: TypeAlias = Annotated[str, Is("text", bool)]
Positive: TypeAlias = Annotated[int, Is("an integer of at least 1", lambda value: value >= 1)]
Natural: TypeAlias = Annotated[int, Is("an integer of at least 0", lambda value: value >= 0)]


_NAMES = {str: "text", bool: "true or false", int: "an integer", float: "a number"}


def _spelled(hint: Any) -> str:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(filter(None, map(_spelled, get_args(hint))))
    if origin is Annotated:
        return hint.__metadata__[0].words
    if origin is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if hint is type(None):
        return "null"
    return "" if origin is list else _NAMES.get(hint, getattr(hint, "__name__", str(hint)))


class _Misfit(Exception):
    """A value is not what a type hint says."""


class Reader:
    """Makes what type hints say of the values of a file, and collects all problems for one error."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[str] = []

    def finish(self) -> None:
        """Raises ConfigError if there was any problem."""
        if self.problems:
            raise ConfigError(self.file, *self.problems)

    def value(self, name: str, value: Any, hint: Any) -> Any:
        """What the hint makes of a value; None, and a problem, if it does not fit. ``list[...]`` says only that an option may be swept."""
        try:
            return self._made(name, value, hint)
        except _Misfit:
            self.problems.append(f"{name} must be {_spelled(hint)}, not {_described(value)}")

    def _made(self, name: str, value: Any, hint: Any) -> Any:
        origin, arguments = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            for member in arguments:
                with contextlib.suppress(_Misfit):
                    return self._made(name, value, member)
            raise _Misfit
        if origin is Annotated:
            made, rule = self._made(name, value, arguments[0]), arguments[1]
            if not rule.test(value):
                raise _Misfit
            return rule.read(self, value, name) if rule.read else made
        if dataclasses.is_dataclass(hint):
            return self.make(name, value, hint)  # pyright: ignore[reportArgumentType]
        if origin is tuple and isinstance(value, list):
            indexed = enumerate(value)
            return tuple(self._made(f"{name}[{n}]", one, arguments[0]) for n, one in indexed)
        if origin is Mapping and isinstance(value, dict):
            key_hint, hint = arguments
            pairs = value.items()
            return {self._made(name, k, key_hint): self._made(name, one, hint) for k, one in pairs}
        if origin is Literal:
            fits = value in arguments
        elif hint in (int, float):
            kinds = int if hint is int else (int, float)
            fits = isinstance(value, kinds) and not isinstance(value, bool)
        else:
            fits = hint is Any or (origin is not list and isinstance(value, origin or hint))
        if not fits:
            raise _Misfit
        return value

    def make(self, where: str, given: Any, kind: type[T], *, but: Iterable[str] = ()) -> T | None:
        """The dataclass of a mapping, which has no keys for the fields ``but``; None, and problems, if it does not fit. A class may
        have ``REFUSED``, keys that a file may give as null or false only, with the reason, and ``problems()``, what is wrong
        with values that fit one by one.
        """
        what, before = where or "the suite", len(self.problems)
        if not isinstance(given, dict):
            self.problems.append(f"{what} must be a mapping, not {_described(given)}")
            return None
        hints = get_type_hints(kind, include_extras=True)
        fields = {one.name: one for one in dataclasses.fields(kind) if one.name not in but}  # pyright: ignore
        refused: Mapping[str, str] = getattr(kind, "REFUSED", {})
        self.unknown(given, [*fields, *refused], f"{what} has no key")
        prefix = f"{where}." if where else ""
        for name, reason in refused.items():
            if given.get(name):
                self.problems.append(f"{prefix}{name}: {reason}")
        values: dict[str, Any] = {}
        for name, one in fields.items():
            if name in given:
                values[name] = self.value(prefix + name, given[name], hints[name])
            elif one.default is one.default_factory:  # both are missing
                self.problems.append(f"{what} lacks the key {name!r}")
        if len(self.problems) > before:
            return None
        made = kind(**values)
        self.problems += [f"{prefix}{text}" for text in getattr(made, "problems", list)()]
        return made

    def unknown(self, given: Mapping[Any, Any], known: Iterable[str], complaint: str) -> None:
        """Complains about the keys that are not known."""
        for key in given:
            if key not in known:
                self.problems.append(f"{complaint} {key!r}{nearest(key, known)}")


def _described(value: Any) -> str:
    """A value and its type as text for messages."""
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    names = {str: "text", bool: "boolean", int: "integer", float: "number"}
    return f"{names.get(type(value), type(value).__name__)} {value!r}"


def nearest(word: object, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)``, or the list of all known words if none is similar."""
    known = list(known)
    close = difflib.get_close_matches(str(word), known, n=1, cutoff=0.6)
    if close:
        return f" (did you mean {close[0]!r}?)"
    return f" (there are: {', '.join(known)})" if known else ""
