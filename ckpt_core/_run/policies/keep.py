"""Which steps to keep: policies that can be joined with ``|``; the newest step is always kept.

Example:
    >>> from ckpt_core import keep
    >>> steps = [keep.StepFacts(step) for step in range(5)]
    >>> sorted((keep.latest(1) | keep.every_steps(2))(steps))
    [0, 2, 4]
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from ckpt_core.arguments import an, numbers_of_steps, seconds, whole_number

_POLICIES: str = "all best closest_to_every_steps every_secs every_steps latest newer_than steps"


def __dir__() -> list[str]:
    return _POLICIES.split()  # tab completion shows only the policies


@dataclass(frozen=True)
class StepFacts:
    """What a keep policy gets to know about one step.

    Attributes:
        step: number of the step.
        created_unix_secs: time of the commit, in Unix seconds; 0 if unknown (steps written by
            Orbax).
        metrics: ``metrics=`` of its save.
    """

    step: int
    created_unix_secs: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


Selection = Callable[[Sequence[StepFacts]], Mapping[int, str]]
Chooser = Callable[[Sequence[StepFacts]], Iterable[int]]
"""A user's function: returns the steps to keep, or a dict of step to reason."""


_NO_TIME = "when it was written is not known"


@dataclass(frozen=True)
class KeepPolicy:
    """Called with all steps, ascending: returns ``{step: reason}`` for those to keep.

    ``a | b`` keeps the steps that ``a`` or ``b`` keeps.
    """

    select: Selection
    name: str
    ranks_by: frozenset[str] = frozenset()
    """The metrics by which it ranks steps."""
    ranks_only: bool = False
    """Only their rank decides: steps that have none of the metrics, and so no rank, stay."""

    def __call__(self, steps: Sequence[StepFacts]) -> dict[int, str]:
        return dict(self.select(steps))

    def __or__(self, other: KeepPolicy | Chooser) -> KeepPolicy:
        second = policy_of(other)
        select = partial(_either, self, second)
        ranks_by = self.ranks_by | second.ranks_by
        ranks_only = self.ranks_only and second.ranks_only
        return KeepPolicy(select, f"{self.name} | {second.name}", ranks_by, ranks_only)

    def __ror__(self, other: Chooser) -> KeepPolicy:
        return policy_of(other) | self

    def __repr__(self) -> str:
        return self.name


def _either(one: KeepPolicy, other: KeepPolicy, steps: Sequence[StepFacts]) -> dict[int, str]:
    mine, others = one(steps), other(steps)
    both = {step: f"{mine[step]}; {others[step]}" for step in mine.keys() & others.keys()}
    return {**mine, **others, **both}


def by(choose: Chooser) -> KeepPolicy:
    """A policy from your own function, which returns step numbers to keep, or a dict with reasons.

    Passing the function itself as ``keep_policy=`` does the same.
    """
    name = getattr(choose, "__name__", repr(choose))
    return KeepPolicy(partial(_by, choose, name), f"by({name})")


def _by(choose: Chooser, name: str, steps: Sequence[StepFacts]) -> dict[int, str]:
    chosen = choose(steps)
    if isinstance(chosen, Mapping):
        return {operator.index(step): str(why) for step, why in chosen.items()}
    try:
        return {operator.index(step): f"chosen by {name}" for step in chosen}
    except TypeError as error:
        raise TypeError(
            f"the keep policy {name} must give step numbers, or a dict of step to reason, "
            f"and gave {an(chosen)}"
        ) from error


