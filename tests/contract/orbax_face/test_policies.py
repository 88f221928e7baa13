"""Save-decision and preservation policies: what each decides, and that Orbax keeps the same steps."""

import datetime
import importlib
import shutil

import numpy as np
import pytest
from hypothesis import given, strategies as st

import ckpt_core as ckpt
import ckpt_orbax
from ckpt_orbax import v1 as ocp
from tests.support.orbax import make_quiet_orbax  # noqa: F401 (fixture)

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


def test_continuously_and_at_a_preemption():
    assert asks(saving.PreemptionCheckpointingPolicy(), 5, preempted=True)
    assert not asks(saving.PreemptionCheckpointingPolicy(), 5)
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


def manager(library, directory, options, losses):
    """What is said around each save of a program that is begun anew for it, and goes on behind the latest step."""
    said, save = [], library.args.StandardSave
    options = library.CheckpointManagerOptions(**options(library.checkpoint_managers))
    for loss in [*losses, None]:
        with library.CheckpointManager(directory, options=options) as run:
            step = -1 if run.latest_step() is None else run.latest_step()
            loaded = None if step < 0 else run.restore(None)["w"].item()
            before = run.best_step(), list(run.all_steps())
            state = {"w": np.full((), step + 1)}
            metrics = None if loss is None else {"loss": loss}
            run.save(np.array(step + 1), args=save(state), metrics=metrics)
            said.append((step, loaded, before, list(run.all_steps())))
            assert str(run._directory) == str(run.directory)
    return said


def checkpointer(library, directory, options, losses):
    """As ``manager``, of the second API."""
    said, second = [], importlib.import_module(f"{library.__name__}.experimental.v1")
    options = options(library.checkpoint_managers)
    for loss in losses:
        with second.training.Checkpointer(directory, **options) as run:
            step = run.latest.step if run.latest else -1
            loaded = run.load()["w"].item() if run.latest else None
            run.save_async(step + 1, {"w": np.full((), step + 1)}, metrics={"loss": loss})
            said.append((step, loaded, [one.step for one in run.checkpoints]))
    return said


def best(mode, n, **more):
    return lambda _: {"best_fn": lambda m: m["loss"], "best_mode": mode, "max_to_keep": n, **more}


def by(policy):
    return lambda of: {"preservation_policy": policy(of)}


NAN, HOUR = float("nan"), datetime.timedelta(hours=1)


@pytest.mark.parametrize(
    ("run", "options", "losses"),
    [
        (manager, best("min", 1), [3, 1, 2, 4]),
        (manager, best("max", 1), [2, 1, 2, 1, 1]),
        (manager, best("min", 2), [None, 2, None, 3, 1]),
        (manager, best("min", 1, keep_period=2), [1, 2, 3, 4]),
        (manager, best("max", 1, keep_checkpoints_without_metrics=False), [1, None, 3]),
        (manager, best("min", None), [3, NAN, 1, 2]),
        (manager, best("min", 1), [2, NAN, 1, NAN]),
        (manager, lambda _: {"max_to_keep": 0}, [1, 2]),
        (manager, lambda _: {"max_to_keep": 1, "keep_time_interval": HOUR}, [1, 2, 3]),
        (checkpointer, by(lambda of: of.BestN(get_metric_fn=lambda m: m["loss"], n=1)), [3, 1, 4]),
        (checkpointer, by(lambda of: of.LatestN(2)), [1, 2, 3]),
        (
            checkpointer,
            by(lambda of: of.AnyPreservationPolicy([of.EveryNSteps(3), of.CustomSteps([1])])),
            [1, 2, 3, 4],
        ),
    ],
)
def test_steps_are_those_that_orbax_keeps(tmp_path, run, options, losses):
    theirs = pytest.importorskip("orbax.checkpoint")
    expected = run(theirs, tmp_path / "theirs", options, losses)
    assert run(ckpt_orbax, tmp_path / "ours", options, losses) == expected


