"""Converts CPU tensors to numpy arrays and back, without a copy, for every dtype that both have.

numpy has no bfloat16 and no fp8, so such tensors are viewed as integers of the same width, and
these as the dtypes of ml_dtypes. No value is ever converted.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.utils._mode_utils import no_dispatch

from ckpt_core import UnsupportedLeaf

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
    """A CPU tensor on the memory of a numpy array, or on a copy if torch cannot share the memory. 4-bit and 2-bit
    integers, for which torch has no arithmetic, become 8-bit ones.
    """
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
