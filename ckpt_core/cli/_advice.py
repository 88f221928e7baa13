"""Advice of error messages, which name arguments of Python, as it is typed on the command line."""

from __future__ import annotations

import ast
import contextlib
import re
import shlex
from typing import Any

from ckpt_core.cli._text import one_line

_ARGUMENT = re.compile(
    r"(?P<verb>\bpass )?\b(?P<name>[a-z]+)=(?P<value>True\b|\[['\"].*['\"]\])?(?=[\s,;:.)]|$|['\"])"
)
_REPLACING = (
    (", or pass overwrite=True to replace it", ", or delete that first (ckpt rm)"),
    ("; overwrite=True replaces checkpoints only", ""),
)
"""For commands that replace nothing."""


def typed(text: str, arguments: list[str], app: Any) -> str:
    """The message of an error with the options of the command for Python's arguments: ``item=`` becomes ``--item``.
    ``arguments`` are what was typed, beginning with the name of the command.
    """
    options = _options(arguments, app)
    if "overwrite" not in options:
        for python, line in _REPLACING:
            text = text.replace(python, line)

    def option(found: re.Match[str]) -> str:
        name = options.get(found["name"])
        if name is None:
            return found[0]
        return ("add " if found["verb"] else "") + _with_value(name, found)

    return _ARGUMENT.sub(option, text)


def _with_value(name: str, found: re.Match[str]) -> str:
    """The option with its value: none for True, once for each entry of a list."""
    value = found["value"]
    if value is None:
        return name + (" " if found.string[found.end() : found.end() + 1] in ("'", '"') else "")
    entries: list[str] = []
    with contextlib.suppress(ValueError, SyntaxError):
        entries = [] if value == "True" else ast.literal_eval(value)
    # one_line: the list spelled out what must not reach the terminal
    return " ".join(f"{name} {one_line(shlex.quote(str(entry)))}" for entry in entries) or name


def _options(arguments: list[str], app: Any) -> dict[str, str]:
    """Of the command, the option of each argument of Python."""
    from typer.main import get_command

    commands: dict[str, Any] = getattr(get_command(app), "commands", {})
    command = commands.get(arguments[0]) if arguments else None
    parameters = [] if command is None else command.params
    return {one.name: one.opts[0] for one in parameters if one.opts[0].startswith("--")}
