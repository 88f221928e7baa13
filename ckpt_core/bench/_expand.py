"""Expands a suite into its cases: the product of options, checkpoints and meshes."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import itertools
import json
import typing
from typing import Any

from ckpt_core.bench._config import BenchmarkConfig, CheckpointConfig, MeshConfig, SuiteConfig
from ckpt_core.bench._core import BenchmarkOptions, BenchmarksGenerator
from ckpt_core.bench._results import CaseResult
from ckpt_core.bench._schema import Reader, nearest


@dataclasses.dataclass(frozen=True)
class Case:
    """What runs for one combination, and its result before the first run."""

    result: CaseResult
    generator: type[BenchmarksGenerator]
    options: BenchmarkOptions
    checkpoint: CheckpointConfig
    mesh: MeshConfig | None


def expand(suite: SuiteConfig) -> tuple[Case, ...]:
    """Every combination of a suite once; invalid ones have the reason in ``result.skipped``."""
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
    fields = {field.name: field for field in dataclasses.fields(options)}
    given = config.options or {}
    reader.unknown(given, fields, f"{options.__name__} has no option")
    axes: dict[str, list[Any]] = {}
    for name, field in fields.items():
        value = given[name] if name in given else _default(field)
        axes[name] = values = list(value) if isinstance(value, list) else [value]
        where = f"{config.generator}: {name}"
        if not values:
            reader.complain(f"{where} is an empty list: nothing would run")
        for one in values if name in given else ():
            reader.value(where, one, hints[name])
    return generator, axes


def _import_generator(reader: Reader, config: BenchmarkConfig) -> type[BenchmarksGenerator] | None:
    module_name, _, name = config.generator.rpartition(".")
    module_name = module_name or "ckpt_core.bench.generators"
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        reader.complain(f"generator: cannot import {module_name}: {error}")
        return None
    found = getattr(module, name, None)
    if _is_generator(found):
        return found
    there = [key for key, value in vars(module).items() if _is_generator(value)]
    what = "has no class" if found is None else "has no BenchmarksGenerator"
    reader.complain(f"generator: {module_name} {what} {name!r}{nearest(name, there)}")
    return None


def _is_generator(value: Any) -> typing.TypeGuard[type[BenchmarksGenerator]]:
    return (
        isinstance(value, type)
        and issubclass(value, BenchmarksGenerator)
        and value is not BenchmarksGenerator
    )


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    raise TypeError(f"option {field.name!r} has no default; every option of a benchmark needs one")


def _case(
    generator: type[BenchmarksGenerator],
    options: BenchmarkOptions,
    checkpoint: CheckpointConfig,
    mesh: MeshConfig | None,
) -> Case:
    """A case whose name is the same in every run and revision."""
    title = generator.__name__
    config = {
        "options": dataclasses.asdict(options),
        "checkpoint": dataclasses.asdict(checkpoint),
        "mesh": mesh and dataclasses.asdict(mesh),
    }
    identity = json.dumps([*config.values()], sort_keys=True, default=str)
    reason = None
    if not options.is_valid():
        reason = options.problem() or f"{type(options).__name__}.is_valid() says no"
    result = CaseResult(
        name=f"{title}_{hashlib.sha256(identity.encode()).hexdigest()[:12]}",
        label=title,
        group=", ".join(filter(None, (title, checkpoint.name, mesh and mesh.label))),
        generator=f"{generator.__module__}.{generator.__qualname__}",
        config=config,
        skipped=reason,
    )
    return Case(result, generator, options, checkpoint, mesh)


def _labelled(case: Case, group: list[BenchmarkOptions]) -> Case:
    """The case with a label of the options that differ within its group."""
    varying = {
        name: str(value)
        for name, value in vars(case.options).items()
        if any(vars(other).get(name) != value for other in group)
    }
    label = ", ".join(filter(None, map(case.options.label, varying)))
    result = dataclasses.replace(case.result, varying=varying, label=label or case.result.label)
    return dataclasses.replace(case, result=result)
