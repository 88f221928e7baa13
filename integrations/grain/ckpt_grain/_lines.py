"""The lines that describe a pipeline: one for each node, with its settings.

The detail depends on when the pipeline is described. Before the first element it is as it was
constructed, and all settings count. Later a transformation may have changed its own attributes
(a tokenizer that it loads on first use, a cache, a counter in its ``repr``): then only settings
that use cannot change are described.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import itertools
from collections import defaultdict
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


def described(obj: Any, how: str) -> tuple[list[str], dict[str, list[list[str]]]]:
    """One line for each node of an iterator's pipeline, with its inputs indented below; and, by ``_content``'s kinds, each source
    that holds such content: its name, and a digest.
    """
    lines = _Lines(firm=how == FIRM)
    return lines.of(obj), lines.held


class _Lines:
    def __init__(self, *, firm: bool) -> None:
        self._firm = firm
        self._values = ValueText(firm)
        self.held: dict[str, list[list[str]]] = {"sources": [], "records": []}

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
        if not is_of_grain(source):
            contents = list(self._contents(source, 3))
            for key, digests in self.held.items():
                if texts := "\n".join(text for kind, text in contents if kind == key):
                    digest = hashlib.sha256(texts.encode(errors="backslashreplace"))
                    digests.append([type(source).__name__, digest.hexdigest()[:16]])
        count = _length(source)
        length = "" if count is None else f"[{count}]"
        if isinstance(source, np.ndarray):
            return f"ndarray[{source.dtype}{source.shape}]"
        if isinstance(source, (list, tuple)):  # data in memory, not a setting
            return f"{type(source).__name__}{length}"
        return f"{self._values.text(source, source=True)}{length}"

    def _contents(self, source: Any, depth: int) -> Iterator[tuple[str, str]]:
        """The ``_content`` of a source, of the entries of a dict, or of what a source holds, also in a source in it; with names."""
        if (content := _content(source)) is not None:
            yield content
        elif isinstance(source, Mapping):
            for key, part in source.items():
                if (content := _content(part)) is not None:
                    yield "records", f"{key!r}: {content[1]}"
        elif depth:
            for name, value in self._held_by(source):
                if isinstance(value, Mapping) and 0 < len(value) == _length(source):
                    # It has an entry for each sample.
                    value = [{"key": key, "value": one} for key, one in value.items()]
                if hasattr(type(value), "__getitem__"):
                    inside = self._contents(value, depth - 1)
                    yield from ((kind, f"{name}: {text}") for kind, text in inside)

    def _held_by(self, source: Any) -> list[tuple[str, Any]]:
        """The attributes of a source; in use only those that it was given, since the others may have changed."""
        if isinstance(source, (type, list, tuple)):
            return []
        if not self._firm:
            return sorted(getattr(source, "__dict__", {}).items())
        return sorted(
            (name, given.value)
            for name, given in made_with(source).items()
            if not (given.optional and isinstance(given.value, dict))
        )


def _content(value: Any) -> tuple[str, str] | None:
    """What a source holds, as a kind and a text: an array of numbers or a list of texts and numbers (also in lists) under
    "sources"; a list with dicts, dataclasses, arrays or None in it, field by field, under "records"; None for anything else.
    Paths, of one field, count from the folder that they share: the files may have moved.
    """
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "biufcSU":
            return "sources", array_text(value, repr)
        value = value.tolist() if value.dtype.kind in "OT" else None
    if not isinstance(value, (list, tuple)):
        return None
    items = list(cast("Sequence[Any]", value))
    if _is_plain(items):
        of_paths = all(isinstance(item, (str, PurePath)) for item in items)
        return "sources", repr(_without_folder(items) if of_paths else items)
    columns = _columns(items)
    if columns is None:
        return None
    fields = (f"{at}: {_without_folder(columns[at])}" for at in sorted(columns, key=repr))
    return "records", "\n".join(fields)


def _without_folder(items: Sequence[Any]) -> list[Any]:
    """Texts, and what is between them, without the folder that the texts share."""
    texts = [str(item) for item in items if isinstance(item, (str, PurePath))]
    pairs = zip(min(texts, default=""), max(texts, default=""), strict=False)
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
    folder = "".join(letter for letter, _ in alike).rpartition("/")[0]
    return [
        str(item)[len(folder) :] if isinstance(item, (str, PurePath)) else item for item in items
    ]


def _columns(items: Sequence[Any]) -> Mapping[tuple[Any, ...], list[Any]] | None:
    """The values of each field of records, with the number of its parts for a value that has fields itself; None if a value is
    neither plain nor of a known container.
    """
    columns: defaultdict[tuple[Any, ...], list[Any]] = defaultdict(list)

    def note(part: Any, field: tuple[Any, ...]) -> bool:
        inside: Any = ()
        if part is None or type(part) in (str, int, float):  # most are: there may be millions
            pass
        elif isinstance(part, Mapping):
            inside = part.items()
        elif isinstance(part, (list, tuple)):
            narrow = field and len(part) <= 16  # such as a pair: its places are fields
            inside = [(place if narrow else "", one) for place, one in enumerate(part)]
        elif isinstance(part, np.ndarray) and part.dtype.kind in "biufcSU":
            part = [array_text(part, repr)]
        elif dataclasses.is_dataclass(part):
            names = [one.name for one in dataclasses.fields(part)]
            inside = [(name, getattr(part, name, None)) for name in names]
        elif not _is_plain(part):
            return False
        columns[field].append([len(inside)] if inside else part)
        return all([note(one, (*field, name)) for name, one in inside])

    return columns if note(items, ()) else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, cast("Sequence[Any]", value)))
    return isinstance(value, (str, bytes, int, float, np.number, PurePath))


def _length(source: Any) -> int | None:
    try:
        return len(source)
    except TypeError:
        return None


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
