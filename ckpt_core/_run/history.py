"""Where a run stands, and what its next save does to the steps on disk: pure functions.

A saved step is an identity: its number, and the token of its save. A Checkpointer has a trail, the identities that it
stood on, and a head, where it stands. What is on disk is always taken from a listing; nothing here remembers it.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckpt_core._errors import CheckpointExists

_ANY_STEP = 2**63 - 1  # no step has a greater number
_SHOWN = 5  # maximum number of steps that a message names


class Identity(NamedTuple):
    """One save of a step: its number, and the token in its ckpt.json."""

    step: int
    token: str  # empty for steps that Orbax wrote


@dataclass(frozen=True)
class Trail:
    """The steps that one Checkpointer saved, restored or rolled back to, and where it stands."""

    # Ascending; after going back, those beyond ``head`` stay on it until the next save.
    entries: tuple[Identity, ...] = ()
    head: int = -1  # number of the step that it stands on; -1 at the beginning
    # Saved with force=True beneath newer ones; training does not continue from them.
    detached: tuple[Identity, ...] = ()
    # It has restored, rolled back, or begun where nothing newer was: it leaves newer steps that are not its own.
    may_retire: bool = False
    # Where it began to save since it was placed, or None: steps on disk beyond it that are not its own are of another history.
    root: int | None = None
    # Own steps that are visible, but maybe not durable or not in every tier.
    uncertain: frozenset[int] = frozenset()
    # Steps that could not be restored, until they are saved again or restored after all.
    damaged: frozenset[int] = frozenset()
    # The token of a save is this and its number; empty until it has begun to save from where it stands.
    lineage: str = ""
    saves: int = 0  # of the lineage

    @property
    def own(self) -> frozenset[int]:
        """The numbers of its steps."""
        return frozenset(one.step for one in (*self.entries, *self.detached))

    @property
    def end(self) -> int:
        """Number of the last step on it; -1 if it has none."""
        return self.entries[-1].step if self.entries else -1

    def before(self, step: int) -> Identity | None:
        """The last identity on it with a smaller number."""
        return next((one for one in reversed(self.entries) if one.step < step), None)

    def continued_from(self, step: int) -> Identity | None:
        """What a save of this number continues: the head if it went back and ``step`` is on the rest, else the end."""
        if self.is_ahead(step) and self.head != self.end and step <= self.end:
            return self.before(self.head + 1)
        return self.before(step)

    def is_ahead(self, step: int) -> bool:
        """Whether a save of this number goes on, from the end or from where it went back to."""
        return step > self.end or (self.head != self.end and step > self.head)

    def branches_at(self, step: int) -> bool:
        """Whether a save of this number leaves own steps, or is between them: then what is on disk matters."""
        return step <= self.end and (self.is_ahead(step) or step not in self.own)

    def repeats(self, step: int) -> bool:
        """Whether a step was saved, or stood on, already, so that saving it again changes nothing."""
        if step in self.uncertain or step in self.damaged:
            return False
        return (self.head == self.end or not self.is_ahead(step)) and step in self.own


# What happens to a Checkpointer, as functions from trail to trail.


def restored(trail: Trail, identity: Identity) -> Trail:
    """It stands on a step that it has restored."""
    return replace(
        _standing(trail, identity), head=identity.step, may_retire=True, root=None, lineage=""
    )


def saved(trail: Trail, identity: Identity, changes: Changes, sure: bool = True) -> Trail:
    """The trail once a save with these changes is visible, perhaps in another tier before, and durable if ``sure``."""
    step, found = identity.step, trail
    if identity in (*found.entries, *found.detached):
        pass  # another tier has committed it before
    elif changes.detached:
        found = _without(found, step)
        found = replace(found, detached=(*found.detached, identity))
    else:
        if changes.truncates:
            last = last_before(changes, step)
            if max(found.own, default=-1) > last:
                found = cut(found, last)
            root = last if found.root is None else min(last, found.root)
            found = replace(found, root=root, entries=() if changes.base is None else found.entries)
        found = _standing(found, identity)
        found = replace(found, head=max(found.head, step), may_retire=True)
    uncertain = found.uncertain - {step}
    return replace(found, uncertain=uncertain if sure else uncertain | {step})


def persistent_failed(trail: Trail, identity: Identity) -> Trail:
    """The persistent copy of a step failed: if it is in another tier, it can be saved again all the same."""
    if identity not in (*trail.entries, *trail.detached):
        return trail
    return replace(trail, uncertain=trail.uncertain | {identity.step})


def local_failed(trail: Trail, step: int) -> Trail:
    """A save of a step failed in a tier: if it is an own one, it may not be whole there, and can be saved again."""
    return replace(trail, uncertain=trail.uncertain | {step}) if step in trail.own else trail


def rolled_back(trail: Trail, last: int, target: Identity | None) -> Trail:
    """All steps newer than ``last`` are left; ``target`` is the newest one that stays, or None."""
    found = cut(trail, last)
    if target is not None:
        found = _standing(found, target)
    return replace(found, head=found.end, may_retire=True, root=None, lineage="")


def deleted(trail: Trail, step: int, there: Collection[int]) -> Trail:
    """The trail without a step that is gone, so that its number can be saved again. It stands on the one before that is
    ``there``. If there is no other, it may retire no more: until a restore, steps on disk are of another history.
    """
    last = max(
        (one.step for one in trail.entries if one.step < step and one.step in there), default=-1
    )
    gone = range(last + 1 if trail.head == step else step, step + 1)
    entries = tuple(one for one in trail.entries if one.step not in gone)
    return replace(
        _without(trail, step),
        entries=entries,
        may_retire=trail.may_retire and (bool(entries) or not trail.entries),
        head=trail.head if trail.head != step else last,
        root=None,
        uncertain=trail.uncertain - {step},
        lineage="",
    )


def cut(trail: Trail, last: int) -> Trail:
    """The trail without the steps beyond ``last``. Damaged ones are known as before: a store cannot move them."""
    kept = tuple(one for one in trail.entries if one.step <= last)
    return replace(
        trail,
        entries=kept,
        head=kept[-1].step if kept else -1,
        detached=tuple(one for one in trail.detached if one.step <= last),
        uncertain=frozenset(step for step in trail.uncertain if step <= last),
    )


def _standing(trail: Trail, identity: Identity) -> Trail:
    """The trail with an identity on it, which is sound."""
    others = (one for one in trail.entries if one.step != identity.step)
    found = _without(trail, identity.step)
    return replace(found, entries=tuple(sorted((*others, identity))))


def _without(trail: Trail, step: int) -> Trail:
    """The trail without what it knows of other saves of a number, detached or damaged."""
    return replace(
        trail,
        detached=tuple(one for one in trail.detached if one.step != step),
        damaged=trail.damaged - {step},
    )


# What the records in a directory say of each other, as in a copy of a run that went back, made without deletion.


class Saved(NamedTuple):
    """What the record of a step says of its save."""

    token: str  # empty if Orbax wrote it, ``?`` if the record cannot be read
    parent: Identity | None = None
    created_unix_secs: float = 0.0


Saves = Mapping[int, Saved]
"""Of each step."""
_LINEAGE = 16  # the digits of a token that its writer drew; the rest counts its saves


def continues_another(parent: Identity, token: str | None) -> bool:
    """Whether a save does not continue the save of its parent's number that is there, with this token: None if there is
    none, ``?`` if nobody knows it. One that its own writer replaced later counts as the same.
    """
    if token in (None, "?", parent.token):
        return False
    own = parent.token[:_LINEAGE]
    return not (own and token.startswith(own) and token > parent.token)


def strays(saves: Saves) -> dict[int, int]:
    """For each step that does not continue a later save beneath it, that save."""
    found: dict[int, int] = {}
    numbers = sorted(saves)
    newest_unix_secs = saves[numbers[-1]].created_unix_secs if saves else 0.0
    for at, step in enumerate(numbers):
        if (parent := saves[step].parent) is None:
            continue
        for other in numbers[bisect.bisect_left(numbers, parent.step) : at]:
            token, before, saved_unix_secs = saves[other]
            went_on = before is not None and saved_unix_secs > newest_unix_secs
            if went_on and (other > parent.step or continues_another(parent, token)):
                found.setdefault(step, other)
        if parent.step in found:
            found.setdefault(step, found[parent.step])
    return found


def strays_of_copy(source: Saves, copy: Saves) -> list[int]:
    """The steps that only a copy has, and that are not of the source's history as the records of both tell it: beyond its
    newest step, between one and its parent, or another save of one.
    """
    parents = {
        (step, token): one for saves in (copy, source) for step, (token, one, _) in saves.items()
    }
    told: dict[int, str] = {}
    found = {step for step in copy if step > max(source, default=-1)}
    for step, (token, *_) in source.items():
        at: tuple[int, str] | None = step, token
        while at is not None and at[0] not in told:
            told[at[0]] = at[1]
            parent = parents.get(at)
            found |= {one for one in copy if parent and parent.step < one < at[0]}
            at = parent
    found |= {step for step, (token, *_) in copy.items() if told.get(step, token) != token}
    return sorted(found - source.keys())


# What a save does.


class SaveRequest(NamedTuple):
    """A save, as its caller asked for it."""

    step: int
    overwrite: bool
    force: bool
    unlisted: bool  # the caller has asked for nothing that is there


class Changes(NamedTuple):
    """What a save does to the steps on disk."""

    # The step that it continues; None if it begins a history, or stands beneath newer steps.
    base: Identity | None = None
    retire: Sequence[int] = ()  # steps that it leaves behind; they go before it begins
    set_aside: Sequence[int] = ()  # damaged steps that make room for it
    replaces: bool = False  # it takes the place of a step of its number
    detached: bool = False  # it stands beneath newer steps, and a restart resumes from those
    truncates: bool = True  # what is newer than the base is left, on the trail too
    # The save goes to the persistent directory, and there first, whatever the policy wants. If the step it replaces stayed there,
    # the old value would return once the local one is gone; and a step is not whole while processes replace their local parts.
    persistent_first: bool = False


def last_before(changes: Changes, step: int) -> int:
    """The last number that is not beyond what a planned save continues from."""
    return step - 1 if changes.base is None else changes.base.step


def lineage_bound(changes: Changes, step: int, trail: Trail) -> int:
    """The last step of earlier lineages that counts after a save."""
    if not changes.truncates:
        return _ANY_STEP
    last = last_before(changes, step)
    # Found nothing to continue: what a host that is away still has is of another history.
    return min(last, trail.root) if changes.base is None and trail.root is not None else last


def of_interest(trail: Trail, step: int, names: Iterable[int]) -> set[int]:
    """The steps ``decide_changes`` needs: newer than what the save continues, left by going back, or of another history."""
    base, own = trail.continued_from(step), trail.own
    after = step - 1 if base is None else base.step
    root = after if trail.root is None else trail.root
    left = {one.step for one in trail.entries} if base is None else set[int]()
    return {
        other
        for other in names
        if other > after or other in left or (other > root and other not in own)
    }


def decide_changes(
    trail: Trail, request: SaveRequest, there: Collection[int], directory: str, moves: bool
) -> Changes:
    """What a save does; the caller has asked ``repeats`` before. CheckpointExists if this Checkpointer may not leave what
    is ``there``: at least the steps of interest. Without ``moves``, as in a bucket, damaged steps stay, as they may
    become readable again, and one of this number is replaced.
    """
    step, failed = request.step, request.step in trail.uncertain
    replaces = request.overwrite or failed or (not moves and step in trail.damaged)
    detached = any(one.step == step for one in trail.detached)
    again = detached and failed and not (request.overwrite or trail.may_retire)
    if trail.is_ahead(step) and not again:
        return _going_on(trail, request, there, directory, replaces, moves)
    damaged = (step,) if moves and not replaces and step in trail.damaged else ()
    newer = sorted(other for other in there if other > step and other not in trail.damaged)
    if step in trail.own and (replaces or damaged):
        base = None if newer else trail.before(step)  # no training goes on from it
        return Changes(
            base, set_aside=damaged, replaces=replaces, detached=detached, truncates=False
        )
    taken = step in there and step not in trail.damaged
    if taken and not replaces:
        raise _taken(directory, step, trail, there)
    if newer and not taken and not request.force:
        raise _older(directory, step, newer, trail)
    if newer:
        return Changes(set_aside=damaged, replaces=replaces, detached=True, truncates=False)
    return _going_on(trail, request, there, directory, replaces, moves)  # what was newer is gone


def _going_on(
    trail: Trail,
    request: SaveRequest,
    there: Collection[int],
    directory: str,
    replaces: bool,
    moves: bool,
) -> Changes:
    """The changes of a save that continues from the head or the end of the trail, or begins one."""
    step = request.step
    base = trail.continued_from(step)
    newer = of_interest(trail, step, there)
    damaged = newer & trail.damaged
    others = newer - damaged
    if others and not trail.may_retire and not (replaces and step in others):
        if step in others:
            raise _taken(directory, step, trail, there)
        if not request.force:
            raise _older(directory, step, sorted(others), trail)
        set_aside = (step,) if moves and step in damaged else ()
        return Changes(set_aside=set_aside, detached=True, truncates=False)
    replaced = {step} if replaces else set[int]()
    aside = damaged if base is not None or trail.may_retire else damaged & {step}
    set_aside = tuple(sorted(aside - replaced)) if moves else ()
    return Changes(base, tuple(sorted(others - replaced)), set_aside, replaces)


def committed_by_others(trail: Trail, step: int, there: Collection[int]) -> tuple[int, ...]:
    """After the commit of ``step``: steps on disk that another writer committed meanwhile."""
    if not trail.may_retire or trail.end != step or trail.root is None:
        return ()
    known = trail.own | trail.damaged
    return tuple(sorted(other for other in there if other > trail.root and other not in known))


def _taken(directory: str, step: int, trail: Trail, there: Collection[int]) -> CheckpointExists:
    text = f"{directory}: step {step} is there already, and not from this Checkpointer: "
    if trail.may_retire:
        return CheckpointExists(f"{text}pass overwrite=True to replace it")
    newer = sorted(other for other in there if other > step)
    left = f", and to retire {_numbers(newer)}" if newer else ""
    return CheckpointExists(
        f"{text}call restore_latest() before the first save, to go on from step {max(there)}. To begin anew with this step "
        f"instead, pass overwrite=True to replace it{left}"
    )


def _older(directory: str, step: int, newer: list[int], trail: Trail) -> CheckpointExists:
    back = f"rollback_to({max(step - 1, 0)}) to delete"
    text = f"{directory}: step {step} is older than {_numbers(newer)}, which are there already: "
    if trail.may_retire:
        return CheckpointExists(
            f"{text}restore_latest would resume from those. Call {back} them, save to another directory, or pass force=True "
            "to save it all the same"
        )
    return CheckpointExists(
        f"{text}call restore_latest() before the first save, to go on from step {newer[-1]}, or {back} those. Another run "
        "goes to another directory; force=True saves this step beside those, and a restart goes on from them"
    )


def _numbers(steps: list[int]) -> str:
    more = ", ..." if len(steps) > _SHOWN else ""
    return ", ".join(map(str, steps[:_SHOWN])) + more
