"""YAML, and its values against type hints; an error names the key."""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from ckpt_core._errors import CheckpointError


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
    """For ``Annotated``: the type of a value in words, and what else the value must be."""

    words: str
    test: Callable[[Any], bool] = lambda _: True


Text: TypeAlias = Annotated[str, Is("text", bool)]
Positive: TypeAlias = Annotated[int, Is("an integer of at least 1", lambda value: value >= 1)]
Natural: TypeAlias = Annotated[int, Is("an integer of at least 0", lambda value: value >= 0)]


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of a file is what a type hint says; ``list[...]`` says only that it may be swept."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, member) for member in arguments)
    if origin is Annotated:
        return fits(value, arguments[0]) and all(one.test(value) for one in arguments[1:])
    if origin is Literal:
        return value in arguments
    if dataclasses.is_dataclass(hint):
        return True  # is checked where it is made
    if origin is tuple:
        return isinstance(value, list) and all(fits(one, arguments[0]) for one in value)
    if origin is Mapping:
        keys, values = (value, value.values()) if isinstance(value, dict) else ([None], ())
        return all(isinstance(one, str) for one in keys) and all(
            fits(one, arguments[1]) for one in values
        )
    if hint in (int, float):
        kinds = int if hint is int else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool)
    return hint is Any or (origin is not list and isinstance(value, origin or hint))


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
    """Checks values of a file and collects all problems, so that one error can list them."""

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

    def value(self, name: str, value: Any, hint: Any) -> bool:
        """Whether a value fits; a problem if not."""
        if fits(value, hint):
            return True
        self.complain(f"{name} must be {_spelled(hint)}, not {_described(value)}")
        return False

    def fields(
        self, given: Any, where: str, kind: type[Any], *more: str, but: Iterable[str] = ()
    ) -> dict[str, Any]:
        """Those values of a mapping that fit the fields of a dataclass, ``but`` some; problems for all other keys than ``more``."""
        what = where or "the suite"
        if not self.value(what, given, Annotated[dict[str, Any], Is("a mapping")]):
            return {}
        hints = get_type_hints(kind, include_extras=True)
        fields = {field.name: field for field in dataclasses.fields(kind) if field.name not in but}
        meant = self.unknown(given, [*fields, *more], f"{what} has no key")
        for name, field in fields.items():
            needed = field.default is field.default_factory is dataclasses.MISSING
            if needed and name not in given and name not in meant:  # a misspelled one was reported
                self.complain(f"{what} lacks the key {name!r}")
        prefix = f"{where}." if where else ""
        return {
            name: _tuples(given[name])
            for name in fields
            if name in given and self.value(prefix + name, given[name], hints[name])
        }

    def unknown(self, given: Mapping[Any, Any], known: Iterable[str], complaint: str) -> set[str]:
        """Complains about the keys that are not known; returns those that were probably meant."""
        others = [key for key in given if key not in known]
        for key in others:
            self.complain(f"{complaint} {key!r}{nearest(key, known)}")
        return {close for key in others for close in difflib.get_close_matches(str(key), known, 1)}


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


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