def readers(run):
    """The steps, as programs see them that know nothing of the policy; and the metadata of step 3."""
    utils = ckpt_orbax.checkpoint_utils
    with ckpt_orbax.CheckpointManager(run) as manager, ocp.training.Checkpointer(run) as first:
        newest = {
            "manager": manager.latest_step(),
            "all": manager.all_steps(),
            "read again": manager.all_steps(read=True),
            "v1": first.latest.step,
            "checkpoints": [one.step for one in first.checkpoints],
            "iterator": list(utils.checkpoints_iterator(run, timeout=0)),
            "steps": ckpt_orbax.utils.checkpoint_steps(run),
            "names": [one.step for one in ocp.path.step.standard_name_format().find_all(run)],
        }
        return newest, [one.metadata(3).custom_metadata for one in (first, manager)]


@pytest.mark.parametrize("metadata", [None, {"lr": 0.1}])
def test_readers_without_the_policy_see_what_orbax_keeps(tmp_path, metadata):
    options = ckpt_orbax.CheckpointManagerOptions(max_to_keep=1, best_fn=lambda m: m["acc"])
    with ckpt_orbax.CheckpointManager(tmp_path, options=options) as manager:
        for step, acc in enumerate([0.9, 0.1, 0.95, 0.2]):
            args = ckpt_orbax.args.StandardSave({"w": np.ones(2) * step})
            manager.save(step, args=args, metrics={"acc": acc}, custom_metadata=metadata)
    newest, metadata_of_3 = readers(tmp_path)
    assert all(seen == 2 or seen == [2] for seen in newest.values()), newest
    assert metadata_of_3 == [metadata or {}] * 2
    with ckpt.Checkpointer(tmp_path) as native:  # it goes on from the step that stays for that
        restored = native.restore_latest(default={"w": np.zeros(2)})
        assert restored.step == 3
        native.save(4, default=restored["default"], metadata=restored.metadata)
    newest, _ = readers(tmp_path)
    assert newest["all"] == sorted(newest["steps"]) == [2, 4]
    shutil.copytree(tmp_path / "3", tmp_path / "copy" / "3")  # what is alone is shown
    assert ckpt_orbax.utils.checkpoint_steps(tmp_path / "copy") == [3]
    with ckpt_orbax.CheckpointManager(tmp_path / "copy", options=options) as manager:
        assert manager.latest_step() == 3


def test_a_step_that_is_saved_anew_is_seen_again(tmp_path):
    options = ckpt_orbax.CheckpointManagerOptions(max_to_keep=1, best_fn=lambda m: m["acc"])

    def save(step, acc):
        with ckpt_orbax.CheckpointManager(tmp_path, options=options) as manager:
            args = ckpt_orbax.args.StandardSave({"w": np.ones(2)})
            manager.save(step, args=args, metrics={"acc": acc})

    save(0, 0.5)
    save(1, 0.1)
    reading = ckpt_orbax.CheckpointManagerOptions(read_only=True)
    with ckpt_orbax.CheckpointManager(tmp_path, options=reading) as evaluator:
        assert evaluator.all_steps() == [0]
        save(1, 0.9)
        evaluator.reload()
        assert evaluator.all_steps() == [1]


@pytest.mark.parametrize("restart", [False, True])
def test_the_newest_step_stays_for_resuming(tmp_path, restart):
    policy = keeping.BestN(get_metric_fn=lambda m: m["loss"], n=1)
    checkpointer = ocp.training.Checkpointer(tmp_path, preservation_policy=policy)
    for step in range(3):
        checkpointer.save(step, {"w": step}, metrics={"loss": -step})
    if restart:
        checkpointer.close()
        checkpointer = ocp.training.Checkpointer(tmp_path, preservation_policy=policy)
    assert (checkpointer.latest.step, checkpointer.newest_step) == (0, 2)
    assert (checkpointer.load(), checkpointer.load(2)) == ({"w": 0}, {"w": 2})
    with ckpt.Checkpointer(tmp_path, read_only=True) as native:
        assert native.latest_step() == 2
    assert checkpointer.save(1, {"w": 5}, metrics={"loss": 5})  # goes on from step 0
    assert (checkpointer.latest.step, checkpointer.newest_step) == (1, 1)
    checkpointer.close()
