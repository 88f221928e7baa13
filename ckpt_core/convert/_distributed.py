"""Folders that ``torch.distributed.checkpoint`` writes: a pickle that says where each part of a tensor is, and the parts.

Torch is not needed. The pickle names classes of torch, for each of which stands something here that only holds what it is
given (``_torch_pickle``). Each part is a file of ``torch.save`` inside of a file for each process.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import IO, Any, NamedTuple, cast

import numpy as np

from ckpt_core._directory import kind_at
from ckpt_core._errors import CheckpointCorrupt, UnsupportedLeaf
from ckpt_core.convert._source import Array, Slot, Source, array_spec, source_of
from ckpt_core.convert._torch import TorchFile, read_slot
from ckpt_core.convert._torch_pickle import Made, Tensor, unpickled
from ckpt_core.convert._zips import Window, opened_zip

INDEX = ".metadata"
_MOST_INDEX_BYTES = 2**27
_PACKAGE = "torch.distributed.checkpoint"


class _Tensor(Made):
    """``TensorStorageMetadata``"""


class _Key(Made):
    """``MetadataIndex``: the name of a value, and the offset of a part of it."""


def _known() -> dict[str, Any]:
    """What stands for each name in an index; made anew, so that a pickle changes nothing of the next one's."""
    plain = ("Metadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata")
    known: dict[str, Any] = {
        f"{_PACKAGE}.metadata.{name}": type(name, (Made,), {})
        for name in (*plain, "StorageMeta", "_MEM_FORMAT_ENCODING")
    }
    known[f"{_PACKAGE}.metadata.TensorStorageMetadata"] = _Tensor
    known[f"{_PACKAGE}.metadata.MetadataIndex"] = _Key
    known[f"{_PACKAGE}.filesystem._StorageInfo"] = type("_StorageInfo", (Made,), {})
    known["torch.serialization._get_layout"] = lambda *_: None
    known |= {f"pathlib.{name}": Made for name in ("PosixPath", "WindowsPath", "Path")}
    known |= {f"pathlib._local.{name}": Made for name in ("PosixPath", "WindowsPath", "Path")}
    return known


