"""Finding a checkpoint and opening it: ours by its record, Orbax's by its metadata."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_core._directory import Form, LocalForm, StoreForm, resolve
from ckpt_core._errors import CheckpointCorrupt, raised_by_a_handler
from ckpt_core._events import logger
from ckpt_core._fork import HOME_PID, forked
from ckpt_core._format import orbax, orbax_trees
from ckpt_core._format.limits import most_bytes
from ckpt_core._format.record import (
    FORMAT_VERSION,
    MARKER,
    RECORD_FILE,
    Record,
    load_record,
    parse_json,
)
from ckpt_core._leaves import LeafSpec
from ckpt_core._load.absent import not_found
from ckpt_core._plan import chunk_count, whole
from ckpt_core._storage import KeyValues, Location
from ckpt_core._tree import LEAF, Node, Path, array_name, format_path, stored_paths

_HEAD_BYTES = 32


@dataclass(frozen=True)
class SavedItem:
    """One item of an opened checkpoint.

    Attributes:
        name: of the item; empty for a flat directory of Orbax.
        form: ``tree``, ``process``, or ``json``.
        root, paths, specs, shardings: the tree and, per leaf, where and what it is.
        names: array names, per leaf; empty where they follow from the paths.
        chunks: chunk shapes, per leaf; empty where Orbax wrote it.
        codecs: name of the compression or None, per leaf; empty where Orbax wrote it.
        process_count: of the processes that wrote it.
        orbax: how Orbax stored it, for items that ckpt did not write.
        value: of a json item.
        directory: of the item, relative to the checkpoint.
    """

    name: str
    form: str
    root: Node = LEAF
    paths: Sequence[Path] = ()
    specs: Sequence[LeafSpec] = ()
    shardings: Sequence[dict[str, Any] | None] = ()
    names: Sequence[str] = ()
    chunks: Sequence[tuple[int, ...]] = ()
    codecs: Sequence[str | None] = ()
    process_count: int = 1
    orbax: orbax_trees.OrbaxTree | None = None
    value: Any = None
    directory: str = ""

    def file(self, name: str) -> str:
        """Path of one of the item's files, relative to the checkpoint."""
        return f"{self.directory}/{name}" if self.directory else name

    def name_of(self, leaf: int) -> str:
        """Name of a leaf's array."""
        return self.names[leaf] if self.names else array_name(self.paths[leaf])

    def most_keys(self) -> int:
        """How many keys its database can have: of every array its metadata and chunks."""
        pairs = zip(self.specs, self.chunks, strict=True)
        return sum(1 + chunk_count(whole(spec.stored_shape), chunk) for spec, chunk in pairs)

    @property
    def leaves(self) -> list[tuple[Path, LeafSpec]]:
        """Path and description of every leaf."""
        return list(zip(self.paths, self.specs, strict=True))


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose metadata has been read, and none of its arrays.

    Attributes:
        path: absolute.
        location: of it.
        form: how files are read.
        items: by name.
        single: whether ``load`` gives the tree itself.
        record: ours; None for Orbax's own directories.
        metadata, metrics: what the user saved.
        head: the record's first bytes, with its checksum: tells whether it is still the same one.
    """

    path: str
    location: Location
    form: Form
    items: dict[str, SavedItem]
    single: bool
    record: Record | None = None
    metadata: Any = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    head: bytes = b""

    def read_file(self, name: str, *, leaf: str | None = None) -> bytes:
        """A file's bytes, checked against the record where there is one.

        Raises:
            CheckpointCorrupt: it is missing, or not as it was saved.
        """
        expected = None if self.record is None else self.record.files.get(name)
        if self.record is not None and expected is None:
            raise CheckpointCorrupt(
                f"{self.path}: file {name} was never saved", file=name, leaf=leaf
            )
        limit = most_bytes(name)
        if expected is not None:
            limit = min(limit, expected.size_bytes)
        data = self.form.read(self.path, name, limit)
        if data is None:
            raise CheckpointCorrupt(f"{self.path}: file {name} is missing", file=name, leaf=leaf)
        if expected is not None and (
            expected.size_bytes != len(data) or expected.crc32 != zlib.crc32(data)
        ):
            raise CheckpointCorrupt(
                f"{self.path}: file {name} is damaged: its checksum differs from that of the save",
                file=name,
                leaf=leaf,
            )
        return data

    def sizes_in(self, item: SavedItem) -> dict[str, int]:
        """What the record says of the sizes of an item's files, by their paths in the item."""
        files = {} if self.record is None else self.record.files
        inside = item.file("")
        return {
            name.removeprefix(inside): entry.size_bytes
            for name, entry in files.items()
            if name.startswith(inside)
        }


