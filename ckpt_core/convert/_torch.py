"""``.pt``: what ``torch.save`` writes, in and out."""

from __future__ import annotations

import contextlib
import re
import zipfile
from collections.abc import Generator, Iterable
from typing import IO, Any

import numpy as np

from ckpt_core._directory import placed
from ckpt_core._errors import CheckpointCorrupt, UnsupportedLeaf
from ckpt_core._options import Options
from ckpt_core._tree.leaves import dtype_from_name, to_host_array
from ckpt_core.arguments import answering
from ckpt_core.convert._outgoing import (
    NUMPY_DTYPES,
    Choice,
    Format,
    PathLike,
    Rules,
    new_file,
    outgoing,
)
from ckpt_core.convert._source import Array, Slot, array_spec, each, library, parsing, with_slots

_FLOAT8 = {f"float8_{kind}" for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")}
_FORMAT = Format("torch", NUMPY_DTYPES | {"bfloat16"} | _FLOAT8)


@contextlib.contextmanager
def opened(path: str) -> Generator[tuple[Any, Any]]:
    """What ``torch.save`` wrote into a file: tensors, numbers and text in plain containers."""
    yield loaded(path, path, mmap=zipfile.is_zipfile(path)), None


def loaded(file: str | IO[bytes], where: str, **how: Any) -> Any:
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
    return Slot(array_spec(dtype, tuple(value.shape), where), each(values_of), (torch, value))


def values_of(slot: Slot) -> Array:
    """The values of a slot of ``loaded``."""
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
        outgoing(checkpoint, _FORMAT, Choice(item, only, exclude, rules), options) as (_, arrays),
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
