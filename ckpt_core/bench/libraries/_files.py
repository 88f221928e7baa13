"""Libraries that write one file, and the lower bound: plain bytes without a format."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ckpt_core.bench._machine import fsync_all
from ckpt_core.bench.libraries._base import FlatLibrary, Library, check_arrays


class Safetensors(FlatLibrary):
    """``safetensors.flax``: one file, nothing fsynced, loads to jax arrays."""

    modules = ("safetensors",)

    def of_leaf(self, leaf: Any) -> Any:
        return jax.numpy.asarray(leaf)

    def save(self, path: Path, state: Any) -> None:
        from safetensors.flax import save_file

        save_file(state, str(path))

    def load(self, path: Path, like: Any) -> Any:
        from safetensors.flax import load_file

        del like
        return jax.block_until_ready(load_file(str(path)))


class NumpySavez(FlatLibrary):
    """``numpy.savez``: one zip file without compression, nothing fsynced, loads to numpy."""

    def of_leaf(self, leaf: Any) -> Any:
        return np.asarray(leaf)

    def to_leaf(self, found: Any, like: Any) -> Any:
        return found.view(np.dtype(like.dtype))  # numpy loads bfloat16 as two untyped bytes

    def save(self, path: Path, state: Any) -> None:
        with path.open("wb") as file:  # given a name, numpy would append .npz
            np.savez(file, **state)

    def load(self, path: Path, like: Any) -> Any:
        del like
        with np.load(path) as archive:
            return {name: archive[name] for name in archive.files}


class Equinox(Library):
    """``equinox.tree_serialise_leaves``: one file of .npy after .npy, nothing fsynced."""

    modules = ("equinox",)

    def prepare(self, state: Any) -> Any:
        check_arrays(state)
        return state

    def save(self, path: Path, state: Any) -> None:
        import equinox

        with path.open("wb") as file:  # given a name, equinox would append .eqx
            equinox.tree_serialise_leaves(file, state)

    def load(self, path: Path, like: Any) -> Any:
        import equinox

        with path.open("rb") as file:
            return jax.block_until_ready(equinox.tree_deserialise_leaves(file, like))


class Floor(Library):
    """The lower bound: writes all bytes to one file with writev and fsync, and reads them back. The buffer to read into
    is touched before the clock starts, so that a load causes no page faults. A library that stores and returns the same
    bytes has more to do.
    """

    default_durability = "yes"
    skips_fsync = True

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._buffer = np.empty(0, np.uint8)

    def prepare(self, state: Any) -> Any:
        check_arrays(state)
        leaves = [np.ascontiguousarray(np.asarray(leaf)) for leaf in jax.tree.leaves(state)]
        self._buffer = np.ones(sum(leaf.nbytes for leaf in leaves), np.uint8)  # touches every page
        return [leaf.reshape(-1).view(np.uint8).data for leaf in leaves if leaf.nbytes]

    def save(self, path: Path, state: Any) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            for start in range(0, len(state), 1000):  # below the limit of one writev
                _write_all(descriptor, list(state[start : start + 1000]))
        finally:
            os.close(descriptor)
        if self.options.durable is not False:
            fsync_all(path)

    def load(self, path: Path, like: Any) -> Any:
        del like
        view, done = self._buffer.data, 0
        with path.open("rb", buffering=0) as file:
            while done < len(view):
                done += file.readinto(view[done:])
        return self._buffer

    def finish(self, loaded: Any, like: Any) -> Any:
        leaves: list[Any] = []
        start = 0
        for leaf in jax.tree.leaves(like):
            dtype = np.dtype(leaf.dtype)
            size = int(np.prod(leaf.shape, dtype=np.int64)) * dtype.itemsize
            leaves.append(loaded[start : start + size].view(dtype).reshape(leaf.shape))
            start += size
        return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _write_all(descriptor: int, views: list[memoryview]) -> None:
    while views:
        written = os.writev(descriptor, views)
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if views:
            views[0] = views[0][written:]
