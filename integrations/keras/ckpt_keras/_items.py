"""The items of a step that belong to a model, in our steps and those of Keras' own callback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ckpt_core as ckpt
from ckpt_core import CheckpointInfo, CheckpointNotFound, Options
from ckpt_keras._adapter import ADAPTER
from ckpt_keras._assets import ASSETS, AssetsTarget, assets_of
from ckpt_keras._config import CONFIG, ConfigItem
from ckpt_keras._host import HOST
from ckpt_keras._slots import NON_TRAINABLE, TRAINABLE

MODEL = "pytree"
"""The item's name in directories of ``keras.callbacks.OrbaxCheckpoint``, which Keras' own
``load_model`` and ``load_weights`` look for."""

OLD_MODEL = "model"
"""The item's name in older checkpoints of this package."""

WEIGHTS = (TRAINABLE, NON_TRAINABLE)


@dataclass(frozen=True)
class Contents:
    """What a step holds of a model.

    Attributes:
        item: name of the item with the model's state.
        weights_only: whether it lacks optimizer and metrics.
        has_config: whether the step holds a configuration.
        others: names of the other items.
        tops: the groups of variables in the model's state.
    """

    item: str
    weights_only: bool
    has_config: bool
    others: frozenset[str]
    tops: frozenset[str] = frozenset(WEIGHTS)

    @property
    def has_progress(self) -> bool:
        """Whether it holds the position of ``fit``; ``keras.callbacks.OrbaxCheckpoint`` saves none."""
        return "fit" in self.others

    @property
    def has_assets(self) -> bool:
        """Whether there are files of layers, such as vocabularies."""
        return ASSETS in self.others

    def only_weights(self) -> list[str]:
        """The ``only=`` that selects weights and random state of the model, and the item ``fit``."""
        weights = [f"{self.item}/{name}/**" for name in WEIGHTS if name in self.tops]
        return [*weights, *(f"{name}/**" for name in ("fit", HOST, ASSETS) if name in self.others)]


def contents_of(info: CheckpointInfo) -> Contents:
    """Where in a step the model is.

    Raises:
        CheckpointNotFound: the step holds no model.
    """
    for name in (MODEL, OLD_MODEL):
        if name in info.items:
            tops = {leaf.path.partition("/")[0] for leaf in info.items[name].leaves}
            others = frozenset(info.items) - {name, CONFIG}
            has_config, weights_only = CONFIG in info.items, tops <= set(WEIGHTS)
            return Contents(name, weights_only, has_config, others, frozenset(tops))
    known = ", ".join(info.items) or "none"
    raise CheckpointNotFound(
        f"{info.path} holds no Keras model: items are {known}, and none is called {MODEL!r} or {OLD_MODEL!r}"
    )


def model_items(
    model: Any, *, weights_only: bool = False, config: ConfigItem | None
) -> dict[str, Any]:
    """The items to save for a model: its variables, its assets and its configuration, if any.

    Args:
        model: the model.
        weights_only: leave out optimizer and metrics.
        config: the result of ``config_item``; None leaves assets out, too, as Keras' callback does.
    """
    items: dict[str, Any] = {MODEL: model}
    if weights_only:
        state = ADAPTER.get_state(model)
        items[MODEL] = {name: state[name] for name in WEIGHTS if name in state}
    if config is not None:
        assets = assets_of(model)
        items[CONFIG] = config
        if assets:
            items[ASSETS] = assets
    return items


def model_targets(
    model: Any,
    contents: Contents,
    info: CheckpointInfo,
    options: Options | None,
    *,
    rename: Any = None,
    rebuilt: bool = False,
) -> dict[str, Any]:
    """The targets that a model and its assets are restored into.

    Args:
        model: the model.
        contents: where it is in the step.
        info: the step.
        options: see ``ckpt_core.Options``.
        rename: as for ``ckpt_core.restore``; a dict also applies to layers with assets.
        rebuilt: whether the model was made from the configuration of this step.

    Raises:
        StructureMismatch: the model lacks a layer that has assets in the step.
    """
    targets: dict[str, Any] = {contents.item: model}
    if contents.has_assets:
        config = ckpt.load(info.path, item=CONFIG, options=options) if contents.has_config else {}
        renames = rename if isinstance(rename, Mapping) else None
        targets[ASSETS] = AssetsTarget(model, info, config.get(ASSETS, ""), renames, rebuilt)
    return targets
