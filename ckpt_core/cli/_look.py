"""``ckpt show`` and ``verify``."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from ckpt_core._directory import PosixBackend, StepNames
from ckpt_core._errors import CheckpointNotFound, NewerFormat
from ckpt_core._results import CheckpointInfo, ItemInfo, LeafInfo
from ckpt_core._verify import inspect, verify as check
from ckpt_core._words import counted, pairs, size, time_of
from ckpt_core.cli._shared import console, escape, print_json, say, table
from ckpt_core.cli._steps import files_of, is_run, list_steps, steps_in, strays_as_text, summary

_LEAVES_SHOWN = 5

# The first matching pattern explains a path, from any of its folders on. Order matters: the general patterns come last.
_EXPLAINED = r"""
^ckpt\.json$                         ckpt's record: items, leaves, files with sizes and digests; written last
^_CHECKPOINT_METADATA$               what Orbax needs to know of the items, and the user's metadata
^commit_success\.txt$                a marker: for Orbax's readers the save was committed
checksums/process_\d+$               crc32c of every block of every array of this process
array_metadatas/process_\d+$         shapes of the pieces that this process wrote
ocdbt\.linked/\d+/                   what did not change since an earlier step, shared with it by hard links
ocdbt\.process_\d+/manifest\.ocdbt$  index of what this process wrote
ocdbt\.process_\d+/d/                data of this process: chunks of arrays, many to a file
manifest\.ocdbt$                     index of the item: finds every chunk of every array (OCDBT)
d/                                   data: chunks of arrays and nodes of the index, many to a file
_METADATA$                           the tree: path, type and kind of every leaf, as Orbax writes it
_sharding$                           how each array lay on its devices
_strings\.json$                      leaves that are text
descriptor/                          Orbax's note of who wrote it
orbax\.checkpoint$                   Orbax's mark of a checkpoint that is its own
^metrics/metrics$                    metrics of the step, where Orbax's best_step looks
exact/                               the same state with its exact types
process_\d+-of-\d+\.json$            state of one process: an iterator's position
data\.json$                          plain values, in Orbax's Json form
(zarr\.json|\.zarray|\.zattrs)$      shape, dtype and chunks of one array (Zarr)
c(/\d+)+$                            one chunk of one array (Zarr)
^[^/]+/metadata$                     what the item is, and of how many processes
_rng_metadata|.*random.*             a random key
"""
_PURPOSES = [
    (re.compile(f"(.*/)?{pattern}"), text)
    for pattern, text in re.findall(r"(\S+) +(.+)", _EXPLAINED)
]


def show(path: str, *, all_leaves: bool, as_json: bool) -> int:
    """Prints what a checkpoint holds and the purpose of its files; for a run, prints its steps."""
    if is_run(path):
        return list_steps(path, as_json=as_json, of_run=True)
    info = inspect(path)
    facts = summary(info, files_of(info.path))
    parts = _anatomy(info.path) if os.path.isdir(info.path) else []
    if as_json:
        items = info.items.items()
        content = {
            **{name: getattr(info, name) for name in ("metadata", "versions", "topology")},
            "format_version": info.format_version,
            "leaves": {name: list(map(asdict, item.leaves)) for name, item in items},
            "items_of_files": {name: dict(one.files) for name, one in items if one.form == "files"},
            "files": parts,
        }
        print_json(facts | content)
        return 0
    out = console()
    out.print(f"[bold]{escape(info.path)}[/bold]")
    say(_heading(info, facts))
    for item in info.items.values():
        say(_item_line(item))
    if info.metrics:
        say(f"metrics: {pairs(info.metrics)}")
    if info.metadata is not None:
        say(f"metadata: {json.dumps(info.metadata, ensure_ascii=False)}")
    say(_provenance(info))
    for item in info.items.values():
        _print_item(item, all_leaves, out)
    if parts:
        cells = [
            [one["name"], str(one["files"]), size(one["bytes"]), one["purpose"]] for one in parts
        ]
        out.print(table("files", ("file", "n", "size", "what for"), cells))
    return 0


def _anatomy(path: str) -> list[dict[str, Any]]:
    """The files of a directory and their purposes; those of one purpose in one folder are together."""
    sizes: dict[tuple[str, str], list[int]] = {}
    for name, count in sorted(PosixBackend().files(path).items()):
        directory, _, _ = name.rpartition("/")
        # Data files have random names: one line for all files of a folder.
        shown = f"{directory}/" if directory.rpartition("/")[2] in ("d", "checksums") else name
        purposes = (text for pattern, text in _PURPOSES if pattern.match(name))
        sizes.setdefault((shown, next(purposes, "unknown to ckpt")), []).append(count)
    return [
        {"name": name, "files": len(found), "bytes": sum(found), "purpose": purpose}
        for (name, purpose), found in sizes.items()
    ]


def _heading(info: CheckpointInfo, facts: Mapping[str, Any]) -> str:
    """``step 10, saved 2026-01-31 12:00:00, 16.0 KiB of arrays, 20.1 KiB on disk``, of what is known."""
    step = StepNames(None).parse(info.path.rpartition("/")[2])
    known = [] if step is None else [f"step {step}"]
    known += [f"saved {time_of(info.created_unix_secs)}"] if info.created_unix_secs else []
    known += [f"{size(facts['array_bytes'])} of arrays"]
    known += [f"{size(facts['disk_bytes'])} on disk"] if facts["disk_bytes"] else []
    return ", ".join(known)


def _item_line(item: ItemInfo) -> str:
    name = item.name or "a bare tree"  # a directory of Orbax without items
    if item.files:
        return f"{name}: {counted(len(item.files), 'file')}, {size(item.bytes)}"
    if item.leaves:
        return f"{name}: {counted(len(item.leaves), 'leaf', 'leaves')}, {size(item.bytes)}"
    return f"{name} ({item.form})"


def _provenance(info: CheckpointInfo) -> str:
    if info.format_version is None:
        writer = "safetensors" if info.layout == "safetensors" else "written by Orbax"
        return f"{writer}, without checksums"
    topology = f"; {pairs(info.topology)}" if info.topology else ""
    return f"written by ckpt, format {info.format_version}; {pairs(info.versions)}{topology}"


def _print_item(item: ItemInfo, all_of_it: bool, out: Console) -> None:
    """A table of its leaves, or of its files."""
    most = None if all_of_it else _LEAVES_SHOWN
    if item.files:
        cells = [[name, size(count)] for name, count in [*item.files.items()][:most]]
        out.print(table(item.name, ("file", "bytes"), cells))
    elif item.leaves:
        names = ("leaf", "kind", "dtype", "shape", "bytes", "sharding")
        out.print(table(item.name or "a bare tree", names, list(map(_cells, item.leaves[:most]))))
    hidden = 0 if all_of_it else len(item.files or item.leaves) - _LEAVES_SHOWN
    if hidden > 0:
        out.print(f"[dim]and {hidden} more: --leaf shows all[/dim]")


def _cells(leaf: LeafInfo) -> list[str]:
    described = leaf.sharding or {}
    spec = described.get("partition_spec") or described.get("spec")
    sharding = str(spec if spec is not None else described.get("sharding_type", ""))
    shape = "x".join(map(str, leaf.shape)) or "scalar"
    return [leaf.path, leaf.kind, leaf.dtype, shape, size(leaf.bytes), sharding]


def verify(path: str, *, as_json: bool) -> int:
    """Prints the problems of a checkpoint, or of a run's steps; returns 1 if there are any, or nothing can be checked."""
    tell: Callable[[str], object] = str if as_json else say  # JSON is all that is printed, then
    if not is_run(path):
        found = _checked(path, tell)
        if as_json:
            print_json(found)
        return 0 if found["ok"] else 1
    steps = steps_in(path)
    rows: list[dict[str, Any]] = []
    unread: dict[int, str] = {}
    for step in steps.all():
        try:
            rows.append({"step": step, **_checked(steps.path(step), tell)})
        except (CheckpointNotFound, NewerFormat, OSError) as error:
            if isinstance(error, CheckpointNotFound) and not os.path.islink(steps.path(step)):
                continue  # a policy deleted it meanwhile
            unread[step] = str(error)
            tell(f"not read: step {step}: {error}")
    strays, total = steps.strays(), counted(len(rows) + len(unread), "step")
    sound = sum(row["ok"] for row in rows)
    ok = sound == len(rows) and not unread
    checked = sum(row["checked_bytes"] for row in rows)
    if as_json:
        content = {"path": steps.directory, "ok": ok, "checked_bytes": checked, "steps": rows}
        print_json({**content, "strays": strays, "unread": unread})
    for text in strays_as_text(strays):
        tell(text)
    unknown = sum(not row["has_checksums"] for row in rows)
    damaged = len(rows) - sound - unknown
    others = {"damaged": damaged, "without checksums": unknown, "not read": len(unread)}
    more = "".join(f", {count} {what}" for what, count in others.items() if count)
    head = "ok" if ok else "not ok" if damaged else "not verified"
    tell(f"{head}: {sound} of {total} ok{more}, {size(checked)} checked")
    return 0 if ok else 1


def _checked(path: str, tell: Callable[[str], object]) -> dict[str, Any]:
    """What was found in a checkpoint, which is also told."""
    started = time.monotonic()
    report = check(path)
    secs = time.monotonic() - started
    if report.ok:
        tell(f"ok: {path}: {size(report.checked_bytes)} checked in {secs:.2f} s")
        if report.others:
            tell(f"  not of the checkpoint: {', '.join(report.others)}")
    else:
        tell(f"{'not ok' if report.has_checksums else 'not verified'}: {path}")
    of_leaves = {problem.file for problem in report.problems if problem.leaf}
    for problem in report.problems:
        if problem.leaf is None and problem.file in of_leaves:
            continue  # the digest of the whole file says no more
        what = problem.what.removeprefix(f"{path}: ")
        tell(f"  {what if problem.file in what else replace(problem, what=what)}")
    return {"path": path, "secs": secs, **asdict(report)}
