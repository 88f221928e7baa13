"""Converts checkpoints to weights files, and weights files to checkpoints.

Torch is imported only to read or write a ``.pt`` file: safetensors files are read and written as
arrays, whichever framework saved the checkpoint.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

import ckpt_core as ckpt
from ckpt_core import UnsupportedLeaf
from ckpt_torchax import _files
from ckpt_torchax._dtypes import WIDENED
from ckpt_torchax._tied import TIED, chosen_item, first_names, tied_once

PathLike = str | os.PathLike[str]


def export_file(path: PathLike, file: PathLike, *, item: str | None = None) -> None:
    """Writes a checkpoint's weights to ``file``, a ``.safetensors`` or ``.pt`` that any torch reads.

    The file has tied weights under each of their names (one tensor in ``.pt``, copies in safetensors).

    Args:
        path: path of a checkpoint, or of one item in it.
        file: the file to write; an existing one is replaced atomically.
        item: as for ``to_torch``.

    Raises:
        UnsupportedLeaf: a value that safetensors cannot hold: not an array, or an unsupported dtype.
        ModuleNotFoundError: ``.pt`` needs torch; ``.safetensors`` does not.
    """
    _files.refuse_other_names(file, "the checkpoint comes first, as in export_file(path, file)")

    def tensors() -> Any:
        from ckpt_torchax import to_torch  # its error says what to install

        return to_torch(path, item=item)

    def arrays() -> dict[str, Any]:
        tree = ckpt.load(path, item=chosen_item(path, item), as_numpy=True)
        return dict(_named(as_in_torch(tree, lambda array: array.astype(np.int64)), ""))

    _files.write(file, tensors, arrays)


def import_file(
    file: PathLike, path: PathLike, *, item: str = "model", overwrite: bool = False
) -> None:
    """Saves the content of a ``.safetensors``, ``.safetensors.index.json`` or ``.pt`` file as a checkpoint.

    A ``.pt`` file is read with ``weights_only=True``: tensors and plain containers, no code.

    Args:
        file: the weights file.
        path: path of the checkpoint.
        item: the name of its only item, so that ``restore(path, model=module)`` finds it.
        overwrite: as for ``ckpt_core.save``.

    Raises:
        CheckpointNotFound: there is no such file.
        CheckpointCorrupt: the file is damaged.
        UnsupportedLeaf: a ``.pt`` file holds objects of other classes, such as a whole module.
    """
    _files.refuse_other_names(file, "the weights file comes first, as in import_file(file, path)")
    tree = _files.read(file)
    if isinstance(tree, dict):  # tensors that share memory are stored once
        tree = tied_once(tree, {name: _memory_of(value) for name, value in tree.items()})
    ckpt.save(path, items={item: tree}, overwrite=overwrite)


def as_in_torch(tree: Any, to_int64: Callable[[Any], Any]) -> Any:
    """A state in the form of ``state_dict``: tied weights under all names, counters as int64."""
    if not isinstance(tree, dict):
        return tree
    state = {name: value for name, value in tree.items() if name != TIED}
    state |= {name: state[first] for name, first in first_names(tree).items()}
    for name, value in state.items():
        if str(name).endswith("num_batches_tracked") and hasattr(value, "dtype"):
            state[name] = to_int64(value)  # torchax stores it as int32
    return state


def _memory_of(value: Any) -> Any:
    """A key that is equal for values that are the same memory."""
    torch = sys.modules.get("torch")  # imported already if there is a tensor
    if torch is None or not isinstance(value, torch.Tensor):
        return id(value)
    if value.layout != torch.strided or not value.numel():
        return id(value)
    return value.data_ptr(), value.shape, value.stride(), value.dtype


def _named(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """(name, array) of every array in a tree, names joined with dots."""
    where = prefix.removesuffix(".")
    if isinstance(tree, Mapping):
        items: Any = tree.items()
    elif isinstance(tree, (list, tuple)):
        items = enumerate(tree)
    elif isinstance(tree, (np.ndarray, np.generic)):
        array = np.asarray(tree)
        yield where, array.astype(WIDENED.get(array.dtype, array.dtype), copy=False)
        return
    else:
        raise UnsupportedLeaf(
            f"{where}: safetensors holds arrays, not a {type(tree).__name__}: write .pt instead",
            leaf=where,
            type_name=type(tree).__name__,
        )
    for key, child in items:
        yield from _named(child, f"{prefix}{key}.")
