"""Where a model is in a checkpoint: its item, and the key for tied weights."""

from __future__ import annotations

import os

import ckpt_core as ckpt

PathLike = str | os.PathLike[str]

TIED = "_tied_weights"
"""The key, beside a module's names, that holds ``{first name: {other name: True}}``."""


def chosen_item(path: PathLike, item: str | None) -> str:
    """The item that holds the model.

    Raises:
        ValueError: there are several items, and none is called ``model``.
    """
    if item is not None:
        return item
    names = list(ckpt.inspect(path).items)
    if len(names) == 1:
        return names[0]
    if "model" in names:
        return "model"
    raise ValueError(f"{path} holds the items {', '.join(names)}: name one with item=")
