"""ckpt behind the interface of a measured library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import ckpt_core as ckpt
from ckpt_core.bench.libraries._base import Library, Storage


class Ckpt(Library):
    """ckpt: durable and verified by default."""

    default_durability: ClassVar[str] = "yes"
    skips_fsync: ClassVar[bool] = True
    in_background: ClassVar[bool] = True
    sharded: ClassVar[bool] = True
    tuned: ClassVar[frozenset[str]] = frozenset(
        {"broadcast", "ocdbt", "zarr3", "compression", "chunk_bytes", "save_bytes", "load_bytes"}
    )

    @classmethod
    def refuses(cls, storage: Storage) -> str | None:
        if storage.ocdbt is False:
            return "always writes OCDBT"
        if storage.zarr3 is False:
            return "always writes Zarr 3"
        return super().refuses(storage)

    def _options(self, *, loading: bool = False) -> ckpt.Options:
        found: dict[str, Any] = {}
        storage = self.storage
        if storage.durable is not None:
            found["durable"] = storage.durable
        if storage.compression:
            found["compression"] = "zstd"
        if storage.chunk_bytes is not None:
            found["chunk_bytes"] = storage.chunk_bytes
        budget = storage.load_bytes if loading else storage.save_bytes
        if budget is not None:
            found["max_host_bytes"] = budget
        return ckpt.Options(broadcast=loading and storage.broadcast, **found)

    def save(self, path: Path, state: Any) -> None:
        ckpt.save(path, state, options=self._options())

    def start_save(self, path: Path, state: Any) -> Callable[[], object]:
        return ckpt.save_async(path, state, options=self._options()).result

    def load(self, path: Path, like: Any) -> Any:
        return ckpt.load(path, like, options=self._options(loading=True))
