"""``ckpt show`` and ``verify``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from ckpt_core._directory import StepNames
from ckpt_core._errors import CheckpointNotFound, NewerFormat
from ckpt_core._results import CheckpointInfo, ItemInfo, LeafInfo, VerifyReport
from ckpt_core._verify import inspect
from ckpt_core._verify import verify as check
from ckpt_core.cli._anatomy import anatomy
from ckpt_core.cli._steps import (
    DAMAGED,
    files_of,
    is_run,
    list_steps,
    print_strays,
    steps_in,
    summary,
)
from ckpt_core.cli._text import console, counted, escape, metric, one_line, print_json, size, when

LEAVES_SHOWN = 5


def show(path: str, *, all_leaves: bool, as_json: bool) -> int:
    """Prints what a checkpoint holds and the purpose of its files; for a run, prints its steps."""
    if is_run(path):
        return list_steps(path, as_json=as_json, of_run=True)
    info = inspect(path)
    facts = summary(info, files_of(info.path))
    parts = anatomy(info.path) if os.path.isdir(info.path) else []
    if as_json:
        content = {
            **facts,
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
    out.print(_heading(info, facts), markup=False)
    for item in info.items.values():
        out.print(one_line(_held(item)), markup=False)
    if info.metrics:
        text = ", ".join(f"{name} {metric(value)}" for name, value in info.metrics.items())
        out.print(f"metrics: {one_line(text)}", markup=False)
    if info.metadata is not None:
        text = json.dumps(info.metadata, ensure_ascii=False)
        out.print(f"metadata: {one_line(text)}", markup=False)
    out.print(one_line(_provenance(info)), markup=False)
    for item in info.items.values():
        _print_item(item, all_leaves, out)
    if parts:
        columns = {
            "file": [escape(part.name) for part in parts],
            "n": [str(part.files) for part in parts],
            "size": [size(part.bytes) for part in parts],
            "what for": [part.purpose for part in parts],
        }
        _print_table("files", columns, out)
    return 0


def _heading(info: CheckpointInfo, facts: Mapping[str, Any]) -> str:
    """``step 10, saved 2026-01-31 12:00:00, 16.0 KiB of arrays, 20.1 KiB on disk``, of what is known."""
    step = StepNames(None).parse(info.path.rpartition("/")[2])
    known = {
        f"step {step}": step is not None,
        f"saved {when(info.created_unix_secs)}": info.created_unix_secs is not None,
        f"{size(facts['array_bytes'])} of arrays": True,
        f"{size(facts['disk_bytes'] or 0)} on disk": facts["disk_bytes"] is not None,
    }
    return ", ".join(text for text, is_known in known.items() if is_known)


def _held(item: ItemInfo) -> str:
    name = item.name or "a bare tree"  # a directory of Orbax without items
    if item.files:
        return f"{name}: {counted(len(item.files), 'file', 'files')}, {size(item.bytes)}"
    if not item.leaves:
        return f"{name} ({item.form})"
    return f"{name}: {counted(len(item.leaves), 'leaf', 'leaves')}, {size(item.bytes)}"


def _provenance(info: CheckpointInfo) -> str:
    if info.format_version is None:
        writer = "safetensors" if info.layout == "safetensors" else "written by Orbax"
        return f"{writer}, without checksums"
    versions = ", ".join(f"{name} {version}" for name, version in info.versions.items())
    topology = ", ".join(f"{name} {value}" for name, value in info.topology.items())
    more = f"; {topology}" if topology else ""
    return f"written by ckpt, format {info.format_version}; {versions}{more}"


def _print_item(item: ItemInfo, all_of_it: bool, out: Console) -> None:
    """A table of its leaves, or of its files."""
    most = None if all_of_it else LEAVES_SHOWN
    leaves, files = item.leaves[:most], list(item.files)[:most]
    if files:
        sizes = [size(item.files[name]) for name in files]
        _print_table(item.name, {"file": list(map(escape, files)), "bytes": sizes}, out)
    elif leaves:
        columns = {
            "leaf": [escape(leaf.path) for leaf in leaves],
            "kind": [leaf.kind for leaf in leaves],
            "dtype": [leaf.dtype for leaf in leaves],
            "shape": ["x".join(map(str, leaf.shape)) or "scalar" for leaf in leaves],
            "bytes": [size(leaf.bytes) for leaf in leaves],
        }
        shardings = list(map(_sharding, leaves))
        if any(shardings):  # an empty column takes the room of names
            columns["sharding"] = shardings
        _print_table(item.name or "a bare tree", columns, out)
    hidden = len(item.files or item.leaves) - len(files or leaves)
    if hidden:
        out.print(f"[dim]and {hidden} more: --leaf shows all[/dim]")


def _print_table(title: str, columns: Mapping[str, Sequence[str]], out: Console) -> None:
    table = Table(title=escape(title), title_justify="left")
    for name in columns:
        if name in ("n", "size", "bytes"):
            table.add_column(name, justify="right", no_wrap=True)
        else:
            table.add_column(name, overflow="fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    out.print(table)


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
    unread: dict[int, str] = {}
    for step in steps.all():
        try:
            found, report = _checked(steps.path(step))
        except (CheckpointNotFound, NewerFormat, OSError) as error:
            if isinstance(error, CheckpointNotFound) and not os.path.islink(steps.path(step)):
                continue  # a policy deleted it meanwhile
            unread[step] = str(error)
            if not as_json:
                print(one_line(f"not read: step {step}: {error}"))
            continue
        rows.append({"step": step, **found})
        if not as_json:
            _print_report(found, report)
    strays = steps.strays()
    sound = sum(row["ok"] for row in rows)
    ok = sound == len(rows) and not unread
    checked = sum(row["checked_bytes"] for row in rows)
    if as_json:
        content = {"path": steps.directory, "ok": ok, "checked_bytes": checked, "steps": rows}
        print_json({**content, "strays": strays, "unread": unread})
    else:
        print_strays(strays)
        unknown = sum(not row["has_checksums"] for row in rows)
        others = {"damaged": len(rows) - sound - unknown, "without checksums": unknown}
        others["not read"] = len(unread)
        more = "".join(f", {count} {what}" for what, count in others.items() if count)
        head = "ok" if ok else "not ok" if others["damaged"] else "not verified"
        print(
            f"{head}: {sound} of {counted(len(rows) + len(unread), 'step', 'steps')} ok{more}, {size(checked)} checked"
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
