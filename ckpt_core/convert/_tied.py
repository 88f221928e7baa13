"""Tied weights of torch modules, which a checkpoint holds once: in files of weights each name has its tensor."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_core._tree import Path

TIED = "_tied_weights"
"""The key, beside a module's names, that holds ``{first name: {other name: True}}``, as its adapter saves it."""


def with_all_names(
    paths: Sequence[Path],
) -> tuple[list[Path], list[int]]:
    """The path of each tensor, and the position of the leaf that holds it: ``("_tied_weights", "embed", "head")`` is the
    tensor ``head``, in the leaf ``embed``.
    """
    positions = {path: position for position, path in enumerate(paths)}
    found: list[tuple[Path, int]] = []
    for position, path in enumerate(paths):
        match path:
            case (*above, marked, first, other) if marked == TIED and (*above, first) in positions:
                found.append(((*above, other), positions[(*above, first)]))
            case _:
                found.append((path, position))
    return [path for path, _ in found], [position for _, position in found]
