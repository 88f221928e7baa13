"""Assets: files that layers keep beside their variables, such as vocabularies.

Their bytes are an item of the step, as of ``keras.callbacks.OrbaxCheckpoint``, by the places where Keras looks for them. A
place is a class and a number, so the names of the layers are saved, too: layers may change places.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import os
import tempfile
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ckpt_core import CheckpointInfo, Mismatch, StructureMismatch
from ckpt_keras._matching import leading, pair_parts, table_of
from ckpt_keras._slots import counted_in, layers_of, nested

ASSETS = "assets"
"""Name of the item, as in directories of ``keras.callbacks.OrbaxCheckpoint``."""

_saved_beside: contextvars.ContextVar[bool] = contextvars.ContextVar("saved_beside", default=False)


class Owner(NamedTuple):
    """An object with assets, its place among Keras' files, and its name."""

    place: str
    name: str
    obj: Any


def owners_of_assets(model: Any) -> list[Owner]:
    """All objects in a model that can have assets, in Keras' order."""
    layers = layers_of(model)
    if not any(hasattr(layer, "save_assets") for layer, _ in layers):
        return []  # Keras' walk visits every attribute of every object
    names = {id(layer): "/".join(owners) for layer, owners in layers}
    return [Owner(place, names.get(id(obj), place), obj) for obj, place in _walk(model)]


def assets_of(model: Any) -> dict[str, Any]:
    """The item: the bytes of all assets, nested by place and file; empty if there are none."""
    return nested(
        ((*_parts(owner.place), *name), content)
        for owner in owners_of_assets(model)
        for name, content in _files_of(owner)
    )


def names_of_owners(model: Any) -> str:
    """Place -> layer name, as JSON."""
    return json.dumps({owner.place: owner.name for owner in owners_of_assets(model)})


class AssetsTarget:
    """The target of assets, checked against the model. ``names`` of ``names_of_owners`` is empty where places suffice:
    Keras' own callback saved, or the model was made from the checkpoint's configuration.
    """

    def __init__(
        self, model: Any, info: CheckpointInfo, names: str, rename: Mapping[str, str]
    ) -> None:
        table = table_of(rename)
        named: dict[str, str] = json.loads(names) if names else {}
        saved = {place: leading(name, table) for place, name in named.items()}
        self.reads_renames = frozenset(
            entry[0] for entry in table if any(leading(n, [entry]) != n for n in named.values())
        )
        """Entries of ``rename=`` that this target uses, although no saved path begins with them."""
        owners = {owner.place: owner for owner in owners_of_assets(model)}
        paths = [leaf.path.split("/") for leaf in info.items[ASSETS].leaves]
        leaves = [tuple(p.replace("~1", "/").replace("~0", "~") for p in path) for path in paths]
        places = _places(leaves, {*saved, *owners})
        pairs = {place: place for place in owners}
        if saved:
            old = {place: name.split("/") for place, name in saved.items()}
            new = {place: owner.name.split("/") for place, owner in owners.items()}
            pairs = pair_parts(old, new, counted_in(model))
        self._homes = {place: owners[pairs[place]] for place in places if place in pairs}
        lost = [place for place in places if place not in self._homes]
        if lost:
            wanted = ", ".join(owner.name for owner in owners.values()) or "none"
            names_of_lost = [saved.get(place, place) for place in lost]
            raise StructureMismatch(
                [Mismatch(n, "unexpected", "files", None, None, ASSETS) for n in names_of_lost],
                where=info.path,
                advice=f"Layers of the model that have assets (files of their own): {wanted}.",
            )

    def get_state(self) -> dict[str, Any]:
        """Empty, because a restore replaces all files."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Lets every layer load its files."""
        for place, owner in self._homes.items():
            with tempfile.TemporaryDirectory() as directory:
                _write(reduce(getitem, _parts(place), state), Path(directory))
                owner.obj.load_assets(directory)


@contextlib.contextmanager
def saved_beside() -> Generator[None]:
    """Inside the block assets are saved as an item, so the warning about missing assets is off."""
    token = _saved_beside.set(True)
    try:
        yield
    finally:
        _saved_beside.reset(token)


def warn_of_left_out(model: Any) -> None:
    """Warns that ckpt_core alone does not save the assets of a model."""
    if _saved_beside.get():
        return
    names = [owner.name for owner in owners_of_assets(model) if any(_files_of(owner))]
    if names:
        warnings.warn(
            f"{model.name!r} has assets, which are files and not in its variables ({', '.join(names)}): "
            "ckpt_core.save and restore leave them out. ckpt_keras.save, restore and "
            "OrbaxCheckpointCallback have them",
            UserWarning,
            stacklevel=2,
        )


def _walk(model: Any) -> list[tuple[Any, str]]:
    """Objects with assets and their places, as Keras finds them when it loads; changes none."""
    from keras.src.saving import saving_lib  # writes .keras files; it has no public name

    class Place(Exception):
        pass

    class Nowhere(saving_lib.DiskIOStore):
        """A store without files: ``get`` raises the place that Keras asks for."""

        def get(self, path: str) -> str:
            raise Place(path)

        def has_path(self, path: str) -> bool:
            return True

    class First(dict[int, Any]):
        """Keeps the first place of a shared object, which is where Keras saves it."""

        def __setitem__(self, key: int, value: Any) -> None:
            self.setdefault(key, value)

    with tempfile.TemporaryDirectory() as directory:
        asked: dict[int, Any] = First()
        saving_lib._load_state(  # pyright: ignore[reportPrivateUsage]
            model,
            weights_store=None,
            assets_store=Nowhere(directory, mode="r"),
            inner_path="",
            visited_saveables=set(),
            failed_saveables=set(),
            error_msgs=asked,
        )
    return [(obj, str(place)) for obj, place in asked.values() if isinstance(place, Place)]


def _places(leaves: Iterable[tuple[str, ...]], known: set[str]) -> list[str]:
    """The places of the files: for each, the longest known place that contains it."""
    by_parts = {_parts(place): place for place in known}

    def place_of(leaf: tuple[str, ...]) -> str:
        within = (by_parts.get(leaf[:end]) for end in range(len(leaf) - 1, -1, -1))
        return next((place for place in within if place is not None), "/".join(leaf[:-1]))

    return list(dict.fromkeys(map(place_of, leaves)))


def _parts(place: str) -> tuple[str, ...]:
    return tuple(filter(None, place.split("/")))


def _files_of(owner: Owner) -> Iterator[tuple[tuple[str, ...], np.ndarray[Any, Any]]]:
    """Name and bytes of each file that an object writes."""
    with tempfile.TemporaryDirectory() as directory:
        owner.obj.save_assets(directory)
        for path in sorted(Path(directory).rglob("*")):
            if path.is_file():
                yield path.relative_to(directory).parts, np.frombuffer(path.read_bytes(), np.uint8)


def _write(node: Mapping[str, Any], directory: Path) -> None:
    for name, content in node.items():
        path = directory / os.path.basename(name)
        if isinstance(content, Mapping):
            path.mkdir()
            _write(content, path)
        else:
            path.write_bytes(np.asarray(content, np.uint8).tobytes())
