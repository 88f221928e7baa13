"""Several processes that load together a path which another program replaces: one whole save on all, or a clear error."""

import pytest

from tests.support.launch import launch, reports
from tests.support.replacing import KINDS, replacing

READERS = """
jax.config.update("jax_enable_x64", True)
mesh = Mesh(jax.devices(), "d")
spread = NamedSharding(mesh, P("d"))
step = os.path.join(directory, "3")

def zeros(size):
    make = jax.jit(lambda: jax.numpy.zeros(size, "int64"), out_shardings=spread)
    return make()

target = {"a": zeros(5000), "b": [zeros(8), ""], "c": zeros(300_000)}

def numbers(state):
    found = set()
    for leaf in (state["a"], state["b"][0], state["c"]):
        for shard in getattr(leaf, "addressable_shards", None) or [leaf]:
            found |= set(np.unique(np.asarray(getattr(shard, "data", shard))).tolist())
    (one,) = found  # of one save
    return one

def checkpointer():
    with ckpt.Checkpointer(directory, read_only=True, options=options) as run:
        return numbers(run.restore(3, state=target)["state"])

def latest():
    with ckpt.Checkpointer(directory, read_only=True, options=options) as run:
        return numbers(run.restore_latest(state=target)["state"])

calls = {
    "load": lambda: numbers(ckpt.load(step, options=options)),
    "like": lambda: numbers(ckpt.load(step, target, options=options)),
    "async": lambda: numbers(ckpt.load_async(step, target, options=options).result()),
    "restore": lambda: numbers(ckpt.restore(step, state=target, options=options)["state"]),
    "atomic": lambda: numbers(ckpt.restore(step, state=target, options=ckpt.Options(timeout_secs=40, atomic_restore=True))["state"]),
    "broadcast": lambda: numbers(ckpt.load(step, target, options=ckpt.Options(timeout_secs=40, broadcast=True))),
    "step": checkpointer,
    "latest": latest,
}
told = {}
for name, call in calls.items():
    told[name] = []
    for _ in range(8):
        try:
            told[name].append(call())
        except ckpt.CheckpointNotFound:
            told[name].append(None)
        meet(f"{name} {len(told[name])}")
report(told=told)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_processes_see_one_save_together(tmp_path, kind):
    run = tmp_path / "run"
    with replacing(run / "3", tmp_path / "told", kind, size=8) as replaced:
        first, second = (one["told"] for one in reports(launch(READERS, run)))
        assert replaced() > 3
    assert first == second  # both have the same save
