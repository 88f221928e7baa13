"""When to save and what to keep, as pure functions: no disk, no clock."""

import itertools
import math
import pickle
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from ckpt_core import keep, when

FEW = settings(max_examples=40)
steps = st.integers(0, 200)
values = st.one_of(st.floats(), st.integers(-3, 3).map(float))


@st.composite
def histories(draw: st.DrawFn) -> list[keep.StepFacts]:
    """Steps in ascending order, with times that never go back, and metrics that may be missing."""
    numbers = sorted(draw(st.sets(steps, max_size=12)))
    created, facts = 1e9, []
    for number in numbers:
        created += draw(st.floats(0, 100))
        metrics = draw(st.dictionaries(st.sampled_from(["loss", "score"]), values))
        facts.append(keep.StepFacts(number, created, metrics))
    return facts


def facts(*losses: float | None) -> list[keep.StepFacts]:
    """Steps 0, 1, 2 ... a minute apart, with these losses."""
    return [
        keep.StepFacts(step, 1e9 + 60.0 * step, {} if loss is None else {"loss": loss})
        for step, loss in enumerate(losses)
    ]


def even(step: int, _: when.SaveContext) -> bool:
    return step % 2 == 0


ALL = [*range(10)]
WHEN: list[tuple[when.Decision, dict[str, Any], list[int]]] = [
    (when.every_steps(4), {}, [0, 4, 8]),
    (when.every_steps(1), {}, ALL),
    (when.at_steps([7, 3, 3]), {}, [3, 7]),
    (when.at_steps([]), {}, []),
    (when.every_secs(10), {}, ALL),  # there was no save yet
    (when.every_secs(10), {"secs_since_save": 10.0}, ALL),
    (when.every_secs(10), {"secs_since_save": 9.9}, []),
    (when.continuously(), {"secs_since_save": 0.0}, ALL),
    (when.continuously(), {"saving": True}, []),
    (when.continuously(5), {"secs_since_save": 4.0}, []),
    (when.first(), {}, ALL),
    (when.first(), {"newest_step": 0}, []),
    (when.preempted(), {"preempted": True}, ALL),
    (when.preempted(), {}, []),
    (when.at_steps([1]) | even, {}, [0, 1, 2, 4, 6, 8]),
    (even | when.at_steps([1]), {}, [0, 1, 2, 4, 6, 8]),
    (when.any_of(), {}, []),
]


@pytest.mark.parametrize(
    ("policy", "context", "chosen"), WHEN, ids=lambda one: repr(one).partition("<")[0]
)
def test_when(policy, context, chosen):
    assert [step for step in range(10) if policy(step, when.SaveContext(**context))] == chosen


def test_a_union_of_policies_of_saves():
    for one, two in itertools.product([policy for policy, *_ in WHEN], repeat=2):
        for _, context, _ in WHEN:
            for step in range(5):
                found = when.SaveContext(**context)
                wanted = one(step, found) or two(step, found)
                assert (one | two)(step, found) == (two | one)(step, found) == wanted
                assert when.any_of(one, two)(step, found) == wanted


@pytest.mark.parametrize("number", range(len(WHEN)))
def test_policies_of_saves_go_through_pickle(number):
    policy, context, chosen = WHEN[number]
    for one in (policy, policy | when.at_steps([]), when.any_of(policy)):
        again = pickle.loads(pickle.dumps(one))
        found = when.SaveContext(**context)
        assert repr(again) == repr(one) and again.listens == one.listens
        assert [step for step in range(10) if again(step, found)] == chosen


WHOLE: list[Any] = [
    *(when.every_steps, keep.every_steps, keep.latest, keep.closest_to_every_steps),
    lambda n: keep.best("loss", n=n, mode="min"),
]
SECS: list[Any] = [when.every_secs, when.continuously, keep.every_secs, keep.newer_than]
OF_STEPS: list[Any] = [when.at_steps, keep.steps]


