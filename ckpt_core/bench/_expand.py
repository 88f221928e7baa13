"""Expands a suite into its cases: the product of options, checkpoints and meshes."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import itertools
import json
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from ckpt_core.bench._config import BenchmarkConfig, CheckpointConfig, MeshConfig, SuiteConfig
from ckpt_core.bench._core import BenchmarkOptions, BenchmarksGenerator
from ckpt_core.bench._results import CaseResult
from ckpt_core.bench._yaml import Reader, nearest


@dataclasses.dataclass(frozen=True)
class Case:
    """One combination; its ``name`` is stable over runs and revisions, its ``label`` the difference to the others of its ``group``."""

    name: str
    label: str
    group: str
    generator: type[BenchmarksGenerator]
    options: BenchmarkOptions
    checkpoint: CheckpointConfig
    mesh: MeshConfig | None
    varying: Mapping[str, str]
    skipped: str | None = None

    def before_runs(self) -> CaseResult:
        """Its result so far."""
        return CaseResult(
            name=self.name,
            label=self.label,
            group=self.group,
            generator=f"{self.generator.__module__}.{self.generator.__qualname__}",
            config={
                "options": dataclasses.asdict(self.options),
                "checkpoint": dataclasses.asdict(self.checkpoint),
                "mesh": self.mesh and dataclasses.asdict(self.mesh),
            },
            varying=self.varying,
            skipped=self.skipped,
        )


def expand(suite: SuiteConfig) -> tuple[Case, ...]:
    """Every combination of a suite; invalid ones have the reason in ``skipped``."""
    reader = Reader(suite.file)
    cases: list[Case] = []
    for config in suite.benchmarks:
        generator = _import_generator(reader, config)
        if generator is None:
            continue
        axes = _axes(reader, config, generator.options_class)
        for checkpoint, mesh in itertools.product(suite.checkpoints, suite.meshes):
            cases += _cases(generator, axes, checkpoint, mesh)
    reader.finish()
    return _labelled(cases)


def _import_generator(reader: Reader, config: BenchmarkConfig) -> type[BenchmarksGenerator] | None:
    module_name, _, name = config.generator.rpartition(".")
    if not module_name:
        module_name = "ckpt_core.bench.generators"
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        reader.complain(f"generator: cannot import {module_name}: {error}")
        return None
    found = getattr(module, name, None)
    if isinstance(found, type) and issubclass(found, BenchmarksGenerator):
        return found
    there = [
        key
        for key, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, BenchmarksGenerator)
        and value is not BenchmarksGenerator
    ]
    what = "has no class" if found is None else "has no BenchmarksGenerator"
    reader.complain(f"generator: {module_name} {what} {name!r}{nearest(name, there)}")
    return None


def _axes(
    reader: Reader, config: BenchmarkConfig, options: type[BenchmarkOptions]
) -> dict[str, list[Any]]:
    """Option -> its values, in the order of the class's fields; checks them against its types."""
    hints = typing.get_type_hints(options, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(options)}
    given = config.options or {}
    reader.unknown(given, fields, f"{options.__name__} has no option")
    where = f"{config.generator}: "
    axes: dict[str, list[Any]] = {}
    for name, field in fields.items():
        value = given[name] if name in given else _default(field)
        axes[name] = values = list(value) if isinstance(value, list) else [value]
        if name not in given:
            continue
        if not values:
            reader.complain(f"{where}{name} is an empty list: nothing would run")
        for one in values:
            reader.value(where + name, one, hints[name])
    return axes


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    raise TypeError(f"option {field.name!r} has no default; every option of a benchmark needs one")


def _cases(
    generator: type[BenchmarksGenerator],
    axes: Mapping[str, list[Any]],
    checkpoint: CheckpointConfig,
    mesh: MeshConfig | None,
) -> Iterator[Case]:
    title = generator.__name__
    parts = (title, checkpoint.name, mesh.label if mesh else "")
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        options = generator.options_class(**chosen)
        identity = json.dumps(
            [chosen, dataclasses.asdict(checkpoint), mesh and dataclasses.asdict(mesh)],
            sort_keys=True,
            default=str,
        )
        reason = None
        if not options.is_valid():
            reason = options.problem() or f"{generator.options_class.__name__}.is_valid() says no"
        yield Case(
            name=f"{title}_{hashlib.sha256(identity.encode()).hexdigest()[:12]}",
            label=title,
            group=", ".join(part for part in parts if part),
            generator=generator,
            options=options,
            checkpoint=checkpoint,
            mesh=mesh,
            varying={},
            skipped=reason,
        )


def _labelled(cases: list[Case]) -> tuple[Case, ...]:
    """Labels each case by the options that differ within its group; drops duplicate cases."""
    distinct = list({case.name: case for case in cases}.values())
    groups: dict[str, list[dict[str, Any]]] = {}
    for case in distinct:
        groups.setdefault(case.group, []).append(dataclasses.asdict(case.options))
    labelled: list[Case] = []
    for case in distinct:
        varying = {
            name: str(value)
            for name, value in dataclasses.asdict(case.options).items()
            if any(other.get(name) != value for other in groups[case.group])
        }
        label = ", ".join(filter(None, map(case.options.label, varying)))
        labelled.append(dataclasses.replace(case, varying=varying, label=label or case.label))
    return tuple(labelled)