class _Part(NamedTuple):
    """A part of a value: where it lies in the tensor, and the bytes of a file that store it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    begin: int
    bytes: int


class _Inside(NamedTuple):
    """A tensor in a value that torch did not cut, such as a tuple of tensors; ``file`` is path, first byte and size of the value."""

    file: tuple[str, int, int]
    tensor: Tensor
    where: str


@contextlib.contextmanager
def opened(path: str) -> Generator[Source]:
    """The state that was saved in a folder: tensors, numbers and text in dicts and lists."""
    folder = _Folder(path)
    yield source_of(folder.tree(), folder.read)


class _Folder:
    def __init__(self, path: str) -> None:
        self._path = path
        self._file = os.path.join(path, INDEX)
        if os.path.getsize(self._file) > _MOST_INDEX_BYTES:
            raise CheckpointCorrupt(f"{self._file} is impossibly large", file=self._file)
        with open(self._file, "rb") as stream:
            index = unpickled(stream.read(), self._file, _known())
        try:
            self._values: dict[str, Any] = dict(index.state["state_dict_metadata"])
            self._levels: Mapping[str, Any] = dict(index.state.get("planner_data") or {})
            self._stored: dict[tuple[str, Any], Any] = {
                (key.state["fqn"], key.state.get("offset")): info.state
                for key, info in index.state["storage_data"].items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._damaged(repr(error)) from error

    def _damaged(self, why: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(
            f"{self._file}: damaged, or not what torch.distributed.checkpoint writes: {why}",
            file=self._file,
        )

    def tree(self) -> Any:
        """What was saved, with a ``Slot`` for each tensor."""
        leaves: list[tuple[tuple[Any, ...], Any]] = []
        for name, stored in self._values.items():
            where = f"{self._path}: {name}"
            try:
                levels = tuple(self._levels.get(name) or (name,))
                hash(levels)  # else it names no place
                leaf = self._slot(name, stored, where) if isinstance(stored, _Tensor) else None
                leaf = self._value(name, where) if leaf is None else leaf
            except UnsupportedLeaf:  # which is a TypeError
                raise
            except (AttributeError, KeyError, TypeError, IndexError, OverflowError) as error:
                raise self._damaged(f"{name}: {error!r}") from error
            leaves.append((levels, leaf))
        return _nested(leaves, self._damaged)

    def _slot(self, name: str, stored: Any, where: str) -> Slot:
        shape = tuple(stored.state["size"])
        dtype = stored.state["properties"].state[0]
        spec = array_spec(str(dtype), shape, where)
        parts = [
            self._part(name, chunk.state["offsets"], chunk.state["sizes"])
            for chunk in stored.state["chunks"]
        ]
        if not _tiles(shape, [part.offset for part in parts], [part.shape for part in parts]):
            raise self._damaged(f"the parts of {name} are not the whole of it")
        return Slot(spec, (parts, where))

    def _part(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> _Part:
        info = self._stored[name, tuple(offset)]
        return _Part(tuple(offset), tuple(shape), *self._place(name, info))

    def _place(self, name: str, info: Any) -> tuple[str, int, int]:
        if info.get("transform_descriptors"):
            raise UnsupportedLeaf(
                f"{self._path}: {name} is stored under {info['transform_descriptors']}: save it without extensions",
                leaf=name,
            )
        file, begin, count = info["relative_path"], info["offset"], info["length"]
        if file.startswith("/") or ".." in file.split("/") or min(begin, count) < 0:
            raise self._damaged(f"{name} is in {file!r}, at {begin}")
        return os.path.join(self._path, file), begin, count

    def _value(self, name: str, where: str) -> Any:
        """A value that is no tensor: a number, text, or a container, of which torch cuts lists and dicts only."""
        place = self._place(name, self._stored[name, None])
        with _part_file(*place, where) as file:
            tree = file.tree()
        if isinstance(tree, Slot):
            raise self._damaged(f"{name} is a tensor")
        return _closed(tree, place)

    def read(self, slot: Slot) -> Array:
        if isinstance(slot.place, _Inside):
            with _part_file(*slot.place.file, slot.place.where) as file:
                return file.read(slot.place.tensor, slot.place.where)
        parts: list[_Part]
        parts, where = slot.place
        if len(parts) == 1:
            return _tensor(parts[0], slot.spec.dtype, where)
        found = np.empty(slot.spec.shape, slot.spec.numpy_dtype)
        for part in parts:
            begin = zip(part.offset, part.shape, strict=True)
            found[tuple(slice(first, first + size) for first, size in begin)] = _tensor(
                part, slot.spec.dtype, where
            )
        return found


def _closed(tree: Any, place: tuple[str, int, int]) -> Any:
    """A tree whose file is closed now: each of its slots says how to open it again."""
    if isinstance(tree, Slot):
        _, tensor, where = tree.place
        return Slot(tree.spec, _Inside(place, tensor, where))
    if isinstance(tree, dict):
        named = cast("dict[Any, Any]", tree)
        return {name: _closed(part, place) for name, part in named.items()}
    if isinstance(tree, list | tuple):
        parts = cast("Sequence[Any]", tree)
        return type(tree)(_closed(part, place) for part in parts)
    return tree


@contextlib.contextmanager
def _part_file(path: str, begin: int, count: int, where: str) -> Generator[TorchFile]:
    if kind_at(path) != "file":
        raise CheckpointCorrupt(f"{where}: {path} is missing", file=path)
    with open(path, "rb") as stream:
        window = cast(IO[bytes], Window(stream, begin, count))
        with opened_zip(window, where) as archive:
            yield TorchFile(window, archive, where)


def _tensor(part: _Part, dtype: str, where: str) -> Array:
    with _part_file(part.file, part.begin, part.bytes, where) as file:
        slot = file.tree()
        if not isinstance(slot, Slot) or (slot.spec.dtype, slot.spec.shape) != (dtype, part.shape):
            raise CheckpointCorrupt(
                f"{where}: at {part.offset}, {part.file} holds {getattr(slot, 'spec', slot)} instead of "
                f"{dtype}{list(part.shape)}",
                file=part.file,
            )
        return read_slot(slot)


def _tiles(
    shape: Sequence[int], offsets: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]
) -> bool:
    """Whether parts cover an array, each element once: as many elements, all inside, no two of which meet."""
    if not all(len(shape) == len(one) for one in (*offsets, *sizes)):
        return False
    if sum(map(math.prod, sizes)) != math.prod(shape):
        return False
    solid = [(o, s) for o, s in zip(offsets, sizes, strict=True) if 0 not in s]
    if len(solid) < 2 or not shape:
        return len(solid) < 2 and all(not any(o) and (*s,) == (*shape,) for o, s in solid)
    first = np.array([o for o, _ in solid], np.int64)
    last = first + np.array([s for _, s in solid], np.int64)
    if (first < 0).any() or (last > np.array(shape)).any():
        return False
    for n in range(len(solid) - 1):
        meets = (first[n] < last[n + 1 :]) & (first[n + 1 :] < last[n])
        if meets.all(axis=1).any():
            return False
    return True


def _nested(leaves: Iterable[tuple[tuple[Any, ...], Any]], damaged: Any) -> Any:
    """A tree of dicts, with lists where all names of a level are the numbers from 0 on."""
    root: dict[Any, Any] = {}
    made = {id(root)}
    for levels, leaf in leaves:
        node = root
        for level in levels[:-1]:
            if level not in node:
                node[level] = {}
                made.add(id(node[level]))
            node = node[level]
            if id(node) not in made:
                raise damaged(f"{levels} lies inside of a value")
        if levels[-1] in node:
            raise damaged(f"{levels} is there twice")
        node[levels[-1]] = leaf

    def lists(node: Any) -> Any:
        if id(node) not in made:
            return node
        parts = {name: lists(part) for name, part in node.items()}
        if parts and set(parts) == set(range(len(parts))) and type(next(iter(parts))) is int:
            return [parts[n] for n in range(len(parts))]
        return parts

    return lists(root)
