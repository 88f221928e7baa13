"""``ckpt export``."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ckpt_core.cli._text import console, size
from ckpt_core.convert import export_safetensors


def export(
    source: str,
    target: str,
    *,
    item: str | None,
    only: list[str],
    rules: Path | None,
    max_shard_bytes: int,
) -> int:
    """Writes the arrays of a checkpoint as safetensors; prints the files."""
    written = export_safetensors(
        source,
        target,
        item=item,
        only=only or None,
        rules=None if rules is None else json.loads(rules.read_text()),
        max_shard_bytes=max_shard_bytes,
    )
    out = console()
    for path in written:
        out.print(f"{path}: {size(os.path.getsize(path))}", markup=False)
    return 0
