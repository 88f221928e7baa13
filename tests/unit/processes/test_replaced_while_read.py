"""Several processes that load together a path which another program replaces get the old one or the new one, always."""

from __future__ import annotations

from pathlib import Path

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
    call()
    failed, seen = [], []
    for _ in range(COUNT):
        try:
            seen.append(call())
        except Exception as error:
            failed.append(f"{type(error).__name__}: {error}"[:300])
    told[name] = seen, failed
report(told=told)
"""


@pytest.mark.parametrize("count", [8, pytest.param(25, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_processes_see_the_old_or_the_new_together(tmp_path: Path, kind: str, count: int) -> None:
    run = tmp_path / "run"
    code = READERS.replace("COUNT", str(count))
    with replacing(run / "3", tmp_path / "told", kind, size=8):
        first, second = (one["told"] for one in reports(launch(code, run)))
    failed = {
        name: (len(one[1]), one[1][0], len(two[1]), two[1][:1])
        for name, one in first.items()
        if (two := second[name])[1] or one[1]
    }
    assert not failed
    for name, (seen, _) in first.items():
        assert len(seen) == count, name
        assert seen == second[name][0], name  # both have the same save
        assert len(set(seen)) > 3, f"{name}: it was hardly replaced meanwhile"
