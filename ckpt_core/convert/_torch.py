"""What torch writes: files of ``torch.save``, in and out, and folders of ``torch.distributed.checkpoint``.

A folder has an index, a pickle, and files with the parts of tensors; each part is a file of ``torch.save`` within a file.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pathlib
import pickle
import re
import zipfile
from collections.abc import Generator, Iterable
from typing import IO, Any

import numpy as np

from ckpt_core._directory import kind_at, placed
from ckpt_core._errors import CheckpointCorrupt, UnsupportedLeaf
from ckpt_core._options import Options
from ckpt_core._tree.leaves import dtype_from_name, to_host_array
from ckpt_core.arguments import answering
from ckpt_core.convert._outgoing import NUMPY_DTYPES, Format, PathLike, Rules, exported, new_file
from ckpt_core.convert._source import Array, Slot, array_spec, each, library, parsing, with_slots

INDEX = ".metadata"
_PACKAGE = "torch.distributed.checkpoint"
_OF_INDEX = {
    *(f"{_PACKAGE}.metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *(f"{_PACKAGE}.metadata.{name}StorageMetadata" for name in ("Tensor", "Chunk", "Bytes")),
    *(f"{_PACKAGE}.metadata.{name}" for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
    *(f"{_PACKAGE}.filesystem._StorageInfo", "torch.serialization._get_layout", "torch.Size"),
    "collections.OrderedDict",
}
_FLOAT8 = {f"float8_{kind}" for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")}
_FORMAT = Format("torch", NUMPY_DTYPES | {"bfloat16"} | _FLOAT8)


def opened(path: str, _: contextlib.ExitStack) -> tuple[Any, Any]:
    """What ``torch.save`` wrote into a file: tensors, numbers and text in plain containers."""
    return _loaded(path, path, mmap=zipfile.is_zipfile(path)), None


def _loaded(file: str | IO[bytes], where: str, **how: Any) -> Any:
    """What is in a file of ``torch.save``, with a ``Slot`` for each tensor."""
    torch = library("torch", where)
    try:
        with parsing(where), _plain(torch):
            tree = torch.load(file, map_location="cpu", weights_only=True, **how)
    except CheckpointCorrupt as error:
        refused = re.search(r"(?:GLOBAL|class) ([\w.]+)", str(error.__cause__))
        if refused is None:
            raise
        raise UnsupportedLeaf(
            f"{where} holds an object of {refused[1]}, and to make it would run code that the file names: ckpt reads "
            "tensors and plain containers. In a program that has the class and trusts the file, save "
            "model.state_dict() instead",
            type_name=refused[1],
        ) from error
    return with_slots(tree, lambda value, at: _slot(torch, value, at), f"{where}: ")


def _slot(torch: Any, value: Any, where: str) -> Slot | None:
    if not isinstance(value, torch.Tensor):
        return None
    if value.layout != torch.strided or value.device.type != "cpu":
        raise UnsupportedLeaf(
            f"{where} is a tensor of {value.layout} on {value.device}: save tensor.to_dense().cpu()",
            leaf=where,
            type_name=str(value.layout),
        )
    dtype = str(value.dtype).removeprefix("torch.")
    return Slot(array_spec(dtype, tuple(value.shape), where), each(_values_of), (torch, value))


def _values_of(slot: Slot) -> Array:
    """The values of a slot of ``_loaded``."""
    torch, tensor = slot.place
    dtype = dtype_from_name(slot.spec.dtype)
    with _plain(torch):
        values = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if dtype.isbuiltin != 1:  # numpy has it from ml_dtypes, of which torch does not know
            values = values.view({1: torch.uint8, 2: torch.int16}[dtype.itemsize])
        return to_host_array(values.numpy().view(dtype), slot.spec)


@contextlib.contextmanager
def _plain(torch: Any) -> Generator[None]:
    """Operations are torch's own, even while torchax is on."""
    modes = library("torch.utils._mode_utils", "torch")
    with torch._C.DisableTorchFunction(), modes.no_dispatch():
        yield


