"""Parses a suite file into frozen dataclasses, by their type hints; an error names every key that is wrong.

The schema is that of Orbax's benchmark framework. ckpt adds ``warmup_repeats``, ``order``, ``steady_memory``,
``remove_repeated_dir``, ``name`` of a checkpoint and ``count`` of an array.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ckpt_core import arguments
from ckpt_core._errors import CheckpointError

T = TypeVar("T")


class ConfigError(CheckpointError, ValueError):
    """A file that cannot be used; the message lists every problem in it, each with its key, as ``problems`` does."""

    def __init__(self, file: str, *problems: str) -> None:
        self.file = file
        self.problems = problems
        super().__init__("\n".join(f"{file}: {text}" for text in problems))


@dataclass(frozen=True)
class Is:
    """For ``Annotated``: a type in words, and what else a value must be; a TypeError is a no."""

    words: str
    test: Callable[[Any], bool] = lambda _: True


Text = Annotated[str, Is("text", bool)]
Positive = Annotated[int, Is("an integer of at least 1", lambda value: value >= 1)]
Natural = Annotated[int, Is("an integer of at least 0", lambda value: value >= 0)]


_PATHWAYS_KEYS = ("load_with_colocated_python", "simdevice")
"""Keys of Orbax's files that may be there if they are null or false."""
_NAMES: dict[Any, str] = {
    **{str: "text", bool: "true or false", int: "an integer", float: "a number"},
    **{tuple: "a list", Mapping: "a mapping", type(None): "null", list: ""},
}


def _spelled(hint: Any) -> str:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(filter(None, map(_spelled, get_args(hint))))
    if origin is Annotated:
        return hint.__metadata__[0].words
    if origin is Literal:
        return " or ".join(map(repr, get_args(hint)))
    return _NAMES.get(origin or hint, getattr(hint, "__name__", str(hint)))


