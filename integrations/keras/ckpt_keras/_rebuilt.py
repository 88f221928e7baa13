"""Models made from the configuration of a checkpoint, some of whose layers lost their names there.

What Keras writes for a layer without a ``get_config`` of its own has no ``name``, so the layer that is made of
it is called after its class. The order of the layers is that of the configuration, and certain: such a model is
matched by it, and whatever else differs is refused as ever.
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
    """The layers of a model whose configuration has no name, by the names from below the model on."""
    return frozenset(owners for layer, owners in layers_of(model) if owners and _has_no_name(layer))


def _has_no_name(layer: Any) -> bool:
    try:
        return "name" not in layer.get_config()
    except Exception:  # whatever a user's get_config may raise: it was not made from one
        return False


def names_by_order(model: Any, wanted: Sequence[Named], saved: Iterable[Any]) -> dict[str, str]:
    """Saved paths to those of a model that was made from the same configuration; empty where names tell all.

    Args:
        model: just made.
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
    """Whether a saved weight can be the one at its place: all names but lost ones say so."""
    whole = whole_path(entry, _parts(entry.path))
    known = [
        None if at == 0 or whole[1 : at + 1] in lost else _bare(part, counted)
        for at, part in enumerate(whole)
    ]
    end = len(known)
    for part in reversed(_parts(path)):
        while end and known[end - 1] not in (None, _bare(part, counted)):
            end -= 1  # Keras' paths leave out some layers
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
    """Whether names by place are of one configuration: equal but for those that were lost."""
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
