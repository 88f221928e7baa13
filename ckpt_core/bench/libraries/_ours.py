"""ckpt behind the interface of a measured library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ckpt_core as ckpt
from ckpt_core.bench.libraries._base import GIB, Library


class Ckpt(Library):
    """ckpt: durable and verified by default."""

    default_durability = "yes"
    skips_fsync = True
    in_background = True
    sharded = True
    tuned = frozenset(
        {
            *("use_load_and_broadcast", "use_ocdbt", "use_zarr3", "use_compression"),
            *("chunk_byte_size", "save_concurrent_gb", "restore_concurrent_gb"),
        }
    )

    @classmethod
    def refuses(cls, options: Any) -> str | None:
        if options.use_ocdbt is False:
            return "always writes OCDBT"
        if options.use_zarr3 is False:
            return "always writes Zarr 3"
        return super().refuses(options)

    def _options(self, *, loading: bool = False) -> ckpt.Options:
        options = self.options
        budget = options.restore_concurrent_gb if loading else options.save_concurrent_gb
        found: dict[str, Any] = {
            "durable": options.durable,
            "compression": "zstd" if options.use_compression else None,
            "chunk_bytes": options.chunk_byte_size,
            "max_host_bytes": None if budget is None else int(budget * GIB),
        }
        given = {name: value for name, value in found.items() if value is not None}
        return ckpt.Options(broadcast=loading and options.use_load_and_broadcast, **given)

    def save(self, path: Path, state: Any) -> None:
        ckpt.save(path, state, options=self._options())

    def start_save(self, path: Path, state: Any) -> Callable[[], object]:
        return ckpt.save_async(path, state, options=self._options()).result

    def load(self, path: Path, like: Any) -> Any:
        return ckpt.load(path, like, options=self._options(loading=True))
