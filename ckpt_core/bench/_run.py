"""The run loop: expands a suite into its cases, runs each repeatedly, and records failures as well."""

from __future__ import annotations

import fnmatch
import hashlib
import importlib
import itertools
import json
import operator
import time
import traceback
import typing
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt_core import _processes
from ckpt_core._directory import PosixBackend
from ckpt_core.bench._config import (
    BenchmarkConfig,
    CheckpointConfig,
    ConfigError,
    MeshConfig,
    Reader,
    SuiteConfig,
    nearest,
)
from ckpt_core.bench._machine import describe_environment
from ckpt_core.bench._measure import (
    TRACE_ROOT,
    BenchmarkOptions,
    BenchmarksGenerator,
    Skipped,
    TestContext,
)
from ckpt_core.bench._results import COUNTED, TRACED, WARM_UP, CaseResult, Run, SuiteResult, merged

AGREEMENT_SECS = 1800.0
"""How long processes wait for the slowest of them after a run."""


@dataclass(frozen=True)
class RunSettings:
    """Where and how a suite runs.

    Attributes:
        output: the directory for results and for the files of benchmarks; created if missing.
        local_directory: root of ``context.local_path``.
        remove_repeated_dir: delete the files of each run when it ends (also a key of the suite).
        repeats: overrides the suite's ``num_repeats``.
        only: run only cases whose label, group or name matches this pattern.
    """

    output: Path
    local_directory: Path | None = None
    remove_repeated_dir: bool = False
    repeats: int | None = None
    only: str | None = None


Listener = Callable[[CaseResult, Run], None]


def run_suite(
    suite: SuiteConfig, settings: RunSettings, listener: Listener | None = None
) -> SuiteResult:
    """Runs a suite and returns all measurements; after Ctrl-C, those of the runs that had ended.

    With several processes, all must call it; each gets the results of all.

    Args:
        listener: called on process 0 after each run, and for each skipped case.

    Raises:
        ConfigError: a generator or an option does not exist; nothing has run then.
    """
    import jax

    names = operator.attrgetter("result.label", "result.group", "result.name")
    cases = [case for case in _expand(suite) if fnmatch.filter(names(case), settings.only or "*")]
    if not cases:
        raise ConfigError(suite.file, f"no case matches {settings.only!r}")
    output = settings.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    suite = replace(
        suite,
        num_repeats=settings.repeats or suite.num_repeats,
        remove_repeated_dir=suite.remove_repeated_dir or settings.remove_repeated_dir,
    )
    groups: dict[str, list[_Case]] = {}  # of one mesh, and of data that is made once
    for case in cases:
        groups.setdefault(f"{case.checkpoint}{case.mesh}", []).append(case)
    environment = describe_environment(output)  # its load average must not include the benchmark
    found = {case.result.name: case.result for case in cases}
    loop = _Loop(suite, replace(settings, output=output), listener, found)
    before = jax.config.jax_enable_x64  # pyright: ignore
    jax.config.update("jax_enable_x64", True)  # otherwise float64 in a spec would become float32
    interrupted = False
    try:
        for together in groups.values():
            loop.run_group(together)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        jax.config.update("jax_enable_x64", before)
    return SuiteResult(suite.suite_name, environment, tuple(found.values()), interrupted)


@dataclass(frozen=True)
class _Case:
    """What runs for one combination, and its result before the first run."""

    result: CaseResult
    generator: type[BenchmarksGenerator]
    options: BenchmarkOptions
    checkpoint: CheckpointConfig
    mesh: MeshConfig | None


def _expand(suite: SuiteConfig) -> tuple[_Case, ...]:
    """Every combination of a suite once."""
    reader = Reader(suite.file)
    axes_of = [_axes(reader, config) for config in suite.benchmarks]
    reader.finish()
    cases: dict[str, _Case] = {}
    for generator, axes in filter(None, axes_of):
        for checkpoint, mesh in itertools.product(suite.checkpoints, suite.meshes):
            for values in itertools.product(*axes.values()):
                options = generator.options_class(**dict(zip(axes, values, strict=True)))
                case = _case(generator, options, checkpoint, mesh)
                cases[case.result.name] = case
    groups: dict[str, list[BenchmarkOptions]] = {}
    for case in cases.values():
        groups.setdefault(case.result.group, []).append(case.options)
    return tuple(_labelled(case, groups[case.result.group]) for case in cases.values())


