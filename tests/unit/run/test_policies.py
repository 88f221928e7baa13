"""When to save and what to keep, as pure functions: no disk, no clock."""

import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from ckpt_core import keep, when
from ckpt_core._directory.step_names import MAX_STEP, StepNames
from ckpt_core._run.policies.arguments import check_metrics, choose_keep_policy, choose_save_policy

FEW = settings(max_examples=40)
NOTHING_KNOWN = when.SaveContext()
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


keep_policies = st.one_of(
    st.just(keep.all()),
    st.integers(1, 5).map(keep.latest),
    st.integers(1, 50).map(keep.every_steps),
    st.integers(1, 50).map(keep.closest_to_every_steps),
    st.floats(0, 500).map(keep.every_secs),
    st.floats(0, 500).map(keep.newer_than),
    st.sets(steps, max_size=5).map(keep.steps),
    st.builds(
        keep.best,
        st.sampled_from(["loss", "score", "none"]),
        n=st.integers(1, 4),
        mode=st.sampled_from(["min", "max"]),
    ),
)
save_policies = st.one_of(
    st.integers(1, 50).map(when.every_steps),
    st.sets(steps, max_size=5).map(when.at_steps),
    st.floats(0, 500).map(when.every_secs),
    st.floats(0, 500).map(when.continuously),
    st.just(when.first()),
    st.just(when.preempted()),
)
contexts = st.builds(
    when.SaveContext,
    newest_step=st.none() | steps,
    secs_since_save=st.floats(0, 1000) | st.just(math.inf),
    saving=st.booleans(),
    preempted=st.booleans(),
)


def facts(*losses: float | None) -> list[keep.StepFacts]:
    """Steps 0, 1, 2 ... a minute apart, with these losses."""
    return [
        keep.StepFacts(step, 1e9 + 60.0 * step, {} if loss is None else {"loss": loss})
        for step, loss in enumerate(losses)
    ]


# ---- when --------------------------------------------------------------------------------------


def chosen(policy: when.Decision, **context: Any) -> list[int]:
    return [step for step in range(10) if policy(step, when.SaveContext(**context))]


def test_when_by_step():
    assert chosen(when.every_steps(4)) == [0, 4, 8]
    assert chosen(when.every_steps(1)) == list(range(10))
    assert chosen(when.at_steps([7, 3, 3])) == [3, 7]
    assert chosen(when.at_steps([])) == []


def test_when_by_time():
    assert when.every_secs(10)(3, NOTHING_KNOWN)  # there was no save yet
    assert when.every_secs(10)(3, when.SaveContext(secs_since_save=10.0))
    assert not when.every_secs(10)(3, when.SaveContext(secs_since_save=9.9))
    assert when.continuously()(3, when.SaveContext(secs_since_save=0.0))
    assert not when.continuously()(3, when.SaveContext(saving=True))
    assert not when.continuously(5)(3, when.SaveContext(secs_since_save=4.0))


def test_when_by_circumstance():
    assert when.first()(9, NOTHING_KNOWN)
    assert not when.first()(9, when.SaveContext(newest_step=0))
    assert when.preempted()(9, when.SaveContext(preempted=True))
    assert not when.preempted()(9, NOTHING_KNOWN)


@FEW
@given(save_policies, save_policies, steps, contexts)
def test_when_union(one, two, step, context):
    assert (one | two)(step, context) == (one(step, context) or two(step, context))
    assert (one | two)(step, context) == (two | one)(step, context)
    assert when.any_of(one, two)(step, context) == (one | two)(step, context)
    assert (one | one)(step, context) == one(step, context)


def test_when_takes_functions():
    def even(step: int, _: when.SaveContext) -> bool:
        return step % 2 == 0

    assert chosen(when.at_steps([1]) | even) == [0, 1, 2, 4, 6, 8]
    assert chosen(even | when.at_steps([1])) == [0, 1, 2, 4, 6, 8]
    assert chosen(when.any_of()) == []


def test_when_names():
    assert repr(when.every_steps(5) | when.at_steps([3, 1])) == "every_steps(5) | at_steps([1, 3])"
    assert repr(when.every_secs(1.5) | when.first()) == "every_secs(1.5) | first()"


@pytest.mark.parametrize("interval", [0, -1])
def test_intervals_refused(interval):
    for make in (when.every_steps, keep.every_steps, keep.latest):
        with pytest.raises(ValueError, match="at least"):
            make(interval)


WHOLE: list[Any] = [
    *(when.every_steps, keep.every_steps, keep.latest, keep.closest_to_every_steps),
    lambda n: keep.best("loss", n=n, mode="min"),
]
SECS: list[Any] = [when.every_secs, when.continuously, keep.every_secs, keep.newer_than]
OF_STEPS: list[Any] = [when.at_steps, keep.steps]


