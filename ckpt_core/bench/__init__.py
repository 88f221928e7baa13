"""Benchmarks of saving and loading: you write a small class and a YAML file.

::

    import dataclasses
    import ckpt_core as ckpt
    from ckpt_core import bench

    @dataclasses.dataclass(frozen=True)
    class MyOptions(bench.BenchmarkOptions):
        durable: bool | list[bool] = True          # a list in the YAML file is swept

    @bench.benchmark_options(MyOptions)
    class MyBenchmark(bench.BenchmarksGenerator):
        def test_fn(self, context):
            metrics = bench.Metrics()
            with metrics.measure("save"):
                ckpt.save(context.path / "ckpt", context.pytree)
            return bench.TestResult(metrics=metrics)

``ckpt bench run suite.yaml -o out/`` then runs it over every combination of options, checkpoints
and meshes, in one process or many, and writes a table, JSON lines, TensorBoard and a web page. The
generators that come with ckpt are in ``ckpt_core.bench.generators``; docs/benchmarks.md has the
keys of the file.

The rest of ckpt does not import this package, and each name is imported at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_core.bench._baseline import Comparison as Comparison
    from ckpt_core.bench._config import SuiteConfig as SuiteConfig
    from ckpt_core.bench._config import load_suite as load_suite
    from ckpt_core.bench._config import parse_suite as parse_suite
    from ckpt_core.bench._core import BenchmarkOptions as BenchmarkOptions
    from ckpt_core.bench._core import BenchmarksGenerator as BenchmarksGenerator
    from ckpt_core.bench._core import Skipped as Skipped
    from ckpt_core.bench._core import TestContext as TestContext
    from ckpt_core.bench._core import TestResult as TestResult
    from ckpt_core.bench._core import benchmark_options as benchmark_options
    from ckpt_core.bench._measure import Metrics as Metrics
    from ckpt_core.bench._run import RunSettings as RunSettings
    from ckpt_core.bench._run import run_suite as run_suite
    from ckpt_core.bench._settle import settle as settle
    from ckpt_core.bench._yaml import ConfigError as ConfigError

_HOMES = {
    "_baseline": ("Comparison",),
    "_config": ("SuiteConfig", "load_suite", "parse_suite"),
    "_core": (
        "BenchmarkOptions",
        "BenchmarksGenerator",
        "Skipped",
        "TestContext",
        "TestResult",
        "benchmark_options",
    ),
    "_measure": ("Metrics",),
    "_run": ("RunSettings", "run_suite"),
    "_settle": ("settle",),
    "_yaml": ("ConfigError",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ckpt_core.bench' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ckpt_core.bench.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
