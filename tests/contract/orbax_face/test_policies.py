"""Save-decision and preservation policies: what each decides, and that Orbax's decide the same."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_orbax import v1 as ocp

keeping = ocp.training.preservation_policies
saving = ocp.training.save_decision_policies
NOTHING = keeping.PreservationContext()


def steps_at(seconds, metrics=None):
    """One step for each time, with its position as number."""
    metrics = metrics or [None] * len(seconds)
    return [
        ocp.training.CheckpointMetadata(
            number, None, commit_timestamp_nsecs=int(at * 1e9), metrics=measured
        )
        for number, (at, measured) in enumerate(zip(seconds, metrics, strict=True))
    ]


def kept(policy, steps):
    flags = policy.should_preserve(steps, context=NOTHING)
    return [step.step for step, stays in zip(steps, flags, strict=True) if stays]


TEN = steps_at(range(0, 200, 20))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (keeping.PreserveAll(), range(10)),
        (keeping.LatestN(), range(10)),
        (keeping.LatestN(3), [7, 8, 9]),
        (keeping.LatestN(0), []),
        (keeping.EveryNSteps(4), [0, 4, 8]),
        (keeping.EveryNSteps(4, exact_interval=False), [0, 4, 8]),
        (keeping.EveryNSteps(2, max_to_keep=2), [6, 8]),
        (keeping.EveryNSeconds(40), range(0, 10, 2)),
        (keeping.EveryNStepsClosest(4), [0, 4, 8, 9]),
        (keeping.CustomSteps([1, 3, 30]), [1, 3]),
        (
            keeping.AnyPreservationPolicy([keeping.LatestN(1), keeping.CustomSteps([2])]),
            [2, 9],
        ),
        (keeping.AnyPreservationPolicy([]), []),
    ],
)
def test_which_steps_stay(policy, expected):
    assert kept(policy, TEN) == list(expected)
    assert kept(policy, []) == []


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({"n": 2}, [0, 4]),
        ({"n": 2, "reverse": True}, [2, 3]),
        ({"n": None}, range(5)),
        ({"n": 0}, []),
    ],
)
def test_the_best_steps_stay(named, expected):
    metrics = [{"accuracy": value} for value in (0.8, 0.6, 0.2, 0.3, 0.9)]
    policy = keeping.BestN(get_metric_fn=lambda measured: measured["accuracy"], **named)
    assert kept(policy, steps_at(range(5), metrics)) == list(expected)


def test_steps_without_metrics_stay_by_default():
    metrics = [{"loss": 1.0}, None, {"loss": 2.0}, None]
    fine = keeping.BestN(get_metric_fn=lambda measured: measured["loss"], n=1)
    assert kept(fine, steps_at(range(4), metrics)) == [1, 2, 3]
    strict = keeping.BestN(
        get_metric_fn=lambda measured: measured["loss"],
        n=1,
        keep_checkpoints_without_metrics=False,
    )
    assert kept(strict, steps_at(range(4), metrics)) == [2]


def test_steps_of_the_last_while_stay():
    now = datetime.datetime.now(datetime.UTC).timestamp()
    steps = steps_at([now - 300, now - 200, now - 100, now])
    assert kept(keeping.LatestDuration(datetime.timedelta(seconds=150)), steps) == [2, 3]
    assert kept(keeping.LatestDuration(datetime.timedelta(seconds=-1)), steps) == []


def test_an_interval_of_zero_is_refused():
    with pytest.raises(ValueError, match="must not be 0"):
        kept(keeping.EveryNSteps(0), TEN)


def asks(policy, step, previous=(), *, at=1000.0, saving_now=False, preempted=False):
    now = ocp.training.CheckpointMetadata(step, None, commit_timestamp_nsecs=int(at * 1e9))
    context = saving.DecisionContext(
        is_saving_in_progress=saving_now,
        reached_preemption=preempted,
        multiprocessing_options=ocp.options.MultiprocessingOptions(),
    )
    return policy.should_save(now, list(previous), context=context)


def test_when_to_save():
    assert [step for step in range(7) if asks(saving.FixedIntervalPolicy(3), step)] == [0, 3, 6]
    assert [step for step in range(7) if asks(saving.SpecificStepsPolicy({2, 5}), step)] == [2, 5]
    assert asks(saving.InitialSavePolicy(), 5)
    assert not asks(saving.InitialSavePolicy(), 5, TEN)
    assert asks(saving.PreemptionCheckpointingPolicy(), 5, preempted=True)
    assert not asks(saving.PreemptionCheckpointingPolicy(), 5)
    either = saving.AnySavePolicy([saving.FixedIntervalPolicy(3), saving.SpecificStepsPolicy({2})])
    assert [step for step in range(7) if asks(either, step)] == [0, 2, 3, 6]


def test_continuously():
    always = saving.ContinuousCheckpointingPolicy()
    assert asks(always, 1, TEN)
    assert not asks(always, 1, TEN, saving_now=True)
    slow = saving.ContinuousCheckpointingPolicy(minimum_interval_secs=60)
    assert asks(slow, 1)
    assert not asks(slow, 1, TEN, at=200)
    assert asks(slow, 1, TEN, at=240)


STEPS = st.lists(st.integers(0, 60), unique=True, max_size=12).map(sorted)


@pytest.mark.parametrize(
    "make",
    [
        lambda module, n: module.LatestN(n),
        lambda module, n: module.EveryNSteps(n or 1),
        lambda module, n: module.EveryNSteps(n or 1, exact_interval=False, max_to_keep=2),
        lambda module, n: module.EveryNSteps(n or 1, max_to_keep=0 if n == 3 else 1),
        lambda module, n: module.EveryNStepsClosest(n or 1),
        lambda module, n: module.EveryNStepsClosest(n or 1, max_to_keep=2),
        lambda module, n: module.EveryNSeconds(n * 7),
        lambda module, n: module.BestN(get_metric_fn=lambda m: m["loss"], n=n),
        lambda module, n: module.BestN(get_metric_fn=lambda m: m["loss"], n=n, reverse=True),
        lambda module, n: module.BestN(
            get_metric_fn=lambda m: m["loss"], n=n, keep_checkpoints_without_metrics=False
        ),
        lambda module, n: module.AnyPreservationPolicy(
            [module.LatestN(n), module.CustomSteps([n])]
        ),
    ],
)
@given(numbers=STEPS, n=st.integers(0, 6), seed=st.integers(0, 99))
def test_orbax_decides_the_same(make, numbers, n, seed):
    theirs = pytest.importorskip("orbax.checkpoint.experimental.v1").training
    steps = [
        ocp.training.CheckpointMetadata(
            number,
            None,
            commit_timestamp_nsecs=number * 3 * 10**9,
            metrics=None if (number + seed) % 5 == 0 else {"loss": (number * 7 + seed) % 11},
        )
        for number in numbers
    ]
    ours = make(keeping, n).should_preserve(steps, context=NOTHING)
    policies = theirs.preservation_policies
    expected = make(policies, n).should_preserve(steps, context=policies.PreservationContext())
    assert list(ours) == list(expected)
