"""A PyDataset that keeps something from epoch to epoch: restored, or said where it cannot be."""

from __future__ import annotations

import collections
import copy
import random
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
import ckpt_keras
from ckpt_keras import _attributes
from ckpt_keras._kept import Kept
from tests.support import keras_models as km
from tests.support.children import environment
from tests.support.paths import ROOT

SCRIPT = ROOT / "tests/support/fit_with_processes.py"
keras = km.keras
OrbaxCheckpointCallback = ckpt_keras.OrbaxCheckpointCallback
compiled_once = km.compiled_once
ALL = 48


class Batches(keras.utils.PyDataset):
    """Twelve batches; subclasses change the order of the samples."""

    def __init__(self, workers: int = 1) -> None:
        super().__init__(workers=workers, max_queue_size=4)
        self.x, self.y = km.data()
        self.order: Any = np.arange(ALL)
        self.rng: Any = np.random.default_rng(random.getrandbits(32))

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        part = [int(place) for place in self.order[index * 4 : index * 4 + 4]]
        return self.x[part], self.y[part]


class Global(Batches):
    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)


class OwnGenerator(Batches):
    def on_epoch_end(self) -> None:
        self.rng.shuffle(self.order)


class Drawn(Batches):
    """With replacement: each epoch has other elements, and not only another order."""

    def on_epoch_end(self) -> None:
        self.order = self.rng.integers(0, ALL, ALL)


class Chosen(Batches):
    """The same, as a list."""

    def on_epoch_end(self) -> None:
        self.order = random.choices(range(ALL), k=ALL)


class Names(Batches):
    def __init__(self, workers: int = 1) -> None:
        super().__init__(workers)
        self.samples = [(f"image-{place}", place) for place in range(ALL)]

    def on_epoch_end(self) -> None:
        random.shuffle(self.samples)
        self.order = [place for _, place in self.samples]


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


@pytest.mark.parametrize("kind", [Global, Names, Says])
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


class Labelled(Batches):
    """The most usual one: files and their labels, in two attributes that are shuffled alike."""

    labels: Any = np.arange(ALL) % 6

    def __init__(self) -> None:
        super().__init__()
        self.files: Any = [f"image-{place}" for place in range(ALL)]
        self.labels = copy.deepcopy(type(self).labels)

    def on_epoch_end(self) -> None:
        places = random.sample(range(ALL), ALL)
        self.files = [self.files[place] for place in places]
        if isinstance(self.labels, np.ndarray):
            self.labels = self.labels[places]
        else:
            self.labels = type(self.labels)(self.labels[place] for place in places)
        self.check()

    def __getitem__(self, index: int) -> Any:
        self.check()
        self.order = [int(name.removeprefix("image-")) for name in self.files]
        return super().__getitem__(index)

    def check(self) -> None:
        """Every file has its own label."""
        label = dict(
            zip((f"image-{place}" for place in range(ALL)), type(self).labels, strict=True)
        )
        assert all(
            np.array_equal(label[name], one)
            for name, one in zip(self.files, self.labels, strict=True)
        )


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


class Large(Labelled):
    """What is shuffled with the files is too large for a step."""

    labels: Any = np.zeros((ALL, 100_000), np.float32)


Large.labels[:, 0] = np.arange(ALL)


