"""A checkpoint whose metadata has been read: written by ckpt, with a record, or by Orbax."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_core._directory import Backend
from ckpt_core._errors import CheckpointCorrupt, CheckpointNotFound, Mismatch
from ckpt_core._format.orbax_files import STRINGS_FILE, OrbaxTree, read_string
from ckpt_core._format.recipes import Recipe
from ckpt_core._format.record import RECORD_FILE, Record
from ckpt_core._format.rules import Rule
from ckpt_core._format.untrusted import most_bytes, parse_json
from ckpt_core._layout.chunks import chunk_count
from ckpt_core._layout.regions import whole
from ckpt_core._storage import ForeignArray, Location, StoreContext, new_context
from ckpt_core._tree import LEAF, Node, Path, array_name, format_path
from ckpt_core._tree.leaves import LeafSpec


@dataclass(frozen=True)
class SavedItem:
    """One item of a checkpoint."""

    name: str  # empty if Orbax wrote the pytree directly into the checkpoint's directory
    # ``tree``, ``process``, ``files`` or ``json``; of Orbax also ``array``, ``jax_key`` or ``numpy_key``.
    form: str
    root: Node = LEAF
    paths: Sequence[Path] = ()
    specs: Sequence[LeafSpec] = ()
    shardings: Sequence[dict[str, Any] | None] = ()  # as read from JSON
    names: Sequence[str] = ()  # of the arrays; empty if ``array_name(path)`` gives all of them
    directory: str = ""  # relative to the checkpoint
    shared: Sequence[Sequence[int]] = ()  # positions of leaves that were one object
    # Of the run that saved it; 0 if unknown. More than wrote it, if each wrote a checkpoint of its own.
    run_processes: int = 0
    # If they are in memory: each leaf's text or array, whole and as it is stored, which loads copy.
    in_memory: Mapping[int, Any] = field(default_factory=dict[int, Any], kw_only=True)

    def file(self, name: str) -> str:
        """Path of one of the item's files, relative to the checkpoint."""
        return f"{self.directory}/{name}" if self.directory else name

    def differs(self, path: Path | str, kind: str, saved: object, wanted: object) -> Mismatch:
        """The mismatch of a leaf, or what has this name, with what is wanted there."""
        where = path if isinstance(path, str) else format_path(path)
        texts = (None if one is None else str(one) for one in (saved, wanted))
        return Mismatch(where, kind, *texts, item=self.name or None)

    def name_of(self, leaf: int) -> str:
        """Name of a leaf's array."""
        return self.names_of((leaf,))[0]

    def names_of(self, leaves: Iterable[int]) -> list[str]:
        """Names of the arrays of some leaves."""
        if self.names:
            return [self.names[leaf] for leaf in leaves]
        return [array_name(self.paths[leaf]) for leaf in leaves]


@dataclass(frozen=True)
class NativeItem(SavedItem):
    """An item that ckpt wrote; all of this comes from the record."""

    chunks: Sequence[tuple[int, ...]] = ()  # shape of each leaf's
    codecs: Sequence[str | None] = ()  # None: not compressed
    process_count: int = 1  # that wrote the item
    notes: Sequence[str] = ()  # of the form ``files``: names of files that are not the user's

    def most_keys(self) -> int:
        """Upper limit of the keys in its database: one for each array's metadata and each chunk."""
        alike = Counter(zip(self.specs, self.chunks, strict=True))
        return sum(
            count * (1 + chunk_count(whole(spec.stored_shape), chunk))
            for (spec, chunk), count in alike.items()
        )


@dataclass(frozen=True)
class OrbaxItem(SavedItem):
    """An item that Orbax wrote; ``specs`` and ``arrays`` are empty until its arrays have been opened."""

    tree: OrbaxTree | None = None  # how the pytree is stored; None if the item is none
    arrays: Mapping[str, ForeignArray] = field(default_factory=dict[str, ForeignArray])
    value: Any = None  # of a ``json`` item


@dataclass(frozen=True)
class ExtentItem(SavedItem):
    """A flat dictionary of arrays that each lie in C order at one place of a file, as in safetensors."""

    files: Sequence[str] = ()  # of each leaf, relative to the checkpoint's location
    offsets: Sequence[int] = ()  # of each leaf's first byte in its file
    sizes_bytes: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True)
