"""What somebody who writes a benchmark needs: options, generator, context and result."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ckpt_core._errors import CheckpointError

if TYPE_CHECKING:
    from ckpt_core.bench._measure import Metrics


@dataclass(frozen=True)
class BenchmarkOptions:
    """Base of the options of a generator: a frozen dataclass with a default for every field.

    Attributes:
        enable_trace: a ``jax.profiler`` trace of every measured operation, in the first run.
        trace_every_repeat: in every run; the profile distorts all times then.
    """

    enable_trace: bool = False
    trace_every_repeat: bool = False

    def is_valid(self) -> bool:
        """Whether this combination makes sense; the others are left out of the sweep."""
        return self.problem() is None

    def problem(self) -> str | None:
        """Why this combination makes no sense, for the list of what was skipped."""
        return None

    def label(self, name: str) -> str:
        """How a swept option reads in tables; empty for what goes without saying."""
        value = getattr(self, name)
        if name == "library":
            return str(value)
        plain = value is None or isinstance(value, bool)
        return f"{name}={json.dumps(value) if plain else value}"


class Skipped(CheckpointError):
    """Raised by a ``test_fn`` that cannot run here: no failure, but said so in the results."""


@dataclass(frozen=True)
class TestContext:
    """What a ``test_fn`` gets.

    Attributes:
        pytree: the checkpoint's data from ``checkpoint_config``, or None.
        path: a fresh directory of this run.
        options: one combination of the generator's options.
        mesh: the ``jax.sharding.Mesh`` of ``mesh_config``, or None.
        repeat_index: which repeat this is, from 0; None for a warm-up.
        local_path: a scratch directory of this run on a local disk, or None.
        trace_root: where traces of this run go, or None.
    """

    __test__ = False  # pytest: the name begins with Test, the class is none

    pytree: Any
    path: Path
    options: Any
    mesh: Any = None
    repeat_index: int | None = None
    local_path: Path | None = None
    trace_root: str | None = None

    def trace_path(self, operation: str) -> str | None:
        """Where the profiler trace of an operation goes; None where none is taken."""
        return None if self.trace_root is None else f"{self.trace_root}__{operation}"


@dataclass(frozen=True)
class TestResult:
    """What a ``test_fn`` gives.

    Attributes:
        metrics: what was measured.
        notes: facts for the tables, such as ``{"durable": "yes"}``.
    """

    __test__ = False

    metrics: Metrics
    notes: Mapping[str, str] = field(default_factory=dict[str, str])


class BenchmarksGenerator:
    """Base of all benchmarks: bind options with ``@benchmark_options``, define ``test_fn``."""

    options_class: type[BenchmarkOptions] = BenchmarkOptions

    def test_fn(self, context: TestContext) -> TestResult:
        """Runs and measures once. What it raises is recorded, and the suite goes on."""
        raise NotImplementedError(f"{type(self).__name__} must define test_fn(context)")


_Generator = TypeVar("_Generator", bound=type[BenchmarksGenerator])


def benchmark_options(options_class: type[BenchmarkOptions]) -> Callable[[_Generator], _Generator]:
    """A decorator that binds a class of options to a generator.

    Example:
        >>> import dataclasses
        >>> from ckpt_core import bench
        >>> @dataclasses.dataclass(frozen=True)
        ... class Mine(bench.BenchmarkOptions):
        ...     durable: bool | list[bool] = True
        >>> @bench.benchmark_options(Mine)
        ... class MyBenchmark(bench.BenchmarksGenerator):
        ...     def test_fn(self, context): ...
        >>> MyBenchmark.options_class.__name__
        'Mine'
    """

    def bind(generator: _Generator) -> _Generator:
        generator.options_class = options_class
        return generator

    return bind