@CHANGES
def test_what_no_step_holds_holds_the_files_back(tmp_path):
    """They were put in the saved order, without the array; one that both have is no worse than another."""
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, Large, 0, Stop(17))
    with pytest.warns(
        UserWarning, match=r"Large\.files.*cannot be put.*together with Large\.labels"
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
        for kind in (Global, OwnGenerator, Drawn, Names, Noisy, Says)
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


# ------------------------------------------------------------------------- without fit


def kept_after(make: Any, epochs: int) -> tuple[Any, dict[str, Any]]:
    dataset = make()
    dataset.on_epoch_end()
    kept = Kept(dataset)
    for _ in range(epochs):
        dataset.on_epoch_end()
        kept.ended()
    return dataset, kept.state()["attributes"]


def test_the_data_itself_is_not_saved():
    for epochs in (0, 2):
        _, saved = kept_after(Global, epochs)
        assert set(saved) == {"order", "rng"}
    _, saved = kept_after(Batches, 2)
    assert set(saved) == {"rng"}


def test_an_order_is_one_of_what_is_there():
    """A run whose files were renamed trains on the new ones."""
    dataset, saved = kept_after(Names, 2)
    again = Names()
    again.samples[3] = ("renamed", 3)
    with pytest.warns(
        UserWarning, match=r"Names.samples is not as in the checkpoint \(48 elements"
    ):
        Kept(again).set({"attributes": {"samples": saved["samples"]}})
    assert ("renamed", 3) in again.samples

    same = Names()
    same.on_epoch_end()
    elements = {id(one) for one in same.samples}
    Kept(same).set({"attributes": saved})
    assert same.samples == dataset.samples and {id(one) for one in same.samples} == elements
    assert same.order == dataset.order


VALUES = [
    3,
    2.5,
    "text",
    None,
    np.float32(1.5),
    np.array([3, 1, 2]),
    np.array(["b", "a"]),
    np.ones((2, 2), np.float16),
    [3, 1, 2],
    (3, 1, 2),
    {"a": [1, 2]},
    random.Random(3),
    np.random.default_rng(3),
    np.random.RandomState(3),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("renewed", [False, True])
def test_values_come_back_with_their_types(value, renewed):
    held = _attributes.stored(value, renewed=renewed)
    assert held is not None
    back = _attributes.restored(copy.deepcopy(held), copy.deepcopy(value))
    assert type(back) is type(value)
    assert _attributes.seen(back).content == _attributes.seen(value).content


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([1, 2, 3], [1, 3, 2]),
        (np.arange(3), np.arange(3)[::-1]),
        (np.arange(5 << 20), np.arange(5 << 20)[::-1]),
        ({"a": 1}, {"a": 2}),
        ([[1], [2]], [[2], [1]]),
        (np.array([[1], None], object), np.array([None, [1]], object)),
    ],
)
def test_a_change_is_seen(before, after):
    assert _attributes.seen(before).content == _attributes.seen(copy.copy(before)).content
    assert _attributes.seen(before).content != _attributes.seen(after).content
    assert _attributes.seen(before).elements == _attributes.seen(after).elements or isinstance(
        before, dict
    )


@pytest.mark.parametrize(
    "value", [{"a": np.ones(2)}, [np.ones(2)], {1: [2]}, keras.layers.Dense(1)]
)
def test_what_stays_is_no_change(value):
    assert _attributes.seen(value).content == _attributes.seen(value).content


def test_a_change_inside_an_object_is_seen():
    class Sampler:
        def __init__(self) -> None:
            self.order = [1, 2, 3]

    sampler = Sampler()
    before = _attributes.seen(sampler)
    assert before.content == _attributes.seen(sampler).content
    sampler.order.reverse()
    assert before.content != _attributes.seen(sampler).content


def test_a_dataset_without_a_state_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = Kept(keras.utils.PyDataset())
        kept.ended()
        kept.set({})
    assert not any(kept.state().values())


class Places(Labelled):
    """Places beside labels that are shuffled, too, as nobody would; and what cannot be looked into."""

    def __init__(self) -> None:
        super().__init__()
        self.on_epoch_end()
        np.random.shuffle(self.order)


