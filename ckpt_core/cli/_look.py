"""``ckpt ls``, ``show`` and ``verify``."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import ckpt_core as ckpt
from ckpt_core.cli._anatomy import anatomy

DAMAGED = 1
LEAVES_SHOWN = 5


def console() -> Console:
    """Stdout; wide where no terminal says how wide it is, so that nothing is cut off."""
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def list_steps(directory: str, *, as_json: bool, step_prefix: str | None) -> int:
    """Prints the steps; 1 where one of them cannot be read."""
    if "://" not in directory:
        directory = os.path.abspath(os.path.expanduser(directory))
        if not os.path.isdir(directory):
            raise ckpt.CheckpointNotFound(f"{directory}: no such directory")
    steps = ckpt.Checkpointer(directory, read_only=True, step_prefix=step_prefix)
    rows: list[dict[str, Any]] = []
    for step in steps.all_steps():
        try:
            rows.append({"step": step, **_summary(steps.inspect(step)), "problem": None})
        except ckpt.CheckpointCorrupt as error:
            rows.append({"step": step, "problem": str(error)})
    if as_json:
        print(json.dumps({"directory": directory, "steps": rows}))
    elif rows:
        _print_steps(directory, rows)
    else:
        hint = _hint(directory)
        print(f"{directory}: no steps{hint}")
    return DAMAGED if any(row["problem"] for row in rows) else 0


def _hint(directory: str) -> str:
    try:
        ckpt.inspect(directory)
    except (ckpt.CheckpointError, OSError):
        return ""
    return f"; it is a checkpoint itself: ckpt show {directory}"


def _summary(info: ckpt.CheckpointInfo) -> dict[str, Any]:
    return {
        "path": info.path,
        "created_unix_secs": info.created_unix_secs,
        "array_bytes": sum(item.bytes for item in info.items.values()),
        "items": {
            name: {"form": item.form, "leaves": len(item.leaves), "array_bytes": item.bytes}
            for name, item in info.items.items()
        },
        "metrics": info.metrics,
        "written_by": "ckpt" if info.format_version is not None else "Orbax",
    }


def _print_steps(directory: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=directory, title_justify="left", pad_edge=False)
    for name in ("step", "saved", "arrays", "items", "metrics", "written by"):
        table.add_column(name, justify="right" if name in ("step", "arrays") else "left")
    for row in rows:
        if row["problem"]:
            table.add_row(str(row["step"]), f"[red]damaged:[/red] {escape(row['problem'])}")
            continue
        table.add_row(
            str(row["step"]),
            _when(row["created_unix_secs"]),
            size(row["array_bytes"]),
            ", ".join(row["items"]),
            ", ".join(f"{name} {value:g}" for name, value in row["metrics"].items()),
            row["written_by"],
        )
    console().print(table)


def show(path: str, *, all_leaves: bool, as_json: bool) -> int:
    """Prints what a checkpoint holds, and the anatomy of its directory."""
    info = ckpt.inspect(path)
    parts = anatomy(info.path) if os.path.isdir(info.path) else []
    if as_json:
        told = {
            **_summary(info),
            "metadata": info.metadata,
            "versions": info.versions,
            "topology": info.topology,
            "format_version": info.format_version,
            "leaves": {
                name: [dataclasses.asdict(leaf) for leaf in item.leaves]
                for name, item in info.items.items()
            },
            "files": [dataclasses.asdict(part) for part in parts],
        }
        print(json.dumps(told, default=str))
        return 0
    out = console()
    out.print(f"[bold]{escape(info.path)}[/bold]")
    out.print(_provenance(info))
    if info.metrics:
        out.print("metrics: " + ", ".join(f"{k} {v:g}" for k, v in info.metrics.items()))
    if info.metadata is not None:
        out.print(f"metadata: {json.dumps(info.metadata)}", markup=False)
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


def _provenance(info: ckpt.CheckpointInfo) -> str:
    if info.format_version is None:
        return "written by Orbax, without checksums"
    versions = ", ".join(f"{name} {version}" for name, version in info.versions.items())
    topology = ", ".join(f"{name} {value}" for name, value in info.topology.items())
    return escape(
        f"written by ckpt, {_when(info.created_unix_secs)}, format {info.format_version}; "
        f"{versions}" + (f"; {topology}" if topology else "")
    )


def _print_item(item: ckpt.ItemInfo, all_leaves: bool, out: Console) -> None:
    count = len(item.leaves)
    title = (
        f"{item.name}: {count} leaves, {size(item.bytes)}"
        if count
        else f"{item.name} ({item.form})"
    )
    if not count:
        out.print(escape(title))
        return
    table = Table(title=escape(title), title_justify="left", pad_edge=False)
    for name in ("leaf", "kind", "dtype", "shape", "bytes", "sharding"):
        table.add_column(name, justify="right" if name == "bytes" else "left", overflow="fold")
    shown = item.leaves if all_leaves else item.leaves[:LEAVES_SHOWN]
    for leaf in shown:
        shape = "x".join(map(str, leaf.shape)) if leaf.shape else "scalar"
        table.add_row(
            escape(leaf.path), leaf.kind, leaf.dtype, shape, size(leaf.bytes), _sharding(leaf)
        )
    out.print(table)
    if len(shown) < count:
        out.print(f"[dim]and {count - len(shown)} more: --leaf shows all[/dim]")


def _sharding(leaf: ckpt.LeafInfo) -> str:
    described = leaf.sharding or {}
    spec = described.get("partition_spec") or described.get("spec")
    return escape(str(spec if spec is not None else described.get("sharding_type", "")))


def verify(path: str, *, as_json: bool) -> int:
    """Prints what is wrong with a checkpoint; 1 where anything is, or nothing can be checked."""
    check = ckpt.verify  # imports jax, which is none of the checking
    started = time.monotonic()
    report = check(path)
    secs = time.monotonic() - started
    if as_json:
        problems = [dataclasses.asdict(problem) for problem in report.problems]
        told = {"path": path, "ok": report.ok, "checked_bytes": report.checked_bytes}
        print(json.dumps({**told, "secs": secs, "problems": problems}))
    elif report.ok:
        print(f"ok: {path}: {size(report.checked_bytes)} checked in {secs:.2f} s")
    else:
        print(f"not ok: {path}")
        for problem in report.problems:
            print(f"  {problem}")
    return 0 if report.ok else DAMAGED


def size(count: float) -> str:
    """Bytes in the unit that suits them: 12 B, 3.4 KiB, 5.6 GiB."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            break
        count, unit = count / 1024, larger
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"


def _when(unix_secs: float | None) -> str:
    if unix_secs is None:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_secs))
