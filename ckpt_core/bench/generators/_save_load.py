"""Measures save and load: the same work for ckpt, other libraries and the bare disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

from ckpt_core import bench
from ckpt_core.bench._check import check_equal
from ckpt_core.bench._collectors import DEFAULT_KEYS, GB
from ckpt_core.bench._data import abstract, total_bytes
from ckpt_core.bench._machine import drop_page_cache, fsync_all, warm_free_memory
from ckpt_core.bench._schema import nearest
from ckpt_core.bench.libraries import NAMES, Library, library, make_library

# The text of swept options in tables; null, the library's own choice, has none.
_WORDS: dict[str, dict[Any, str]] = {
    "async_enabled": {True: "background", False: "foreground"},
    "durable": {True: "fsynced", False: "not fsynced"},
    "page_cache": {"warm": "warm cache", "cold": "cold cache"},
}


@dataclass(frozen=True)
class SaveLoadOptions(bench.BenchmarkOptions):
    """What to save and load with; null leaves a setting to the library.

    Attributes:
        library: ``ckpt``, ``orbax_v1``, ``orbax_v1_uncompressed``, ``orbax_v0_manager``,
            ``torch_dcp``, ``torch_save``, ``safetensors``, ``numpy_savez``, ``equinox``, ``floor``.
        durable: whether the save survives a power cut once it has returned. If a library leaves the
            fsync out, true adds it inside the measured time and the table says so.
        async_enabled: save in the background; null does so if the library can.
        page_cache: ``cold`` drops the saved files from the page cache before they are loaded.
        use_ocdbt, use_zarr3, use_compression, use_replica_parallel,
        enable_replica_parallel_separate_folder, use_load_and_broadcast, chunk_byte_size,
        save_concurrent_gb, restore_concurrent_gb, metric_tracemalloc_enabled: as in Orbax's
            framework.
    """

    library: str | list[str] = "ckpt"
    durable: bool | list[bool | None] | None = None
    async_enabled: bool | list[bool | None] | None = None
    page_cache: Literal["warm", "cold"] | list[str] = "warm"
    use_ocdbt: bool | list[bool | None] | None = None
    use_zarr3: bool | list[bool | None] | None = None
    use_compression: bool | list[bool | None] | None = None
    use_replica_parallel: bool | list[bool | None] | None = None
    enable_replica_parallel_separate_folder: bool | list[bool] = False
    use_load_and_broadcast: bool | list[bool] = False
    chunk_byte_size: int | list[int | None] | None = None
    save_concurrent_gb: float | list[float | None] | None = None
    restore_concurrent_gb: float | list[float | None] | None = None
    metric_tracemalloc_enabled: bool = False

    def problem(self) -> str | None:
        if self.library not in NAMES:
            return f"no library {self.library!r}{nearest(str(self.library), NAMES)}"
        reason = library(str(self.library)).refuses(self)
        return None if reason is None else f"{self.library} {reason}"

    def label(self, name: str) -> str:
        words = _WORDS.get(name)
        if words is not None:
            return words.get(getattr(self, name), "")
        return super().label(name)

    def metric_keys(self) -> list[str] | None:
        """The metrics to measure; tracemalloc only on request, because it slows everything down."""
        return [*DEFAULT_KEYS, "tracemalloc"] if self.metric_tracemalloc_enabled else None


@bench.benchmark_options(SaveLoadOptions)
class SaveLoad(bench.BenchmarksGenerator):
    """Measures ``save`` (in it ``save_blocking`` and ``save_background``), then ``load``."""

    def test_fn(self, context: bench.TestContext) -> bench.TestResult:
        return save_and_load(context, data_of(context))


def data_of(context: bench.TestContext) -> Any:
    """The data of the suite; raises ``Skipped`` if it has none."""
    if context.pytree is None:
        raise bench.Skipped("needs a checkpoint_config with a spec or a path")
    return context.pytree


def save_and_load(context: bench.TestContext, state: Any) -> bench.TestResult:
    """Measures the round trip of a state as the options of ``SaveLoad`` say."""
    options: SaveLoadOptions = context.options
    lib = make_library(options)
    if not lib.sharded and jax.process_count() > 1:
        raise bench.Skipped(f"{options.library} runs in one process only")
    metrics, like, path = bench.Metrics(), abstract(state), context.path / "ckpt"
    prepared = lib.prepare(state)
    measure_save(metrics, lib, path, prepared, total_bytes(state))
    loaded = measure_load(metrics, context, path, lambda: lib.load(path, like))
    check_equal(state, lib.finish(loaded, like))
    return bench.TestResult(metrics=metrics, notes={"durable": lib.durability})


def sharded_library(options: SaveLoadOptions) -> Library:
    """The library of the options; raises ``Skipped`` if it cannot save arrays that several devices hold."""
    lib = make_library(options)
    if not lib.sharded:
        raise bench.Skipped(f"{options.library} knows no shardings")
    return lib


def measure_save(
    metrics: bench.Metrics, lib: Library, path: Path, prepared: Any, size: int
) -> None:
    """Measures one save; if it continues in the background, also its two parts."""
    warm_free_memory(path.parent, size)
    with bench.settle(), metrics.measure("save", lib.options.metric_keys(), nbytes=size):
        if lib.background:
            with metrics.measure("save_blocking", ["time"]):
                wait = lib.start_save(path, prepared)
            with metrics.measure("save_background", ["time"]):
                wait()
        else:
            lib.save(path, prepared)
        if lib.adds_fsync:
            fsync_all(path)


def measure_load(
    metrics: bench.Metrics,
    context: bench.TestContext,
    path: Path,
    load: Callable[[], Any],
    name: str = "load",
) -> Any:
    """Measures a load of ``path``, and the throughput by the bytes of what it loaded; returns that."""
    if context.options.page_cache == "cold":
        drop_page_cache(path)
    keys = getattr(context.options, "metric_keys", lambda: None)()
    with bench.settle(), metrics.measure(name, keys):
        loaded = jax.block_until_ready(load())
    secs = metrics.values[name]["0_basics/time_s"][-1]
    metrics.add(name, "4_throughput/gb_per_s", total_bytes(loaded) / secs / GB)
    return loaded