def test_places_are_set_in_the_first_epoch_if_nothing_else_differs():
    dataset = Places()
    state = Kept(dataset).state()
    assert set(state["attributes"]) == {"order", "rng"}
    assert set(state["constant"]) == {"x", "y", "files", "labels"}
    same = copy.deepcopy(dataset)
    order = same.order
    np.random.shuffle(order)
    Kept(same).set(state)
    assert same.order is order and np.array_equal(order, dataset.order)  # others may hold it, too

    again = Places()
    before = again.order.copy()
    what = r"Places.order cannot .* with Places.files, Places.labels, and all stay"
    with pytest.warns(UserWarning, match=what):
        Kept(again).set(state)
    assert np.array_equal(again.order, before)


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        collections.deque([1, 2]),
        [{1}],
        [collections.deque([1])],
        [object()],
        {"deep": {"deeper": {"deepest": {"still": {"deeper": [1]}}}}},
        np.array([[1], {2}, None], object),
    ],
    ids=range(7),
)
def test_what_cannot_be_looked_into_may_belong_to_an_order(value: Any):
    dataset = Batches()
    np.random.shuffle(dataset.order)
    dataset.labels = value
    assert _attributes.fingerprint(value) == _attributes.UNKNOWN
    state = Kept(dataset).state()
    Kept(copy.copy(dataset)).set(state)  # nothing moves
    again = copy.copy(dataset)
    again.order = dataset.order[::-1].copy()
    before = again.order.copy()
    with pytest.warns(UserWarning, match=r"Batches.order cannot .* with Batches.labels, and all"):
        Kept(again).set(state)
    assert np.array_equal(again.order, before)


def test_a_step_that_does_not_say_what_else_there_was_is_not_trusted_in_the_first_epoch():
    dataset = Labelled()
    dataset.on_epoch_end()
    held = _attributes.stored(dataset.files, renewed=False)
    again = Labelled()
    with pytest.warns(UserWarning, match=r"Labelled.files cannot .* what the step does not hold"):
        Kept(again).set({"attributes": {"files": held}, "drawn": {}})
    assert again.files == Labelled().files


def test_what_was_never_seen_to_change_does_not_hold_back_an_order():
    """Labels that were corrected between two runs, beside indices that are shuffled."""
    dataset = Global()
    dataset.on_epoch_end()
    kept = Kept(dataset)
    assert set(kept.state()["constant"]) == {"x", "y"}
    dataset.on_epoch_end()
    kept.ended()
    state, order = kept.state(), dataset.order.copy()
    again = Global()
    again.y[3] += 1
    with pytest.warns(UserWarning, match=r"Global\.y had other elements"):
        Kept(again).set(state)
    assert np.array_equal(again.order, order) and not np.array_equal(again.y, dataset.y)


def test_a_run_that_goes_on_is_in_no_first_epoch():
    _, order = kept_after(Names, 2)
    dataset = Names()
    dataset.on_epoch_end()
    kept = Kept(dataset)
    kept.set({"attributes": order, "constant": {}, "first_epoch": 0})
    state = kept.state()
    assert set(state["constant"]) == {"x", "y"} and not state["first_epoch"]
    assert {"samples", "order", "rng"} == set(state["attributes"])  # have not changed here, and do


def test_what_was_left_is_not_constant_in_the_next_step():
    """Killed twice: the second step had it as what never changes, and the third process set the order without it."""
    kept = Kept(dataset := Large())
    kept.set(
        {"attributes": {}, "constant": {}, "changing": {"labels": "1 reordered"}, "first_epoch": 0}
    )
    assert "labels" in kept.state()["changing"] and dataset is not None