class Reader:
    """Makes what type hints say of the values of a file, and collects all problems for one error."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[str] = []

    def finish(self) -> None:
        """Raises ConfigError if there was any problem."""
        if self.problems:
            raise ConfigError(self.file, *self.problems)

    def value(self, name: str, value: Any, hint: Any) -> Any:
        """What the hint makes of a value; None, and a problem, if it does not fit. No value fits ``list[...]``."""
        try:
            return self._made(name, value, hint)
        except TypeError:
            self.problems.append(f"{name} must be {_spelled(hint)}, not {_described(value)}")

    def _made(self, name: str, value: Any, hint: Any) -> Any:
        """What the hint makes of a value; TypeError if it does not fit."""
        origin, inner = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            for member in inner:
                with contextlib.suppress(TypeError):
                    return self._made(name, value, member)
            raise TypeError
        if origin is Annotated:
            made = self._made(name, value, inner[0])
            if not inner[1].test(value):
                raise TypeError
            return made
        if hint is ArraySpec:
            return self._leaf(name, value)
        if dataclasses.is_dataclass(hint):
            return self.make(name, value, hint)  # pyright: ignore[reportArgumentType]
        if origin is tuple and isinstance(value, list):
            indexed = enumerate(value)
            return tuple(self._made(f"{name}[{n}]", one, inner[0]) for n, one in indexed)
        if origin is Mapping and isinstance(value, dict):
            of_key, of_value = inner
            return {
                self._made(name, key, of_key): self._made(f"{name}.{key}", one, of_value)
                for key, one in value.items()
            }
        if origin is Literal:
            fits = value in inner
        elif hint in (int, float):
            fits = isinstance(value, (int, hint)) and not isinstance(value, bool)
        else:
            fits = hint is Any or (origin is not list and isinstance(value, origin or hint))
        if not fits:
            raise TypeError
        return value

    def _leaf(self, name: str, value: Any) -> Any:
        """An array, ``int`` or ``str`` for a leaf that is none, or a mapping of these."""
        if isinstance(value, str):
            if value not in ("int", "str"):
                self.problems.append(f"{name}: {value!r} is no leaf; 'int' and 'str' are")
            return value
        if isinstance(value, dict) and value and not {"dtype", "shape"} & value.keys():
            return self._made(name, value, Mapping[str, ArraySpec])
        return self.make(name, value, ArraySpec)

    def make(self, where: str, given: Any, kind: type[T], *, but: Iterable[str] = ()) -> T | None:
        """The dataclass of a mapping, which has no keys for the fields ``but``; None, and problems, if it does not fit."""
        what, before = where or "the suite", len(self.problems)
        if not isinstance(given, dict):
            self.problems.append(f"{what} must be a mapping, not {_described(given)}")
            return None
        hints = get_type_hints(kind, include_extras=True)
        fields = {one.name: one for one in dataclasses.fields(kind) if one.name not in but}  # pyright: ignore
        prefix = f"{where}." if where else ""
        for name in _PATHWAYS_KEYS:
            if given.get(name):
                self.problems.append(f"{prefix}{name}: Pathways is not supported: set it to false")
        keys = [key for key in given if key not in _PATHWAYS_KEYS]
        self.unknown(keys, fields, f"{what} has no key")
        values: dict[str, Any] = {}
        for name, one in fields.items():
            if name in given:
                values[name] = self.value(prefix + name, given[name], hints[name])
            elif one.default is one.default_factory:  # both are missing
                self.problems.append(f"{what} lacks the key {name!r}")
        if len(self.problems) > before:
            return None
        made = kind(**values)
        self.problems += [f"{prefix}{text}" for text in getattr(made, "problems", list)()]
        return made

    def unknown(self, given: Iterable[Any], known: Iterable[str], complaint: str) -> None:
        """Complains about the keys that are not known."""
        for key in given:
            if key not in known:
                self.problems.append(f"{complaint} {key!r}{nearest(key, known)}")


def _described(value: Any) -> str:
    """A value and its type as text for messages."""
    if value is None or value == []:
        return "empty" if value is None else "an empty list"
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    names = {str: "text", bool: "boolean", int: "integer", float: "number"}
    return f"{names.get(type(value), type(value).__name__)} {value!r}"


def nearest(word: object, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)``, or the list of all known words if none is similar."""
    known = list(known)
    if close := arguments.nearest(str(word), known):
        return f" (did you mean {close!r}?)"
    return f" (there are: {', '.join(known)})" if known else ""


def _is_dtype(value: str) -> bool:
    import ml_dtypes
    import numpy as np

    return bool(np.dtype(getattr(ml_dtypes, value, value)).name)


_Dtype = Annotated[str, Is("the name of a dtype such as float32 or bfloat16", _is_dtype)]
_Shape = Annotated[tuple[Natural, ...], Is("a list of integers")]
_SOME = Is("a list of at least one", bool)
_Degrees = Annotated[
    Mapping[str, Positive] | None, Is("a mapping of axis names to integers of at least 1")
]
_Sharding = Annotated[
    tuple[str | tuple[str | None, ...] | None, ...] | None,
    Is("a list of axis names, null, or lists of these"),
]


@dataclass(frozen=True)
class ArraySpec:
    """A synthetic array, or ``count`` of them; ``sharding`` has for each dimension a mesh axis, several, or None."""

    dtype: _Dtype
    shape: _Shape
    sharding: _Sharding = None
    count: Positive | None = None


@dataclass(frozen=True)
class CheckpointConfig:
    """The source of ``context.pytree``: a synthetic ``spec``, a checkpoint at ``path``, or None; tables show its ``name``.
    A case with a sharding file, as Orbax's suites have it, is skipped.
    """

    name: Text = ""
    spec: Mapping[str, ArraySpec] | None = None
    path: Text | None = None
    random_seed: Natural = 0
    sharding_config_path: Text | None = None

    def problems(self) -> Iterator[str]:
        """What is wrong with values that fit one by one."""
        if self.spec is not None and self.path is not None:
            yield "spec: there is a path as well; give exactly one"


