"""``inspect`` and ``verify``: describe a checkpoint without its arrays, and check all its bytes."""

from __future__ import annotations

import contextlib
import os
import zlib
from dataclasses import replace

from ckpt_core._directory import crc32_of, read_run_metadata
from ckpt_core._errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound
from ckpt_core._format.checksums import CHECKSUM_DIRECTORY, load_checksums
from ckpt_core._format.orbax_files import COMMIT_FILE, STEP_METADATA
from ckpt_core._format.record import RECORD_FILE, FileRecord, parse_json
from ckpt_core._layout.chunks import chunk_of_key
from ckpt_core._layout.regions import gaps, whole
from ckpt_core._load.non_tree import sizes_of
from ckpt_core._options import MIB, Options, checked_options
from ckpt_core._read import Want, read_leaves, with_specs
from ckpt_core._results import CheckpointInfo, ItemInfo, LeafInfo, Problem, VerifyReport
from ckpt_core._saved import (
    MOST_TRIES,
    Checkpoint,
    ExtentItem,
    NativeCheckpoint,
    NativeItem,
    OrbaxItem,
    SavedItem,
    open_checkpoint,
)
from ckpt_core._storage import INDEX_FILE, read_index
from ckpt_core._tree import format_path
from ckpt_core._tree.leaves import TEXT_KINDS
from ckpt_core.arguments import answering

_MOST_REST_BYTES = 1024 * MIB  # most bytes outside of arrays, if these are over half of a file
Ranges = list[tuple[int, int]]
_READ_AT_TOP = frozenset({INDEX_FILE, COMMIT_FILE, "checkpoint", "metadata", "orbax.checkpoint"})
"""Files of a checkpoint without named items, which Orbax or its users' programs look for in the directory itself."""


@answering
def inspect(path: str | os.PathLike[str], *, options: Options | None = None) -> CheckpointInfo:
    """Items, leaves and metadata of a checkpoint; reads no array. Any process may call it alone.

    Args:
        path: of the checkpoint.
        options: ``storage_options`` of it says how to reach a bucket.

    Raises:
        CheckpointNotFound: there is no checkpoint at ``path``.
        CheckpointCorrupt: its metadata is damaged.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp
        >>> ckpt.save("/tmp/ckpt-docs/one", {"w": jnp.ones(3)}, overwrite=True)
        >>> ckpt.inspect("/tmp/ckpt-docs/one").items["state"].leaves[0].shape
        (3,)
    """
    return describe_opened(open_checkpoint(path, checked_options(options)))


def describe_opened(opened: Checkpoint) -> CheckpointInfo:
    """``inspect`` for a checkpoint that is already open."""
    run_metadata = None
    with contextlib.suppress(PermissionError):  # nobody may look above the checkpoint
        run_metadata = read_run_metadata(opened.backend, opened.path.rpartition("/")[0])
    info = CheckpointInfo(
        path=opened.path,
        items={name: _item_info(opened, item) for name, item in opened.items.items()},
        metadata=opened.metadata,
        metrics=dict(opened.metrics),
        run_metadata=run_metadata,
        layout=layout_of(opened),
    )
    if not isinstance(opened, NativeCheckpoint):
        return replace(info, created_unix_secs=_created_by_orbax(opened))
    record = opened.record
    facts = ("versions", "topology", "format_version", "created_unix_secs", "durations")
    sizes = {name: entry.size_bytes for name, entry in record.files.items()}
    return replace(info, files=sizes, **{name: getattr(record, name) for name in facts})


def layout_of(opened: Checkpoint) -> str:
    """``ckpt``, ``orbax`` or ``safetensors``: whose format a checkpoint has."""
    if isinstance(opened, NativeCheckpoint):
        return "ckpt"
    foreign = any(isinstance(item, ExtentItem) for item in opened.items.values())
    return "safetensors" if foreign else "orbax"


def _created_by_orbax(opened: Checkpoint) -> float | None:
    """Time of Orbax's commit, from its metadata, else the directory's modification time."""
    data = opened.backend.read(opened.path, STEP_METADATA)
    described = parse_json(data, STEP_METADATA) if data else None
    for name in ("commit_timestamp_nsecs", "init_timestamp_nsecs"):
        nanoseconds = described.get(name) if isinstance(described, dict) else None
        if isinstance(nanoseconds, int) and 0 < nanoseconds < 2**63:
            return nanoseconds / 1e9
    with contextlib.suppress(OSError):  # in an object store, directories have no time
        return os.stat(opened.path).st_mtime
    return None


