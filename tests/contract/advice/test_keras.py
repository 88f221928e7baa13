"""What ``ckpt_keras`` refuses, and what its messages say to do."""

from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
import ckpt_keras
from tests.contract.advice.said import FAST, told
from tests.support import keras_models as km

keras, compiled_once, steps = km.keras, km.compiled_once, km.steps
pytestmark = [
    pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning"),
    pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning"),
]


def model_of(seed: int = 0) -> Any:
    return km.small(seed, metrics=())


def callback(directory: Any, *more: Any, **arguments: Any) -> Any:
    arguments = {"options": FAST, "monitor": "loss", **arguments}
    return ckpt_keras.OrbaxCheckpointCallback(directory, *more, **arguments)


def fit(directory: Any, epochs: int = 1, seed: int = 0, **arguments: Any) -> Any:
    """A program that trains, from the beginning or on."""
    model = model_of(seed)
    x, y = km.data(16)
    model.fit(
        x, y, epochs=epochs, batch_size=8, verbose=0, callbacks=[callback(directory, **arguments)]
    )
    return model


def same(one: Any, other: Any) -> bool:
    weights = ([np.asarray(each.value) for each in of.trainable_variables] for of in (one, other))
    return not km.differ(*weights)


@pytest.mark.parametrize("action", ["call", "build", "callback"])
def test_a_model_that_is_not_built(tmp_path, action):
    model = keras.Sequential([keras.layers.Dense(2)], name="nothing_yet")
    with told(
        "call it on a batch or build(input_shape), or let Orbax", of=ckpt.CheckpointError
    ) as said:
        ckpt.save(tmp_path / "a", model=model, options=FAST)
    assert "not built" in said.after("nothing_yet")
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


@pytest.mark.parametrize("action", ["another directory", "leave it away"])
def test_not_to_restore(tmp_path, action):
    fit(tmp_path / "a")
    with told("says not to go on from them: use another directory, or leave"):
        fit(tmp_path / "a", epochs=2, restore=False)
    if action == "another directory":
        assert same(fit(tmp_path / "b", epochs=1, restore=False), fit(tmp_path / "c", epochs=1))
    else:
        assert same(fit(tmp_path / "a", epochs=2, seed=1), fit(tmp_path / "c", epochs=2))


@pytest.mark.parametrize("action", ["more epochs", "another directory"])
def test_nothing_left_to_train(tmp_path, action):
    trained = fit(tmp_path / "a", epochs=2)
    with pytest.warns(UserWarning, match="nothing is trained") as caught:
        fit(tmp_path / "a", epochs=2, seed=1)
    said = str(caught[0].message)
    assert "or more to train on, or another directory to begin anew" in said
    if action == "more epochs":
        epochs = eval(f"dict({said.partition('Pass ')[2].partition(' or more')[0]})")
        assert same(fit(tmp_path / "a", seed=1, **epochs), fit(tmp_path / "c", epochs=3))
    else:
        assert same(fit(tmp_path / "b", epochs=2), trained)


def test_another_optimizer_than_that_of_the_run(tmp_path):
    trained = fit(tmp_path / "a")
    x, y = km.data(16)
    model = model_of(1)
    model.compile("rmsprop", loss="mse")
    with told("before fit, and another directory for the callback") as said:
        model.fit(x, y, epochs=2, verbose=0, callbacks=[callback(tmp_path / "a")])
    code = "ckpt_keras.restore(" + said.between("ckpt_keras.restore(", " before fit")
    eval(code, {"ckpt_keras": ckpt_keras, "model": model})
    assert same(model, trained)
    model.fit(x, y, epochs=1, verbose=0, callbacks=[callback(tmp_path / "b")])
    assert steps(tmp_path / "b") == [0] and steps(tmp_path / "a") == [0]


def test_another_learning_rate_than_that_of_the_run(tmp_path):
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
    covers = "that this program set. To change it, list behind this callback: "
    _, found, code = str(caught[0].message).partition(covers)
    model = model_of()
    assert found
    sets = eval(code, {"keras": keras, "model": model})
    with pytest.warns(UserWarning, match="learning rate"):
        assert train(3, 0.001, sets, model=model) == 0.001
    assert train(4, 0.001) == 0.001  # now it is that of the checkpoint
    assert train(5, 0.01) == 0.001  # the run's own, changed within it: as a callback would


def test_an_older_epoch_by_the_manager(tmp_path):
    model = model_of()
    with ckpt_keras.KerasCheckpointManager(model, tmp_path / "a", options=FAST) as manager:
        manager.save_state(5)
        with told("manager.checkpointer has the methods") as said:
            manager.save_state(3)
        call = said.between("Call ", " to delete")
        eval(f"manager.checkpointer.{call}", {"manager": manager})
        assert manager.save_state(3)
    assert steps(tmp_path / "a") == [3]
    with ckpt_keras.KerasCheckpointManager(model, tmp_path / "a", options=FAST) as manager:
        with told("manager.checkpointer has the methods") as said:
            manager.save_state(1)
        restored = eval(f"manager.{said.after('manager.').partition(' does')[0]}", vars())
        assert restored.step == 3 and manager.save_state(4)
    assert steps(tmp_path / "a") == [3, 4]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_model_saved_over_its_run(tmp_path, overwrite):
    model = fit(tmp_path / "run")
    with told(": a step of a directory is saved with step=") as said:
        ckpt_keras.save(tmp_path / "run", model, overwrite=overwrite)
    call = said.after("as in ").partition("\n")[0]
    eval(f"ckpt_keras.{call}", vars() | {"ckpt_keras": ckpt_keras, "directory": tmp_path / "run"})
    assert steps(tmp_path / "run") == [0, 3]


def test_a_step_of_a_checkpoint(tmp_path):
    fit(tmp_path / "run", epochs=2)
    for load in (
        ckpt_keras.load_model,
        lambda path, step: ckpt_keras.restore(path, model_of(), step),
    ):
        with told("asks for a step of a directory: pass the path"):
            load(f"{tmp_path}/run/1", 1)
    assert same(
        ckpt_keras.load_model(f"{tmp_path}/run/1"), ckpt_keras.load_model(tmp_path / "run", 1)
    )
