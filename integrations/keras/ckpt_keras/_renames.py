"""Applies a dict for ``rename=`` to the paths of Keras models. Pure.

The name of a layer occurs in several collections, and joined with others in the names of optimizer slots:
``{"head": "tail"}`` renames ``trainable_variables/head/kernel`` and
``optimizer_variables/adam/head_kernel_momentum``. Whole paths (``trainable_variables/head``) work as
everywhere in ckpt, and are applied first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpt_keras._names import flat, inside, within_one
from ckpt_keras._slots import MORE_OPTIMIZERS, NON_TRAINABLE, OPTIMIZER, TRAINABLE

Table = Sequence[tuple[str, str]]


def renamed(rename: Mapping[str, str], saved: Sequence[str]) -> dict[str, str]:
    """New names of the saved paths that ``rename=`` changes.

    Args:
        rename: old leading names to new ones.
        saved: paths of a model's state, beginning with the collection.
    """
    table = table_of(rename)
    names = {path: new for path in saved if (new := leading(path, table)) != path}
    weights = [path for path in saved if path.partition("/")[0] in (TRAINABLE, NON_TRAINABLE)]
    root = _root(weights)
    for path in saved:
        if path not in names:
            names[path] = _in_collection(path, table, root)
    return with_slots(saved, {old: new for old, new in names.items() if old != new})


def with_slots(saved: Sequence[str], names: Mapping[str, str]) -> dict[str, str]:
    """New names of weights, and of the optimizer slots that contain their names."""
    weights = [path for path in saved if path.partition("/")[0] in (TRAINABLE, NON_TRAINABLE)]
    slots = _Slots(weights, {path: names.get(path, path) for path in weights})
    told = dict(names)
    for path in saved:
        if path not in told and path.partition("/")[0] in (OPTIMIZER, MORE_OPTIMIZERS):
            told[path] = slots.renamed(path)
    return {old: new for old, new in told.items() if old != new}


def table_of(rename: Mapping[str, str]) -> Table:
    """The entries of ``rename=``, the longest first."""
    return sorted(rename.items(), key=lambda entry: -len(entry[0]))


def leading(path: str, table: Table) -> str:
    """A path with its leading parts renamed; only whole parts match."""
    for old, new in table:
        if path == old or path.startswith(f"{old}/"):
            return f"{new}{path[len(old) :]}".removeprefix("/")
    return path


def _root(weights: Sequence[str]) -> str:
    """The model's name, if the paths of all weights begin with it (seed generators aside)."""
    parts = [tuple(inside(path).split("/")) for path in weights]
    all_in_one = all(len(part) > 2 or "seed_generator_state" in part for part in parts)
    return (within_one(parts) or ("",))[0] if all_in_one else ""


def _in_collection(path: str, table: Table, root: str) -> str:
    """A path with a layer renamed that follows the collection, or the model's name."""
    parts = path.split("/")
    start = 2 if parts[0] == MORE_OPTIMIZERS else 1
    for front in (start, start + 1) if root and parts[start : start + 1] == [root] else (start,):
        rest = "/".join(parts[front:])
        new = leading(rest, table)
        if new != rest:
            return "/".join([*parts[:front], new])
    return path


class _Slots:
    """Renames optimizer slots, whose names contain those of the weights.

    Args:
        weights: saved paths of all weights.
        names: saved path -> new path.
    """

    def __init__(self, weights: Sequence[str], names: Mapping[str, str]) -> None:
        self._flat = {flat(path): flat(names[path]) for path in weights}
        self._by_dots = {_dotted(path): (path, names[path]) for path in weights}

    def renamed(self, path: str) -> str:
        """The path of a slot after its weight was renamed."""
        front, slash, last = path.rpartition("/")
        bare, at, where = last.partition("@")
        role, dot, weight = where.partition(".")
        if weight in self._by_dots:
            old, new = self._by_dots[weight]
            where = f"{role}{dot}{_dotted(new)}"
            if bare.startswith(f"{flat(old)}_"):
                bare = flat(new) + bare[len(flat(old)) :]
        else:
            fits = [name for name in self._flat if bare.startswith(f"{name}_")]
            if fits:
                name = max(fits, key=len)
                bare = self._flat[name] + bare[len(name) :]
        return f"{front}{slash}{bare}{at}{where}"


def _dotted(path: str) -> str:
    return inside(path).replace("/", ".")