def policy_of(policy: object) -> KeepPolicy:
    """``policy`` itself if it is a ``KeepPolicy``; a function is wrapped with ``by``.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(policy, KeepPolicy):
        return policy
    if callable(policy):
        return by(cast(Chooser, policy))
    raise TypeError(
        f"keep_policy must be one of ckpt.keep, or a function of steps, got {an(policy)}"
    )


def all() -> KeepPolicy:  # shadows the builtin, so that users can write keep.all()
    """Every step."""
    return KeepPolicy(_all, "all()")


def _all(steps: Sequence[StepFacts]) -> dict[int, str]:
    return {facts.step: "all are kept" for facts in steps}


def latest(n: int) -> KeepPolicy:
    """The newest ``n`` steps."""
    n = whole_number("n of keep.latest", n, why=": the newest step is always kept")
    return KeepPolicy(partial(_latest, n), f"latest({n})")


def _latest(n: int, steps: Sequence[StepFacts]) -> dict[int, str]:
    return {facts.step: f"among the latest {n}" for facts in steps[-n:]}


def best(metric: str, *, n: int = 1, mode: str) -> KeepPolicy:
    """The ``n`` steps with the best value of a metric, ignoring steps without it and NaN.

    If a Checkpointer has no other policy, steps without the metric stay, since they cannot be ranked.

    Args:
        metric: its name in ``metrics=``.
        n: how many steps; if values are equal, the newer step ranks higher.
        mode: ``"min"`` or ``"max"``.
    """
    if not isinstance(metric, str):
        raise TypeError(f"metric of keep.best must be the name of a metric, got {metric!r}")
    n = whole_number("n of keep.best", n)
    if mode not in ("min", "max"):
        raise ValueError(f"mode must be 'min' or 'max' in keep.best, got {mode!r}")
    name = f"best({metric!r}, n={n}, mode={mode!r})"
    select = partial(_best, metric, n, mode)
    return KeepPolicy(select, name, frozenset((metric,)), ranks_only=True)


def _best(metric: str, n: int, mode: str, steps: Sequence[StepFacts]) -> dict[int, str]:
    return {step: f"among the best {n} by {metric}" for step in ranking(steps, metric, mode)[:n]}


def ranking(steps: Sequence[StepFacts], metric: str, mode: str) -> list[int]:
    """The steps that have a number as a metric, best first; of equal ones the newer first."""
    sign = 1 if mode == "max" else -1
    ranked = sorted(
        (facts for facts in steps if not math.isnan(facts.metrics.get(metric, math.nan))),
        key=lambda facts: (sign * facts.metrics[metric], facts.step),
        reverse=True,
    )
    return [facts.step for facts in ranked]


def every_steps(interval: int) -> KeepPolicy:
    """Steps that are multiples of ``interval``."""
    interval = whole_number("interval of keep.every_steps", interval)
    return KeepPolicy(partial(_multiples, interval), f"every_steps({interval})")


def _multiples(interval: int, steps: Sequence[StepFacts]) -> dict[int, str]:
    found = (facts.step for facts in steps if facts.step % interval == 0)
    return dict.fromkeys(found, f"a multiple of {interval}")


def closest_to_every_steps(interval: int) -> KeepPolicy:
    """For each multiple of ``interval``, the step closest to it; of two as close, the older one.

    For runs that do not save at fixed numbers, by time for example. Of the multiples beyond the
    newest step only the next one counts, so the choice for earlier ones never changes.
    """
    interval = whole_number("interval of keep.closest_to_every_steps", interval)
    return KeepPolicy(partial(_closest, interval), f"closest_to_every_steps({interval})")


def _closest(interval: int, steps: Sequence[StepFacts]) -> dict[int, str]:
    numbers = [facts.step for facts in steps]
    kept: dict[int, str] = {}
    for at, number in enumerate(numbers):
        # the multiples that are closer to this step than to its neighbours
        last = -(-number // interval) * interval
        if at + 1 < len(numbers):
            last = (number + numbers[at + 1]) // 2 // interval * interval
        if at == 0 or 2 * last > numbers[at - 1] + number:
            kept[number] = f"the closest to {last}"
    return kept


def every_secs(interval_secs: float) -> KeepPolicy:
    """The oldest step, then each committed at least ``interval_secs`` after the last one kept.

    Steps whose commit time is unknown are kept too. Times that go backwards from a step to a later one are of a
    clock that was ahead: the earlier step then counts as committed when the later one was.
    """
    interval_secs = seconds("interval_secs of keep.every_secs", interval_secs)
    return KeepPolicy(partial(_spaced, interval_secs), f"every_secs({interval_secs:g})")


def _spaced(interval_secs: float, steps: Sequence[StepFacts]) -> dict[int, str]:
    kept: dict[int, str] = {}
    last = -math.inf
    for facts, created in zip(steps, _times(steps), strict=True):
        if not created:
            kept[facts.step] = _NO_TIME
        elif created - last >= interval_secs:
            kept[facts.step] = f"one every {interval_secs:g} s"
            last = created
    return kept


def _times(steps: Sequence[StepFacts]) -> list[float]:
    """The commit time of each step, but never later than that of a later step; 0 if unknown."""
    times: list[float] = []
    latest = math.inf
    for facts in reversed(steps):
        if facts.created_unix_secs:
            latest = min(latest, facts.created_unix_secs)
        times.append(latest if facts.created_unix_secs else 0.0)
    return times[::-1]


def steps(chosen: Iterable[int]) -> KeepPolicy:
    """The steps with these numbers."""
    numbers = numbers_of_steps("steps of keep.steps", chosen)
    return KeepPolicy(partial(_chosen, numbers), f"steps({sorted(numbers)})")


def _chosen(numbers: Container[int], steps: Sequence[StepFacts]) -> dict[int, str]:
    return {facts.step: "chosen by number" for facts in steps if facts.step in numbers}


def newer_than(secs: float) -> KeepPolicy:
    """Steps committed at most ``secs`` before the newest one, and those whose time is unknown.

    So the steps of the latest hour, for example: ``newer_than(3600)``. For times that go backwards see
    ``every_secs``.
    """
    secs = seconds("secs of keep.newer_than", secs)
    return KeepPolicy(partial(_recent, secs), f"newer_than({secs:g})")


def _recent(secs: float, steps: Sequence[StepFacts]) -> dict[int, str]:
    times = _times(steps)
    newest = max(times, default=0.0)
    return {
        facts.step: f"within {secs:g} s of the newest" if created else _NO_TIME
        for facts, created in zip(steps, times, strict=True)
        if not created or newest - created <= secs
    }
