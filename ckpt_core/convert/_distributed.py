"""Folders that ``torch.distributed.checkpoint`` writes: an index, and files with the parts of tensors.

The index is a pickle, of which only the classes of an index are made; each part is a file of ``torch.save`` within a file.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pathlib
import pickle
from collections.abc import Generator
from typing import Any

import numpy as np

from ckpt_core._directory import kind_at
from ckpt_core._errors import CheckpointCorrupt, UnsupportedLeaf
from ckpt_core._tree.leaves import dtype_from_name, to_host_array
from ckpt_core.convert._source import Array, Slot, array_spec, each, library, parsing
from ckpt_core.convert._torch import loaded, values_of

INDEX = ".metadata"
_PACKAGE = "torch.distributed.checkpoint"
_OF_INDEX = {
    *(f"{_PACKAGE}.metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *(f"{_PACKAGE}.metadata.{name}StorageMetadata" for name in ("Tensor", "Chunk", "Bytes")),
    *(f"{_PACKAGE}.metadata.{name}" for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
    *(f"{_PACKAGE}.filesystem._StorageInfo", "torch.serialization._get_layout", "torch.Size"),
    "collections.OrderedDict",
}


class _Index(pickle.Unpickler):
    """Makes what an index holds, and nothing else."""

    def find_class(self, module: str, name: str, /) -> Any:
        if module in ("pathlib", "pathlib._local"):  # of any system
            return pathlib.PurePath
        torch = library("torch", INDEX)
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or f"{module}.{name}" in _OF_INDEX:
            return super().find_class(module, name)
        raise UnsupportedLeaf(
            f"it names {module}.{name}, which is of no index, and to make it would run code: save it anew with {_PACKAGE}",
            type_name=f"{module}.{name}",
        )


@contextlib.contextmanager
def opened(path: str) -> Generator[tuple[Any, Any]]:
    """The state that was saved in a folder: tensors, numbers and text in dicts and lists."""
    yield _Folder(path).tree(), None


class _Folder:
    def __init__(self, path: str) -> None:
        self._path = path
        self._metadata = library(f"{_PACKAGE}.metadata", path)
        index = os.path.join(path, INDEX)
        try:
            with open(index, "rb") as stream, parsing(index):
                self._index: Any = _Index(stream).load()
        except UnsupportedLeaf as error:
            raise UnsupportedLeaf(f"{index}: {error}", type_name=error.type_name) from error

    def tree(self) -> Any:
        """What was saved, with a ``Slot`` for each tensor."""
        with parsing(os.path.join(self._path, INDEX)):
            stored = self._index.state_dict_metadata
            levels = {name: (name,) for name in stored} | (self._index.planner_data or {})
            leaves = {name: self._leaf(name, one) for name, one in stored.items()}
            nested = library(f"{_PACKAGE}._nested_dict", self._path)
            return nested.unflatten_state_dict(leaves, levels)

    def _leaf(self, name: str, stored: Any) -> Any:
        if not isinstance(stored, self._metadata.TensorStorageMetadata):
            return self._part(name, None)
        where = f"{self._path}: {name}"
        dtype = str(stored.properties.dtype).removeprefix("torch.")
        if sum(math.prod(part.sizes) for part in stored.chunks) != math.prod(stored.size):
            raise CheckpointCorrupt(f"{where}: its parts are not the whole of it", leaf=where)
        spec = array_spec(dtype, tuple(stored.size), where)
        return Slot(spec, each(self._read), (name, stored.chunks))

    def _part(self, name: str, offset: Any) -> Any:
        """A part of a tensor, or (None) a value that is no tensor."""
        where = f"{self._path}: {name}"
        info = self._index.storage_data[self._metadata.MetadataIndex(name, offset)]
        if getattr(info, "transform_descriptors", None):
            raise UnsupportedLeaf(
                f"{where} is stored under {info.transform_descriptors}: save it without extensions",
                leaf=where,
            )
        file = os.path.join(self._path, info.relative_path)
        if kind_at(file) != "file":
            raise CheckpointCorrupt(f"{where}: {file} is missing", file=file)
        with open(file, "rb") as stream:
            stream.seek(info.offset)
            return loaded(io.BytesIO(stream.read(info.length)), f"{where} in {file}")

    def _read(self, slot: Slot) -> Array:
        name, parts = slot.place
        found = np.empty(slot.spec.shape, dtype_from_name(slot.spec.dtype))
        with parsing(os.path.join(self._path, INDEX)):
            for part in parts:
                ends = zip(part.offsets, part.sizes, strict=True)
                place = tuple(slice(begin, begin + size) for begin, size in ends)
                found[place] = values_of(self._part(name, part.offsets))
        return to_host_array(found, slot.spec)