def _item_info(opened: Checkpoint, saved: SavedItem) -> ItemInfo:
    if saved.form == "files":
        return ItemInfo(saved.name, saved.form, (), dict(sorted(sizes_of(opened, saved).items())))
    if saved.form != "tree":
        return ItemInfo(saved.name, saved.form, ())
    item = saved  # our own record has all specs, so TensorStore is not needed
    if isinstance(saved, OrbaxItem):
        item = with_specs(opened, saved)
    leaves = tuple(
        LeafInfo(format_path(path), spec.kind, spec.shape, spec.dtype, sharding, spec.stored_bytes)
        for path, spec, sharding in zip(item.paths, item.specs, item.shardings, strict=True)
    )
    return ItemInfo(saved.name, "tree", leaves, root=item.root)


@answering
def verify(path: str | os.PathLike[str], *, options: Options | None = None) -> VerifyReport:
    """Checks whether every byte of a checkpoint is as it was saved; reads all of it and blocks.

    Compares every file with the record, and every chunk with its checksums. Any process may call it
    alone. A directory that Orbax wrote, and safetensors, have no checksums: the report says so and is not ok.

    Args:
        path: of the checkpoint.
        options: ``storage_options`` of it says how to reach a bucket, ``max_host_bytes`` how much is read at a time.

    Raises:
        CheckpointNotFound: there is no checkpoint at ``path``.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp
        >>> ckpt.save("/tmp/ckpt-docs/one", {"w": jnp.ones(3)}, overwrite=True)
        >>> ckpt.verify("/tmp/ckpt-docs/one").ok
        True
    """
    chosen = checked_options(options)
    try:
        opened = open_checkpoint(path, chosen)
        for _ in range(MOST_TRIES):
            if not isinstance(opened, NativeCheckpoint):
                break
            report = None
            try:
                with opened.reading():
                    report = _verified(opened, Options(max_host_bytes=chosen.max_host_bytes))
            except (CheckpointNotFound, FileNotFoundError):
                if not opened.was_replaced():
                    raise
            if report is not None and (report.ok or not opened.was_replaced()):
                return report  # else of parts of two checkpoints
            opened = open_checkpoint(path, chosen)
    except CheckpointCorrupt as error:
        return VerifyReport(False, (Problem(error.file or RECORD_FILE, str(error), error.leaf),), 0)
    note = "written by Orbax, which records no checksums: nothing can be verified"
    if layout_of(opened) == "safetensors":
        note = "safetensors, a format without checksums: header and sizes are as they must be"
        note += ", and no more can be verified"
    return VerifyReport(False, (Problem(opened.path, note),), 0, has_checksums=False)


def _verified(opened: NativeCheckpoint, options: Options) -> VerifyReport:
    files, small = opened.record.files, opened.record.small_files
    known_bytes = {name: entry.size_bytes for name, entry in files.items()}
    present = opened.backend.files(opened.path, known_bytes)
    added = present.keys() - files.keys() - {RECORD_FILE}
    others = sorted(filter(_is_of_others, added))
    new = "was not there when the checkpoint was saved"
    problems = [Problem(name, new) for name in added.difference(others)]
    in_store = opened.record.part is None and COMMIT_FILE in present  # else not all are there yet
    present = {name: len(data) for name, data in small.items()} | present
    covered = _covered(opened, problems)
    for name, expected in files.items():
        size = present.get(name)
        if size is None:  # if two links lead to one directory, files() lists it only once
            size = opened.backend.size(opened.path, name)
        if problem := _check_file(opened, name, expected, size, covered.get(name, [])):
            problems.append(Problem(name, problem))
        if in_store and name in small and (problem := _check_copy(opened, name, expected)):
            problems.append(Problem(name, problem))
    for item in opened.items.values():
        if item.form == "tree":
            problems += _check_leaves(opened, item, options)
    problems.sort(key=str)
    checked_bytes = sum(known_bytes.values())
    return VerifyReport(not problems, tuple(problems), checked_bytes, tuple(others))


def _is_of_others(name: str) -> bool:
    """Whether no reader looks at an added file: of a desktop or NFS, or beside the items with a name of its own."""
    last = name.rpartition("/")[2]
    if last.startswith(("._", ".nfs")) or last in (".DS_Store", "Thumbs.db", "desktop.ini"):
        return True
    return "/" not in name and not name.startswith(("_", ".", "ckpt.")) and name not in _READ_AT_TOP


