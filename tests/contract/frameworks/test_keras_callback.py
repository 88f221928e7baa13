"""The callback's arguments, what it keeps, and data pipelines."""

import functools
import inspect

import jax
import numpy as np
import pytest

import ckpt_core as ckpt
import ckpt_keras
from tests.support import keras_models as km
from tests.support.keras_models import Callback, OrbaxCheckpointCallback, Stop, keras, steps
from tests.support.own import Own

compiled_once, pytestmark = km.compiled_once, km.QUIET
KerasCheckpointManager = ckpt_keras.KerasCheckpointManager


@pytest.fixture(autouse=True)
def reads_little_ahead(monkeypatch):
    """By default Grain reads 500 batches ahead, in 16 threads: twenty seconds of CPU for a fit of 16 batches."""
    try:
        from grain import ReadOptions
    except ImportError:
        return
    monkeypatch.setattr(ReadOptions.__init__, "__defaults__", (2, 8))
    assert ReadOptions() == ReadOptions(num_threads=2, prefetch_buffer_size=8)


class Report(Callback):
    """Puts given values of a metric into the logs."""

    def __init__(self, *values, name="val_loss"):
        super().__init__()
        self.values, self.name = list(values), name

    def on_epoch_end(self, epoch, logs=None):
        logs[self.name] = self.values[epoch]


def trained(directory, *others, epochs=1, **arguments):
    model = km.small()
    callback = OrbaxCheckpointCallback(directory, **arguments)
    km.fit(model, [*others, callback], epochs=epochs)
    return model, callback


def test_arguments_are_those_of_keras_and_more():
    theirs = inspect.signature(keras.callbacks.OrbaxCheckpoint.__init__).parameters
    ours = inspect.signature(OrbaxCheckpointCallback.__init__).parameters
    assert [name for name in theirs if name not in ours] == []
    assert list(ours)[: len(theirs)] == list(theirs)  # also by position
    for name in set(theirs) - {"self", "directory", "max_to_keep"}:
        assert ours[name].default == theirs[name].default, name


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"directory": None}, TypeError, "needs a directory"),
        ({"save_freq": "batch"}, ValueError, "save_freq must be 'epoch' or a number"),
        ({"save_freq": 0}, ValueError, "save_freq must be"),
        ({"save_freq": True}, ValueError, "save_freq must be"),
        ({"mode": "best"}, ValueError, "mode must be 'auto', 'min' or 'max'"),
        ({"max_to_keep": 0}, ValueError, "max_to_keep must be at least 1"),
        ({"max_to_keep": "3"}, TypeError, "max_to_keep must be a whole number or None, got '3'"),
        ({"track": [object()]}, TypeError, "track takes callbacks"),
        ({"track": 3}, TypeError, "track must be a list"),
        (
            {"track": [keras.callbacks.EarlyStopping]},
            TypeError,
            r"the class EarlyStopping: pass the object that is in callbacks= of fit",
        ),
        ({"extra": {"fit": 1}}, ValueError, "extra= cannot be called fit"),
        ({"checkpoint_dir": "b"}, TypeError, "two names for one thing"),
        ({"save_interval_steps": 0}, ValueError, "must be a number of steps from 1 on, got 0"),
        ({"keep_period": True}, ValueError, "keep_period must be a number of steps"),
        ({"save_interval_steps": 2, "save_freq": 3}, ValueError, "both say when to save"),
        ({"keep_period": 2, "max_to_keep": None}, ValueError, "keep_period needs max_to_keep"),
    ],
)
def test_bad_arguments_are_refused_in_words(arguments, error, text):
    with pytest.raises(error, match=text):
        OrbaxCheckpointCallback(**({"directory": "a"} | arguments))


def test_the_names_of_keras_guide(tmp_path):
    model = km.small()
    callback = OrbaxCheckpointCallback(
        model=model, checkpoint_dir=tmp_path / "a", max_to_keep=2, steps_per_epoch=6
    )
    km.fit(model, [callback], epochs=3)
    assert steps(tmp_path / "a") == [6, 12]
    callback = OrbaxCheckpointCallback(model, str(tmp_path / "b"), max_to_keep=2)
    km.fit(model, [callback], epochs=3)
    assert steps(tmp_path / "b") == [1, 2]


