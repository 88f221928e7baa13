"""A checkpoint whose metadata has been read: ours, with its record, or one that Orbax wrote."""

from __future__ import annotations

import contextlib
import zlib
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_core._directory import Backend
from ckpt_core._errors import CheckpointCorrupt, CheckpointNotFound
from ckpt_core._format.limits import most_bytes
from ckpt_core._format.orbax_read import OrbaxTree
from ckpt_core._format.record import RECORD_FILE, Record
from ckpt_core._layout.chunks import chunk_count
from ckpt_core._layout.regions import whole
from ckpt_core._storage import Location
from ckpt_core._tree import LEAF, Node, Path, array_name, format_path
from ckpt_core._tree.leaves import LeafSpec


@dataclass(frozen=True)
class SavedItem:
    """One item of a checkpoint.

    Attributes:
        name: of the item; empty for a flat directory of Orbax.
        form: ``tree`` or ``process``; of Orbax also ``json``, ``array``, ``jax_key`` and ``numpy_key``.
        root, paths, specs, shardings: the tree and, per leaf, where and what it is.
        names: array names, per leaf; empty where they follow from the paths.
        directory: of the item, relative to the checkpoint.
    """

    name: str
    form: str
    root: Node = LEAF
    paths: Sequence[Path] = ()
    specs: Sequence[LeafSpec] = ()
    shardings: Sequence[dict[str, Any] | None] = ()
    names: Sequence[str] = ()
    directory: str = ""

    def file(self, name: str) -> str:
        """Path of one of the item's files, relative to the checkpoint."""
        return f"{self.directory}/{name}" if self.directory else name

    def name_of(self, leaf: int) -> str:
        """Name of a leaf's array."""
        return self.names[leaf] if self.names else array_name(self.paths[leaf])

    @property
    def leaves(self) -> list[tuple[Path, LeafSpec]]:
        """Path and description of every leaf."""
        return list(zip(self.paths, self.specs, strict=True))


@dataclass(frozen=True)
class NativeItem(SavedItem):
    """An item that ckpt wrote; its record says all of it.

    Attributes:
        chunks: chunk shapes, per leaf.
        codecs: name of the compression or None, per leaf.
        process_count: of the processes that wrote it.
    """

    chunks: Sequence[tuple[int, ...]] = ()
    codecs: Sequence[str | None] = ()
    process_count: int = 1

    def most_keys(self) -> int:
        """How many keys its database can have: of every array its metadata and chunks."""
        alike = Counter(zip(self.specs, self.chunks, strict=True))
        return sum(
            count * (1 + chunk_count(whole(spec.stored_shape), chunk))
            for (spec, chunk), count in alike.items()
        )


@dataclass(frozen=True)
class OrbaxItem(SavedItem):
    """An item that Orbax wrote; what its leaves are is known when their arrays have been opened.

    Attributes:
        tree: how it is stored; None for what is no tree of arrays.
        value: of a json item.
    """

    tree: OrbaxTree | None = None
    value: Any = None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose metadata has been read, and none of its arrays.

    Attributes:
        path: absolute.
        location: of it.
        backend: how files are read.
        items: by name.
        single: whether ``load`` gives the tree itself.
        metadata, metrics: what the user saved.
    """

    path: str
    location: Location
    backend: Backend
    items: dict[str, SavedItem]
    single: bool
    metadata: Any = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])

    def read_file(self, name: str, *, leaf: str | None = None) -> bytes:
        """A file's bytes, checked where there is something to check them against.

        Raises:
            CheckpointCorrupt: it is missing, or not as it was saved.
        """
        return self._read(name, leaf, most_bytes(name))

    def _read(self, name: str, leaf: str | None, limit_bytes: int) -> bytes:
        data = self.backend.read(self.path, name, limit_bytes)
        if data is None:
            raise CheckpointCorrupt(f"{self.path}: file {name} is missing", file=name, leaf=leaf)
        return data

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Keeps the checkpoint from being deleted while the block runs.

        What Orbax wrote, no retention of ours deletes while it is in use.

        Raises:
            CheckpointNotFound: it was deleted after it was opened.
        """
        return contextlib.nullcontext()

    def was_replaced(self) -> bool:
        """Whether another checkpoint, or none, is at the path now: what was read is of two."""
        return False

    @property
    def attempt(self) -> str:
        """Names the save that it is from, on all processes that open it."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True)
class NativeCheckpoint(Checkpoint):
    """A checkpoint that ckpt wrote.

    Attributes:
        record: what it holds, with the checksum of every file.
        head: the record's first bytes, with its checksum: tells whether it is still the same one.
    """

    record: Record = field(kw_only=True)
    head: bytes = b""

    def read_file(self, name: str, *, leaf: str | None = None) -> bytes:
        """A file's bytes, checked against the record."""
        expected = self.record.files.get(name)
        if expected is None:
            raise CheckpointCorrupt(
                f"{self.path}: file {name} was never saved", file=name, leaf=leaf
            )
        data = self._read(name, leaf, min(most_bytes(name), expected.size_bytes))
        if expected.size_bytes != len(data) or expected.crc32 != zlib.crc32(data):
            raise CheckpointCorrupt(
                f"{self.path}: file {name} is damaged: its checksum differs from that of the save",
                file=name,
                leaf=leaf,
            )
        return data

    def sizes_in(self, item: SavedItem) -> dict[str, int]:
        """What the record says of the sizes of an item's files, by their paths in the item."""
        inside = item.file("")
        return {
            name.removeprefix(inside): entry.size_bytes
            for name, entry in self.record.files.items()
            if name.startswith(inside)
        }

    @contextlib.contextmanager
    def held(self) -> Generator[None]:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self.backend.reading(self.path, self.head))
            except FileNotFoundError:
                raise replaced(self.path) from None
            yield

    @property
    def attempt(self) -> str:
        return self.record.token

    def was_replaced(self) -> bool:
        try:
            record = self.backend.read(self.path, RECORD_FILE)
        except (OSError, CheckpointCorrupt):
            return False  # what is there is damaged
        return record is None or not record.startswith(self.head)


def replaced(path: str) -> CheckpointNotFound:
    """The error for a checkpoint that went away while it was being read."""
    return CheckpointNotFound(
        f"{path} was deleted or replaced just now, by retention or another writer"
    )


@contextlib.contextmanager
def naming(checkpoint: Checkpoint, path: Path) -> Generator[None]:
    """Damage that is met inside is reported with the checkpoint and the leaf as people write it."""
    try:
        yield
    except CheckpointCorrupt as error:
        where = format_path(path)
        message = f"{checkpoint.path}: leaf {where}: {error}"
        raise CheckpointCorrupt(message, file=error.file, leaf=where) from error