def _axes(
    reader: Reader, config: BenchmarkConfig
) -> tuple[type[BenchmarksGenerator], dict[str, list[Any]]] | None:
    """The generator, and the values of each option, checked against their types."""
    generator = _import_generator(reader, config)
    if generator is None:
        return None
    options = generator.options_class
    hints = typing.get_type_hints(options, include_extras=True)
    given = config.options or {}
    reader.unknown(given, vars(options()), f"{options.__name__} has no option")
    axes: dict[str, list[Any]] = {}
    for name, default in vars(options()).items():
        value, where = given.get(name, default), f"{config.generator}: {name}"
        axes[name] = values = value if isinstance(value, list) else [value]
        if not values:
            reader.problems.append(f"{where} is an empty list: nothing would run")
        for one in values if name in given else ():
            reader.value(where, one, hints[name])
    return generator, axes


def _import_generator(reader: Reader, config: BenchmarkConfig) -> type[BenchmarksGenerator] | None:
    module_name, _, name = config.generator.rpartition(".")
    module_name = module_name or "ckpt_core.bench.generators"
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        reader.problems.append(f"generator: cannot import {module_name}: {error}")
        return None
    kinds = {key: value for key, value in vars(module).items() if isinstance(value, type)}
    there = {key: kind for key, kind in kinds.items() if issubclass(kind, BenchmarksGenerator)}
    if name not in there:
        what = "has no BenchmarksGenerator" if hasattr(module, name) else "has no class"
        reader.problems.append(f"generator: {module_name} {what} {name!r}{nearest(name, there)}")
    return there.get(name)


def _case(
    generator: type[BenchmarksGenerator],
    options: BenchmarkOptions,
    checkpoint: CheckpointConfig,
    mesh: MeshConfig | None,
) -> _Case:
    """A case whose name is the same in every run and revision."""
    title = generator.__name__
    parts = {"options": options, "checkpoint": checkpoint, "mesh": mesh}
    config = {name: part and asdict(part) for name, part in parts.items()}
    identity = json.dumps([*config.values()], sort_keys=True, default=str)
    result = CaseResult(
        name=f"{title}_{hashlib.sha256(identity.encode()).hexdigest()[:12]}",
        label=title,
        group=", ".join(filter(None, (title, checkpoint.name, mesh and mesh.label))),
        generator=f"{generator.__module__}.{generator.__qualname__}",
        config=config,
    )
    return _Case(result, generator, options, checkpoint, mesh)


def _labelled(case: _Case, group: list[BenchmarkOptions]) -> _Case:
    """The case with a label of the options that differ within its group."""
    mine = vars(case.options).items()
    varying = [name for name, value in mine if any(vars(one).get(name) != value for one in group)]
    label = ", ".join(filter(None, map(case.options.label, varying)))
    return replace(case, result=replace(case.result, label=label or case.result.label))


