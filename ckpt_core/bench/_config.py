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

from ckpt_core.bench._yaml import (
    Is,
    LinedDict,
    Natural,
    Positive,
    Reader,
    Text,
    fits,
    nearest,
    read_yaml,
)

PATHWAYS = (
    "Pathways is not supported: ckpt runs wherever plain jax and jax.distributed do; "
    "leave the key out or set it to false"
)


def _is_dtype(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    import ml_dtypes
    import numpy as np

    try:
        np.dtype(getattr(ml_dtypes, value, value))
    except TypeError:
        return False
    return True


def _is_list_of(hint: Any, *, least: int = 0) -> Any:
    return lambda value: (
        isinstance(value, list) and len(value) >= least and all(fits(one, hint) for one in value)
    )


def _is_sharding(value: Any) -> bool:
    axis = str | None
    some = Annotated[Any, Is("", _is_list_of(axis))]
    return value is None or _is_list_of(axis | some)(value)


def _is_degrees(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and _is_list_of(Positive)([*value.values()]))


_IS_DTYPE = Is("the name of a dtype such as float32 or bfloat16", _is_dtype)
_IS_SHARDING = Is("a list of axis names, null, or lists of these", _is_sharding)
_IS_DEGREES = Is("a mapping of axis names to integers of at least 1", _is_degrees)
_IS_SHAPE = Is("a list of integers", _is_list_of(Natural))
_IS_AXES = Is("a list of axis names", _is_list_of(str, least=1))
_IS_OPTIONS = Is("a mapping", lambda value: value is None or isinstance(value, LinedDict))
_IS_SPEC = Is("a mapping of names to arrays", _IS_OPTIONS.test)
_IS_SOME = Is("a list of at least one", _is_list_of(Any, least=1))
_Degrees: TypeAlias = Annotated[Mapping[str, int], _IS_DEGREES]


@dataclass(frozen=True)
class ArraySpec:
    """A synthetic array, or ``count`` of them.

    Attributes:
        dtype: the name of a dtype in jax.numpy.
        sharding: for each dimension a mesh axis, several, or None.
        count: None for one array; a number for a mapping of that many arrays.
    """

    dtype: Annotated[str, _IS_DTYPE]
    shape: Annotated[tuple[int, ...], _IS_SHAPE]
    sharding: Annotated[tuple[Any, ...] | None, _IS_SHARDING] = None
    count: Positive | None = None


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

    name: Text = ""
    spec: Annotated[Mapping[str, Any] | None, _IS_SPEC] = None
    path: Text | None = None
    random_seed: Natural = 0
    sharding_config_path: Text | None = None


@dataclass(frozen=True)
class MeshConfig:
    """A mesh of devices; skipped unless the product of its axes is the number of devices."""

    mesh_axes: Annotated[tuple[str, ...], _IS_AXES]
    ici_parallelism: _Degrees = field(default_factory=dict[str, int])
    dcn_parallelism: _Degrees | None = None
    allow_split_physical_axes: bool = False
    process_is_granule: bool = False

    @property
    def label(self) -> str:
        """``data=2 fsdp=4``."""
        ici, dcn = self.ici_parallelism, self.dcn_parallelism or {}
        sizes = {a: ici.get(a, 1) * dcn.get(a, 1) for a in self.mesh_axes}
        return " ".join(f"{axis}={size}" for axis, size in sizes.items())


@dataclass(frozen=True)
class BenchmarkConfig:
    """One entry of ``benchmarks``: a generator by its import path, and its options."""

    generator: Text
    options: Annotated[LinedDict, _IS_OPTIONS] = field(default_factory=LinedDict)
    line: int = 0


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
    benchmarks: Annotated[tuple[BenchmarkConfig, ...], _IS_SOME]
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
    given, line = read_yaml(text, file)
    reader = Reader(file)
    but = ("file", "checkpoints", "meshes")
    found = reader.fields(given, line, "the suite", SuiteConfig, more=_ELSEWHERE, but=but)
    if not isinstance(given, LinedDict):
        reader.finish()
    if given.get("simdevice") is not None:
        reader.complain(given.lines["simdevice"], f"simdevice: {PATHWAYS}")
    checkpoints = _one_or_many(reader, given, "checkpoint_config", _checkpoint)
    meshes = _one_or_many(reader, given, "mesh_config", _mesh)
    benchmarks = _each(reader, found.pop("benchmarks", ()), _benchmark)
    reader.finish()
    found |= {"benchmarks": tuple(benchmarks), "meshes": tuple(meshes) or (None,)}
    return SuiteConfig(file=file, checkpoints=_named(checkpoints) or (CheckpointConfig(),), **found)


_ELSEWHERE = ("checkpoint_config", "checkpoint_configs", "mesh_config", "mesh_configs", "simdevice")


def _one_or_many(reader: Reader, given: LinedDict, key: str, parse: Any) -> list[Any]:
    """The parsed values under ``key`` (one) or ``<key>s`` (a list); giving both is an error."""
    many = f"{key}s"
    if key in given and many in given:
        reader.complain(given.lines[many], f"give {key} or {many}, not both")
    elif key in given:
        return [parse(reader, given[key], given.lines[key])]
    elif many in given and reader.value(
        many, given[many], Annotated[Any, _IS_SOME], given.lines[many]
    ):
        return _each(reader, given[many], parse)
    return []


def _each(reader: Reader, given: Any, parse: Any) -> list[Any]:
    return [parse(reader, *one) for one in zip(given, given.lines, strict=True)] if given else []


def _named(checkpoints: list[CheckpointConfig]) -> tuple[CheckpointConfig, ...]:
    """The checkpoints with a name for each, so that tables can tell them apart."""
    named: list[CheckpointConfig] = []
    for number, config in enumerate(checkpoints):
        name = config.name or (f"checkpoint {number}" if len(checkpoints) > 1 else "")
        named.append(replace(config, name=name))
    return tuple(named)


def _checkpoint(reader: Reader, given: Any, line: int) -> CheckpointConfig:
    pathways = "load_with_colocated_python"
    found = reader.fields(given, line, "checkpoint_config", CheckpointConfig, more=(pathways,))
    spec, path = found.pop("spec", None), found.get("path")
    if spec is not None and path is not None:
        reader.complain(line, "checkpoint_config has spec and path; give exactly one")
    if found.get("sharding_config_path") is not None and path is None:
        reader.complain(given.lines["sharding_config_path"], "sharding_config_path needs path")
    if isinstance(given, LinedDict) and given.get(pathways):
        reader.complain(given.lines[pathways], f"{pathways}: {PATHWAYS}")
    if spec is not None:
        found["spec"] = _spec(reader, spec)
    return CheckpointConfig(**found)


def _spec(reader: Reader, given: LinedDict) -> dict[str, Any]:
    return {name: _leaf(reader, name, one, given.lines[name]) for name, one in given.items()}


def _leaf(reader: Reader, name: str, given: Any, line: int) -> Any:
    if isinstance(given, str):
        if given not in ("int", "str"):
            reader.complain(line, f"{name}: {given!r} is no leaf; 'int' and 'str' are")
        return PlainSpec(given)
    children = given.values() if isinstance(given, LinedDict) else ()
    if (
        children
        and not {"dtype", "shape"} & set(given)
        and all(isinstance(one, dict | str) for one in children)
    ):
        return _spec(reader, given)
    found = reader.fields(given, line, f"the array {name}", ArraySpec)
    defaults = {"dtype": "float32", "shape": ()}  # where there are problems, nobody gets the array
    return ArraySpec(**{key: _tuples(value) for key, value in (defaults | found).items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _mesh(reader: Reader, given: Any, line: int) -> MeshConfig:
    found = reader.fields(given, line, "mesh_config", MeshConfig)
    axes = found["mesh_axes"] = _tuples(found.get("mesh_axes", ()))
    for key in ("ici_parallelism", "dcn_parallelism"):
        for axis, line in found[key].lines.items() if found.get(key) else ():
            if axes and axis not in axes:
                text = f"{key}: {axis!r} is none of the mesh_axes{nearest(axis, axes)}"
                reader.complain(line, text)
    found["ici_parallelism"] = found.get("ici_parallelism") or {}
    return MeshConfig(**found)


def _benchmark(reader: Reader, given: Any, line: int) -> BenchmarkConfig:
    found = reader.fields(given, line, "a benchmark", BenchmarkConfig, but=("line",))
    if isinstance(given, LinedDict):
        line = given.lines.get("generator", line)
    return BenchmarkConfig(found.get("generator", ""), found.get("options") or LinedDict(), line)
