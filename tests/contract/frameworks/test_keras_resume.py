"""Fits that go on where it is hard: no batch left, other batches, Ctrl-C, averaged weights; and data of Keras, torch or a
PyDataset, which keeps something from epoch to epoch.
"""

import gc
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
import ckpt_keras
from tests.support import forked, keras_models as km
from tests.support.children import environment
from tests.support.keras_models import Callback, OrbaxCheckpointCallback, Stop, keras, steps
from tests.support.paths import ROOT
from tests.support.py_datasets import ALL, Batches, Global, Labelled, Noisy, OwnGenerator, Says

compiled_once = km.compiled_once
pytestmark = [
    km.QUIET,
    pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning"),
    pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning"),
]


class Journal(Callback):
    """What callbacks are called with."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_epoch_begin(self, epoch, logs=None):
        self.calls.append(("epoch", epoch))

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append(("batch", batch))

    def on_test_end(self, logs=None):
        self.calls.append(("tested", logs["loss"]))

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append(("end", epoch, logs["loss"], logs.get("val_loss")))


def interrupted(model, callbacks, data=None, **arguments):
    with pytest.raises(KeyboardInterrupt):
        fit(model, callbacks, data, **arguments)


def fit(model, callbacks, data=None, **arguments):
    if data is None:
        return km.fit(model, callbacks, **arguments)
    return model.fit(data, verbose=0, callbacks=callbacks, **arguments)


def grain_data():
    grain = pytest.importorskip("grain.python")
    x, y = km.data()
    source = list(zip(x, y, strict=True))
    return grain.MapDataset.source(source).shuffle(3).to_iter_dataset().batch(8)


@pytest.mark.parametrize(("save_freq", "given"), [(3, False), (6, True)])
@pytest.mark.filterwarnings("error")
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning")
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_stopped_in_the_validation_of_data_of_unknown_length(tmp_path, given, save_freq):
    """Only the data know that the last batch was the last: every restart raised UnboundLocalError inside of Keras."""
    validation, journals = km.data(16), []

    def run(directory, seed, *others):
        data = grain_data()
        callback = OrbaxCheckpointCallback(
            directory, data=data if given else None, save_freq=save_freq, max_to_keep=None
        )
        model, journal = km.small(seed), Journal()
        journals.append(journal.calls)
        fit(model, [*others, journal, callback], data, epochs=2, validation_data=validation)
        return model

    km.goes_on(tmp_path, run, Stop(validation=0))
    all_calls, _, calls = journals
    # the epoch ends as it would have: with its validation and its logs, and no batch of it
    end = next(i for i, entry in enumerate(all_calls) if entry[0] == "tested")
    assert calls == [("epoch", 0), *all_calls[end:]]
    assert steps(tmp_path / "b") == steps(tmp_path / "a")


@pytest.mark.parametrize(
    ("now", "skipped", "text"),
    [
        (
            16,
            2,
            r"5 of 6 batches of 8 samples \(40 samples\).*after 2 of 3 batches of 16.*8 samples are",
        ),
        (4, 10, r"5 of 6 batches of 8 samples.*after 10 of 12 batches of 4 samples\. With"),
        (48, 0, r"after 0 of 1 batches of 48 samples; 40 samples are trained twice"),
    ],
)
def test_batches_of_another_size_go_on_at_the_same_samples(tmp_path, now, skipped, text):
    """Larger ones ended in UnboundLocalError, smaller ones trained samples twice without a word."""
    first = OrbaxCheckpointCallback(tmp_path, save_freq=1, save_on_background=False)
    interrupted(km.small(), [Stop(11), first], epochs=2)
    assert steps(tmp_path)[-1] == 11
    model, journal = km.small(1), Journal()
    callbacks = [journal, OrbaxCheckpointCallback(tmp_path, save_freq=1)]
    with pytest.warns(UserWarning, match=text):
        km.fit(model, callbacks, epochs=2, batch_size=now)
    batches = [entry[1] for entry in journal.calls if entry[0] == "batch"]
    assert batches == list(range(skipped, 48 // now))
    ends = [entry[1] for entry in journal.calls if entry[0] == "end"]
    assert ends == [1]


def test_after_an_exception_nothing_is_left(tmp_path):
    callback = OrbaxCheckpointCallback(tmp_path, save_freq=2)
    model = km.small()
    interrupted(model, [Stop(8), callback], epochs=2)
    gc.collect()
    callback.wait_until_finished()
    assert steps(tmp_path)[-1] == 8
    for each in threading.enumerate():
        if each.name.startswith("ckpt"):
            each.join(60)  # what notices the end may still be about to go
            assert not each.is_alive()
    straight = km.trained(km.small(), epochs=2)
    km.fit(model, [callback], epochs=2)  # and it goes on
    km.assert_same(km.values(straight), km.values(model))


KNOWN_AFTER = """
import os, signal, sys
from tests.support import keras_models as km
class Fail(km.keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise ValueError("of the user's own")
try:
    km.fit(km.small(), [Fail(), km.OrbaxCheckpointCallback(sys.argv[1])])
except ValueError:
    print("caught", flush=True)
for thread in __import__("threading").enumerate():
    if thread.name == "ckpt-keras-end":
        thread.join()
os.kill(os.getpid(), signal.SIGTERM)
print("still here", flush=True)
"""


def test_a_signal_after_a_fit_that_failed_ends_the_process(tmp_path):
    how = {"environment": environment(), "imported": ("keras",)}
    done = forked.run(KNOWN_AFTER, str(tmp_path), **how)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert "caught" in done.stdout and "still here" not in done.stdout


def test_save_interval_steps_and_keep_period(tmp_path):
    km.fit(km.small(), [OrbaxCheckpointCallback(tmp_path / "i", save_interval_steps=2)], epochs=6)
    assert steps(tmp_path / "i") == [0, 2, 4]
    callback = OrbaxCheckpointCallback(tmp_path / "k", max_to_keep=1, keep_period=3)
    km.fit(km.small(), [callback], epochs=6)
    assert steps(tmp_path / "k") == [0, 3, 5]


def averaged(seed, **arguments):
    return km.small(seed, keras.optimizers.Adam(use_ema=True, ema_momentum=0.5, **arguments))


@pytest.mark.parametrize(("first", "validation"), [(1, 0.25), (2, 0.0)])
def test_swapped_averages_go_on_exactly(tmp_path, first, validation):
    """At the end of an epoch the averages are in the model; the last epoch forgets what was trained."""

    def run(directory, seed, epochs):
        model = averaged(seed)
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        callbacks = [OrbaxCheckpointCallback(directory), swap] if directory else [swap]
        history = km.fit(model, callbacks, epochs=epochs, validation_split=validation)
        return model, history.history

    straight, logs = run(None, 0, 3)
    with_callback, same = run(tmp_path / "a", 0, 3)
    assert same == logs
    km.assert_same(km.values(straight), km.values(with_callback))
    ended, _ = run(tmp_path / "b", 0, first)
    # what is in the model after an epoch is what others get: the averages
    loaded = ckpt_keras.load_model(tmp_path / "b")
    averages = ([np.array(v.value) for v in one.trainable_variables] for one in (ended, loaded))
    km.assert_same(*averages)
    resumed, rest = run(tmp_path / "b", 1, 3)
    assert rest == {name: values[first:] for name, values in logs.items()}
    km.assert_same(km.values(straight), km.values(resumed))


@pytest.mark.parametrize("each_epoch", [True, False])
def test_ctrl_c_in_a_validation_and_the_same_callbacks_again(tmp_path, each_epoch):
    straight, arguments = averaged(0), {"epochs": 3, "validation_split": 0.25}
    swaps = [keras.callbacks.SwapEMAWeights(swap_on_epoch=each_epoch) for _ in range(2)]
    km.fit(straight, swaps[:1], **arguments)
    model = averaged(0)
    callbacks = [OrbaxCheckpointCallback(tmp_path, save_freq=3), swaps[1]]
    interrupted(model, [*callbacks, Stop(validation=1)], **arguments)
    km.fit(model, callbacks, **arguments)
    km.assert_same(km.values(straight), km.values(model))


def test_a_second_fit_with_averages(tmp_path):
    """The end of fit puts one buffer into weight and average, and Keras' next one donates it twice."""
    model, callback = averaged(0), OrbaxCheckpointCallback(tmp_path)
    km.fit(model, [callback])
    assert km.fit(model, [callback]).epoch == [0]
    assert steps(tmp_path) == [0, 1]


SCRIPT = ROOT / "tests/support/fit_with_processes.py"
Make = Callable[[], Any]


def train(
    directory: Path, make: Make, seed: int, *others: Any, save_freq: Any = 5, shuffle: bool = False
) -> Any:
    random.seed(seed)  # another process looks at batches in another order
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)
    model = km.small(seed)  # seeds numpy, too
    callback = ckpt_keras.OrbaxCheckpointCallback(directory, save_freq=save_freq)
    model.fit(make(), epochs=3, verbose=0, shuffle=shuffle, callbacks=[callback, *others])
    return model


