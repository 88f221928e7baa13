"""Opens what is imported: which format a file or folder has, by what is in it, and its items."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import zipfile
from collections.abc import Generator, Iterator, Sequence
from typing import IO, Any

import numpy as np

from ckpt_core._directory import kind_at
from ckpt_core._errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    UnsupportedLeaf,
)
from ckpt_core._format.safetensors import INDEX_SUFFIX, SUFFIX
from ckpt_core._items import Json
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
from ckpt_core._tree import FlatTree, flatten
from ckpt_core._tree.leaves import TEXT_KINDS, LeafSpec, leaf_spec, to_host_array
from ckpt_core._words import in_order
from ckpt_core.convert import _torch
from ckpt_core.convert._source import Array, Slot, array_spec, each, library, parsing, with_slots


def _flax(path: str, _: contextlib.ExitStack) -> tuple[Any, Any]:
    """What ``flax.serialization.to_bytes`` or ``msgpack_serialize`` wrote into a file."""
    flax: Any = library("flax.serialization", path)
    with open(path, "rb") as stream, parsing(path):
        tree = flax.msgpack_restore(stream.read())
    return with_slots(tree, _slot, f"{path}: "), None


def _slot(value: Any, where: str) -> Slot | None:
    if not isinstance(value, np.ndarray | np.generic):
        return None
    return Slot(array_spec(value.dtype.name, value.shape, where), _read, value)


@each
def _read(slot: Slot) -> Array:
    return to_host_array(np.asarray(slot.place), slot.spec)


_ARRAY = ".npy"


def _npz(path: str, stack: contextlib.ExitStack) -> tuple[Any, Any]:
    """The arrays that ``numpy.savez`` wrote, by name; reading one checks the archive's checksum."""
    # numpy leaves a file open that it has opened itself and cannot read
    stream = stack.enter_context(open(path, "rb"))  # noqa: SIM115
    tree: dict[str, Slot] = {}
    with parsing(path):
        archive: Any = stack.enter_context(np.load(stream, allow_pickle=False))
        for member in archive.zip.namelist():
            where = f"{path}: {member}"
            if not member.endswith(_ARRAY):
                raise UnsupportedLeaf(f"{where} is no array: leave it out of the file", leaf=where)
            with archive.zip.open(member) as head:
                place = archive, member, path
                tree[member.removesuffix(_ARRAY)] = Slot(_header(head, where), _read_member, place)
    return tree, None


def _header(stream: IO[bytes], where: str) -> LeafSpec:
    """What the header of an array says."""
    form: Any = np.lib.format
    version = form.read_magic(stream)
    read = form.read_array_header_1_0 if version == (1, 0) else form.read_array_header_2_0
    shape, _, dtype = read(stream)
    if dtype.hasobject:
        raise UnsupportedLeaf(
            f"{where}: it holds Python objects, and to make them would run code that the file names: save "
            "arrays of numbers only",
            leaf=where,
            type_name="object",
        )
    if dtype.kind == "V" and dtype.names is None:
        raise UnsupportedLeaf(
            f"{where}: numpy wrote {dtype.itemsize} bytes for each element and no name of their dtype, as it does for "
            "bfloat16 and 8-bit floats: write the file anew as safetensors, or as arrays of float32",
            leaf=where,
            type_name=str(dtype),
        )
    return array_spec(dtype.name, shape, where, numpy=True)


@each
def _read_member(slot: Slot) -> Array:
    archive, member, path = slot.place
    with parsing(path, f"{path}: {member}"):
        return np.asarray(archive[member], slot.spec.numpy_dtype, order="C")


_WEIGHTS = "model.weights.h5"
_SHARDS = ".weights.json"
_HDF5 = b"\x89HDF\r\n\x1a\n"


