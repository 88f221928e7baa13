"""A PyDataset that keeps something from epoch to epoch: its state, its generators, its indices; the rest is named.

And what Keras or torch shuffles.
"""

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
compiled_once, Stop = km.compiled_once, km.Stop
Make = Callable[[], Any]
pytestmark = [
    km.QUIET,
    pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning"),  # of loaders
]


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
