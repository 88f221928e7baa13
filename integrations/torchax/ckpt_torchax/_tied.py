"""Where a model is in a checkpoint: its item, and weights that are tied, which are stored once."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from typing import Any

import ckpt_core as ckpt

PathLike = str | os.PathLike[str]

TIED = "_tied_weights"
"""The key, beside a module's names, that holds ``{first name: {other name: True}}``."""


def chosen_item(path: PathLike, item: str | None) -> str:
    """The item that holds the model; ValueError if there are several, and none is called ``model``."""
    if item is not None:
        return item
    names = list(ckpt.inspect(path).items)
    if len(names) == 1:
        return names[0]
    if "model" in names:
        return "model"
    raise ValueError(f"{path} holds the items {', '.join(names)}: name one with item=")


def tied_once(values: Mapping[str, Any], keys: Mapping[str, Hashable]) -> dict[str, Any]:
    """The values by name: those of one key once, under the first name, and the other names below TIED."""
    state: dict[str, Any] = {}
    first_of: dict[Hashable, str] = {}
    tied: dict[str, dict[str, bool]] = {}
    for name, value in values.items():
        first = first_of.setdefault(keys[name], name)
        if first == name:
            state[name] = value
        else:
            tied.setdefault(first, {})[name] = True
    return state | {TIED: tied} if tied else state


def first_names(state: Mapping[str, Any]) -> dict[str, str]:
    """Further name of a tied weight -> the name under which it is stored."""
    return {name: first for first, names in state.get(TIED, {}).items() for name in names}
