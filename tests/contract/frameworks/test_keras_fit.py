"""The callback inside of ``fit``: saved, stopped, resumed."""

import contextlib
import errno
import json
import os
import signal
import sys
import threading

import jax
import numpy as np
import pytest

import ckpt_core as ckpt
import ckpt_keras
from tests.support import forked, keras_models as km, seams
from tests.support.children import environment
from tests.support.damage import flip
from tests.support.keras_models import Callback, OrbaxCheckpointCallback, Stop, keras, steps

compiled_once, pytestmark = km.compiled_once, km.QUIET


def progress(directory, step):
    return ckpt.load(directory / str(step))["fit"]


def resume(directory, epochs, model=None, **arguments):
    """The same line in what could be a new process: another model, a callback of its own."""
    model = model or km.small(99)
    history = km.fit(model, [OrbaxCheckpointCallback(directory, **arguments)], epochs=epochs)
    return model, history


@pytest.mark.parametrize("shuffle", [True, False])
def test_four_epochs_are_two_and_two(tmp_path, shuffle):
    straight = km.trained(km.small(), epochs=4, shuffle=shuffle)
    km.fit(km.small(), [OrbaxCheckpointCallback(tmp_path)], epochs=2, shuffle=shuffle)
    model = km.small(5)
    np.random.seed(123)  # a new process has other random numbers
    history = km.fit(model, [OrbaxCheckpointCallback(tmp_path)], epochs=4, shuffle=shuffle)
    assert history.epoch == [2, 3]
    km.assert_same(km.values(straight, metrics=True), km.values(model, metrics=True))


@pytest.mark.parametrize("batch", [9, 7])
def test_stopped_in_the_middle_of_an_epoch(tmp_path, batch):
    """Batches are shuffled and the epoch's means are running: both go on where they were."""
    straight = km.small()
    logs = km.fit(straight, epochs=3).history
    callback = OrbaxCheckpointCallback(tmp_path, save_freq=2)
    with pytest.raises(KeyboardInterrupt):
        km.fit(km.small(), [callback, Stop(batch)], epochs=3)
    callback.wait_until_finished()
    newest = steps(tmp_path)[-1]
    assert newest == (batch // 2) * 2
    model, history = resume(tmp_path, 3, save_freq=2)
    assert history.epoch == [1, 2]
    assert history.history == {name: values[1:] for name, values in logs.items()}
    km.assert_same(km.values(straight, metrics=True), km.values(model, metrics=True))


JOURNEY = """
import json, os, sys
import numpy as np
from tests.support.keras_models import OrbaxCheckpointCallback, data, keras, small

directory, epochs, kill, seed, where = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
model = small(seed)
stop = keras.callbacks.EarlyStopping(patience=50)
plateau = keras.callbacks.ReduceLROnPlateau(patience=1, min_delta=0.05)

class Kill(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == kill:
            callback.wait_until_finished()
            os.kill(os.getpid(), 9)

callback = OrbaxCheckpointCallback(directory, track=[stop, plateau])
history = model.fit(*data(64), epochs=epochs, batch_size=8, verbose=0, validation_split=0.25,
                    callbacks=[callback, stop, plateau, Kill()])
np.savez(where, *[np.array(v.value) for v in model.variables + model.optimizer.variables + model.metrics_variables])
print(json.dumps([history.epoch, callback.best, stop.wait, stop.best, plateau.wait]))
"""


@pytest.mark.always
def test_killed_and_started_again_it_ends_as_never_stopped(tmp_path, monkeypatch, capsys):
    """Trained three epochs and started again with seven, once after kill -9: as never stopped."""

    def arguments(directory, epochs, kill, seed, out):
        return [str(a) for a in (tmp_path / directory, epochs, kill, seed, tmp_path / out)]

    def run(*chosen):
        done = forked.run(
            JOURNEY, *arguments(*chosen), environment=environment(), imported=("keras",)
        )
        if done.returncode == -9:
            return None
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    assert run("run", 3, -1, 0, "three.npz")[0] == [0, 1, 2]
    assert run("run", 7, 5, 1, "none.npz") is None
    resumed = run("run", 7, -1, 2, "resumed.npz")
    assert resumed[0] == [5, 6]
    monkeypatch.setattr(sys, "argv", ["-c", *arguments("straight", 7, -1, 0, "straight.npz")])
    exec(JOURNEY, {})  # without a stop, which may as well be here
    straight = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert straight[0] == [0, 1, 2, 3, 4, 5, 6] and resumed[1:] == straight[1:]
    one, other = np.load(tmp_path / "straight.npz"), np.load(tmp_path / "resumed.npz")
    km.assert_same([one[k] for k in one], [other[k] for k in other])


def test_an_unbuilt_subclass_is_restored_when_fit_has_built_it(tmp_path):
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.one, self.drop, self.two = (
                keras.layers.Dense(3),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(2),
            )

        def call(self, x, training=False):
            return self.two(self.drop(self.one(x), training=training))

    def make(seed):
        keras.utils.set_random_seed(seed)
        model = Net()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
        return model

    straight = make(0)
    km.fit(straight, epochs=2)
    km.fit(make(0), [OrbaxCheckpointCallback(tmp_path)], epochs=1)
    second = make(1)
    assert not second.built and not second.optimizer.built
    km.fit(second, [OrbaxCheckpointCallback(tmp_path)], epochs=2)
    km.assert_same(km.values(straight), km.values(second))


def test_steps_per_execution_and_batches_between_saves(tmp_path):
    model = km.small(steps_per_execution=3)
    x, y = km.data(64)
    callback = OrbaxCheckpointCallback(tmp_path, save_freq=4, max_to_keep=None)
    model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[callback])
    # 8 batches in an epoch, in executions of 3, 3 and 2
    assert steps(tmp_path) == [6, 11, 16, 22]
    for step in steps(tmp_path):
        saved = ckpt.load(tmp_path / str(step))
        (optimizer,) = saved["pytree"]["optimizer_variables"].values()
        assert int(optimizer["iteration"]) == step
        assert saved["fit"]["batches"] == step
        assert saved["fit"]["epoch"] * 8 + saved["fit"]["batch"] == step


