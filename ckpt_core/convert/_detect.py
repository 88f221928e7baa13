"""Which format a file or folder has: by what is in it, whatever its name."""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Generator
from typing import Any

import numpy as np

from ckpt_core._directory import kind_at
from ckpt_core._errors import CheckpointError, CheckpointNotFound
from ckpt_core._format.safetensors import INDEX_SUFFIX, SUFFIX
from ckpt_core._tree.leaves import to_host_array
from ckpt_core.convert import _distributed, _keras, _npz, _torch
from ckpt_core.convert._source import Array, Slot, array_spec, each, library, parsing, with_slots


@contextlib.contextmanager
def _flax(path: str) -> Generator[tuple[Any, Any]]:
    """What ``flax.serialization.to_bytes`` or ``msgpack_serialize`` wrote into a file."""
    flax: Any = library("flax.serialization", path)
    with open(path, "rb") as stream, parsing(path):
        tree = flax.msgpack_restore(stream.read())
    yield with_slots(tree, _slot, f"{path}: "), None


def _slot(value: Any, where: str) -> Slot | None:
    if not isinstance(value, np.ndarray | np.generic):
        return None
    return Slot(array_spec(value.dtype.name, value.shape, where), _read, value)


@each
def _read(slot: Slot) -> Array:
    return to_host_array(np.asarray(slot.place), slot.spec)


READERS = {
    "npz": _npz.opened,
    "torch": _torch.opened,
    "dcp": _distributed.opened,
    "flax": _flax,
    "keras": _keras.opened,
}
"""What opens a file of a format that ``load`` does not take: gives its tree, and metadata."""
FORMATS = ("safetensors", *READERS, "orbax")
_HDF5 = b"\x89HDF\r\n\x1a\n"
_NPY = b"\x93NUMPY"


def format_of(path: str) -> str:
    """One of ``FORMATS``; ``ckpt`` for anything that ``load`` takes as it is."""
    if "://" in path or path.endswith((SUFFIX, INDEX_SUFFIX)):
        return "ckpt"
    kind = kind_at(path)
    if kind == "directory":
        return "dcp" if kind_at(os.path.join(path, _distributed.INDEX)) else "ckpt"
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
    if head.startswith(_HDF5) or path.endswith(_keras.SHARDS_SUFFIX):
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
    if _keras.WEIGHTS in names:
        return "keras"
    if any(f"/{name}".endswith("/data.pkl") for name in names):
        return "torch"
    if not names or any(name.endswith(".npy") for name in names):
        return "npz"
    return None