@pytest.mark.parametrize("value", ["3", "x", 1.5, True, None, [3], 0, -2], ids=repr)
def test_what_is_no_whole_number(value: Any):
    for make in WHOLE:
        with pytest.raises((TypeError, ValueError), match=r"of (when|keep)\.\w+ must be") as caught:
            make(value)
        assert isinstance(caught.value, ValueError) == (type(value) is int)
        assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", ["3", "x", True, None, [3], -1.0, math.nan], ids=repr)
def test_what_is_no_number_of_seconds(value: Any):
    for make in SECS:
        with pytest.raises((TypeError, ValueError), match=r"of (when|keep)\.\w+ must ") as caught:
            make(value)
        assert isinstance(caught.value, ValueError) == (type(value) is float)
    assert repr(when.every_secs(np.float32(2))) == "every_secs(2)"


@pytest.mark.parametrize("value", [3, "3", None, ["3"], [None], [True], [1.0], [-1]], ids=repr)
def test_what_is_no_list_of_steps(value: Any):
    for make in OF_STEPS:
        with pytest.raises((TypeError, ValueError), match=r"steps of (when|keep)\.\w+ must be"):
            make(value)
    assert repr(keep.steps(np.arange(3))) == "steps([0, 1, 2])"


def test_numbers_must_be_integers():
    for make in (when.every_steps, keep.every_steps, keep.latest):
        with pytest.raises(TypeError):
            make(1.5)
    for make in (when.at_steps, keep.steps):
        with pytest.raises(TypeError):
            make([1.5])


# ---- keep --------------------------------------------------------------------------------------


def test_keep_by_step():
    history = facts(*[None] * 7)
    assert list(keep.all()(history)) == list(range(7))
    assert list(keep.latest(2)(history)) == [5, 6]
    assert list(keep.latest(20)(history)) == list(range(7))
    assert list(keep.every_steps(3)(history)) == [0, 3, 6]
    assert list(keep.steps([5, 1, 99])(history)) == [1, 5]


def test_keep_by_time():
    history = facts(*[None] * 7)
    assert list(keep.every_secs(120)(history)) == [0, 2, 4, 6]
    assert list(keep.every_secs(150)(history)) == [0, 3, 6]
    assert list(keep.newer_than(60)(history)) == [5, 6]
    assert list(keep.newer_than(0)(history)) == [6]


def test_what_has_no_time_is_kept_by_policies_of_time():
    """Steps that Orbax wrote do not say when: they are not taken for infinitely old."""
    history = [keep.StepFacts(0), keep.StepFacts(1), *facts(None, None, None)[2:]]
    for policy in (keep.newer_than(60), keep.every_secs(60)):
        assert list(policy(history)) == [0, 1, 2]
        assert policy(history)[0] == "when it was written is not known"
    assert list(keep.newer_than(60)([keep.StepFacts(3)])) == [3]


def test_every_secs_does_not_wander():
    """What was kept stays kept when the others are gone: else every clean-up would thin it out."""
    history = facts(*[None] * 50)
    policy = keep.every_secs(150)
    kept = set(policy(history))
    assert set(policy([entry for entry in history if entry.step in kept])) == kept


def test_closest_to_every_steps():
    def kept(*numbers: int) -> list[int]:
        return sorted(keep.closest_to_every_steps(100)([keep.StepFacts(n) for n in numbers]))

    assert kept() == []
    assert kept(37) == [37]
    assert kept(0, 30, 95, 103, 140, 198, 250) == [0, 103, 198, 250]
    assert kept(0, 98, 102, 200) == [0, 98, 200]  # as close: the older one
    assert kept(5, 950) == [5, 950]
    assert kept(10**12, 10**12 + 1) == [10**12, 10**12 + 1]
    with pytest.raises(ValueError, match="at least 1"):
        keep.closest_to_every_steps(0)


@given(histories(), st.integers(1, 50))
def test_closest_is_closest(history: list[keep.StepFacts], interval: int):
    numbers = [facts.step for facts in history]
    expected: set[int] = set()
    if numbers:
        first, last = numbers[0] // interval, -(-numbers[-1] // interval)
        for multiple in range(first * interval, last * interval + 1, interval):
            expected.add(min(numbers, key=lambda n: (abs(n - multiple), n)))
    # the newest is always kept, and needs no multiple of its own
    assert {*keep.closest_to_every_steps(interval)(history)} == expected | {*numbers[:1]}


