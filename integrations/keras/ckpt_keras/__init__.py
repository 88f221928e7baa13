"""Keras 3 on JAX for ckpt: a callback that resumes ``fit``, and functions to save and load models.

``OrbaxCheckpointCallback``
    saves while ``fit`` trains; the same line in a new process continues where it stopped.
``KerasCheckpointManager`` (also ``KerasOrbaxCheckpointManager``)
    the same for a custom training loop.
``save``, ``restore``, ``load_model``
    save a model to a directory and load it.

To pass Keras objects to ``ckpt_core`` no import is needed: it loads ``ADAPTER`` itself. Importing
this package does not import Keras, because the backend must be chosen before that.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ckpt_keras._adapter import (
    ADAPTER as ADAPTER,
    KerasAdapter as KerasAdapter,
    import_keras as _import_keras,
)

if TYPE_CHECKING:
    from ckpt_keras._callback import OrbaxCheckpointCallback as OrbaxCheckpointCallback
    from ckpt_keras._directory import (
        KerasCheckpointManager as KerasCheckpointManager,
        KerasOrbaxCheckpointManager as KerasOrbaxCheckpointManager,
        load_model as load_model,
        restore as restore,
        save as save,
    )

__all__ = [
    "ADAPTER",
    "KerasAdapter",
    "KerasCheckpointManager",
    "KerasOrbaxCheckpointManager",
    "OrbaxCheckpointCallback",
    "load_model",
    "restore",
    "save",
]


if not TYPE_CHECKING:  # to a type checker, a name that is not above is a mistake

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'ckpt_keras' has no attribute {name!r}")
        _import_keras()  # its error says what to do if Keras or its backend is missing
        home = "_callback" if name == "OrbaxCheckpointCallback" else "_directory"
        value = getattr(importlib.import_module(f"ckpt_keras.{home}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
