"""Reads YAML with line numbers, so that an error can name the line."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Node:
    """A value of a YAML file and the line where it begins; children of collections are Nodes."""

    value: Any
    line: int

    def plain(self) -> Any:
        """The value as ordinary Python objects, without Nodes."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value


def read_yaml(text: str, file: str) -> Node:
    """Parses a YAML document.

    Raises:
        ConfigError: the text is not YAML, or a key is duplicate or not a string.
    """
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            raise ConfigError(file, [(0, "is empty; a suite needs suite_name and benchmarks")])
        return _convert(loader, root, file)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise ConfigError(file, [(line, f"not YAML: {error.problem}")]) from error
    finally:
        loader.dispose()


def _convert(loader: Any, node: Any, file: str) -> Node:
    line = node.start_mark.line + 1
    kind = node.id
    if kind == "sequence":
        return Node([_convert(loader, child, file) for child in node.value], line)
    if kind == "scalar":
        return Node(loader.construct_object(node), line)
    loader.flatten_mapping(node)  # `<<: *anchor`
    found: dict[str, Node] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node)
        key_line = key_node.start_mark.line + 1
        if not isinstance(key, str):
            raise ConfigError(file, [(key_line, f"key {key!r} must be text")])
        if key in found:
            raise ConfigError(
                file, [(key_line, f"key {key!r} is here twice, first on line {found[key].line}")]
            )
        child = _convert(loader, value_node, file)
        # Use the line of the key: a nested mapping begins on the line after it.
        found[key] = Node(child.value, key_line)
    return Node(found, line)


class Reader:
    """Checks nodes and collects all problems, so that one error can list them."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[tuple[int, str]] = []

    def complain(self, node: Node, text: str) -> None:
        """Records a problem at the line of a node."""
        self.problems.append((node.line, text))

    def finish(self) -> None:
        """Raises ConfigError if there was any problem."""
        if self.problems:
            raise ConfigError(self.file, self.problems)

    def mapping(
        self, node: Node, what: str, known: Iterable[str], required: Iterable[str] = ()
    ) -> dict[str, Node]:
        """The children of a mapping that have known keys; records unknown and missing keys."""
        if not isinstance(node.value, dict):
            self.complain(node, f"{what} must be a mapping, not {describe(node.value)}")
            return {}
        known = list(known)
        given: dict[str, Node] = node.value
        meant: set[str] = set()
        for key, child in given.items():
            if key not in known:
                self.complain(child, f"{what} has no key {key!r}{nearest(key, known)}")
                meant |= set(difflib.get_close_matches(key, known, n=1))
        for key in required:
            if key not in given and key not in meant:  # a misspelled key was reported already
                self.complain(node, f"{what} lacks the key {key!r}")
        return {key: child for key, child in given.items() if key in known}

    def items(self, node: Node, what: str) -> list[Node]:
        """The children of a list; records a problem if it is empty or not a list."""
        if not isinstance(node.value, list) or not node.value:
            self.complain(
                node, f"{what} must be a list of at least one, not {describe(node.value)}"
            )
            return []
        return node.value

    def take(
        self, found: Mapping[str, Node], key: str, default: Any, check: Callable[[Any], str | None]
    ) -> Any:
        """The plain value of a key, or the default; ``check`` returns what it must be, or None."""
        if key not in found:
            return default
        value = found[key].plain()
        wanted = check(value)
        if wanted is not None:
            self.complain(found[key], f"{key} must be {wanted}, not {describe(value)}")
            return default
        return value


def describe(value: Any) -> str:
    """A value and its type as text for messages."""
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "an empty list" if not value else "a list"
    names = {str: "text", bool: "boolean", int: "integer", float: "number"}
    return f"{names.get(type(value), type(value).__name__)} {value!r}"


def nearest(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)``, or the list of all known words if none is similar."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f" (did you mean {close[0]!r}?)"
    return f" (there are: {', '.join(known)})" if known else ""


def is_text(value: Any) -> str | None:
    return None if isinstance(value, str) and value else "text"


def is_bool(value: Any) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def at_least(lowest: int) -> Callable[[Any], str | None]:
    """A check for integers from ``lowest`` up."""

    def check(value: Any) -> str | None:
        good = isinstance(value, int) and not isinstance(value, bool) and value >= lowest
        return None if good else f"an integer of at least {lowest}"

    return check


def one_of(*choices: str) -> Callable[[Any], str | None]:
    """A check for one of a few words."""
    return lambda value: None if value in choices else " or ".join(repr(c) for c in choices)