class DerivedItem(SavedItem):
    """What rules or an index make of the arrays of an item; its leaves are those that are wanted."""

    base: SavedItem = field(kw_only=True)  # as it is stored
    recipes: Sequence[Recipe] = ()
    rules: frozenset[Rule] = frozenset()  # that fit a name

    def as_stored(self, leaf: int) -> int | None:
        """Position in ``base`` of a leaf that is stored as it is; None for any other."""
        recipe, first = self.recipes[leaf], self.recipes[leaf].first
        return first if recipe.is_all_of(self.base.specs[first].stored_shape) else None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with its metadata read, and none of its arrays."""

    path: str  # absolute, or a URL
    location: Location  # the path, for TensorStore
    backend: Backend
    items: dict[str, SavedItem]
    single: bool  # one state was saved: ``load`` then returns it, not a dict of items
    metadata: Any = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    shared: Sequence[Sequence[tuple[str, int]]] = ()  # as in ``Record``

    @functools.cached_property
    def context(self) -> StoreContext:
        """That of all its arrays, for TensorStore: another load opens the checkpoint anew."""
        return new_context()

    def texts(self, item: SavedItem) -> Callable[[int], str]:
        """A function from a leaf's position to its text; its first call reads the item's text file."""
        if item.in_memory:
            return item.in_memory.__getitem__
        name = item.file(STRINGS_FILE)
        document: list[Any] = []

        def text(leaf: int) -> str:
            if not document:
                where = format_path(item.paths[leaf])
                document.append(parse_json(self.read_file(name, leaf=where), name))
            return read_string(document[0], item.name_of(leaf))

        return text

    def read_file(self, name: str, *, leaf: str | None = None) -> bytes:
        """The bytes of a file, by its path in the checkpoint; ``leaf`` is for messages. CheckpointCorrupt if it is missing."""
        data = self.backend.read(self.path, name, most_bytes(name))
        if data is None:
            raise self.corrupt(name, "is missing", leaf)
        return data

    def corrupt(self, name: str, what: str, leaf: str | None = None) -> CheckpointCorrupt:
        """The error for a file of the checkpoint."""
        return CheckpointCorrupt(f"{self.path}: file {name} {what}", file=name, leaf=leaf)

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Keeps the checkpoint from deletion while the block runs; one of Orbax has no file to lock. CheckpointNotFound if it is gone."""
        return contextlib.nullcontext()

    def was_replaced(self) -> bool:
        """Whether the path now holds another checkpoint or none: bytes of two may be mixed."""
        return False

    @property
    def save_token(self) -> str:
        """Identifies the save that wrote it; equal on all processes that opened this checkpoint."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True)
class NativeCheckpoint(Checkpoint):
    """A checkpoint that ckpt wrote."""

    record: Record = field(kw_only=True)  # content of ckpt.json
    # First bytes of ckpt.json, with its checksum: unchanged while the path holds the checkpoint that was opened.
    head: bytes = b""

    def read_file(self, name: str, *, leaf: str | None = None) -> bytes:
        """A file's bytes, verified against size and CRC32 in the record."""
        expected = self.record.files.get(name)
        if expected is None:
            raise self.corrupt(name, "was never saved", leaf)
        limit = most_bytes(name)
        if limit < expected.size_bytes:  # a user's file may have any size
            limit = self.record.most_bytes(name)
        data = self.read_unverified(name, min(limit, expected.size_bytes))
        if data is None:
            raise self.corrupt(name, "is missing", leaf)
        if expected.size_bytes != len(data) or expected.crc32 != zlib.crc32(data):
            what = "is damaged: its checksum differs from that of the save"
            raise self.corrupt(name, what, leaf)
        return data

    def read_unverified(self, name: str, limit_bytes: int | None) -> bytes | None:
        """A file's bytes; None if there is no such file."""
        if not self.record.packed:
            return self.backend.read(self.path, name, limit_bytes)
        if name in self.record.small_files:
            return self.record.small_files[name]
        data = self.backend.read(self.path, self.record.where(name), limit_bytes)
        if data is None:  # a tool copied no hidden names
            data = self.backend.read(self.path, name, limit_bytes)
        return data

    def sizes_in(self, item: SavedItem) -> dict[str, int]:
        """Size in bytes of each file of the item, from the record, by path relative to the item."""
        inside = f"{item.directory}/"
        return {
            name.removeprefix(inside): entry.size_bytes
            for name, entry in self.record.files.items()
            if name.startswith(inside)
        }

    @contextlib.contextmanager
    def reading(self) -> Generator[None]:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self.backend.reading(self.path, self.head))
            except FileNotFoundError:
                raise replaced(self.path) from None
            yield

    @property
    def save_token(self) -> str:
        return self.record.token

    def was_replaced(self) -> bool:
        try:
            record = self.backend.read(self.path, RECORD_FILE)
        except (OSError, CheckpointCorrupt):
            return False  # unreadable: the damage is reported, not a replacement
        return record is None or not record.startswith(self.head)


MOST_TRIES = 1000
"""How often a checkpoint is opened anew, if another one has taken its place each time: the old or the new is read."""


class Replaced(CheckpointNotFound):
    """The checkpoint was deleted or replaced while it was being read: the path may hold another one."""


def replaced(path: str) -> Replaced:
    """The error for a checkpoint that was deleted or replaced while it was being read."""
    return Replaced(f"{path} was deleted or replaced just now, by retention or another writer")


@contextlib.contextmanager
def naming(checkpoint: Checkpoint, path: Path) -> Generator[None]:
    """Adds checkpoint and leaf path to the message of a CheckpointCorrupt that the block raises."""
    try:
        yield
    except CheckpointCorrupt as error:
        where = format_path(path)
        message = f"{checkpoint.path}: leaf {where}: {error}"
        raise CheckpointCorrupt(message, file=error.file, leaf=where) from error


def with_path(error: BaseException, path: str) -> BaseException:
    """The error; for a CheckpointCorrupt that does not name the checkpoint's path, one that does."""
    if not isinstance(error, CheckpointCorrupt) or path in str(error):
        return error
    return CheckpointCorrupt(f"{path}: {error}", file=error.file, leaf=error.leaf)
