# ruff: noqa: TID251 (measures other libraries, which are imported inside functions only)
"""Orbax: the v1 functions, and the v0 manager that most programs use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from ckpt_core.bench.libraries._base import GIB, Library

_SETTINGS = {
    "use_ocdbt": ("array.saving", "use_ocdbt"),
    "use_zarr3": ("array.saving", "use_zarr3"),
    "use_compression": ("array.saving", "use_compression"),
    "use_replica_parallel": ("array.saving", "use_replica_parallel"),
    "enable_replica_parallel_separate_folder": (
        "array.saving",
        "enable_replica_parallel_separate_folder",
    ),
    "chunk_byte_size": ("array.saving.storage_options", "chunk_byte_size"),
    "save_concurrent_gb": ("memory", "write_concurrent_bytes"),
    "restore_concurrent_gb": ("memory", "read_concurrent_bytes"),
    "use_load_and_broadcast": ("array.loading", "use_load_and_broadcast"),
}
"""Option -> where Orbax's context has it."""


class OrbaxV1(Library):
    """``orbax.checkpoint.v1``: compresses with zstd by default; fsyncs data files only."""

    modules = ("orbax.checkpoint",)
    default_durability = "data files"
    in_background = True
    sharded = True
    tuned = frozenset(_SETTINGS)

    def _context(self) -> Any:
        from orbax.checkpoint import v1 as ocp

        context: Any = ocp.Context()
        for setting, (place, name) in _SETTINGS.items():
            value = getattr(self.options, setting)
            if value is not None:
                value = int(value * GIB) if setting.endswith("_gb") else value
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

    def __init__(self, options: Any) -> None:
        super().__init__(replace(options, use_compression=False))

    @classmethod
    def refuses(cls, options: Any) -> str | None:
        if options.use_compression is not None:
            return "has compression off; sweep use_compression of orbax_v1"
        return super().refuses(options)


class OrbaxV0Manager(Library):
    """``CheckpointManager`` with ``StandardSave`` and ``StandardRestore``, one step."""

    modules = ("orbax.checkpoint",)
    default_durability = "data files"
    in_background = True
    sharded = True

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