class _Index(pickle.Unpickler):
    """Makes what an index holds, and nothing else."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream)
        self._path = stream.name

    def find_class(self, module: str, name: str, /) -> Any:
        if module in ("pathlib", "pathlib._local"):  # of any system
            return pathlib.PurePath
        torch = library("torch", INDEX)
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or f"{module}.{name}" in _OF_INDEX:
            return super().find_class(module, name)
        why = "which is of no index, and to make it would run code: save it anew with"
        raise UnsupportedLeaf(
            f"{self._path}: it names {module}.{name}, {why} {_PACKAGE}",
            type_name=f"{module}.{name}",
        )


def opened_folder(path: str, _: contextlib.ExitStack) -> tuple[Any, Any]:
    """The state that was saved in a folder: tensors, numbers and text in dicts and lists."""
    return _Folder(path).tree(), None


class _Folder:
    def __init__(self, path: str) -> None:
        self._path = path
        self._metadata = library(f"{_PACKAGE}.metadata", path)
        self._file = os.path.join(path, INDEX)
        with open(self._file, "rb") as stream, parsing(self._file):
            self._index: Any = _Index(stream).load()

    def tree(self) -> Any:
        """What was saved, with a ``Slot`` for each tensor."""
        with parsing(self._file):
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
        if extensions := getattr(info, "transform_descriptors", None):
            text = f"{where} is stored under {extensions}: save it without extensions"
            raise UnsupportedLeaf(text, leaf=where)
        file = os.path.join(self._path, info.relative_path)
        if kind_at(file) != "file":
            raise CheckpointCorrupt(f"{where}: {file} is missing", file=file)
        with open(file, "rb") as stream:
            stream.seek(info.offset)
            return _loaded(io.BytesIO(stream.read(info.length)), f"{where} in {file}")

    def _read(self, slot: Slot) -> Array:
        name, parts = slot.place
        found = np.empty(slot.spec.shape, dtype_from_name(slot.spec.dtype))
        with parsing(self._file):
            for part in parts:
                ends = zip(part.offsets, part.sizes, strict=True)
                place = tuple(slice(begin, begin + size) for begin, size in ends)
                found[place] = _values_of(self._part(name, part.offsets))
        return to_host_array(found, slot.spec)


@answering
def export_torch(
    checkpoint: PathLike,
    target: PathLike,
    /,
    *,
    item: str | None = None,
    only: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    rules: Rules = None,
    options: Options | None = None,
) -> list[str]:
    """The file that was written: a dict of tensors by name, which ``torch.load(weights_only=True)`` reads.

    Needs torch, and memory for all tensors that are written.

    Args:
        checkpoint: path or URL of a checkpoint.
        target: the file, such as ``model.pt``.
        item, only, exclude, rules, options: as for ``export_safetensors``.

    Raises:
        CheckpointNotFound, CheckpointCorrupt, CheckpointExists, StructureMismatch, CheckpointError: as
            ``export_safetensors``.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> ckpt.save(f"{folder}/one", {"w": jnp.ones(3)})
        >>> [path] = ckpt.convert.export_torch(f"{folder}/one", f"{folder}/model.pt")
    """
    where = new_file(target)
    torch = library("torch", where)
    with (
        exported(checkpoint, _FORMAT, options, item, only, exclude, rules) as (_, arrays),
        _plain(torch),
        placed(where) as temporary,
        open(temporary, "wb") as stream,
    ):
        torch.save({one.name: _tensor(torch, array) for one, array in arrays}, stream)
    return [where]


def _tensor(torch: Any, array: Array) -> Any:
    values = np.array(array, order="C")  # torch takes no memory that is read-only
    if values.dtype.isbuiltin == 1:
        return torch.from_numpy(values)
    bits = torch.from_numpy(values.view(f"u{values.itemsize}"))
    return bits.view(getattr(torch, values.dtype.name))
