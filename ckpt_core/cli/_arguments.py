"""Arguments that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[
    bool,
    typer.Option("--json", help="Machine-readable output; NaN and infinities are strings in it."),
]
