"""Collectors measure a block of code, each one kind of number: time, memory, events.

A collector is a function that begins to measure and returns the function that ends it and returns the numbers by
tag. The clock starts last and stops first, so it does not measure the other collectors. Blocks may be nested: an
inner block does not disturb the numbers of the outer one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

from ckpt_core.bench._tags import is_rate, tag_of

MB, GB, GIB = 1e6, 1e9, 2**30
Numbers: TypeAlias = dict[str, float]
Collector: TypeAlias = Callable[[], Callable[[], Numbers]]


def wall_time() -> Callable[[], Numbers]:
    """Wall time."""
    start = time.perf_counter()
    return lambda: {"0_basics/time_s": time.perf_counter() - start}


class Rss:
    """Host memory: the growth, and the peak above the start if the kernel can reset its peak."""

    # The open blocks. Before a block resets the kernel's peak, it is recorded in all of them.
    _open: ClassVar[list[Rss]] = []
    _lock = threading.Lock()

    def __init__(self) -> None:
        with Rss._lock:
            self._share_peak()
            self._exact = reset_peak()
            self._start, _ = resident()
            self._peak = self._start
            Rss._open.append(self)

    def stop(self) -> Numbers:
        with Rss._lock:
            self._share_peak()
            Rss._open.remove(self)
            end, _ = resident()
        found = {"0_basics/host_rss_diff_mb": (end - self._start) / MB}
        if self._exact:
            found["0_basics/host_rss_peak_mb"] = max(0, self._peak - self._start) / MB
        return found

    @staticmethod
    def _share_peak() -> None:
        _, peak = resident()
        for block in Rss._open:
            block._peak = max(block._peak, peak)


def resident() -> tuple[int, int]:
    """Resident bytes of this process: now, and the peak since the last reset."""
    now = peak = 0
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("VmRSS:"):
                    now = int(line.split()[1]) * 1024
                elif line.startswith("VmHWM:"):
                    peak = int(line.split()[1]) * 1024
    except OSError:
        import psutil

        now = peak = int(psutil.Process().memory_info().rss)
    return now, peak


def reset_peak() -> bool:
    """Makes the kernel count the peak anew; returns whether it can."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return False
    return True


class JaxMonitoring:
    """Events of jax, Orbax and ckpt: counts, and sums of durations and sizes over the block."""

    _open: ClassVar[list[JaxMonitoring]] = []
    _lock = threading.Lock()
    _listening = False

    def __init__(self) -> None:
        self._sums: Numbers = {}
        with JaxMonitoring._lock:
            JaxMonitoring._listen()
            JaxMonitoring._open.append(self)

    def stop(self) -> Numbers:
        with JaxMonitoring._lock:
            JaxMonitoring._open.remove(self)
            found = dict(self._sums)
        blocking, total = (
            found.get(f"2_save_breakdown/{name}_s") for name in ("blocking", "total")
        )
        if blocking is not None and total is not None:
            found["2_save_breakdown/background_s"] = max(0.0, total - blocking)
        hits = found.get("8_jax/cache_hits_count", 0)
        asked = hits + found.get("8_jax/cache_misses_count", 0)
        if asked:
            found["8_jax/cache_hit_rate"] = hits / asked
        return found

    def _add(self, tag: str, value: float) -> None:
        self._sums[tag] = value if is_rate(tag) else self._sums.get(tag, 0.0) + value

    @classmethod
    def _listen(cls) -> None:
        """Registers one set of listeners for the whole process, at the first use."""
        if cls._listening:
            return
        import jax

        jax.monitoring.register_event_listener(lambda event, **_: cls._add_to_open(event, 1.0))
        jax.monitoring.register_event_duration_secs_listener(
            lambda event, duration_secs, **_: cls._add_to_open(event, duration_secs)
        )
        jax.monitoring.register_scalar_listener(
            lambda event, value, **_: cls._add_to_open(event, float(value))
        )
        cls._listening = True

    @classmethod
    def _add_to_open(cls, event: str, value: float) -> None:
        tag = tag_of(event) if cls._open else None
        if tag is None:
            return
        if event.endswith("/bytes"):
            value /= GIB
        with cls._lock:  # any thread may report an event
            for block in cls._open:
                block._add(tag, value)


def device_memory() -> Callable[[], Numbers]:
    """Live arrays added; growth and peak of device memory, if the backend reports it."""
    arrays, memory = _on_devices()

    def stop() -> Numbers:
        arrays_after, memory_after = _on_devices()
        found = {"7_memory/jax_live_arrays_count_delta": float(arrays_after - arrays)}
        for key, name in _DEVICE_MEMORY.items():
            if key in memory and key in memory_after:
                found[f"7_memory/{name}"] = (memory_after[key] - memory[key]) / GIB
        return found

    return stop


_DEVICE_MEMORY = {"bytes_in_use": "device_diff_gb", "peak_bytes_in_use": "device_hbm_peak_diff_gb"}


def _on_devices() -> tuple[int, dict[str, int]]:
    """The number of live arrays, and for each memory statistic the maximum over the devices."""
    import jax

    largest: dict[str, int] = {}
    for device in jax.local_devices():
        for key, value in (device.memory_stats() or {}).items():
            largest[key] = max(value, largest.get(key, 0))
    return len(jax.live_arrays()), largest


# The other metrics are gauges and histograms, whose difference has no meaning.
_COUNTED = ("kvstore/", "cache/", "thread_pool/work_time_ns", "thread_pool/total_queue_time_ns")


def tensorstore() -> Callable[[], Numbers]:
    """TensorStore's own counters: operations, bytes, cache hits and misses."""
    from ckpt_core._storage import counters

    before = counters()

    def stop() -> Numbers:
        changed = {
            f"6_tensorstore/{name.replace('/', '_')}_diff": value - before.get(name, 0)
            for name, value in counters().items()
            if name.startswith(_COUNTED) and value != before.get(name, 0)
        }
        return changed | {"6_tensorstore/changed_metric_count": float(len(changed))}

    return stop


def tracemalloc() -> Callable[[], Numbers]:
    """Python's own allocations. Off by default, because tracing slows everything down."""
    import tracemalloc

    was_on = tracemalloc.is_tracing()
    if not was_on:
        tracemalloc.start()
    start, _ = tracemalloc.get_traced_memory()
    if not was_on:
        tracemalloc.reset_peak()

    def stop() -> Numbers:
        _, peak = tracemalloc.get_traced_memory()
        if not was_on:
            tracemalloc.stop()
        return {"7_memory/tracemalloc_peak_diff_mb": max(0, peak - start) / MB}

    return stop


COLLECTORS: dict[str, Collector] = {
    "tracemalloc": tracemalloc,
    "tensorstore": tensorstore,
    "device_memory": device_memory,
    "jax_monitoring": lambda: JaxMonitoring().stop,
    "rss": lambda: Rss().stop,
    "time": wall_time,  # last, so that it starts last and stops first
}
DEFAULT_KEYS = ("time", "rss", "jax_monitoring", "device_memory", "tensorstore")


def chosen(keys: Any) -> list[Collector]:
    """The collectors for the keys, in the order in which they start."""
    wanted = DEFAULT_KEYS if keys is None else tuple(keys)
    for key in wanted:
        if key not in COLLECTORS:
            from ckpt_core.bench._yaml import nearest

            raise ValueError(f"no metric {key!r}{nearest(key, COLLECTORS)}")
    return [collector for key, collector in COLLECTORS.items() if key in wanted]
