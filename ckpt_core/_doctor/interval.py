"""How often to save: the interval that loses least time, from what saves cost and how often machines fail.

The first-order optimum is Young's (1974): sqrt(2 * cost * time between failures). The costs here are those of asynchronous
saves: training stands still for `blocking_secs`, then runs slower by a share while the save is written; and a failure
during that write falls back to the step before it, so that half of an interval *and* one write are redone on average.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Tier:
    """What one place for checkpoints costs."""

    name: str
    blocking_secs: float  # a save stops training for this long
    write_secs: float  # from then until the step is committed
    slowdown: float  # of training while a save is written, 0 to 1
    restore_secs: float
    share: float = 1.0  # of all failures, those that restore from this place

    @property
    def cost_secs(self) -> float:
        """Training time that one save takes away."""
        return self.blocking_secs + self.slowdown * self.write_secs


@dataclass(frozen=True)
class Interval:
    """How often to save into one tier, and what share of all time that loses."""

    name: str
    steps: int  # between two saves
    secs: float  # the same as time
    saving: float  # share of time that saves take
    redone: float  # share of time in which steps are computed again after failures
    restoring: float  # share of time for starting the job and reading back

    @property
    def lost(self) -> float:
        """Share of time that is lost through this tier."""
        return self.saving + self.redone + self.restoring


def best_intervals(
    tiers: list[Tier], *, step_secs: float, failure_secs: float, start_secs: float
) -> list[Interval]:
    """The intervals that lose least time, of one tier or of two; the second takes every n-th save of the first.
    ``failure_secs`` is the mean time between failures of the whole job, ``start_secs`` from a failure until the restore
    begins.
    """
    # n in steps of 5 %: between two of them the loss changes by less than a thousandth
    every = sorted({round(1.05**power) for power in range(190)}) if len(tiers) > 1 else [1]
    counted = (list(zip(tiers, (1, n), strict=False)) for n in every)
    found = (
        [_interval(tier, steps * n, step_secs, failure_secs, start_secs) for tier, n in pairs]
        for pairs in counted
        for steps in _candidates(pairs, step_secs, failure_secs)
    )
    return min(found, key=lambda intervals: sum(one.lost for one in intervals))


def _candidates(tiers: list[tuple[Tier, int]], step_secs: float, failure_secs: float) -> set[int]:
    """Whole numbers of steps beside Young's optimum, if each tier takes every n-th save."""
    cost_secs = sum(tier.cost_secs / n for tier, n in tiers)
    redone = sum(tier.share * n for tier, n in tiers)
    near = math.sqrt(2 * cost_secs * failure_secs / redone) / step_secs
    # one save is written at a time: with a shorter interval training would wait for the last one
    least = max(
        math.ceil((tier.blocking_secs + tier.write_secs) / step_secs / n) for tier, n in tiers
    )
    return {max(1, least, math.floor(near)), max(1, least, math.ceil(near))}


def _interval(
    tier: Tier, steps: int, step_secs: float, failure_secs: float, start_secs: float
) -> Interval:
    """What saving every so many steps loses."""
    secs = steps * step_secs
    failures_per_sec = tier.share / failure_secs
    return Interval(
        name=tier.name,
        steps=steps,
        secs=secs,
        saving=tier.cost_secs / secs,
        redone=failures_per_sec * (secs / 2 + tier.write_secs),
        restoring=failures_per_sec * (start_secs + tier.restore_secs),
    )
