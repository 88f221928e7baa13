"""``ckpt.json``, the record of a checkpoint, as in docs/format.md: written last, and verified before its content is used. The
structure of a tree is a flat list of nodes, so a deep tree does not nest the JSON.
"""

from __future__ import annotations

import base64
import functools
import json
import math
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import crc32c

from ckpt_core._errors import CheckpointCorrupt, CheckpointError, NewerFormat
from ckpt_core._format.packed import MOST_PACKED_BYTES, apart, unpack
from ckpt_core._format.part import Part
from ckpt_core._format.treedef import TreeBounds, dump_tree, load_nodes
from ckpt_core._format.untrusted import (
    LFS_POINTER,
    MOST_BYTES,
    SHORT_BYTES,
    file_name,
    file_size,
    item_name,
    most_bytes,
    parse_json as parse_json,
    refuse_heavy,
    refuse_too_long,
    token_name,
)
from ckpt_core._options import MIB, codec_parts
from ckpt_core._tree import LEAF, Node, Path
from ckpt_core._tree.leaves import CHANGEABLE_KINDS, KINDS, LeafSpec, dtype_from_name, leaf_spec

RECORD_FILE = "ckpt.json"
FORMAT_VERSION = 2
"""In version 1 the leaves of an item were no positions in ``leaf_types``, but such descriptions themselves; and constants were
not among its ``statics``."""
MARKER = "ckpt"
"""Key in Orbax's custom_metadata; if present, a directory without ckpt.json is damaged."""

FOLDERS = {"metrics": "metrics.tree"}
"""Item -> folder, for item names that Orbax reserves for folders of its own."""
RESERVED_FOLDERS = frozenset(FOLDERS.values())

_PREFIX = b'{"crc32c":"%08x","record":'
_MAX_PROCESSES = 2**24
_MOST_NAMES_BYTES = 16 * MIB
_LARGE_BYTES = 64 * MIB
"""The metadata files of trees within all limits: if any has more, the record is read back before it counts."""
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
"""Exceptions that the parsing code raises for a record which ckpt did not write. No memory and no stack are no
such: what they interrupted may be sound."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and CRC-32 of one file: all OCDBT files of one length have the same CRC-32C, since they end in their own."""

    size_bytes: int
    crc32: int  # of a data file only of bytes outside of checksummed blocks
    data: bool = False  # a data file of the array database

    @staticmethod
    def of(data: bytes) -> FileRecord:
        """The record of a file with this content."""
        return FileRecord(len(data), zlib.crc32(data))


@dataclass(frozen=True)
class ItemRecord:
    """One item of a checkpoint."""

    form: str  # ``tree`` (arrays); without arrays: ``process`` (one state per process), ``files`` or ``json``
    tree: Node = LEAF  # LEAF for a bare value
    paths: tuple[Path, ...] = ()  # one per leaf, in the order of the structure; leaves too
    leaves: tuple[LeafRecord, ...] = ()
    shardings: tuple[dict[str, Any], ...] = ()  # the distinct ones, as JSON in Orbax's form
    process_count: int = 1  # that wrote the item
    notes: tuple[str, ...] = ()  # of ``files``: files that are for Orbax, not the user's
    shared: tuple[tuple[int, ...], ...] = ()  # positions of leaves that were one object

    @functools.cached_property
    def json(self) -> bytes:
        """The item's JSON in ckpt.json; cached, since saves of equal trees share the object."""
        return dump_json(_dump_item(self))


