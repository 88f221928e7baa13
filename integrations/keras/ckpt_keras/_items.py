"""What of a step is a Keras model: ours, and what ``keras.callbacks.OrbaxCheckpoint`` wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckpt_core import CheckpointInfo, CheckpointNotFound
from ckpt_keras._adapter import ADAPTER
from ckpt_keras._config import CONFIG
from ckpt_keras._slots import NON_TRAINABLE, TRAINABLE

MODEL = "model"
ORBAX_MODEL = "pytree"
"""The item's name in directories of ``keras.callbacks.OrbaxCheckpoint``."""

WEIGHTS = (TRAINABLE, NON_TRAINABLE)


@dataclass(frozen=True)
class Contents:
    """What a step holds of a model.

    Attributes:
        item: name of the item with the model's state.
        weights_only: whether it lacks optimizer and metrics.
        has_config: whether there is a configuration beside it.
        others: names of the other items.
    """

    item: str
    weights_only: bool
    has_config: bool
    others: frozenset[str]

    @property
    def by_orbax(self) -> bool:
        """Whether ``keras.callbacks.OrbaxCheckpoint`` wrote it."""
        return self.item == ORBAX_MODEL

    def only_weights(self) -> list[str]:
        """The ``only=`` that takes weights and random state of the model, and all of ``fit``."""
        return [*(f"{self.item}/{name}/**" for name in WEIGHTS), "fit/**"]


def contents_of(info: CheckpointInfo) -> Contents:
    """Where in a step the model is.

    Raises:
        CheckpointNotFound: there is none.
    """
    for name in (MODEL, ORBAX_MODEL):
        if name in info.items:
            tops = {leaf.path.partition("/")[0] for leaf in info.items[name].leaves}
            others = frozenset(info.items) - {name, CONFIG}
            return Contents(name, tops <= set(WEIGHTS), CONFIG in info.items, others)
    known = ", ".join(info.items) or "none"
    raise CheckpointNotFound(
        f"{info.path} holds no Keras model: items are {known}, and none is called {MODEL!r}"
    )


def model_item(model: Any, *, weights_only: bool) -> Any:
    """What is saved as the model: itself, or the tree of its weights and random state."""
    if not weights_only:
        return model
    state = ADAPTER.get_state(model)
    return {name: state[name] for name in WEIGHTS if name in state}
