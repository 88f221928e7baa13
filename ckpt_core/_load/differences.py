"""Errors raised after all items are matched: differences, and patterns that match no leaf."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_core._errors import CheckpointNotFound, Mismatch, StructureMismatch
from ckpt_core._load import functions
from ckpt_core._load.checkpoint import Checkpoint
from ckpt_core._load.planned import ItemPlan
from ckpt_core._load.renames import advice_on, idle_renames, refuse_idle
from ckpt_core._load.request import Request
from ckpt_core._load.without_value import WITHOUT_VALUE
from ckpt_core._tree import format_path
from ckpt_core._tree.match import Idle, MatchRules
from ckpt_core._tree.patterns import advice_on_pattern, idle_patterns


def check_patterns(checkpoint: Checkpoint, plans: Sequence[ItemPlan], request: Request) -> None:
    """Raises CheckpointNotFound if ``only=``, or one of its patterns, matches no leaf of any item."""
    trees = [(plan.item.name, [*plan.item.paths, *plan.paths]) for plan in plans]
    # what another item has is no misspelling: one list may serve calls that restore different items
    others = [(item.name, item.paths or [()]) for item in checkpoint.items.values()]
    idle = idle_patterns(request.only, [*trees, *others])
    if not idle and any(position is not None for plan in plans for position in plan.positions):
        return
    paths = [format_path(path) for plan in plans for path in plan.item.paths]
    shown = ", ".join(paths[:5]) + (", ..." if len(paths) > 5 else "")
    told = [request.only] if isinstance(request.only, str) or not idle else idle
    advice = "; ".join(filter(None, (advice_on_pattern(pattern, paths) for pattern in idle)))
    raise CheckpointNotFound(
        f"{checkpoint.path}: only={', '.join(map(repr, told))} matches no leaf; leaves are {shown}"
        + (f". {advice}" if advice else "")
    )


def raise_mismatches(checkpoint: Checkpoint, plans: Sequence[ItemPlan], request: Request) -> None:
    """Raises StructureMismatch with all differences and the arguments that would allow them."""
    mismatches = [entry for plan in plans for entry in plan.mismatches]
    idle = idle_renames(checkpoint, request.rules, plans)
    if mismatches:
        advice = _advice(mismatches, request.rules, idle)
        raise StructureMismatch(mismatches, where=checkpoint.path, advice=advice)
    refuse_idle(checkpoint, idle)


def _advice(mismatches: list[Mismatch], rules: MatchRules, idle: list[Idle]) -> str:
    """The arguments that would allow the differences, less those that the caller passed already."""
    kinds = {entry.kind for entry in mismatches}
    told: list[str] = []
    missing = [str(entry.wanted) for entry in mismatches if entry.kind == "missing"]
    without_value = sum(text.endswith(WITHOUT_VALUE) for text in missing)
    if without_value < len(missing) and rules.missing == "error":
        told.append('missing="keep" keeps what the target holds')
    if "unexpected" in kinds:
        told.append('unexpected="ignore" leaves saved leaves out')
    if "dtype" in kinds and not rules.cast:
        told.append("cast=True converts dtypes")
    if "function" in kinds:
        told.append('unexpected="ignore" keeps the functions of the target')
    both_sides = {"missing", "unexpected"} <= kinds or functions.have_moved(mismatches)
    if both_sides and (rules.rename is None or idle):
        told.append("rename= maps saved paths to wanted ones")
    lines = [f"Where this is intended: {'; '.join(told)}."] if told else []
    if idle:
        lines.append(advice_on(idle))
    if without_value or ("missing" in kinds and rules.missing != "error"):
        lines.append(
            "The target holds no value there that could be kept: pass a target with values instead of an "
            "abstract one, or select with only= the leaves that were saved."
        )
    return " ".join(lines)