def test_the_manager_of_keras_guide(tmp_path):
    assert ckpt_keras.KerasOrbaxCheckpointManager is KerasCheckpointManager
    model = km.small()
    seen = []
    with KerasCheckpointManager(model, tmp_path, max_to_keep=2, steps_per_epoch=10) as manager:
        assert manager.restore_state() is None
        for epoch in range(3):
            km.scramble(model, epoch)
            seen.append(km.values(model))
            assert manager.save_state(epoch)
        assert manager.save_state(2) is False
        manager.wait_until_finished()
        assert manager.all_steps() == [10, 20] and manager.latest_step() == 20
    other = km.small(1)
    with KerasCheckpointManager(other, tmp_path, max_to_keep=None) as manager:
        assert manager.restore_state(10).step == 10
        km.assert_same(km.values(other), seen[1])
        with pytest.raises(ckpt.CheckpointNotFound):
            manager.restore_state(step=0)  # the guide's gives the newest
        assert manager.restore_state().step == 20
        km.assert_same(km.values(other), seen[2])
        with pytest.raises(ckpt.CheckpointExists):
            manager.save_state(2)


def test_verbose_shows_what_happens(tmp_path, capsys):
    trained(tmp_path, epochs=1)
    assert "step" not in capsys.readouterr().out
    trained(tmp_path, epochs=2, verbose=1)
    shown = capsys.readouterr().out
    assert "restored step 0" in shown and "epoch 2: saving step 1" in shown
    assert str(tmp_path) in shown


def test_save_on_background(tmp_path):
    class Look(Callback):
        def on_epoch_begin(self, epoch, logs=None):
            found.append(steps(tmp_path))

    found = []
    trained(tmp_path, Look(), save_on_background=False, epochs=2)
    assert found == [[], [0]]  # before the next epoch it is there


def test_save_weights_only(tmp_path):
    model, _ = trained(tmp_path, save_weights_only=True)
    info = ckpt.inspect(tmp_path / "0")
    tops = {leaf.path.split("/")[0] for leaf in info.items["pytree"].leaves}
    assert tops == {"trainable_variables", "non_trainable_variables"}
    other = km.small(1)
    ckpt_keras.restore(tmp_path, other, what="weights")
    km.assert_same(
        [np.array(v.value) for v in model.variables], [np.array(v.value) for v in other.variables]
    )
    with pytest.raises(ckpt.StructureMismatch, match="optimizer_variables"):
        ckpt_keras.restore(tmp_path, other)
    with pytest.warns(UserWarning, match="save_weights_only"):
        history = km.fit(other, [OrbaxCheckpointCallback(tmp_path)], epochs=2)
    assert history.epoch == [1]


@pytest.mark.filterwarnings("ignore:.*save_weights_only:UserWarning")
@pytest.mark.parametrize("weights_only", [True, False])
def test_extra_items_are_saved_and_restored(tmp_path, weights_only):
    def make(value):
        weight = keras.Variable(np.full((2,), value, "f4"), name="w")
        optimizer = keras.optimizers.SGD(momentum=0.9)
        optimizer.build([weight])
        return {"weight": weight, "words": Own(count=np.array(value)), "d_optimizer": optimizer}

    one, other = make(5), make(0)
    one["d_optimizer"].apply([np.ones((2,), "f4")], [one["weight"]])
    for epochs, extra in ((1, one), (2, other)):
        trained(tmp_path, save_weights_only=weights_only, extra=extra, epochs=epochs)
    assert other["words"].count == 5
    for name in ("weight", "d_optimizer"):
        found = [getattr(each[name], "variables", [each[name]]) for each in (one, other)]
        km.assert_same(*([np.array(v.value) for v in of] for of in found))


def test_a_callback_with_a_state_of_its_own_is_asked_for_it(tmp_path):
    class Counts(Callback):
        count = 0

        def on_epoch_end(self, epoch, logs=None):
            self.count += 1

        def get_state(self):
            return {"count": self.count}

        def set_state(self, state):
            self.count = state["count"]

    counts = Counts()
    trained(tmp_path, counts, track=[counts], epochs=2)
    counts = Counts()
    trained(tmp_path, counts, track=[counts], epochs=3)
    assert counts.count == 3


def test_what_cannot_be_tracked_is_named(tmp_path):
    class Holds(Callback):
        def __init__(self):
            super().__init__()
            self.lock = {1, 2}

    holds = Holds()
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"Holds.lock is a set"):
        trained(tmp_path, holds, track=[holds])


