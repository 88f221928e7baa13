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
from typing import Annotated, Any, Literal, TypeAlias

from ckpt_core.bench._yaml import Is, Natural, Positive, Reader, Text, read_yaml

PATHWAYS = (
    "Pathways is not supported: ckpt runs wherever plain jax and jax.distributed do; "
    "leave the key out or set it to false"
)


def _is_dtype(value: str) -> bool:
    import ml_dtypes
    import numpy as np

    try:
        np.dtype(getattr(ml_dtypes, value, value))
    except TypeError:
        return False
    return True


_Dtype: TypeAlias = Annotated[str, Is("the name of a dtype such as float32 or bfloat16", _is_dtype)]
_Shape: TypeAlias = Annotated[tuple[Natural, ...], Is("a list of integers")]
_Axis: TypeAlias = str | None
_Sharding: TypeAlias = Annotated[
    tuple[_Axis | tuple[_Axis, ...], ...] | None,
    Is("a list of axis names, null, or lists of these"),
]
_Axes: TypeAlias = Annotated[tuple[str, ...], Is("a list of axis names", bool)]
_Degrees: TypeAlias = Annotated[
    Mapping[str, Positive] | None, Is("a mapping of axis names to integers of at least 1")
]
_SOME = Is("a list of at least one", bool)


@dataclass(frozen=True)
class ArraySpec:
    """A synthetic array, or ``count`` of them; ``sharding`` has for each dimension a mesh axis, several, or None."""

    dtype: _Dtype
    shape: _Shape
    sharding: _Sharding = None
    count: Positive | None = None


@dataclass(frozen=True)
class PlainSpec:
    """A leaf that is not an array: ``int`` or ``str``."""

    kind: str


@dataclass(frozen=True)
class CheckpointConfig:
    """The source of ``context.pytree``: a synthetic ``spec``, a checkpoint at ``path``, or None; tables show its ``name``."""

    name: Text = ""
    spec: Annotated[Mapping[str, Any] | None, Is("a mapping of names to arrays")] = None
    path: Text | None = None
    random_seed: Natural = 0
    sharding_config_path: Text | None = None


@dataclass(frozen=True)
class MeshConfig:
    """A mesh of devices; skipped unless the product of its axes is the number of devices."""

    mesh_axes: _Axes
    ici_parallelism: _Degrees = field(default_factory=dict[str, int])
    dcn_parallelism: _Degrees | None = None
    allow_split_physical_axes: bool = False
    process_is_granule: bool = False

    @property
    def label(self) -> str:
        """``data=2 fsdp=4``."""
        ici, dcn = self.ici_parallelism or {}, self.dcn_parallelism or {}
        sizes = {a: ici.get(a, 1) * dcn.get(a, 1) for a in self.mesh_axes}
        return " ".join(f"{axis}={size}" for axis, size in sizes.items())


@dataclass(frozen=True)
class BenchmarkConfig:
    """One entry of ``benchmarks``: a generator by its import path, and its options."""

    generator: Text
    options: Annotated[Mapping[str, Any] | None, Is("a mapping")] = None


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
    suite_name: Text
    benchmarks: Annotated[tuple[BenchmarkConfig, ...], _SOME]
    num_repeats: Positive = 1
    warmup_repeats: Natural = 1
    order: Literal["interleaved", "sequential"] = "interleaved"
    steady_memory: bool = False
    remove_repeated_dir: bool = False
    checkpoints: tuple[CheckpointConfig, ...] = (CheckpointConfig(),)
    meshes: tuple[MeshConfig | None, ...] = (None,)
    baseline_capture_path: Text | None = None
    baseline_path: Text | None = None


