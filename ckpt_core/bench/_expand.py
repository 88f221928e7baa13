"""Expands a suite into its cases: the product of options, checkpoints and meshes."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import typing
from dataclasses import asdict, dataclass, replace
from typing import Any

from ckpt_core.bench._config import BenchmarkConfig, CheckpointConfig, MeshConfig, SuiteConfig
from ckpt_core.bench._core import BenchmarkOptions, BenchmarksGenerator
from ckpt_core.bench._results import CaseResult
from ckpt_core.bench._schema import Reader, nearest


@dataclass(frozen=True)
class Case:
    """What runs for one combination, and its result before the first run."""

    result: CaseResult
    generator: type[BenchmarksGenerator]
    options: BenchmarkOptions
    checkpoint: CheckpointConfig
    mesh: MeshConfig | None


def expand(suite: SuiteConfig) -> tuple[Case, ...]:
    """Every combination of a suite once."""
    reader = Reader(suite.file)
    axes_of = [_axes(reader, config) for config in suite.benchmarks]
    reader.finish()
    cases: dict[str, Case] = {}
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
    """The generator, and option -> its values, in the order of the fields; checks them against their types."""
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
    there = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, BenchmarksGenerator)
    }
    if name not in there:
        what = "has no BenchmarksGenerator" if hasattr(module, name) else "has no class"
        reader.problems.append(f"generator: {module_name} {what} {name!r}{nearest(name, there)}")
    return there.get(name)


def _case(
    generator: type[BenchmarksGenerator],
    options: BenchmarkOptions,
    checkpoint: CheckpointConfig,
    mesh: MeshConfig | None,
) -> Case:
    """A case whose name is the same in every run and revision."""
    title = generator.__name__
    config = {
        "options": asdict(options),
        "checkpoint": asdict(checkpoint),
        "mesh": mesh and asdict(mesh),
    }
    identity = json.dumps([*config.values()], sort_keys=True, default=str)
    result = CaseResult(
        name=f"{title}_{hashlib.sha256(identity.encode()).hexdigest()[:12]}",
        label=title,
        group=", ".join(filter(None, (title, checkpoint.name, mesh and mesh.label))),
        generator=f"{generator.__module__}.{generator.__qualname__}",
        config=config,
    )
    return Case(result, generator, options, checkpoint, mesh)


def _labelled(case: Case, group: list[BenchmarkOptions]) -> Case:
    """The case with a label of the options that differ within its group."""
    varying = [
        name
        for name, value in vars(case.options).items()
        if any(vars(other).get(name) != value for other in group)
    ]
    label = ", ".join(filter(None, map(case.options.label, varying)))
    return replace(case, result=replace(case.result, label=label or case.result.label))
