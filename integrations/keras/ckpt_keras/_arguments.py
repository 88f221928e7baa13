"""The checked arguments of the callback, including those with the names of Keras' guide."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_core import Options, keep
from ckpt_keras._assets import ASSETS
from ckpt_keras._items import CONFIG, MODEL, OLD_MODEL
from ckpt_keras._monitor import checked_mode, direction
from ckpt_keras._progress import FIT, HOST

DEFAULT_MONITOR = "val_loss"
"""The monitored metric if the caller names none, as in Keras."""

ITEMS = (MODEL, OLD_MODEL, CONFIG, ASSETS, FIT, HOST, "data")
"""Names of the callback's items in a step; ``extra=`` may use any others."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of the callback; see ``OrbaxCheckpointCallback``."""

    directory: str
    monitor: str
    verbose: int
    save_best_only: bool
    mode: str
    save_freq: str | int
    max_to_keep: int | None
    save_on_background: bool
    save_weights_only: bool
    steps_per_epoch: int
    restore: bool
    host_only: bool
    save_interval_steps: int | None = None
    keep_period: int | None = None
    track: tuple[Any, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    options: Options | None = None

    def __post_init__(self) -> None:
        """Refuses invalid numbers and combinations of arguments."""
        if isinstance(self.max_to_keep, (str, float)):
            raise TypeError(f"max_to_keep must be a whole number or None, got {self.max_to_keep!r}")
        if self.max_to_keep is not None and self.max_to_keep < 1:
            raise ValueError(
                f"max_to_keep must be at least 1, or None to keep all, got {self.max_to_keep}"
            )
        checked_mode(self.mode)
        checked_save_freq(self.save_freq)
        interval = checked_period(self.save_interval_steps, "save_interval_steps")
        if interval is not None and self.save_freq != "epoch":
            raise ValueError(
                f"save_interval_steps={interval} and save_freq={self.save_freq!r} both say when to save: pass one"
            )
        checked_period(self.keep_period, "keep_period")
        if self.keep_period is not None and self.max_to_keep is None:
            raise ValueError("keep_period needs max_to_keep: without it every step is kept anyway")

    @property
    def unit(self) -> str:
        """What step numbers count: ``epoch`` or ``batch``."""
        return "epoch" if self.save_freq == "epoch" else "batch"

    def keep_policy(self, model: Any) -> keep.KeepPolicy | None:
        """A policy that keeps the newest steps and the best one; None keeps all."""
        if self.max_to_keep is None:
            return None
        policy = keep.latest(self.max_to_keep)
        if self.keep_period is not None:
            policy |= keep.every_steps(self.keep_period)
        mode = direction(self.monitor, self.mode, model)
        if mode is None:
            return policy
        best = keep.best(self.monitor, n=1, mode=mode)
        if self.monitor == DEFAULT_MONITOR:  # nobody asked for it, and a fit may not validate
            best = replace(best, ranks_by=frozenset())
        return policy | best


def directory_of(directory: Any, monitor: Any, checkpoint_dir: Any) -> tuple[str, str]:
    """Directory and metric, from our argument names or those of Keras' guide.

    The guide's callback takes ``(model, checkpoint_dir, ...)``, ours ``(directory, monitor, ...)``.

    Raises:
        TypeError: no directory was passed, or two.
    """
    if hasattr(directory, "trainable_variables"):
        directory = None
        if checkpoint_dir is None and monitor != DEFAULT_MONITOR:
            checkpoint_dir, monitor = monitor, DEFAULT_MONITOR
    if directory is not None and checkpoint_dir is not None:
        raise TypeError("pass directory or checkpoint_dir: they are two names for one thing")
    chosen = checkpoint_dir if directory is None else directory
    if chosen is None or isinstance(chosen, (bool, int)):
        raise TypeError("OrbaxCheckpointCallback needs a directory, such as 'runs/1'")
    return os.fspath(chosen), monitor


def checked_save_freq(save_freq: Any) -> str | int:
    """``epoch``, or a number of batches.

    Raises:
        ValueError: anything else.
    """
    number = isinstance(save_freq, int) and not isinstance(save_freq, bool) and save_freq >= 1
    if save_freq == "epoch" or number:
        return save_freq
    raise ValueError(f"save_freq must be 'epoch' or a number of batches, got {save_freq!r}")


def checked_period(period: Any, name: str) -> int | None:
    """A number of steps, or None.

    Raises:
        ValueError: anything else.
    """
    if period is None or (isinstance(period, int) and not isinstance(period, bool) and period > 0):
        return period
    raise ValueError(f"{name} must be a number of steps from 1 on, got {period!r}")


def checked_extra(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Further items by name.

    Raises:
        ValueError: a name is one of the callback's own items.
    """
    if extra is not None and not isinstance(extra, Mapping):
        raise TypeError(f"extra= is a dict of names and objects, got a {type(extra).__name__}")
    taken = [name for name in extra or {} if name in ITEMS]
    if taken:
        raise ValueError(
            f"extra= cannot be called {', '.join(taken)}: the callback's own items are"
        )
    return dict(extra or {})


def checked_track(track: Any) -> tuple[Any, ...]:
    """The callbacks whose state is saved.

    Raises:
        TypeError: ``track`` is not a list of callbacks.
    """
    if track is None:
        return ()
    if not isinstance(track, Sequence) or isinstance(track, str):
        raise TypeError(f"track must be a list of callbacks, got a {type(track).__name__}")
    for callback in track:
        if isinstance(callback, type):
            name = callback.__name__
            raise TypeError(
                f"track holds the class {name}: pass the object that is in callbacks= of fit, {name}(...)"
            )
        if not hasattr(callback, "on_epoch_end"):
            raise TypeError(f"track takes callbacks, got a {type(callback).__name__}")
    return tuple(track)