@dataclass(frozen=True)
class MeshConfig:
    """A mesh of devices; skipped unless the product of its axes is the number of devices."""

    mesh_axes: Annotated[tuple[str, ...], _SOME]
    ici_parallelism: _Degrees = None
    dcn_parallelism: _Degrees = None
    allow_split_physical_axes: bool = False
    process_is_granule: bool = False

    def problems(self) -> Iterator[str]:
        """What is wrong with values that fit one by one."""
        for key in ("ici_parallelism", "dcn_parallelism"):
            for axis in getattr(self, key) or {}:
                if axis not in self.mesh_axes:
                    yield f"{key}: the mesh_axes lack {axis!r}{nearest(axis, self.mesh_axes)}"

    @property
    def degrees(self) -> tuple[list[int], list[int]]:
        """The sizes of the axes within a slice, and over slices."""
        sizes = self.ici_parallelism or {}, self.dcn_parallelism or {}
        ici, dcn = ([one.get(axis, 1) for axis in self.mesh_axes] for one in sizes)
        return ici, dcn

    @property
    def label(self) -> str:
        """``data=2 fsdp=4``."""
        named = zip(self.mesh_axes, *self.degrees, strict=True)
        return " ".join(f"{axis}={ici * dcn}" for axis, ici, dcn in named)


@dataclass(frozen=True)
class BenchmarkConfig:
    """One entry of ``benchmarks``: a generator by its import path, and its options."""

    generator: Text
    options: Mapping[str, Any] | None = None


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

    suite_name: Text
    benchmarks: Annotated[tuple[BenchmarkConfig, ...], _SOME]
    num_repeats: Positive = 1
    warmup_repeats: Natural = 1
    order: Literal["interleaved", "sequential"] = "interleaved"
    steady_memory: bool = False
    remove_repeated_dir: bool = False
    checkpoint_config: CheckpointConfig | None = None
    checkpoint_configs: Annotated[tuple[CheckpointConfig, ...], _SOME] = ()
    mesh_config: MeshConfig | None = None
    mesh_configs: Annotated[tuple[MeshConfig, ...], _SOME] = ()
    baseline_capture_path: Text | None = None
    baseline_path: Text | None = None
    file: str = "<suite>"

    def problems(self) -> Iterator[str]:
        """What is wrong with values that fit one by one."""
        for key in ("checkpoint_config", "mesh_config"):
            if getattr(self, key) is not None and getattr(self, f"{key}s"):
                yield f"give {key} or {key}s, not both"

    @property
    def checkpoints(self) -> tuple[CheckpointConfig, ...]:
        """What to save; of several, each has a name, by which tables distinguish them."""
        given = self.checkpoint_configs or (self.checkpoint_config or CheckpointConfig(),)
        if len(given) == 1:
            return given
        named = ((one.name or f"checkpoint {n}", one) for n, one in enumerate(given))
        return tuple(replace(one, name=name) for name, one in named)

    @property
    def meshes(self) -> tuple[MeshConfig | None, ...]:
        """The meshes to run on; None is all that a case without one has."""
        return self.mesh_configs or (self.mesh_config,)


def load_suite(path: str | os.PathLike[str]) -> SuiteConfig:
    """Reads a suite from a YAML file.

    Raises:
        ConfigError: the file has errors; lists all of them, each with its key.
        FileNotFoundError: there is no such file.
    """
    return parse_suite(Path(path).read_text(encoding="utf-8"), str(path))


def parse_suite(text: str, file: str = "<suite>") -> SuiteConfig:
    """Reads a suite from a text; ``file`` is its name in error messages.

    Raises:
        ConfigError: the text has errors; lists all of them, each with its key.
    """
    import yaml

    try:
        given = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(file, f"not YAML: {error}") from error
    reader = Reader(file)
    suite = reader.make("", given, SuiteConfig, but=["file"])
    reader.finish()
    assert suite is not None  # or there was a problem
    return replace(suite, file=file)
