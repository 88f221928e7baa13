"""What a file of another format holds: a tree with a ``Slot`` for each array, until it is read."""

from __future__ import annotations

import contextlib
import errno
import importlib
import itertools
import operator
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from ckpt_core._errors import CheckpointCorrupt, CheckpointError, UnsupportedLeaf
from ckpt_core._tree import Path
from ckpt_core._tree.leaves import LeafSpec, describe, dtype_from_name, leaf_spec

Array = np.ndarray[Any, Any]
_SYSTEM_ERROR = re.compile(r"errno = (\d+), error message")
"""In an error of h5py, of any class, for what the system did not let it read; EINVAL is of a position that no file has."""
_WIDE = frozenset({"int64", "uint64", "float64", "complex128"})


class Slot:
    """An array that is not read yet; no dataclass, which would be a tree. ``read`` gives the arrays of slots, and alone understands
    ``place``; ``refused`` is the error to raise unless the leaf is left out.
    """

    def __init__(
        self,
        spec: LeafSpec,
        read: Callable[[Sequence[Slot]], Iterator[Array]],
        place: Any = None,
        refused: CheckpointError | None = None,
    ) -> None:
        self.spec, self.read, self.place, self.refused = spec, read, place, refused


def each(read: Callable[[Slot], Array]) -> Callable[[Sequence[Slot]], Iterator[Array]]:
    """What reads slots one by one."""
    return lambda slots: map(read, slots)


def arrays_of(slots: Iterable[Slot]) -> Iterator[Array]:
    """The stored arrays of slots, in order; those of a kind that follow each other are read together."""
    for read, alike in itertools.groupby(slots, operator.attrgetter("read")):
        yield from read(list(alike))


def spec_of(path: Path, leaf: Any) -> LeafSpec:
    """What a leaf of a source is: a slot, or a value that is no array."""
    return leaf.spec if isinstance(leaf, Slot) else describe(leaf, path)


def with_slots(value: Any, slot: Callable[[Any, str], Slot | None], where: str) -> Any:
    """A tree of plain dicts, lists and tuples; ``slot(value, where)`` is None for what is no array."""
    found = slot(value, where)
    if found is not None or value is None:
        return found
    if isinstance(value, dict):
        named = cast("dict[Any, Any]", value)
        return {key: with_slots(part, slot, f"{where}/{key}") for key, part in named.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        parts = cast("Sequence[Any]", value)
        made = (with_slots(part, slot, f"{where}/{n}") for n, part in enumerate(parts))
        return list(made) if isinstance(value, list) else tuple(made)
    if type(value) in (bool, int, float, complex, str, bytes):
        return value
    kind = type(value).__name__
    raise UnsupportedLeaf(
        f"{where} is a {kind}: a checkpoint holds arrays, numbers and text",
        leaf=where,
        type_name=kind,
    )


def library(name: str, path: str) -> Any:
    """A module that not every user has; the error says how to get it."""
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CheckpointError(
            f"{path}: this format needs the package {package}: pip install {package} ({error})"
        ) from error


@contextlib.contextmanager
def parsing(path: str, where: str | None = None) -> Generator[None]:
    """What a library says of the bytes of a file is damage, but not what the system says."""
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        refused = _SYSTEM_ERROR.search(str(error))
        if refused and (number := int(refused[1])) not in (0, errno.EINVAL):
            raise OSError(number, os.strerror(number), where or path) from error
        said = (str(error) or repr(error)).partition("\n")[0]
        raise CheckpointCorrupt(
            f"{where or path}: damaged or cut short: {said}: get the file anew", file=path
        ) from error


def array_spec(dtype: str, shape: Sequence[int], where: str, *, numpy: bool = False) -> LeafSpec:
    """The spec of an array in a file: one of jax, unless ``numpy`` or jax holds no such numbers by default."""
    try:
        dtype_from_name(dtype)
    except ValueError:
        raise UnsupportedLeaf(
            f"{where}: a checkpoint holds no {dtype}: convert it to numbers, or leave it out of the file",
            leaf=where,
            type_name=dtype,
        ) from None
    kind = "numpy" if numpy or dtype in _WIDE else "jax"
    return leaf_spec(kind, dtype, tuple(shape))
