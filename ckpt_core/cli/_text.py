"""Output of the commands: sizes and times for people, JSON for programs."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Generator, Sequence
from typing import IO, Any, TextIO, cast

from rich import markup
from rich.console import Console
from rich.table import Table

from ckpt_core._errors import StructureMismatch
from ckpt_core._format.plain_json import strict_json
from ckpt_core._words import size as size
from ckpt_core._words import time_of

_BREAKS = re.compile(r"[\t\n\u2028\u2029]")
_CONTROL = re.compile(
    r"(\x1b\[[0-9;]*m)|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


def console() -> Console:
    """A console on stdout; wide if there is no terminal, so that nothing is truncated."""
    on_terminal = sys.stdout.isatty()
    out = cast("IO[str]", _Visible(sys.stdout, keep_styles=on_terminal))
    return Console(file=out, width=None if on_terminal else 160, highlight=False)


def visible(text: str, *, keep_styles: bool = False) -> str:
    """Text with control characters spelled out, colours of the console kept on request: a name in a file must not steer the terminal."""

    def spelled(found: re.Match[str]) -> str:
        return found[0] if keep_styles and found[1] else ascii(found[0])[1:-1]

    return _CONTROL.sub(spelled, text)


def one_line(text: str) -> str:
    """Text of which line breaks are spelled out: a name in a file must not begin a line of its own."""
    return _BREAKS.sub(lambda found: ascii(found[0])[1:-1], visible(text))


def say(text: str) -> None:
    """Prints a text as one line, which the terminal alone may wrap."""
    print(one_line(text))


def message_of(error: Exception) -> str:
    """The message of an error, for a terminal: of several lines only where each has a mismatch."""
    if not isinstance(error, StructureMismatch):
        return one_line(str(error))
    text = str(error)
    for mismatch in error.mismatches:
        text = text.replace(str(mismatch), one_line(str(mismatch)))
    return visible(text)


def escape(text: str) -> str:
    """``one_line``, for a text that may hold what looks like markup of the console."""
    return markup.escape(one_line(text))


def table(title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table of cells with markup, without columns that are empty: they take the room of the others."""
    found = Table(title=escape(title), title_justify="left")
    shown = [n for n in range(len(names)) if any(row[n] for row in rows)]
    for n in shown:
        right = names[n] in ("n", "size", "bytes", "step", "arrays", "on disk")
        whole = right or names[n] in ("saved", "written by")
        justify = "right" if right else "left"
        found.add_column(names[n], justify=justify, overflow="fold", no_wrap=whole)
    for row in rows:
        found.add_row(*(row[n] for n in shown))
    return found


@contextlib.contextmanager
def progress(text: str) -> Generator[Callable[[str], None]]:
    """A function that shows how far something is, in place of the text before, if there is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with Console(stderr=True).status(escape(text)) as status:
        yield lambda line: status.update(escape(line))


class _Visible:
    """A stream to which only what is visible is written."""

    def __init__(self, stream: TextIO, *, keep_styles: bool) -> None:
        self._stream, self._keep_styles = stream, keep_styles

    def write(self, text: str) -> int:
        self._stream.write(visible(text, keep_styles=self._keep_styles))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def print_json(value: Any) -> None:
    """Prints one line of strict JSON, in which NaN and infinities are strings."""
    print(strict_json(value))


def when(unix_secs: float | None) -> str:
    """Local time to the second; empty if it is unknown."""
    return "" if unix_secs is None else time_of(unix_secs)


def counted(count: int, one: str, many: str) -> str:
    """``1 leaf``, ``2 leaves``."""
    return f"{count} {one if count == 1 else many}"


def metric(value: Any) -> str:
    """A metric with few digits; other libraries may store any type."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"{value:g}" if number else str(value)
