"""A PyDataset that keeps something from epoch to epoch: restored, or said where it cannot be."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
import ckpt_keras
from tests.support import keras_models as km
from tests.support.children import environment
from tests.support.paths import ROOT
from tests.support.py_datasets import ALL, Batches, Chosen, Drawn, Global, Labelled, Large, Names

SCRIPT = ROOT / "tests/support/fit_with_processes.py"
keras = km.keras
OrbaxCheckpointCallback = ckpt_keras.OrbaxCheckpointCallback
compiled_once = km.compiled_once


class OwnGenerator(Batches):
    def on_epoch_end(self) -> None:
        self.rng.shuffle(self.order)


class Caching(Global):
    """Keeps in a dict what it has read; Keras draws the first batch before fit begins."""

    def __init__(self, workers: int = 1) -> None:
        super().__init__(workers)
        self.cache: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        for place in self.order[index * 4 : index * 4 + 4]:
            self.cache.setdefault(int(place), self.x[place].copy())
        return super().__getitem__(index)


class Noisy(Batches):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + self.rng.random(x.shape).astype("f4"), y


class Says(Batches):
    """Has the two methods, which are then all that counts."""

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)

    def get_state(self) -> dict[str, Any]:
        return {"order": self.order}

    def set_state(self, state: dict[str, Any]) -> None:
        self.order = state["order"]


class Stop(keras.callbacks.Callback):
    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def train(directory: Any, make: Any, seed: int, *others: Any, save_freq: Any = 5) -> Any:
    random.seed(seed)
    model = km.small(seed)  # seeds numpy, too
    callback = OrbaxCheckpointCallback(directory, save_freq=save_freq)
    model.fit(make(), epochs=3, verbose=0, shuffle=False, callbacks=[callback, *others])
    return model


def goes_on(directory: Any, make: Any, stop: int, save_freq: Any = 5) -> None:
    straight = train(directory / "a", make, 0, save_freq=save_freq)
    with pytest.raises(KeyboardInterrupt):
        train(directory / "b", make, 0, Stop(stop), save_freq=save_freq)
    resumed = train(directory / "b", make, 1, save_freq=save_freq)
    km.assert_same(km.values(straight), km.values(resumed))


@pytest.mark.parametrize("kind", [Global, Names, Caching, Says])
def test_what_it_shuffles_itself_goes_on(tmp_path, kind):
    """20 of 23 variables had other bits: the order of the first epoch was taken again."""
    goes_on(tmp_path, kind, 17)


IN_THE_FIRST_EPOCH = (7, 12)


@pytest.mark.parametrize("kind", [Drawn, Chosen])
@pytest.mark.parametrize("stop", IN_THE_FIRST_EPOCH)
def test_other_places_than_were_drawn_for_the_first_epoch_are_named(tmp_path, kind, stop):
    """It went on with others and said nothing: none had changed yet, and places that come twice are no order."""
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, kind, 0, Stop(stop))
    with pytest.warns(UserWarning, match=rf"{kind.__name__}\.order had other elements") as caught:
        train(tmp_path, kind, 1)
    assert sum("had other elements" in str(one.message) for one in caught) == 1


@pytest.mark.parametrize("kind", [Drawn, Chosen])
def test_the_same_places_and_labels_are_not_named(tmp_path, kind):
    """A program that seeds its generators draws the same again; what comes after the first epoch is in the step."""

    def labelled() -> Batches:
        dataset = kind()
        dataset.labels, dataset.names = np.arange(ALL) % 3, ["a", "b"] * 24
        return dataset

    straight = train(tmp_path / "a", labelled, 0)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "b", labelled, 0, Stop(7))
    km.assert_same(km.values(straight), km.values(train(tmp_path / "b", labelled, 0)))


CHANGES = pytest.mark.filterwarnings("ignore:.*changes from epoch to epoch:UserWarning")


LABELS = {
    "int": Labelled.labels,
    "float": Labelled.labels.astype("f4"),
    "one-hot": np.eye(6, dtype="f4")[Labelled.labels],
    "list": Labelled.labels.tolist(),
    "tuple": tuple(Labelled.labels.tolist()),
    "texts": [f"class-{label}" for label in Labelled.labels],
    "boxes": [[int(label), 2 * int(label)] for label in Labelled.labels],
    "numpy's integers": list(Labelled.labels),
}


QUICK = ("int", "one-hot", "texts", "numpy's integers")


@pytest.mark.parametrize(
    "labels",
    [pytest.param(one, marks=[] if one in QUICK else pytest.mark.slow) for one in LABELS],
)
def test_files_keep_their_labels(tmp_path, labels):
    """Restarted in the first epoch, it had the saved order of the files, and that of this process of the labels: 123 of 164 were wrong."""
    kind = type("Labelled", (Labelled,), {"labels": LABELS[labels]})
    for stop in (7, 17):
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / f"{stop}", kind, 0, Stop(stop))
    with pytest.warns(
        UserWarning, match=r"Labelled\.files, Labelled\.labels had other elements or"
    ):
        train(tmp_path / "7", kind, 1)
    straight = train(tmp_path / "straight", kind, 0)
    km.assert_same(km.values(straight), km.values(train(tmp_path / "17", kind, 1)))


@CHANGES
def test_what_no_step_holds_holds_the_files_back(tmp_path):
    """They were put in the saved order, without the array; one that both have is no worse than another."""
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, Large, 0, Stop(17))
    with pytest.warns(
        UserWarning, match=r"Large\.labels had other .*Large\.files.* cannot be put .* without it"
    ):
        train(tmp_path, Large, 1)


class Plan(Batches):
    """Batches of places, made anew for each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.on_epoch_end()

    def on_epoch_end(self) -> None:
        self.plan: Any = self.rng.permutation(ALL).reshape(12, 4).tolist()

    def __getitem__(self, index: int) -> Any:
        return self.x[self.plan[index]], self.y[self.plan[index]]