@dataclass(frozen=True)
class Record:
    """The content of ckpt.json. ``packed`` are small files as ``pack`` gives them: in an object store those that
    process 0 wrote, in a part the pipeline states of other processes. ``shared`` are objects that stand in several
    items and that programs change in place: for each, all places of it, as item and position of the leaf.
    """

    items: dict[str, ItemRecord]
    files: dict[str, FileRecord]  # every other file of the checkpoint, by relative path
    token: str  # identifies the save that wrote the checkpoint
    single: bool = False  # a bare tree was saved: ``load`` returns it, not a dict of items
    format_version: int = FORMAT_VERSION  # from which it was read
    metadata: Any = None  # the user's JSON
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    versions: dict[str, str] = field(default_factory=dict[str, str])  # of the libraries
    topology: dict[str, Any] = field(default_factory=dict[str, Any])  # processes, devices, platform
    settings: dict[str, Any] = field(default_factory=dict[str, Any])  # of jax: ``JAX_SETTINGS``
    created_unix_secs: float = 0.0  # time of the commit
    durations: dict[str, float] = field(default_factory=dict[str, float])  # phase -> seconds
    packed: bytes = b""
    part: Part | None = None  # in a local directory of one of several processes
    parent: tuple[int, str] | None = None  # step and token that the state continues from
    shared: tuple[tuple[tuple[str, int], ...], ...] = ()

    @functools.cached_property
    def small_files(self) -> dict[str, bytes]:
        """Name -> content of the small files in the record itself; raises CheckpointCorrupt."""
        if not self.packed:
            return {}
        try:
            found = unpack(self.packed, MOST_PACKED_BYTES + _MOST_NAMES_BYTES)
            listed = {name: file.size_bytes for name, file in self.files.items()}
            wrong = [name for name, data in found.items() if listed.get(name) != len(data)]
            if wrong:
                raise ValueError(f"{sorted(wrong)[:3]} are not among its files, or of another size")
            return found
        except _MALFORMED as error:
            raise _bad(f"the small files in it do not fit: {error}") from error

    def where(self, name: str) -> str:
        """Where a file is that does not stand in the record: a path relative to the checkpoint."""
        is_data = "/d/" in name and not self.is_users(name)
        in_store = self.packed and self.part is None
        return apart(self.token, name) if in_store and not is_data else name

    @property
    def beside(self) -> list[str]:
        """Names of the files that do not stand in the record, in order."""
        return sorted(name for name in self.files if name not in self.small_files)

    def most_bytes(self, name: str) -> int:
        """The maximum size of a file of the checkpoint; files of the user may have any."""
        return MOST_BYTES if self.is_users(name) else most_bytes(name)

    def is_users(self, name: str) -> bool:
        """Whether a file is in an item of the form ``files``, where names mean nothing."""
        return name.partition("/")[0] in self._folders_of_files

    @functools.cached_property
    def _folders_of_files(self) -> frozenset[str]:
        return frozenset(
            folder_of(name) for name, item in self.items.items() if item.form == "files"
        )


def folder_of(item: str) -> str:
    """The folder of an item: its name, unless Orbax reserves a folder of that name."""
    return FOLDERS.get(item, item)


def dump_record(record: Record) -> bytes:
    """The bytes of ckpt.json; raises CheckpointError if it or another file is too large to be read back."""
    described = ("token", "single", "created_unix_secs", "durations", "versions", "topology")
    body: dict[str, Any] = {"format_version": FORMAT_VERSION}
    body |= {name: getattr(record, name) for name in (*described, "metadata", "metrics")}
    body["files"] = {
        name: [entry.size_bytes, entry.crc32, int(entry.data)]
        for name, entry in sorted(record.files.items())
    }
    optional = {
        "settings": record.settings,
        "part": record.part and record.part.dump(),
        "parent": record.parent,
        "shared": record.shared,
        "small_files": base64.b64encode(record.packed).decode(),
    }
    body |= {name: value for name, value in optional.items() if value}
    items = b",".join(dump_json(name) + b":" + item.json for name, item in record.items.items())
    data = dump_json(body)[:-1] + b',"items":{' + items + b"}}"
    sizes = {name: file.size_bytes for name, file in record.files.items() if not file.data}
    sizes[RECORD_FILE] = len(data)
    written = _PREFIX % crc32c.crc32c(data) + data + b"}\n"
    if (largest := max(sizes.values())) > SHORT_BYTES:
        refuse_too_long({name: size for name, size in sizes.items() if not record.is_users(name)})
        try:
            refuse_heavy(data, RECORD_FILE)
            if largest > _LARGE_BYTES:
                load_record(written)
        except CheckpointCorrupt as error:
            raise CheckpointError(
                f"ckpt would not read this back: {error}. Save the leaves in several checkpoints"
            ) from error
    return written


