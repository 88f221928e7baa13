"""One item, matched and ready to be read: plain values between matching and reading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_core._errors import Mismatch
from ckpt_core._load.checkpoint import SavedItem
from ckpt_core._load.outcomes import Outcome
from ckpt_core._load.targets import Target
from ckpt_core._tree.match import Match


class _NoState:
    """Stands for a state that was not passed, as None is one; says so in ``help``."""

    def __repr__(self) -> str:
        return "(not passed)"


NO_STATE = _NoState()
NOT_SAVED = object()
"""Stands for a target that was not given, as None is a target."""


@dataclass
class ItemPlan:
    """One item, matched and ready to be read.

    Attributes:
        item: as saved, with specs.
        outcome: makes of the leaves of the result what the caller gets.
        positions: for every leaf of the result the position in the item, or None to keep it.
        kept: the values of leaves that are not read, by position in the result.
        targets: what each leaf that is read becomes, by position in the result.
        match: for the report; None without a target.
    """

    item: SavedItem
    outcome: Outcome
    positions: Sequence[int | None] = ()
    kept: list[Any] = field(default_factory=list[Any])
    targets: dict[int, Target] = field(default_factory=dict[int, Target])
    match: Match | None = None

    @property
    def mismatches(self) -> Sequence[Mismatch]:
        """What differs between the item and its target, and is not allowed."""
        return self.match.mismatches if self.match is not None else ()

    @property
    def name(self) -> str:
        """Of the item, for messages."""
        return self.item.name or "the target"

    def forget(self, results: Sequence[int]) -> None:
        """Lets go of old leaves that others have taken the place of."""
        for result in results:
            self.kept[result] = None
