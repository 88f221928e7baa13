"""``.pt``: a zip archive with a pickle, and a file for each memory of tensors. Torch is not needed."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Generator
from typing import IO, Any

import numpy as np

from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._tree.leaves import dtype_from_name, leaf_spec
from ckpt_core.convert._source import (
    Array,
    Slot,
    Source,
    array_spec,
    elements,
    read_at,
    source_of,
)
from ckpt_core.convert._torch_pickle import Tensor, plain, unpickled
from ckpt_core.convert._zips import data_offset, opened_zip

_MOST_PICKLE_BYTES = 2**27
PICKLE = "/data.pkl"


class TorchFile:
    """An archive of ``torch.save`` in an open file."""

    def __init__(self, stream: IO[bytes], archive: zipfile.ZipFile, where: str) -> None:
        self._stream, self._archive, self._where = stream, archive, where
        pickles = [name for name in archive.namelist() if f"/{name}".endswith(PICKLE)]
        if len(pickles) != 1:
            raise CheckpointCorrupt(f"{where}: not what torch.save writes", file=where)
        self._prefix = pickles[0].removesuffix("data.pkl")
        order = f"{self._prefix}byteorder"
        if order in archive.namelist() and archive.read(order) != b"little":
            raise CheckpointCorrupt(
                f"{where}: its numbers are big-endian: save it anew on a usual machine", file=where
            )
        if archive.getinfo(pickles[0]).file_size > _MOST_PICKLE_BYTES:
            raise CheckpointCorrupt(f"{where}: {pickles[0]} is impossibly large", file=where)
        self._data = archive.read(pickles[0])

    def tree(self) -> Any:
        """What was saved, with a ``Slot`` for each tensor."""
        return plain(unpickled(self._data, self._where), self._where, self._slot)

    def _slot(self, tensor: Tensor, path: str) -> Slot:
        where = f"{self._where}: {path.removeprefix('/')}"
        spec = array_spec(tensor.dtype, tensor.shape, where)
        size, unit = dtype_from_name(tensor.dtype).itemsize, 1
        if tensor.storage.dtype is not None:
            unit = dtype_from_name(tensor.storage.dtype).itemsize
        if tensor.offset * size + _span(tensor) * size > tensor.storage.size * unit:
            raise CheckpointCorrupt(f"{where}: it lies outside of its memory", file=self._where)
        return Slot(spec, (self, tensor, where))

    def read(self, tensor: Tensor, where: str) -> Array:
        """The values of a tensor."""
        found = self._stored(tensor, where)
        if tensor.conj:
            np.conjugate(found, out=found)
        return np.negative(found, out=found) if tensor.neg else found

    def _stored(self, tensor: Tensor, where: str) -> Array:
        """What the memory of a tensor holds."""
        span = _span(tensor)
        if not span:
            return np.empty(tensor.shape, dtype_from_name(tensor.dtype))
        try:
            member = self._archive.getinfo(f"{self._prefix}data/{tensor.storage.key}")
        except KeyError:
            raise CheckpointCorrupt(f"{where}: its values are missing", file=self._where) from None
        dtype = dtype_from_name(tensor.dtype)
        begin = tensor.offset * dtype.itemsize
        if begin + span * dtype.itemsize > member.file_size:
            raise CheckpointCorrupt(f"{where}: it lies outside of its file", file=self._where)
        offset = data_offset(self._stream, member, self._where)
        flat = read_at(
            self._stream, offset + begin, leaf_spec("numpy", tensor.dtype, (span,)), where
        )
        if _is_contiguous(tensor):
            return flat.reshape(tensor.shape)
        if elements(tensor.shape) > 8 * span + 2**20:
            raise CheckpointCorrupt(
                f"{where}: its {elements(tensor.shape)} elements are repetitions of {span}: save it after "
                ".contiguous()",
                file=self._where,
            )
        strides = [stride * dtype.itemsize for stride in tensor.strides]
        found = np.lib.stride_tricks.as_strided(flat, tensor.shape, strides, writeable=False)
        return np.ascontiguousarray(found)


def _span(tensor: Tensor) -> int:
    """How many elements of its memory a tensor reaches over."""
    if 0 in tensor.shape:
        return 0
    pairs = zip(tensor.shape, tensor.strides, strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs)


def _is_contiguous(tensor: Tensor) -> bool:
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def read_slot(slot: Slot) -> Array:
    """The values of a slot of a ``TorchFile``."""
    file, tensor, where = slot.place
    return file.read(tensor, where)


@contextlib.contextmanager
def opened(path: str) -> Generator[Source]:
    """What ``torch.save`` wrote into a file: tensors, numbers and text in plain containers."""
    with open(path, "rb") as stream, opened_zip(stream, path) as archive:
        yield source_of(TorchFile(stream, archive, path).tree(), read_slot)