def test_batches_before_an_interrupt_do_not_count_for_the_next_fit(tmp_path):
    """Nothing was saved before it; then the process was to stop after fewer batches."""

    class Stopped(Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 2:
                signal.raise_signal(signal.SIGTERM)

    model, callback = km.small(), OrbaxCheckpointCallback(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        km.fit(model, [callback, Stop(4)])
    km.fit(model, [Stopped(), callback])
    assert (progress(tmp_path, 0)["batch"], progress(tmp_path, 0)["batches"]) == (3, 3)


def interrupted_inside_a_step(model, callback, nth, **arguments):
    """Ctrl-C while the compiled step runs: Keras has taken the arrays out of the model, and leaves none in it."""

    def train(state, batches):
        nonlocal nth
        result, nth = step(state, batches), nth - 1
        if nth < 0:
            raise KeyboardInterrupt
        return result

    step = model.make_train_function() or model.train_function
    model.train_function = train
    with pytest.raises(KeyboardInterrupt):
        km.fit(model, [callback], **arguments)
    model.train_function = step


@pytest.mark.parametrize("nth", [0, 2])
def test_ctrl_c_inside_a_step_and_the_same_model_again(tmp_path, nth):
    straight = km.trained(km.small(), epochs=2)
    model, callback = km.small(), OrbaxCheckpointCallback(tmp_path)
    km.fit(model, [callback])
    callback = OrbaxCheckpointCallback(tmp_path)
    interrupted_inside_a_step(model, callback, nth, epochs=2)
    assert km.fit(model, [callback], epochs=2).epoch == [1]
    km.assert_same(km.values(straight, metrics=True), km.values(model, metrics=True))


@pytest.mark.parametrize("nth", [0, 2])
def test_ctrl_c_inside_a_step_before_anything_was_saved(tmp_path, nth):
    model, callback = km.small(), OrbaxCheckpointCallback(tmp_path)
    interrupted_inside_a_step(model, callback, nth)
    for again in (
        lambda: km.fit(model, [callback]),
        lambda: ckpt_keras.save(tmp_path / "one", model),
    ):
        with pytest.raises(
            ckpt.CheckpointError, match=r"has no value: Ctrl-C.*goes on from.*create"
        ):
            again()


@pytest.mark.parametrize("point", ["write", "record", "commit", "committed"])
def test_ctrl_c_in_the_middle_of_a_save_and_the_cell_again(tmp_path, monkeypatch, point):
    def cell():
        callback = OrbaxCheckpointCallback(tmp_path, save_on_background=False, max_to_keep=None)
        return km.fit(model, [callback], epochs=3)

    straight = km.trained(km.small(), epochs=3)
    model = km.small()  # of an earlier cell
    with monkeypatch.context() as patch:
        moment, when = {"committed": ("commit", "after")}.get(point, (point, "before"))
        seams.at(patch, moment, nth=2, **{when: seams.fail(KeyboardInterrupt)})
        with pytest.raises(KeyboardInterrupt):
            cell()
    assert cell().epoch == ([2] if point == "committed" else [1, 2])
    assert steps(tmp_path) == [0, 1, 2]
    km.assert_same(km.values(straight, metrics=True), km.values(model, metrics=True))


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_failed_background_save_raises_out_of_fit(tmp_path, monkeypatch, epochs):
    def full(file):
        if threading.current_thread() is not threading.main_thread():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(file)

    sync = os.fsync
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        km.fit(km.small(), [OrbaxCheckpointCallback(tmp_path)], epochs=epochs)
    assert steps(tmp_path) == []


def test_a_signal_to_stop_saves_the_middle_of_the_epoch_and_ends_fit(tmp_path):
    class Stopped(Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if self.model.optimizer.iterations == 9:
                signal.raise_signal(signal.SIGTERM)

    straight = km.trained(km.small(), epochs=3)
    before = signal.getsignal(signal.SIGTERM)
    history = km.fit(km.small(), [Stopped(), OrbaxCheckpointCallback(tmp_path)], epochs=3)
    assert signal.getsignal(signal.SIGTERM) == before
    assert history.epoch == [0, 1] and steps(tmp_path) == [0, 1]
    assert progress(tmp_path, 1)["batch"] == 4  # noticed before the next batch
    model, history = resume(tmp_path, 3)
    assert history.epoch == [1, 2] and steps(tmp_path) == [0, 1, 2]
    assert progress(tmp_path, 1)["batch"] == 0  # the whole epoch took the place of its half
    km.assert_same(km.values(straight), km.values(model))


def test_a_second_fit_with_the_callback_is_not_shortened(tmp_path):
    model, callback = km.small(), OrbaxCheckpointCallback(tmp_path, max_to_keep=None)
    km.fit(model, [callback], epochs=2)
    assert km.fit(model, [callback], epochs=3).epoch == [0, 1, 2]
    assert steps(tmp_path) == [0, 1, 2, 3, 4]
    assert km.fit(model, epochs=2).epoch == [0, 1]


def test_a_script_with_two_fits_goes_on_in_the_second(tmp_path):
    def script(model, *, stop=None):
        callback = OrbaxCheckpointCallback(tmp_path, max_to_keep=None)
        epochs = [km.fit(model, [callback], epochs=2).epoch]
        extra = [] if stop is None else [Stop(stop)]
        try:
            epochs.append(km.fit(model, [callback, *extra], epochs=3).epoch)
        finally:
            callback.wait_until_finished()
        return epochs

    straight = km.trained(km.small(), epochs=2)
    km.fit(straight, epochs=3)
    with pytest.raises(KeyboardInterrupt):
        script(km.small(), stop=8)
    model = km.small(4)
    assert script(model) == [[], [1, 2]]
    km.assert_same(km.values(straight), km.values(model))


def test_fewer_epochs_than_done_do_nothing(tmp_path):
    km.fit(km.small(), [OrbaxCheckpointCallback(tmp_path)], epochs=3)
    before = {name: os.stat(tmp_path / name).st_mtime_ns for name in ("0", "1", "2")}
    with pytest.warns(
        UserWarning, match=r"nothing is trained.*3 epochs.*epochs=2.*epochs=4 or more"
    ):
        model, history = resume(tmp_path, 2)
    assert history.epoch == []
    assert {name: os.stat(tmp_path / name).st_mtime_ns for name in before} == before
    km.assert_same(km.values(km.load_model(tmp_path)), km.values(model))
    assert model._initial_epoch is None


def test_restore_false_refuses_a_directory_with_steps(tmp_path):
    km.fit(km.small(), [OrbaxCheckpointCallback(tmp_path)])
    model = km.small(1)
    before = km.values(model)
    with pytest.raises(ckpt.CheckpointExists, match="restore=False"):
        km.fit(model, [OrbaxCheckpointCallback(tmp_path, restore=False)])
    km.assert_same(before, km.values(model))


def test_another_save_freq_is_refused_in_words(tmp_path):
    km.fit(km.small(), [OrbaxCheckpointCallback(tmp_path)])
    with pytest.raises(ckpt.CheckpointError, match=r"count epochs.*save_freq=4 counts batches"):
        km.fit(km.small(), [OrbaxCheckpointCallback(tmp_path, save_freq=4)])


def test_a_damaged_step_is_skipped_and_written_again(tmp_path):
    straight = km.trained(km.small(), epochs=3)
    km.fit(km.small(), [OrbaxCheckpointCallback(tmp_path)], epochs=2)
    (data_file,) = (tmp_path / "1" / "pytree" / "d").iterdir()
    flip(data_file)
    with pytest.warns(RuntimeWarning, match="step 1 is damaged"):
        model, history = resume(tmp_path, 3)
    assert history.epoch == [1, 2]
    assert ckpt.verify(tmp_path / "1").ok
    km.assert_same(km.values(straight), km.values(model))


def test_a_learning_rate_that_a_later_callback_changes_is_on_disk(tmp_path):
    class Halve(Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 0.5

    km.fit(km.small(), [OrbaxCheckpointCallback(tmp_path), Halve()])
    (saved,) = ckpt.load(tmp_path / "0")["pytree"]["optimizer_variables"].values()
    assert float(saved["learning_rate"]) == 0.5


def test_a_scheduler_that_multiplies_is_applied_once(tmp_path):
    def scheduler():
        return keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr * 0.5)

    straight = km.trained(km.small(), [scheduler()], epochs=3)
    for order, save_freq in ((0, "epoch"), (1, "epoch"), (0, 3), (1, 3)):
        directory = tmp_path / f"{order} {save_freq}"
        for epochs in (2, 3):
            model = km.small(epochs - 2)
            both = [scheduler(), OrbaxCheckpointCallback(directory, save_freq=save_freq)]
            stops = [km.Stop(batches=10)] if (epochs, save_freq) == (2, 3) else []
            with pytest.raises(KeyboardInterrupt) if stops else contextlib.nullcontext():
                km.fit(model, [*both[:: -1 if order else 1], *stops], epochs=epochs)
        km.assert_same(km.values(straight), km.values(model))


@pytest.mark.parametrize("first", [True, False])
def test_early_stopping_and_plateau_are_resumed(tmp_path, first, caplog):
    def others():
        return [
            keras.callbacks.EarlyStopping("loss", patience=3, min_delta=10.0),
            keras.callbacks.ReduceLROnPlateau("loss", patience=2, cooldown=1, min_delta=10.0),
        ]

    def run(directory, epochs, seed=0):
        tracked = others()
        mine = OrbaxCheckpointCallback(directory, track=tracked)
        model = km.small(seed)
        callbacks = [mine, *tracked] if first else [*tracked, mine]
        history = km.fit(model, callbacks, epochs=epochs)
        states = {
            name: vars(tracked[0]).get(name, vars(tracked[1]).get(name))
            for name in ("wait", "best", "best_epoch", "stopped_epoch", "cooldown_counter")
        }
        return model, history.epoch, states | {"plateau": tracked[1].wait}

    straight, epochs, states = run(tmp_path / "a", 9)
    assert epochs == [0, 1, 2, 3]  # stopped early
    run(tmp_path / "b", 2)
    model, epochs, resumed = run(tmp_path / "b", 9, seed=3)
    assert epochs == [2, 3] and resumed == states
    km.assert_same(km.values(straight), km.values(model))
    again, epochs, resumed = run(tmp_path / "b", 9, seed=4)
    assert epochs == [] and resumed == states  # it was stopped, and stays so
    assert (
        "nothing to train, a callback in track= had stopped the training after epoch 4"
        in caplog.text
    )
    km.assert_same(km.values(straight), km.values(again))


@pytest.mark.filterwarnings("ignore:track holds a EarlyStopping:UserWarning")
def test_arguments_of_tracked_callbacks_are_those_of_the_code(tmp_path):
    stop = keras.callbacks.EarlyStopping("loss", patience=3)
    km.fit(km.small(), [OrbaxCheckpointCallback(tmp_path, track=[stop]), stop], epochs=2)
    stop = keras.callbacks.EarlyStopping("loss", patience=7)
    resume(tmp_path, 3, track=[stop])
    assert stop.patience == 7 and stop.best is not None


def test_what_is_saved_is_the_state_of_that_moment(tmp_path):
    """Keras donates its arrays to the next step; the save is still of the step before."""
    seen = {}

    class Look(Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch:
                seen[batch] = [np.array(v.value) for v in self.model.trainable_variables]

    km.fit(km.small(), [Look(), OrbaxCheckpointCallback(tmp_path, save_freq=1, max_to_keep=None)])
    for step in range(1, 6):
        tree = ckpt.load(tmp_path / str(step))["pytree"]["trainable_variables"]
        km.assert_same([*map(np.asarray, jax.tree.leaves(ordered(tree)))], seen[step])


def ordered(tree):
    """Leaves as a list in the order of the dictionaries, which jax would sort."""
    if not isinstance(tree, dict):
        return tree
    return [ordered(child) for child in tree.values()]


def test_the_model_is_touched_only_by_steps_that_save(tmp_path, monkeypatch):
    synced = []
    model = km.small()
    sync = model.jax_state_sync
    monkeypatch.setattr(
        model, "jax_state_sync", lambda: (synced.append(model._jax_state_synced), sync())
    )
    km.fit(model, [OrbaxCheckpointCallback(tmp_path, save_freq=3)], epochs=2)
    # twice an epoch: after 3 batches by us, and at its end by Keras
    assert synced.count(False) == 4


def test_another_callback_after_ctrl_c(tmp_path, monkeypatch):
    """The cell of a notebook, run again while the save before Ctrl-C is still being written."""
    straight = km.trained(km.small(0), epochs=2)
    again, reached, sync = threading.Event(), threading.Event(), os.fsync

    def late(file):
        if threading.current_thread() is not threading.main_thread():
            reached.set()
            assert again.wait(60)
        sync(file)

    class Again(Callback):
        def set_model(self, model):
            again.set()
            super().set_model(model)

    monkeypatch.setattr(os, "fsync", late)
    with pytest.raises(KeyboardInterrupt):
        km.fit(km.small(0), [OrbaxCheckpointCallback(tmp_path, save_freq=8), Stop(8)], epochs=2)
    assert reached.wait(60)
    second = km.small(1)
    callback = OrbaxCheckpointCallback(tmp_path, save_freq=8)
    history = km.fit(second, [Again(), callback], epochs=2)
    assert history.epoch == [1]  # from the eighth batch, and not from the first
    km.assert_same(km.values(straight), km.values(second))
