"""Benchmarks of saving and loading: a small class measures, and a YAML file says with what; benchmarks/README.md shows both.

``ckpt bench run suite.yaml -o out/`` runs the class over every combination of options, checkpoints and meshes, and writes a
table, JSON lines and TensorBoard. Importing this package imports no jax: the command sets what jax reads first.
"""

from ckpt_core.bench._config import (
    ConfigError as ConfigError,
    SuiteConfig as SuiteConfig,
    load_suite as load_suite,
    parse_suite as parse_suite,
)
from ckpt_core.bench._machine import settle as settle
from ckpt_core.bench._measure import (
    BenchmarkOptions as BenchmarkOptions,
    BenchmarksGenerator as BenchmarksGenerator,
    Metrics as Metrics,
    Skipped as Skipped,
    TestContext as TestContext,
    TestResult as TestResult,
    benchmark_options as benchmark_options,
)
from ckpt_core.bench._run import RunSettings as RunSettings, run_suite as run_suite