def goes_on(directory: Path, make: Make, stop: int, **how: Any) -> None:
    km.goes_on(directory, lambda at, seed, *more: train(at, make, seed, *more, **how), Stop(stop))


@pytest.mark.parametrize(
    ("kind", "stop"),
    [
        pytest.param(Global, 17, marks=pytest.mark.always),
        (Global, 7),  # in the first epoch, before anything was seen to change
        (OwnGenerator, 12),
        (OwnGenerator, 30),
        (Noisy, 7),
        (Noisy, 17),
        (Says, 17),
    ],
)
def test_what_it_draws_and_shuffles_itself_goes_on(tmp_path, kind, stop):
    goes_on(tmp_path, kind, stop)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("kind", "workers", "stop", "how"),
    [
        (Global, 2, 17, {}),
        (Global, 2, 17, {"save_freq": "epoch"}),
        (Batches, 1, 15, {"save_freq": 1, "shuffle": True}),  # by Keras
        (Batches, 2, 17, {"save_freq": 1, "shuffle": True}),
        (Batches, 3, 12, {"save_freq": 1, "shuffle": True}),
    ],
)
def test_with_workers(tmp_path, kind, workers, stop, how):
    goes_on(tmp_path, lambda: kind(workers), stop, **how)


def loader() -> Any:
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(*map(torch.from_numpy, km.data()))
    return torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)