def load_suite(path: str | os.PathLike[str]) -> SuiteConfig:
    """Reads a suite from a YAML file.

    Raises:
        ConfigError: the file has errors; lists all of them, each with its key.
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
        ConfigError: the text has errors; lists all of them, each with its key.
    """
    given = read_yaml(text, file)
    reader = Reader(file)
    but = ("file", "checkpoints", "meshes")
    found = reader.fields(given, "", SuiteConfig, *_ELSEWHERE, but=but)
    if not isinstance(given, dict):
        reader.finish()
    if given.get("simdevice") is not None:
        reader.complain(f"simdevice: {PATHWAYS}")
    checkpoints = _one_or_many(reader, given, "checkpoint_config", _checkpoint)
    meshes = _one_or_many(reader, given, "mesh_config", _mesh)
    if "benchmarks" in found:
        found["benchmarks"] = _each(reader, given, "benchmarks", _benchmark)
    reader.finish()
    found |= {"checkpoints": _named(checkpoints) or (CheckpointConfig(),)}
    return SuiteConfig(file=file, meshes=meshes or (None,), **found)


_ELSEWHERE = ("checkpoint_config", "checkpoint_configs", "mesh_config", "mesh_configs", "simdevice")


def _one_or_many(reader: Reader, given: Mapping[str, Any], key: str, parse: Any) -> tuple[Any, ...]:
    """The parsed values under ``key`` (one) or ``<key>s`` (a list); giving both is an error."""
    many = f"{key}s"
    if key in given and many in given:
        reader.complain(f"give {key} or {many}, not both")
    elif key in given:
        return (parse(reader, given[key], key),)
    elif many in given and reader.value(many, given[many], Annotated[tuple[Any, ...], _SOME]):
        return _each(reader, given, many, parse)
    return ()


def _each(reader: Reader, given: Mapping[str, Any], key: str, parse: Any) -> tuple[Any, ...]:
    return tuple(parse(reader, one, f"{key}[{index}]") for index, one in enumerate(given[key]))


def _named(checkpoints: tuple[CheckpointConfig, ...]) -> tuple[CheckpointConfig, ...]:
    """The checkpoints, of several each with a name, by which tables distinguish them."""
    return tuple(
        replace(one, name=one.name or (f"checkpoint {n}" if len(checkpoints) > 1 else ""))
        for n, one in enumerate(checkpoints)
    )


def _checkpoint(reader: Reader, given: Any, where: str) -> CheckpointConfig:
    pathways = "load_with_colocated_python"
    found = reader.fields(given, where, CheckpointConfig, pathways)
    spec, path = found.get("spec"), found.get("path")
    if spec is not None and path is not None:
        reader.complain(f"{where} has spec and path; give exactly one")
    if found.get("sharding_config_path") is not None and path is None:
        reader.complain(f"{where}.sharding_config_path needs path")
    if isinstance(given, dict) and given.get(pathways):
        reader.complain(f"{where}.{pathways}: {PATHWAYS}")
    if spec is not None:
        found["spec"] = _spec(reader, spec, f"{where}.spec")
    return CheckpointConfig(**found)


def _spec(reader: Reader, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {name: _leaf(reader, one, f"{where}.{name}") for name, one in given.items()}


def _leaf(reader: Reader, given: Any, where: str) -> Any:
    if isinstance(given, str):
        if given not in ("int", "str"):
            reader.complain(f"{where}: {given!r} is no leaf; 'int' and 'str' are")
        return PlainSpec(given)
    children = given.values() if isinstance(given, dict) else ()
    is_array = not children or {"dtype", "shape"} & set(given)
    if not is_array and all(isinstance(one, dict | str) for one in children):
        return _spec(reader, given, where)
    # where there are problems, nobody gets the array
    defaults: dict[str, Any] = {"dtype": "float32", "shape": ()}
    return ArraySpec(**(defaults | reader.fields(given, where, ArraySpec)))


def _mesh(reader: Reader, given: Any, where: str) -> MeshConfig:
    found = reader.fields(given, where, MeshConfig)
    axes = found["mesh_axes"] = found.get("mesh_axes", ())
    for key in ("ici_parallelism", "dcn_parallelism"):
        if axes:
            known = f"{where}.{key}: the mesh_axes lack"
            reader.unknown(found.get(key) or {}, axes, known)
    found["ici_parallelism"] = found.get("ici_parallelism") or {}
    return MeshConfig(**found)


def _benchmark(reader: Reader, given: Any, where: str) -> BenchmarkConfig:
    found = reader.fields(given, where, BenchmarkConfig)
    return BenchmarkConfig(found.get("generator", ""), found.get("options"))
