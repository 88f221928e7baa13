"""Matches models made from a checkpoint's configuration, in which some layers lost their names.

For a layer class without ``get_config``, Keras writes no ``name`` into the configuration, so the layer that is
made from it is named after its class. The order of the layers is that of the configuration, so such a model is
matched by order; any other difference is refused as usual.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from ckpt_keras._counted import counted_in
from ckpt_keras._matching import whole_path
from ckpt_keras._names import Named, pattern, split
from ckpt_keras._renames import with_slots
from ckpt_keras._slots import NON_TRAINABLE, TRAINABLE, layers_of

Owners = tuple[str, ...]


def nameless(model: Any) -> frozenset[Owners]:
    """The layers whose configuration has no name, each as the tuple of names that leads to it."""
    return frozenset(owners for layer, owners in layers_of(model) if owners and _has_no_name(layer))


def _has_no_name(layer: Any) -> bool:
    try:
        return "name" not in layer.get_config()
    except Exception:  # get_config raises, so the layer was not made from a configuration
        return False


def names_by_order(model: Any, wanted: Sequence[Named], saved: Iterable[Any]) -> dict[str, str]:
    """Maps saved paths to those of a model made from the same configuration; empty if names suffice.

    Args:
        model: the model that was just made.
        wanted: its variables.
        saved: leaves of the checkpoint with ``path``, ``shape`` and ``dtype``, in its order.
    """
    lost = nameless(model)
    if not lost:
        return {}
    leaves = list(saved)
    counted = counted_in(model)
    names: dict[str, str] = {}
    for collection in (TRAINABLE, NON_TRAINABLE):
        before = [leaf for leaf in leaves if leaf.path.partition("/")[0] == collection]
        now = [entry for entry in wanted if entry.path.partition("/")[0] == collection]
        if len(before) != len(now):
            return {}
        for leaf, entry in zip(before, now, strict=True):
            same = (tuple(leaf.shape or ()), str(leaf.dtype)) == (entry.shape, entry.dtype)
            if not same or not _fits(leaf.path, entry, lost, counted):
                return {}
            names[leaf.path] = entry.path
    return with_slots([leaf.path for leaf in leaves], names)


def _fits(path: str, entry: Named, lost: Set[Owners], counted: Set[str]) -> bool:
    """Whether a saved weight can belong to this variable: all names except lost ones must agree."""
    whole = whole_path(entry, _parts(entry.path))
    known = [
        None if at == 0 or whole[1 : at + 1] in lost else _bare(part, counted)
        for at, part in enumerate(whole)
    ]
    end = len(known)
    for part in reversed(_parts(path)):
        while end and known[end - 1] not in (None, _bare(part, counted)):
            end -= 1  # Keras' paths omit some layers
        if not end:
            return False
        end -= 1
    return True


def _parts(path: str) -> tuple[str, ...]:
    return tuple(part for part in split(path.partition("/")[2]) if not part.startswith("@"))


def _bare(part: str, counted: Set[str]) -> str:
    return pattern(part, counted)[0]


def same_places(
    saved: Mapping[str, str], now: Mapping[str, str], lost: Set[Owners], counted: Set[str]
) -> bool:
    """Whether both sides have the same names by place, except those that were lost."""
    if not lost or saved.keys() != now.keys():
        return False
    for place, name in now.items():
        parts, others = tuple(name.split("/")), saved[place].split("/")
        if len(parts) != len(others):
            return False
        for at, (part, other) in enumerate(zip(parts, others, strict=True)):
            if parts[: at + 1] not in lost and _bare(part, counted) != _bare(other, counted):
                return False
    return True
