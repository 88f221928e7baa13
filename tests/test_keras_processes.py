"""Two processes of jax.distributed under keras.distribution: saved together, restored by any number."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("keras")

LIMIT_SECS = 240

CODE = """
import os, sys, json
directory, epochs, seed, count, index, port = sys.argv[1], *map(int, sys.argv[2:])
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
callback = OrbaxCheckpointCallback(directory, save_freq="epoch")
history = model.fit(x[share], y[share], batch_size=8 // count, epochs=epochs, shuffle=False, verbose=0, callbacks=[callback])
values = [np.asarray(v.value.addressable_data(0)).tobytes().hex() for v in model.variables + model.optimizer.variables]
print("REPORT" + json.dumps([history.epoch, values]), flush=True)
"""


def start(directory: Path, epochs: int, seed: int, count: int) -> list[Any]:
    """What each of ``count`` processes reported."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CODE]
            + [str(a) for a in (directory, epochs, seed, count, index, port)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    reports: list[Any] = []
    try:
        for child in children:
            out, err = child.communicate(timeout=LIMIT_SECS)
            assert child.returncode == 0, err[-3000:]
            (line,) = (line for line in out.splitlines() if line.startswith("REPORT"))
            reports.append(json.loads(line.removeprefix("REPORT")))
    finally:
        for child in children:
            child.kill()
    return reports


@pytest.mark.slow
def test_10_two_processes_save_and_go_on(tmp_path: Path):
    straight = start(tmp_path / "straight", 3, 0, 2)
    assert straight[0] == straight[1]
    assert [report[0] for report in start(tmp_path / "run", 2, 0, 2)] == [[0, 1]] * 2
    resumed = start(tmp_path / "run", 3, 5, 2)
    assert resumed[0][0] == [2]
    assert resumed[0][1] == straight[0][1] and resumed[1][1] == straight[0][1]
    (alone,) = start(tmp_path / "run", 3, 9, 1)
    assert alone == [[], straight[0][1]]
