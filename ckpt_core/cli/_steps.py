"""``ckpt ls``, and the parts of ``show`` and ``verify`` for a directory of steps."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.text import Text

from ckpt_core._directory import StepNames, Trace, is_locked, read_run_metadata, resolve, traces
from ckpt_core._errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, NewerFormat
from ckpt_core._options import Options
from ckpt_core._results import CheckpointInfo
from ckpt_core._run.lease import OWNER_FILE, Lease
from ckpt_core._run.retention import DAMAGED, RETIRED, Disk
from ckpt_core._run.steps import (
    Steps,
    open_run,
    refuse_no_directory,
    refuse_one_checkpoint,
    stray_text,
)
from ckpt_core._storage import backend_of
from ckpt_core._verify import describe_opened, inspect
from ckpt_core._words import pairs, size, time_of
from ckpt_core.cli._shared import console, escape, print_json, say, table

_DEEPEST = 2
"""If a directory has no steps, look for steps this many levels below it."""


def steps_in(path: str, prefix: str | None = None) -> Steps:
    """The steps below a path or URL."""
    text, local = resolve(path)
    return Steps(text, local, backend_of(local), StepNames(prefix))


def is_run(path: str) -> bool:
    """Whether a directory holds steps and is not itself a checkpoint."""
    return not _is_checkpoint(path) and bool(steps_in(path).all())


def _is_checkpoint(path: str) -> bool:
    text, local = resolve(path)
    with contextlib.suppress(FileExistsError):
        refuse_one_checkpoint(backend_of(local), text, local)
        return False
    return True


def list_steps(
    directory: str, *, as_json: bool, step_prefix: str | None = None, of_run: bool = False
) -> int:
    """Prints the steps, and ``of_run`` the metadata of the run; returns 1 if one of them cannot be read."""
    directory, local = resolve(directory)
    refuse_no_directory(directory, local)
    steps = steps_in(directory, step_prefix)
    listing = steps.look()
    committed = [] if _is_checkpoint(directory) else listing.committed()
    found = [row for step in committed if (row := _row(steps, step)) is not None]
    rows = [row for row, _ in found]
    disk = dict(file for _, files in found for file in files.items())  # shared ones count once
    disk_bytes = sum(disk.values()) if disk else sum(row["disk_bytes"] or 0 for row in rows)
    empty = sorted({*listing.names} - {*committed}) if rows else []
    beside = traces(directory, OWNER_FILE, _FOLDERS) if local else []
    content: dict[str, Any] = {
        "directory": directory,
        "steps": rows,
        "disk_bytes": disk_bytes or None,
        "without_checkpoint": empty,
        "beside": [asdict(trace) for trace in beside],
        "strays": steps.strays() if rows else {},
    }
    if of_run:
        content["run_metadata"] = read_run_metadata(backend_of(local), directory)
    if as_json:
        print_json(content)
    else:
        _print(content)
        below = [_beside_as_text(beside)] if beside else []
        below += strays_as_text(content["strays"])
        below += [f"no checkpoint in {', '.join(map(steps.names.name, empty))}"] if empty else []
        for text in below:
            say(text)
    return 1 if any(row["problem"] for row in rows) else 0


def _print(content: Mapping[str, Any]) -> None:
    rows, out = content["steps"], console()
    if content.get("run_metadata") is not None:
        say(f"run: {content['run_metadata']}")
    if not rows:
        say(f"{content['directory']}: no steps{_hint(content['directory'])}")
        return
    foreign = any(row.get("written_by", "ckpt") != "ckpt" for row in rows)
    names = ("step", "saved", "arrays", "on disk", "items", "metrics", "written by")
    shown = names if foreign else names[:-1]
    out.print(table(content["directory"], shown, list(map(_cells, rows))))
    if len(rows) > 1 and content["disk_bytes"]:
        out.print(f"{size(content['disk_bytes'])} on disk together", style="dim italic")
    for row in rows:
        if row["problem"]:
            text = f"[red]{_state(row)}:[/red] step {row['step']}: {escape(row['problem'])}"
            out.print(text, soft_wrap=True)


def _cells(row: Mapping[str, Any]) -> list[str | Text]:
    on_disk = "" if row["disk_bytes"] is None else size(row["disk_bytes"])
    if row["problem"]:
        problem = Text(f"{_state(row)}: see below", "red")
        return [str(row["step"]), "", "", on_disk, problem, "", ""]
    items = ", ".join(name or "(a bare tree)" for name in row["items"])
    saved, arrays = time_of(row["created_unix_secs"]), size(row["array_bytes"])
    metrics, writer = pairs(row["metrics"]), row["written_by"]
    return [str(row["step"]), saved, arrays, on_disk, items, metrics, writer]


def _state(row: Mapping[str, Any]) -> str:
    return "newer" if "upgrade ckpt" in row["problem"] else "damaged"


def strays_as_text(strays: Mapping[int, int]) -> Iterator[str]:
    """A sentence for steps of another history than the ones before them; see ``history.strays``."""
    for parent in dict.fromkeys(strays.values()):
        steps = [step for step in strays if strays[step] == parent]
        verb = "continues" if len(steps) == 1 else "continue"
        yield f"{steps_as_text(steps)} {stray_text(parent, verb)}"


def steps_as_text(steps: Sequence[int]) -> str:
    """``step 5``, or ``steps 5, 6``."""
    return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"


def retire(run: Steps, steps: Sequence[int]) -> str:
    """Moves steps to ``retired``, in a bucket deletes them, all or none; CheckpointError beside a writer that lives."""
    run = open_run(run.directory, run.names, Options(), False)
    if run.local and is_locked(f"{run.directory}/{OWNER_FILE}"):
        raise CheckpointError(f"{run.directory}: a run is writing there: nothing of it is retired")
    disk = Disk(run, None, Lease(run.directory, run.backend))
    listing = disk.look()
    removals = disk.removals_of(steps, listing, RETIRED if run.local else None)
    disk.refuse_read(removals)
    disk.remove(removals, listing)
    how = f"moved to {run.directory}/{RETIRED}" if run.local else "deleted"
    return f"{steps_as_text(steps)} {how}"


Inodes = dict[tuple[int, int], int]
"""Device and inode -> size of each file."""


def summary(info: CheckpointInfo, files: Inodes) -> dict[str, Any]:
    """The main facts of a checkpoint with these files, for ``ls`` and ``show``."""
    return {
        "path": info.path,
        "created_unix_secs": info.created_unix_secs,
        "array_bytes": sum(item.bytes for item in info.items.values() if not item.files),
        "disk_bytes": sum(files.values()) if files else sum(info.files.values()) or None,
        "items": {
            name: {
                "form": item.form,
                "leaves": len(item.leaves),
                "array_bytes": 0 if item.files else item.bytes,
            }
            for name, item in info.items.items()
        },
        "metrics": info.metrics,
        "written_by": {"orbax": "Orbax"}.get(info.layout, info.layout),
    }


def _row(steps: Steps, step: int) -> tuple[dict[str, Any], Inodes] | None:
    """The facts of a step, and its files; None if it was deleted meanwhile."""
    path, files = steps.path(step), Inodes()
    found: dict[str, Any] = {"step": step, "problem": None}
    try:
        files = files_of(path)
        return found | summary(describe_opened(steps.open(step)), files), files
    except CheckpointNotFound:
        return None
    except (CheckpointCorrupt, NewerFormat, PermissionError) as error:
        on_disk = sum(files.values()) or None
        return found | {"path": path, "disk_bytes": on_disk, "problem": str(error)}, files


def files_of(path: str) -> Inodes:
    """The files of a local directory: steps share unchanged ones by hard links."""
    found: Inodes = {}
    text, local = resolve(path)
    backend = backend_of(local)
    text = backend.replaced(text) or text
    for name, size_bytes in backend.files(text).items() if local else ():
        try:
            status = os.stat(os.path.join(text, name))
        except OSError:  # deleted meanwhile, or a dangling link
            continue
        if size_bytes >= 0:  # a regular file
            found[status.st_dev, status.st_ino] = status.st_size
    return found


def _hint(directory: str) -> str:
    """What to call for a directory without steps: it is a checkpoint, or some are in one below it."""
    with contextlib.suppress(CheckpointError, OSError):
        inspect(directory)
        return f"; it is a checkpoint itself: ckpt show {directory}"
    backend, level = backend_of(resolve(directory)[1]), [directory]
    for _ in range(_DEEPEST):
        level = [f"{one}/{name}" for one in level for name in sorted(backend.children(one))]
        for path in level:
            if steps_in(path).latest() is not None:
                return f"; there are some in {path}: ckpt ls {path}"
    return ""


def _beside_as_text(beside: list[Trace]) -> str:
    """A line about each entry beside the steps: what it is, its owner, its age."""
    words: dict[str, list[str]] = {}
    for trace in beside:
        text, since = trace.name, f"since {time_of(trace.since_unix_secs)}"
        if trace.kind == "unfinished":
            text += f" ({trace.whose}, {since})"
        elif trace.kind == "writer":
            text = f"{trace.whose or 'somebody'} {since}"
        words.setdefault(_KINDS[trace.kind], []).append(text)
    return "; ".join(f"{kind}: {', '.join(texts)}" for kind, texts in words.items())


_FOLDERS = {DAMAGED: "set aside", RETIRED: "retired"}
_KINDS = {
    "unfinished": "unfinished",
    "replaced": "replaced halfway",
    "kept": "replaced, and kept until the new one is known to be on the disk",
    "set aside": "damaged and set aside",
    "retired": "left behind by a restore of an older step",
    "writer": "being written to by",
}
