"""Describes functions: a digest of their code, and the values that they hold."""

from __future__ import annotations

import dis
import hashlib
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

PYTHON = f"{sys.implementation.cache_tag}{'-O' if sys.flags.optimize else ''}"
"""Digests of code are comparable within this Python; otherwise functions are compared by name."""

_KNOWN = frozenset({"grain", "jax", "jaxlib", "numpy"}) | sys.stdlib_module_names
"""Packages whose functions are compared by name alone, whatever the version."""

_MARK = re.compile(r" \[code [0-9a-f]{12}\]")


def code_mark(function: types.FunctionType) -> str:
    """Text that differs if two functions with the same name have different code."""
    if (function.__module__ or "").partition(".")[0] in _KNOWN - {"__main__"}:
        return ""
    text = "\n".join(_content(function.__code__, function.__doc__))
    return f" [code {hashlib.sha256(text.encode(errors='backslashreplace')).hexdigest()[:12]}]"


def codes_in(text: str) -> str:
    """The marks of all functions in a text, concatenated."""
    return "".join(_MARK.findall(text))


def without_code(text: str) -> str:
    """The text without the marks: functions are described by name only."""
    return _MARK.sub("", text)


def captured(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Names and values that a function holds: its closure, and the defaults of its parameters. Variables that the
    function assigns to are left out: a counter is not a setting.
    """
    set_anew = _cells_set_anew(function, {})
    for name, cell in _cells(function).items():
        if id(cell) not in set_anew:
            try:
                yield name, cell.cell_contents
            except ValueError:  # not set yet
                continue
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
    yield from sorted((function.__kwdefaults__ or {}).items())


def _cells(function: types.FunctionType) -> dict[str, types.CellType]:
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def _cells_set_anew(function: types.FunctionType, met: dict[int, Any]) -> set[int]:
    """The ids of the cells that a function, or a function that it holds, assigns to."""
    met[id(function)] = function
    cells = _cells(function)
    found = {id(cells[name]) for name in _assigned(function.__code__) if name in cells}
    for cell in cells.values():
        try:
            held = cell.cell_contents
        except ValueError:
            continue
        if isinstance(held, types.FunctionType) and id(held) not in met:
            found |= _cells_set_anew(held, met)
    return found


def _assigned(code: types.CodeType) -> Iterator[str]:
    """Variables of enclosing functions that a function, or one inside it, assigns to."""
    for step in dis.get_instructions(code):
        if step.opname in ("STORE_DEREF", "DELETE_DEREF"):
            yield step.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _assigned(constant)


def _content(code: types.CodeType, doc: str | None = None) -> Iterator[str]:
    """Instructions, names and constants, without file name, line numbers and docstring."""
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames, code.co_freevars, code.co_argcount))
    constants = code.co_consts
    if doc is not None and constants and constants[0] == doc:
        constants = constants[1:]
    for constant in constants:
        if isinstance(constant, types.CodeType):
            yield constant.co_name
            yield from _content(constant)
        elif isinstance(constant, frozenset):  # its order differs between processes
            yield f"{{{sorted(map(repr, constant))}}}"
        else:
            yield repr(constant)
