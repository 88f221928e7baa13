"""The items of a step that belong to a model, in our steps and those of Keras' own callback."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import keras

import ckpt_core as ckpt
from ckpt_keras._adapter import ADAPTER
from ckpt_keras._assets import ASSETS, AssetsTarget, assets_of, names_of_owners, saved_beside
from ckpt_keras._slots import NON_TRAINABLE, TRAINABLE

logger = logging.getLogger("ckpt_keras")

Result = TypeVar("Result")

MODEL, CONFIG = "pytree", "model_config"
"""Items of the model's variables and configuration, called as ``keras.callbacks.OrbaxCheckpoint`` and Keras' loaders do."""

WEIGHTS = (TRAINABLE, NON_TRAINABLE)


@dataclass(frozen=True)
class SavedModel:
    """What a step holds of a model."""

    info: ckpt.CheckpointInfo
    item: str  # name of the item with the model's state
    groups: frozenset[str]  # of variables in the item

    @property
    def weights_only(self) -> bool:
        """Whether it lacks optimizer and metrics."""
        return self.groups <= {*WEIGHTS}

    def only_weights(self) -> list[str]:
        """The ``only=`` that selects weights and random state of the model, and all of the other items."""
        weights = [f"{self.item}/{name}/**" for name in WEIGHTS if name in self.groups]
        return [*weights, *(f"{name}/**" for name in self.info.items if name != self.item)]

    def config(self, options: ckpt.Options | None) -> Mapping[str, Any]:
        """The item with the configuration; empty if none was saved."""
        if CONFIG not in self.info.items:
            return {}
        return ckpt.load(self.info.path, item=CONFIG, options=options)


def saved_model(info: ckpt.CheckpointInfo) -> SavedModel:
    """Where in a step the model is; raises CheckpointNotFound if it holds none."""
    for name in (MODEL, "model"):  # as in older steps, and after ckpt_core.save(path, model=model)
        if name in info.items:
            groups = {leaf.path.partition("/")[0] for leaf in info.items[name].leaves}
            return SavedModel(info, name, frozenset(groups))
    known = ", ".join(info.items) or "none"
    raise ckpt.CheckpointNotFound(
        f"{info.path} holds no Keras model: items are {known}, and none is called {MODEL!r} or 'model'"
    )


def newest_model(checkpointer: ckpt.Checkpointer, steps: list[int]) -> SavedModel | None:
    """Where the model is in the newest of the steps that can be read; None if there are none."""
    failure: Exception | None = None
    for step in reversed(steps):
        try:
            return saved_model(checkpointer.inspect(step))
        except (ckpt.CheckpointError, OSError) as error:  # try an older step, like restore_latest
            failure = failure or error
    if failure is not None:
        raise failure
    return None


def save_with(
    save: Callable[..., Result],
    model: Any,
    config: ConfigItem | None,
    *,
    weights_only: bool = False,
    others: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Result:
    """Calls ``save`` with the items of a model and others; without ``config`` no assets either, as Keras' callback does."""
    with saved_beside():
        items: dict[str, Any] = {MODEL: model}
        if weights_only:
            state = ADAPTER.get_state(model)
            items[MODEL] = {name: state[name] for name in WEIGHTS if name in state}
        if config is not None:
            assets = assets_of(model)
            items |= {CONFIG: config, ASSETS: assets} if assets else {CONFIG: config}
        return save(items={**items, **(others or {})}, **arguments)


def restore_with(
    restore: Callable[..., Result],
    model: Any,
    saved: SavedModel,
    options: ckpt.Options | None,
    *,
    others: Mapping[str, Any] | None = None,
    rebuilt: bool = False,
    **arguments: Any,
) -> Result:
    """Calls ``restore`` with a model, its assets and others. ``rebuilt``: the configuration of this step made the model."""
    with saved_beside():
        targets: dict[str, Any] = {saved.item: model}
        if ASSETS in saved.info.items:
            rename = arguments.get("rename")
            renames = rename if isinstance(rename, Mapping) else {}
            names = "" if rebuilt else saved.config(options).get(ASSETS, "")
            targets[ASSETS] = AssetsTarget(model, saved.info, names, renames)
        return restore(items={**targets, **(others or {})}, **arguments)


class ConfigItem:
    """A model's description as an item of a step: each save writes it anew, no restore sets it."""

    written_anew = True

    def __init__(self, description: dict[str, Any]) -> None:
        self._description = description

    def get_state(self) -> dict[str, Any]:
        return self._description

    def set_state(self, state: dict[str, Any]) -> None:
        self._description = dict(state)


def config_item(model: Any) -> ConfigItem:
    """Configuration and compilation as JSON, for ``load_model``; or the reason why Keras cannot serialise the model."""
    try:
        with warnings.catch_warnings():
            # Keras' Variable.numpy() lacks numpy 2's copy=; the user cannot do anything about it.
            warnings.simplefilter("ignore", DeprecationWarning)
            item = {"config": json.dumps(keras.saving.serialize_keras_object(model))}
    except Exception as error:  # a user's get_config may raise anything; weights are still saved
        logger.info("%s has no configuration to save: %s", model.name, error)
        item = {"config": "", "reason": f"{type(error).__name__}: {error}"}
    names = names_of_owners(model)
    return ConfigItem(item if names == "{}" else {**item, ASSETS: names})


def model_from_config(
    saved: SavedModel, options: ckpt.Options | None, *, compile: bool, **arguments: Any
) -> Any:
    """A new model from the saved ``config_item``; the arguments are those of ``keras.saving.deserialize_keras_object``."""
    where, item = saved.info.path, saved.config(options)
    text = item.get("config")
    if not text:
        reason = item.get("reason") or "none was saved"
        raise ckpt.CheckpointNotFound(
            f"{where}: no model configuration ({reason}): make the model by code and call "
            "ckpt_keras.restore(directory, model)"
        )
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ckpt.CheckpointCorrupt(
            f"{where}: its model configuration is no JSON: {error}"
        ) from error
    if not compile:
        config["compile_config"] = None
    return keras.saving.deserialize_keras_object(config, **arguments)
