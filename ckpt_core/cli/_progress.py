"""Progress of a run on stderr: a status line on a terminal, one line per run elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_core.bench._results import CaseResult, Run


class Progress:
    """Reports every run on stderr."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._status: Any = None

    def __enter__(self) -> Progress:
        if not self._quiet and sys.stderr.isatty():
            from rich.console import Console

            self._status = Console(stderr=True).status("starting")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def run(self, case: CaseResult, run: Run) -> None:
        """Called when a run has ended."""
        if self._quiet:
            return
        outcome = "skipped" if run.skipped else f"failed: {run.error}" if run.error else "done"
        text = f"{case.group}: {case.label}, {run.kind} {run.repeat}: {outcome}"
        if self._status is not None:
            from ckpt_core.cli._text import escape

            self._status.update(escape(text))
        elif not run.skipped:
            print(text, file=sys.stderr, flush=True)
