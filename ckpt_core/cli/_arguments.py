"""Arguments that several commands have."""

from __future__ import annotations

import contextlib
import math
import re
from pathlib import Path
from typing import Annotated, Any

import typer

Json = Annotated[
    bool,
    typer.Option("--json", help="Machine-readable output; NaN and infinities are strings in it."),
]
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
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgtp]?)(i?)(?:b(?:/s)?)?\s*", text.lower())
    number = math.nan
    if found is not None and (found[2] or not found[3]):
        power = "kmgtp".index(found[2]) + 1 if found[2] else 0
        with contextlib.suppress(ValueError):
            number = float(found[1]) * (1024 if found[3] else 1000) ** power
    if not (math.isfinite(number) and number >= 1):
        raise typer.BadParameter(f"{text!r} is no number of bytes, such as 16GB or 1.5GiB")
    return round(number)


def bytes_option(help: str, show_default: str | bool = True) -> Any:
    """An option whose value is a number of bytes."""
    return typer.Option(parser=bytes_of, metavar="BYTES", help=help, show_default=show_default)
