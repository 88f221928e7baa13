"""The model's configuration beside its weights, so that a checkpoint can be a model again."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Mapping
from typing import Any

from ckpt_core import CheckpointNotFound

logger = logging.getLogger("ckpt_keras")

CONFIG = "model_config"
"""Name of the item, as in directories of ``keras.callbacks.OrbaxCheckpoint``."""


def config_item(model: Any) -> dict[str, Any]:
    """The item that ``load_model`` rebuilds a model from: configuration and compilation as JSON.

    Of a model that Keras cannot serialise (a class without ``get_config``, a lambda as loss) it is
    the reason instead.
    """
    import keras

    try:
        with warnings.catch_warnings():
            # Keras' Variable.numpy() does not know of numpy 2's copy=: no business of who saves
            warnings.simplefilter("ignore", DeprecationWarning)
            return {"config": json.dumps(keras.saving.serialize_keras_object(model))}
    except Exception as error:  # whatever a user's get_config may raise: weights are still saved
        logger.info("%s has no configuration to save: %s", model.name, error)
        return {"config": "", "reason": f"{type(error).__name__}: {error}"}


def model_from_config(
    item: Mapping[str, Any],
    *,
    where: str,
    custom_objects: Mapping[str, Any] | None,
    compile: bool,
    safe_mode: bool,
) -> Any:
    """A new model out of what ``config_item`` gave.

    Raises:
        CheckpointNotFound: no configuration was saved, with the reason.
    """
    import keras

    text = item.get("config")
    if not text:
        reason = item.get("reason") or "none was saved"
        raise CheckpointNotFound(
            f"{where}: no model configuration ({reason}): make the model by code and call "
            "ckpt_keras.restore(directory, model)"
        )
    config = json.loads(text)
    if not compile:
        config["compile_config"] = None
    return keras.saving.deserialize_keras_object(
        config, custom_objects=custom_objects, safe_mode=safe_mode
    )
