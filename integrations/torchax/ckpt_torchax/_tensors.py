"""Reads single tensors, and sets values on them without replacing the tensor object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import numpy as np
import torch

from ckpt_core import UnsupportedLeaf
from ckpt_torchax import _bits, _torchax


def read(tensor: Any, where: str) -> Any:
    """The value of a tensor: a jax array, a numpy array on its memory, or a shape for a meta tensor."""
    if _torchax.is_jax(tensor):
        return tensor.jax()
    if tensor.is_meta:
        return _abstract(tensor, where)
    return _bits.to_numpy(tensor, where)


def read_live(tensor: Any, where: str) -> Any:
    """``read``, for a tensor that must still have its values: its array was not donated to a compiled step."""
    if not _torchax.is_jax(tensor):
        return read(tensor, where)
    value = tensor.jax()
    if value.is_deleted():
        raise UnsupportedLeaf(
            f"{where}: its array was donated to a compiled step, so this tensor is dead; the values are in what "
            "the step returned: pass that instead, such as model={**weights, **buffers}",
            leaf=where,
            type_name=f"{type(tensor).__module__}.{type(tensor).__qualname__}",
        )
    return value


def read_shape(tensor: Any, where: str) -> Any:
    """``read``, or shape, dtype and sharding of a tensor whose array was donated."""
    value = read(tensor, where)
    if isinstance(value, jax.Array) and value.is_deleted():
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)
    return value


def copied(tensor: torch.Tensor) -> torch.Tensor | None:
    """A writable tensor of the same kind; None for kinds that torch does not copy. A torchax tensor's array is shared,
    because it is replaced and never written to.
    """
    if _torchax.is_jax(tensor):
        return _torchax.parameter_or_tensor(cast(Any, tensor).jax(), tensor)
    with _bits.plain_torch():
        try:
            made = tensor.detach().resolve_conj().resolve_neg().clone()
        except (RuntimeError, NotImplementedError, ValueError):
            return None
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)


def _abstract(tensor: torch.Tensor, where: str) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the array for a tensor on the meta device."""
    dtype = jax.dtypes.canonicalize_dtype(_bits.numpy_dtype(tensor, where))
    return jax.ShapeDtypeStruct(tuple(tensor.shape), dtype)


def write(tensor: Any, value: Any) -> None:
    """Sets a value of the same shape and dtype on a tensor, which stays the same object."""
    if _torchax.is_view(tensor):
        tensor.update(value)
    elif _torchax.is_tensor(tensor):
        tensor._elem = value
    else:
        _write_cpu(tensor, _bits.from_numpy(np.asarray(value), "value"))


def is_of(value: Any, tensor: Any) -> bool:
    """Whether a value is the object that ``read`` returns for a tensor."""
    if _torchax.is_jax(tensor) or tensor.is_meta:
        return value is read(tensor, "tensor") or isinstance(value, jax.ShapeDtypeStruct)
    return isinstance(value, np.ndarray) and np.shares_memory(value, _bits.to_numpy(tensor, ""))


def _write_cpu(tensor: torch.Tensor, value: torch.Tensor) -> None:
    with _bits.plain_torch(), torch.no_grad():
        if 0 in tensor.stride() and tensor.numel() > 1:
            tensor.data = value  # an expanded tensor, whose elements share memory
        else:
            tensor.detach().copy_(value)


def as_tensor(value: Any, like: Any = None) -> Any:
    """A new tensor from an array; from a jax array a torchax one, unless ``like`` is a CPU tensor."""
    on_cpu = like is not None and not _torchax.is_tensor(like)
    if isinstance(value, jax.Array) and not on_cpu:
        torchax = _torchax.require("for state that lies on JAX arrays")
        return torchax.tensor.Tensor(value, torchax.default_env())
    return _bits.from_numpy(np.asarray(value), "value")


def map_tree(change: Callable[[Any, str], Any], tree: Any, where: str = "") -> Any:
    """A tree of plain containers with ``change(leaf, where)`` for every leaf."""
    if isinstance(tree, Mapping):
        entries = cast("Mapping[Any, Any]", tree)
        return {key: map_tree(change, item, f"{where}/{key}") for key, item in entries.items()}
    if type(tree) is list or type(tree) is tuple:
        items = cast("list[Any] | tuple[Any, ...]", tree)
        changed = [map_tree(change, item, f"{where}/{i}") for i, item in enumerate(items)]
        return changed if type(tree) is list else tuple(changed)
    return change(tree, where.removeprefix("/"))


def arrays_of(tree: Any) -> Any:
    """A tree of plain containers with arrays in place of tensors."""
    return map_tree(
        lambda leaf, where: read_live(leaf, where) if isinstance(leaf, torch.Tensor) else leaf, tree
    )


def tensors_of(tree: Any, like: Any = None) -> Any:
    """A tree of plain containers with tensors in place of arrays."""

    def change(leaf: Any, where: str) -> Any:
        return as_tensor(leaf, like) if isinstance(leaf, (jax.Array, np.ndarray)) else leaf

    return map_tree(change, tree)
