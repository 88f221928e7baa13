# ruff: noqa: TID251 (measures other libraries, which are imported inside functions only)
"""Orbax: the v1 functions, and the v0 manager that most programs use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from ckpt_core.bench.libraries._base import Library, Storage


class OrbaxV1(Library):
    """``orbax.checkpoint.v1``: compresses with zstd by default; fsyncs data files only."""

    modules: ClassVar[tuple[str, ...]] = ("orbax.checkpoint",)
    default_durability: ClassVar[str] = "data files"
    in_background: ClassVar[bool] = True
    sharded: ClassVar[bool] = True
    tuned: ClassVar[frozenset[str]] = frozenset(
        {
            "ocdbt",
            "zarr3",
            "compression",
            "chunk_bytes",
            "save_bytes",
            "load_bytes",
            "broadcast",
            "replica_separate_folder",
        }
    )

    def _context(self) -> Any:
        from orbax.checkpoint import v1 as ocp

        context: Any = ocp.Context()
        storage, saving = self.storage, context.array.saving
        if storage.ocdbt is not None:
            saving.use_ocdbt = storage.ocdbt
        if storage.zarr3 is not None:
            saving.use_zarr3 = storage.zarr3
        if storage.compression is not None:
            saving.use_compression = storage.compression
        if storage.replica_parallel is not None:
            saving.use_replica_parallel = storage.replica_parallel
        saving.enable_replica_parallel_separate_folder = storage.replica_separate_folder
        if storage.chunk_bytes is not None:
            saving.storage_options.chunk_byte_size = storage.chunk_bytes
        if storage.save_bytes is not None:
            context.memory.write_concurrent_bytes = storage.save_bytes
        if storage.load_bytes is not None:
            context.memory.read_concurrent_bytes = storage.load_bytes
        context.array.loading.use_load_and_broadcast = storage.broadcast
        return context

    def save(self, path: Path, state: Any) -> None:
        from orbax.checkpoint import v1 as ocp

        with self._context():
            ocp.save(str(path), state)

    def start_save(self, path: Path, state: Any) -> Callable[[], object]:
        from orbax.checkpoint import v1 as ocp

        with self._context():
            return ocp.save_async(str(path), state).result

    def load(self, path: Path, like: Any) -> Any:
        from orbax.checkpoint import v1 as ocp

        with self._context():
            return ocp.load(str(path), like)


class OrbaxV1Uncompressed(OrbaxV1):
    """``orbax.checkpoint.v1`` without compression, since weights hardly shrink."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(replace(storage, compression=False))

    @classmethod
    def refuses(cls, storage: Storage) -> str | None:
        if storage.compression is not None:
            return "has compression off; sweep use_compression of orbax_v1"
        return super().refuses(storage)


class OrbaxV0Manager(Library):
    """``CheckpointManager`` with ``StandardSave`` and ``StandardRestore``, one step."""

    modules: ClassVar[tuple[str, ...]] = ("orbax.checkpoint",)
    default_durability: ClassVar[str] = "data files"
    in_background: ClassVar[bool] = True
    sharded: ClassVar[bool] = True

    def _manager(self, path: Path, *, background: bool) -> Any:
        import orbax.checkpoint as ocp

        options: Any = ocp.CheckpointManagerOptions(enable_async_checkpointing=background)
        return ocp.CheckpointManager(path, options=options)

    def save(self, path: Path, state: Any) -> None:
        import orbax.checkpoint as ocp

        with self._manager(path, background=False) as manager:
            manager.save(0, args=ocp.args.StandardSave(state))

    def start_save(self, path: Path, state: Any) -> Callable[[], object]:
        import orbax.checkpoint as ocp

        manager = self._manager(path, background=True)
        manager.save(0, args=ocp.args.StandardSave(state))

        def wait() -> None:
            manager.wait_until_finished()
            manager.close()

        return wait

    def load(self, path: Path, like: Any) -> Any:
        import orbax.checkpoint as ocp

        with self._manager(path, background=False) as manager:
            return manager.restore(0, args=ocp.args.StandardRestore(like))