@contextlib.contextmanager
def naming(opened: Opened, path: Path) -> Generator[None]:
    """Damage that is met inside is reported with the checkpoint and the leaf as people write it."""
    try:
        yield
    except CheckpointCorrupt as error:
        where = format_path(path)
        message = f"{opened.path}: leaf {where}: {error}"
        raise CheckpointCorrupt(message, file=error.file, leaf=where) from error


def form_of(local: bool) -> Any:
    """How directories work, for local paths and for URLs."""
    return LocalForm() if local else StoreForm(lambda url: KeyValues(Location(url, False)))


def open_checkpoint(path: str | os.PathLike[str]) -> Opened:
    """Reads what a checkpoint holds.

    Raises:
        CheckpointNotFound: there is none.
        CheckpointCorrupt: its metadata is damaged.
    """
    if os.getpid() != HOME_PID:
        raise forked()
    text, local = resolve(path)
    with naming_checkpoint(text):
        return _open(text, local, form_of(local))


@contextlib.contextmanager
def naming_checkpoint(path: str) -> Generator[None]:
    """Damage that is met inside is reported with the checkpoint that it was met in."""
    try:
        yield
    except CheckpointCorrupt as error:
        interrupt = raised_by_a_handler(error.__cause__)
        if interrupt is not None:
            raise interrupt from None
        if path in str(error):
            raise
        raise CheckpointCorrupt(f"{path}: {error}", file=error.file, leaf=error.leaf) from error


def _open(text: str, local: bool, form: Form) -> Opened:
    aside = form.replaced(text)
    if aside is not None:
        text = aside  # a replacement was cut short between its two renames: the old one counts
    record = form.read(text, RECORD_FILE)
    if record is not None:
        opened = _open_ours(text, local, form, load_record(record))
        return replace(opened, head=record[:_HEAD_BYTES])
    described = form.read(text, orbax.STEP_METADATA)
    step = _parse_step(described) if described else {}
    if MARKER in step.get("custom_metadata", {}):
        raise _no_record(text)
    tree = form.read(text, orbax.ITEM_METADATA)
    if tree is not None:
        return _open_flat(
            text, local, form, orbax_trees.load_item_metadata(tree, orbax.ITEM_METADATA)
        )
    return _open_orbax(text, local, form, step)


def _no_record(path: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"{path}: {RECORD_FILE} is missing, though the checkpoint says that it must be there: "
        "nothing in it can be checked. Restore the file, or load another checkpoint",
        file=RECORD_FILE,
    )


def _open_ours(path: str, local: bool, form: Form, record: Record) -> Opened:
    items: dict[str, SavedItem] = {}
    for name, item in record.items.items():
        stored = stored_paths(item.tree, item.paths)
        items[name] = SavedItem(
            name=name,
            form=item.form,
            root=item.tree,
            paths=item.paths,
            specs=item.specs,
            shardings=item.leaf_shardings,
            names=() if stored is item.paths else list(map(array_name, stored)),
            chunks=item.chunks,
            codecs=item.codecs,
            process_count=item.process_count,
            directory=orbax.folder_of(name),
        )
    return Opened(
        path,
        Location(path, local),
        form,
        items,
        record.single,
        record,
        record.metadata,
        record.metrics,
    )


def _parse_step(data: bytes) -> dict[str, Any]:
    value = parse_json(data, orbax.STEP_METADATA)
    if not isinstance(value, dict):
        raise CheckpointCorrupt(f"{orbax.STEP_METADATA}: not an object", file=orbax.STEP_METADATA)
    value["custom_metadata"] = value.get("custom_metadata") or {}
    return value


