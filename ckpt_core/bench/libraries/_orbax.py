# ruff: noqa: TID251 (measures other libraries, which are imported inside functions only)
"""Orbax: the v1 functions, and the v0 manager that most programs use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

from ckpt_core.bench.libraries._base import Library, Storage

_SETTINGS = {
    "ocdbt": ("array.saving", "use_ocdbt"),
    "zarr3": ("array.saving", "use_zarr3"),
    "compression": ("array.saving", "use_compression"),
    "replica_parallel": ("array.saving", "use_replica_parallel"),
    "replica_separate_folder": ("array.saving", "enable_replica_parallel_separate_folder"),
    "chunk_bytes": ("array.saving.storage_options", "chunk_byte_size"),
    "save_bytes": ("memory", "write_concurrent_bytes"),
    "load_bytes": ("memory", "read_concurrent_bytes"),
    "broadcast": ("array.loading", "use_load_and_broadcast"),
}
"""Setting -> where Orbax's context has it."""


class OrbaxV1(Library):
    """``orbax.checkpoint.v1``: compresses with zstd by default; fsyncs data files only."""

    modules: ClassVar[tuple[str, ...]] = ("orbax.checkpoint",)
    default_durability: ClassVar[str] = "data files"
    in_background: ClassVar[bool] = True
    sharded: ClassVar[bool] = True
    tuned: ClassVar[frozenset[str]] = frozenset(_SETTINGS)

    def _context(self) -> Any:
        from orbax.checkpoint import v1 as ocp

        context: Any = ocp.Context()
        for setting, (place, name) in _SETTINGS.items():
            value = getattr(self.storage, setting)
            if value is not None:
                setattr(attrgetter(place)(context), name, value)
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
