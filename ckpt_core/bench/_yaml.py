"""YAML whose mappings and lists know their lines, so that an error can name the line; values against type hints."""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from ckpt_core._errors import CheckpointError


class ConfigError(CheckpointError, ValueError):
    """A file that cannot be used; the message lists every problem in it with file and line.

    Attributes:
        problems: (line, text) of each problem, in the order of the file; line 0 if it has no line.
    """

    def __init__(self, file: str, problems: Iterable[tuple[int, str]]) -> None:
        self.file = file
        self.problems = tuple(sorted(problems))
        super().__init__(
            "\n".join(
                f"{file}:{line}: {text}" if line else f"{file}: {text}"
                for line, text in self.problems
            )
        )


class LinedDict(dict[str, Any]):
    """A mapping of a file; ``lines`` has the line of each key."""

    lines: dict[str, int]


class LinedList(list[Any]):
    """A list of a file; ``lines`` has the line of each entry."""

    lines: list[int]


def read_yaml(text: str, file: str) -> tuple[Any, int]:
    """A YAML document as plain values, with ``LinedDict`` and ``LinedList``, and its first line."""
    import yaml

    def line_of(node: Any) -> int:
        return node.start_mark.line + 1

    def mapping(loader: Any, node: Any) -> LinedDict:
        found, found.lines = LinedDict(), {}
        for key_node, _ in node.value:
            if key_node.tag.endswith(":merge"):  # `<<: *anchor`, whose keys may be set anew
                continue
            key, line = loader.construct_object(key_node, deep=True), line_of(key_node)
            if not isinstance(key, str):
                raise ConfigError(file, [(line, f"key {key!r} must be text")])
            if key in found.lines:
                where = f"here twice, first on line {found.lines[key]}"
                raise ConfigError(file, [(line, f"key {key!r} is {where}")])
            found.lines[key] = line
        loader.flatten_mapping(node)
        for key_node, value_node in node.value:
            key = loader.construct_object(key_node, deep=True)
            found[key] = loader.construct_object(value_node, deep=True)
            found.lines[key] = line_of(key_node)
        return found

    def sequence(loader: Any, node: Any) -> LinedList:
        found = LinedList(loader.construct_object(child, deep=True) for child in node.value)
        found.lines = [line_of(child) for child in node.value]
        return found

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("tag:yaml.org,2002:map", mapping)
    Loader.add_constructor("tag:yaml.org,2002:seq", sequence)
    loader = Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            raise ConfigError(file, [(0, "is empty; a suite needs suite_name and benchmarks")])
        return loader.construct_document(root), line_of(root)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise ConfigError(file, [(line, f"not YAML: {error.problem}")]) from error
    finally:
        loader.dispose()


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
        return isinstance(value, dict) and all(fits(one, arguments[1]) for one in value.values())
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
        self.problems: list[tuple[int, str]] = []

    def complain(self, line: int, text: str) -> None:
        """Records a problem."""
        self.problems.append((line, text))

    def finish(self) -> None:
        """Raises ConfigError if there was any problem."""
        if self.problems:
            raise ConfigError(self.file, self.problems)

    def value(self, name: str, value: Any, hint: Any, line: int) -> bool:
        """Whether a value fits; a problem if not."""
        if fits(value, hint):
            return True
        self.complain(line, f"{name} must be {_spelled(hint)}, not {_described(value)}")
        return False

    def fields(
        self,
        given: Any,
        line: int,
        what: str,
        kind: type[Any],
        *,
        more: Iterable[str] = (),
        but: Iterable[str] = (),
    ) -> dict[str, Any]:
        """Those values of a mapping that fit the fields of a dataclass, ``but`` some; problems for all other keys than ``more``."""
        if not self.value(what, given, Annotated[LinedDict, Is("a mapping")], line):
            return {}
        hints = get_type_hints(kind, include_extras=True)
        fields = {field.name: field for field in dataclasses.fields(kind) if field.name not in but}
        known = [*fields, *more]
        meant = self.unknown(given, known, f"{what} has no key")
        for name, field in fields.items():
            needed = field.default is field.default_factory is dataclasses.MISSING
            if needed and name not in given and name not in meant:  # a misspelled one was reported
                self.complain(line, f"{what} lacks the key {name!r}")
        return {
            name: _tuples(given[name])
            for name in fields
            if name in given and self.value(name, given[name], hints[name], given.lines[name])
        }

    def unknown(self, given: LinedDict, known: Iterable[str], complaint: str) -> set[str]:
        """Complains about the keys that are not known; returns those that were probably meant."""
        others = [key for key in given if key not in known]
        for key in others:
            self.complain(given.lines[key], f"{complaint} {key!r}{nearest(key, known)}")
        return {close for key in others for close in difflib.get_close_matches(key, known, n=1)}


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


def nearest(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)``, or the list of all known words if none is similar."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f" (did you mean {close[0]!r}?)"
    return f" (there are: {', '.join(known)})" if known else ""
