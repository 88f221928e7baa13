"""The ``.npy`` format: header and values of one array. It is what npz is made of."""

from __future__ import annotations

import tokenize
from typing import IO, Any, NamedTuple

import numpy as np

from ckpt_core._errors import CheckpointCorrupt, UnsupportedLeaf
from ckpt_core._tree.leaves import LeafSpec, leaf_spec
from ckpt_core.convert._source import Array, array_spec, empty, read_into

_MOST_HEADER_BYTES = 10_000
_NO_HEADER = (ValueError, KeyError, TypeError, SyntaxError, RecursionError, tokenize.TokenError)


class Npy(NamedTuple):
    """The header of an array; ``fortran``: its first dimension is the innermost one in the file."""

    spec: LeafSpec
    big_endian: bool
    fortran: bool

    def read(self, stream: IO[bytes], where: str, most_bytes: int) -> Array:
        """The values, which follow the header at the stream's position; at most ``most_bytes`` can follow."""
        shape = self.spec.shape[::-1] if self.fortran else self.spec.shape
        found = empty(leaf_spec("numpy", self.spec.dtype, shape), where, most_bytes)
        read_into(stream, found, where)
        if self.big_endian:
            found = found.byteswap(inplace=True)
        return found.T.copy(order="C") if self.fortran else found  # of no dimensions too


def read_header(stream: IO[bytes], where: str) -> Npy:
    """The header of an array."""
    form: Any = np.lib.format
    try:
        version = form.read_magic(stream)
        read = {(1, 0): form.read_array_header_1_0, (2, 0): form.read_array_header_2_0}[version]
        shape, fortran, dtype = read(stream, max_header_size=_MOST_HEADER_BYTES)
    except _NO_HEADER as error:
        raise CheckpointCorrupt(
            f"{where}: no array as numpy writes it, or cut short: {error}", leaf=where
        ) from error
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
    spec = array_spec(dtype.name, shape, where, numpy=True)
    return Npy(spec, not dtype.isnative, fortran)
