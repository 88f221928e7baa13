"""Keras, imported late, and its backend."""

from __future__ import annotations

from typing import Any


def import_keras() -> Any:
    """The ``keras`` package; without it or its backend, the ModuleNotFoundError says what to do."""
    try:
        import keras
    except ModuleNotFoundError as error:
        if error.name == "keras":
            what = "ckpt_keras needs Keras: pip install 'ckpt-core[keras]'"
        else:
            what = (
                f"importing Keras failed, its backend needs {error.name!r}: ckpt_keras works on the "
                "JAX backend. Set KERAS_BACKEND=jax before Keras is imported for the first time"
            )
        raise ModuleNotFoundError(what, name=error.name) from error
    return keras


def backend() -> str:
    """The active backend: ``jax``, ``torch``, ``tensorflow`` ..."""
    return str(import_keras().backend.backend())


def on_jax() -> bool:
    """Whether Keras runs on JAX."""
    return backend() == "jax"


def require_jax(host_only: bool) -> None:
    """Raises RuntimeError for another backend than JAX, unless the caller asked for copies on the host."""
    active = backend()
    if active != "jax" and not host_only:
        raise RuntimeError(
            "ckpt_keras needs the JAX backend for sharded, asynchronous checkpoints; the active backend is "
            f"{active!r}. Set KERAS_BACKEND=jax before importing keras, or pass host_only=True (one process, "
            "numpy copies)"
        )
