"""``.npz``: arrays as ``numpy.savez`` and ``numpy.savez_compressed`` write them, in and out."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Iterable
from functools import partial
from typing import IO, Any

import numpy as np

from ckpt_core._directory import placed
from ckpt_core._errors import CheckpointError, UnsupportedLeaf
from ckpt_core._options import Options
from ckpt_core._tree.leaves import LeafSpec
from ckpt_core.arguments import answering
from ckpt_core.convert._outgoing import NUMPY_DTYPES, Format, PathLike, Rules, new_file, outgoing
from ckpt_core.convert._source import Array, Slot, array_spec, each, parsing

_SUFFIX = ".npy"
_FORMAT = Format(
    "npz", NUMPY_DTYPES, "numpy has no such dtype: write safetensors, or leave them out with"
)


def opened(path: str, stack: contextlib.ExitStack) -> tuple[Any, Any]:
    """The arrays of a file, by name; reading one checks the archive's checksum."""
    # numpy leaves a file open that it has opened itself and cannot read
    stream = stack.enter_context(open(path, "rb"))  # noqa: SIM115
    tree: dict[str, Slot] = {}
    with parsing(path):
        archive: Any = stack.enter_context(np.load(stream, allow_pickle=False))
        read = each(partial(_read, archive, path))
        for member in archive.zip.namelist():
            where = f"{path}: {member}"
            if not member.endswith(_SUFFIX):
                raise UnsupportedLeaf(f"{where} is no array: leave it out of the file", leaf=where)
            with archive.zip.open(member) as head:
                tree[member.removesuffix(_SUFFIX)] = Slot(_spec(head, where), read, member)
    return tree, None


def _spec(stream: IO[bytes], where: str) -> LeafSpec:
    """What the header of an array says."""
    form: Any = np.lib.format
    version = form.read_magic(stream)
    read = form.read_array_header_1_0 if version == (1, 0) else form.read_array_header_2_0
    shape, _, dtype = read(stream)
    if dtype.hasobject:
        raise UnsupportedLeaf(
            f"{where}: it holds Python objects, and to make them would run code that the file names: save "
            "arrays of numbers only",
            leaf=where,
            type_name="object",
        )
    if dtype.kind == "V" and dtype.names is None:
        raise UnsupportedLeaf(
            f"{where}: numpy wrote {dtype.itemsize} bytes for each element and no name of their dtype, as it does for "
            "bfloat16 and 8-bit floats: write the file anew as safetensors, or as arrays of float32",
            leaf=where,
            type_name=str(dtype),
        )
    return array_spec(dtype.name, shape, where, numpy=True)


def _read(archive: Any, path: str, slot: Slot) -> Array:
    with parsing(path, f"{path}: {slot.place}"):
        return np.asarray(archive[slot.place], slot.spec.numpy_dtype, order="C")


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
    with (
        outgoing(checkpoint, _FORMAT, options, item, only, exclude, rules) as (plan, arrays),
        placed(where) as temporary,
        zipfile.ZipFile(temporary, "w") as archive,
    ):
        if cut := [one.name for one in plan if "\0" in one.name]:
            raise CheckpointError(
                f"{cut[0]!r}: an npz cuts names at zero bytes: rename it by rules="
            )
        for one, array in arrays:
            with archive.open(f"{one.name}{_SUFFIX}", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, array, allow_pickle=False)
    return [where]