def _open_flat(path: str, local: bool, form: Form, tree: orbax_trees.OrbaxTree) -> Opened:
    """A directory that is itself an item: Orbax's flat form, or one item of ours."""
    if tree.required_record:
        parent, name = (
            os.path.split(path) if local else (path.rpartition("/")[0], path.rpartition("/")[2])
        )
        record = form.read(parent, RECORD_FILE)
        if record is None:
            raise _no_record(path)
        opened = _open_ours(parent, local, form, load_record(record))
        for item in opened.items.values():
            if name == item.directory:
                return replace(opened, items={item.name: item}, single=True)
        raise CheckpointCorrupt(
            f"{path}: the record of {parent} has no item {name!r}", file=RECORD_FILE
        )
    logger.info("%s: written by Orbax, without checksums: loading unchecked", path)
    item = _orbax_tree_item(path, form, "", "", tree)
    return Opened(path, Location(path, local), form, {"": item}, True)


def _orbax_tree_item(
    path: str, form: Form, name: str, directory: str, tree: orbax_trees.OrbaxTree
) -> SavedItem:
    """A tree item that Orbax wrote; dtypes and shapes are known only when arrays are opened."""
    prefix = f"{directory}/" if directory else ""
    shardings: dict[str, dict[str, Any]] = {}
    data = form.read(path, prefix + orbax.SHARDING_FILE)
    if data:
        shardings = orbax_trees.load_shardings(data, prefix + orbax.SHARDING_FILE)
    return SavedItem(
        name=name,
        form="tree",
        root=tree.root,
        paths=[leaf.path for leaf in tree.leaves],
        shardings=[shardings.get(leaf.name) for leaf in tree.leaves],
        names=[leaf.name for leaf in tree.leaves],
        orbax=tree,
        directory=directory,
    )


def _open_orbax(path: str, local: bool, form: Form, step: dict[str, Any]) -> Opened:
    """A step directory that Orbax wrote."""
    handlers = step.get("item_handlers")
    handlers = handlers if isinstance(handlers, dict) else {}
    items: dict[str, SavedItem] = {}
    metrics: dict[str, float] = {}
    for name in form.children(path):
        known = orbax_trees.handler_form(str(handlers.get(name, "")))
        item = _orbax_item(path, form, name, known)
        if item is None:
            continue
        if name == "metrics" and item.form == "json":
            metrics = item.value if isinstance(item.value, dict) else {}
        else:
            items[name] = item
    if not items:
        raise not_found(path, form)
    logger.info("%s: written by Orbax, without checksums: loading unchecked", path)
    single = len(items) == 1 and next(iter(items)) in ("default", "state")
    return Opened(
        path, Location(path, local), form, items, single, None, step.get("custom_metadata"), metrics
    )


def _orbax_item(path: str, form: Form, name: str, known: str) -> SavedItem | None:
    nested = {"jax_key": "jax_random_key", "numpy_key": "np_random_key"}.get(known)
    directory = f"{name}/{nested}" if nested else name
    data = form.read(path, f"{directory}/{orbax.ITEM_METADATA}")
    if data is not None:
        tree = orbax_trees.load_item_metadata(data, f"{directory}/{orbax.ITEM_METADATA}")
        if tree.required_record:
            raise _no_record(path)
        item = _orbax_tree_item(path, form, name, directory, tree)
        return replace(
            item,
            form={"array": "array", "jax_key": "jax_key", "numpy_key": "numpy_key"}.get(
                known, "tree"
            ),
        )
    if known in ("array", "jax_key"):
        return SavedItem(name, known, directory=directory)
    for file in ("metadata", "data.json", "metrics"):
        data = form.read(path, f"{name}/{file}")
        if data is not None:
            return SavedItem(name, "json", value=parse_json(data, f"{name}/{file}"), directory=name)
    if any(part.startswith("process_") for part in _files_in(form, path, name)):
        return SavedItem(name, "process", directory=name)
    return None


def _files_in(form: Form, path: str, name: str) -> list[str]:
    return [part.rpartition("/")[2] for part in form.files(f"{path}/{name}") if "/" not in part]


def format_version(opened: Opened) -> int | None:
    """Version of our format, or None for Orbax's."""
    return None if opened.record is None else FORMAT_VERSION
