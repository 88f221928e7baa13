"""Which steps to save (``when``) and which to keep (``keep``): pure functions, without I/O; and what the Checkpointer's short
arguments (``max_to_keep=``, ...) stand for.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

from ckpt_core._run.policies import keep, when
from ckpt_core.arguments import whole_number


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
