"""The measured libraries behind one interface: ckpt, others, and the lower bound of the disk.

To add a library, write a subclass of ``Library``, which imports it when it is made, and a line in ``LIBRARIES``.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ckpt_core.bench._config import nearest
from ckpt_core.bench._data import names_of
from ckpt_core.bench._machine import MIB, fsync_all
from ckpt_core.bench._measure import Skipped


class Library:
    """One way to save and load. Only ``save``, ``start_save``, its result and ``load`` are timed.

    Attributes:
        module: the name of the module that is measured, which is ``api``.
        default_durability: what is durable when a save with default settings returns:
            ``yes``, ``data files`` (not the metadata or the directories), or ``no``.
        skips_fsync: whether it has a setting to leave the fsync out.
        in_background: whether it can save in the background.
        sharded: whether it can save arrays that several devices or processes hold, and leaves that are no arrays.
        broadcasts: whether one process can read for all.
        options: those of ``SaveLoad``, in which None leaves a setting to the library.
    """

    module: str
    default_durability = "no"
    skips_fsync = False
    in_background = False
    sharded = False
    broadcasts = False

    def __init__(self, options: Any) -> None:
        self.options = options
        self.api: Any = importlib.import_module(self.module)

    @property
    def background(self) -> bool:
        """Whether it saves in the background with these settings."""
        return self.in_background and self.options.async_enabled is not False

    @property
    def durability(self) -> str:
        """What is durable when a save returns, as text for the tables."""
        if self.options.durable is None:
            return self.default_durability
        if not self.options.durable:
            return "no"
        return "yes (fsync added)" if self.adds_fsync else "yes"

    @property
    def adds_fsync(self) -> bool:
        """Whether the benchmark must fsync the files, because the library does not."""
        return self.options.durable is True and self.default_durability != "yes"

    def prepare(self, state: Any) -> Any:
        """The tree in the form that users of this library save; not timed."""
        for leaf in () if self.sharded else jax.tree.leaves(state):
            if not hasattr(leaf, "dtype"):
                raise Skipped(f"saves arrays only, not a {type(leaf).__name__}")
        return state

    def save(self, path: Path, state: Any) -> None:
        """Saves to a path that does not exist in an existing directory."""
        raise NotImplementedError

    def start_save(self, path: Path, state: Any) -> Callable[[], object]:
        """Starts a save in the background and returns a function that waits for its end."""
        raise NotImplementedError

    def load(self, path: Path, like: Any) -> Any:
        """Loads the tree; ``like`` is the abstract tree with its shardings."""
        raise NotImplementedError

    def finish(self, loaded: Any, like: Any) -> Any:
        """The loaded values as a tree like the one that was saved; not timed."""
        return loaded


class Ckpt(Library):
    """ckpt: durable and verified by default."""

    module = "ckpt_core"
    default_durability = "yes"
    skips_fsync = True
    in_background = True
    sharded = True
    broadcasts = True

    @property
    def _options(self) -> Any:
        durable, broadcast = self.options.durable, self.options.use_load_and_broadcast
        return self.api.Options(durable=durable is not False, broadcast=broadcast)

    def save(self, path: Path, state: Any) -> None:
        self.api.save(path, state, options=self._options)

    def start_save(self, path: Path, state: Any) -> Callable[[], object]:
        return self.api.save_async(path, state, options=self._options).result

    def load(self, path: Path, like: Any) -> Any:
        return self.api.load(path, like, options=self._options)


class OrbaxV1(Library):
    """``orbax.checkpoint.v1``: compresses with zstd by default; fsyncs data files only."""

    module = "orbax.checkpoint"
    default_durability = "data files"
    in_background = True
    sharded = True
    broadcasts = True
    use_compression = True

    def _context(self) -> Any:
        context = self.api.v1.Context()
        context.array.saving.use_compression = self.use_compression
        context.array.loading.use_load_and_broadcast = self.options.use_load_and_broadcast
        return context

    def save(self, path: Path, state: Any) -> None:
        with self._context():
            self.api.v1.save(str(path), state)

    def start_save(self, path: Path, state: Any) -> Callable[[], object]:
        with self._context():
            return self.api.v1.save_async(str(path), state).result

    def load(self, path: Path, like: Any) -> Any:
        with self._context():
            return self.api.v1.load(str(path), like)


class OrbaxV1Uncompressed(OrbaxV1):
    """``orbax.checkpoint.v1`` without compression, since weights hardly shrink."""

    use_compression = False


class OrbaxV0Manager(Library):
    """``CheckpointManager`` with ``StandardSave`` and ``StandardRestore``, one step."""

    module = "orbax.checkpoint"
    default_durability = "data files"
    in_background = True
    sharded = True

    def manager(self, path: Path, *, background: bool, max_to_keep: int | None = None) -> Any:
        """A manager of steps in a directory."""
        options = self.api.CheckpointManagerOptions(
            enable_async_checkpointing=background, max_to_keep=max_to_keep
        )
        return self.api.CheckpointManager(path, options=options)

    def save(self, path: Path, state: Any) -> None:
        with self.manager(path, background=False) as manager:
            manager.save(0, args=self.api.args.StandardSave(state))

    def start_save(self, path: Path, state: Any) -> Callable[[], object]:
        manager = self.manager(path, background=True)
        manager.save(0, args=self.api.args.StandardSave(state))
        return manager.close  # waits

    def load(self, path: Path, like: Any) -> Any:
        with self.manager(path, background=False) as manager:
            return manager.restore(0, args=self.api.args.StandardRestore(like))


class _Flat(Library):
    """One that saves a mapping of names to arrays of its own kind."""

    def of_leaf(self, leaf: Any) -> Any:
        """A leaf as this library saves it; not timed."""
        return np.asarray(leaf)

    def to_leaf(self, found: Any, like: Any) -> Any:
        """A loaded array as one that can be compared; not timed."""
        return found

    def prepare(self, state: Any) -> Any:
        leaves = map(self.of_leaf, jax.tree.leaves(super().prepare(state)))
        return dict(zip(names_of(state), leaves, strict=True))

    def finish(self, loaded: Any, like: Any) -> Any:
        pairs = zip(names_of(like), jax.tree.leaves(like), strict=True)
        leaves = [self.to_leaf(loaded[name], leaf) for name, leaf in pairs]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)


class TorchSave(_Flat):
    """``torch.save``, of the same values as CPU tensors: one zip file of pickles, nothing fsynced."""

    module = "torch"

    def _dtype(self, leaf: Any) -> Any:
        return getattr(self.api, str(np.dtype(leaf.dtype)))

    def of_leaf(self, leaf: Any) -> Any:
        # Through bytes, because torch does not accept numpy's bfloat16.
        flat = np.ascontiguousarray(np.asarray(leaf)).reshape(-1).view(np.uint8)
        return self.api.from_numpy(flat.copy()).view(self._dtype(leaf)).reshape(leaf.shape)

    def to_leaf(self, found: Any, like: Any) -> Any:
        raw = found.contiguous().reshape(-1).view(self.api.uint8).numpy()
        return raw.view(np.dtype(like.dtype)).reshape(like.shape)

    def save(self, path: Path, state: Any) -> None:
        self.api.save(state, path)

    def load(self, path: Path, like: Any) -> Any:
        return self.api.load(path, weights_only=True)


class TorchDcp(TorchSave):
    """``torch.distributed.checkpoint`` with one process: fsyncs data files, not directories."""

    default_durability = "data files"
    skips_fsync = True
    in_background = True

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._dcp: Any = importlib.import_module("torch.distributed.checkpoint")
        # about the missing process group; the thread of a save in the background warns, too
        warnings.filterwarnings("ignore", message=".*single process.*")

    def _settings(self, path: Path) -> dict[str, Any]:
        sync_files = self.options.durable is not False
        writer = self._dcp.FileSystemWriter(path, sync_files=sync_files)
        return {"storage_writer": writer, "no_dist": True}

    def save(self, path: Path, state: Any) -> None:
        self._dcp.save(state, **self._settings(path))

    def start_save(self, path: Path, state: Any) -> Callable[[], object]:
        return self._dcp.async_save(state, **self._settings(path)).result

    def load(self, path: Path, like: Any) -> Any:
        # It loads in place, so allocating the tensors is part of the cost of loading.
        target = {
            name: self.api.empty(leaf.shape, dtype=self._dtype(leaf))
            for name, leaf in zip(names_of(like), jax.tree.leaves(like), strict=True)
        }
        self._dcp.load(target, checkpoint_id=path, no_dist=True)
        return target


class Safetensors(_Flat):
    """``safetensors.flax``: one file, nothing fsynced, loads to jax arrays."""

    module = "safetensors.flax"

    def of_leaf(self, leaf: Any) -> Any:
        return jax.numpy.asarray(leaf)

    def save(self, path: Path, state: Any) -> None:
        self.api.save_file(state, str(path))

    def load(self, path: Path, like: Any) -> Any:
        return jax.block_until_ready(self.api.load_file(str(path)))


class NumpySavez(_Flat):
    """``numpy.savez``: one zip file without compression, nothing fsynced, loads to numpy."""

    module = "numpy"

    def to_leaf(self, found: Any, like: Any) -> Any:
        return found.view(np.dtype(like.dtype))  # numpy loads bfloat16 as two untyped bytes

    def save(self, path: Path, state: Any) -> None:
        with path.open("wb") as file:  # given a name, numpy would append .npz
            self.api.savez(file, **state)

    def load(self, path: Path, like: Any) -> Any:
        with self.api.load(path) as archive:
            return dict(archive)


class Equinox(Library):
    """``equinox.tree_serialise_leaves``: one file of .npy after .npy, nothing fsynced."""

    module = "equinox"

    def save(self, path: Path, state: Any) -> None:
        with path.open("wb") as file:  # given a name, equinox would append .eqx
            self.api.tree_serialise_leaves(file, state)

    def load(self, path: Path, like: Any) -> Any:
        with path.open("rb") as file:
            return jax.block_until_ready(self.api.tree_deserialise_leaves(file, like))


class Floor(Library):
    """The lower bound: writes all bytes to one file, with fsync, and reads them into memory that was touched before."""

    module = "os"
    default_durability = "yes"
    skips_fsync = True

    def prepare(self, state: Any) -> Any:
        found = jax.tree.leaves(super().prepare(state))
        leaves = [np.ascontiguousarray(np.asarray(leaf)) for leaf in found]
        self._buffer = np.ones(sum(leaf.nbytes for leaf in leaves), np.uint8)  # touches every page
        return [leaf.reshape(-1).view(np.uint8).data for leaf in leaves if leaf.nbytes]

    def save(self, path: Path, state: Any) -> None:
        with path.open("xb", buffering=MIB) as file:  # one write for many small leaves
            file.writelines(state)
        if self.options.durable is not False:
            fsync_all(path)

    def load(self, path: Path, like: Any) -> Any:
        with path.open("rb") as file:
            file.readinto(self._buffer.data)
        return self._buffer

    def finish(self, loaded: Any, like: Any) -> Any:
        leaves, start = jax.tree.leaves(like), 0
        for index, leaf in enumerate(leaves):
            dtype = np.dtype(leaf.dtype)
            end = start + leaf.size * dtype.itemsize
            leaves[index] = loaded[start:end].view(dtype).reshape(leaf.shape)
            start = end
        return jax.tree.unflatten(jax.tree.structure(like), leaves)


LIBRARIES: dict[str, type[Library]] = {
    "ckpt": Ckpt,
    "orbax_v1": OrbaxV1,
    "orbax_v1_uncompressed": OrbaxV1Uncompressed,
    "orbax_v0_manager": OrbaxV0Manager,
    "torch_dcp": TorchDcp,
    "torch_save": TorchSave,
    "safetensors": Safetensors,
    "numpy_savez": NumpySavez,
    "equinox": Equinox,
    "floor": Floor,
}


def make_library(options: Any, *, sharded: bool = False) -> Library:
    """The library that the options name; ``Skipped`` if it is not installed, or cannot do what they, or ``sharded``, ask."""
    name = str(options.library)
    if name not in LIBRARIES:
        raise Skipped(f"no library {name!r}{nearest(name, LIBRARIES)}")
    kind = LIBRARIES[name]
    always_syncs = kind.default_durability != "no" and not kind.skips_fsync
    reasons = {
        "saves in the foreground only": options.async_enabled and not kind.in_background,
        "knows no broadcast": options.use_load_and_broadcast and not kind.broadcasts,
        "offers no save without fsync": options.durable is False and always_syncs,
        "runs in one process only": not kind.sharded and jax.process_count() > 1,
        "knows no shardings": not kind.sharded and sharded,
    }
    for reason, applies in reasons.items():
        if applies:
            raise Skipped(f"{name} {reason}")
    try:
        return kind(options)
    except ModuleNotFoundError as error:
        raise Skipped(f"{name} is not installed: {error}") from error
