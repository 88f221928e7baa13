"""YAML into frozen dataclasses by their type hints; an error names every key that is wrong."""

from __future__ import annotations

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


def read_yaml(text: str, file: str) -> Any:
    """A YAML document as plain values."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(file, f"not YAML: {error}") from error


@dataclasses.dataclass(frozen=True)
class Is:
    """For ``Annotated``: the type of a value in words, what else it must be, and what is made of it."""

    words: str
    test: Callable[[Any], bool] = lambda _: True
    read: Callable[[Reader, Any, str], Any] | None = None


Text: TypeAlias = Annotated[str, Is("text", bool)]
Positive: TypeAlias = Annotated[int, Is("an integer of at least 1", lambda value: value >= 1)]
Natural: TypeAlias = Annotated[int, Is("an integer of at least 0", lambda value: value >= 0)]


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of a file is what a type hint says; ``list[...]`` says only that it may be swept."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, member) for member in arguments)
    if origin is Annotated:
        return _fits(value, arguments[0]) and all(one.test(value) for one in arguments[1:])
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        return isinstance(value, list) and all(_fits(one, arguments[0]) for one in value)
    if origin is Mapping:
        return isinstance(value, dict) and all(
            isinstance(key, str) and _fits(one, arguments[1]) for key, one in value.items()
        )
    if hint in (int, float):
        kinds = int if hint is int else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool)
    if hint is Any or dataclasses.is_dataclass(hint):  # a dataclass is checked where it is made
        return True
    return origin is not list and isinstance(value, origin or hint)


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


class Reader:
    """Makes what type hints say of the values of a file, and collects all problems for one error."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[str] = []

    def complain(self, text: str) -> None:
        """Records a problem."""
        self.problems.append(text)

    def finish(self) -> None:
        """Raises ConfigError if there was any problem."""
        if self.problems:
            raise ConfigError(self.file, *self.problems)

    def value(self, name: str, value: Any, hint: Any) -> Any:
        """What the hint says of a value; None, and a problem, if it does not fit."""
        if _fits(value, hint):
            return self._made(name, value, hint)
        self.complain(f"{name} must be {_spelled(hint)}, not {_described(value)}")
        return None

    def _made(self, name: str, value: Any, hint: Any) -> Any:
        origin, arguments = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            member = next(member for member in arguments if _fits(value, member))
            return self._made(name, value, member)
        if origin is Annotated:
            read = arguments[1].read
            return read(self, value, name) if read else self._made(name, value, arguments[0])
        if dataclasses.is_dataclass(hint):
            return self.make(name, value, hint)  # pyright: ignore[reportArgumentType]
        if origin is tuple:
            indexed = enumerate(value)
            return tuple(self._made(f"{name}[{n}]", one, arguments[0]) for n, one in indexed)
        return value

    def make(self, where: str, given: Any, kind: type[T], *, but: Iterable[str] = ()) -> T | None:
        """The dataclass of a mapping, which has no keys for the fields ``but``; None, and problems, if it does not fit.

        A class may have ``REFUSED``, keys that a file may give as null or false only, with the reason, and ``problems()``,
        what is wrong with values that fit one by one.
        """
        what, before = where or "the suite", len(self.problems)
        if not isinstance(given, dict):
            self.complain(f"{what} must be a mapping, not {_described(given)}")
            return None
        hints = get_type_hints(kind, include_extras=True)
        fields = {one.name: one for one in dataclasses.fields(kind) if one.name not in but}  # pyright: ignore
        refused: Mapping[str, str] = getattr(kind, "REFUSED", {})
        self.unknown(given, [*fields, *refused], f"{what} has no key")
        prefix = f"{where}." if where else ""
        for name, reason in refused.items():
            if given.get(name):
                self.complain(f"{prefix}{name}: {reason}")
        values: dict[str, Any] = {}
        for name, one in fields.items():
            if name in given:
                values[name] = self.value(prefix + name, given[name], hints[name])
            elif one.default is one.default_factory:  # both are missing
                self.complain(f"{what} lacks the key {name!r}")
        if len(self.problems) > before:
            return None
        made = kind(**values)
        self.problems += [f"{prefix}{text}" for text in getattr(made, "problems", list)()]
        return made

    def unknown(self, given: Mapping[Any, Any], known: Iterable[str], complaint: str) -> None:
        """Complains about the keys that are not known."""
        for key in given:
            if key not in known:
                self.complain(f"{complaint} {key!r}{nearest(key, known)}")


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
