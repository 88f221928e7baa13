"""What a pipeline is, in lines of text that are the same in every process that builds it.

Grain's states are positions: they say where, not in what. The description says what: every
transformation with the settings that decide which elements come, and in which order. Settings that
only decide how fast they come (threads, buffers) are left out, and so is code: a function counts by
its name, a transformation by its class, or by its ``repr`` where it defines one.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import hashlib
import inspect
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grain
import jax
import numpy as np
from grain import experimental as grain_experimental
from grain import python as grain_python

from ckpt_core import Mismatch, StructureMismatch

MAX_LINES = 200
"""Lines of a description that are stored; a longer one is compared by its digest."""
MAX_TEXT = 400
"""Characters of one setting; of a longer one, the beginning and a digest."""

MAX_ITEMS = 10_000
"""Entries of a list or dictionary that is told whole; of a longer one, the length."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_NODES = (grain.MapDataset, grain.IterDataset, grain.DatasetIterator)
_ALIASES = ("_map_parent", "_iter_parent", "_maybe_nonnative_parent")
_CHILDREN = ("_parents", "_datasets", *_ALIASES)
"""Where nodes keep what they draw from; under the aliases, perhaps for the second time."""

# Speed, caches, and settings that are told twice.
_LEFT_OUT = frozenset(
    {
        "_allow_nones",
        "_buffer_size",
        "_ctx",
        "_default_seed",
        "_iter_buffer_size",
        "_make_iter_buffer_size",
        "_mp_context",
        "_multiprocessing_options",
        "_num_make_iter_threads",
        "_original_source_map_dataset",
        "_parent_length",
        "_prefetch_buffer_size",
        "_read_options",
        "_record_metrics",
        "_shard_options",
        "_stats",
        "_transform_cls_name",
        "_transform_name",
        "_worker_init_fn",
        "has_child",
        "options",
        "original_len",
        "original_start",
        *_CHILDREN,
    }
)
# Nodes that change nothing about the elements, and differ between ways to run the same pipeline.
_TRANSPARENT = frozenset(
    {"_LazyWorkerSliceIterDataset", "_MpContextIterDataset", "WithOptionsIterDataset"}
)


def describe(obj: Any) -> dict[str, Any]:
    """The description of an iterator's pipeline, as plain values."""
    lines = list(_describe_lines(obj))
    return {
        "grain": grain.__version__,
        # The state of an elastic iterator is the same in every process, whatever their number.
        "processes": None if _is_elastic(obj) else jax.process_count(),
        "lines": lines[:MAX_LINES],
        "digest": hashlib.sha256("\n".join(lines).encode()).hexdigest(),
    }


def problems(obj: Any) -> Iterator[str]:
    """What will keep the saved position from being restored exactly, one sentence each."""
    if not isinstance(obj, grain.DataLoaderIterator):
        return
    loader = _loader_of(obj)
    for what, value in (("data source", loader._data_source), ("sampler", loader._sampler)):
        if not isinstance(value, (list, tuple, np.ndarray)) and _ADDRESS.search(repr(value)):
            yield (
                f"the repr of the {what} {type(value).__name__} holds a memory address, and "
                "grain.DataLoader compares it when a state is restored: another process will not "
                "be able to restore this one. Give the class a __repr__ that is the same each time."
            )
    for operation in loader._operations:
        if not isinstance(operation, _KNOWN_OPERATIONS):
            yield (
                f"the state of grain.DataLoader does not cover what the operation "
                f"{type(operation).__name__} keeps between elements: if it buffers or draws random "
                "numbers, training will not resume exactly. Use grain.transforms instead."
            )


_KNOWN_OPERATIONS = (
    grain.transforms.Batch,
    grain.transforms.Filter,
    grain.transforms.Map,
    grain.transforms.RandomMap,
    grain_experimental.FlatMapTransform,
    grain_python.FilterOperation,
    grain_python.MapOperation,
    grain_python.RandomMapOperation,
)


