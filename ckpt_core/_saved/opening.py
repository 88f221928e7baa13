"""Opens a checkpoint: one of ckpt is known by its ckpt.json, one of Orbax by its metadata files."""

from __future__ import annotations

import contextlib
import difflib
import heapq
import os
import shlex
from dataclasses import replace
from typing import Any

from ckpt_core._background import unfinished, wait_for_saves
from ckpt_core._directory import Backend, refuse_file, refuse_lost_link, resolve
from ckpt_core._errors import CheckpointCorrupt, CheckpointNotFound
from ckpt_core._fork import HOME, forked
from ckpt_core._format import orbax_files
from ckpt_core._format.orbax_files import OrbaxTree
from ckpt_core._format.plain_json import numbers_in
from ckpt_core._format.record import MARKER, RECORD_FILE, folder_of, load_record, parse_json
from ckpt_core._operation import logger
from ckpt_core._options import Options
from ckpt_core._saved import foreign
from ckpt_core._saved.checkpoint import (
    MOST_TRIES,
    Checkpoint,
    NativeCheckpoint,
    NativeItem,
    OrbaxItem,
    SavedItem,
    replaced,
    with_path,
)
from ckpt_core._storage import INDEX_FILE, Location, backend_of
from ckpt_core._tree import array_name, stored_paths
from ckpt_core._words import some

_HEAD_BYTES = 32
_OF_ARRAYS = (f"/{INDEX_FILE}", "zarr.json", ".zarray")


def open_checkpoint(path: str | os.PathLike[str], options: Options | None = None) -> Checkpoint:
    """The checkpoint at ``path``, with its metadata read and none of its arrays; ForkedProcess in a forked child."""
    HOME.is_used = True
    if os.getpid() != HOME.pid:
        raise forked()
    text, local = resolve(path)
    if unfinished:
        wait_for_saves(text, (options or Options()).timeout_secs)
    return open_in(backend_of(local, options), text, local, options)


def open_in(backend: Backend, path: str, local: bool, options: Options | None = None) -> Checkpoint:
    """The same where ``resolve`` gave ``path``, absolute or a URL, and ``local`` before: for one of the steps of a run."""
    location = Location(path, local, storage_options=options and options.storage_options)
    before = None
    for _ in range(MOST_TRIES):
        try:
            return _open(location, backend)
        except (CheckpointNotFound, CheckpointCorrupt) as raised:
            # A file that is looked for in a directory just when another takes its place may be deleted already.
            if local and (now := _standing(path)) != before:
                before = now
                continue
            if (error := with_path(raised, path)) is raised:
                raise
            raise error from raised
    raise replaced(path)


def _standing(path: str) -> tuple[int, ...]:
    """Tells whether another checkpoint was put at a path: then it changes."""
    found: list[int] = []
    for one in (path, f"{path}/{RECORD_FILE}"):
        with contextlib.suppress(OSError):
            status = os.stat(one)
            found += [status.st_dev, status.st_ino, status.st_ctime_ns]
    return tuple(found)


def _open(location: Location, backend: Backend) -> Checkpoint:
    text, folder, local = location.path, location, location.local
    if text.endswith(foreign.SUFFIXES) and (file := foreign.open_file(location, backend)):
        return file
    if (aside := backend.replaced(text)) is not None:
        # a save with overwrite=True was killed between its two renames: load the old checkpoint
        text, location = aside, replace(location, path=aside)
    record = backend.read(text, RECORD_FILE)
    if record is None and not local:
        if not backend.is_checkpoint(text):  # it may be half deleted
            return _open_folder(folder, backend)
        record = backend.read(text, RECORD_FILE)  # committed since the first look
    if record is not None:
        return _open_ours(location, backend, record)
    described = backend.read(text, orbax_files.STEP_METADATA)
    step: dict[str, Any] = {}
    if described:
        step = parse_json(described, orbax_files.STEP_METADATA)
        if not isinstance(step, dict):
            raise CheckpointCorrupt(
                f"{orbax_files.STEP_METADATA}: not an object", file=orbax_files.STEP_METADATA
            )
        step["custom_metadata"] = step.get("custom_metadata") or {}
    if MARKER in step.get("custom_metadata", {}):
        raise _no_record(text)
    tree = backend.read(text, orbax_files.ITEM_METADATA)
    if tree is not None:
        flat = orbax_files.load_item_metadata(tree, orbax_files.ITEM_METADATA)
        return _open_flat(location, backend, flat)
    return _open_orbax(location, backend, step) or _open_folder(folder, backend)


def _open_folder(location: Location, backend: Backend) -> Checkpoint:
    """The weights in a folder that is no checkpoint of ckpt or Orbax."""
    opened = foreign.open_folder(location, backend)
    if opened is None:
        raise not_found(location.path, backend)
    return opened


def _no_record(path: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"{path}: {RECORD_FILE} is missing, though the checkpoint says that it must be there: "
        "nothing in it can be checked. Restore the file, or load another checkpoint",
        file=RECORD_FILE,
    )


