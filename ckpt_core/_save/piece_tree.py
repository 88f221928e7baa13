"""The parts of one item of a ``writer``, put together."""

from __future__ import annotations

from dataclasses import replace

from ckpt_core._errors import UnsupportedLeaf
from ckpt_core._save.job import PreparedItem, SaveJob
from ckpt_core._save.plan import TreeSignature
from ckpt_core._save.prepare import plan_item
from ckpt_core._storage import ArrayToWrite, Upload
from ckpt_core._tree import format_path
from ckpt_core._tree.grow import GrownTree


class PieceTree:
    """The parts of one item that were added so far.

    Attributes:
        first: the first part.
        waiting: small arrays that are not written yet.
        checksums: of the chunks that are written.
        upload: of the item's database, into an object store.
    """

    def __init__(self, first: PreparedItem) -> None:
        self.first = first
        self.waiting: list[ArrayToWrite] = []
        self.checksums: dict[str, list[int]] = {}
        self.upload: Upload | None = None
        self._grown = GrownTree()
        self._paths: dict[str, str] = {}  # array name -> path
        self._texts: dict[str, str] = {}

    def refuse(self, part: PreparedItem) -> None:
        """Raises UnsupportedLeaf if a part has what is there already."""
        clash = self._grown.clash(part.record.tree)
        if clash is not None:
            raise taken(part.name, format_path(clash))
        for name, path in zip(part.names, part.record.paths, strict=True):
            if name in self._paths:
                where = format_path(path)
                raise UnsupportedLeaf(
                    f"item {part.name!r}: leaves {self._paths[name]!r} and {where!r} would both be stored as {name!r} "
                    "in Orbax's format, which cannot tell them apart: rename one of them",
                    leaf=where,
                )

    def add(self, part: PreparedItem) -> None:
        assert part.plan is not None
        signature = part.plan.signature
        paths = signature.paths
        objects: list[object] = [None] * len(paths)
        for group in signature.shared:
            one = object()
            for position in group:
                objects[position] = one
        columns = (paths, signature.specs, signature.shardings, signature.stored, objects)
        self._grown.add(part.record.tree, list(zip(*columns, strict=True)))
        self._paths |= zip(part.names, map(format_path, paths), strict=True)
        self._texts |= part.texts

    def whole(self, job: SaveJob) -> PreparedItem:
        """The item of all parts, without its arrays."""
        root, leaves = self._grown.whole()
        columns = [tuple(leaf[column] for leaf in leaves) for column in range(4)]
        places: dict[object, list[int]] = {}
        for position, leaf in enumerate(leaves):
            if leaf[4] is not None:
                places.setdefault(leaf[4], []).append(position)
        shared = tuple(map(tuple, places.values()))
        plan = plan_item(self.first.name, TreeSignature(root, *columns, shared=shared), job)
        return replace(
            self.first, record=plan.record, plan=plan, texts=self._texts, arrays=(), landing=None
        )


def taken(item: str, where: str) -> UnsupportedLeaf:
    """The error for what was added already."""
    what = f"item {item!r}: {where}" if where else f"item {item!r}"
    return UnsupportedLeaf(
        f"{what} was added already, and only dictionaries can be added in parts: add each leaf once, or all "
        "of the item at once",
        leaf=where or item,
    )
