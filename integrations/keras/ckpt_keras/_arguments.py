"""The checked arguments of the callback, including those with the names of Keras' guide."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt_core import Options, keep
from ckpt_keras._assets import ASSETS
from ckpt_keras._items import CONFIG, MODEL
from ckpt_keras._progress import FIT, HOST

DEFAULT_MONITOR = "val_loss"
"""The monitored metric if the caller names none, as in Keras."""

ITEMS = (MODEL, "model", CONFIG, ASSETS, FIT, HOST, "data")
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
    save_interval_steps: int | None
    keep_period: int | None
    track: tuple[Any, ...]
    extra: Mapping[str, Any]
    options: Options | None

    def __post_init__(self) -> None:
        """Refuses invalid numbers and combinations of arguments."""
        if isinstance(self.max_to_keep, (str, float)):
            raise TypeError(f"max_to_keep must be a whole number or None, got {self.max_to_keep!r}")
        if self.max_to_keep is not None and self.max_to_keep < 1:
            raise ValueError(
                f"max_to_keep must be at least 1, or None to keep all, got {self.max_to_keep}"
            )
        if self.mode not in ("auto", "min", "max"):  # Keras' callbacks take anything else for auto
            raise ValueError(f"mode must be 'auto', 'min' or 'max', got {self.mode!r}")
        if self.save_freq != "epoch" and not _is_count(self.save_freq):
            raise ValueError(
                f"save_freq must be 'epoch' or a number of batches, got {self.save_freq!r}"
            )
        for name in ("save_interval_steps", "keep_period"):
            period = getattr(self, name)
            if period is not None and not _is_count(period):
                raise ValueError(f"{name} must be a number of steps from 1 on, got {period!r}")
        if self.save_interval_steps is not None and self.save_freq != "epoch":
            raise ValueError(
                f"save_interval_steps={self.save_interval_steps} and save_freq={self.save_freq!r} both say when to save: pass one"
            )
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
        mode = self.direction(model)
        if mode is None:
            return policy
        best = keep.best(self.monitor, n=1, mode=mode)
        if self.monitor == DEFAULT_MONITOR:  # nobody asked for it, and a fit may not validate
            best = replace(best, ranks_by=frozenset())
        return policy | best

    def direction(self, model: Any) -> str | None:
        """Which values of the metric are better, ``min`` or ``max``; None if ``auto`` cannot decide."""
        name = self.monitor.removeprefix("val_")
        if self.mode != "auto":
            return self.mode
        if name == "loss" or name.endswith("_loss"):
            return "min"
        for group in getattr(model, "metrics", ()):
            for metric in getattr(group, "metrics", None) or [group]:
                known = getattr(metric, "_direction", None)
                if known is not None and (metric.name == name or name.endswith(f"_{metric.name}")):
                    return "max" if known == "up" else "min"
        return "max" if re.search("acc|auc|precision|recall", name) else None


def directory_of(directory: Any, monitor: Any, checkpoint_dir: Any) -> tuple[str, str]:
    """Directory and metric: of ``(directory, monitor, ...)``, or of ``(model, checkpoint_dir, ...)`` as in Keras' guide."""
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


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def checked_extra(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Further items by name; raises ValueError if a name is one of the callback's own items."""
    if extra is not None and not isinstance(extra, Mapping):
        raise TypeError(f"extra= is a dict of names and objects, got a {type(extra).__name__}")
    taken = ", ".join(name for name in extra or {} if name in ITEMS)
    if taken:
        raise ValueError(f"extra= cannot be called {taken}: the callback's own items are")
    return dict(extra or {})


def checked_track(track: Any) -> tuple[Any, ...]:
    """The callbacks whose state is saved; raises TypeError if ``track`` is not a list of callbacks."""
    if track is not None and (not isinstance(track, Sequence) or isinstance(track, str)):
        raise TypeError(f"track must be a list of callbacks, got a {type(track).__name__}")
    for callback in track or ():
        if isinstance(callback, type):
            name = callback.__name__
            raise TypeError(
                f"track holds the class {name}: pass the object that is in callbacks= of fit, {name}(...)"
            )
        if not hasattr(callback, "on_epoch_end"):
            raise TypeError(f"track takes callbacks, got a {type(callback).__name__}")
    return tuple(track or ())
