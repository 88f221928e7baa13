"""Saves the model's configuration beside its weights, for ``load_model``."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Mapping
from typing import Any

from ckpt_core import CheckpointCorrupt, CheckpointNotFound
from ckpt_keras._assets import ASSETS, names_of_owners

logger = logging.getLogger("ckpt_keras")

CONFIG = "model_config"
"""Name of the item, as in directories of ``keras.callbacks.OrbaxCheckpoint``."""


class ConfigItem:
    """A model's description as an item of a step: each save writes it anew, no restore sets it."""

    written_anew = True

    def __init__(self, description: dict[str, Any]) -> None:
        self._description = description

    def get_state(self) -> dict[str, Any]:
        """The description."""
        return self._description

    def set_state(self, state: dict[str, Any]) -> None:
        """Keeps the description; changes no model."""
        self._description = dict(state)


def config_item(model: Any) -> ConfigItem:
    """The item that ``load_model`` rebuilds a model from: configuration and compilation as JSON.

    If Keras cannot serialise the model (a class without ``get_config``, a lambda as loss), the item
    holds the reason instead.
    """
    import keras

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
    item: Mapping[str, Any],
    *,
    where: str,
    custom_objects: Mapping[str, Any] | None,
    compile: bool,
    safe_mode: bool,
) -> Any:
    """A new model from the saved ``config_item``.

    Raises:
        CheckpointNotFound: no configuration was saved; the message gives the reason.
        CheckpointCorrupt: the saved text is not a configuration.
    """
    import keras

    text = item.get("config")
    if not text:
        reason = item.get("reason") or "none was saved"
        raise CheckpointNotFound(
            f"{where}: no model configuration ({reason}): make the model by code and call "
            "ckpt_keras.restore(directory, model)"
        )
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"{where}: its model configuration is no JSON: {error}") from error
    if not compile:
        config["compile_config"] = None
    return keras.saving.deserialize_keras_object(
        config, custom_objects=custom_objects, safe_mode=safe_mode
    )
