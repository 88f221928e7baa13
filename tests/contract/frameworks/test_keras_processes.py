"""Two processes of jax.distributed under keras.distribution: saved together, restored by any number."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked
from tests.support.children import with_devices
from tests.support.ports import free_port

os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported
pytest.importorskip("keras")

LIMIT_SECS = 240

CODE = """
import os, sys, json, signal
directory, epochs, seed, count, index, port = sys.argv[1], *map(int, sys.argv[2:7])
os.environ["KERAS_BACKEND"] = "jax"
import jax
if count > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=count, process_id=index)
import keras, numpy as np
from ckpt_keras import OrbaxCheckpointCallback

keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
keras.utils.set_random_seed(seed)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(2)])
model.compile("adam", "mse", metrics=["mae"])
rng = np.random.default_rng(0)
x, y = rng.random((32, 4)).astype("f4"), rng.random((32, 2)).astype("f4")
share = slice(index * 32 // count, (index + 1) * 32 // count)
frequency, stopped = sys.argv[7], int(sys.argv[8])
callback = OrbaxCheckpointCallback(directory, save_freq=int(frequency) if frequency.isdigit() else frequency)
class Stopped(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == stopped and index == count - 1:
            os.kill(os.getpid(), signal.SIGTERM)
            value_of = jax._src.distributed.global_state.client.blocking_key_value_get
            value_of("RECEIVED_PREEMPTION_NOTICE", 60_000)  # the service has it, and sends it to all
history = model.fit(x[share], y[share], batch_size=8 // count, epochs=epochs, shuffle=False, verbose=0, callbacks=[callback, Stopped()])
values = [np.asarray(v.value.addressable_data(0)).tobytes().hex() for v in model.variables + model.optimizer.variables]
print("REPORT" + json.dumps([history.epoch, values]), flush=True)
"""


def start(
    directory: Path, epochs: int, seed: int, count: int, frequency: str = "epoch", stopped: int = -1
) -> list[Any]:
    """What each of ``count`` processes reported; the last one gets SIGTERM in the epoch ``stopped``."""
    port = free_port()
    environment = with_devices(2)
    directory.parent.mkdir(exist_ok=True)
    files = [directory.parent / f"{directory.name}.{port}.{index}" for index in range(count)]
    children: list[forked.Forked | forked.Spawned] = []
    reports: list[Any] = []
    try:
        for index, file in enumerate(files):
            arguments = (directory, epochs, seed, count, index, port, frequency, stopped)
            child = forked.start(
                CODE,
                *map(str, arguments),
                output=file,
                environment=environment,
                imported=("keras",),
            )
            children.append(child)
        for child, file in zip(children, files, strict=True):
            code = child.wait(LIMIT_SECS)
            text = file.read_text()
            assert code == 0, text[-3000:]
            (line,) = (line for line in text.splitlines() if line.startswith("REPORT"))
            reports.append(json.loads(line.removeprefix("REPORT")))
    finally:
        for child in children:
            child.end()
    return reports


@pytest.mark.slow
def test_two_processes_save_and_go_on(tmp_path: Path):
    straight = start(tmp_path / "straight", 3, 0, 2)
    assert straight[0] == straight[1]
    assert [report[0] for report in start(tmp_path / "run", 2, 0, 2)] == [[0, 1]] * 2
    resumed = start(tmp_path / "run", 3, 5, 2)
    assert resumed[0][0] == [2]
    assert resumed[0][1] == straight[0][1] and resumed[1][1] == straight[0][1]
    (alone,) = start(tmp_path / "run", 3, 9, 1)
    assert alone == [[], straight[0][1]]


@pytest.mark.parametrize("frequency", [pytest.param("epoch", marks=pytest.mark.slow), "1000"])
def test_all_stop_at_the_end_of_one_epoch(tmp_path: Path, frequency: str):
    """One of them gets the signal; with a number of batches nothing would be due then, and it is saved."""
    reports = start(tmp_path / "run", 9, 0, 2, frequency, stopped=1)
    assert reports[0] == reports[1]
    epochs, values = reports[0]
    assert epochs in ([0, 1], [0, 1, 2])
    (alone,) = start(tmp_path / "run", len(epochs), 5, 1, frequency)
    assert alone == [[], values]