def _open_ours(location: Location, backend: Backend, data: bytes) -> NativeCheckpoint:
    """A checkpoint that ckpt wrote; ``data`` is the content of its ckpt.json."""
    record, items = load_record(data), dict[str, SavedItem]()
    for name, item in record.items.items():
        stored = stored_paths(item.tree, item.paths)
        shardings = {None: None, **dict(enumerate(item.shardings))}
        items[name] = NativeItem(
            name=name,
            form=item.form,
            root=item.tree,
            paths=item.paths,
            specs=[leaf.spec for leaf in item.leaves],
            shardings=[shardings[leaf.sharding] for leaf in item.leaves],
            names=() if stored is item.paths else list(map(array_name, stored)),
            directory=folder_of(name),
            chunks=[leaf.chunk for leaf in item.leaves],
            codecs=[leaf.codec for leaf in item.leaves],
            process_count=item.process_count,
            run_processes=record.topology.get("process_count", item.process_count),
            notes=item.notes,
            shared=item.shared,
        )
    return NativeCheckpoint(
        location.path,
        location,
        backend,
        items,
        record.single,
        record.metadata,
        record.metrics,
        shared=record.shared,
        record=record,
        head=data[:_HEAD_BYTES],
    )


def _open_flat(location: Location, backend: Backend, tree: OrbaxTree) -> Checkpoint:
    """A checkpoint whose path is the directory of one item: written flat by Orbax, or by ckpt."""
    path = location.path
    if tree.required_record:
        parent, _, name = path.rpartition("/")
        record = backend.read(parent, RECORD_FILE)
        if record is None:
            raise _no_record(path)
        opened = _open_ours(replace(location, path=parent), backend, record)
        for item in opened.items.values():
            if name == item.directory:
                return replace(opened, items={item.name: item}, single=True)
        raise CheckpointCorrupt(
            f"{path}: the record of {parent} has no item {name!r}", file=RECORD_FILE
        )
    logger.info("%s: written by Orbax, without checksums: loading unchecked", path)
    return Checkpoint(path, location, backend, {"": _orbax_tree(path, backend, "", "", tree)}, True)


def _orbax_tree(
    path: str, backend: Backend, name: str, directory: str, tree: OrbaxTree, form: str = "tree"
) -> OrbaxItem:
    """A pytree item that Orbax wrote, without specs: dtypes and shapes are known of opened arrays only."""
    file = f"{directory}/{orbax_files.SHARDING_FILE}".lstrip("/")
    data = backend.read(path, file)
    shardings = orbax_files.load_shardings(data, file) if data else {}
    return OrbaxItem(
        name=name,
        form=form,
        root=tree.root,
        paths=[leaf.path for leaf in tree.leaves],
        shardings=[shardings.get(leaf.name) for leaf in tree.leaves],
        names=[leaf.name for leaf in tree.leaves],
        tree=tree,
        directory=directory,
    )


def _open_orbax(location: Location, backend: Backend, step: dict[str, Any]) -> Checkpoint | None:
    """A step directory that Orbax wrote, with one subdirectory for each item; None if there is none."""
    path, handlers = location.path, step.get("item_handlers")
    handlers = handlers if isinstance(handlers, dict) else {}
    items: dict[str, SavedItem] = {}
    metrics: dict[str, float] = {}
    for name in backend.children(path):
        known = orbax_files.handler_form(str(handlers.get(name, "")))
        item = _orbax_item(path, backend, name, known)
        if item is None and name in handlers:
            files = backend.files(f"{path}/{name}")
            # arrays: the item has lost its metadata; else its handler is not Orbax's own
            if not any(file == INDEX_FILE or file.endswith(_OF_ARRAYS) for file in files):
                item = OrbaxItem(name, "files", directory=name)
        if item is None:
            continue
        if name == "metrics" and item.form == "json":
            metrics = numbers_in(item.value)
        else:
            items[name] = item
    if not items:
        return None
    single = len(items) == 1 and next(iter(items)) in ("default", "state")
    logger.info("%s: written by Orbax, without checksums: loading unchecked", path)
    if single and "default" in items:
        logger.info(
            "%s: Orbax' CheckpointManager finds a tree without a name as the item 'default': to go back to it, save "
            "with save(step, default=state), since save(step, state) stores 'state'",
            path,
        )
    return Checkpoint(path, location, backend, items, single, step.get("custom_metadata"), metrics)


def _orbax_item(path: str, backend: Backend, name: str, known: str) -> OrbaxItem | None:
    """The item in a subdirectory of an Orbax checkpoint, or None; ``known`` is its form by its handler, empty if none is named."""
    nested = {"jax_key": "jax_random_key", "numpy_key": "np_random_key"}.get(known)
    directory = f"{name}/{nested}" if nested else name
    data = backend.read(path, f"{directory}/{orbax_files.ITEM_METADATA}")
    if data is not None:
        tree = orbax_files.load_item_metadata(data, f"{directory}/{orbax_files.ITEM_METADATA}")
        if tree.required_record:
            raise _no_record(path)
        form = known if known in ("array", "jax_key", "numpy_key") else "tree"
        return _orbax_tree(path, backend, name, directory, tree, form)
    if known in ("array", "jax_key"):
        return OrbaxItem(name, known, directory=directory)
    for file in ("metadata", "data.json", "metrics"):
        data = backend.read(path, f"{name}/{file}")
        if data is not None:
            value = parse_json(data, f"{name}/{file}")
            return OrbaxItem(name, "json", value=value, directory=name)
    files = backend.files(f"{path}/{name}")
    states = any(file.startswith("process_") and "/" not in file for file in files)
    return OrbaxItem(name, "process", directory=name) if states else None


