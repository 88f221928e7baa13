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

from ckpt_grain._arrays import array_text
from ckpt_grain._values import ValueText, is_of_grain, made_with

WHOLE, FIRM = "whole, by value", "firm, by value"
"""How much detail a description has: all settings; only those that use cannot change."""

_NODES = (grain.MapDataset, grain.IterDataset, grain.DatasetIterator)
_ALIASES = ("_map_parent", "_iter_parent", "_maybe_nonnative_parent")
_CHILDREN = ("_parents", "_datasets", *_ALIASES)
"""Attributes that hold a node's inputs; the aliases may hold the same inputs again."""

# Settings that affect only speed, caches, and duplicates of other settings.
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


def described(obj: Any, how: str) -> tuple[list[str], list[list[str]], list[list[str]]]:
    """One line for each node of an iterator's pipeline, with its inputs indented below; for each of its sources the name, and a
    digest of the lists of texts and numbers that it holds; and the same of its records.
    """
    lines = _Lines(firm=how == FIRM)
    return lines.of(obj), lines.sources, lines.records


class _Lines:
    def __init__(self, *, firm: bool) -> None:
        self._firm = firm
        self._values = ValueText(firm)
        self.sources: list[list[str]] = []
        self.records: list[list[str]] = []

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
            for block, count in _runs(children):
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
        of_grain = is_of_grain(node)
        if isinstance(node, grain.DatasetIterator):
            return _made_with(node) if of_grain else {}
        if not self._firm or of_grain:
            return vars(node)
        return {
            f"_{name}": given.value
            for name, given in made_with(node).items()
            if self._values.counts_firmly(given.value, given.optional)
        }

    def _source_text(self, source: Any) -> str:
        if not is_of_grain(source):
            held = (self.sources, self._lists_in), (self.records, self._records_in)
            for known, found_in in held:
                if texts := "\n".join(found_in(source, 3)):
                    digest = hashlib.sha256(texts.encode(errors="backslashreplace"))
                    known.append([type(source).__name__, digest.hexdigest()[:16]])
        count = _length(source)
        length = "" if count is None else f"[{count}]"
        if isinstance(source, np.ndarray):
            return f"ndarray[{source.dtype}{source.shape}]"
        if isinstance(source, (list, tuple)):  # data in memory, not a setting
            return f"{type(source).__name__}{length}"
        return f"{self._values.text(source, source=True)}{length}"

    def _lists_in(self, source: Any, depth: int) -> Iterator[str]:
        """The lists of texts and numbers that a source is or holds, as texts, also those of a source in it."""
        if (text := _list_text(source)) is not None:
            yield text
        elif depth:
            for name, value in self._held_by(source):
                if _list_text(value) is not None or hasattr(type(value), "__getitem__"):
                    yield from (f"{name}: {text}" for text in self._lists_in(value, depth - 1))

    def _records_in(self, source: Any, depth: int) -> Iterator[str]:
        """Likewise lists that hold dicts, dataclasses, arrays or None; lists in dicts; and a dict with an entry for each sample."""
        if (text := _records_text(source)) is not None:
            yield text
        elif isinstance(source, Mapping):
            found = {
                repr(key): _list_text(part) or _records_text(part) for key, part in source.items()
            }
            yield from (f"{key}: {text}" for key, text in found.items() if text is not None)
        elif depth:
            for name, value in self._held_by(source):
                if isinstance(value, Mapping) and len(value) == _length(source):
                    value = [{"key": key, "value": one} for key, one in value.items()]
                if hasattr(type(value), "__getitem__"):
                    yield from (f"{name}: {text}" for text in self._records_in(value, depth - 1))

    def _held_by(self, source: Any) -> list[tuple[str, Any]]:
        """The attributes of a source; in use only those that it was given, since the others may have changed."""
        if isinstance(source, (type, Mapping, list, tuple)):
            return []
        if self._firm:
            given = made_with(source).items()
            return sorted(
                (name, one.value)
                for name, one in given
                if not (one.optional and isinstance(one.value, dict))
            )
        return sorted(getattr(source, "__dict__", {}).items())


def _list_text(value: Any) -> str | None:
    """An array of numbers, or a list of texts and numbers (also in lists), as text; None for anything else. Paths count from
    the folder that they share: the files may have moved.
    """
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufcSU":
        return array_text(value, repr)
    if isinstance(value, np.ndarray) and value.dtype.kind in "OT":
        value = value.tolist()
    if not isinstance(value, (list, tuple)) or not _is_plain(value):
        return None
    items = list(cast("Sequence[Any]", value))
    if items and all(isinstance(item, (str, PurePath)) for item in items):
        items = _without_folder(items)
    return repr(items)


def _without_folder(items: Sequence[Any]) -> list[Any]:
    """Texts, and what is between them, without the folder that the texts share."""
    texts = [str(item) for item in items if isinstance(item, (str, PurePath))]
    pairs = zip(min(texts, default=""), max(texts, default=""), strict=False)
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
    folder = "".join(letter for letter, _ in alike).rpartition("/")[0]
    return [
        str(item)[len(folder) :] if isinstance(item, (str, PurePath)) else item for item in items
    ]


def _records_text(value: Any) -> str | None:
    """A list with dicts, dataclasses, arrays or None in it as text, field by field: paths of one field share a folder. None for
    anything else.
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

    if isinstance(value, np.ndarray) and value.dtype.kind in "OT":
        value = value.tolist()
    if not isinstance(value, (list, tuple)) or _is_plain(value) or not note(value, ()):
        return None
    return "\n".join(f"{at}: {_without_folder(columns[at])}" for at in sorted(columns, key=repr))


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


def _made_with(node: Any) -> dict[str, Any]:
    """The constructor arguments of a node; its other attributes hold its position, and change."""
    return {f"_{name}": given.value for name, given in made_with(node).items()}


def _indented(lines: Sequence[str]) -> list[str]:
    return ["  " + line for line in lines]


def _runs(blocks: Sequence[list[str]]) -> Iterator[tuple[list[str], int]]:
    """Each run of equal consecutive blocks, with its length."""
    start = 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or blocks[end] != blocks[start]:
            yield blocks[start], end - start
            start = end


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
