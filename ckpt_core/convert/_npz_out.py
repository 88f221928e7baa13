"""Writes ``.npz`` files, as a stream."""

from __future__ import annotations

import io
from collections.abc import Generator, Iterable
from typing import Any

import numpy as np

from ckpt_core._directory import place
from ckpt_core._errors import CheckpointError
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
from ckpt_core.convert._zips import zip_pieces

_MOST_NAME_BYTES = 60_000
_FORMAT = Format(
    "npz",
    frozenset(
        name
        for name in (
            *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
            *("float16", "float32", "float64", "complex64", "complex128"),
        )
    ),
    "numpy has no such dtype: write safetensors, or leave them out with",
)


@answering
def export_npz(
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
    """The file that was written: arrays by name, which ``numpy.load`` reads; not compressed.

    Streamed, as ``export_safetensors``, whose arguments it has.

    Args:
        checkpoint: path or URL of a checkpoint.
        target: the file, such as ``model.npz``.
        item, only, exclude, rules, options: as for ``export_safetensors``.

    Raises:
        CheckpointError: numpy lacks a dtype, such as bfloat16.
        CheckpointNotFound, CheckpointCorrupt, CheckpointExists, StructureMismatch: as ``export_safetensors``.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> ckpt.save(f"{folder}/one", {"w": jnp.ones(3)})
        >>> [path] = ckpt.convert.export_npz(f"{folder}/one", f"{folder}/model.npz")
    """
    where = new_file(target)
    with outgoing(checkpoint, _FORMAT, Choice(item, only, exclude, rules), options) as found:
        _refuse_names([one.name for one in found.plan])
        place(where, zip_pieces(_members(found.arrays)))
    return [where]


def _refuse_names(names: Iterable[str]) -> None:
    """Names that a zip archive would cut short, so that two might become one."""
    for name in names:
        if "\0" in name or len(name.encode()) > _MOST_NAME_BYTES:
            raise CheckpointError(
                f"{name[:80]!r} cannot be the name of an array in an npz: it holds a zero byte, or is longer than "
                f"{_MOST_NAME_BYTES} bytes: rename it with rules=, or write safetensors"
            )


def _members(arrays: Arrays) -> Generator[tuple[str, int, Iterable[bytes | memoryview]]]:
    for one, array in arrays:
        head = _head(one)
        yield f"{one.name}.npy", len(head) + array.nbytes, _pieces(head, array)


def _pieces(head: bytes, array: Any) -> Generator[bytes | memoryview]:
    yield head
    yield from pieces_of(array)


def _head(one: Export) -> bytes:
    stream = io.BytesIO()
    described = {
        "descr": np.lib.format.dtype_to_descr(dtype_from_name(one.dtype)),
        "fortran_order": False,
        "shape": one.shape,
    }
    np.lib.format.write_array_header_1_0(stream, described)
    return stream.getvalue()
