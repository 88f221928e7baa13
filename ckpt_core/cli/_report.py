"""``ckpt report``: a run as one page of HTML; it imports what reads when it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ckpt_core._errors import CheckpointExists
from ckpt_core.cli._arguments import Json, Place, Prefix
from ckpt_core.cli._text import counted, print_json, progress, size


def report(
    path: Place,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The page; report.html if not given.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--verify", help="Check every byte of every step, too.")
    ] = False,
    stats: Annotated[
        int, typer.Option(min=0, help="Read the arrays of so many of the newest steps, too.")
    ] = 0,
    as_json: Json = False,
    prefix: Prefix = None,
) -> int:
    """Write a page about a run: bytes, leaves, shardings, steps, differences, health; reads arrays with --stats only."""
    from ckpt_core._directory import place
    from ckpt_core.report import Request, page, read_report
    from ckpt_core.report import as_json as as_data

    output = output or (None if as_json else Path("report.html"))
    if output is not None:
        _refuse_other_files(output)
    with progress(path) as show:
        found = read_report(path, Request(check, stats, prefix), log=show)
    data = as_data(found)
    if as_json:
        print_json(data)
    if output is not None:
        text = page(data)
        place(os.path.abspath(output), [text.encode()])
        if not as_json:
            damaged = sum(step.state == "damaged" for step in found.steps)
            wrong = f", {damaged} damaged" if damaged else ""
            wrong += f", {found.unread} cannot be read" if found.unread else ""
            what = counted(len(found.steps), "step", "steps") if found.is_run else "one checkpoint"
            print(f"{output}: {size(len(text))}, {what}{wrong}")
    return 1 if found.is_damaged or found.unread else 0


def _refuse_other_files(output: Path) -> None:
    """Raises if something else than a page is there, such as a part of the checkpoint."""
    if output.is_dir():
        raise CheckpointExists(f"{output} is a directory: say the name of the page with -o")
    if output.exists():
        with output.open("rb") as stream:
            if not stream.read(64).lstrip().lower().startswith(b"<!doctype html"):
                raise CheckpointExists(
                    f"{output} exists already, and is no page: choose another name"
                )
