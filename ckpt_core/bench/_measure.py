"""What a benchmark is written with; ``metrics.measure("save")`` measures a block by collectors, each for a kind of number.

A collector is a function that begins to measure, and returns the function that ends it and gives the numbers by tag. The clock
starts last and stops first, so it does not measure the others. Blocks may be nested.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ckpt_core._errors import CheckpointError
from ckpt_core.bench._config import nearest

MB, GB, GIB = 1e6, 1e9, 2**30
TIME, RATE, PEAK = "0_basics/time_s", "4_throughput/gb_per_s", "0_basics/host_rss_peak_mb"
Numbers = dict[str, float]
Collector = Callable[[], Callable[[], Numbers]]

# The run loop sets this to the `trace_root` of the running test. A context variable, because a
# benchmark calls `Metrics()` without arguments.
TRACE_ROOT: ContextVar[str | None] = ContextVar("trace_root", default=None)


class Metrics:
    """Measurements: operation -> ``namespace/metric`` -> the values, in order.

    An operation that is measured several times (a step of a loop) has several values. In TensorBoard
    and in baselines the two parts are joined: ``save_0_basics/time_s``.
    """

    def __init__(self) -> None:
        self.values: dict[str, dict[str, list[float]]] = {}
        self._trace_root = TRACE_ROOT.get()
        self._tracing = False

    @contextmanager
    def measure(
        self, name: str, metric_keys: Iterable[str] | None = None, *, nbytes: int | None = None
    ) -> Generator[None]:
        """Measures the block. If the block raises, nothing is recorded.

        This does not wait for jax's asynchronous work: if that matters, end the block with
        ``jax.block_until_ready``.

        Args:
            name: the name of the operation.
            metric_keys: ``time``, ``rss``, ``jax_monitoring``, ``device_memory``; by default all.
            nbytes: the bytes that the block moves, for the throughput.
        """
        self.values.setdefault(name, {})  # keeps operations in the order in which they begin
        collectors = _chosen(metric_keys)
        with self._traced(name):
            stops = [start() for start in collectors]
            found: Numbers = {}
            try:
                yield
            finally:
                for stop in reversed(stops):
                    found |= stop()
        if nbytes is not None and found.get(TIME):
            found[RATE] = nbytes / found[TIME] / GB
        for tag, value in sorted(found.items()):
            self.add(name, tag, value)

    def add(self, name: str, tag: str, value: float) -> None:
        """Records a number of your own, such as ``add("save", "5_inventory/files_count", 3)``."""
        self.values.setdefault(name, {}).setdefault(tag, []).append(float(value))

    @contextmanager
    def _traced(self, name: str) -> Generator[None]:
        # jax records one trace at a time, of the outer block
        if self._trace_root is None or self._tracing:
            yield
            return
        import jax

        self._tracing = True
        try:
            with jax.profiler.trace(f"{self._trace_root}__{name}"):
                yield
        finally:
            self._tracing = False


def _wall_time() -> Callable[[], Numbers]:
    start = time.perf_counter()
    return lambda: {TIME: time.perf_counter() - start}


def _rss() -> Callable[[], Numbers]:
    """Host memory: the growth, and the peak above the start if the kernel can reset its peak."""
    peaks = _peaks()
    peaks.append(resident()[1])  # of the blocks around this one, before the kernel forgets it
    is_exact = reset_peak()
    begin, (start, _) = len(peaks), resident()

    def stop() -> Numbers:
        end, peak = resident()
        peaks.append(peak)
        found = {"0_basics/host_rss_diff_mb": (end - start) / MB}
        if is_exact:
            found[PEAK] = max(0, max(peaks[begin:]) - start) / MB
        return found

    return stop


@functools.cache
def _peaks() -> list[int]:
    """The peaks of this process, one for each time between two at which a block began or ended."""
    return []


def resident() -> tuple[int, int]:
    """Resident bytes of this process: now, and the peak since the last reset."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        import psutil

        now = int(psutil.Process().memory_info().rss)
        return now, now
    kib = {name: int(value) for name, value in re.findall(r"(VmRSS|VmHWM):\s+(\d+)", status)}
    return kib.get("VmRSS", 0) * 1024, kib.get("VmHWM", 0) * 1024


