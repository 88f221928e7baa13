"""Checks the Checkpointer's short arguments (``max_to_keep=``, ...) and makes policies of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np

from ckpt_core._format.metrics import numbers_in
from ckpt_core._items import Json
from ckpt_core._options import METRICS_ARE_NUMBERS
from ckpt_core._run.policies import keep, when
from ckpt_core._run.policies.numbers import whole_number
from ckpt_core.arguments import an


def choose_save_policy(policy: when.Decision | None, interval: int | None) -> when.Decision:
    if policy is not None and interval is not None:
        raise TypeError("pass save_interval_steps or save_policy, not both")
    if policy is not None:
        _refuse_uncalled("save_policy", policy, when)
        if not callable(policy):
            every = policy if type(policy) is int and policy > 0 else 100
            raise TypeError(
                f"save_policy must be one of ckpt.when, or a function of (step, context), got {policy!r}: to save every "
                f"{every} steps, pass save_interval_steps={every} or save_policy=ckpt.when.every_steps({every})"
            )
        return policy
    return when.every_steps(_checked("save_interval_steps", 1 if interval is None else interval))


_WITHOUT = {
    "max_to_keep": ": the newest step is always kept. Leave it out to keep all",
    "keep_period": ": leave it out to keep no more than max_to_keep",
    "save_interval_steps": ": 1, the default, saves every step that is given to save()",
}


def _refuse_uncalled(argument: str, policy: Any, module: ModuleType) -> None:
    name = getattr(policy, "__name__", "")
    if name and getattr(module, name, None) is policy:
        code, home = policy.__code__, module.__name__.rpartition(".")[2]
        given = "..." if code.co_argcount + code.co_kwonlyargcount else ""
        raise TypeError(
            f"{argument}={home}.{name} is the function that makes a policy: write {argument}=ckpt.{home}.{name}({given})"
        )


def _checked(name: str, value: int) -> int:
    return whole_number(name, value, why=_WITHOUT[name])


def choose_keep_policy(
    policy: keep.KeepPolicy | keep.Chooser | None,
    max_to_keep: int | None,
    keep_period: int | None,
    best_metric: str | None,
    best_mode: str | None,
) -> keep.KeepPolicy | None:
    """The policy that the short arguments stand for."""
    if (best_metric is None) != (best_mode is None):
        raise TypeError("best_metric needs best_mode ('min' or 'max'), and the other way round")
    if best_mode not in (None, "min", "max"):
        raise ValueError(f"best_mode must be 'min' or 'max', got {best_mode!r}")
    if not (best_metric is None or isinstance(best_metric, str)):
        raise TypeError(f"best_metric is the name of a metric, got {best_metric!r}")
    if policy is not None:
        if max_to_keep is not None or keep_period is not None:
            raise TypeError("pass max_to_keep and keep_period, or keep_policy, not both")
        _refuse_uncalled("keep_policy", policy, keep)
        return keep.policy_of(policy)
    if max_to_keep is None:
        if keep_period is not None:
            raise TypeError("keep_period needs max_to_keep: without it every step is kept anyway")
        return None
    max_to_keep = _checked("max_to_keep", max_to_keep)
    keep_period = None if keep_period is None else _checked("keep_period", keep_period)
    if best_metric is not None and best_mode is not None:
        chosen = keep.best(best_metric, n=max_to_keep, mode=best_mode) | keep.latest(1)
    else:
        chosen = keep.latest(max_to_keep)
    if keep_period is not None:
        chosen |= keep.every_steps(keep_period)
    return replace(chosen, ranks_only=best_metric is not None)


def metrics_of(
    metrics: Mapping[str, float] | None, items: Mapping[str, object]
) -> dict[str, float]:
    """The numbers of a step by name, from ``metrics=`` or from an item ``metrics`` that is Json; TypeError if both were passed."""
    item = items.get("metrics")
    if not isinstance(item, Json):
        return {} if metrics is None else check_metrics(metrics)
    if metrics:
        raise TypeError(
            "pass the metrics by metrics=, or all of them as an item that is Json, not both"
        )
    return {name: float(number) for name, number in numbers_in(item.value).items()}


def check_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics as Python floats; TypeError if a name is not a str, or a value is not a scalar number."""
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"metrics must be a dict of numbers by name, got {an(metrics)}: {METRICS_ARE_NUMBERS}"
        )
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        array = np.asarray(value)
        if not isinstance(name, str) or array.ndim != 0 or not _is_real(array.dtype):
            raise TypeError(
                f"metrics takes numbers, and {name!r} is {_what(value)}: {_instead(name, value)}"
            )
        numbers[name] = float(array)
    return numbers


def _is_real(dtype: np.dtype[Any]) -> bool:
    """Whether elements are numbers that a float holds; also of the dtypes that jax adds, such as bfloat16."""
    return dtype.kind in "fiub" or dtype.name.startswith(("bfloat", "float", "int", "uint"))


def _what(value: object) -> str:
    shape: object = getattr(value, "shape", None)
    return f"{an(value)}" + (f" of shape {shape}" if shape else "")


def _instead(name: object, value: object) -> str:
    """Advice for the message about a metric that is not a number."""
    if not isinstance(name, str):
        return "names are str"
    if isinstance(value, dict):
        inner = next(iter(value), "train")
        return f"give each number a name of its own, such as {f'{name}/{inner}'!r}"
    if isinstance(value, str) or value is None:
        return (
            "leave it out, save it as metadata={...}, or save all metrics as an item: "
            'items={"metrics": ckpt.Json({...})}'
        )
    if getattr(value, "shape", None):
        return "take one number of it, such as its mean"
    return METRICS_ARE_NUMBERS
