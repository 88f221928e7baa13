"""When to save: policies that can be joined with ``|``.

Example:
    >>> from ckpt_core import when
    >>> policy = when.every_steps(100) | when.at_steps([5])
    >>> policy(5, when.SaveContext()), policy(6, when.SaveContext())
    (True, False)
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from functools import partial

from ckpt_core.arguments import numbers_of_steps, seconds, whole_number

_POLICIES = ("at_steps", "continuously", "every_secs", "every_steps", "first", "preempted")


def __dir__() -> list[str]:
    return list(_POLICIES)  # tab completion shows only the policies


@dataclass(frozen=True, kw_only=True)
class SaveContext:
    """What a save policy gets to know besides the step number.

    Attributes:
        newest_step: the newest step that is saved or being saved, or None. With several processes, process 0 alone
            lists the directory; the others, whose answers do not count, know of steps that they have begun to save.
        secs_since_save: seconds since this Checkpointer's last save began; infinite if it had none.
        saving: whether an asynchronous save is running.
        preempted: whether this run was asked to stop.
    """

    newest_step: int | None = None
    secs_since_save: float = float("inf")
    saving: bool = False
    preempted: bool = False


Decision = Callable[[int, SaveContext], bool]


@dataclass(frozen=True)
class SavePolicy:
    """Called with a step and a ``SaveContext``: True to save; ``a | b`` saves if either does."""

    decide: Decision
    name: str
    listens: bool = False
    """True if it reads ``SaveContext.preempted``: the Checkpointer must listen for the signal."""
    by_step: bool = False
    """True if only the step number decides; otherwise process 0 decides and tells the others."""

    def __call__(self, step: int, context: SaveContext) -> bool:
        return bool(self.decide(step, context))

    def __or__(self, other: Decision) -> SavePolicy:
        return any_of(self, other)

    def __ror__(self, other: Decision) -> SavePolicy:
        return any_of(other, self)

    def __repr__(self) -> str:
        return self.name


def any_of(*policies: Decision) -> SavePolicy:
    """Saves if any of the policies, or functions of (step, context), returns True."""
    for policy in policies:
        if not callable(policy):
            raise TypeError(
                f"{policy!r} is no policy: join those of ckpt.when, such as ckpt.when.every_steps(100), or functions of "
                "(step, context)"
            )
    name = " | ".join(getattr(policy, "name", repr(policy)) for policy in policies)
    return SavePolicy(
        partial(_any, policies),
        name,
        any(getattr(policy, "listens", False) for policy in policies),
        all(getattr(policy, "by_step", False) for policy in policies),
    )


def every_steps(interval: int) -> SavePolicy:
    """Every step that is a multiple of ``interval``."""
    interval = whole_number("interval of when.every_steps", interval)
    return SavePolicy(partial(_is_multiple, interval), f"every_steps({interval})", by_step=True)


def at_steps(steps: Iterable[int]) -> SavePolicy:
    """The steps with these numbers."""
    chosen = numbers_of_steps("steps of when.at_steps", steps)
    return SavePolicy(partial(_is_one, chosen), f"at_steps({sorted(chosen)})", by_step=True)


def every_secs(interval_secs: float) -> SavePolicy:
    """Saves when the last save began at least ``interval_secs`` ago, by the clock of process 0."""
    interval_secs = seconds("interval_secs of when.every_secs", interval_secs)
    return SavePolicy(partial(_has_passed, interval_secs), f"every_secs({interval_secs:g})")


def continuously(minimum_interval_secs: float = 0.0) -> SavePolicy:
    """Saves whenever no save is running, but at most once per ``minimum_interval_secs``."""
    minimum_interval_secs = seconds(
        "minimum_interval_secs of when.continuously", minimum_interval_secs
    )
    decide = partial(_is_idle, minimum_interval_secs)
    return SavePolicy(decide, f"continuously({minimum_interval_secs:g})")


def first() -> SavePolicy:
    """Saves if the directory holds no step yet."""
    return SavePolicy(_is_first, "first()")


def preempted() -> SavePolicy:
    """Saves the step at which the run was asked to stop."""
    # by_step: jax's preemption sync point already gives all processes the same step.
    return SavePolicy(_is_preempted, "preempted()", listens=True, by_step=True)


# Functions of a module, as policies are pickled: jobs send their settings to other processes.


def _any(policies: Iterable[Decision], step: int, context: SaveContext) -> bool:
    return any(policy(step, context) for policy in policies)


def _is_multiple(interval: int, step: int, _: SaveContext) -> bool:
    return step % interval == 0


def _is_one(chosen: Container[int], step: int, _: SaveContext) -> bool:
    return step in chosen


def _has_passed(interval_secs: float, _: int, context: SaveContext) -> bool:
    return context.secs_since_save >= interval_secs


def _is_idle(interval_secs: float, _: int, context: SaveContext) -> bool:
    return not context.saving and context.secs_since_save >= interval_secs


def _is_first(_: int, context: SaveContext) -> bool:
    return context.newest_step is None


def _is_preempted(_: int, context: SaveContext) -> bool:
    return context.preempted
