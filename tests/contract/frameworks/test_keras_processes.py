"""Two processes of jax.distributed under keras.distribution stop together, and any number goes on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import launch, reports

os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported
pytest.importorskip("keras")

CODE = """
import keras
from ckpt_keras import OrbaxCheckpointCallback

epochs, seed, frequency, stopped = SETTINGS
keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
keras.utils.set_random_seed(seed)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(2)])
model.compile("adam", "mse", metrics=["mae"])
rng = np.random.default_rng(0)
x, y = rng.random((32, 4)).astype("f4"), rng.random((32, 2)).astype("f4")
share = slice(index * 32 // count, (index + 1) * 32 // count)

class Stopped(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == stopped and index == count - 1:
            os.kill(os.getpid(), signal.SIGTERM)
            value_of = jax._src.distributed.global_state.client.blocking_key_value_get
            value_of("RECEIVED_PREEMPTION_NOTICE", 60_000)  # the service has it, and sends it to all

callbacks = [OrbaxCheckpointCallback(directory, save_freq=frequency), Stopped()]
history = model.fit(x[share], y[share], batch_size=8 // count, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
variables = model.variables + model.optimizer.variables
values = [np.asarray(v.value.addressable_data(0)).tobytes().hex() for v in variables]
report(epochs=history.epoch, values=values)
"""


def fit(directory: Path, processes: int, *settings: Any) -> list[dict[str, Any]]:
    code = CODE.replace("SETTINGS", repr(settings))
    return reports(
        launch(code, directory, processes=processes, limit_secs=240.0, imported=("keras",))
    )


@pytest.mark.parametrize("frequency", ["epoch", pytest.param(1000, marks=pytest.mark.always)])
def test_all_stop_at_the_end_of_one_epoch(tmp_path: Path, frequency: str | int) -> None:
    """One of them gets the signal; with a number of batches nothing would be due then, and it is saved."""
    one, other = fit(tmp_path / "run", 2, 9, 0, frequency, 1)
    assert one == other
    assert one["epochs"] in ([0, 1], [0, 1, 2])
    (alone,) = fit(tmp_path / "run", 1, len(one["epochs"]), 5, frequency, -1)
    assert alone == {"epochs": [], "values": one["values"]}
