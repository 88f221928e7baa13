"""The messages of the tree that name an action, found in its source."""

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
_ROOTS = (ROOT / "ckpt_core", *sorted((ROOT / "integrations").glob("*/ckpt_*")))
_NOT_USERS = ("ckpt_core/bench/", "ckpt_core/report/vendor/", "ckpt_core/testing/suite.py")
"""Benchmarks of ours; code of others; the suite of those who write adapters, whose failures are assertions."""
_VERBS = (
    "add|ask|build|call|choose|convert|copy|create|declare|define|delete|export|gather|give|go|import|install|keep|"
    "leave|let|list|load|look|make|mount|move|name|pass|pip install|put|raise|read|register|remove|rename|replace|"
    "restore|run|save|say|see|select|set|shorten|spread|start|stop|take|tie|train|try|type|uninstall|unlink|upgrade|"
    "use|write"
)
_VERBS = "|".join((_VERBS, *(verb.capitalize() for verb in _VERBS.split("|"))))
_OURS = "missing|unexpected|cast|overwrite|force|rename"
_ACTION = re.compile(
    rf"(?:^|[:;,.?!(] |\bor |\band |\bthen )(?:{_VERBS})\b(?! of\b)|--[a-z]|\bOptions\(\w|\b(?:{_OURS})="
)


@dataclass(frozen=True)
class Message:
    """The text of one place in the source: its parts between what is filled in."""

    module: str
    line: int
    parts: tuple[str, ...]

    def holds(self, module: str, fragment: str) -> bool:
        return self.module == module and any(fragment in part for part in self.parts)


def with_an_action() -> list[Message]:
    """Every text in the source that begins a clause with a verb, apart from docstrings and helps of arguments."""
    return [one for one in all_texts() if _names_an_action("{}".join(one.parts))]


def _names_an_action(text: str) -> bool:
    return len(text) > 25 and " " in text and _ACTION.search(text) is not None


@functools.cache
def all_texts() -> tuple[Message, ...]:
    """Every text in the source, but for docstrings and helps of arguments."""
    found: list[Message] = []
    for root in _ROOTS:
        for file in sorted(root.rglob("*.py")):
            module = file.relative_to(ROOT).as_posix()
            if not module.startswith(_NOT_USERS):
                short = module.removeprefix("ckpt_core/").removeprefix("integrations/")
                found += [Message(short, *text) for text in _texts(ast.parse(file.read_text()))]
    return tuple(found)


def _texts(node: ast.AST) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(line, parts) of the texts in a node of the syntax tree."""
    match node:
        case ast.Expr(ast.Constant()):
            return  # a docstring
        case ast.Call(ast.Attribute(attr="Option" | "Argument")):
            return  # the help of an argument
        case ast.JoinedStr(values):
            parts = [""]
            for value in values:
                if isinstance(value, ast.Constant):
                    parts[-1] += str(value.value)
                else:
                    parts.append("")
            yield node.lineno, tuple(parts)
        case ast.Constant(str() as text):
            yield node.lineno, (text,)
        case _:
            pass
    for child in ast.iter_child_nodes(node):
        if not isinstance(node, ast.JoinedStr) or isinstance(child, ast.FormattedValue):
            yield from _texts(child)
