"""Describes a pipeline in lines of text that are the same in every process that builds it.

Grain's states are positions, and do not say in which pipeline. The description does: every
transformation with the settings that decide which elements come, and in which order. Settings that
only affect the speed (threads, buffers) are left out.
"""

from __future__ import annotations

import difflib
import hashlib
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
from ckpt_grain._lines import FIRM, WHOLE, described, is_elastic, loader_of
from ckpt_grain._values import ADDRESS, QUOTED

MAX_LINES = 200
"""The most lines of a description that are stored; the rest is compared by a digest."""

_DETAIL = "told"
"""The key of the detail on disk."""

_BY_NAME = "functions by name"
"""What stands where earlier versions have the Python whose code they describe: they compare names then."""


def describe(obj: Any, how: str) -> dict[str, Any]:
    """An iterator's pipeline as plain values: WHOLE if it has returned no element yet, FIRM otherwise."""
    lines, sources = described(obj, how)
    digest = hashlib.sha256("\n".join(lines).encode(errors="backslashreplace")).hexdigest()
    return {
        "grain": grain.__version__,
        # None for an elastic iterator, whose state fits any number of processes.
        "processes": None if is_elastic(obj) else jax.process_count(),
        _DETAIL: how,
        "python": _BY_NAME,
        "lines": lines[:MAX_LINES],
        "digest": digest,
        "digest_of_names": digest,
        "sources": sources,
    }


def problems(obj: Any) -> Iterator[str]:
    """Why the saved position cannot be restored exactly: a sentence for each reason."""
    if not isinstance(obj, grain.DataLoaderIterator):
        return
    loader = loader_of(obj)
    for what, value in (("data source", loader._data_source), ("sampler", loader._sampler)):
        if not isinstance(value, (list, tuple, np.ndarray)) and ADDRESS.search(repr(value)):
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


def detail_of(description: Mapping[str, Any]) -> str:
    """The detail of a saved description, so that the current one is made with the same."""
    return WHOLE if description.get(_DETAIL) == WHOLE else FIRM


def require_same_count(saved: Mapping[str, Any]) -> None:
    """Raises StructureMismatch if the state fits only another number of processes."""
    count = jax.process_count()
    if saved["processes"] not in (None, count):
        mismatch = Mismatch("processes", "number", str(saved["processes"]), str(count))
        raise StructureMismatch([mismatch], where="the data pipeline", advice=_COUNT_ADVICE)


def require_same(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises StructureMismatch if two descriptions are of different pipelines; one mismatch per difference."""
    differences = list(_differences(saved, now))
    if differences:
        counts = saved["processes"] != now["processes"]
        advice = _COUNT_ADVICE if counts else _ADVICE
        if saved["grain"] != now["grain"]:
            advice = (
                f"{advice} It was saved by Grain {saved['grain']}, this is {now['grain']}, which may "
                "describe the same pipeline in other words."
            )
        raise StructureMismatch(differences, where="the data pipeline", advice=advice)
    if saved["grain"] != now["grain"]:
        warnings.warn(
            f"the position was saved by Grain {saved['grain']}, this is {now['grain']}: Grain "
            "promises to understand its states only within one version",
            UserWarning,
            stacklevel=3,
        )


_ADVICE = (
    "The saved position has no meaning in another pipeline. Build the pipeline as it was, or "
    "accept the change by restoring into ckpt_grain.ignore_pipeline_changes(iterator)."
)
_COUNT_ADVICE = (
    "Each process has a position of its own, which says nothing of the elements that the others "
    "gave: going on would skip some and repeat others. Start as many processes as saved it; or "
    "restore the other items, with unexpected='ignore', and begin the data anew. A "
    "grain.experimental.ElasticIterator goes on exactly in any number of processes."
)


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Mismatch]:
    if saved["processes"] != now["processes"]:
        yield Mismatch("processes", "number", str(saved["processes"]), str(now["processes"]))
    for (name, before), (_, after) in zip(saved.get("sources", ()), now["sources"], strict=False):
        if before != after:
            yield Mismatch(name, "content", f"digest {before}", f"digest {after}")
    if saved["digest"] == now["digest"]:
        return
    alike = saved["grain"] == now["grain"] and saved.get("python") == _BY_NAME
    # Without indentation: an inserted node indents all nodes below it, which did not change.
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
            elif unlike := _unlike(old, new, all_settings=alike):
                yield Mismatch(name, "setting", *unlike)
    if before == after and alike:  # they differ in nesting, or beyond MAX_LINES
        yield Mismatch("pipeline", "digest", saved["digest"][:12], now["digest"][:12])


def _pair(
    old: Sequence[str], new: Sequence[str]
) -> Iterator[tuple[str, str] | tuple[str, None] | tuple[None, str]]:
    """Pairs of lines of the same node; lines without a counterpart are paired with None."""
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
    """The differing settings of one node on both sides; if none differ, the whole lines, or None without ``all_settings``: only
    settings of both sides count, since another version of Grain may have added or dropped some.
    """
    before, after = _settings(old), _settings(new)
    if not all_settings:
        before, after = (
            {key: _timeless(text) for key, text in side.items()} for side in (before, after)
        )
    keys = [key for key in before | after if all_settings or (key in before and key in after)]
    unlike = [key for key in keys if before.get(key) != after.get(key)]
    if not all_settings:
        unlike = [key for key in unlike if not _is_named_in(after[key], before[key])]
    if not unlike:
        return (old, new) if all_settings else None
    left, right = (
        ", ".join(f"{key}={side[key]}" for key in unlike if key in side) or "nothing"
        for side in (before, after)
    )
    return left, right


def _is_named_in(new: str, old: str) -> bool:
    """Whether a setting is the function, or begins with it, that an earlier version described with its code and what it holds."""
    by_code = old.partition(" [code ")[0].lstrip("\"'")
    name = by_code.partition("(")[0]
    rest = new.removeprefix(name) if new.startswith(name) else "another"
    return not rest if by_code == old else re.match(r"\w", rest) is None


def _timeless(text: str) -> str:
    """A setting without what later versions of Grain added to it, which changes no element."""
    return _SHARED_MEMORY.sub(r"\1", text)


_SHARED_MEMORY = re.compile(r"\b(make_batch)(?:\(output_to_shared_memory=(?:True|False)\))+")
"""Grain's own way to batch: until 0.2.16 no parameter said where batches lie."""


def _settings(line: str) -> dict[str, str]:
    """Name -> text of the settings in the parentheses of a line: brackets outside of quotes match in each text."""
    parts, depth = [""], 0
    for piece in _PIECES.findall(line.partition("(")[2]):
        depth += (piece in "([{") - (piece in ")]}")
        if depth < 0:
            break
        if piece == ", " and depth == 0:
            parts.append("")
        else:
            parts[-1] += piece
    return {key: value for key, equals, value in (part.partition("=") for part in parts) if equals}


_PIECES = re.compile(rf"{QUOTED.pattern}|, |.", re.DOTALL)