def not_found(path: str, backend: Backend) -> CheckpointNotFound:
    """The error for a path without a checkpoint; suggests similar names or the steps inside."""
    if "://" not in path:
        refuse_lost_link(path)
    if not backend.exists(path):
        return CheckpointNotFound(
            f"no checkpoint at {path}: it does not exist{_beside(path, backend)}"
        )
    inside = sorted(backend.children(path), key=lambda text: (len(text), text))
    steps = [
        name
        for name in inside
        if name.isdigit() or backend.read(f"{path}/{name}", RECORD_FILE) is not None
    ]
    if steps:
        return CheckpointNotFound(
            f"{path} is a directory of checkpoints ({', '.join(steps[-5:])}), not one: load one of them by its path, "
            f"such as {path.rstrip('/')}/{steps[-1]}, or use ckpt_core.Checkpointer(directory)"
        )
    return CheckpointNotFound(f"no checkpoint at {path}: {_what_is(path, backend)}")


def _beside(path: str, backend: Backend) -> str:
    """What to say of a path that does not exist: what is there instead, or the first folder on the way that is missing."""
    missing, (parent, _, name) = path, path.rpartition("/")
    beside = list[str]()
    with contextlib.suppress(PermissionError, NotADirectoryError):  # no looking around there
        while "://" not in path and parent and not backend.exists(parent):
            missing, (parent, _, name) = parent, parent.rpartition("/")
        beside = _suggestions(parent, name, backend) if parent else []
    if not beside:
        return ""
    where = "it" if missing == path else f"{missing}, which does not exist either,"
    return f"; beside {where} are {', '.join(beside)}"


_MOST_LOOKS = 32
"""Into so many folders a message looks for what was meant: beside it there may be 100,000, each a request to a bucket."""


def _suggestions(parent: str, wanted: str, backend: Backend) -> list[str]:
    """Names like the wanted one, or else checkpoints, or else all; a number stands for a step, so others are near ones."""

    def distance(name: str) -> tuple[bool, int]:
        if wanted.isdigit() and name.isdigit():
            return False, abs(int(name) - int(wanted))
        return wanted.isdigit(), len({*name} ^ {*wanted})  # letters that one of them lacks

    inside = heapq.nsmallest(_MOST_LOOKS, backend.children(parent), key=distance)
    inside.sort(key=lambda text: (len(text), text))
    found = [name for name in inside if backend.is_checkpoint(f"{parent}/{name}")]
    named = [name for name in inside if not name.isdigit()]  # a run is no checkpoint
    if wanted.isdigit() and found:
        near = sorted(filter(str.isdigit, found), key=distance)[:3]
        return [name for name in found if name in near] or found[-5:]
    close = difflib.get_close_matches(wanted, {*found, *named}, n=3, cutoff=0.3)
    return close or found[-5:] or named[-5:]


def refuse_file_for_steps(path: str) -> None:
    """Raises NotADirectoryError for a file where a Checkpointer's directory should be, CheckpointNotFound for a lost link."""
    refuse_lost_link(path)
    try:
        refuse_file(path)
    except NotADirectoryError as error:
        text = _about_file(path, "a {} is where the directory of steps should be")
        raise NotADirectoryError(error.errno, text, path) from None


def _about_file(path: str, text: str) -> str:
    """The text, with what kind of file this is, by its suffix; and how to load it."""
    whose = _LIBRARIES.get(os.path.splitext(path)[1].lower())
    if whose is None:
        return text.format("file")
    imported = f"{os.path.splitext(os.path.basename(path))[0]}-imported"
    return (
        f"{text.format(f'file of {whose}')}: make a checkpoint of it with `ckpt import {shlex.quote(path)} "
        f"{shlex.quote(imported)}`, or ckpt.convert.import_weights, and load that"
    )


def _what_is(path: str, backend: Backend) -> str:
    """What is at the path of a checkpoint that was not found, for the message."""
    if os.path.isfile(path):
        return _about_file(path, "it is a {}, and a checkpoint is a directory")
    inside = sorted({name.partition("/")[0] for name in backend.files(path)})
    if not inside:
        return "it is empty, or its save never finished"
    return f"it holds {some(inside)}, and nothing that ckpt or Orbax writes"


_LIBRARIES = {
    **{".npz": "numpy", ".msgpack": "Flax", ".h5": "Keras", ".keras": "Keras"},
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "PyTorch"),
}
"""Suffixes of files that users mistake for checkpoints, and the library that writes such."""
