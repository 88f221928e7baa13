"""Checkpoints to plain CPU PyTorch and to weights files, and weights files to checkpoints."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch

import ckpt_core as ckpt
from ckpt_core import Mismatch, StructureMismatch, UnsupportedLeaf
from ckpt_torchax import _bits, _files, _modules, _tensors

PathLike = str | os.PathLike[str]


def to_torch(path: PathLike, module: Any = None, *, item: str | None = None) -> Any:
    """A checkpoint as plain CPU tensors: a ``state_dict``, or the module with the values.

    It needs neither torchax nor a JAX device, whatever the checkpoint was saved from.

    Args:
        path: of a checkpoint, or of one item in it.
        module: set in place; on the meta device it is made on the CPU. int32 that torchax made of
            int64 is int64 again.
        item: of the checkpoint; needed if it holds several and none is called ``model``.

    Raises:
        StructureMismatch: every difference to the module, before anything is read or changed.
        UnsupportedLeaf: torch lacks a dtype.

    Example::

        model.load_state_dict(to_torch("runs/1/step_100"))
    """
    name = chosen_item(path, item)
    if module is None:
        return _as_in_torch(_tensors.tensors_of(ckpt.load(path, item=name, as_numpy=True)))
    if any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()]):
        _load_over_meta(path, module, name)
    else:
        ckpt.restore(path, items={name: module})
    return module


def _load_over_meta(path: PathLike, module: Any, item: str) -> None:
    """Loads into a copy that has memory, and gives its tensors to the module on the meta device."""
    _modules.refuse_meta_buffers(module)
    names_of = _modules.names_of_tensors(module)
    filled = copy.deepcopy(module).to_empty(device="cpu")
    for names, tensor in names_of:
        made = _modules.tensor_at(filled, names[0])
        if not tensor.is_meta:  # made beside the meta device, and perhaps in no checkpoint
            made.data.copy_(tensor)
        elif not tensor.is_floating_point():
            made.zero_()  # what happened to be in memory may not be a number that fits
        for name in names[1:]:  # to_empty unties
            _modules.put(filled, name, made)
    ckpt.restore(path, items={item: filled})
    for names, _ in names_of:
        for name in names:
            _modules.put(module, name, _modules.tensor_at(filled, name))


def export_file(path: PathLike, file: PathLike, *, item: str | None = None) -> None:
    """Writes a checkpoint's weights to ``file``, a ``.safetensors`` or ``.pt`` that any torch reads.

    Tied weights are in it under each of their names (in ``.pt`` once, in safetensors as copies).

    Args:
        path: of a checkpoint, or of one item in it.
        file: replaced if it is there, in one step.
        item: as for ``to_torch``.

    Raises:
        UnsupportedLeaf: safetensors holds nothing but arrays, and not every dtype.
    """
    tree = to_torch(path, item=item)
    _files.write(file, tree, lambda: dict(_named(tree, "")))


def import_file(
    file: PathLike, path: PathLike, *, item: str = "model", overwrite: bool = False
) -> None:
    """Saves what a ``.safetensors``, ``.safetensors.index.json`` or ``.pt`` file holds as a checkpoint.

    A ``.pt`` file is read with ``weights_only=True``: tensors and plain containers, no code.

    Args:
        file: the weights file.
        path: of the checkpoint.
        item: the name of its one item, so that ``restore(path, model=module)`` finds it.
        overwrite: as for ``ckpt_core.save``.

    Raises:
        CheckpointCorrupt: the file is damaged.
    """
    tree = _files.read(file)
    ckpt.save(path, items={item: _tied_once(tree)}, overwrite=overwrite)


def chosen_item(path: PathLike, item: str | None) -> str:
    """The item that holds the model.

    Raises:
        ValueError: there are several, and none is called ``model``.
    """
    if item is not None:
        return item
    names = list(ckpt.inspect(path).items)
    if len(names) == 1:
        return names[0]
    if "model" in names:
        return "model"
    raise ValueError(f"{path} holds the items {', '.join(names)}: name one with item=")


def fill_from_file(path: PathLike, module: Any, shardings: Any, cast: bool) -> None:
    """Sets a module from a weights file, each tensor on its sharding."""
    saved = {name: _array(value, name, path) for name, value in _files.read(path).items()}
    wanted = _modules.wanted(module, {name: _Described(array) for name, array in saved.items()})
    _compare(saved, wanted, cast, str(path))
    state: dict[str, Any] = {}
    for name, leaf in wanted.items():
        state[name] = _placed(saved[name], leaf, name, shardings)
    _modules.set_state(module, state)


def _array(value: Any, name: str, path: PathLike) -> Any:
    if isinstance(value, torch.Tensor):
        return _bits.to_numpy(value, name)
    if isinstance(value, np.ndarray):
        return value
    raise TypeError(
        f"{path} holds a {type(value).__name__} under {name!r}, so it is no state_dict: make a checkpoint of it "
        "with import_file, and load what is wanted with rename="
    )


class _Described:
    """An array of a file as ``wanted`` is told of it."""

    kind = "numpy"

    def __init__(self, array: Any) -> None:
        self.shape = array.shape
        self.dtype = array.dtype.name


def _compare(saved: Mapping[str, Any], wanted: Mapping[str, Any], cast: bool, where: str) -> None:
    """Raises with everything that does not fit."""
    found: list[Mismatch] = []
    for name, leaf in wanted.items():
        if name not in saved:
            found.append(Mismatch(name, "missing", None, str(leaf.dtype)))
            continue
        array = saved[name]
        if array.shape != tuple(leaf.shape):
            found.append(Mismatch(name, "shape", str(array.shape), str(tuple(leaf.shape))))
        if array.dtype.name != str(leaf.dtype) and not cast:
            found.append(Mismatch(name, "dtype", array.dtype.name, str(leaf.dtype)))
    found += [
        Mismatch(name, "unexpected", array.dtype.name, None)
        for name, array in saved.items()
        if name not in wanted
    ]
    if found:
        raise StructureMismatch(found, where=where)


def _placed(array: Any, leaf: Any, name: str, shardings: Any) -> Any:
    """An array of a mapped file where it belongs, with memory of its own."""
    if isinstance(leaf, _Described):
        return np.array(array)
    array = _cast(array, _bits.dtype_named(str(leaf.dtype)), name)
    if isinstance(leaf, np.ndarray):
        return np.array(array)
    sharding: Any = shardings(name, leaf) if callable(shardings) else shardings
    if isinstance(sharding, jax.sharding.Mesh):
        sharding = jax.sharding.NamedSharding(sharding, jax.sharding.PartitionSpec())
    if sharding is None:
        sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return jax.numpy.array(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: np.array(array[index]))


def _cast(array: Any, dtype: np.dtype[Any], name: str) -> Any:
    """The array under another dtype; integers keep their values.

    Raises:
        StructureMismatch: an integer does not fit.
    """
    if array.dtype == dtype:
        return array
    cast = array.astype(dtype)
    if array.dtype.kind in "iu" and dtype.kind in "iu" and not np.array_equal(cast, array):
        raise StructureMismatch(
            [Mismatch(name, "dtype", f"{array.dtype} beyond {dtype}", str(dtype))]
        )
    return cast


def _as_in_torch(tree: Any) -> Any:
    """A state as ``state_dict`` has it: tied weights under all of their names, counters as int64."""
    if not isinstance(tree, dict):
        return tree
    state = {name: value for name, value in tree.items() if name != _modules.TIED}
    for first, names in tree.get(_modules.TIED, {}).items():
        state.update(dict.fromkeys(names, state[first]))
    for name, value in state.items():
        if str(name).endswith("num_batches_tracked") and isinstance(value, torch.Tensor):
            with _bits.plain_torch():
                state[name] = value.to(torch.int64)  # torchax makes int32 of it
    return state


def _tied_once(tree: Any) -> Any:
    """The tree of a file with tensors that are one there once; see ``_modules``."""
    if not isinstance(tree, dict):
        return tree
    state: dict[str, Any] = {}
    first_of: dict[Any, str] = {}
    tied: dict[str, dict[str, bool]] = {}
    for name, value in tree.items():
        key: Any = id(value)
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.numel():
            key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        first = first_of.setdefault(key, name)
        if first == name:
            state[name] = value
        else:
            tied.setdefault(first, {})[name] = True
    return state | {_modules.TIED: tied} if tied else state


def _named(tree: Any, prefix: str) -> Any:
    """(name, array) of every tensor in a tree, names joined with dots."""
    if isinstance(tree, Mapping):
        items: Any = tree.items()
    elif isinstance(tree, (list, tuple)):
        items = enumerate(tree)
    elif isinstance(tree, torch.Tensor):
        yield prefix.removesuffix("."), _bits.to_numpy(tree, prefix)
        return
    else:
        where = prefix.removesuffix(".")
        raise UnsupportedLeaf(
            f"{where}: safetensors holds arrays, not a {type(tree).__name__}: write .pt instead",
            leaf=where,
            type_name=type(tree).__name__,
        )
    for key, child in items:
        yield from _named(child, f"{prefix}{key}.")
