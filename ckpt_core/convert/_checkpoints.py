"""What ``load`` takes as it is: safetensors, and checkpoints of Orbax."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ckpt_core._errors import CheckpointError, CheckpointNotFound
from ckpt_core._format import orbax_write
from ckpt_core._layout.regions import whole
from ckpt_core._load import load
from ckpt_core._options import Options
from ckpt_core._read import Want, read_leaves, with_specs
from ckpt_core._saved import (
    Checkpoint,
    ExtentItem,
    NativeCheckpoint,
    OrbaxItem,
    SavedItem,
    open_checkpoint,
)
from ckpt_core._storage import new_context
from ckpt_core._tree import FlatTree
from ckpt_core._tree.leaves import TEXT_KINDS
from ckpt_core.convert._source import Array, Slot, array_spec


def items_of(path: str, item: str | None, options: Options) -> tuple[dict[str, Any], Any]:
    """The items, trees of arrays flat, by name (empty if it is one state); and the metadata."""
    opened = open_checkpoint(path, options)
    if isinstance(opened, NativeCheckpoint):
        raise CheckpointError(f"{path} is a checkpoint of ckpt: copy it with 'ckpt cp'")
    saved = list(opened.items.values())
    if len(saved) == 1 and isinstance(saved[0], ExtentItem):
        return {"": _flat(opened, saved[0], options)}, opened.metadata
    if item is not None and item not in opened.items:
        raise CheckpointNotFound(f"{path} has no item {item!r}, but {', '.join(opened.items)}")
    chosen = [one for one in saved if item in (None, one.name)]
    found = {one.name: _item(opened, one, options) for one in chosen}
    return {"": found.popitem()[1]} if opened.single and item is None else found, opened.metadata


def _item(opened: Checkpoint, saved: SavedItem, options: Options) -> Any:
    if saved.form == "tree":
        return _flat(opened, saved, options)
    if saved.form in ("process", "files"):
        raise CheckpointError(
            f"{opened.path}: item {saved.name!r} is no tree of arrays, but of the form {saved.form!r}: it needs the "
            "program that wrote it; import the other items one by one with item="
        )
    value = load(opened.path, item=None if opened.single else saved.name, options=options)
    if saved.form != "json":
        return value
    from ckpt_core._items import Json

    return Json(value)


def _flat(opened: Checkpoint, item: SavedItem, options: Options) -> FlatTree:
    context = new_context()
    if isinstance(item, OrbaxItem):
        item = with_specs(opened, item, context)
    specs = list(item.specs)
    if isinstance(item, ExtentItem):
        specs = [array_spec(spec.dtype, spec.shape, opened.path) for spec in specs]
    text_of = _text_reader(opened, item)

    def read(slots: Sequence[Slot]) -> Iterator[Array]:
        wants = [Want(slot.place, [whole(slot.spec.stored_shape)]) for slot in slots]
        reading = read_leaves(opened, item, wants, options, context)
        with opened.held(), contextlib.closing(reading):
            for _, parts in reading:
                (array,) = parts.values()
                yield array

    leaves = [
        text_of(position) if spec.kind in TEXT_KINDS else Slot(spec, read, position)
        for position, spec in enumerate(specs)
    ]
    return FlatTree(list(item.paths), leaves, item.root)


def _text_reader(opened: Checkpoint, item: SavedItem) -> Callable[[int], str]:
    """Gives the text leaves of an item; their file is read for the first one."""

    @functools.cache
    def document() -> Any:
        name = item.file(orbax_write.STRINGS_FILE)
        return orbax_write.parse_strings(opened.read_file(name), name)

    return lambda leaf: orbax_write.read_string(document(), item.name_of(leaf))
