"""``ckpt report``: a run as one page of HTML."""

from __future__ import annotations

import sys
from pathlib import Path

from ckpt_core.cli._steps import DAMAGED
from ckpt_core.cli._text import counted, print_json, size
from ckpt_core.report import Request, as_json, page, read_report


def report(path: str, output: Path | None, request: Request, *, as_data: bool) -> int:
    """Writes the page, or prints its data; returns 1 if a step is damaged.

    Args:
        path: a directory of steps, or a checkpoint.
        output: where the page goes; None with ``as_data``: no page.
        request: what to read beside the metadata.
        as_data: print the data as JSON.
    """
    found = read_report(path, request, tell=_tell)
    data = as_json(found)
    if as_data:
        print_json(data)
    if output is not None:
        text = page(data)
        output.write_text(text, encoding="utf-8")
        if not as_data:
            damaged = sum(step.is_damaged for step in found.steps)
            told = f", {damaged} damaged" if damaged else ""
            what = counted(len(found.steps), "step", "steps") if found.is_run else "one checkpoint"
            print(f"{output}: {size(len(text))}, {what}{told}")
    return DAMAGED if found.is_damaged else 0


def _tell(line: str) -> None:
    if sys.stderr.isatty():
        print(f"reading {line}", file=sys.stderr)