def test_a_list_of_lists_that_is_made_anew_is_restored(tmp_path):
    """It was taken for another order of the same lists, and refused."""
    goes_on(tmp_path, Plan, 17)


class Part(Plan):
    def on_epoch_end(self) -> None:
        self.plan = self.rng.integers(0, ALL, (12, 4))


class NumbersOfNumpy(Plan):
    def on_epoch_end(self) -> None:
        self.plan = [list(row) for row in self.rng.integers(0, ALL, (12, 4))]


class Inside(Plan):
    def on_epoch_end(self) -> None:
        self.sampler = {"plan": self.rng.integers(0, ALL, (12, 4)).tolist()}
        self.plan = None

    def __getitem__(self, index: int) -> Any:
        places = self.sampler["plan"][index]
        return self.x[places], self.y[places]


@CHANGES
@pytest.mark.parametrize(
    ("kind", "name"), [(Part, "plan"), (NumbersOfNumpy, "plan"), (Inside, "sampler")]
)
def test_other_plans_of_the_first_epoch_are_named(tmp_path, kind, name):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, kind, 0, Stop(7))
    with pytest.warns(UserWarning, match=rf"{kind.__name__}\.{name} had other elements"):
        train(tmp_path, kind, 1)


class Once(Batches):
    """Draws its samples once, when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.order = self.rng.integers(0, ALL, ALL)


def test_what_never_changes_and_is_another_one_is_named_in_every_epoch(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, Once, 0, Stop(17))
    with pytest.warns(UserWarning, match=r"Once\.order had other elements"):
        train(tmp_path, Once, 1)


class AtTheBeginning(Batches):
    """Keras calls ``on_epoch_begin`` after the state is restored."""

    def __init__(self) -> None:
        super().__init__()
        self.on_epoch_begin()

    def on_epoch_begin(self) -> None:
        self.order = self.rng.integers(0, ALL, ALL)


class Counts(Batches):
    """Counts what is drawn: of samples that Keras draws to build the model, too."""

    def __init__(self) -> None:
        super().__init__()
        np.random.shuffle(self.order)
        self.hits = np.zeros(ALL, int)

    def __getitem__(self, index: int) -> Any:
        self.hits[self.order[index * 4 : index * 4 + 4]] += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", [AtTheBeginning, Counts])
def test_what_an_epoch_makes_itself_is_no_other_order(tmp_path, kind):
    goes_on(tmp_path, kind, 7)


def test_counts_of_batches_drawn_to_build_the_model_are_no_order(tmp_path):
    def train_unbuilt(directory: Any, seed: int, *others: Any) -> Any:
        random.seed(seed)
        keras.utils.set_random_seed(seed)
        model: Any = keras.Sequential([keras.layers.Dense(2)])
        model.compile("adam", "mse")
        callback = OrbaxCheckpointCallback(directory, save_freq=5)
        model.fit(Counts(), epochs=2, verbose=0, shuffle=False, callbacks=[callback, *others])
        return model

    straight = train_unbuilt(tmp_path / "a", 0)
    with pytest.raises(KeyboardInterrupt):
        train_unbuilt(tmp_path / "b", 0, Stop(7))
    km.assert_same(km.values(straight), km.values(train_unbuilt(tmp_path / "b", 1)))


@pytest.mark.parametrize(("first", "then"), [(Global, Says), (Says, Global)])
def test_methods_that_came_or_went_are_said(tmp_path, first, then):
    """Who followed the advice of a warning in the same directory lost the state, and the warning."""
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, first, 0, Stop(17))
    when = "before" if then is Says else "when"
    with pytest.warns(
        UserWarning, match=rf"saved {when} {then.__name__} had get_state\(\) .* not restored"
    ):
        train(tmp_path, then, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stop"),
    [
        (kind, stop)
        for kind in (Global, OwnGenerator, Drawn, Names, Caching, Noisy, Says)
        for stop in (*IN_THE_FIRST_EPOCH, 17, 30)
        # in the first epoch, what they draw or shuffle differs with the seed, and is named
        if kind not in (Drawn, Names) or stop not in IN_THE_FIRST_EPOCH
    ],
)
def test_every_kind_goes_on_from_everywhere(tmp_path, kind, stop):
    """Batch 7 is in the first epoch, before anything was seen to change."""
    goes_on(tmp_path, kind, stop)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("save_freq", [5, "epoch"])
def test_with_workers(tmp_path, save_freq):
    goes_on(tmp_path, lambda: Global(2), 17, save_freq)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "shuffled by Keras"])
def test_with_processes_that_prepare_batches(tmp_path, kind):
    """Killed in the second epoch, and started again."""

    def fit(directory: str, stop: int = 0) -> tuple[int, list[str]]:
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(tmp_path / directory), kind, str(stop)],
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


class Frame:
    """Stands for a table of another library, which is replaced by a shuffled one."""

    def __reduce__(self) -> Any:
        return Frame, (), np.random.permutation(ALL)

    def __setstate__(self, state: Any) -> None:
        pass


class Table(Batches):
    def __init__(self) -> None:
        super().__init__()
        self.frame = Frame()

    def on_epoch_end(self) -> None:
        self.frame = Frame()


class Rows(Batches):
    """Shuffles the data itself."""

    def __init__(self) -> None:
        super().__init__()
        self.images = np.arange(5 << 20, dtype=np.int32)

    def on_epoch_end(self) -> None:
        self.images = np.roll(self.images, 1)


@pytest.mark.parametrize(("kind", "what"), [(Table, "a Frame"), (Rows, "an array of 20 MiB")])
def test_what_no_step_holds_is_said_in_fit(tmp_path, kind, what):
    with pytest.warns(UserWarning, match=rf"{kind.__name__}\.\w+ changes .* is {what}") as caught:
        train(tmp_path, kind, 0, save_freq="epoch")
    said = [str(one.message) for one in caught if "changes from epoch" in str(one.message)]
    assert len(said) == 1 and "get_state() and set_state(state)" in said[0]


def test_a_pydataset_as_data_gets_the_true_reason(tmp_path):
    """It said "pass the same object to both", and it was the same."""
    data = Global()
    callback = OrbaxCheckpointCallback(tmp_path, data=data)
    with pytest.raises(ckpt.CheckpointError, match=r"PyDataset of Keras. Leave data= away"):
        km.small().fit(data, verbose=0, callbacks=[callback])
