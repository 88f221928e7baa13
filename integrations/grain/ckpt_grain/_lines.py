"""The lines that describe a pipeline: one for each node, with the settings that decide which elements come.

The text is the same in every process. Settings count by value: arrays by digests, functions by name, other objects by the
constructor arguments that they keep. An argument that has a default, and holds None or an object, does not count: its use
may have filled it (a cache, a tokenizer).
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import functools
import hashlib
import inspect
import itertools
import operator
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, cast

import grain
import jax
import numpy as np
from grain import experimental as grain_experimental

MAX_TEXT = 400
"""The most characters of one setting; a longer one is cut, with a digest added."""
MAX_ITEMS = 10_000
"""The most entries of a list or dictionary that are described one by one."""
WHOLE_BYTES, BLOCKS, BLOCK_BYTES = 64 << 20, 64, 1 << 20
"""Larger arrays are digested by blocks spread over them, because they may be mapped files."""
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Memory addresses, which differ between processes."""
QUOTED = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"")
"""Text in quotes, as ``repr`` writes it."""

_PLAIN = (
    *(bool, int, float, complex, str, bytes, slice, range, np.dtype, types.EllipsisType),
    *(types.NoneType, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, PurePath),
    *(operator.itemgetter, operator.attrgetter, operator.methodcaller),
)
"""Types of immutable values, which are described by their ``repr``."""

_UNCHANGING = (
    *(*_PLAIN, enum.Enum, np.generic, re.Pattern, np.ndarray, jax.Array, tuple, frozenset),
    *(types.FunctionType, types.BuiltinFunctionType, type, functools.partial, np.ufunc),
)
"""Types of arguments that count even if they have a default."""

_NODES = (grain.MapDataset, grain.IterDataset, grain.DatasetIterator)
_ALIASES = ("_map_parent", "_iter_parent", "_maybe_nonnative_parent")
_CHILDREN = ("_parents", "_datasets", *_ALIASES)
"""Attributes that hold a node's inputs; the aliases may hold the same inputs again."""

_LEFT_OUT = frozenset(
    (
        # Settings that affect only the speed, and what Grain notes of a run.
        *("_buffer_size", "_iter_buffer_size", "_prefetch_buffer_size", "_read_options"),
        *("_make_iter_buffer_size", "_num_make_iter_threads", "_worker_init_fn", "options"),
        *("_mp_context", "_multiprocessing_options", "_ctx", "_record_metrics", "_stats"),
        # Caches and duplicates of other settings.
        *("_allow_nones", "_default_seed", "_shard_options", "_transform_cls_name"),
        *("_original_source_map_dataset", "_parent_length", "_transform_name", "has_child"),
        *("original_len", "original_start", *_CHILDREN),
    )
)
# Nodes that do not change the elements, and depend on how the pipeline is run.
_TRANSPARENT = ("_LazyWorkerSliceIterDataset", "_MpContextIterDataset", "WithOptionsIterDataset")


def is_elastic(obj: Any) -> bool:
    """Whether the iterator's state is the same in every process, whatever their number."""
    # iter() of an ElasticIterator returns an object whose class has no public name.
    return isinstance(obj, grain_experimental.ElasticIterator) or (
        type(obj).__name__ == "_ElasticMapDatasetIterator"
    )


