"""A system that refuses to look at a path: what it refuses is there, and neither absent nor damaged."""

import builtins
import errno
import os
from pathlib import Path
from typing import Any

import pytest

_REFUSING = """
def function(path=".", *given, **named):
    if not isinstance(path, int):
        text = os.path.abspath(os.fsdecode(path))
        refused = text == where or (below and text.startswith(where + "/"))
        if refused:
            met.append(text)
            if first < len(met) <= first + times:
                raise OSError(number, os.strerror(number), text)
    return real(path, *given, **named)
"""
"""To be compiled as from no file: what a file of these tests raises counts as raised by a signal handler."""
LOOKS = ("stat", "lstat", "listdir", "scandir", "open")


def refuse(
    patch: pytest.MonkeyPatch,
    where: Path,
    number: int = errno.EACCES,
    calls: tuple[str, ...] = (*LOOKS, "builtins.open"),
    times: float = float("inf"),
    below: bool = True,
    first: int = 0,
) -> list[str]:
    """Calls of ``os``, or ``builtins.open``, that look at this absolute path, and ``below`` it, raise an OSError of this number;
    gives the paths that were looked at. Of all these looks together ``times`` fail, after the ``first`` so many.
    """
    met: list[str] = []
    names: dict[str, Any] = {"os": os, "number": number, "where": str(where)}
    names |= {"met": met, "times": times, "below": below, "first": first}
    code = compile(_REFUSING, "<injected>", "exec")
    for call in calls:
        owner, name = (builtins, "open") if call == "builtins.open" else (os, call)
        own = {**names, "real": getattr(owner, name)}
        exec(code, own)
        patch.setattr(owner, name, own["function"])
    return met
