"""Arguments that several commands have, and their output: tables for people, JSON for programs."""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import markup
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ckpt_core._format.plain_json import strict_json

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def console() -> Console:
    """A console on stdout; wide if there is no terminal, so that nothing is truncated."""
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def one_line(text: str) -> str:
    """Text with control characters spelled out: a name in a file must not steer the terminal, nor begin a line."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def say(text: str) -> None:
    """Prints a text as one line, which the terminal alone may wrap."""
    print(one_line(text))


def escape(text: str) -> str:
    """``one_line``, for a text that may hold what looks like markup of the console."""
    return markup.escape(one_line(text))


def table(title: str, names: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> Table:
    """A table without the columns that are empty in all rows: they take the room of the others."""
    found = Table(title=escape(title), title_justify="left")
    shown = [n for n in range(len(names)) if any(row[n] for row in rows)]
    for n in shown:
        right = names[n] in ("n", "size", "bytes", "step", "arrays", "on disk")
        whole = right or names[n] in ("saved", "written by")
        justify = "right" if right else "left"
        found.add_column(names[n], justify=justify, overflow="fold", no_wrap=whole)
    for row in rows:
        cells = [row[n] for n in shown]
        found.add_row(*(cell if isinstance(cell, Text) else escape(cell) for cell in cells))
    return found


@contextlib.contextmanager
def progress(text: str) -> Generator[Callable[[str], None]]:
    """A function that shows a text in place of the one before, if there is a terminal."""
    errors = Console(stderr=True, force_terminal=sys.stderr.isatty())
    with errors.status(escape(text)) as status:
        yield lambda line: status.update(escape(line))


def print_json(value: Any) -> None:
    """Prints one line of strict JSON, in which NaN and infinities are strings."""
    print(strict_json(value))


Json = Annotated[
    bool,
    typer.Option("--json", help="Machine-readable output; NaN and infinities are strings in it."),
]
Root = Annotated[str, typer.Argument(help="Where checkpoints are, or will be: a directory or URL.")]
Place = Annotated[str, typer.Argument(help="A checkpoint, or a directory of steps.")]
Newest = Annotated[
    str, typer.Argument(help="A checkpoint; of a directory of steps, the newest. Of any format.")
]
Run = Annotated[str, typer.Argument(help="A directory of steps.")]
Prefix = Annotated[str | None, typer.Option("--step-prefix", help="As given to the Checkpointer.")]
Local = Annotated[
    bool,
    typer.Option("--local", help="It is a local_directory of this host: what runs have in it."),
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", help="Patterns of paths, such as 'params/**'; may be repeated."),
]
Rules = Annotated[
    Path | None,
    typer.Option("--rules", help="Rules of names (JSON); an export takes them backwards."),
]
Mib = Annotated[int, typer.Option("--mib", min=1, help="Write and read so much.")]


def bytes_of(given: str | int) -> int:
    """``16GB`` is 16,000,000,000 and ``1.5GiB`` 1,610,612,736; a plain number is bytes."""
    text = str(given)
    form = r"\s*([0-9.]+(?:e[0-9]+)?)\s*(?:([kmgtp])(i?))?(?:b(?:/s)?)?\s*"
    number = math.nan
    if found := re.fullmatch(form, text.lower()):
        power = "-kmgtp".index(found[2] or "-")
        with contextlib.suppress(ValueError):
            number = float(found[1]) * (1024 if found[3] else 1000) ** power
    if not (math.isfinite(number) and number >= 1):
        raise typer.BadParameter(f"{text!r} is no number of bytes, such as 16GB or 1.5GiB")
    return round(number)


def bytes_option(help: str, show_default: str | bool = True) -> Any:
    """An option whose value is a number of bytes."""
    return typer.Option(parser=bytes_of, metavar="BYTES", help=help, show_default=show_default)
