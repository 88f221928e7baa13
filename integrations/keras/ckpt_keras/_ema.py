"""Averaged weights (``use_ema``) and ``SwapEMAWeights``, which swaps them with the model's weights.

With ``swap_on_epoch`` the model holds the averages at the end of an epoch, which readers of a checkpoint should get, and
the optimizer holds the trained weights in their place; after the last epoch Keras drops those. A checkpoint holds both, and
notes that they are swapped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import jax.numpy as jnp
import keras


class Averages:
    """The averages of a model that ``fit`` trains, and the callback that swaps them, if any."""

    def __init__(self, model: Any, callbacks: Any) -> None:
        self._pairs = _pairs(getattr(model, "optimizer", None))
        self._swapper = _swapper(callbacks) if self._pairs else None
        self._trained: list[Any] = []

    @property
    def swapped(self) -> bool:
        """Whether weights and averages are swapped now."""
        return bool(getattr(self._swapper, "_ema_weights_in_model", False))

    def unshare(self) -> None:
        """Copies averages that share an array with their weight, as at the end of a fit: Keras donates both to the next
        compiled step, and jax refuses to donate an array twice.
        """
        for weight, average in self._pairs:
            if average._value is weight._value is not None:
                average.assign(jnp.copy(average.value))

    def before_epoch_end(self) -> None:
        """Keeps the trained weights before the end of the last epoch overwrites them with averages."""
        self._trained = [weight.value for weight, _ in self._pairs] if self._swapper else []

    @contextlib.contextmanager
    def as_saved(self) -> Generator[None]:
        """Inside the block the averages' variables hold the trained weights, if they were swapped."""
        if not self.swapped or not self._trained:
            yield
            return
        now = [average.value for _, average in self._pairs]
        try:
            for (_, average), value in zip(self._pairs, self._trained, strict=True):
                average.assign(value)
            yield
        finally:
            for (_, average), value in zip(self._pairs, now, strict=True):
                average.assign(value)
            self._trained = []

    def restored(self, *, trains: bool) -> None:
        """Handles a restored state that was saved swapped. If no epoch follows, the end of fit copies the averages'
        variables into the model, as after the last one.
        """
        if trains and self._swapper is not None:
            self._swapper._ema_weights_in_model = True
            return
        for weight, average in self._pairs:
            trained, averaged = average.value, weight.value
            average.assign(averaged)
            if trains:
                weight.assign(trained)
        if not trains:
            self.unshare()


def _pairs(optimizer: Any) -> list[tuple[Any, Any]]:
    own = getattr(optimizer, "inner_optimizer", optimizer)
    averages = getattr(own, "_model_variables_moving_average", None)
    if not averages or not own.use_ema:
        return []
    return list(zip(own._trainable_variables, averages, strict=True))


def _swapper(callbacks: Any) -> Any:
    for callback in getattr(callbacks, "callbacks", ()):
        if isinstance(callback, keras.callbacks.SwapEMAWeights) and callback.swap_on_epoch:
            return callback
    return None
