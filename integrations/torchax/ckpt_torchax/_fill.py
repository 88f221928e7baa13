"""Fills modules from weights files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch

from ckpt_core import Mismatch, StructureMismatch
from ckpt_torchax import _bits, _files, _modules
from ckpt_torchax._dtypes import dtype_named

PathLike = str | os.PathLike[str]


def fill_from_file(path: PathLike, module: Any, shardings: Any, cast: bool) -> None:
    """Sets a module from a weights file, each tensor on its sharding."""
    tree = _files.read(path)
    if not isinstance(tree, Mapping):
        raise _no_state_dict(f"{path} holds a {type(tree).__name__}")
    saved = {str(name): _array(value, str(name), path) for name, value in tree.items()}
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
    raise _no_state_dict(f"{path} holds a {type(value).__name__} under {name!r}")


def _no_state_dict(found: str) -> TypeError:
    return TypeError(
        f"{found}, so it is no state_dict: make a checkpoint of it with ckpt_torchax.import_file(file, path), and load "
        "what is wanted from that with rename="
    )


class _Described:
    """Describes an array of a file to ``wanted``, like a leaf of a checkpoint."""

    kind = "numpy"

    def __init__(self, array: Any) -> None:
        self.shape = array.shape
        self.dtype = array.dtype.name


def _compare(saved: Mapping[str, Any], wanted: Mapping[str, Any], cast: bool, where: str) -> None:
    """Raises if anything does not fit; the error lists all differences."""
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
    """Copies an array of a mapped file to its sharding."""
    if isinstance(leaf, _Described):
        return np.array(array)
    array = _cast(array, dtype_named(str(leaf.dtype)), name)
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
    """The array converted to another dtype; integers must keep their values, and NaN is none."""
    if array.dtype == dtype:
        return array
    whole = array.dtype.kind in "iu"
    with np.errstate(all="ignore"):
        cast = array.astype(dtype)
        if whole:
            lost = (cast.astype(array.dtype) != array) | ((cast < 0) != (array < 0))
        elif dtype.kind in "iu" and array.dtype.kind != "b":
            limits, cut = np.iinfo(dtype), np.trunc(array.astype(np.float64))
            lost = ~((cut >= float(limits.min)) & (cut < float(int(limits.max) + 1)))
        else:
            return cast
    if lost.any():
        what = f"{array.dtype}, of which {lost.sum():,} do not fit, such as {array[lost].flat[0]}"
        raise StructureMismatch([Mismatch(name, "dtype", what, str(dtype))])
    return cast
