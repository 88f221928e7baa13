"""The plan of one item: the plain values that matching hands to reading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_core._errors import Mismatch
from ckpt_core._load.checkpoint import SavedItem
from ckpt_core._load.outcomes import Outcome
from ckpt_core._load.targets import Target
from ckpt_core._tree import Path
from ckpt_core._tree.match import Match


class _NoState:
    """Default of the argument ``state``, since None is a valid state; ``help`` shows its repr."""

    def __repr__(self) -> str:
        return "(not passed)"


NO_STATE = _NoState()
NOT_SAVED = object()
"""Stands for a target that the caller did not pass, since None is a valid target."""


@dataclass
class ItemPlan:
    """One item, matched and ready to be read. "Result" is the list of leaves that the load fills.

    Attributes:
        item: the saved item, with the spec of every leaf.
        outcome: builds the item's value from the leaves of the result.
        positions: for each leaf of the result, its position in the saved item; None if the leaf is
            not read and the target's value is kept.
        kept: the target's leaves, by position in the result; leaves that are read replace theirs.
        targets: dtype, sharding and regions of each leaf that is read, by position in the result.
        match: what the report needs; None without a target.
        paths: of the target's leaves, which patterns may name; empty without a target.
    """

    item: SavedItem
    outcome: Outcome
    positions: Sequence[int | None] = ()
    kept: list[Any] = field(default_factory=list[Any])
    targets: dict[int, Target] = field(default_factory=dict[int, Target])
    match: Match | None = None
    paths: Sequence[Path] = ()

    @property
    def mismatches(self) -> Sequence[Mismatch]:
        """The differences between the item and its target that the request does not allow."""
        return self.match.mismatches if self.match is not None else ()

    @property
    def name(self) -> str:
        """Name of the item, for messages."""
        return self.item.name or "the target"

    def forget(self, results: Sequence[int]) -> None:
        """Drops references to old leaves that new ones have replaced, so that memory is freed."""
        for result in results:
            self.kept[result] = None