class Raises:
    """An object whose attributes cannot be asked for, such as a dict with attributes, or a closed file."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class RaisesInSlots:
    __slots__ = ("never_set",)

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


WEIRD = {"raises": Raises(), "in a list": [Raises()], "in slots": RaisesInSlots()}


@pytest.mark.parametrize("value", WEIRD.values(), ids=WEIRD)
def test_what_raises_does_not_end_fit(value: Any):
    dataset = Batches()
    dataset.settings = value
    dataset.order = list(range(ALL))
    kept = Kept(dataset)
    state = kept.state()
    kept.ended()
    dataset.order.reverse()
    kept.leave_out_scratch(state)
    kept.state()


def test_tensors_that_numpy_does_not_take_are_no_error():
    torch = pytest.importorskip("torch")
    dataset = Batches()
    dataset.table = torch.ones(3, requires_grad=True)
    kept = Kept(dataset)
    kept.ended()
    assert kept.state()["constant"]["table"] == _attributes.UNKNOWN


def test_what_became_none_is_left_or_set():
    dataset = Batches()
    kept = Kept(dataset)
    dataset.order = None
    kept.ended()
    state = kept.state()
    again = Batches()
    Kept(again).set(state)
    assert again.order is None


def test_an_array_of_a_file_is_not_written(tmp_path: Path):
    file = np.memmap(tmp_path / "places", np.int64, "w+", shape=(4,))
    view = np.asarray(file)[:]
    assert not _attributes.put(view, np.ones(4, np.int64)) and not file.any()
    assert not _attributes.put(file, np.ones(4, np.int64)) and not file.any()
    assert _attributes.put(np.zeros(4), np.ones(4))


def test_files_that_are_others_hold_back_what_belongs_to_them():
    dataset, _ = kept_after(Labelled, 1)
    kept = Kept(dataset)
    kept._changing |= {"files", "labels"}
    state = kept.state()
    again = Labelled()
    again.files[3] = "renamed"
    before = again.labels.copy()
    with pytest.warns(UserWarning, match=r"Labelled\.") as caught:
        Kept(again).set(state)
    assert np.array_equal(again.labels, before) and again.files[3] == "renamed"
    said = [str(one.message) for one in caught]
    assert "Labelled.files is not as in the checkpoint" in said[0]
    assert "Labelled.labels cannot be put in the order of the checkpoint" in said[1]


def test_data_of_another_number_of_processes_is_not_compared():
    """Each has a part of it, and the warning of the callback says what goes on."""
    dataset, _ = kept_after(Batches, 1)
    state = Kept(dataset).state()
    again = Batches()
    again.y = again.y[:24]
    Kept(again).set(state | {"of_other_processes": 1})
    with pytest.warns(UserWarning, match=r"Batches\.y had other elements"):
        Kept(again).set(state)


class Table:
    """Holds what it has in slots."""

    __slots__ = ("columns",)

    def __init__(self, columns: Any) -> None:
        self.columns = columns


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2, 3], [1, 3, 2]),
        ((1, 2), (2, 1)),
        (np.arange(3), np.arange(3)[::-1]),
        (np.arange(3), np.arange(4)),
        (np.arange(3), np.arange(3.0)),
        (np.array(["a", None], object), np.array([None, "a"], object)),
        (np.arange(5 << 20), np.roll(np.arange(5 << 20), 1)),
        (list(range(1 << 21)), list(range(1 << 21))[::-1]),
        ([0] * 99_999 + [1], [1] + [0] * 99_999),
        ({"paths": ["a", "b"]}, {"paths": ["b", "a"]}),
        ({0: 1, 1: 2}, {0: 2, 1: 1}),
        (Table([1, 2]), Table([2, 1])),
        ([Table([1, 2])], [Table([2, 1])]),
        ([b"a", b"b"], [b"b", b"a"]),
        ([np.ones(2), np.zeros(2)], [np.zeros(2), np.ones(2)]),
        ([{"box": [1]}, {"box": [2]}], [{"box": [2]}, {"box": [1]}]),
        (["\ud800", "a"], ["a", "\ud800"]),
        # images with one border
        (
            [np.r_[np.zeros(6000), np.full(4000, one)] for one in (1, 2)],
            [np.r_[np.zeros(6000), np.full(4000, one)] for one in (2, 1)],
        ),
    ],
)
def test_fingerprints_tell_sequences_apart(one: Any, other: Any):
    assert _attributes.fingerprint(one) == _attributes.fingerprint(copy.copy(one))
    assert _attributes.fingerprint(one) not in (None, _attributes.fingerprint(other))


@pytest.mark.parametrize(
    "value",
    [
        3,
        "text",
        None,
        len,
        Batches,
        {},
        {"lr": 0.1},
        object(),
        np.random.default_rng(0),
        keras.layers.Dense(1),
    ],
)
def test_what_holds_no_samples_has_no_fingerprint(value: Any):
    assert _attributes.fingerprint(value) is None
