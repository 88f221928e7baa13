"""``ckpt report``: a run as one page of HTML."""

from __future__ import annotations

import os
from pathlib import Path

from ckpt_core._directory import place
from ckpt_core._errors import CheckpointExists
from ckpt_core.cli._steps import DAMAGED
from ckpt_core.cli._text import counted, print_json, progress, size
from ckpt_core.report import Request, as_json, page, read_report


def report(path: str, output: Path | None, request: Request, *, as_data: bool) -> int:
    """Writes the page to ``output``, or prints its data as JSON; returns 1 if a step is damaged."""
    if output is not None:
        _refuse_other_files(output)
    with progress(path) as show:
        found = read_report(path, request, log=show)
    data = as_json(found)
    if as_data:
        print_json(data)
    if output is not None:
        text = page(data)
        place(os.path.abspath(output), [text.encode()])
        if not as_data:
            damaged = sum(step.is_damaged for step in found.steps)
            wrong = f", {damaged} damaged" if damaged else ""
            wrong += f", {found.unread} cannot be read" if found.unread else ""
            what = counted(len(found.steps), "step", "steps") if found.is_run else "one checkpoint"
            print(f"{output}: {size(len(text))}, {what}{wrong}")
    return DAMAGED if found.is_damaged or found.unread else 0


def _refuse_other_files(output: Path) -> None:
    """Raises if something else than a page is there, such as a part of the checkpoint."""
    if not output.exists():
        return
    if output.is_dir():
        raise CheckpointExists(f"{output} is a directory: say the name of the page with -o")
    with output.open("rb") as stream:
        if not stream.read(64).lstrip().lower().startswith(b"<!doctype html"):
            raise CheckpointExists(f"{output} exists already, and is no page: choose another name")