def digest_of(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()


class Lines:
    """One line for each node, with its inputs indented below; and each source's name with a digest of its lists."""

    def __init__(self) -> None:
        self._known: dict[int, list[str]] = {}
        self.sources: list[list[str]] = []

    def of(self, obj: Any) -> list[str]:
        if is_elastic(obj):
            return ["ElasticIterator()", *_indented(self._node_lines(obj._ds))]
        if not isinstance(obj, grain.DataLoaderIterator):
            return self._node_lines(obj)
        loader: Any = vars(obj)["_data_loader"]
        return [
            f"DataLoader(worker_count={loader.multiprocessing_options.num_workers}, "
            f"shard_options={loader._shard_options!r})",
            f"  sampler {_setting(loader._sampler)}",
            f"  data_source {self._source_text(loader._data_source)}",
            *(f"  operation {_setting(operation)}" for operation in loader._operations),
        ]

    def _node_lines(self, node: Any) -> list[str]:
        """The line of the node, and those of its inputs, indented below."""
        if id(node) in self._known:  # worker processes and mixtures share most nodes
            return self._known[id(node)]
        children = [self._node_lines(child) for child in _children(node)]
        if type(node).__name__ in _TRANSPARENT and len(children) == 1:
            lines = children[0]
        else:
            lines = [self._label(node)]
            for block, run in itertools.groupby(children):
                count = len(list(run))
                lines += _indented(block if count == 1 else [f"{count} x {block[0]}", *block[1:]])
        self._known[id(node)] = lines
        return lines

    def _label(self, node: Any) -> str:
        settings = _settings_of(node)
        parts: list[str] = []
        for key, value in sorted(settings.items()):
            member = inspect.getattr_static(type(node), key, None)
            is_cached = isinstance(member, functools.cached_property)  # there after its first use
            if key in _LEFT_OUT or is_cached or isinstance(value, _NODES):
                continue
            if key == "_map_fn" and "_transform" in settings:
                continue  # a method of the transform, which is described already
            if key == "_source":
                parts.append(f"source={self._source_text(value)}")
            elif key == "_rng_pool":
                parts.append(f"seed={getattr(value, '_seed', None)}")
            elif not (key == "_seed_rng_seed" and value is None):
                parts.append(f"{key.strip('_')}={_setting(value)}")
        return f"{type(node).__name__.strip('_')}({', '.join(parts)})"

    def _source_text(self, source: Any) -> str:
        if not _is_of_grain(source) and (held := [*_lists_in(source)]):
            self.sources.append([type(source).__name__, digest_of("\n".join(held))[:16]])
        if isinstance(source, np.ndarray):
            return f"ndarray[{source.dtype}{source.shape}]"
        # What a list holds is data in memory, and not a setting.
        is_list = isinstance(source, (list, tuple))
        name = type(source).__name__ if is_list else _setting(source, is_source=True)
        return f"{name}[{len(source)}]" if hasattr(type(source), "__len__") else name


def _indented(lines: Sequence[str]) -> list[str]:
    return ["  " + line for line in lines]


def _children(node: Any) -> Iterator[Any]:
    attributes = vars(node)
    seen: set[int] = set()
    for name in _CHILDREN:
        value = attributes.get(name, ())
        for child in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(child, _NODES) and not (name in _ALIASES and id(child) in seen):
                seen.add(id(child))
                yield child


def _settings_of(node: Any) -> Mapping[str, Any]:
    """The attributes of Grain's own datasets; of other nodes constructor arguments, because use changes their attributes."""
    of_grain, is_iterator = _is_of_grain(node), isinstance(node, grain.DatasetIterator)
    if of_grain and not is_iterator:
        return vars(node)
    if is_iterator and not of_grain:
        return {}  # its attributes hold its position
    return {f"_{name}": value for name, value in _arguments_of(node, every=of_grain).items()}


def _is_of_grain(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "grain"


def _lists_in(source: Any, depth: int = 3, given: bool = True) -> Iterator[str]:
    """The lists of texts and numbers that a source is or holds, as texts, also those of a source in it. A list of numbers
    counts if the constructor was given it: use may fill others. Records are left to ``with_proof``: programs keep in them
    what they compute.
    """
    if isinstance(source, (list, tuple, np.ndarray)):
        is_array = isinstance(source, np.ndarray) and source.dtype.kind in "biufcSU"
        entries: list[Any] = [] if is_array else list(cast("Sequence[Any]", source))
        leaves = jax.tree.leaves(entries, is_leaf=lambda one: not isinstance(one, (list, tuple)))
        counts = given or any(isinstance(leaf, (str, PurePath)) for leaf in leaves)
        kinds = (str, bytes, int, float, np.number, PurePath)
        plain = all(isinstance(leaf, kinds) for leaf in leaves)
        if is_array or (counts and plain):
            yield text_of(source)
    elif depth and not isinstance(source, (type, Mapping)):
        parameters = _parameters(type(source))
        for name, value in sorted(_attributes(source).items()):
            if hasattr(type(value), "__getitem__"):
                given = name.lstrip("_") in parameters
                yield from (f"{name}: {text}" for text in _lists_in(value, depth - 1, given))


def _setting(value: Any, *, is_source: bool = False) -> str:
    """A setting as text, shortened to MAX_TEXT; of a source without what it holds in containers, which is data."""
    by_fields = is_source and _as_array(value) is None
    text = _object_text(value, text_of, True) if by_fields else text_of(value)
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[:MAX_TEXT]!r}... sha256:{digest_of(text)[:16]}"


def text_of(value: Any, depth: int = 8) -> str:
    """A value as text that is the same in every process; below the depth only the class of an object."""

    def inner(part: Any) -> str:
        return text_of(part, depth - 1)

    match value:
        case _ if depth == 0:  # an object may hold itself
            return type(value).__name__
        case np.generic() if value.dtype.names is None:
            return repr(value.item())
        case enum.Enum():
            return f"{type(value).__name__}.{value.name}"
        case re.Pattern():
            return f"Pattern({value.pattern!r}, {int(value.flags)})"
        case _ if isinstance(value, _PLAIN):
            return repr(value)
        case list() | tuple():
            return f"[{_joined(_without_folder(value), inner)}]"
        case set() | frozenset():  # sorted, because the order differs between processes
            return f"{{{', '.join(sorted(map(inner, value)))}}}"
        case Mapping():
            return f"{{{_joined(value.items(), lambda item: _entry_text(item, inner))}}}"
        case functools.partial():
            return inner(value.func)
        case _ if (array := _as_array(value)) is not None:
            return _array_text(array, inner)
        case type():
            return value.__qualname__
        case _ if callable(value) and isinstance(getattr(value, "__name__", None), str):
            return _function_text(value, inner)
        case _:
            return _object_text(value, inner, False)


def _entry_text(item: tuple[Any, Any], inner: Callable[[Any], str]) -> str:
    key, value = item
    named = isinstance(key, str) and key.isidentifier()
    return f"{key if named else inner(key)}: {inner(value)}"


def _joined(items: Any, inner: Callable[[Any], str]) -> str:
    """Entries with commas; above MAX_ITEMS, their number and a digest of a sample."""
    if len(items) <= MAX_ITEMS:
        return ", ".join(map(inner, items))
    step, last = len(items) // MAX_ITEMS, len(items) - 1
    sample = [inner(item) for at, item in enumerate(items) if at % step == 0 or at == last]
    digest = digest_of("".join(f"{text}\n" for text in sample))
    return f"{len(items)} entries, digest {digest[:16]}"


def _without_folder(items: Sequence[Any]) -> Sequence[Any]:
    """Paths from the folder that they share: files may move."""
    if not items or not all(isinstance(item, (str, PurePath)) for item in items):
        return items
    texts = list(map(str, items))
    folder = os.path.commonprefix(texts).rpartition("/")[0]  # noqa: RUF071 (letters, then the folder)
    return [text[len(folder) :] for text in texts]


def _as_array(value: Any) -> np.ndarray | None:
    """The value as a host array; None if it is not an array, or not readable on the host."""
    is_array = isinstance(value, (np.ndarray, jax.Array))
    if not is_array and type(value).__module__.partition(".")[0] not in ("torch", "tensorflow"):
        return None
    try:
        if is_array and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        found = np.asarray(value)
    except (RuntimeError, TypeError, ValueError):  # deleted, of several hosts, on a device of torch
        return None
    return found if is_array or found.dtype.kind != "O" else None


def _array_text(array: np.ndarray, inner: Callable[[Any], str]) -> str:
    if array.dtype.kind in "OTV":  # references, or with padding between fields
        return f"ndarray[{array.dtype}{array.shape}, {inner(array.tolist())}]"
    found = hashlib.sha256()
    if array.nbytes <= WHOLE_BYTES:
        found.update(array.tobytes())
    else:
        items = max(1, BLOCK_BYTES // array.itemsize)
        for start in np.linspace(0, array.size - items, BLOCKS).astype(np.int64):
            found.update(array.flat[start : start + items].tobytes())
    return f"ndarray[{array.dtype}{array.shape}, digest {found.hexdigest()[:16]}]"


def _function_text(value: Any, inner: Callable[[Any], str]) -> str:
    """A function by its name, a method with its object; what it holds and its code are not compared."""
    if isinstance(value, types.FunctionType):
        return value.__qualname__
    owner = getattr(value, "__self__", None)
    if owner is not None and not inspect.ismodule(owner):
        return f"{inner(owner)}.{value.__name__}"
    wrapped = getattr(value, "__wrapped__", None)  # by jax.jit, functools.lru_cache
    return value.__name__ if wrapped is None else f"{type(value).__name__}({inner(wrapped)})"


def _object_text(value: Any, inner: Callable[[Any], str], is_source: bool) -> str:
    """An object with the constructor arguments that it keeps; its own ``repr`` if it keeps none, and of Grain's own."""
    name, is_dataclass = type(value).__name__, dataclasses.is_dataclass(value)
    arguments = _arguments_of(value)
    own_repr = type(value).__repr__ is not object.__repr__ and not is_dataclass
    if own_repr and (_is_of_grain(value) or not arguments):
        text = repr(value)
        return name if ADDRESS.search(text) else text
    settings = ", ".join(
        f"{key}={inner(argument)}"
        for key, argument in arguments.items()
        if not (is_source and isinstance(argument, (list, tuple, dict, np.ndarray)))
    )
    return f"{name}({settings})" if settings or is_dataclass else name


def _arguments_of(obj: Any, *, every: bool = False) -> dict[str, Any]:
    """The constructor arguments that an object keeps under their names, without those that its use may have set."""
    attributes, found = _attributes(obj), dict[str, Any]()
    for name, parameter in _parameters(type(obj)).items():
        for attribute in (name, f"_{name}", f"_global_{name}"):
            value = attributes.get(attribute)
            required = every or parameter.default is parameter.empty
            if attribute in attributes and (
                required or (value is not None and isinstance(value, _UNCHANGING))
            ):
                found[name] = value
    return found


def _parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(cls.__init__).parameters
    except (TypeError, ValueError):  # a class written in C
        return {}


def _attributes(obj: Any) -> dict[str, Any]:
    members = {name: member for cls in type(obj).__mro__ for name, member in vars(cls).items()}
    slots = [name for name, one in members.items() if isinstance(one, types.MemberDescriptorType)]
    held = {name: getattr(obj, name) for name in slots if hasattr(obj, name)}
    return {**held, **getattr(obj, "__dict__", {})}