def test_a_torch_loader_is_shuffled_the_same(tmp_path):
    pytest.importorskip("torch")
    goes_on(tmp_path, loader, 8, save_freq=1, shuffle=True)


def test_with_processes_that_prepare_batches(tmp_path):
    """Killed in the second epoch, and started again."""

    def fit(directory: str, stop: int = 0) -> tuple[int, list[str]]:
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(tmp_path / directory), str(stop)],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        bits = [line for line in done.stdout.splitlines() if line.startswith("bits ")]
        assert bits or stop, done.stderr
        return done.returncode, bits

    straight = fit("straight")
    assert fit("killed", 20)[0] == -signal.SIGKILL
    assert ckpt.Checkpointer(tmp_path / "killed", read_only=True).all_steps()
    assert fit("killed") == straight


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", [list, np.array])
@pytest.mark.parametrize("stop", [7, 17])
def test_no_file_gets_the_label_of_another(tmp_path, kind, stop):
    """Whatever of it a step holds: the dataset itself looks at each batch."""
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, lambda: Labelled(kind), 0, Stop(stop))
    train(tmp_path, lambda: Labelled(kind), 1)
    assert ckpt.Checkpointer(tmp_path, read_only=True).latest_step() == 35


@pytest.mark.parametrize(("first", "then"), [(Global, Says), (Says, Global)])
def test_methods_that_came_or_went_are_said(tmp_path, first, then):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, first, 0, Stop(17))
    when = "before" if then is Says else "when"
    with pytest.warns(
        UserWarning, match=rf"saved {when} {then.__name__} had get_state\(\) .* not restored"
    ):
        train(tmp_path, then, 0)


class Table(Batches):
    """Stands for one that holds a table of another library, and shuffles it."""

    class Frame:
        def __reduce__(self) -> Any:
            return Table.Frame, (), np.random.permutation(ALL)

        def __setstate__(self, state: Any) -> None:
            pass

    frame = Frame()

    def on_epoch_end(self) -> None:
        self.frame = Table.Frame()


class Rows(Batches):
    """Shuffles the data itself."""

    images = np.arange(5 << 20, dtype=np.int32)

    def on_epoch_end(self) -> None:
        self.images = np.roll(self.images, 1)


@pytest.mark.parametrize(("kind", "name"), [(Table, "frame"), (Rows, "images")])
def test_what_no_step_holds_is_said_once(tmp_path, kind, name):
    with pytest.warns(UserWarning, match=rf"\.{name} changes from epoch to epoch") as caught:
        train(tmp_path, kind, 0, save_freq="epoch")
    said = [str(one.message) for one in caught if f".{name}" in str(one.message)]
    assert len(said) == 1 and "get_state() and set_state(state)" in said[0]


@pytest.mark.parametrize(
    ("make", "name"), [(Global, "PyDataset of Keras"), (loader, "DataLoader of torch has none")]
)
def test_as_data_they_get_the_true_reason(tmp_path, make, name):
    """It said "pass the same object to both", and it was the same."""
    data = make()
    callback = ckpt_keras.OrbaxCheckpointCallback(tmp_path, data=data)
    with pytest.raises(ckpt.CheckpointError, match=rf"{name}. Leave data= away"):
        km.small().fit(data, verbose=0, callbacks=[callback])
