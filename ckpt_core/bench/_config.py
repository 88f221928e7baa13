"""Parses a suite file into frozen dataclasses.

The schema is that of Orbax's benchmark framework: its files load after replacing the names of
the generators. ckpt adds ``warmup_repeats``, ``order``, ``steady_memory``,
``remove_repeated_dir``, ``name`` of a checkpoint and ``count`` of an array.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt_core.bench._yaml import (
    Node,
    Reader,
    at_least,
    describe,
    is_bool,
    is_text,
    nearest,
    one_of,
    read_yaml,
)

PATHWAYS = (
    "Pathways is not supported: ckpt runs wherever plain jax and jax.distributed do; "
    "leave the key out or set it to false"
)


@dataclass(frozen=True)
class ArraySpec:
    """A synthetic array, or ``count`` of them.

    Attributes:
        dtype: the name of a dtype in jax.numpy.
        sharding: for each dimension a mesh axis, several, or None.
        count: None for one array; a number for a mapping of that many arrays.
    """

    dtype: str
    shape: tuple[int, ...]
    sharding: tuple[Any, ...] | None = None
    count: int | None = None


@dataclass(frozen=True)
class PlainSpec:
    """A leaf that is not an array: ``int`` or ``str``."""

    kind: str


@dataclass(frozen=True)
class CheckpointConfig:
    """The source of ``context.pytree``: a synthetic ``spec``, a checkpoint at ``path``, or None.

    Attributes:
        spec: name -> ArraySpec, PlainSpec, or a mapping of these.
        random_seed: seed of the synthetic numbers.
        sharding_config_path: JSON file with the wanted sharding of every leaf, for ``path``.
        name: shown in tables; numbered if several checkpoints have none.
    """

    name: str = ""
    spec: Mapping[str, Any] | None = None
    path: str | None = None
    random_seed: int = 0
    sharding_config_path: str | None = None


@dataclass(frozen=True)
class MeshConfig:
    """A mesh of devices; skipped unless the product of its axes is the number of devices."""

    mesh_axes: tuple[str, ...]
    ici_parallelism: Mapping[str, int] = field(default_factory=dict[str, int])
    dcn_parallelism: Mapping[str, int] | None = None
    allow_split_physical_axes: bool = False
    process_is_granule: bool = False

    @property
    def label(self) -> str:
        """``data=2 fsdp=4``."""
        dcn = self.dcn_parallelism or {}
        sizes = {a: self.ici_parallelism.get(a, 1) * dcn.get(a, 1) for a in self.mesh_axes}
        return " ".join(f"{axis}={size}" for axis, size in sizes.items())


@dataclass(frozen=True)
class BenchmarkConfig:
    """One entry of ``benchmarks``: a generator by its import path, and its options."""

    generator: str
    options: Mapping[str, Node]
    line: int


@dataclass(frozen=True)
class SuiteConfig:
    """A suite file.

    Attributes:
        num_repeats: the number of counted runs of each combination.
        warmup_repeats: the number of uncounted runs before them.
        order: ``interleaved`` runs every combination once, in turn, then all again, so that a slow
            minute of the machine affects all of them; ``sequential`` finishes one before the next.
        steady_memory: start the process with a malloc that keeps freed memory.
        remove_repeated_dir: delete the files of each run when it ends.
    """

    file: str
    suite_name: str
    benchmarks: tuple[BenchmarkConfig, ...]
    num_repeats: int = 1
    warmup_repeats: int = 1
    order: str = "interleaved"
    steady_memory: bool = False
    remove_repeated_dir: bool = False
    checkpoints: tuple[CheckpointConfig, ...] = (CheckpointConfig(),)
    meshes: tuple[MeshConfig | None, ...] = (None,)
    baseline_capture_path: str | None = None
    baseline_path: str | None = None


_SUITE_KEYS = (
    "suite_name",
    "benchmarks",
    "num_repeats",
    "warmup_repeats",
    "order",
    "steady_memory",
    "remove_repeated_dir",
    "checkpoint_config",
    "checkpoint_configs",
    "mesh_config",
    "mesh_configs",
    "baseline_capture_path",
    "baseline_path",
    "simdevice",
)


def load_suite(path: str | os.PathLike[str]) -> SuiteConfig:
    """Reads a suite from a YAML file.

    Raises:
        ConfigError: the file has errors; lists all of them, each with its line.
        FileNotFoundError: there is no such file.

    Example:
        >>> from ckpt_core import bench
        >>> bench.load_suite("benchmarks/quick.yaml").num_repeats  # doctest: +SKIP
        3
    """
    return parse_suite(Path(path).read_text(encoding="utf-8"), str(path))


def parse_suite(text: str, file: str = "<suite>") -> SuiteConfig:
    """Reads a suite from a text; ``file`` is its name in error messages.

    Raises:
        ConfigError: the text has errors; lists all of them, each with its line.
    """
    root = read_yaml(text, file)
    reader = Reader(file)
    found = reader.mapping(root, "the suite", _SUITE_KEYS, ("suite_name", "benchmarks"))
    if "simdevice" in found and found["simdevice"].value is not None:
        reader.complain(found["simdevice"], f"simdevice: {PATHWAYS}")
    checkpoints = _one_or_many(reader, found, "checkpoint_config", _checkpoint)
    meshes = _one_or_many(reader, found, "mesh_config", _mesh)
    benchmarks: list[BenchmarkConfig] = []
    if "benchmarks" in found:
        for node in reader.items(found["benchmarks"], "benchmarks"):
            benchmarks += _benchmark(reader, node)
    suite = SuiteConfig(
        file=file,
        suite_name=reader.take(found, "suite_name", "", is_text),
        benchmarks=tuple(benchmarks),
        num_repeats=reader.take(found, "num_repeats", 1, at_least(1)),
        warmup_repeats=reader.take(found, "warmup_repeats", 1, at_least(0)),
        order=reader.take(found, "order", "interleaved", one_of("interleaved", "sequential")),
        steady_memory=reader.take(found, "steady_memory", False, is_bool),
        remove_repeated_dir=reader.take(found, "remove_repeated_dir", False, is_bool),
        checkpoints=_named(checkpoints) or (CheckpointConfig(),),
        meshes=tuple(meshes) or (None,),
        baseline_capture_path=reader.take(found, "baseline_capture_path", None, _text_or_none),
        baseline_path=reader.take(found, "baseline_path", None, _text_or_none),
    )
    reader.finish()
    return suite


def _one_or_many(reader: Reader, found: Mapping[str, Node], key: str, parse: Any) -> list[Any]:
    """The parsed values under ``key`` (one) or ``<key>s`` (a list); giving both is an error."""
    many = f"{key}s"
    if key in found and many in found:
        reader.complain(found[many], f"give {key} or {many}, not both")
        return []
    if key in found:
        nodes = [found[key]]
    elif many in found:
        nodes = reader.items(found[many], many)
    else:
        return []
    return [parsed for node in nodes if (parsed := parse(reader, node)) is not None]


def _named(checkpoints: list[CheckpointConfig]) -> tuple[CheckpointConfig, ...]:
    """The checkpoints with a name for each, so that tables can tell them apart."""
    named: list[CheckpointConfig] = []
    for number, config in enumerate(checkpoints):
        name = config.name or (f"checkpoint {number}" if len(checkpoints) > 1 else "")
        named.append(replace(config, name=name))
    return tuple(named)


def _text_or_none(value: Any) -> str | None:
    return None if value is None else is_text(value)


def _checkpoint(reader: Reader, node: Node) -> CheckpointConfig | None:
    keys = (
        "name",
        "spec",
        "path",
        "random_seed",
        "sharding_config_path",
        "load_with_colocated_python",
    )
    found = reader.mapping(node, "checkpoint_config", keys)
    spec = found.get("spec")
    path = reader.take(found, "path", None, _text_or_none)
    if spec is not None and spec.value is None:
        spec = None
    if spec is not None and path is not None:
        reader.complain(node, "checkpoint_config has spec and path; give exactly one")
    sharding = reader.take(found, "sharding_config_path", None, _text_or_none)
    if sharding is not None and path is None:
        reader.complain(found["sharding_config_path"], "sharding_config_path needs path")
    if reader.take(found, "load_with_colocated_python", False, is_bool):
        reader.complain(
            found["load_with_colocated_python"], f"load_with_colocated_python: {PATHWAYS}"
        )
    return CheckpointConfig(
        name=reader.take(found, "name", "", is_text),
        spec=None if spec is None else _spec(reader, spec),
        path=path,
        random_seed=reader.take(found, "random_seed", 0, at_least(0)),
        sharding_config_path=sharding,
    )


def _spec(reader: Reader, node: Node) -> dict[str, Any]:
    if not isinstance(node.value, dict):
        reader.complain(node, f"spec must map names to arrays, not {describe(node.value)}")
        return {}
    return {name: _spec_entry(reader, name, child) for name, child in node.value.items()}


def _spec_entry(reader: Reader, name: str, node: Node) -> Any:
    if isinstance(node.value, str):
        if node.value in ("int", "str"):
            return PlainSpec(node.value)
        reader.complain(node, f"{name}: {node.value!r} is no leaf; 'int' and 'str' are")
        return PlainSpec("int")
    if isinstance(node.value, dict) and not {"dtype", "shape"} & set(node.value):
        children: dict[str, Node] = node.value
        if children and all(isinstance(child.value, dict | str) for child in children.values()):
            return _spec(reader, node)
    known = ("dtype", "shape", "sharding", "count")
    found = reader.mapping(node, f"the array {name}", known, ("dtype", "shape"))
    return ArraySpec(
        dtype=reader.take(found, "dtype", "float32", _is_dtype),
        shape=tuple(reader.take(found, "shape", [], _is_shape)),
        sharding=_tuples(reader.take(found, "sharding", None, _is_sharding)),
        count=reader.take(found, "count", None, at_least(1)),
    )


def _is_dtype(value: Any) -> str | None:
    import ml_dtypes
    import numpy as np

    try:
        np.dtype(getattr(ml_dtypes, value, value) if isinstance(value, str) else None)
    except TypeError:
        return "the name of a dtype such as float32 or bfloat16"
    return None if isinstance(value, str) else "the name of a dtype such as float32 or bfloat16"


def _is_shape(value: Any) -> str | None:
    good = isinstance(value, list) and all(at_least(0)(size) is None for size in value)
    return None if good else "a list of integers"


def _is_sharding(value: Any) -> str | None:
    def is_axis(axis: Any) -> bool:
        return axis is None or isinstance(axis, str)

    def is_entry(entry: Any) -> bool:
        return is_axis(entry) or (isinstance(entry, list) and all(map(is_axis, entry)))

    good = value is None or (isinstance(value, list) and all(map(is_entry, value)))
    return None if good else "a list of axis names, null, or lists of these"


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _mesh(reader: Reader, node: Node) -> MeshConfig | None:
    keys = (
        "mesh_axes",
        "ici_parallelism",
        "dcn_parallelism",
        "allow_split_physical_axes",
        "process_is_granule",
    )
    found = reader.mapping(node, "mesh_config", keys, ("mesh_axes",))
    axes = tuple(reader.take(found, "mesh_axes", [], _is_axes))
    degrees: dict[str, Any] = {}
    for key in ("ici_parallelism", "dcn_parallelism"):
        degrees[key] = reader.take(found, key, None, _is_degrees)
        for axis in degrees[key] or ():
            if axis not in axes and axes:
                reader.complain(
                    found[key].value[axis],
                    f"{key}: {axis!r} is none of the mesh_axes{nearest(axis, axes)}",
                )
    return MeshConfig(
        mesh_axes=axes,
        ici_parallelism=degrees["ici_parallelism"] or {},
        dcn_parallelism=degrees["dcn_parallelism"],
        allow_split_physical_axes=reader.take(found, "allow_split_physical_axes", False, is_bool),
        process_is_granule=reader.take(found, "process_is_granule", False, is_bool),
    )


def _is_axes(value: Any) -> str | None:
    good = isinstance(value, list) and value and all(isinstance(axis, str) for axis in value)
    return None if good else "a list of axis names"


def _is_degrees(value: Any) -> str | None:
    if value is None:
        return None
    good = isinstance(value, dict) and all(at_least(1)(size) is None for size in value.values())
    return None if good else "a mapping of axis names to integers of at least 1"


def _benchmark(reader: Reader, node: Node) -> list[BenchmarkConfig]:
    found = reader.mapping(node, "a benchmark", ("generator", "options"), ("generator",))
    generator = reader.take(found, "generator", None, is_text)
    if generator is None:
        return []
    options = found.get("options")
    values: dict[str, Node] = {}
    if options is not None and options.value is not None:
        if isinstance(options.value, dict):
            values = options.value
        else:
            reader.complain(options, f"options must be a mapping, not {describe(options.value)}")
    return [BenchmarkConfig(generator, values, found["generator"].line)]
