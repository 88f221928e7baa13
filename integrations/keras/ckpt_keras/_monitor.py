"""Decides which direction of a metric is better, and whether a value is the best so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def direction(monitor: str, mode: str, model: Any) -> str | None:
    """``min`` or ``max``; None if ``auto`` cannot decide."""
    if mode != "auto":
        return mode
    name = monitor.removeprefix("val_")
    if name == "loss" or name.endswith("_loss"):
        return "min"
    for metric in _leaf_metrics(model):
        if metric.name == name or name.endswith(f"_{metric.name}"):
            known = getattr(metric, "_direction", None)
            if known is not None:
                return "max" if known == "up" else "min"
    return "max" if any(word in name for word in ("acc", "auc", "precision", "recall")) else None


def _leaf_metrics(model: Any) -> list[Any]:
    found: list[Any] = []
    for metric in getattr(model, "metrics", ()):
        inner = getattr(metric, "metrics", None)
        found += inner if inner else [metric]
    return found


def is_better(value: float | None, best: float | None, mode: str | None) -> bool:
    """Whether a value beats the best one so far; NaN never does, nor does one of which the direction is not known."""
    if value is None or mode is None or value != value:
        return False
    if best is None or best != best:
        return True
    return value < best if mode == "min" else value > best


def numbers(logs: Mapping[str, Any] | None) -> dict[str, float]:
    """The numbers in the logs, as Python floats."""
    found: dict[str, float] = {}
    for name, value in (logs or {}).items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError):
            continue  # logs may hold arrays and nested dicts of a custom train_step
    return found
