"""Reads single tensors, and sets values on them without replacing the tensor object.

Tensors on the CPU become numpy arrays and back without a copy. numpy has no bfloat16 and no fp8, so those are viewed as
integers, and these as the dtypes of ml_dtypes. No value is ever converted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import jax
import ml_dtypes
import numpy as np
import torch
from torch.utils._mode_utils import no_dispatch

from ckpt_core import UnsupportedLeaf
from ckpt_torchax import _torchax


def read(tensor: Any, where: str) -> Any:
    """The value of a tensor: a jax array, a numpy array on its memory, or a shape for a meta tensor."""
    if _torchax.is_jax(tensor):
        return tensor.jax()
    if tensor.is_meta:
        dtype = jax.dtypes.canonicalize_dtype(numpy_dtype(tensor, where))
        return jax.ShapeDtypeStruct(tuple(tensor.shape), dtype)
    return to_numpy(tensor, where)


def read_live(tensor: Any, where: str) -> Any:
    """``read``, for a tensor that must still have its values: its array was not donated to a compiled step."""
    value = read(tensor, where)
    if isinstance(value, jax.Array) and value.is_deleted():
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
    """A writable copy, None for kinds torch does not copy. Torchax's array is shared: it is replaced, not written to."""
    if _torchax.is_jax(tensor):
        return _torchax.parameter_or_tensor(cast(Any, tensor).jax(), tensor)
    with plain_torch():
        try:
            made = tensor.detach().resolve_conj().resolve_neg().clone()
        except (RuntimeError, NotImplementedError, ValueError):
            return None
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)


def write(tensor: Any, value: Any) -> None:
    """Sets a value of the same shape and dtype on a tensor, which stays the same object."""
    if _torchax.is_tensor(tensor):
        tensor._elem = value
    elif _torchax.is_jax(tensor):
        tensor.update(value)
    else:
        made = from_numpy(np.asarray(value), "value")
        with plain_torch(), torch.no_grad():
            if 0 in tensor.stride() and tensor.numel() > 1:
                tensor.data = made  # an expanded tensor, whose elements share memory
            else:
                tensor.detach().copy_(made)


def is_of(value: Any, tensor: Any) -> bool:
    """Whether a value is the object that ``read`` returns for a tensor."""
    if _torchax.is_jax(tensor) or tensor.is_meta:
        return value is read(tensor, "tensor") or isinstance(value, jax.ShapeDtypeStruct)
    return isinstance(value, np.ndarray) and np.shares_memory(value, to_numpy(tensor, ""))


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
    """A tree of plain containers with tensors in place of arrays; for jax arrays torchax ones, unless ``like`` is a CPU tensor."""
    on_cpu = like is not None and not _torchax.is_tensor(like)

    def change(leaf: Any, where: str) -> Any:
        if isinstance(leaf, jax.Array) and not on_cpu:
            torchax = _torchax.require("for state that lies on JAX arrays")
            return torchax.tensor.Tensor(leaf, torchax.default_env())
        is_array = isinstance(leaf, (jax.Array, np.ndarray))
        return from_numpy(np.asarray(leaf), "value") if is_array else leaf

    return map_tree(change, tree)


Array = np.ndarray[Any, Any]


def dtype_named(name: str) -> np.dtype[Any]:
    """The numpy dtype of a name such as ``bfloat16``."""
    return np.dtype(getattr(ml_dtypes, name, name))


_NAMES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_NUMPY = {getattr(torch, name): dtype_named(name) for name in _NAMES}
_WIDENED: dict[Any, Any] = {
    **{dtype_named(name): np.int8 for name in ("int2", "int4")},
    **{dtype_named(name): np.uint8 for name in ("uint2", "uint4")},
}
_TORCH = {dtype: torch_dtype for torch_dtype, dtype in _NUMPY.items()}


@contextmanager
def plain_torch() -> Generator[None]:
    """Inside the block operations on CPU tensors are torch's own, even if torchax is enabled."""
    with torch._C.DisableTorchFunction(), no_dispatch():  # pyright: ignore
        yield


def numpy_dtype(tensor: torch.Tensor, where: str) -> np.dtype[Any]:
    """The dtype that a checkpoint stores a tensor in; UnsupportedLeaf if numpy and ml_dtypes have none."""
    found = _NUMPY.get(tensor.dtype)
    if found is None:
        raise _unsupported(tensor, where, f"nothing outside of torch has its dtype {tensor.dtype}")
    return found


def to_numpy(tensor: torch.Tensor, where: str) -> Array:
    """A numpy array on the memory of a CPU tensor, which must be plain and strided, of a known dtype."""
    _refuse_unusual(tensor, where)
    dtype = numpy_dtype(tensor, where)
    with plain_torch():
        plain = tensor.detach().resolve_conj().resolve_neg()
        if dtype.isbuiltin == 1:
            return plain.numpy()
        return plain.view({1: torch.uint8, 2: torch.int16}[dtype.itemsize]).numpy().view(dtype)


def from_numpy(array: Array, where: str) -> torch.Tensor:
    """A CPU tensor on the memory of a numpy array, or on a copy; of 8 bits for 4-bit and 2-bit integers, which torch lacks."""
    if array.dtype in _WIDENED:
        array = array.astype(_WIDENED[array.dtype])
    dtype = _TORCH.get(array.dtype.newbyteorder("="))
    if dtype is None:
        raise UnsupportedLeaf(
            f"{where}: torch has no dtype for {array.dtype.name}: load it as numpy with "
            "ckpt_core.load(path, as_numpy=True)",
            leaf=where,
            type_name=array.dtype.name,
        )
    if not (array.flags.writeable and array.dtype.isnative and all(s >= 0 for s in array.strides)):
        array = array.astype(array.dtype.newbyteorder("="), order="C", copy=True)
    with plain_torch():
        if array.dtype.isbuiltin == 1:
            return torch.from_numpy(array)
        return torch.from_numpy(array.view(f"i{array.itemsize}")).view(dtype)


def _refuse_unusual(tensor: torch.Tensor, where: str) -> None:
    """Refuses everything but ordinary CPU tensors; the error says why and what to save instead."""
    cls: Any = type(tensor)
    plain: Any = torch.Tensor
    roots = {base.__module__.partition(".")[0] for base in cls.__mro__}
    device = tensor.device.type
    why = None
    if device == "tpu" or roots & {"torch_tpu", "torchtpu"}:
        why = "TorchTPU tensors are not supported: use torchax, or save tensor.cpu()"
    elif torch.nn.parameter.is_lazy(tensor):
        why = "it is not initialized: run the lazy module once"
    elif tensor.is_nested:
        why = "it is nested: save its parts"
    elif tensor.layout != torch.strided:
        why = f"its layout is {tensor.layout}: save tensor.to_dense()"
    elif tensor.is_quantized:
        why = "it is quantized: save int_repr(), scale and zero point"
    elif device != "cpu":
        why = f"it lies on {device}: save tensor.cpu()"
    elif cls.__torch_dispatch__ is not plain.__torch_dispatch__:
        why = "it is a wrapper, with no memory of its own to save"
    if why is not None:
        raise _unsupported(tensor, where, why)


def _unsupported(tensor: torch.Tensor, where: str, why: str) -> UnsupportedLeaf:
    name = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    return UnsupportedLeaf(f"{where}: cannot save a {name}: {why}", leaf=where, type_name=name)