def test_best_is_kept_besides_the_latest(tmp_path):
    values = [3.0, 1.0, 2.0, 4.0, 5.0]
    _, callback = trained(tmp_path, Report(*values), epochs=5, max_to_keep=2)
    assert steps(tmp_path) == [1, 3, 4]
    assert callback.best == 1.0
    km.assert_same(km.values(km.load_model(tmp_path)), km.values(km.load_model(tmp_path, step=4)))
    assert ckpt.Checkpointer(tmp_path).metrics(1)["val_loss"] == 1.0


@pytest.mark.parametrize(
    ("mode", "values"), [("min", [3.0, 1.0, 2.0, 0.5]), ("max", [1.0, 3.0, 2.0, 4.0])]
)
def test_save_best_only_survives_a_restart(tmp_path, mode, values):
    arguments = {"save_best_only": True, "mode": mode, "max_to_keep": 1}
    trained(tmp_path, Report(*values), epochs=2, **arguments)
    assert steps(tmp_path) == [1]
    _, callback = trained(tmp_path, Report(*values), epochs=3, **arguments)
    assert steps(tmp_path) == [1]  # 2.0 is worse than what the first run had
    assert callback.best == values[1]
    trained(tmp_path, Report(*values), epochs=4, **arguments)
    assert steps(tmp_path) == [3]


def test_what_is_no_better_than_initial_value_threshold_is_not_saved(tmp_path):
    trained(
        tmp_path, Report(3.0, 1.0, 2.0), epochs=3, save_best_only=True, initial_value_threshold=2.5
    )
    assert steps(tmp_path) == [1]


def test_save_best_only_by_batches(tmp_path):
    model = km.small()
    callback = OrbaxCheckpointCallback(
        tmp_path, "loss", save_best_only=True, save_freq=2, max_to_keep=None
    )
    km.fit(model, [callback], epochs=2)
    losses = [ckpt.Checkpointer(tmp_path).metrics(step)["loss"] for step in steps(tmp_path)]
    assert losses == sorted(losses, reverse=True) and callback.best == losses[-1]


def test_save_best_only_without_the_metric_warns_and_saves_nothing(tmp_path):
    with pytest.warns(UserWarning, match="'val_loss', which is not among the metrics"):
        trained(tmp_path, save_best_only=True)
    assert steps(tmp_path) == []


@pytest.mark.parametrize(("monitor", "warns"), [({}, False), ({"monitor": "val_mae"}, True)])
def test_a_metric_that_never_comes_is_logged_if_it_was_asked_for(tmp_path, caplog, monitor, warns):
    """Without validation data there is no val_loss, which is only Keras' default."""
    trained(tmp_path, epochs=3, **monitor, mode="min")
    assert len(steps(tmp_path)) > 1
    assert ("no step has the metric" in caplog.text) == warns


def test_save_best_only_of_an_unknown_direction_is_refused(tmp_path):
    with pytest.raises(ValueError, match="pass mode='min' or mode='max'"):
        trained(tmp_path, Report(1.0, name="x"), monitor="x", save_best_only=True)


@pytest.mark.parametrize(
    ("monitor", "expected"), [("val_loss", [1, 4]), ("mae", [1, 4]), ("accuracy", [1, 3])]
)
def test_the_metric_says_which_direction_is_better_and_nan_is_never(tmp_path, monitor, expected):
    report = Report(float("nan"), 2.0, float("nan"), 3.0, 1.0, name=monitor)
    arguments = {"monitor": monitor, "save_best_only": True, "max_to_keep": None}
    trained(tmp_path, report, epochs=5, **arguments)
    assert steps(tmp_path) == expected


def grain_dataset(*, repeat, kind="map"):
    grain = pytest.importorskip("grain")
    dataset = grain.MapDataset.source([*zip(*km.data(), strict=True)]).seed(1).shuffle()
    if repeat:
        dataset = dataset.repeat()
    dataset = dataset.batch(8)
    return dataset if kind == "map" else dataset.to_iter_dataset()


ON_GRAIN = [
    pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning"),
    pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning"),
]


def on_grain(directory, seed, *others, kind="map", steps_per_epoch=4, epochs=4, **arguments):
    """Trains from a pipeline, which is repeated unless its epochs are whole ones."""
    dataset = grain_dataset(repeat=steps_per_epoch is not None, kind=kind)
    model = km.small(seed)
    callback = OrbaxCheckpointCallback(directory, data=dataset, **arguments)
    try:
        model.fit(
            dataset,
            epochs=epochs,
            steps_per_epoch=steps_per_epoch,
            verbose=0,
            callbacks=[callback, *others],
        )
    finally:
        callback.wait_until_finished()
    return model