def reset_peak() -> bool:
    """Makes the kernel count the peak anew; returns whether it can."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _jax_monitoring() -> Callable[[], Numbers]:
    """Events of jax, Orbax and ckpt: counts, and sums of durations and sizes over the block."""
    events = _events()
    begin = len(events)

    def stop() -> Numbers:
        found: Numbers = {}
        for tag, value in events[begin:]:
            found[tag] = value if is_rate(tag) else found.get(tag, 0.0) + value
        blocking, total = (found.get(f"{_SAVE}/{name}_s") for name in ("blocking", "total"))
        if blocking is not None and total is not None:
            found[f"{_SAVE}/background_s"] = max(0.0, total - blocking)
        hits = found.get(f"{_JAX}/cache_hits_count", 0)
        asked = hits + found.get(f"{_JAX}/cache_misses_count", 0)
        if asked:
            found[f"{_JAX}/cache_hit_rate"] = hits / asked
        return found

    return stop


@functools.cache
def _events() -> list[tuple[str, float]]:
    """Metric and value of every event from the first call on; any thread may report one."""
    import jax

    found: list[tuple[str, float]] = []

    def note(event: str, value: float) -> None:
        if tag := _tag_of(event):
            found.append((tag, value / GIB if event.endswith("/bytes") else float(value)))

    jax.monitoring.register_event_listener(lambda event, **_: note(event, 1.0))
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **_: note(event, duration_secs)
    )
    jax.monitoring.register_scalar_listener(lambda event, value, **_: note(event, value))
    return found


def _device_memory() -> Callable[[], Numbers]:
    """Live arrays added; growth and peak of device memory, if the backend reports it."""
    before = _on_devices()
    return lambda: {name: now - before.get(name, now) for name, now in _on_devices().items()}


_DEVICE_MEMORY = {"bytes_in_use": "device_diff_gb", "peak_bytes_in_use": "device_hbm_peak_diff_gb"}


def _on_devices() -> Numbers:
    """The number of live arrays; and the memory that the backend reports, the maximum over the devices."""
    import jax

    found = {"7_memory/jax_live_arrays_count_delta": float(len(jax.live_arrays()))}
    for device in jax.local_devices():
        for key, value in (device.memory_stats() or {}).items():
            if key in _DEVICE_MEMORY:
                name = f"7_memory/{_DEVICE_MEMORY[key]}"
                found[name] = max(value / GIB, found.get(name, 0.0))
    return found


_COLLECTORS: dict[str, Collector] = {
    "device_memory": _device_memory,
    "jax_monitoring": _jax_monitoring,
    "rss": _rss,
    "time": _wall_time,  # last, so that it starts last and stops first
}


def _chosen(keys: Iterable[str] | None) -> list[Collector]:
    """The collectors for the keys, in the order in which they start."""
    wanted = (*_COLLECTORS,) if keys is None else tuple(keys)
    for key in wanted:
        if key not in _COLLECTORS:
            raise ValueError(f"no metric {key!r}{nearest(key, _COLLECTORS)}")
    return [collector for key, collector in _COLLECTORS.items() if key in wanted]


# What events of jax, Orbax and ckpt are as metrics; the leading numbers sort them in TensorBoard.
_SAVE, _LOAD, _RATES, _SIZES = "2_save_breakdown", "3_load_breakdown", "4_throughput", "5_inventory"
_JAX, _OTHER = "8_jax", "9_other"
_TAGS = {
    "/ckpt/snapshot_taken": f"{_SAVE}/blocking_s",
    "/ckpt/committed": f"{_SAVE}/total_s",
    "/ckpt/committed/bytes": f"{_SIZES}/save_total_gb",
    "/ckpt/restored": f"{_LOAD}/total_s",
    "/ckpt/restored/bytes": f"{_SIZES}/load_total_gb",
    "/jax/compilation_cache/cache_hits": f"{_JAX}/cache_hits_count",
    "/jax/compilation_cache/cache_misses": f"{_JAX}/cache_misses_count",
    "/jax/core/compile/backend_compile_duration": f"{_JAX}/compile_s",
}
_ORBAX_EVENT = re.compile(
    r"/jax/(?:orbax|checkpoint)/(write|read)/(.*?)[_/]?(gbytes_per_sec|gbytes|gb|(?:duration_)?secs?)"
)
_OTHERS = ("/jax/orbax/", "/jax/checkpoint/", "/jax/compilation_cache/", "/ckpt/")


def _tag_of(event: str) -> str | None:
    """The metric of an event; None for events that do not measure the cost of a checkpoint."""
    if event in _TAGS:
        return _TAGS[event]
    if found := _ORBAX_EVENT.fullmatch(event):
        direction, of_what, unit = found.groups()
        call, stages = ("save", _SAVE) if direction == "write" else ("load", _LOAD)
        name = of_what.replace("/", "_") or "total"
        if unit == "gbytes_per_sec":
            return f"{_RATES}/{call}_{name}_gbps"
        return f"{_SIZES}/{call}_{name}_gb" if unit.startswith("gb") else f"{stages}/{name}_s"
    # "_time" is a point in time, not a duration
    if not event.startswith(_OTHERS) or event.endswith(("_time", "_started")):
        return None
    return f"{_OTHER}/{event.strip('/').replace('/', '_')}"


def is_rate(tag: str) -> bool:
    """Whether a metric is a rate or ratio, whose values must not be added up."""
    return tag.endswith(("gbps", "per_s", "_rate", "_ratio"))


@dataclass(frozen=True)
class BenchmarkOptions:
    """Base class for the options of a generator: a frozen dataclass with a default for every field.

    Attributes:
        enable_trace: record a ``jax.profiler`` trace of every operation in one uncounted run.
        trace_every_repeat: record one in every counted run; profiling then distorts all times.
    """

    enable_trace: bool = False
    trace_every_repeat: bool = False

    def is_valid(self) -> bool:
        """Whether this combination makes sense; invalid ones are skipped."""
        return True

    def label(self, name: str) -> str:
        """The text of a swept option in tables; empty if its value need not be mentioned."""
        value = getattr(self, name)
        if name == "library":
            return str(value)
        plain = value is None or isinstance(value, bool)
        return f"{name}={json.dumps(value) if plain else value}"


class Skipped(CheckpointError):
    """Raise this in a ``test_fn`` that cannot run here: the results list it as skipped, not failed."""


@dataclass(frozen=True)
class TestContext:
    """The argument of a ``test_fn``.

    Attributes:
        pytree: the data of ``checkpoint_config``, or None.
        path: an empty directory for this run.
        options: one combination of the generator's options.
        mesh: the ``jax.sharding.Mesh`` of ``mesh_config``, or None.
        repeat_index: the number of this repeat, from 0; None for a warm-up.
        local_path: a scratch directory for this run on a local disk, or None.
        trace_root: the beginning of the paths of this run's traces, one for each operation, or None.
    """

    __test__ = False  # pytest would collect the class because its name begins with Test

    pytree: Any
    path: Path
    options: Any
    mesh: Any = None
    repeat_index: int | None = None
    local_path: Path | None = None
    trace_root: str | None = None


@dataclass(frozen=True)
class TestResult:
    """The measurements of a ``test_fn``, and facts for the tables as ``notes``, such as ``{"durable": "yes"}``."""

    __test__ = False

    metrics: Metrics
    notes: Mapping[str, str] = field(default_factory=dict[str, str])


class BenchmarksGenerator:
    """Base class for benchmarks: bind options with ``@benchmark_options``, define ``test_fn``."""

    options_class: type[BenchmarkOptions] = BenchmarkOptions

    def test_fn(self, context: TestContext) -> TestResult:
        """Runs and measures once. If it raises, the error is recorded and the suite continues."""
        raise NotImplementedError(f"{type(self).__name__} must define test_fn(context)")


_Generator = TypeVar("_Generator", bound=type[BenchmarksGenerator])


def benchmark_options(options_class: type[BenchmarkOptions]) -> Callable[[_Generator], _Generator]:
    """A decorator that binds a class of options to a generator."""

    def bind(generator: _Generator) -> _Generator:
        generator.options_class = options_class
        return generator

    return bind
