"""The report of a restore: which leaves came from the checkpoint, and what differed from the save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpt_core._load.checkpoint import OrbaxItem
from ckpt_core._load.planned import ItemPlan
from ckpt_core._load.targets import is_resharded
from ckpt_core._results import RestoreReport
from ckpt_core._tree import format_path

_ON_DEVICES = frozenset({"jax", "key"})


def report_of(plans: Sequence[ItemPlan]) -> RestoreReport:
    """What was planned, and is done by now; paths begin with the name of their item."""
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
    """The leaves that lie on other devices, or in other parts, than they did at the save."""
    item = plan.item
    moved: dict[tuple[int, int], bool] = {}  # by saved and present sharding: many leaves share both
    for result, position in enumerate(plan.positions):
        target = plan.targets.get(result)
        if position is None or target is None:
            continue
        if not {target.spec.kind, item.specs[position].kind} <= _ON_DEVICES:
            continue
        described = item.shardings[position]
        if not described and isinstance(item, OrbaxItem):
            continue  # Orbax did not record where it lay
        pair = (id(described), id(target.sharding))
        if pair not in moved:
            moved[pair] = is_resharded(described, target.sharding)
        if moved[pair]:
            yield _prefix(plan) + format_path(item.paths[position])