def _keras(path: str, stack: contextlib.ExitStack) -> tuple[Any, Any]:
    """The variables of a model, in the groups in which Keras stored them; its own files and its configuration stay behind."""
    h5py = library("h5py", path)
    metadata, files = None, {path: path}
    if path.endswith(_SHARDS):
        files = {file: file for file in _shards(path)}
    elif zipfile.is_zipfile(path):
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ckpt-keras-"))
        with parsing(path), zipfile.ZipFile(path) as archive:
            if "metadata.json" in archive.namelist():
                metadata = json.loads(archive.read("metadata.json"))
            files = {archive.extract(_WEIGHTS, folder): path}
    tree: dict[str, Any] = {}
    for file, where in files.items():
        with open(file, "rb") as stream:
            if stream.read(len(_HDF5)) != _HDF5:
                raise CheckpointCorrupt(f"{where}: damaged, or no HDF5", file=where)
        with parsing(where):
            _add(tree, stack.enter_context(h5py.File(file, "r")), where, "")
    return tree, metadata


def _shards(path: str) -> list[str]:
    """The files that an index of ``save_weights(..., max_shard_size=)`` names; each must lie beside it."""
    with parsing(path, f"{path}, an index of Keras"):
        with open(path, encoding="utf-8") as stream:
            places = json.load(stream)["weight_map"].values()
        named = [name for one in places for name in (one if isinstance(one, list) else [one])]
        if any(os.path.basename(name) != name for name in named):
            raise ValueError("it names files elsewhere")
    found = [os.path.join(os.path.dirname(path), name) for name in dict.fromkeys(named)]
    missing = next((one for one in found if not kind_at(one)), None)
    if missing is not None:
        raise CheckpointCorrupt(f"{path}: {os.path.basename(missing)} is missing", file=missing)
    return found


def _add(tree: dict[str, Any], group: Any, file: str, path: str) -> None:
    """Adds the datasets below a group to a tree; links to other files or groups are refused."""
    h5py = library("h5py", file)
    for name in sorted(group, key=in_order):
        inside = f"{path}{name}"
        at = f"{file}: {inside}"
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise UnsupportedLeaf(
                f"{at} is a link to elsewhere, which is not followed", leaf=inside, type_name="link"
            )
        found = group[name]
        if not isinstance(found, h5py.Group):
            if name in tree:
                raise CheckpointCorrupt(f"{at} is in two files", file=file)
            tree[name] = _dataset(found, at)
        else:
            below = tree.get(name, {})
            _add(below, found, file, f"{inside}/")
            if below:  # a group without weights, such as that of dropout, is nothing
                tree[name] = below


def _dataset(dataset: Any, where: str) -> Slot:
    shape = getattr(dataset, "shape", None)  # a type has none, and an empty dataset None
    if shape is None or dataset.external or dataset.is_virtual:
        text = "a type, empty, or its values are in another file, which is not followed"
        kind = "external" if shape is not None else type(dataset).__name__
        raise UnsupportedLeaf(
            f"{where} is no array of this file: {text}", leaf=where, type_name=kind
        )
    dtype = dataset.dtype
    is_bfloat16 = str(dataset.attrs.get("dtype")) == "bfloat16" and dtype == np.dtype("V2")
    if dtype.kind in "OSUV" and not is_bfloat16:
        text = f"{where} holds {dtype}: a checkpoint holds numbers; leave it out with only="
        refused = UnsupportedLeaf(text, leaf=where, type_name=str(dtype))
        return Slot(leaf_spec("numpy", "uint8", ()), _read_dataset, refused=refused)
    name = "bfloat16" if is_bfloat16 else dtype.name
    return Slot(array_spec(name, shape, where), _read_dataset, (dataset, where))


@each
def _read_dataset(slot: Slot) -> Array:
    dataset, where = slot.place
    found = np.empty(slot.spec.stored_shape, slot.spec.numpy_dtype)
    if found.size:
        with parsing(where):
            dataset.read_direct(found.view(dataset.dtype) if dataset.dtype.kind == "V" else found)
    return found


_READERS = {
    "npz": _npz,
    "torch": _torch.opened,
    "dcp": _torch.opened_folder,
    "flax": _flax,
    "keras": _keras,
}
"""What opens a file of a format that ``load`` does not take, until a stack ends: gives its tree, and metadata."""
FORMATS = ("safetensors", *_READERS, "orbax")
_NPY = b"\x93NUMPY"


