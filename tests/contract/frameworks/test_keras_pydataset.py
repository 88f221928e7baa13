"""A PyDataset that keeps something from epoch to epoch: its state, its generators, its indices; the rest is named."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
import ckpt_keras
from tests.support import keras_models as km
from tests.support.children import environment
from tests.support.paths import ROOT
from tests.support.py_datasets import ALL, Batches, Global, Labelled, Noisy, OwnGenerator, Says

SCRIPT = ROOT / "tests/support/fit_with_processes.py"
keras = km.keras
compiled_once = km.compiled_once
Make = Callable[[], Any]


class Stop(keras.callbacks.Callback):
    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def train(directory: Path, make: Make, seed: int, *others: Any, save_freq: Any = 5) -> Any:
    random.seed(seed)
    model = km.small(seed)  # seeds numpy, too
    callback = ckpt_keras.OrbaxCheckpointCallback(directory, save_freq=save_freq)
    model.fit(make(), epochs=3, verbose=0, shuffle=False, callbacks=[callback, *others])
    return model


def goes_on(directory: Path, make: Make, stop: int, save_freq: Any = 5) -> None:
    straight = train(directory / "a", make, 0, save_freq=save_freq)
    with pytest.raises(KeyboardInterrupt):
        train(directory / "b", make, 0, Stop(stop), save_freq=save_freq)
    resumed = train(directory / "b", make, 1, save_freq=save_freq)
    km.assert_same(km.values(straight), km.values(resumed))


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
def test_what_it_draws_and_shuffles_itself_goes_on(tmp_path: Path, kind: Make, stop: int) -> None:
    goes_on(tmp_path, kind, stop)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("save_freq", [5, "epoch"])
def test_with_workers(tmp_path: Path, save_freq: Any) -> None:
    goes_on(tmp_path, lambda: Global(2), 17, save_freq)


def test_with_processes_that_prepare_batches(tmp_path: Path) -> None:
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
def test_no_file_gets_the_label_of_another(tmp_path: Path, kind: Any, stop: int) -> None:
    """Whatever of it a step holds: the dataset itself looks at each batch."""
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, lambda: Labelled(kind), 0, Stop(stop))
    train(tmp_path, lambda: Labelled(kind), 1)
    assert ckpt.Checkpointer(tmp_path, read_only=True).latest_step() == 35


@pytest.mark.parametrize(("first", "then"), [(Global, Says), (Says, Global)])
def test_methods_that_came_or_went_are_said(tmp_path: Path, first: Any, then: Any) -> None:
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
def test_what_no_step_holds_is_said_once(tmp_path: Path, kind: Make, name: str) -> None:
    with pytest.warns(UserWarning, match=rf"\.{name} changes from epoch to epoch") as caught:
        train(tmp_path, kind, 0, save_freq="epoch")
    said = [str(one.message) for one in caught if f".{name}" in str(one.message)]
    assert len(said) == 1 and "get_state() and set_state(state)" in said[0]


def test_a_pydataset_as_data_gets_the_true_reason(tmp_path: Path) -> None:
    data = Global()
    callback = ckpt_keras.OrbaxCheckpointCallback(tmp_path, data=data)
    with pytest.raises(ckpt.CheckpointError, match=r"PyDataset of Keras. Leave data= away"):
        km.small().fit(data, verbose=0, callbacks=[callback])