def dump_json(value: Any) -> bytes:
    """Compact JSON in UTF-8; NaN and infinities as in Python's json, which reads them back."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return text.encode(errors="surrogatepass")


def _dump_item(item: ItemRecord) -> dict[str, Any]:
    nodes, statics = dump_tree(item.tree)
    types = {id(leaf): leaf for leaf in item.leaves}  # leaves that are alike share one object
    position = {which: n for n, which in enumerate(types)}
    return {
        "form": item.form,
        "process_count": item.process_count,
        "nodes": nodes,
        "leaf_types": [
            [spec.kind, spec.dtype, spec.shape, chunk, spec.detail, sharding, codec]
            for spec, chunk, sharding, codec in types.values()
        ],
        "leaves": [position[id(leaf)] for leaf in item.leaves],
        "shardings": item.shardings,
        # since 0.2
        **({"notes": item.notes} if item.notes else {}),
        **({"statics": statics} if statics else {}),
        **({"shared": item.shared} if item.shared else {}),
    }


def load_record(data: bytes) -> Record:
    """The record in the bytes of ckpt.json; raises NewerFormat if a later ckpt wrote them, CheckpointCorrupt if none did."""
    if data.startswith(LFS_POINTER):
        raise CheckpointError(
            f"{RECORD_FILE} is a pointer of git-lfs: fetch the files with `git lfs pull`"
        )
    head = len(_PREFIX % 0)
    body = data[head:-2]
    if len(data) < head + 4 or data[-2:] != b"}\n" or data[:head] != _PREFIX % crc32c.crc32c(body):
        raise _bad("its own checksum does not match: it is damaged or incomplete")
    try:
        value = parse_json(body, RECORD_FILE)
        version = value["format_version"]
        unknown = f"format version {version!r} is not known to this version of ckpt (which reads 1 to {FORMAT_VERSION})"
        if type(version) is int and version > FORMAT_VERSION:
            raise NewerFormat(f"{RECORD_FILE}: {unknown}: upgrade ckpt to load it")
        if type(version) is not int or version < 1:
            raise _bad(unknown)
        if not value["items"]:
            raise ValueError("it names no item")
        bounds = TreeBounds()
        items = {
            item_name(name): _load_item(item, version, bounds)
            for name, item in value["items"].items()
        }
        parent, shared = value.get("parent"), value.get("shared")  # since 0.2
        leaves = {name: item.leaves for name, item in items.items()}
        return Record(
            items=items,
            files={
                file_name(name): FileRecord(file_size(size), int(crc), bool(is_data))
                for name, (size, crc, is_data) in value["files"].items()
            },
            token=token_name(value["token"]),
            single=bool(value["single"]),
            format_version=version,
            metadata=value["metadata"],
            metrics=dict(value["metrics"]),
            versions=dict(value["versions"]),
            topology=dict(value["topology"]),
            settings=dict(value.get("settings", {})),  # since 0.2
            created_unix_secs=float(value["created_unix_secs"]),
            durations=dict(value.get("durations", {})),  # since 0.1
            packed=base64.b64decode(value.get("small_files", ""), validate=True),  # since 0.2
            part=Part.load(value["part"]) if "part" in value else None,  # since 0.2
            parent=(int(parent[0]), str(parent[1])) if parent else None,
            shared=_checked_shared(shared, leaves) if shared else (),
        )
    except (CheckpointCorrupt, NewerFormat):
        raise
    except _MALFORMED as error:
        raise _bad(f"its fields do not fit: {type(error).__name__}: {error}") from error


def _bad(what: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"{RECORD_FILE}: {what}", file=RECORD_FILE)


def _load_item(value: dict[str, Any], version: int, bounds: TreeBounds) -> ItemRecord:
    positions = value["leaves"]
    bounds.take(leaves=len(positions))
    statics = [*value.get("statics", ())]  # since 0.2
    constants = value.get("constants", ())  # of version 1
    statics += [(at, {"constants": values}) for at, values in constants]
    root, paths = load_nodes(value["nodes"], len(positions), bounds, statics)
    shardings = tuple(value["shardings"])
    described = positions if version == 1 else value["leaf_types"]
    codec = value.get("codec")  # in version 1 that of all leaves without their own
    types = tuple(_load_leaf(leaf, len(shardings), codec) for leaf in described)
    leaves = types
    if version > 1:
        are_whole = _NUMBERS.issuperset(map(type, positions))
        if not are_whole or (positions and not 0 <= min(positions) <= max(positions) < len(types)):
            raise ValueError("a leaf of a type that is not there")
        leaves = tuple([types[n] for n in positions])
    if value["form"] not in ("tree", "process", "files", "json"):
        raise ValueError(f"unknown form of an item {value['form']!r}")
    count = value["process_count"]
    if type(count) is not int or not 1 <= count <= _MAX_PROCESSES:
        raise ValueError(f"impossible number of processes {count!r}")
    shared = [[("", at) for at in group] for group in value.get("shared", ())]
    shared = _checked_shared(shared, {"": leaves}) if shared else ()
    return ItemRecord(
        form=value["form"],
        tree=root,
        paths=tuple(paths),
        leaves=leaves,
        shardings=shardings,
        process_count=count,
        notes=tuple(map(file_name, value.get("notes", ()))),
        shared=tuple(tuple(at for _, at in group) for group in shared),
    )


_MAX_DIMENSIONS = 64
_NUMBERS = frozenset({int})


class LeafRecord(NamedTuple):
    """One leaf: its type, chunk shape, sharding and compression."""

    spec: LeafSpec
    chunk: tuple[int, ...] = ()  # empty for text and scalars
    sharding: int | None = None  # index into ``ItemRecord.shardings``
    codec: str | None = None  # name of its compression


def _load_leaf(value: list[Any], shardings: int, common: Any) -> LeafRecord:
    """A type of leaves of an item with so many shardings; ``common`` is the codec of one without. Raises for any other value."""
    kind, dtype, shape, chunk, detail, sharding, codec = (*value, common)[:7]
    shape, chunk = tuple(shape), tuple(chunk)
    for name, sizes in (("shape", shape), ("chunk shape", chunk)):
        # Before anything hashes them: tuples of any numbers can be made that all have one hash.
        if (
            len(sizes) > _MAX_DIMENSIONS
            or not _NUMBERS.issuperset(map(type, sizes))
            or min(sizes, default=0) < 0
            or math.prod(filter(None, sizes)) >= MOST_BYTES
        ):
            raise ValueError(f"impossible {name} {sizes!r}")
    if sharding is not None and (type(sharding) is not int or not 0 <= sharding < shardings):
        raise ValueError("a leaf refers to a sharding that is not there")
    if type(dtype) is not str:
        raise ValueError(f"dtype {dtype!r} is not one that a checkpoint holds")
    if type(kind) is not str or type(detail) is not str:
        raise ValueError(f"impossible kind of a leaf {str([kind, detail])[:80]}")
    return _checked_leaf((kind, dtype, shape, chunk, detail, sharding, codec))


@functools.lru_cache(4096)
def _checked_leaf(described: tuple[Any, ...]) -> LeafRecord:
    """A validated leaf; cached, so equal leaves share one object."""
    kind, dtype, shape, chunk, detail, sharding, codec = described
    if kind not in KINDS:
        raise ValueError(f"unknown kind of leaf {kind!r}")
    if dtype and kind != "key":
        dtype_from_name(dtype)
    spec = leaf_spec(kind, dtype, shape, detail)
    if spec.stored_bytes >= MOST_BYTES:
        raise ValueError(f"impossible shape {shape!r}")
    stored = spec.stored_shape if spec.stored_dtype else ()
    if len(chunk) != len(stored) or any(
        not 1 <= step <= max(1, size) for step, size in zip(chunk, stored, strict=True)
    ):
        raise ValueError(f"impossible chunk shape {chunk!r} for shape {shape!r}")
    if codec is not None:
        codec_parts(codec)  # raises for unknown codecs
    return LeafRecord(spec, chunk, sharding, codec)


def _checked_shared(
    value: Any, leaves: Mapping[str, Sequence[LeafRecord]]
) -> tuple[tuple[tuple[str, int], ...], ...]:
    """The groups of leaves that were one object, as item and position; ValueError or TypeError if ckpt did not write them."""
    groups = tuple(tuple((item, position) for item, position in group) for group in value)
    places = [place for group in groups for place in group]
    if any(item not in leaves for item, _ in places):
        raise ValueError("a shared leaf of an item that is not there")
    if any(type(n) is not int or not 0 <= n < len(leaves[item]) for item, n in places):
        raise ValueError("a shared leaf that is not there")
    if len(set(places)) < len(places) or any(len(group) < 2 for group in groups):
        raise ValueError("leaves are shared twice, or with none")
    for group in groups:
        specs = {leaves[item][position].spec for item, position in group}
        if len(specs) > 1 or specs.pop().kind not in CHANGEABLE_KINDS:
            raise ValueError("leaves of several kinds cannot be one object")
    return groups


def library_versions() -> dict[str, str]:
    """Versions of Python, ckpt and its dependencies, and of the imported frameworks."""
    names = ("jax", "numpy", "tensorstore", "flax", "optax", "keras", "torch", "torchax", "grain")
    found = {"python": ".".join(map(str, sys.version_info[:3])), "ckpt-core": _version("ckpt-core")}
    return found | {name: _version(name) for name in names if name in sys.modules}


@functools.cache
def _version(distribution: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"
