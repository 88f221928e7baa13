"""Keras on two real processes of four devices: killed in the middle of an epoch, resumed on two and on one of eight."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import launch, reports

os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported
pytest.importorskip("keras")

LIMIT_SECS = 300.0
EPOCHS = 3
KILLED_AT = 20
"""In the second epoch of 12 batches. The newest complete step is then that of 6, 12 or 18 batches: the bits are the same."""

MODEL = """
import logging
import keras
# What one set of processes compiles, the next ones find.
jax.config.update("jax_compilation_cache_dir", os.path.join(os.path.dirname(os.path.dirname(directory)), "programs"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
from ckpt_keras import OrbaxCheckpointCallback, load_model

def distribute(mesh):
    api = keras.distribution
    if mesh == "data":
        distribution = api.DataParallel(auto_shard_dataset=False)
        replicas = 8
    else:
        replicas, parts = map(int, mesh.split("x"))
        devices = api.DeviceMesh((replicas, parts), ("batch", "model"), api.list_devices())
        layouts = api.LayoutMap(devices)
        layouts[".*hidden.*kernel"] = (None, "model")
        layouts[".*hidden.*bias"] = ("model",)
        layouts[".*out.*kernel"] = ("model", None)
        distribution = api.ModelParallel(layout_map=layouts, batch_dim_name="batch", auto_shard_dataset=False)
    api.set_distribution(distribution)
    return count if replicas % count == 0 else 1  # into how many parts the processes divide a batch

def made():
    model = keras.Sequential([
        keras.Input((4,)),
        keras.layers.Dense(16, name="hidden"),
        keras.layers.Dropout(0.3, name="drop"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dense(8, name="out"),
    ])
    model.compile("adam", "mse", metrics=["mae"])
    return model

numbers = np.random.default_rng(0)
X, Y = numbers.random((96, 4)).astype("f4"), numbers.random((96, 8)).astype("f4")

class Batches(keras.utils.PyDataset):
    def __init__(self, divided, reorder):
        super().__init__()
        self.divided, self.reorder, self.order = divided, reorder, np.arange(12)
    def __len__(self):
        return 12
    def __getitem__(self, at):
        size = 8 // self.divided
        begin = int(self.order[at]) * 8 + (index % self.divided) * size
        return X[begin : begin + size], Y[begin : begin + size]
    def on_epoch_end(self):
        if self.reorder:
            np.random.shuffle(self.order)

def variables_of(model):
    return [*model.variables, *model.optimizer.variables]

def parts(model):
    # of each variable the parts that this process holds
    held = [sorted(v.value.addressable_shards, key=lambda shard: shard.device.id) for v in variables_of(model)]
    return [[np.asarray(shard.data).tobytes().hex() for shard in shards] for shards in held]

def whole(model):
    from jax.experimental.multihost_utils import process_allgather
    return [np.asarray(process_allgather(v.value, tiled=True)) for v in variables_of(model)]
"""

FIT = """
mesh, how, seed, killed_at, epochs, stopped = SETTINGS
divided = distribute(mesh)
keras.utils.set_random_seed(seed)
if "own order" in how:
    np.random.seed(100 * seed + index)  # as where the program seeds nothing: another one in each process

class Watch(keras.callbacks.Callback):
    trained = -1
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == stopped and index == count - 1:
            os.kill(os.getpid(), signal.SIGTERM)
            value_of = jax._src.distributed.global_state.client.blocking_key_value_get
            value_of("RECEIVED_PREEMPTION_NOTICE", 60_000)  # the service has it, and sends it to all
    def on_train_batch_begin(self, batch, logs=None):
        Watch.trained += 1
        if Watch.trained == killed_at:
            kill()
        if Watch.trained == 18 and "dump" in how:
            values = whole(self.model)
            if index == 0:
                np.savez(directory + ".dump.npz", *values)

said = []
class Words(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("ckpt_keras").addHandler(Words())

model = made()
callback = OrbaxCheckpointCallback(directory, **{"save_freq": 6, "max_to_keep": None, "options": options} | ARGUMENTS)
history = model.fit(Batches(divided, "own order" in how), epochs=epochs, verbose=0, shuffle=False, callbacks=[callback, Watch()])
values = [value.tobytes().hex() for value in whole(model)]
report(epochs=history.epoch, parts=parts(model), values=values, words="".join(said))
"""


def fit(
    directory: Path,
    mesh: str,
    processes: int,
    *,
    how: str = "",
    seed: int = 0,
    killed_at: int = -1,
    epochs: int = EPOCHS,
    stopped: int = -1,
    **arguments: Any,
) -> list[dict[str, Any]]:
    """What the processes of one program report, of eight devices together; nothing of those that were killed."""
    directory.parent.mkdir(exist_ok=True)
    settings = (mesh, how, seed, killed_at, epochs, stopped)
    code = MODEL + FIT.replace("SETTINGS", repr(settings)).replace("ARGUMENTS", repr(arguments))
    ended = launch(
        code,
        directory,
        processes=processes,
        devices=8 // processes,
        limit_secs=LIMIT_SECS,
        imported=("keras",),
    )
    if killed_at < 0:
        return reports(ended)
    assert all(process.status < 0 for process in ended), [process.text[-2000:] for process in ended]
    return []


def test_what_a_process_shuffles_is_its_own(tmp_path):
    """A save was refused where numpy's generators differ, as they do unless the program seeds them alike."""
    straight = fit(tmp_path / "straight" / "run", "2x4", 2, how="own order")
    fit(tmp_path / "killed" / "run", "2x4", 2, how="own order", killed_at=KILLED_AT)
    resumed = fit(tmp_path / "killed" / "run", "2x4", 2, how="own order", seed=5)
    assert resumed[0]["epochs"][-1] == EPOCHS - 1 and straight[0]["epochs"] == [0, 1, 2]
    assert [one["parts"] for one in resumed] == [one["parts"] for one in straight]


BY_HAND = """
# What the processes had after 18 batches, without ckpt: trained on batch by batch.
divided = distribute({mesh!r})
model = made()
model.optimizer.build(model.trainable_variables)
saved = np.load(directory + ".dump.npz")
for place, variable in enumerate(variables_of(model)):
    variable.assign(saved[f"arr_{place}"])
batches = Batches(divided, False)
for trained in range(18, 36):
    model.train_on_batch(*batches[trained % 12])
report(parts=parts(model))
"""

LOADED = """
model = load_model(directory)  # no mesh, one device
assert model.layers[0].kernel.value.sharding.device_set == {jax.devices()[0]}
report(values=[value.tobytes().hex() for value in whole(model)])
"""


@pytest.mark.parametrize("mesh", ["data", "2x4", "4x2", "1x8"])
def test_killed_and_resumed_on_two_and_on_one(tmp_path, mesh):
    """With "1x8" the parts of one weight lie in both processes, and both feed the whole batch."""
    straight = fit(tmp_path / "straight" / "run", mesh, 2, how="dump")
    killed = tmp_path / "killed" / "run"
    fit(killed, mesh, 2, killed_at=KILLED_AT, save_on_background=False)
    shutil.copytree(killed, tmp_path / "copy" / "run")

    on_two = fit(killed, mesh, 2, seed=5)
    assert on_two[0]["epochs"] == [1, 2]
    assert [one["parts"] for one in on_two] == [one["parts"] for one in straight]
    (loaded,) = run(MODEL + LOADED, killed, devices=1)
    assert loaded["values"] == on_two[0]["values"] == on_two[1]["values"]

    # One process adds up gradients in another order than two, so it is compared with itself.
    (on_one,) = fit(tmp_path / "copy" / "run", mesh, 1, seed=6)
    (by_hand,) = run(MODEL + BY_HAND.replace("{mesh!r}", repr(mesh)), tmp_path / "straight" / "run")
    assert on_one["epochs"] == [1, 2]
    assert on_one["parts"] == by_hand["parts"]


def run(code: str, directory: Path, *, devices: int = 8) -> list[dict[str, Any]]:
    """What one process reports."""
    ended = launch(
        code, directory, processes=1, devices=devices, limit_secs=LIMIT_SECS, imported=("keras",)
    )
    return reports(ended)


def test_another_number_of_processes_says_whose_random_state_it_takes(tmp_path):
    directory = tmp_path / "run" / "run"
    fit(directory, "data", 2, how="own order", killed_at=KILLED_AT, save_on_background=False)
    (one,) = fit(directory, "data", 1, how="own order")
    assert "saved by 2 processes, and 1 run now" in one["words"], one["words"]


@pytest.mark.parametrize("frequency", ["epoch", pytest.param(1000, marks=pytest.mark.always)])
def test_all_stop_at_the_end_of_one_epoch(tmp_path, frequency):
    """One of them gets the signal; with a number of batches nothing would be due then, and it is saved."""
    how: dict[str, Any] = {"save_freq": frequency}
    one, other = fit(tmp_path / "run" / "run", "data", 2, epochs=9, stopped=1, **how)
    assert one["epochs"] == other["epochs"] and one["values"] == other["values"]
    assert one["epochs"] in ([0, 1], [0, 1, 2])
    epochs = len(one["epochs"])
    (alone,) = fit(tmp_path / "run" / "run", "data", 1, epochs=epochs, seed=5, **how)
    assert alone["epochs"] == [] and alone["values"] == one["values"]
