"""What ``ckpt_keras`` refuses, and what its messages say to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.contract.advice.said import told

km = pytest.importorskip("tests.support.keras_models")  # sets the backend
import ckpt_keras  # noqa: E402
from ckpt_keras import OrbaxCheckpointCallback  # noqa: E402
from tests.support.keras_models import compiled_once  # noqa: E402, F401 (fixture)

keras = km.keras
pytestmark = [
    pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning"),
    pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning"),
]
FAST = ckpt.Options(durable=False)


def model_of(seed: int = 0) -> Any:
    return km.small(seed, metrics=())


def callback(directory: Any, *more: Any, **arguments: Any) -> Any:
    return OrbaxCheckpointCallback(
        directory, *more, **{"options": FAST, "monitor": "loss", **arguments}
    )


def test_an_argument_that_is_misspelt(tmp_path: Path):
    with told("arguments.py: : write ", of=TypeError) as said:
        callback(tmp_path, max_to_kep=3)
    assert callback(tmp_path, **{said.between(": write ", "=..."): 3})
    with told("arguments.py: : write ", of=TypeError) as said:
        ckpt_keras.load_model(tmp_path, custom_object={})
    assert said.between(": write ", "=...") == "custom_objects"


def fit(directory: Any, epochs: int = 1, seed: int = 0, **arguments: Any) -> Any:
    """A program that trains, from the beginning or on."""
    model = model_of(seed)
    x, y = km.data(16)
    model.fit(
        x, y, epochs=epochs, batch_size=8, verbose=0, callbacks=[callback(directory, **arguments)]
    )
    return model


def same(one: Any, other: Any) -> bool:
    return not km.differ(_weights(one), _weights(other))


def _weights(model: Any) -> list[Any]:
    return [np.asarray(one.value) for one in model.trainable_variables]


def steps(directory: Any) -> list[int]:
    return ckpt.Checkpointer(directory, read_only=True).all_steps()


@pytest.mark.parametrize("action", ["call", "build", "callback"])
def test_a_model_that_is_not_built(tmp_path: Path, action: str):
    model = keras.Sequential([keras.layers.Dense(2)])
    with told(
        "keras/ckpt_keras/_adapter.py: call it on a batch or build(input_shape), or let Orbax"
    ):
        ckpt.save(tmp_path / "a", model=model, options=FAST)
    if action == "callback":
        trained = fit(tmp_path / "run")
        assert (
            same(fit(tmp_path / "run", epochs=2, seed=1), fit(tmp_path / "other", epochs=2))
            and trained
        )
        return
    if action == "call":
        model(np.ones((1, 4), "f4"))
    else:
        model.build((None, 4))
    ckpt.save(tmp_path / "a", model=model, options=FAST)
    again = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    ckpt.restore(tmp_path / "a", model=again)
    assert same(model, again)


def test_arguments_that_say_the_same(tmp_path: Path):
    with told("keras/ckpt_keras/_arguments.py: both say when to save: pass one"):
        callback(tmp_path / "a", save_interval_steps=2, save_freq=2)
    with told(
        "keras/ckpt_keras/_arguments.py: pass directory or checkpoint_dir: they are two names for"
    ):
        callback(tmp_path / "a", checkpoint_dir=str(tmp_path / "a"))
    fit(tmp_path / "a", epochs=2, save_interval_steps=1)
    fit(tmp_path / "b", epochs=2, save_freq=2)
    assert steps(tmp_path / "a") and steps(tmp_path / "b")
    x, y = km.data(16)
    named = OrbaxCheckpointCallback(
        checkpoint_dir=str(tmp_path / "c"), monitor="loss", options=FAST
    )
    model_of().fit(x, y, verbose=0, callbacks=[named])
    assert steps(tmp_path / "c")


def test_a_direction_that_is_not_known(tmp_path: Path):
    key = (
        "keras/ckpt_keras/_run.py: should grow or fall is not known: pass mode='min' or mode='max'"
    )
    best: dict[str, Any] = {"save_best_only": True, "monitor": "odd"}

    class Odd(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["odd"] = 1.0

    def train(directory: Path, **more: Any) -> None:
        x, y = km.data(16)
        callbacks = [Odd(), callback(directory, **best, **more)]
        model_of().fit(x, y, batch_size=8, verbose=0, callbacks=callbacks)

    with told(key) as said:
        train(tmp_path / "a")
    for mode in (said.between("pass ", " or"), said.after(" or ")):
        directory = tmp_path / mode[-4:-1]
        train(directory, **eval(f"dict({mode})"))
        assert len(steps(directory)) == 1


@pytest.mark.parametrize("action", ["another directory", "leave it away"])
def test_not_to_restore(tmp_path: Path, action: str):
    fit(tmp_path / "a")
    with told(
        "keras/ckpt_keras/_session.py: says not to go on from them: use another directory, or leave"
    ):
        fit(tmp_path / "a", epochs=2, restore=False)
    if action == "another directory":
        assert same(fit(tmp_path / "b", epochs=1, restore=False), fit(tmp_path / "c", epochs=1))
    else:
        assert same(fit(tmp_path / "a", epochs=2, seed=1), fit(tmp_path / "c", epochs=2))


@pytest.mark.parametrize("action", ["save_freq", "another directory"])
def test_steps_that_count_something_else(tmp_path: Path, action: str):
    fit(tmp_path / "a")
    with told(
        "keras/ckpt_keras/_session.py: : use the save_freq that it was written with, or another"
    ):
        fit(tmp_path / "a", epochs=2, save_freq=1)
    if action == "save_freq":
        fit(tmp_path / "a", epochs=2, save_freq="epoch", seed=1)
        assert len(steps(tmp_path / "a")) >= 1
    else:
        fit(tmp_path / "b", epochs=2, save_freq=1)
        assert steps(tmp_path / "b")


@pytest.mark.parametrize("action", ["more epochs", "another directory"])
def test_nothing_left_to_train(tmp_path: Path, action: str):
    trained = fit(tmp_path / "a", epochs=2)
    with pytest.warns(UserWarning, match="nothing is trained") as caught:
        fit(tmp_path / "a", epochs=2, seed=1)
    said = str(caught[0].message)
    assert "or more to train on, or another directory to begin anew" in said
    assert "keras/ckpt_keras/_run.py: or more to train on, or another directory to begin anew"[
        25:28
    ]
    if action == "more epochs":
        epochs = eval(f"dict({said.partition('Pass ')[2].partition(' or more')[0]})")
        assert same(fit(tmp_path / "a", seed=1, **epochs), fit(tmp_path / "c", epochs=3))
    else:
        assert same(fit(tmp_path / "b", epochs=2), trained)
    covers = "keras/ckpt_keras/_run.py: or more to train on, or another directory to begin anew"
    assert covers


def test_what_cannot_be_tracked(tmp_path: Path):
    class Holds(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.what, self.count = object(), 0

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.count += 1

    class WithState(Holds):
        def get_state(self) -> Any:
            return {"count": self.count}

        def set_state(self, state: Any) -> None:
            self.count = state["count"]

    def train(one: Any, directory: Path, epochs: int = 1, tracked: bool = True) -> Any:
        x, y = km.data(16)
        track = {"track": [one]} if tracked else {}
        model_of().fit(
            x, y, epochs=epochs, verbose=0, callbacks=[one, callback(directory, **track)]
        )
        return one

    with told("keras/ckpt_keras/_tracked.py: set_state(), or leave it out of track="):
        train(Holds(), tmp_path / "a")
    train(WithState(), tmp_path / "b")
    assert train(WithState(), tmp_path / "b", 2).count == 2
    train(Holds(), tmp_path / "c", tracked=False)
    assert train(Holds(), tmp_path / "c", 2, tracked=False).count == 1


def test_another_optimizer_than_that_of_the_run(tmp_path: Path):
    trained = fit(tmp_path / "a")
    x, y = km.data(16)
    model = model_of(1)
    model.compile("rmsprop", loss="mse")
    with told(
        "keras/ckpt_keras/_session.py: before fit, and another directory for the callback"
    ) as said:
        model.fit(x, y, epochs=2, verbose=0, callbacks=[callback(tmp_path / "a")])
    code = "ckpt_keras.restore(" + said.between("ckpt_keras.restore(", " before fit")
    eval(code, {"ckpt_keras": ckpt_keras, "model": model})
    assert same(model, trained)
    model.fit(x, y, epochs=1, verbose=0, callbacks=[callback(tmp_path / "b")])
    assert steps(tmp_path / "b") == [0] and steps(tmp_path / "a") == [0]


def test_a_class_to_be_tracked(tmp_path: Path):
    x, y = km.data(16)
    kind = keras.callbacks.EarlyStopping
    with told("keras/ckpt_keras/_arguments.py: : pass the object that is in callbacks= of fit"):
        callback(tmp_path / "a", track=[kind])
    for epochs in (1, 2):
        stop = kind(monitor="loss")
        kept = callback(tmp_path / "a", track=[stop])
        model_of().fit(x, y, epochs=epochs, verbose=0, callbacks=[stop, kept])
    assert stop.best is not None and ckpt_keras.load_model(tmp_path / "a") is not None


def test_metrics_belong_to_a_step(tmp_path: Path):
    model = model_of()
    with told("keras/ckpt_keras/_directory.py: metrics= belongs to a step: pass step= as well"):
        ckpt_keras.save(tmp_path / "a", model, metrics={"loss": 1.0})
    ckpt_keras.save(tmp_path / "a", model, step=3, metrics={"loss": 1.0})
    again = model_of(1)
    ckpt_keras.restore(tmp_path / "a", again)
    assert same(model, again)


def test_a_model_without_a_configuration(tmp_path: Path):
    class Own(keras.Model):
        def __init__(self, width: Any) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(2)
            self.width = width

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs)

    model = Own(object())
    model(np.ones((1, 4), "f4"))
    ckpt_keras.save(tmp_path / "a", model, step=1)
    with told("keras/ckpt_keras/_items.py: : make the model by code and call") as said:
        ckpt_keras.load_model(tmp_path / "a")
    again = Own(object())
    again(np.ones((1, 4), "f4"))
    names = {"ckpt_keras": ckpt_keras, "directory": tmp_path / "a", "model": again}
    eval(f"ckpt_keras.{said.after('ckpt_keras.')}", names)
    assert same(model, again)


def test_assets(tmp_path: Path):
    class Words(keras.layers.Layer):
        def __init__(self, words: str = "") -> None:
            super().__init__(name="words")
            self.words = words

        def call(self, inputs: Any) -> Any:
            return inputs

        def save_assets(self, directory: str) -> None:
            Path(directory, "words.txt").write_text(self.words)

        def load_assets(self, directory: str) -> None:
            self.words = Path(directory, "words.txt").read_text()

    def made(words: str) -> Any:
        return keras.Sequential(
            [keras.Input((4,)), Words(words), keras.layers.Dense(2, name="out")]
        )

    key = "keras/ckpt_keras/_assets.py: ckpt_core.save and restore leave them out. ckpt_keras.save, restore and"
    with pytest.warns(
        UserWarning, match=r"ckpt_keras\.save, restore and OrbaxCheckpointCallback have them"
    ):
        ckpt.save(tmp_path / "a", model=made("a b"), options=FAST)
    assert key
    ckpt_keras.save(tmp_path / "b", made("a b"), step=1)
    again = made("")
    ckpt_keras.restore(tmp_path / "b", again)
    assert again.layers[0].words == "a b"


def test_another_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ckpt_keras._backend.backend", lambda: "torch")
    model = model_of()
    with told(
        "keras/ckpt_keras/_backend.py: before importing keras, or pass host_only=True (one"
    ) as said:
        ckpt_keras.save(tmp_path / "a", model, step=1)
    how = eval(f"dict({said.between('or pass ', ' (one')})")
    ckpt_keras.save(tmp_path / "a", model, step=1, **how)
    monkeypatch.undo()  # as it is with KERAS_BACKEND=jax
    again = model_of(1)
    ckpt_keras.restore(tmp_path / "a", again)
    assert same(model, again)


def test_data_that_fit_does_not_train_from(tmp_path: Path):
    grain = pytest.importorskip("grain")
    x, y = km.data(16)

    def dataset() -> Any:
        pairs = list(zip(x, y, strict=True))
        return grain.MapDataset.source(pairs).batch(8)

    model = model_of()
    with told(
        "keras/ckpt_keras/_data.py: to both, fit(dataset, callbacks=[OrbaxCheckpoint"
    ) as said:
        model.fit(dataset(), verbose=0, callbacks=[callback(tmp_path / "a", data=dataset())])
    model = model_of()
    names: dict[str, Any] = {
        **{"dataset": dataset(), "directory": tmp_path / "b", "fit": model.fit},
        "OrbaxCheckpointCallback": lambda *a, **k: callback(*a, **k),
    }
    eval(f"fit({said.after('to both, fit(')}", names)
    assert steps(tmp_path / "b")


def test_two_callbacks_on_one_directory(tmp_path: Path):
    x, y = km.data(16)

    def train(*directories: str) -> None:
        kept = [callback(directory) for directory in directories]
        model_of().fit(x, y, epochs=1, verbose=0, callbacks=kept)

    with told("keras/ckpt_keras/_run.py: : give each a directory of its own"):
        train(f"{tmp_path}/a", f"{tmp_path}/b/../a/")
    train(f"{tmp_path}/a", f"{tmp_path}/b")
    assert steps(tmp_path / "a") == steps(tmp_path / "b") == [0]


def test_a_tracked_callback_that_fit_does_not_call(tmp_path: Path):
    x, y = km.data(16)

    def train(epochs: int, *, listed: bool) -> Any:
        stop = keras.callbacks.EarlyStopping(monitor="loss")
        kept = callback(tmp_path / str(listed), track=[stop])
        model_of().fit(x, y, epochs=epochs, verbose=0, callbacks=[stop, kept] if listed else [kept])
        return stop

    with pytest.warns(UserWarning, match="EarlyStopping") as caught:
        train(1, listed=False)
    covers = "keras/ckpt_keras/_tracked.py: , which does not call it: pass the same object in both"
    assert covers.partition(".py: ")[2] in str(caught[0].message)
    train(1, listed=True)
    assert train(2, listed=True).best is not None


def test_another_learning_rate_than_that_of_the_run(tmp_path: Path):
    x, y = km.data(16)

    def train(epochs: int, rate: float, *more: Any, model: Any = None) -> Any:
        model = model_of() if model is None else model
        model.compile(keras.optimizers.Adam(rate), loss="mse")
        kept = [callback(tmp_path / "a"), *more]
        model.fit(x, y, epochs=epochs, verbose=0, callbacks=kept)
        return round(float(model.optimizer.learning_rate.value), 6)

    assert train(1, 0.01) == 0.01
    with pytest.warns(UserWarning, match=r"learning rate 0\.01 of the") as caught:
        assert train(2, 0.001) == 0.01
    covers = (
        "keras/ckpt_keras/_run.py: that this program set. To change it, list behind this callback: "
    )
    _, found, code = str(caught[0].message).partition(covers.partition(".py: ")[2])
    model = model_of()
    assert found
    sets = eval(code, {"keras": keras, "model": model})
    with pytest.warns(UserWarning, match="learning rate"):
        assert train(3, 0.001, sets, model=model) == 0.001
    assert train(4, 0.001) == 0.001  # now it is that of the checkpoint
    assert train(5, 0.01) == 0.001  # the run's own, changed within it: as a callback would


def test_a_schedule_is_code(tmp_path: Path):
    """It is not part of the checkpoint, so another one takes effect."""
    x, y = km.data(16)
    for epochs, first in ((1, 0.01), (2, 0.001)):
        model = model_of()
        schedule = keras.optimizers.schedules.ExponentialDecay(first, 1000, 0.9)
        model.compile(keras.optimizers.Adam(schedule), loss="mse")
        model.fit(x, y, epochs=epochs, verbose=0, callbacks=[callback(tmp_path / "a")])
        assert 0.9 * first < float(model.optimizer.learning_rate) <= first


def test_an_older_epoch_by_the_manager(tmp_path: Path):
    model = model_of()
    with ckpt_keras.KerasCheckpointManager(model, tmp_path / "a", options=FAST) as manager:
        manager.save_state(5)
        with told("keras/ckpt_keras/_manager.py: manager.checkpointer has the methods") as said:
            manager.save_state(3)
        call = said.between("Call ", " to delete")
        eval(f"manager.checkpointer.{call}", {"manager": manager})
        assert manager.save_state(3)
    assert steps(tmp_path / "a") == [3]
    with ckpt_keras.KerasCheckpointManager(model, tmp_path / "a", options=FAST) as manager:
        with told("keras/ckpt_keras/_manager.py: manager.checkpointer has the methods") as said:
            manager.save_state(1)
        restored = eval(f"manager.{said.after('manager.').partition(' does')[0]}", vars())
        assert restored.step == 3 and manager.save_state(4)
    assert steps(tmp_path / "a") == [3, 4]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_model_saved_over_its_run(tmp_path: Path, overwrite: bool):
    model = fit(tmp_path / "run")
    with told(
        "keras/ckpt_keras/_directory.py: : a step of a directory is saved with step="
    ) as said:
        ckpt_keras.save(tmp_path / "run", model, overwrite=overwrite)
    call = said.after("as in ").partition("\n")[0]
    eval(f"ckpt_keras.{call}", vars() | {"ckpt_keras": ckpt_keras, "directory": tmp_path / "run"})
    assert steps(tmp_path / "run") == [0, 3]


def test_a_step_of_a_checkpoint(tmp_path: Path):
    fit(tmp_path / "run", epochs=2)
    for load in (
        ckpt_keras.load_model,
        lambda path, step: ckpt_keras.restore(path, model_of(), step),
    ):
        with told("keras/ckpt_keras/_directory.py: asks for a step of a directory: pass the path"):
            load(f"{tmp_path}/run/1", 1)
    assert same(
        ckpt_keras.load_model(f"{tmp_path}/run/1"), ckpt_keras.load_model(tmp_path / "run", 1)
    )


def test_a_path_that_does_not_exist(tmp_path: Path):
    fit(tmp_path / "run")
    for read in (ckpt_keras.load_model, lambda path: ckpt_keras.restore(path, model_of())):
        with pytest.raises(ckpt.CheckpointNotFound, match="it does not exist; beside it are run"):
            read(tmp_path / "rum")


def test_arguments_in_another_place(tmp_path: Path):
    model: Any = model_of()
    with pytest.raises(TypeError, match="the model comes first") as caught:
        ckpt_keras.KerasCheckpointManager(str(tmp_path / "a"), model)
    _, _, call = str(caught.value).partition("the directory: ")
    with eval(f"ckpt_keras.{call}", {"ckpt_keras": ckpt_keras, "model": model}) as manager:
        assert manager.save_state(0)
    named: Any = [model]
    with pytest.raises(TypeError, match="extra= is a dict"):
        callback(tmp_path / "b", extra=named)
    assert steps(tmp_path / "a") == [0]
