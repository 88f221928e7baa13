"""Writes ``.pt`` files that ``torch.load`` reads, as a stream, without torch."""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterable, Sequence

from ckpt_core._directory import place
from ckpt_core._format.rules_back import Export
from ckpt_core._options import Options
from ckpt_core._tree.leaves import dtype_from_name
from ckpt_core.arguments import answering
from ckpt_core.convert._outgoing import (
    Arrays,
    Choice,
    Format,
    PathLike,
    Rules,
    new_file,
    outgoing,
    pieces_of,
)
from ckpt_core.convert._source import elements
from ckpt_core.convert._torch_pickle import DTYPES, OTHER_DTYPES
from ckpt_core.convert._zips import zip_pieces

_STORAGES = {dtype: f"{name}Storage".split(".") for name, dtype in DTYPES.items()}
_FORMAT = Format("torch", frozenset({*_STORAGES, *OTHER_DTYPES}))


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

    Streamed, as ``export_safetensors``, whose arguments it has; torch is not needed.

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
    with outgoing(checkpoint, _FORMAT, Choice(item, only, exclude, rules), options) as found:
        place(where, zip_pieces(_members(found.plan, found.arrays)))
    return [where]


def _members(
    plan: Sequence[Export], arrays: Arrays
) -> Generator[tuple[str, int, Iterable[bytes | memoryview]]]:
    """The files of the archive, as ``torch.save`` names them."""
    described = _pickled(plan)
    yield "archive/data.pkl", len(described), [described]
    yield "archive/byteorder", 6, [b"little"]
    for number, (_, array) in enumerate(arrays):
        yield f"archive/data/{number}", array.nbytes, pieces_of(array)
    yield "archive/version", 2, [b"3\n"]


def _pickled(plan: Sequence[Export]) -> bytes:
    """The pickle of the dict, written by hand, as its values are not in memory."""
    entries = b"".join(_text(one.name) + _tensor(one, number) for number, one in enumerate(plan))
    return b"\x80\x02}(" + entries + b"u."


def _tensor(one: Export, number: int) -> bytes:
    count, strides, step = elements(one.shape), list[int](), 1
    for size in reversed(one.shape):
        strides.insert(0, step)
        step *= max(size, 1)
    typed = one.dtype in _STORAGES
    storage = _STORAGES[one.dtype] if typed else ("torch.storage", "UntypedStorage")
    size = count if typed else count * dtype_from_name(one.dtype).itemsize
    pid = [_text("storage"), _name(*storage), _text(str(number)), _text("cpu"), _number(size)]
    parts = [
        b"(" + b"".join(pid) + b"tQ",
        _number(0),
        b"(" + b"".join(map(_number, one.shape)) + b"t",
        b"(" + b"".join(map(_number, strides)) + b"t",
        b"\x89",  # requires_grad: False
        _name("collections", "OrderedDict") + b")R",  # hooks
    ]
    if not typed:
        parts.append(_name("torch", one.dtype))
    function = _name("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3")
    return function + b"(" + b"".join(parts) + b"tR"


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _name(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _number(value: int) -> bytes:
    if value < 2**31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data
