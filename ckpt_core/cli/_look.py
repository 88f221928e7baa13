"""``ckpt show`` and ``verify``."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from ckpt_core._errors import CheckpointNotFound
from ckpt_core._results import CheckpointInfo, ItemInfo, LeafInfo, VerifyReport
from ckpt_core._verify import inspect
from ckpt_core._verify import verify as check
from ckpt_core.cli._anatomy import anatomy
from ckpt_core.cli._steps import DAMAGED, is_run, list_steps, print_strays, steps_in, summary
from ckpt_core.cli._text import console, counted, escape, metric, one_line, print_json, size, when

LEAVES_SHOWN = 5


def show(path: str, *, all_leaves: bool, as_json: bool) -> int:
    """Prints what a checkpoint holds and the purpose of its files; for a run, prints its steps."""
    if is_run(path):
        return list_steps(path, as_json=as_json, of_run=True)
    info = inspect(path)
    parts = anatomy(info.path) if os.path.isdir(info.path) else []
    if as_json:
        content = {
            **summary(info),
            "metadata": info.metadata,
            "versions": info.versions,
            "topology": info.topology,
            "format_version": info.format_version,
            "leaves": {
                name: [asdict(leaf) for leaf in item.leaves] for name, item in info.items.items()
            },
            "items_of_files": {
                name: dict(item.files) for name, item in info.items.items() if item.form == "files"
            },
            "files": [asdict(part) for part in parts],
        }
        print_json(content)
        return 0
    out = console()
    out.print(f"[bold]{escape(info.path)}[/bold]")
    out.print(_provenance(info))
    if info.metrics:
        text = ", ".join(f"{name} {metric(value)}" for name, value in info.metrics.items())
        out.print(f"metrics: {one_line(text)}", markup=False)
    if info.metadata is not None:
        text = json.dumps(info.metadata, ensure_ascii=False)
        out.print(f"metadata: {one_line(text)}", markup=False)
    for item in info.items.values():
        _print_item(item, all_leaves, out)
    if parts:
        table = Table(title="files", title_justify="left", pad_edge=False)
        table.add_column("file", overflow="fold")
        table.add_column("n", justify="right")
        table.add_column("size", justify="right")
        table.add_column("what for")
        for part in parts:
            table.add_row(escape(part.name), str(part.files), size(part.bytes), part.purpose)
        out.print(table)
    return 0


def _provenance(info: CheckpointInfo) -> str:
    if info.format_version is None:
        date = when(info.created_unix_secs)
        if info.layout == "safetensors":
            more = escape(f", {info.metadata}") if info.metadata else ""
            return "safetensors, without checksums" + (f", {date}" if date else "") + more
        return "written by Orbax, without checksums" + (f", {date}" if date else "")
    versions = ", ".join(f"{name} {version}" for name, version in info.versions.items())
    topology = ", ".join(f"{name} {value}" for name, value in info.topology.items())
    return escape(
        f"written by ckpt, {when(info.created_unix_secs)}, format {info.format_version}; "
        f"{versions}" + (f"; {topology}" if topology else "")
    )


def _print_item(item: ItemInfo, all_leaves: bool, out: Console) -> None:
    count = len(item.leaves)
    name = item.name or "a bare tree"  # a directory of Orbax without items
    title = (
        f"{name}: {counted(count, 'leaf', 'leaves')}, {size(item.bytes)}"
        if count
        else f"{name} ({item.form})"
    )
    if item.files:
        _print_files(item, all_leaves, out)
        return
    if not count:
        out.print(escape(title))
        return
    table = Table(title=escape(title), title_justify="left", pad_edge=False)
    shown = item.leaves if all_leaves else item.leaves[:LEAVES_SHOWN]
    sharded = any(map(_sharding, shown))  # an empty column takes the room of names
    for name in ("leaf", "kind", "dtype", "shape", "bytes", *(("sharding",) if sharded else ())):
        table.add_column(name, justify="right" if name == "bytes" else "left", overflow="fold")
    for leaf in shown:
        shape = "x".join(map(str, leaf.shape)) if leaf.shape else "scalar"
        cells = (escape(leaf.path), leaf.kind, leaf.dtype, shape, size(leaf.bytes))
        table.add_row(*cells, *((_sharding(leaf),) if sharded else ()))
    out.print(table)
    if len(shown) < count:
        out.print(f"[dim]and {count - len(shown)} more: --leaf shows all[/dim]")


def _print_files(item: ItemInfo, all_files: bool, out: Console) -> None:
    count = len(item.files)
    title = f"{item.name}: {counted(count, 'file', 'files')}, {size(item.bytes)}"
    table = Table(title=escape(title), title_justify="left", pad_edge=False)
    table.add_column("file", overflow="fold")
    table.add_column("bytes", justify="right")
    shown = list(item.files.items())[: None if all_files else LEAVES_SHOWN]
    for name, bytes_ in shown:
        table.add_row(escape(name), size(bytes_))
    out.print(table)
    if len(shown) < count:
        out.print(f"[dim]and {count - len(shown)} more: --leaf shows all[/dim]")


def _sharding(leaf: LeafInfo) -> str:
    described = leaf.sharding or {}
    spec = described.get("partition_spec") or described.get("spec")
    return escape(str(spec if spec is not None else described.get("sharding_type", "")))


def verify(path: str, *, as_json: bool) -> int:
    """Prints the problems of a checkpoint, or of each step of a run; returns 1 if there are any, or nothing can be checked."""
    if not is_run(path):
        found, report = _checked(path)
        if as_json:
            print_json(found)
        else:
            _print_report(found, report)
        return 0 if report.ok else DAMAGED
    steps = steps_in(path)
    rows: list[dict[str, Any]] = []
    for step in steps.all():
        try:
            found, report = _checked(steps.path(step))
        except CheckpointNotFound:  # a policy deleted it meanwhile
            continue
        rows.append({"step": step, **found})
        if not as_json:
            _print_report(found, report)
    strays = steps.strays()
    ok = all(row["ok"] for row in rows)
    sound = sum(row["ok"] for row in rows)
    checked = sum(row["checked_bytes"] for row in rows)
    if as_json:
        content = {"path": steps.directory, "ok": ok, "checked_bytes": checked, "steps": rows}
        print_json({**content, "strays": strays})
    else:
        print_strays(strays)
        unknown = sum(not row["has_checksums"] for row in rows)
        others = {"damaged": len(rows) - sound - unknown, "without checksums": unknown}
        more = "".join(f", {count} {what}" for what, count in others.items() if count)
        head = "ok" if ok else "not ok" if others["damaged"] else "not verified"
        print(
            f"{head}: {sound} of {counted(len(rows), 'step', 'steps')} ok{more}, {size(checked)} checked"
        )
    return 0 if ok else DAMAGED


def _checked(path: str) -> tuple[dict[str, Any], VerifyReport]:
    started = time.monotonic()
    report = check(path)
    problems = [asdict(problem) for problem in report.problems]
    found = {"path": path, "ok": report.ok, "checked_bytes": report.checked_bytes}
    found |= {"secs": time.monotonic() - started, "problems": problems}
    found |= {"others": list(report.others), "has_checksums": report.has_checksums}
    return found, report


def _print_report(found: dict[str, Any], report: VerifyReport) -> None:
    if report.ok:
        print(f"ok: {found['path']}: {size(report.checked_bytes)} checked in {found['secs']:.2f} s")
        if report.others:
            print(f"  not of the checkpoint: {one_line(', '.join(report.others))}")
        return
    print(f"{'not ok' if report.has_checksums else 'not verified'}: {found['path']}")
    of_leaves = {problem.file for problem in report.problems if problem.leaf}
    for problem in report.problems:
        if problem.leaf is None and problem.file in of_leaves:
            continue  # the digest of the whole file says no more
        what = problem.what.removeprefix(f"{found['path']}: ")
        print(f"  {one_line(what if problem.file in what else str(replace(problem, what=what)))}")
