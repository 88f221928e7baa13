"""A checkpoint described without its arrays, and checked byte by byte."""

from __future__ import annotations

import os
import zlib

from ckpt_core._errors import CheckpointCorrupt, CheckpointError
from ckpt_core._format.record import RECORD_FILE, FileRecord
from ckpt_core._leaves import TEXT_KINDS
from ckpt_core._load.foreign import with_specs
from ckpt_core._load.opened import Opened, SavedItem, format_version, open_checkpoint
from ckpt_core._load.read import read_leaves
from ckpt_core._load.wants import Want
from ckpt_core._load.watched import held
from ckpt_core._options import Options
from ckpt_core._plan import gaps, whole
from ckpt_core._results import CheckpointInfo, ItemInfo, LeafInfo, Problem, VerifyReport
from ckpt_core._run_metadata import read_run_metadata
from ckpt_core._storage import new_context, read_index
from ckpt_core._tree import format_path


def inspect(path: str | os.PathLike[str]) -> CheckpointInfo:
    """What a checkpoint holds: items, leaves, metadata; no array is read.

    Raises:
        CheckpointNotFound: there is none.
        CheckpointCorrupt: its metadata is damaged.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp
        >>> ckpt.save("/tmp/ckpt-docs/one", {"w": jnp.ones(3)}, overwrite=True)
        >>> ckpt.inspect("/tmp/ckpt-docs/one").items["state"].leaves[0].shape
        (3,)
    """
    return describe_opened(open_checkpoint(path))


def describe_opened(opened: Opened) -> CheckpointInfo:
    """``inspect`` of a checkpoint that is open already."""
    record = opened.record
    return CheckpointInfo(
        path=opened.path,
        items={name: _item_info(opened, item) for name, item in opened.items.items()},
        metadata=opened.metadata,
        metrics=dict(opened.metrics),
        versions={} if record is None else record.versions,
        topology={} if record is None else record.topology,
        format_version=format_version(opened),
        created_unix_secs=None if record is None else record.created_unix_secs,
        durations={} if record is None else record.durations,
        run_metadata=read_run_metadata(opened.form, opened.path.rpartition("/")[0]),
        files={}
        if record is None
        else {name: entry.size_bytes for name, entry in record.files.items()},
    )


def _item_info(opened: Opened, saved: SavedItem) -> ItemInfo:
    if saved.form != "tree":
        return ItemInfo(saved.name, saved.form, ())
    item = with_specs(opened, saved, new_context()) if saved.orbax is not None else saved
    leaves = tuple(
        LeafInfo(format_path(path), spec.kind, spec.shape, spec.dtype, sharding, spec.stored_bytes)
        for path, spec, sharding in zip(item.paths, item.specs, item.shardings, strict=True)
    )
    return ItemInfo(saved.name, "tree", leaves)


def verify(path: str | os.PathLike[str]) -> VerifyReport:
    """Whether every byte of a checkpoint is as it was saved; reads all of it.

    Every file is held against the record, and every chunk against its checksums. A directory that
    Orbax wrote has none: the report then says so and is not ok.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp
        >>> ckpt.save("/tmp/ckpt-docs/one", {"w": jnp.ones(3)}, overwrite=True)
        >>> ckpt.verify("/tmp/ckpt-docs/one").ok
        True
    """
    try:
        opened = open_checkpoint(path)
    except CheckpointCorrupt as error:
        return VerifyReport(False, (Problem(error.file or RECORD_FILE, str(error), error.leaf),), 0)
    if opened.record is None:
        note = "written by Orbax, which records no checksums: nothing can be verified"
        return VerifyReport(False, (Problem(opened.path, note),), 0)
    with held(opened):
        return _verified(opened)


def _verified(opened: Opened) -> VerifyReport:
    assert opened.record is not None
    problems: list[Problem] = []
    present = opened.form.files(opened.path)
    for name in present.keys() - opened.record.files.keys() - {RECORD_FILE}:
        problems.append(Problem(name, "was not there when the checkpoint was saved"))
    covered = _covered(opened, problems)
    checked_bytes = 0
    for name, expected in opened.record.files.items():
        problem = _check_file(opened, name, expected, present.get(name), covered.get(name, []))
        checked_bytes += expected.size_bytes
        if problem:
            problems.append(Problem(name, problem))
    for item in opened.items.values():
        if item.form == "tree":
            problems += _check_leaves(opened, item)
    problems.sort(key=str)
    return VerifyReport(not problems, tuple(problems), checked_bytes)


def _covered(opened: Opened, problems: list[Problem]) -> dict[str, list[tuple[int, int]]]:
    """What block checksums cover, for the data files that are digested only elsewhere."""
    assert opened.record is not None
    found: dict[str, list[tuple[int, int]]] = {}
    partly = {name for name, entry in opened.record.files.items() if entry.data}
    for item in opened.items.values():
        if not any(name.startswith(f"{item.directory}/") for name in partly):
            continue
        try:
            index = dict(read_index(opened.location / item.directory, new_context()))
        except CheckpointCorrupt as error:
            problems.append(Problem(f"{item.directory}/manifest.ocdbt", str(error)))
            continue
        for key, extent in index.items():
            if extent.file and not key.endswith("zarr.json"):
                ranges = found.setdefault(f"{item.directory}/{extent.file}", [])
                ranges.append((extent.offset, extent.size_bytes))
    return found


def _check_file(
    opened: Opened,
    name: str,
    expected: FileRecord,
    size: int | None,
    covered: list[tuple[int, int]],
) -> str | None:
    if size is None:
        return "is missing"
    if size != expected.size_bytes:
        return f"has {size} bytes, was saved with {expected.size_bytes}"
    if not expected.data:
        data = opened.form.read(opened.path, name)
        return (
            None
            if data is not None and zlib.crc32(data) == expected.crc32
            else "is damaged: checksum differs"
        )
    crc = 0
    with open(os.path.join(opened.path, name), "rb") as file:
        for start, stop in gaps(size, covered):
            file.seek(start)
            crc = zlib.crc32(file.read(stop - start), crc)
    return None if crc == expected.crc32 else "is damaged outside its arrays: checksum differs"


def _check_leaves(opened: Opened, item: SavedItem) -> list[Problem]:
    """Reads every array leaf on its own, so that each damaged one is named."""
    positions = [p for p, spec in enumerate(item.specs) if spec.kind not in TEXT_KINDS]
    wants = [Want(p, [whole(item.specs[p].stored_shape)]) for p in positions]
    try:
        for _ in read_leaves(opened, item, wants, Options(), new_context()):
            pass
        return []
    except CheckpointError:
        pass
    problems: list[Problem] = []
    for want in wants:
        try:
            for _ in read_leaves(opened, item, [want], Options(), new_context()):
                pass
        except CheckpointCorrupt as error:
            problems.append(Problem(error.file or item.directory, str(error), error.leaf))
            if len(problems) >= 100:
                break
    return problems