@pytest.mark.parametrize("value", ["3", "x", 1.5, True, None, [3], 0, -2], ids=repr)
def test_what_is_no_whole_number(value):
    for make in WHOLE:
        with pytest.raises((TypeError, ValueError), match=r"of (when|keep)\.\w+ must be") as caught:
            make(value)
        assert isinstance(caught.value, ValueError) == (type(value) is int)
        assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", ["3", "x", True, None, [3], -1.0, math.nan], ids=repr)
def test_what_is_no_number_of_seconds(value):
    for make in SECS:
        with pytest.raises((TypeError, ValueError), match=r"of (when|keep)\.\w+ must ") as caught:
            make(value)
        assert isinstance(caught.value, ValueError) == (type(value) is float)
    assert repr(when.every_secs(np.float32(2))) == "every_secs(2)"


@pytest.mark.parametrize("value", [3, "3", None, ["3"], [None], [True], [1.0], [-1]], ids=repr)
def test_what_is_no_list_of_steps(value):
    for make in OF_STEPS:
        with pytest.raises((TypeError, ValueError), match=r"steps of (when|keep)\.\w+ must be"):
            make(value)
    assert repr(keep.steps(np.arange(3))) == "steps([0, 1, 2])"


SEVEN = facts(*[None] * 7)
LOSSES = facts(0.5, 0.1, 0.3, 0.2, 0.9)
HOLES = facts(math.nan, 3.0, None, math.inf, -math.inf, math.nan)
AHEAD = {1: 100.0, 2: 1e9, 3: 1e9 + 10, 4: 130.0, 5: 140.0, 6: 150.0}
"""The clock of a host ran ahead: its steps 2 and 3 count as made when the next one was."""
SKEWED = [keep.StepFacts(step, secs) for step, secs in AHEAD.items()]


def at(*numbers: int) -> list[keep.StepFacts]:
    return [keep.StepFacts(number) for number in numbers]


KEEP: list[tuple[keep.KeepPolicy, list[keep.StepFacts], list[int]]] = [
    (keep.all(), SEVEN, [0, 1, 2, 3, 4, 5, 6]),
    (keep.latest(2), SEVEN, [5, 6]),
    (keep.latest(20), SEVEN, [0, 1, 2, 3, 4, 5, 6]),
    (keep.every_steps(3), SEVEN, [0, 3, 6]),
    (keep.steps([5, 1, 99]), SEVEN, [1, 5]),
    (keep.every_secs(120), SEVEN, [0, 2, 4, 6]),
    (keep.every_secs(150), SEVEN, [0, 3, 6]),
    (keep.newer_than(60), SEVEN, [5, 6]),
    (keep.newer_than(0), SEVEN, [6]),
    (keep.every_secs(10), SKEWED, [1, 2, 5, 6]),
    (keep.newer_than(100), SKEWED, [1, 2, 3, 4, 5, 6]),
    (keep.closest_to_every_steps(100), at(), []),
    (keep.closest_to_every_steps(100), at(37), [37]),
    (keep.closest_to_every_steps(100), at(0, 30, 95, 103, 140, 198, 250), [0, 103, 198, 250]),
    (keep.closest_to_every_steps(100), at(0, 98, 102, 200), [0, 98, 200]),  # as close: the older
    (keep.closest_to_every_steps(100), at(5, 950), [5, 950]),
    (keep.closest_to_every_steps(100), at(10**12, 10**12 + 1), [10**12, 10**12 + 1]),
    (keep.best("loss", mode="min"), LOSSES, [1]),
    (keep.best("loss", n=2, mode="max"), LOSSES, [4, 0]),
    (keep.best("accuracy", n=2, mode="max"), LOSSES, []),
    (keep.best("loss", n=2, mode="min"), facts(1.0, 1.0, 1.0, 1.0), [3, 2]),  # the newer ones
    (keep.best("loss", n=9, mode="min"), HOLES, [4, 1, 3]),
    (keep.best("loss", n=9, mode="max"), HOLES, [3, 1, 4]),
]


