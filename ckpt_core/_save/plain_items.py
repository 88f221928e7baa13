"""Saves items that are no pytrees and belong to no process: ``Files`` and ``Json``."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckpt_core._directory import (
    Attempt,
    Scratch,
    SourceFile,
    files_below,
    pieces_of,
    write_pieces,
)
from ckpt_core._errors import CheckpointError, CheckpointNotFound, UnsupportedLeaf
from ckpt_core._format.orbax_write import COMMIT_FILE
from ckpt_core._format.plain_json import refuse_keys
from ckpt_core._format.record import FileRecord, ItemRecord, dump_json
from ckpt_core._items import Files, Json, SavedFiles
from ckpt_core._options import MIB
from ckpt_core._platform import ROOTS
from ckpt_core._save.job import PreparedItem, SaveJob
from ckpt_core._save.plan_digest import text_of_text
from ckpt_core._save.unchanged import Links
from ckpt_core._tree import NONE

NOTES: tuple[str, ...] = ("metadata", "data.json")
"""Where Orbax's Json handlers look, of v0 and of v1."""
_HELD_BYTES = MIB
"""Smaller files are read before the save returns."""
_HELD_BYTES_IN_ALL = 64 * MIB


def prepare_json(name: str, item: Json, job: SaveJob) -> PreparedItem:
    """The item with its content as it is now; UnsupportedLeaf for a value or a key that JSON cannot hold."""
    try:
        refuse_keys(item.value)
        data = json.dumps(item.value, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedLeaf(
            f"Json takes plain values only (dicts with text keys, lists, text, numbers, True, False, None): {error}",
            type_name=type(item.value).__name__,
        ) from error
    files: dict[str, bytes] = {}
    if job.writers.index == 0:
        files |= dict.fromkeys(NOTES, data)
    record = ItemRecord("json", NONE, process_count=job.writers.count)
    compared: dict[str, str] = {}
    if job.processes.count > 1 and not job.own:  # the order of keys is no difference
        compared[""] = text_of_text(json.dumps(item.value, sort_keys=True))
    return PreparedItem(name, record, state_files=files, values=compared)


def prepare_files(
    name: str, item: Files | SavedFiles, jobs: Sequence[SaveJob]
) -> list[PreparedItem]:
    """For each job the item: small files as they are now, and where the others are; CheckpointError if they are too large for a bucket."""
    writing = [job for job in jobs if job.writers.index == 0]
    if not writing:
        return [_prepared(name, job) for job in jobs]
    source = item.copy_to if isinstance(item, SavedFiles) else item.source
    scratch = None
    if callable(source):
        scratch = Scratch(len(writing))
        try:
            source(Path(scratch.path))
        except CheckpointNotFound as error:
            raise CheckpointNotFound(
                f"item {name!r} is in a checkpoint that is gone ({error}): pass ckpt.Files(...) of files of your own"
            ) from error
        found = files_below(scratch.path)
    else:
        path = os.path.abspath(os.path.expanduser(source))
        for job in writing:
            _refuse_itself(path, job)
        found = files_below(path)
    if not all(job.local for job in writing):
        _refuse_too_large(name, found, jobs[0].options.max_host_bytes)
    names = {file.name.partition("/")[0] for file in found}
    handler = item.orbax_handler if isinstance(item, Files) else None
    notes = () if handler else tuple(note for note in NOTES if note not in names)
    said = {"format": "ckpt files", "files": {file.name: file.size_bytes for file in found}}
    held: dict[str, bytes] = dict.fromkeys(notes, dump_json(said))
    left, sources = _HELD_BYTES_IN_ALL, list[SourceFile]()
    for file in found:
        if file.size_bytes < min(_HELD_BYTES, left + 1):
            held[file.name] = b"".join(pieces_of(file))
            left -= file.size_bytes
        else:
            sources.append(file)
    if scratch is not None and not sources:
        for _ in writing:
            scratch.close()
        scratch = None
    prepared: list[PreparedItem] = []
    for job in jobs:
        if job.writers.index > 0:
            prepared.append(_prepared(name, job))
            continue
        # in a bucket, Orbax wants it in each item
        marks = () if job.local or COMMIT_FILE in names else (COMMIT_FILE,)
        content = {"state_files": held, "sources": tuple(sources), "scratch": scratch}
        prepared.append(_prepared(name, job, (*notes, *marks), handler=handler, **content))
    return prepared


def _prepared(name: str, job: SaveJob, notes: tuple[str, ...] = (), **content: Any) -> PreparedItem:
    record = ItemRecord("files", NONE, process_count=job.writers.count, notes=notes)
    return PreparedItem(name, record, **content)


def _refuse_itself(path: str, job: SaveJob) -> None:
    """Raises UnsupportedLeaf if the checkpoint lies below ``path``: each would hold all the earlier ones."""
    around = os.path.realpath(path)
    on_disk = job.target.startswith(ROOTS)  # or in a bucket that is mounted
    if on_disk and os.path.realpath(job.target).startswith(f"{around.rstrip('/')}/"):
        raise UnsupportedLeaf(
            f"{path!r} holds the checkpoint that is being saved, {job.target!r}: save what is beside it, or by a "
            "function that copies that",
            type_name="file",
        )


def _refuse_too_large(name: str, found: list[SourceFile], most_bytes: int) -> None:
    total = sum(file.size_bytes for file in found)
    if total > most_bytes:
        raise CheckpointError(
            f"item {name!r}: its files have {total:,} bytes, and a save into a bucket holds them in memory, {most_bytes:,} "
            f"at most: pass options=ckpt.Options(max_host_bytes={total}), or keep the largest of them elsewhere"
        )


def write_sources(
    item: PreparedItem, attempt: Attempt, job: SaveJob, links: Links | None
) -> dict[str, FileRecord]:
    """Size and digest, by path in the checkpoint, of the item's larger files, which it copies into the attempt,
    or links if they have not changed. CheckpointError if a file has changed since the save was called.
    """
    found: dict[str, FileRecord] = {}
    for source in item.sources:
        name = f"{item.folder}/{source.name}"
        linked = None if links is None else links.link_file(name, attempt.path, source)
        if linked is not None:
            found[name] = linked
        elif job.local:
            path = os.path.join(attempt.path, name)
            crc = write_pieces(path, pieces_of(source), durable=job.options.durable)
            size = os.stat(path).st_size
            if size != source.size_bytes:
                raise CheckpointError(f"{source.path} became shorter while it was being saved")
            found[name] = FileRecord(size, crc)
        else:
            data = b"".join(pieces_of(source))
            found[name] = attempt.write(name, data)
    if item.scratch is not None:
        item.scratch.close()
    return found