class TestGrain:
    pytestmark = ON_GRAIN

    @pytest.mark.parametrize(("stop", "kind"), [(9, "map"), (8, "iter")])
    def test_it_goes_on_in_the_middle_of_an_epoch(self, tmp_path, kind, stop):
        """4 steps an epoch of 6 batches: epochs begin in the middle of the data."""
        run = functools.partial(on_grain, kind=kind, save_freq=3)
        straight, resumed = km.goes_on(tmp_path, run, Stop(stop))
        begun = (stop // 3) * 3 // 4
        assert resumed.history.epoch == [*range(begun, 4)]
        assert resumed.history.history["loss"] == straight.history.history["loss"][begun:]

    def test_whole_epochs(self, tmp_path):
        straight = on_grain(tmp_path / "a", 0, steps_per_epoch=None, epochs=3)
        on_grain(tmp_path / "b", 0, steps_per_epoch=None, epochs=2)
        model = on_grain(tmp_path / "b", 1, steps_per_epoch=None, epochs=3)
        km.assert_same(km.values(straight), km.values(model))

    def test_an_epoch_that_ends_where_a_save_is_due(self, tmp_path):
        """Of unknown length: that the sixth batch was the last is known only after it was saved."""
        options = {"steps_per_epoch": None, "save_freq": 3, "max_to_keep": None}
        straight = on_grain(tmp_path / "a", 0, epochs=2, **options)
        assert steps(tmp_path / "a") == [3, 6, 9, 12]
        on_grain(tmp_path / "b", 0, epochs=1, **options)
        assert steps(tmp_path / "b") == [3, 6]
        assert ckpt.load(tmp_path / "b" / "6")["fit"]["epoch"] == 1
        model = on_grain(tmp_path / "b", 1, epochs=2, **options)
        km.assert_same(km.values(straight), km.values(model))

    def test_keras_reads_a_batch_ahead(self, tmp_path, monkeypatch):
        """As on accelerators, where it draws the next batch before it trains: the saved position is behind."""
        monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
        km.goes_on(tmp_path, functools.partial(on_grain, epochs=3, save_freq=3), Stop(9))
        with pytest.raises(ckpt.CheckpointError, match="Pass the dataset itself"):
            trained(tmp_path / "c", data=iter(grain_dataset(repeat=True)))

    def test_an_iterator_of_ones_own(self, tmp_path):
        """A generator over the user's iterator; Keras peeks at two batches before training begins."""

        def run(directory, seed, epochs):
            iterator = iter(grain_dataset(repeat=True))

            def batches():
                yield from iterator

            model = km.small(seed)
            callback = OrbaxCheckpointCallback(directory, data=iterator)
            model.fit(batches(), epochs=epochs, steps_per_epoch=4, verbose=0, callbacks=[callback])
            return model

        straight = run(tmp_path / "a", 0, 3)
        run(tmp_path / "b", 0, 2)
        km.assert_same(km.values(straight), km.values(run(tmp_path / "b", 1, 3)))

    def test_two_callbacks_that_follow_the_data_are_refused(self, tmp_path):
        """The first one saved a position at the beginning of the data, without a word."""
        data = grain_dataset(repeat=True)
        both = [OrbaxCheckpointCallback(tmp_path / name, data=data) for name in "ab"]
        with pytest.raises(ckpt.CheckpointError, match="pass data= to the one that training"):
            km.small().fit(data, steps_per_epoch=4, verbose=0, callbacks=both)

    def test_data_that_fit_does_not_train_from_is_refused(self, tmp_path):
        with pytest.raises(ckpt.CheckpointError, match="pass the same object to both"):
            trained(tmp_path, data=grain_dataset(repeat=True))


def test_two_callbacks_in_one_fit(tmp_path):
    best = OrbaxCheckpointCallback(tmp_path / "best", "loss", save_best_only=True)
    trained(tmp_path / "all", best, epochs=2)
    assert steps(tmp_path / "all") == [0, 1] and 0 in steps(tmp_path / "best")
    again = OrbaxCheckpointCallback(tmp_path / "best", "loss", save_best_only=True)
    trained(tmp_path / "all", again, epochs=3)
    assert steps(tmp_path / "all") == [0, 1, 2]
