"""Compares pipelines by their descriptions, which hold what Grain's states leave out: in which pipeline a position is."""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import grain
import jax
import numpy as np
from grain import experimental as grain_experimental, python as grain_python

from ckpt_core import Mismatch, StructureMismatch
from ckpt_grain._lines import ADDRESS, QUOTED, Lines, digest_of, is_elastic

MAX_LINES = 200
"""The most lines of a description that are stored; the rest is compared by a digest."""

_WORDING = "arguments that use keeps"
"""The rules by which settings are described; other versions have another text."""


def describe(obj: Any) -> dict[str, Any]:
    """An iterator's pipeline as plain values."""
    described = Lines()
    lines = described.of(obj)
    digest = digest_of("\n".join(lines))
    return {
        "grain": grain.__version__,
        # None for an elastic iterator, whose state fits any number of processes.
        "processes": None if is_elastic(obj) else jax.process_count(),
        "told": "whole, by value",  # with the next and "digest_of_names", read by earlier versions
        "python": _WORDING,
        "lines": lines[:MAX_LINES],
        "digest": digest,
        "digest_of_names": digest,
        "sources": described.sources,
    }


def problems(obj: Any) -> Iterator[str]:
    """Why the saved position cannot be restored exactly: a sentence for each reason."""
    if not isinstance(obj, grain.DataLoaderIterator):
        return
    loader: Any = vars(obj)["_data_loader"]
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


def require_same(saved: Mapping[str, Any], now: Mapping[str, Any], *, tolerant: bool) -> None:
    """Raises StructureMismatch with every difference of two pipelines; ``tolerant``: of the number of processes alone."""
    count, version = jax.process_count(), saved["grain"]
    counts = saved["processes"] not in (None, count)
    differences = [] if tolerant else list(_differences(saved, now))
    if counts:
        differences[:0] = [Mismatch("processes", "number", str(saved["processes"]), str(count))]
    if differences:
        advice = _COUNT_ADVICE if counts else _ADVICE
        if version != grain.__version__ and not tolerant:
            advice = (
                f"{advice} It was saved by Grain {version}, this is {grain.__version__}, which may "
                "describe the same pipeline in other words."
            )
        raise StructureMismatch(differences, where="the data pipeline", advice=advice)
    if version != grain.__version__ and not tolerant:
        warnings.warn(
            f"the position was saved by Grain {version}, this is {grain.__version__}: Grain "
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
    same_words = all(saved.get(key) == now[key] for key in ("grain", "python"))
    sources: Any = saved.get("sources", ()) if saved.get("python") == _WORDING else ()
    for (name, before), (_, after) in zip(sources, now["sources"], strict=False):
        if before != after:
            yield Mismatch(name, "content", f"digest {before}", f"digest {after}")
    if saved["digest"] == now["digest"]:
        return
    # Without indentation: an inserted node indents all nodes below it, which did not change.
    before, after = ([line.strip() for line in side["lines"]] for side in (saved, now))
    names, names_now = ([line.partition("(")[0] for line in side] for side in (before, after))
    matcher = difflib.SequenceMatcher(None, names, names_now, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag != "equal":
            for line in before[i1:i2]:
                yield Mismatch(line.partition("(")[0], "unexpected", line, None)
            for line in after[j1:j2]:
                yield Mismatch(line.partition("(")[0], "missing", None, line)
            continue
        for name, *lines in zip(names[i1:i2], before[i1:i2], after[j1:j2], strict=True):
            if unlike := _unlike(*lines, same_words=same_words):
                yield Mismatch(name, "setting", *unlike)
    if before == after and same_words:  # they differ in nesting, or beyond MAX_LINES
        yield Mismatch("pipeline", "digest", saved["digest"][:12], now["digest"][:12])


def _unlike(old: str, new: str, *, same_words: bool) -> tuple[str, str] | None:
    """The differing settings of one node on both sides, or the whole lines if none differ. Without ``same_words`` another
    version described one side, which may have more settings: only those of both sides count, and of objects the name.
    """
    before, after = _settings(old), _settings(new)
    keys = [key for key in before | after if same_words or (key in before and key in after)]
    unlike = [key for key in keys if before.get(key) != after.get(key)]
    if not same_words:
        unlike = [key for key in unlike if not _begin_alike(before[key], after[key])]
    if not unlike:
        return (old, new) if same_words and old != new else None
    left, right = (
        ", ".join(f"{key}={side[key]}" for key in unlike if key in side) or "nothing"
        for side in (before, after)
    )
    return left, right


def _begin_alike(old: str, new: str) -> bool:
    """Whether two settings with parentheses, or one with the digest of its code, may be of one function or class."""
    old, new = old.strip("\"'"), new.strip("\"'")  # texts without pairs of brackets had quotes
    name = re.split(r"\(| \[code ", old, maxsplit=1)[0]
    begins_alike = re.match(re.escape(name) + r"(?!\w)", new) is not None
    return old == new or (begins_alike and (name != old or "(" in new))


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