@dataclass(frozen=True)
class _Loop:
    """Runs cases; ``found`` has the result of each, with the runs so far."""

    suite: SuiteConfig
    settings: RunSettings
    listener: Listener | None
    found: dict[str, CaseResult]
    processes: _processes.Processes = field(default_factory=_processes.this_run)

    def run_group(self, cases: list[_Case]) -> None:
        """All runs of cases that share data and mesh."""
        from ckpt_core.bench._data import host_data

        put = host_data(cases[0].checkpoint)
        for case, kind, repeat in self._schedule(cases):
            if not self.found[case.result.name].skipped:
                self._run(case, kind, repeat, put)

    def _schedule(self, cases: list[_Case]) -> Iterator[tuple[_Case, str, int]]:
        warm_ups, repeats = self.suite.warmup_repeats, self.suite.num_repeats
        rounds = [(WARM_UP, n) for n in range(warm_ups)] + [(COUNTED, n) for n in range(repeats)]
        if self.suite.order == "sequential":
            yield from ((case, *one) for case in cases for one in rounds)
            return
        for number, one in enumerate(rounds):
            turn = number % len(cases)  # each round begins with another case
            yield from ((case, *one) for case in cases[turn:] + cases[:turn])

    def _run(self, case: _Case, kind: str, repeat: int, put: Any) -> None:
        name, settings = case.result.name, self.settings
        where = Path(name, f"warmup_{repeat}" if kind == WARM_UP else f"repeat_{repeat}")
        local = settings.local_directory and settings.local_directory.absolute() / where
        directories = [path for path in (settings.output / where, local) if path]
        self._delete(directories)
        self._agree({})
        for directory in directories:
            directory.mkdir(parents=True, exist_ok=True)
        traced = self._traced(case, kind, repeat)
        context = TestContext(
            pytree=None,
            path=directories[0],
            options=case.options,
            repeat_index=None if kind == WARM_UP else repeat,
            local_path=local,
            trace_root=str(settings.output / "tensorboard" / name) if traced else None,
        )
        if traced and not case.options.trace_every_repeat and self.suite.num_repeats > 1:
            kind = TRACED if kind == COUNTED else kind
        started = time.time()
        answers = self._agree(_attempt(case, context, put))
        run, before = _combined(Run(name, kind, repeat, started), answers), self.found[name]
        self.found[name] = result = replace(before, runs=(*before.runs, run))
        if self.listener is not None and self.processes.index == 0:
            self.listener(result, run)
        if self.suite.remove_repeated_dir:
            self._delete(directories)

    def _traced(self, case: _Case, kind: str, repeat: int) -> bool:
        """Whether to trace this run: the last warm-up, or the first run if there is no warm-up."""
        if not case.options.enable_trace:
            return False
        if case.options.trace_every_repeat:
            return kind == COUNTED
        warm_ups = self.suite.warmup_repeats
        return repeat == warm_ups - 1 if kind == WARM_UP else warm_ups == 0 and repeat == 0

    def _agree(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """The answers of all processes."""
        if self.processes.count == 1:
            return [answer]
        together = self.processes.round("bench", AGREEMENT_SECS)
        return json.loads(together.decide(json.dumps(answer), lambda found: f"[{','.join(found)}]"))

    def _delete(self, paths: list[Path]) -> None:
        for path in paths if self.processes.index == 0 else ():
            if path.exists():
                PosixBackend().delete(str(path))


def _attempt(case: _Case, context: TestContext, put: Any) -> dict[str, Any]:
    """Runs a case once on this process: returns values and notes, or the error as text."""
    from ckpt_core.bench._data import make_mesh

    token = TRACE_ROOT.set(context.trace_root)
    try:
        if not case.options.is_valid():
            raise Skipped(f"{type(case.options).__name__}.is_valid() says no")
        if case.checkpoint.sharding_config_path:
            raise Skipped("ckpt does not read a sharding_config_path")
        mesh = make_mesh(case.mesh)
        context = replace(context, mesh=mesh, pytree=put(mesh))
        result = case.generator().test_fn(context)
        sizes = [one.lstat().st_size for one in context.path.rglob("*") if one.is_file()]
        if sizes:
            result.metrics.add("checkpoint", "5_inventory/size_mb", sum(sizes) / 1e6)
            result.metrics.add("checkpoint", "5_inventory/files_count", len(sizes))
        return {"values": result.metrics.values, "notes": dict(result.notes)}
    except Skipped as reason:
        return {"skipped": str(reason)}
    except Exception as error:
        return {
            "error": f"{type(error).__name__}: {error}",
            "details": "".join(traceback.format_exception(error)),
        }
    finally:
        TRACE_ROOT.reset(token)


def _combined(run: Run, answers: list[dict[str, Any]]) -> Run:
    """The run with the answers of all processes; of texts and notes, the first."""
    first: dict[str, Any] = {}
    for index, answer in enumerate(answers):
        if "error" in answer and len(answers) > 1:
            answer = answer | {"error": f"process {index}: {answer['error']}"}
        first = {name: value for name, value in answer.items() if value} | first
    hosts = tuple(answer.get("values", {}) for answer in answers)
    return replace(run, **first | {"values": merged(hosts), "hosts": hosts})