@contextlib.contextmanager
def opened(
    where: str, format: str, item: str | None, options: Options
) -> Generator[tuple[dict[str, Any], Any]]:
    """The items of a source, trees of arrays flat, by name (empty if it is one state); and its metadata."""
    is_named = where.endswith((SUFFIX, INDEX_SUFFIX))
    if format == "safetensors" and not is_named and kind_at(where) == "file":
        raise CheckpointError(
            f"{where} holds safetensors, which are known by their name: rename it to {where}.safetensors"
        )
    if format not in _READERS:
        yield _items_of(where, item, options)
        return
    if "://" in where:
        raise CheckpointError(f"{where}: {format} is read from a disk: copy it there first")
    with contextlib.ExitStack() as stack:
        tree, metadata = _READERS[format](where, stack)
        yield {"": flatten(tree)}, metadata


def _items_of(path: str, item: str | None, options: Options) -> tuple[dict[str, Any], Any]:
    """The same of what ``load`` takes as it is: safetensors, and checkpoints of Orbax."""
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
    return Json(value) if saved.form == "json" else value


def _flat(opened: Checkpoint, item: SavedItem, options: Options) -> FlatTree:
    if isinstance(item, OrbaxItem):
        item = with_specs(opened, item)
    specs = list(item.specs)
    if isinstance(item, ExtentItem):
        specs = [array_spec(spec.dtype, spec.shape, opened.path) for spec in specs]
    text_of = opened.texts(item)

    def read(slots: Sequence[Slot]) -> Iterator[Array]:
        wants = [Want(slot.place, [whole(slot.spec.stored_shape)]) for slot in slots]
        reading = read_leaves(opened, item, wants, options)
        with opened.reading(), contextlib.closing(reading):
            for _, parts in reading:
                (array,) = parts.values()
                yield array

    leaves = [
        text_of(position) if spec.kind in TEXT_KINDS else Slot(spec, read, position)
        for position, spec in enumerate(specs)
    ]
    return FlatTree(list(item.paths), leaves, item.root)


def format_of(path: str) -> str:
    """One of ``FORMATS``; ``ckpt`` for anything that ``load`` takes as it is."""
    if "://" in path or path.endswith((SUFFIX, INDEX_SUFFIX)):
        return "ckpt"
    kind = kind_at(path)
    if kind == "directory":
        return "dcp" if kind_at(os.path.join(path, _torch.INDEX)) else "ckpt"
    if not kind:
        raise CheckpointNotFound(f"{path}: there is no such file or folder")
    if kind != "file":  # to open a pipe would wait for its other end
        raise CheckpointError(
            f"{path} is neither a file nor a folder: copy what it gives to a file first"
        )
    with open(path, "rb") as stream:
        head = stream.read(16)
    found = _by_head(path, head) if head else None
    if found not in FORMATS:
        raise CheckpointError(
            f"{path}: it begins with {head[:8]!r}, as no file of {', '.join(FORMATS)} does: say which it is with "
            "format=, if it is one, or load it with the program that wrote it, and call ckpt.save"
        )
    return found


def _by_head(path: str, head: bytes) -> str | None:
    if head.startswith(b"PK"):
        return _by_members(path)
    if head.startswith((b"\x80\x02\x8a", b"\x80\x02c", b"\x80\x04\x95")):
        return "torch"  # as before 1.6
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 2**40:
        return "safetensors"
    if head.startswith(_HDF5) or path.endswith(_SHARDS):
        return "keras"
    if head.startswith(_NPY) or path.endswith(".eqx"):
        raise CheckpointError(
            f"{path} is a file of Equinox or of one array, and holds no names: take eqx.tree_deserialise_leaves(path, "
            "model) or numpy.load(path), and call ckpt.save"
        )
    if 0x80 < head[0] < 0x90 or head[0] in (0xDE, 0xDF):  # a map of msgpack
        return "flax"
    return None


def _by_members(path: str) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError):  # which its reader reports
        return "npz" if path.endswith(".npz") else "torch"
    if _WEIGHTS in names:
        return "keras"
    if any(f"/{name}".endswith("/data.pkl") for name in names):
        return "torch"
    if not names or any(name.endswith(".npy") for name in names):
        return "npz"
    return None
