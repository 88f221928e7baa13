"""``.weights.h5`` and ``.keras``: the weights that Keras writes, by their paths in the file. Keras is not needed; h5py is."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import tempfile
import zipfile
from collections.abc import Generator
from typing import Any

import numpy as np

from ckpt_core._directory import kind_at
from ckpt_core._errors import CheckpointCorrupt, UnsupportedLeaf
from ckpt_core._tree.leaves import leaf_spec
from ckpt_core.convert._source import Array, Slot, array_spec, each, library, parsing

WEIGHTS = "model.weights.h5"
SHARDS_SUFFIX = ".weights.json"
_SYSTEM_ERROR = re.compile(r"errno = (\d+), error message")
"""In an error of h5py for what the system did not let it read."""


def opened(path: str, stack: contextlib.ExitStack) -> tuple[Any, Any]:
    """The variables of a file, in the groups in which Keras stored them; metadata has the version of Keras. A model's own
    files (vocabularies) and its configuration stay behind.
    """
    h5py = library("h5py", path)
    metadata, files = None, {path: path}
    if path.endswith(SHARDS_SUFFIX):
        files = {file: file for file in _shards(path)}
    elif zipfile.is_zipfile(path):
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ckpt-keras-"))
        with parsing(path), zipfile.ZipFile(path) as archive:
            if "metadata.json" in archive.namelist():
                metadata = json.loads(archive.read("metadata.json"))
            files = {archive.extract(WEIGHTS, folder): path}
    tree: dict[str, Any] = {}
    for file, where in files.items():
        with _reading(where):
            _add(tree, stack.enter_context(h5py.File(file, "r")), where, "")
    return tree, metadata


@contextlib.contextmanager
def _reading(where: str) -> Generator[None]:
    """What h5py says of bytes is damage, but not what the system refused to it, of which it tells in several classes."""
    with parsing(where):
        try:
            yield
        except (OSError, KeyError, RuntimeError) as error:
            found = _SYSTEM_ERROR.search(str(error))
            number = int(found[1]) if found else 0
            if number not in (0, errno.EINVAL):  # damage leads to a position that no file has
                raise OSError(number, os.strerror(number), where) from error
            if "signature not found" in str(error):
                raise CheckpointCorrupt(f"{where}: damaged, or no HDF5", file=where) from error
            raise


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
    for name in sorted(group, key=_by_number):
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
            tree[name] = _slot(found, at)
        else:
            below = tree.get(name, {})
            _add(below, found, file, f"{inside}/")
            if below:  # a group without weights, such as that of dropout, is nothing
                tree[name] = below


def _by_number(name: str) -> tuple[int, str]:
    return (int(name), name) if name.isdecimal() else (-1, name)


def _slot(dataset: Any, where: str) -> Slot:
    shape = getattr(dataset, "shape", None)  # a type has none, and an empty dataset None
    if shape is None or dataset.external or dataset.is_virtual:
        raise UnsupportedLeaf(
            f"{where} is no array of this file: a type, empty, or its values are in another file, which is not followed",
            leaf=where,
            type_name="external" if shape is not None else type(dataset).__name__,
        )
    dtype = dataset.dtype
    is_bfloat16 = str(dataset.attrs.get("dtype")) == "bfloat16" and dtype == np.dtype("V2")
    if dtype.kind in "OSUV" and not is_bfloat16:
        refused = UnsupportedLeaf(
            f"{where} holds {dtype}: a checkpoint holds numbers; leave it out with only=",
            leaf=where,
            type_name=str(dtype),
        )
        return Slot(leaf_spec("numpy", "uint8", ()), _read, refused=refused)
    name = "bfloat16" if is_bfloat16 else dtype.name
    return Slot(array_spec(name, shape, where), _read, (dataset, where))


@each
def _read(slot: Slot) -> Array:
    dataset, where = slot.place
    found = np.empty(slot.spec.stored_shape, slot.spec.numpy_dtype)
    if found.size:
        with _reading(where):
            dataset.read_direct(found.view(dataset.dtype) if dataset.dtype.kind == "V" else found)
    return found