def _covered(opened: NativeCheckpoint, problems: list[Problem]) -> dict[str, Ranges]:
    """Data file -> ranges that block checksums cover; its digest is of the other bytes."""
    found: dict[str, Ranges] = {}
    partly = {name for name, entry in opened.record.files.items() if entry.data}
    for directory in (item.directory for item in opened.items.values()):
        if not any(name.startswith(f"{directory}/") for name in partly):
            continue
        try:
            manifest = opened.read_file(f"{directory}/{INDEX_FILE}")
            index = read_index(opened.location / directory, opened.context, manifest=manifest)
            for key, (file, offset, size_bytes, _) in index.items():
                if file and not key.endswith("zarr.json"):
                    found.setdefault(f"{directory}/{file}", []).append((offset, size_bytes))
        except CheckpointCorrupt as error:
            problems.append(Problem(f"{directory}/{INDEX_FILE}", str(error)))
    return found


def _check_file(
    opened: NativeCheckpoint, name: str, expected: FileRecord, size: int | None, covered: Ranges
) -> str | None:
    if size is None:
        return "is missing"
    if size < 0:
        return "is no regular file, or a link that leads nowhere"
    if size != expected.size_bytes:
        return f"has {size} bytes, was saved with {expected.size_bytes}"
    if size > opened.record.most_bytes(name):
        return f"has {size} bytes, and can have {opened.record.most_bytes(name)} at most"
    ranges = gaps(size, covered) if expected.data else [(0, size)]
    if not opened.location.local or name in opened.record.small_files:
        data = opened.read_unverified(name, expected.size_bytes)
        crc = None if data is None else zlib.crc32(b"".join(data[a:b] for a, b in ranges))
    else:
        rest = sum(stop - start for start, stop in ranges)
        if rest > max(_MOST_REST_BYTES, size // 2) and not opened.record.is_users(name):
            return f"has {rest} bytes that belong to no array: they were not read"
        crc = crc32_of(os.path.join(opened.path, name), ranges)
    if crc == expected.crc32:
        return None
    return f"is damaged{' outside its arrays' if expected.data else ''}: checksum differs"


def _check_copy(opened: NativeCheckpoint, name: str, expected: FileRecord) -> str | None:
    """What is wrong with the copy, for Orbax, of a file that stands in the record."""
    with contextlib.suppress(CheckpointCorrupt):  # it is longer
        copy = opened.backend.read(opened.path, name, expected.size_bytes)
        if copy is None:
            return "is missing for Orbax: ckpt reads another copy, which is whole"
        if zlib.crc32(copy) == expected.crc32:
            return None
    return "is damaged in the copy that Orbax reads: ckpt reads another one, which is whole"


def _check_leaves(opened: NativeCheckpoint, item: SavedItem, options: Options) -> list[Problem]:
    """Reads all arrays; if that fails, reads each one alone, to report up to 100 damaged leaves."""
    try:
        wants = _wants(opened, item)
    except CheckpointCorrupt as error:
        return [Problem(error.file or item.directory, str(error))]
    with contextlib.suppress(CheckpointError):
        for _ in read_leaves(opened, item, wants, options):
            pass
        return []
    problems: list[Problem] = []
    for want in wants:
        try:
            for _ in read_leaves(opened, item, [want], options):
                pass
        except CheckpointCorrupt as error:
            problems.append(Problem(error.file or item.directory, str(error), error.leaf))
            if len(problems) >= 100:
                break
    return problems


def _wants(opened: NativeCheckpoint, item: SavedItem) -> list[Want]:
    """All that is stored of each array; in a local directory that may be a part of it."""
    positions = [p for p, spec in enumerate(item.specs) if spec.kind not in TEXT_KINDS]
    if opened.record.part is None or not isinstance(item, NativeItem):
        return [Want(p, [whole(item.specs[p].stored_shape)]) for p in positions]
    file = item.file(f"{CHECKSUM_DIRECTORY}/process_0")
    found: dict[str, list[tuple[int, ...]]] = {}
    try:
        for key in load_checksums(opened.read_file(file), file)[1]:
            name, index = chunk_of_key(key)
            found.setdefault(name, []).append(index)
    except ValueError as error:
        raise CheckpointCorrupt(f"{opened.path}: {file}: {error}", file=file) from error
    wants: list[Want] = []
    for position in positions:
        shape, chunk = item.specs[position].stored_shape, item.chunks[position]
        regions = [
            tuple(
                (at * step, min(size, (at + 1) * step))
                for at, step, size in zip(index, chunk, shape, strict=True)
            )
            for index in found.get(item.name_of(position), [])
        ]
        wants += [Want(position, [region]) for region in regions]
    return wants
