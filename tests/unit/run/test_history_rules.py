"""The pure rules of a run: every trail, every listing and every call over a few numbers; and lineages."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt_core as ckpt
from ckpt_core._run import history
from ckpt_core._run.history import Identity, Plan, Trail
from ckpt_core._run.lineage import (
    Leaving,
    Left,
    Lineage,
    parse_leaving,
    parse_lineage,
)

NEW = "new"


def token_of(lineage: str, count: int) -> str:
    """The token of the ``count``-th save of a lineage."""
    return f"{lineage}{count:016x}"


def _as_lists(plan: Plan) -> list[object]:
    return [[*part] if isinstance(part, tuple) else part for part in plan]


def subsets(numbers: Iterable[int]) -> list[tuple[int, ...]]:
    found = [*numbers]
    return [
        chosen for size in range(len(found) + 1) for chosen in itertools.combinations(found, size)
    ]


def identities(numbers: Iterable[int]) -> tuple[Identity, ...]:
    return tuple(Identity(number, f"old-{number}") for number in numbers)


def trails(most: int) -> Iterator[Trail]:
    """Every trail over the numbers up to ``most``."""
    numbers = range(most + 1)
    for stood in subsets(numbers):
        for beside in subsets(number for number in numbers if number not in stood):
            for place in (-1, *stood):
                for since in (None, *range(-1, most + 1)):
                    for leads in (True,) if stood or since is not None else (True, False):
                        yield Trail(identities(stood), place, identities(beside), leads, since)


@dataclass(frozen=True)
class Call:
    step: int
    overwrite: bool
    force: bool


def calls(most: int) -> list[Call]:
    both = (False, True)
    return [Call(*chosen) for chosen in itertools.product(range(most + 2), both, both)]


def planned(trail: Trail, there: Iterable[int], call: Call) -> Plan | None:
    """The plan; None if the save is refused."""
    seen = {*there} & history.of_interest(trail, call.step, there)
    try:
        plan = history.plan_save(
            trail,
            call.step,
            there := {*there},
            directory="d",
            overwrite=call.overwrite,
            force=call.force,
        )
    except ckpt.CheckpointExists:
        plan = None
    try:  # what is of no interest changes nothing
        again = history.plan_save(
            trail, call.step, seen, directory="d", overwrite=call.overwrite, force=call.force
        )
    except ckpt.CheckpointExists:
        again = None
    assert plan == again, (plan, again, seen)
    return plan


def check(trail: Trail, there: set[int], call: Call) -> bool:
    """Whether the save is done; every rule that a plan must keep is checked."""
    repeated = trail.repeats(call.step)
    if repeated and not call.overwrite:
        return False
    plan = planned(trail, there, call)
    if plan is None:
        # Who leads is refused only where the save would stand between steps that stay, or on one.
        assert any(other >= call.step for other in there)
        return False
    if trail == Trail():  # never looked: nothing newer goes unless it was told to
        assert not plan.retire or (call.overwrite and call.step in there)
    step, retired = call.step, {*plan.retire}
    after = history.saved(trail, Identity(step, NEW), plan)
    at = -1 if plan.base is None else plan.base.step
    # what goes
    assert retired <= there and len(retired) == len(plan.retire)
    assert not retired & after.own or (retired & after.own == {step} and not plan.replaces)
    since = history.last_before(plan, step)
    if trail.since is not None:
        since = min(since, trail.since)
    rest = {one.step for one in trail.stood} if plan.base is None else set[int]()
    assert all(other > since or other in rest for other in retired)
    going = retired & trail.own - rest
    assert all(other > history.last_before(plan, step) for other in going)
    if not trail.leads and not call.overwrite:
        assert not retired
    # where it stands
    numbers = [one.step for one in after.stood]
    assert numbers == sorted({*numbers}) and {*numbers}.isdisjoint(one.step for one in after.beside)
    assert Identity(step, NEW) in (after.beside if plan.beside else after.stood)
    assert plan.base is None or (plan.base in trail.stood and at < step)
    assert plan.beside or plan.base is None or plan.base in after.stood
    assert after.repeats(step)
    assert history.saved(after, Identity(step, NEW), plan) == after  # the other tier has it, too
    # what a restart finds
    disk = (there - retired) | {step}
    if plan.beside:
        assert after.stood == trail.stood or step in trail.own
        assert max(disk) == max(there | {step})
    elif plan.cuts:
        assert max(disk) == step == after.place == after.end
        assert after.since is not None
        assert not {other for other in disk if other > after.since} - after.own
    else:
        assert disk == there | {step} and after.place == trail.place
    # it goes through JSON to the other processes
    assert _as_lists(history.parse_plan(json.loads(json.dumps(plan)))) == _as_lists(plan)
    return True


def check_all(most: int) -> tuple[int, int]:
    done = refused = 0
    listings = [set(one) for one in subsets(range(most + 1))]
    for trail in trails(most):
        for call in calls(most):
            for there in listings:
                if check(trail, there, call):
                    done += 1
                else:
                    refused += 1
    return done, refused


def test_every_save_over_three_numbers() -> None:
    done, refused = check_all(2)
    assert done > 20_000 and refused > 5_000


@pytest.mark.slow
def test_every_save_over_four_numbers() -> None:
    check_all(3)


FEW = st.integers(0, 6)


@st.composite
def some_trail(draw: st.DrawFn) -> Trail:
    stood = draw(st.sets(FEW))
    beside = draw(st.sets(FEW)) - stood
    place = draw(st.sampled_from([-1, *sorted(stood)]))
    since = draw(st.none() | st.integers(-1, 6))
    own = sorted(stood | beside)
    doubtful = frozenset(draw(st.sets(st.sampled_from(own)))) if own else frozenset[int]()
    leads = bool(stood) or since is not None or draw(st.booleans())
    return Trail(
        identities(sorted(stood)), place, identities(sorted(beside)), leads, since, doubtful
    )


@given(some_trail(), st.sets(FEW), st.builds(Call, FEW, st.booleans(), st.booleans()))
def test_any_save(trail: Trail, there: set[int], call: Call) -> None:
    check(trail, there, call)


@given(some_trail(), st.sets(FEW), st.builds(Call, FEW, st.booleans(), st.booleans()))
def test_a_damaged_step_stays_in_no_ones_way(trail: Trail, there: set[int], call: Call) -> None:
    """All that is there is damaged: a save is never refused, on a disk nor in a store."""
    damaged = {step: "" for step in there}
    trail = Trail(trail.stood, trail.place, trail.beside, trail.leads, trail.since, damaged=damaged)
    if trail.repeats(call.step):
        return
    for moves in (True, False):
        plan = history.plan_save(
            trail, call.step, there, directory="d", overwrite=call.overwrite, moves=moves
        )
        assert not plan.retire
        assert plan.replaces or call.step not in there or (moves and call.step in plan.aside)
        after = history.saved(trail, Identity(call.step, NEW), plan)
        assert call.step not in after.damaged and after.repeats(call.step)


@given(some_trail(), FEW)
def test_what_happens_to_a_trail(trail: Trail, step: int) -> None:
    one = Identity(step, NEW)
    for after in (history.restored(trail, one), history.rolled_back(trail, step, one)):
        assert after.place == step and after.leads and one in after.stood
        assert step not in {other.step for other in after.beside}
        assert step in after.doubtful or after.repeats(step)
        assert not after.repeats(step + 1) or step + 1 in {b.step for b in after.beside}
    gone = history.rolled_back(trail, step, None)
    assert all(other <= step for other in gone.own) and gone.place == gone.end
    without = history.deleted(trail, step)
    assert step not in without.own and not without.repeats(step)
    assert without.place == -1 or without.place in without.own
    assert history.doubted(trail, one) == trail  # it is not this save that stands there
    nothing = history.found_nothing()
    assert not nothing.own and nothing.place == -1 and not nothing.repeats(step)


# ---- lineages ---------------------------------------------------------------------------------------

NAME = f"run-{'0' * 16}"


def lineage(number: int) -> str:
    return f"{number:016x}"


def grown(bounds: Iterable[int]) -> Lineage:
    run = Lineage(NAME, lineage(0))
    for number, bound in enumerate(bounds, 1):
        run = run.branch(lineage(number), bound)
    return run


def test_a_step_that_was_left_never_counts_again_and_no_other_is_lost() -> None:
    """Every way of branching four times over the steps -1 to 3."""
    for bounds in itertools.product(range(-1, 4), repeat=4):
        for length in range(5):
            run = grown(bounds[:length])
            for born in range(length + 1):
                left_at = min(bounds[born:length], default=99)
                for step in range(5):
                    order = run.order(step, token_of(lineage(born), 1), "", 0.0)
                    assert (order is not None) == (step <= left_at), (bounds, length, born, step)


def test_of_one_number_the_newest_save_counts() -> None:
    run = grown([3, 3])
    saves = [token_of(lineage(born), count) for born in range(3) for count in (1, 2, 16)]
    for (i, one), (j, other) in itertools.product(enumerate(saves), repeat=2):
        assert run.newer(2, one, other) == (i > j)
    assert run.newer(2, saves[0], "of another run") and not run.newer(2, "of another run", saves[0])
    assert not run.newer(4, saves[0], saves[-1])  # it does not count


@given(st.lists(st.integers(-1, 9), max_size=5), st.integers(0, 9), st.integers(0, 5))
def test_a_run_goes_through_its_file(bounds: list[int], step: int, born: int) -> None:
    run = grown(bounds)
    assert parse_lineage(run.dump()) == run
    token = token_of(lineage(born), 3)
    for changed in (
        run.without(step),
        run.overwritten(step, token),
        run.without(1).overwritten(2, token),
    ):
        assert parse_lineage(changed.dump()) == changed
    assert parse_lineage(run.dump()).order(step, token, "", 0.0) == run.order(step, token, "", 0.0)


def test_of_an_overwritten_number_no_older_save_counts() -> None:
    """Nor one of a version that wrote no lineage; whatever happens to the run after that, and no other number."""
    saves = [token_of(lineage(born), count) for born in range(3) for count in (1, 2, 16)]
    for nth, newest in enumerate(saves):
        run = grown([3, 3]).overwritten(2, newest)
        for changed in (
            run,
            run.branch(lineage(9), 3),
            run.without(1),
            run.overwritten(1, saves[-1]),
        ):
            found = [changed.order(2, save, "", 0.0) is not None for save in saves]
            assert found == [other >= nth for other in range(len(saves))]
            assert changed.order(3, saves[0], "", 0.0) is not None
            assert changed.order(2, "", lineage(0), 5.0) is None
        assert run.branch(lineage(9), 1).order(2, newest, "", 0.0) is None  # it was left
    unknown = grown([3]).overwritten(2, token_of("f" * 16, 1))  # of a lineage that is kept no more
    assert unknown.order(2, saves[0], "", 0.0) is not None


@given(st.binary(max_size=80))
def test_what_is_no_file_of_a_run_is_no_run(data: bytes) -> None:
    for text in (data, NAME.encode() + b"\n" + data, grown([1]).dump() + data):
        parse_lineage(text)


@given(st.lists(st.builds(Left, st.text(), FEW, st.text(), st.none() | st.text())), st.text())
def test_what_leaves_goes_through_its_file(steps: list[Left], run: str) -> None:
    leaving = Leaving(tuple(steps), run)
    assert parse_leaving(leaving.dump(), "/run") == leaving


@given(st.binary(max_size=80))
def test_a_damaged_file_of_what_leaves_is_told(data: bytes) -> None:
    with contextlib.suppress(ckpt.CheckpointCorrupt):
        assert parse_leaving(data, "/run") == parse_leaving(data, "/run")
    with pytest.raises(ckpt.CheckpointCorrupt, match=r"\.ckpt-leaving"):
        parse_leaving(b"{" + data, "/run")


def test_a_save_bounds_earlier_lineages_where_it_begins() -> None:
    at = Trail(identities([4]), 4, leads=True)
    assert history.last_of(Plan(at.stood[0]), 7, at) == 4
    assert history.last_of(Plan(at.stood[0], beside=True, cuts=False), 3, at) > 10**9
    assert history.last_of(Plan(None), 7, Trail()) == 6  # never looked: what is older stays
    assert history.last_of(Plan(None), 7, history.found_nothing()) == -1  # nothing is older
