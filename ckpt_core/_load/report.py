"""The report of a restore: the paths that were loaded, missing, unexpected, cast or resharded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpt_core._load.checkpoint import OrbaxItem
from ckpt_core._load.planned import ItemPlan
from ckpt_core._load.targets import is_resharded
from ckpt_core._results import RestoreReport
from ckpt_core._tree import format_path

_ON_DEVICES = frozenset({"jax", "key"})


def report_of(plans: Sequence[ItemPlan]) -> RestoreReport:
    """The report, from the executed plans; each path begins with the name of its item."""
    matched = [(plan, plan.match) for plan in plans if plan.match is not None]
    return RestoreReport(
        loaded=tuple(path for plan in plans for path in _loaded(plan)),
        missing=tuple(_prefix(plan) + path for plan, match in matched for path in match.missing),
        unexpected=tuple(
            _prefix(plan) + path for plan, match in matched for path in match.unexpected
        ),
        cast=tuple(_prefix(plan) + path for plan, match in matched for path in match.cast),
        resharded=tuple(path for plan in plans for path in _resharded(plan)),
    )


def _prefix(plan: ItemPlan) -> str:
    return f"{plan.item.name}/" if plan.item.name else ""


def _loaded(plan: ItemPlan) -> Iterator[str]:
    prefix, paths = _prefix(plan), plan.item.paths
    return (prefix + format_path(paths[at]) for at in plan.positions if at is not None)


def _resharded(plan: ItemPlan) -> Iterator[str]:
    """Paths of the leaves whose sharding differs from the one that they were saved with."""
    item = plan.item
    # by id of saved and of target sharding: many leaves share both, so they are compared once
    moved: dict[tuple[int, int], bool] = {}
    for result, position in enumerate(plan.positions):
        target = plan.targets.get(result)
        if position is None or target is None:
            continue
        if not {target.spec.kind, item.specs[position].kind} <= _ON_DEVICES:
            continue
        described = item.shardings[position]
        if not described and isinstance(item, OrbaxItem):
            continue  # Orbax recorded no sharding
        pair = (id(described), id(target.sharding))
        if pair not in moved:
            moved[pair] = is_resharded(described, target.sharding)
        if moved[pair]:
            yield _prefix(plan) + format_path(item.paths[position])
