"""The lines that describe a pipeline: one for each node, with its settings.

The detail depends on when the pipeline is described. Before the first element it is as it was
constructed, and all settings count. Later a transformation may have changed its own attributes
(a tokenizer that it loads on first use, a cache, a counter in its ``repr``): then only settings
that use cannot change are described.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, cast

import grain
import numpy as np
from grain import experimental as grain_experimental

from ckpt_grain._values import ValueText, array_text, is_of_grain, made_with

WHOLE, FIRM = "whole, by value", "firm, by value"
"""How much detail a description has: all settings; only those that use cannot change."""

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
_TRANSPARENT = frozenset(
    {"_LazyWorkerSliceIterDataset", "_MpContextIterDataset", "WithOptionsIterDataset"}
)


def is_elastic(obj: Any) -> bool:
    """Whether the iterator's state is the same in every process, whatever their number."""
    # iter() of an ElasticIterator returns an object whose class has no public name.
    return isinstance(obj, grain_experimental.ElasticIterator) or (
        type(obj).__name__ == "_ElasticMapDatasetIterator"
    )


def described(obj: Any, how: str) -> tuple[list[str], list[list[str]]]:
    """One line for each node of an iterator's pipeline, with its inputs indented below; and for each of its sources the name,
    and a digest of the lists of texts and numbers that it holds.
    """
    lines = _Lines(firm=how == FIRM)
    return lines.of(obj), lines.sources


class _Lines:
    def __init__(self, *, firm: bool) -> None:
        self._firm = firm
        self._values = ValueText(firm)
        self.sources: list[list[str]] = []

    def of(self, obj: Any) -> list[str]:
        if isinstance(obj, grain.DataLoaderIterator):
            return self._loader_lines(loader_of(obj))
        if is_elastic(obj):
            return ["ElasticIterator()", *_indented(self._node_lines(obj._ds, {}))]
        return self._node_lines(obj, {})

    def _loader_lines(self, loader: Any) -> list[str]:
        lines = [
            f"DataLoader(worker_count={loader.multiprocessing_options.num_workers}, "
            f"shard_options={loader._shard_options!r})",
            f"  sampler {self._values.text(loader._sampler, source=True)}",
            f"  data_source {self._source_text(loader._data_source)}",
        ]
        return lines + [
            f"  operation {self._values.text(operation)}" for operation in loader._operations
        ]

    def _node_lines(self, node: Any, known: dict[int, list[str]]) -> list[str]:
        """The line of the node, and those of its inputs, indented below."""
        if id(node) in known:  # worker processes and mixtures share most nodes
            return known[id(node)]
        children = [self._node_lines(child, known) for child in _children(node)]
        if type(node).__name__ in _TRANSPARENT and len(children) == 1:
            lines = children[0]
        else:
            lines = [self._label(node)]
            for block, run in itertools.groupby(children):
                count = len(list(run))
                lines += _indented(block if count == 1 else [f"{count} x {block[0]}", *block[1:]])
        known[id(node)] = lines
        return lines

    def _label(self, node: Any) -> str:
        name = type(node).__name__.strip("_")
        settings = self._settings_of(node)
        parts: list[str] = []
        for key, value in sorted(settings.items()):
            if key in _LEFT_OUT or _is_cached(node, key) or isinstance(value, _NODES):
                continue
            if key == "_map_fn" and "_transform" in settings:
                continue  # a method of the transform, which is described already
            if key == "_source":
                parts.append(f"source={self._source_text(value)}")
            elif key == "_rng_pool":
                parts.append(f"seed={getattr(value, '_seed', None)}")
            elif not (key == "_seed_rng_seed" and value is None):
                parts.append(f"{key.strip('_')}={self._values.text(value)}")
        return f"{name}({', '.join(parts)})"

    def _settings_of(self, node: Any) -> dict[str, Any]:
        """Of an iterator only constructor arguments: its other attributes hold its position, and change."""
        of_grain = is_of_grain(node)
        if isinstance(node, grain.DatasetIterator):
            if not of_grain:
                return {}
        elif of_grain or not self._firm:
            return vars(node)
        return {
            f"_{name}": given.value
            for name, given in made_with(node).items()
            if of_grain or given.is_firm()
        }

    def _source_text(self, source: Any) -> str:
        if not is_of_grain(source) and (held := [*self._lists_in(source, 3)]):
            digest = hashlib.sha256("\n".join(held).encode(errors="backslashreplace"))
            self.sources.append([type(source).__name__, digest.hexdigest()[:16]])
        try:
            length = f"[{len(source)}]"
        except TypeError:
            length = ""
        if isinstance(source, np.ndarray):
            return f"ndarray[{source.dtype}{source.shape}]"
        if isinstance(source, (list, tuple)):  # data in memory, not a setting
            return f"{type(source).__name__}{length}"
        return f"{self._values.text(source, source=True)}{length}"

    def _lists_in(self, source: Any, depth: int) -> Iterator[str]:
        """The lists of texts and numbers that a source is or holds, as texts, also those of a source in it. Records are left to
        ``with_proof``: programs keep in them what they compute.
        """
        if (text := _list_text(source)) is not None:
            yield text
        elif depth and not isinstance(source, (type, Mapping, list, tuple)):
            held: Mapping[str, Any] = getattr(source, "__dict__", {})
            if self._firm:  # use may have changed the others
                held = {name: given.value for name, given in made_with(source).items()}
            for name, value in sorted(held.items()):
                if hasattr(type(value), "__getitem__"):
                    yield from (f"{name}: {text}" for text in self._lists_in(value, depth - 1))


def _list_text(value: Any) -> str | None:
    """An array of numbers, or a list of texts and numbers (also in lists), as text; None for anything else. Paths count from
    the folder that they share: the files may have moved.
    """
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "biufcSU":
            return array_text(value, repr)
        value = value.tolist() if value.dtype.kind in "OT" else None
    if not isinstance(value, (list, tuple)) or not _is_plain(value):
        return None
    items = cast("Sequence[Any]", value)
    if items and all(isinstance(item, (str, PurePath)) for item in items):
        texts = list(map(str, items))
        pairs = zip(min(texts), max(texts), strict=False)
        alike = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
        folder = "".join(letter for letter, _ in alike).rpartition("/")[0]
        items = [text[len(folder) :] for text in texts]
    return repr(list(items))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, cast("Sequence[Any]", value)))
    return isinstance(value, (str, bytes, int, float, np.number, PurePath))


def loader_of(iterator: Any) -> Any:
    """The ``grain.DataLoader`` of an iterator."""
    return vars(iterator)["_data_loader"]


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


def _is_cached(node: Any, name: str) -> bool:
    """Whether the attribute is a cached property, which exists only after its first use."""
    return isinstance(inspect.getattr_static(type(node), name, None), functools.cached_property)