@pytest.mark.parametrize(("policy", "history", "kept"), KEEP, ids=repr)
def test_keep(policy, history, kept):
    assert [*policy(history)] == kept
    assert policy([]) == {}
    for one in (policy, policy | keep.steps([]), keep.best("loss", mode="min") | policy):
        again = pickle.loads(pickle.dumps(one))
        assert again(history) == one(history) and repr(again) == repr(one)


def test_names():
    assert repr(when.every_steps(5) | when.at_steps([3, 1])) == "every_steps(5) | at_steps([1, 3])"
    assert repr(when.every_secs(1.5) | when.first()) == "every_secs(1.5) | first()"
    policy = keep.latest(3) | keep.best("loss", n=2, mode="min") | keep.newer_than(60)
    assert repr(policy) == "latest(3) | best('loss', n=2, mode='min') | newer_than(60)"
    assert keep.best("loss", mode="min")(LOSSES) == {1: "among the best 1 by loss"}


def test_what_has_no_time_is_kept_by_policies_of_time():
    """Steps that Orbax wrote do not say when: they are not taken for infinitely old."""
    history = [keep.StepFacts(0), keep.StepFacts(1), *facts(None, None, None)[2:]]
    for policy in (keep.newer_than(60), keep.every_secs(60)):
        assert list(policy(history)) == [0, 1, 2]
        assert policy(history)[0] == "when it was written is not known"
    assert list(keep.newer_than(60)([keep.StepFacts(3)])) == [3]


@given(histories(), st.integers(1, 50))
def test_closest_is_closest(history, interval):
    numbers = [facts.step for facts in history]
    expected: set[int] = set()
    if numbers:
        first, last = numbers[0] // interval, -(-numbers[-1] // interval)
        for multiple in range(first * interval, last * interval + 1, interval):
            expected.add(min(numbers, key=lambda n: (abs(n - multiple), n)))
    # the newest is always kept, and needs no multiple of its own
    assert {*keep.closest_to_every_steps(interval)(history)} == expected | {*numbers[:1]}


@pytest.mark.parametrize("arguments", [{"mode": "least"}, {"mode": "min", "n": 0}], ids=repr)
def test_best_refuses(arguments):
    with pytest.raises(ValueError, match=r"mode must be|n of keep\.best must be"):
        keep.best("loss", **arguments)
    with pytest.raises(TypeError, match="the name of a metric, got 3"):
        keep.best(3, mode="min")


@FEW
@given(histories(), st.integers(1, 5), st.sampled_from(["min", "max"]))
def test_best_is_best(history, n, mode):
    kept = keep.best("loss", n=n, mode=mode)(history)
    known = {
        entry.step: entry.metrics["loss"]
        for entry in history
        if not math.isnan(entry.metrics.get("loss", math.nan))
    }
    assert set(kept) <= set(known) and len(kept) == min(n, len(known))
    sign = 1 if mode == "min" else -1
    for left in set(known) - set(kept):
        assert all((sign * known[left], -left) > (sign * known[step], -step) for step in kept)


def test_a_union_of_policies_keeps_what_one_keeps():
    for one, two in itertools.product([policy for policy, *_ in KEEP], repeat=2):
        for history in (SEVEN, SKEWED, LOSSES, HOLES, at(0, 98, 102, 200)):
            both = (one | two)(history)
            assert {*both} == {*one(history)} | {*two(history)} == {*(two | one)(history)}
            for step, reason in both.items():
                assert one(history).get(step, "") in reason
                assert two(history).get(step, "") in reason


@pytest.mark.parametrize("policy", [policy for policy, *_ in KEEP], ids=repr)
def test_what_was_kept_stays_kept_when_the_others_are_gone(policy):
    """Else every clean-up would thin it out."""
    for history in (SEVEN, LOSSES, HOLES, facts(*[None] * 50)):
        kept = {*policy(history)}
        assert {*policy([entry for entry in history if entry.step in kept])} == kept
