"""Save-decision and preservation policies: what each decides, and that Orbax's decide the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_orbax import v1 as ocp

keeping = ocp.training.preservation_policies
saving = ocp.training.save_decision_policies
NOTHING = keeping.PreservationContext()


TEN = [
    ocp.training.CheckpointMetadata(number, None, commit_timestamp_nsecs=20 * number * 10**9)
    for number in range(10)
]


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