def require_same(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Returns if two descriptions are of the same pipeline.

    Raises:
        StructureMismatch: they are not; one mismatch per difference.
    """
    differences = list(_differences(saved, now))
    if differences:
        raise StructureMismatch(differences, where="the data pipeline", advice=_ADVICE)
    if saved["grain"] != now["grain"]:
        warnings.warn(
            f"the position was saved by Grain {saved['grain']}, this is {now['grain']}: Grain "
            "promises to understand its states only within one version",
            UserWarning,
            stacklevel=3,
        )


_ADVICE = (
    "The saved position has no meaning in another pipeline. Build the pipeline as it was, or "
    "accept the change by restoring into ckpt_grain.ignore_pipeline_changes(iterator). Only a "
    "grain.experimental.ElasticIterator goes on exactly in another number of processes."
)


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Mismatch]:
    if saved["processes"] != now["processes"]:
        yield Mismatch("processes", "number", str(saved["processes"]), str(now["processes"]))
    if saved["digest"] == now["digest"]:
        return
    same_grain = saved["grain"] == now["grain"]
    # An inserted node moves all below it to the right, which is no difference of theirs.
    before = [line.strip() for line in saved["lines"]]
    after = [line.strip() for line in now["lines"]]
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            continue
        for old, new in _pair(before[i1:i2], after[j1:j2]):
            name = _node_name(new or old or "")
            if not (old and new):
                yield Mismatch(name, "missing" if new else "unexpected", old, new)
            elif unlike := _unlike(old, new, all_settings=same_grain):
                yield Mismatch(name, "setting", *unlike)
    if before == after and same_grain:  # they differ in how nodes are nested, or beyond MAX_LINES
        yield Mismatch("pipeline", "digest", saved["digest"][:12], now["digest"][:12])


def _pair(
    old: Sequence[str], new: Sequence[str]
) -> Iterator[tuple[str, str] | tuple[str, None] | tuple[None, str]]:
    """Lines of the same node beside each other, the others alone."""
    left = list(new)
    for line in old:
        twin = next((other for other in left if _node_name(other) == _node_name(line)), None)
        if twin is None:
            yield line, None
        else:
            left.remove(twin)
            yield line, twin
    for line in left:
        yield None, line


def _node_name(line: str) -> str:
    return line.partition("(")[0]


def _unlike(old: str, new: str, *, all_settings: bool) -> tuple[str, str] | None:
    """The settings of one node that differ, on either side; the whole lines if they have none.

    Another Grain may have added or dropped settings that this pipeline never chose, so that then
    only those which both know are compared (``all_settings=False``).
    """
    before, after = _settings(old), _settings(new)
    keys = [key for key in before | after if all_settings or (key in before and key in after)]
    unlike = [key for key in keys if before.get(key) != after.get(key)]
    if not unlike:
        return (old, new) if all_settings else None
    left, right = (
        ", ".join(f"{key}={side[key]}" for key in unlike if key in side) or "nothing"
        for side in (before, after)
    )
    return left, right


def _settings(line: str) -> dict[str, str]:
    """What stands in the parentheses of a line, by name."""
    parts = re.split(r", (?=\w+=)", line.partition("(")[2].removesuffix(")"))
    return {key: value for key, equals, value in (part.partition("=") for part in parts) if equals}


def _is_elastic(obj: Any) -> bool:
    # iter() of an ElasticIterator is of a class without a public name.
    return isinstance(obj, grain_experimental.ElasticIterator) or (
        type(obj).__name__ == "_ElasticMapDatasetIterator"
    )


def _describe_lines(obj: Any) -> list[str]:
    if isinstance(obj, grain.DataLoaderIterator):
        return _loader_lines(_loader_of(obj))
    if _is_elastic(obj):
        return ["ElasticIterator()", *_indented(_node_lines(obj._ds, {}))]
    return _node_lines(obj, {})


def _loader_of(iterator: Any) -> Any:
    return vars(iterator)["_data_loader"]


def _loader_lines(loader: Any) -> list[str]:
    lines = [
        f"DataLoader(worker_count={loader.multiprocessing_options.num_workers}, "
        f"shard_options={loader._shard_options!r})",
        f"  sampler {_text(loader._sampler)}",
        f"  data_source {_source_text(loader._data_source)}",
    ]
    return lines + [f"  operation {_text(operation)}" for operation in loader._operations]


def _node_lines(node: Any, known: dict[int, list[str]]) -> list[str]:
    """One line for the node, and those of what it draws from, indented below."""
    if id(node) in known:  # worker processes and mixtures share most of their pipeline
        return known[id(node)]
    children = [_node_lines(child, known) for child in _children(node)]
    if type(node).__name__ in _TRANSPARENT and len(children) == 1:
        lines = children[0]
    else:
        lines = [_label(node)]
        for block, count in _runs(children):
            lines += _indented(block if count == 1 else [f"{count} x {block[0]}", *block[1:]])
    known[id(node)] = lines
    return lines


def _indented(lines: Sequence[str]) -> list[str]:
    return ["  " + line for line in lines]


def _runs(blocks: Sequence[list[str]]) -> Iterator[tuple[list[str], int]]:
    """Equal blocks that follow each other, with their number."""
    start = 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or blocks[end] != blocks[start]:
            yield blocks[start], end - start
            start = end


def _children(node: Any) -> Iterator[Any]:
    attributes = vars(node)
    told: set[int] = set()
    for name in _CHILDREN:
        value = attributes.get(name, ())
        for child in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(child, _NODES) and not (name in _ALIASES and id(child) in told):
                told.add(id(child))
                yield child


def _label(node: Any) -> str:
    name = type(node).__name__.strip("_")
    settings = _iterator_settings(node) if isinstance(node, grain.DatasetIterator) else vars(node)
    parts: list[str] = []
    for key, value in sorted(settings.items()):
        if key in _LEFT_OUT or _is_cached(node, key) or isinstance(value, _NODES):
            continue
        if key == "_map_fn" and "_transform" in settings:
            continue  # a method of the same
        if key == "_source":
            parts.append(f"source={_source_text(value)}")
        elif key == "_rng_pool":
            parts.append(f"seed={getattr(value, '_seed', None)}")
        elif not (key == "_seed_rng_seed" and value is None):
            parts.append(f"{key.strip('_')}={_text(value)}")
    return f"{name}({', '.join(parts)})"


def _iterator_settings(iterator: Any) -> dict[str, Any]:
    """What an iterator was made with. Its other attributes are where it is, and change."""
    if not type(iterator).__module__.startswith("grain."):
        return {}
    attributes = vars(iterator)
    found: dict[str, Any] = {}
    for name in inspect.signature(type(iterator).__init__).parameters:
        for attribute in (name, f"_{name}", f"_global_{name}"):
            if attribute in attributes:
                found[f"_{name}"] = attributes[attribute]
    return found


def _is_cached(node: Any, name: str) -> bool:
    """Whether the attribute appears only once somebody has asked for it."""
    return isinstance(inspect.getattr_static(type(node), name, None), functools.cached_property)


def _source_text(source: Any) -> str:
    try:
        length = f"[{len(source)}]"
    except TypeError:
        length = ""
    if isinstance(source, np.ndarray):
        return f"ndarray[{source.dtype}{source.shape}]"
    if isinstance(source, (list, tuple)):  # data in memory is not a setting
        return f"{type(source).__name__}{length}"
    return f"{_text(source)}{length}"


def _text(value: Any) -> str:
    """A setting as text that does not depend on the process, capped in length."""
    text = _full_text(value)
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[:MAX_TEXT]}... sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _full_text(value: Any) -> str:
    match value:
        case np.generic():
            return repr(value.item())
        case None | bool() | int() | float() | str() | slice() | enum.Enum():
            return repr(value)
        case bytes() | list() | tuple() | Mapping() if len(value) > MAX_ITEMS:  # data
            return f"{type(value).__name__}[{len(value)}]"
        case bytes():
            return repr(value)
        case list() | tuple():
            return f"[{', '.join(_full_text(item) for item in value)}]"
        case set() | frozenset():  # in an order that is not that of this process
            return f"{{{', '.join(sorted(_full_text(item) for item in value))}}}"
        case Mapping():
            return f"{{{', '.join(f'{key}: {_full_text(item)}' for key, item in value.items())}}}"
        case np.ndarray():
            return f"ndarray[{value.dtype}{value.shape}]"
        case functools.partial():
            return _full_text(value.func)
        case _:
            return _object_text(value)


def _object_text(value: Any) -> str:
    if inspect.isroutine(value) or inspect.isclass(value):
        owner = getattr(value, "__self__", None)
        prefix = "" if owner is None or inspect.ismodule(owner) else f"{type(owner).__name__}."
        return prefix + value.__name__
    name = type(value).__name__
    if type(value).__repr__ is object.__repr__:
        return name
    dataclass: Any = getattr(value, "__dataclass_params__", None)
    if dataclass is not None and dataclass.repr:  # field by field, for the sake of sets in them
        fields = [field.name for field in dataclasses.fields(value) if field.repr]
        return f"{name}({', '.join(f'{key}={_full_text(getattr(value, key))}' for key in fields)})"
    text = repr(value)
    return name if _ADDRESS.search(text) else text
