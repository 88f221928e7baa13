"""The classes for writing a benchmark: options, generator, context and result."""

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
