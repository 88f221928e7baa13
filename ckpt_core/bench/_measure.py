"""``metrics.measure("save")``: measures a block of code."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar

from ckpt_core.bench._collectors import GB, chosen

# The run loop sets this to the `trace_path` of the running test. A context variable, because a
# benchmark calls `Metrics()` without arguments.
TRACE_PATH: ContextVar[Callable[[str], str | None] | None] = ContextVar("trace_path", default=None)


class Metrics:
    """Measurements: operation -> ``namespace/metric`` -> the values, in order.

    An operation that is measured several times (a step of a loop) has several values. In TensorBoard
    and in baselines the two parts are joined: ``save_0_basics/time_s``.

    Example:
        >>> from ckpt_core import bench
        >>> metrics = bench.Metrics()
        >>> with metrics.measure("sum", ["time"]):
        ...     _ = sum(range(100))
        >>> list(metrics.values["sum"])
        ['0_basics/time_s']
    """

    def __init__(self) -> None:
        self.values: dict[str, dict[str, list[float]]] = {}
        self._trace_path = TRACE_PATH.get()
        self._tracing = False

    @contextmanager
    def measure(
        self, name: str, metric_keys: Iterable[str] | None = None, *, nbytes: int | None = None
    ) -> Generator[None, None, None]:
        """Measures the block. If the block raises, nothing is recorded.

        This does not wait for jax's asynchronous work: if that matters, end the block with
        ``jax.block_until_ready``.

        Args:
            name: the name of the operation.
            metric_keys: ``time``, ``rss``, ``jax_monitoring``, ``device_memory`` (the default: all
                of these), ``tracemalloc``.
            nbytes: the bytes that the block moves, for the throughput.
        """
        self.values.setdefault(name, {})  # keeps operations in the order in which they begin
        collectors = chosen(metric_keys)
        with self._traced(name):
            stops = [start() for start in collectors]
            found: dict[str, float] = {}
            try:
                yield
            finally:
                for stop in reversed(stops):
                    found |= stop()
        seconds = found.get("0_basics/time_s")
        if nbytes is not None and seconds:
            found["4_throughput/gb_per_s"] = nbytes / seconds / GB
        for tag, value in sorted(found.items()):
            self.add(name, tag, value)

    def add(self, name: str, tag: str, value: float) -> None:
        """Records a number of your own, such as ``add("save", "5_inventory/files_count", 3)``."""
        self.values.setdefault(name, {}).setdefault(tag, []).append(float(value))

    @contextmanager
    def _traced(self, name: str) -> Generator[None, None, None]:
        path = self._trace_path(name) if self._trace_path is not None else None
        if path is None or self._tracing:  # jax records one trace at a time, of the outer block
            yield
            return
        import jax

        self._tracing = True
        try:
            with jax.profiler.trace(path):
                yield
        finally:
            self._tracing = False
