"""Several processes that load together a path which another program replaces get the old one or the new one, always."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.children import environment
from tests.support.launch import launch, reports

WRITER = """
import sys
import numpy as np
import ckpt_core as ckpt

options = ckpt.Options(durable=False)
number = 0
while True:
    number += 1
    state = {"a": np.full(5000, number), "b": [np.full(8, number), "text"], "c": np.full(300_000, number)}
    ckpt.save(sys.argv[1], state, overwrite=True, options=options, metadata={"number": number})
    print(number, flush=True)
"""
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
_COUNT = 25


@pytest.fixture(name="replaced")
def make_replaced(tmp_path: Path) -> Iterator[Path]:
    """A directory whose step 3 another process replaces all the time."""
    run, told = tmp_path / "run", tmp_path / "told"
    with told.open("w") as out:
        command = [sys.executable, "-c", WRITER, str(run / "3")]
        writer = subprocess.Popen(command, stdout=out, env=environment())
    try:
        deadline = time.monotonic() + 60
        while not told.read_text():
            assert writer.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        yield run
        assert writer.poll() is None, "the writer has failed"
    finally:
        writer.kill()
        writer.wait()


def test_processes_see_the_old_or_the_new_together(replaced: Path) -> None:
    code = READERS.replace("COUNT", str(_COUNT))
    first, second = (one["told"] for one in reports(launch(code, replaced)))
    failed = {
        name: (len(one[1]), one[1][0], len(two[1]), two[1][:1])
        for name, one in first.items()
        if (two := second[name])[1] or one[1]
    }
    assert not failed
    for name, (seen, _) in first.items():
        assert seen == second[name][0], name  # both have the same save
        assert len(set(seen)) > 3, f"{name}: it was hardly replaced meanwhile"
