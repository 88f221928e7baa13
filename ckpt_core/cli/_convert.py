"""``ckpt export``, ``import`` and ``report``; they import what reads and writes arrays when they run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ckpt_core._errors import CheckpointError, CheckpointExists
from ckpt_core._words import counted, size
from ckpt_core.cli._shared import Json, Only, Place, Prefix, Rules, print_json, progress, say

_ENDINGS: dict[str, str] = {
    **dict.fromkeys(("", ".safetensors"), "safetensors"),
    **dict.fromkeys((".pt", ".pth", ".bin"), "torch"),
    ".npz": "npz",
}


def export(
    path: Annotated[str, typer.Argument(help="A checkpoint: path or URL.")],
    target: Annotated[str, typer.Argument(help="A file; of safetensors, or a folder.")],
    to: Annotated[
        str | None, typer.Option(help="safetensors, torch or npz; else by the name.")
    ] = None,
    item: Annotated[str | None, typer.Option(help="Which item, of several.")] = None,
    only: Only = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Patterns of leaves to leave out.")
    ] = None,
    rules: Rules = None,
    max_shard_mib: Annotated[
        int, typer.Option(min=1, help="The most tensors in a safetensors file.")
    ] = 5120,
    as_json: Json = False,
) -> int:
    """Write the arrays of a checkpoint in another format; streamed, and verified as they are read."""
    from ckpt_core import convert

    ending = os.path.splitext(target)[1]
    if to is None and ending not in _ENDINGS and not os.path.isdir(target):
        raise CheckpointError(
            f"{target}: {ending} is no format that is written: name a file that ends in .safetensors, .npz, .pt, .pth or "
            ".bin, or a folder without an ending, or give --to"
        )
    to = to or _ENDINGS.get(ending, "safetensors")
    formats = dict.fromkeys(_ENDINGS.values())
    if to not in formats:
        raise CheckpointError(f"--to {to}: only {', '.join(formats)} are written")
    more = {"max_shard_bytes": max_shard_mib * 2**20} if to == "safetensors" else {}
    written = getattr(convert, f"export_{to}")(
        path,
        target,
        item=item,
        only=only or None,
        exclude=exclude or None,
        rules=_rules(rules),
        **more,
    )
    sizes = {name: os.path.getsize(name) for name in written}
    if as_json:
        print_json({"files": [{"path": name, "bytes": count} for name, count in sizes.items()]})
        return 0
    for name, count in sizes.items():
        say(f"{name}: {size(count)}")
    return 0


def import_weights(
    source: Annotated[str, typer.Argument(help="A file or folder of another program.")],
    target: Annotated[str, typer.Argument(help="The new checkpoint: path or URL.")],
    format: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="safetensors, npz, torch, dcp, flax, keras or orbax; else by what is in it.",
        ),
    ] = None,
    item: Annotated[
        str | None, typer.Option(help="Name of the item; of Orbax, the one to take.")
    ] = None,
    only: Only = None,
    rules: Rules = None,
    rename: Annotated[
        list[str] | None, typer.Option(help="OLD=NEW, leading parts; may be repeated.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Cuts names into levels, such as at '.'.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    as_json: Json = False,
) -> int:
    """Make a checkpoint of files of another format; streamed, and there at once or not at all."""
    from ckpt_core import convert
    from ckpt_core._options import Options
    from ckpt_core._verify import inspect

    pairs = [entry.partition("=") for entry in rename or []]
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
            rules=_rules(rules),
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
        say(f"{source} -> {target}: {count}, {size(total)}")
    return 0


def _rules(path: Path | None) -> Any:
    from ckpt_core._format.rules import rules_from

    try:
        return None if path is None else rules_from(json.loads(path.read_text()))
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: rules are a list in JSON: {error}") from error


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
    from ckpt_core.report import Request, as_json as as_data, page, read_report

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
            what = counted(len(found.steps), "step") if found.is_run else "one checkpoint"
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
