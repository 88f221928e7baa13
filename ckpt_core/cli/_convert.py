"""``ckpt export`` and ``ckpt import``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ckpt_core.convert as convert
from ckpt_core._errors import CheckpointError
from ckpt_core._format.rules import rules_from
from ckpt_core._options import Options
from ckpt_core._verify import inspect
from ckpt_core.cli._text import console, counted, print_json, progress, size

_SUFFIXES = {".npz": "npz", ".pt": "torch", ".pth": "torch", ".bin": "torch"}


def export(
    source: str,
    target: str,
    *,
    to: str | None,
    item: str | None,
    only: list[str],
    exclude: list[str],
    rules: Path | None,
    max_shard_bytes: int,
    as_json: bool,
) -> int:
    """Writes the arrays of a checkpoint in another format; prints the files."""
    exporters: dict[str, Callable[..., list[str]]] = {
        "safetensors": convert.export_safetensors,
        "torch": convert.export_torch,
        "npz": convert.export_npz,
    }
    ending = os.path.splitext(target)[1]
    if to is None:
        _refuse_ending(target, ending)
    to = to or _SUFFIXES.get(ending, "safetensors")
    if to not in exporters:
        raise CheckpointError(f"--to {to}: only {', '.join(exporters)} are written")
    more = {"max_shard_bytes": max_shard_bytes} if to == "safetensors" else {}
    read = None if rules is None else _rules(rules)
    chosen = {"item": item, "only": only or None, "exclude": exclude or None}
    written = exporters[to](source, target, **chosen, rules=read, **more)
    if as_json:
        print_json({"files": [{"path": path, "bytes": os.path.getsize(path)} for path in written]})
        return 0
    for path in written:
        console().print(f"{path}: {size(os.path.getsize(path))}", markup=False)
    return 0


def _refuse_ending(target: str, ending: str) -> None:
    """Refuses a target whose ending names no format."""
    if not (ending in ("", ".safetensors", *_SUFFIXES) or os.path.isdir(target)):
        raise CheckpointError(
            f"{target}: {ending} is no format that is written: name a file that ends in .safetensors, .npz, .pt, .pth or "
            ".bin, or a folder without an ending, or give --to"
        )


def import_weights(
    source: str,
    target: str,
    *,
    format: str | None,
    item: str | None,
    only: list[str],
    rules: Path | None,
    rename: Sequence[str],
    split: str | None,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Makes a checkpoint of a file of another program; prints what it holds."""
    pairs = [entry.partition("=") for entry in rename]
    wrong = next((old for old, sign, _ in pairs if not (old and sign)), None)
    if wrong is not None:
        raise CheckpointError(f"--rename {wrong}: it must be OLD=NEW")
    with progress(source) as show:

        def listen(event: Any) -> None:
            if event.kind == "progress":
                show(f"{source}: {size(event.bytes)} of {size(event.total_bytes)}")

        convert.import_weights(
            source,
            target,
            format=format,
            item=item,
            only=only or None,
            rules=None if rules is None else _rules(rules),
            rename={old: new for old, _, new in pairs} or None,
            split=split,
            overwrite=overwrite,
            options=Options(on_event=listen),
        )
    leaves = [leaf for one in inspect(target).items.values() for leaf in one.leaves]
    total = sum(leaf.bytes for leaf in leaves)
    if as_json:
        print_json({"path": target, "leaves": len(leaves), "bytes": total})
    else:
        count = counted(len(leaves), "leaf", "leaves")
        console().print(f"{source} -> {target}: {count}, {size(total)}", markup=False)
    return 0


def _rules(path: Path) -> Any:
    try:
        return rules_from(json.loads(path.read_text()))
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: rules are a list in JSON: {error}") from error