def test_best():
    history = facts(0.5, 0.1, 0.3, 0.2, 0.9)
    assert list(keep.best("loss", mode="min")(history)) == [1]
    assert list(keep.best("loss", n=2, mode="max")(history)) == [4, 0]
    assert keep.best("accuracy", n=2, mode="max")(history) == {}
    assert keep.best("loss", mode="min")(history) == {1: "among the best 1 by loss"}


def test_ties_go_to_the_newer_step():
    for mode in ("min", "max"):
        assert set(keep.best("loss", n=2, mode=mode)(facts(1.0, 1.0, 1.0, 1.0))) == {2, 3}


def test_nan_and_missing_never_win():
    history = facts(math.nan, 3.0, None, math.inf, -math.inf, math.nan)
    assert list(keep.best("loss", n=9, mode="min")(history)) == [4, 1, 3]
    assert list(keep.best("loss", n=9, mode="max")(history)) == [3, 1, 4]


@pytest.mark.parametrize("arguments", [{"mode": "least"}, {"mode": "min", "n": 0}], ids=repr)
def test_best_refuses(arguments):
    with pytest.raises(ValueError, match=r"mode must be|n of keep\.best must be"):
        keep.best("loss", **arguments)
    with pytest.raises(TypeError, match="the name of a metric, got 3"):
        keep.best(3, mode="min")  # pyright: ignore


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


@FEW
@given(keep_policies, keep_policies, histories())
def test_keep_union(one, two, history):
    both = (one | two)(history)
    assert set(both) == set(one(history)) | set(two(history))
    assert set(both) == set((two | one)(history))
    for step, reason in both.items():
        for policy in (one, two):
            assert policy(history).get(step, "") in reason


@FEW
@given(keep_policies, histories())
def test_keep_again_keeps_the_same(policy, history):
    kept = set(policy(history))
    assert kept <= {entry.step for entry in history}
    remaining = [entry for entry in history if entry.step in kept]
    assert set(policy(remaining)) == kept


@FEW
@given(histories())
def test_policies_do_not_change_what_they_see(history):
    before = list(history)
    (keep.latest(2) | keep.best("loss", n=3, mode="min") | keep.every_secs(7))(history)
    assert history == before


def test_keep_names():
    policy = keep.latest(3) | keep.best("loss", n=2, mode="min") | keep.every_steps(1000)
    assert repr(policy) == "latest(3) | best('loss', n=2, mode='min') | every_steps(1000)"
    assert repr(keep.newer_than(60) | keep.all()) == "newer_than(60) | all()"


def test_no_steps():
    policies = (keep.all(), keep.latest(1), keep.newer_than(1), keep.every_secs(1))
    for policy in (*policies, keep.best("loss", mode="max")):
        assert policy([]) == {}


# ---- the short arguments -----------------------------------------------------------------------


def test_short_arguments():
    assert repr(choose_save_policy(None, None)) == "every_steps(1)"
    assert repr(choose_save_policy(None, 5)) == "every_steps(5)"
    assert choose_keep_policy(None, None, None, None, None) is None
    assert repr(choose_keep_policy(None, 3, None, None, None)) == "latest(3)"
    assert repr(choose_keep_policy(None, 3, 10, None, None)) == "latest(3) | every_steps(10)"
    best = choose_keep_policy(None, 3, 10, "loss", "min")
    assert repr(best) == "best('loss', n=3, mode='min') | latest(1) | every_steps(10)"
    assert choose_keep_policy(None, None, None, "loss", "min") is None  # only for best_step()
    for bad in (0, -1):
        with pytest.raises(ValueError, match="at least"):
            choose_save_policy(None, bad)
        with pytest.raises(ValueError, match="at least"):
            choose_keep_policy(None, bad, None, None, None)


@FEW
@given(st.dictionaries(st.text(), st.floats() | st.integers(-(2**53), 2**53) | st.booleans()))
def test_metrics_become_floats(metrics):
    checked = check_metrics(metrics)
    assert checked.keys() == metrics.keys()
    for name, value in metrics.items():
        assert type(checked[name]) is float
        assert checked[name] == value or math.isnan(value)


@FEW
@given(
    st.integers(0, MAX_STEP),
    st.none() | st.from_regex(r"[a-z][a-z0-9_.-]{0,9}", fullmatch=True),
    st.none() | st.integers(1, 25),
)
def test_names_are_read_back(step, prefix, length):
    name = StepNames(prefix, length).name(step)
    # by any reader, however it would name steps itself
    assert StepNames().parse(name) == step
    assert StepNames("other", 3).parse(name) == step


@pytest.mark.parametrize(
    "name", ["", "a", "5a", "-1", "1.5", "step5", "5_", "٣", "9" * 30, str(2**63), " 5", "5\n"]
)
def test_what_is_no_name_of_a_step(name):
    assert StepNames().parse(name) is None
